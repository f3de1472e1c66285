"""Rows of Arrow batches as the arguments of a producer.

Invariant: a row is written whole or is an error: nothing is left out but what Spark's own Kafka sink leaves out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import repeat
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from exactlyonce.pipeline.errors import RecordError

if TYPE_CHECKING:
    from pyarrow import RecordBatch

BY_KEY = -1
"""The partition that leaves it to the client: by the key, as Java's clients do, else any."""


def rows(batch: RecordBatch, columns: Mapping[str, int], topic: str) -> Iterator[tuple[Any, ...]]:
    """(topic, value, key, partition, headers) of every row; *columns* are those that there are."""
    lists = {name: _column(batch, name, place).to_pylist() for name, place in columns.items()}
    values = lists["value"]
    keys = lists.get("key") or repeat(None)
    topics = repeat(topic) if topic else _named(lists["topic"])
    partitions = [BY_KEY if each is None else each for each in lists["partition"]] if "partition" in lists else None
    headers = [_pairs(each) for each in lists["headers"]] if "headers" in lists else None
    if partitions is None and headers is None:
        return zip(topics, values, keys)  # noqa: B905 - topics and keys may be endless
    return zip(topics, values, keys, partitions or repeat(BY_KEY), headers or repeat([]))  # noqa: B905 - so may these


def _column(batch: RecordBatch, name: str, place: int) -> pa.Array:
    """What a producer would encode is taken as bytes, which Arrow has already."""
    column = batch.column(place)
    if name in ("value", "key") and pa.types.is_string(column.type):
        return column.cast(pa.binary())
    if name in ("value", "key") and pa.types.is_large_string(column.type):
        return column.cast(pa.large_binary())
    return column


def _named(topics: list[str | None]) -> list[str | None]:
    if None in topics:
        raise RecordError(
            f"Row {topics.index(None) + 1} of a batch has no topic. Set the option topic, or fill the column."
        )
    return topics


def _pairs(headers: list[Mapping[str, Any] | None] | None) -> list[tuple[str, bytes | None]]:
    pairs = []
    for each in headers or ():
        if each is None or each["key"] is None:
            raise RecordError(
                "A header of a row is null, or its key is: a header has a name. Leave it out of the array."
            )
        pairs.append((each["key"], each["value"]))
    return pairs

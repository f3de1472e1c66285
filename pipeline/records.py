"""A value with its key and place: the record of ``KafkaSource.records(...)``, which a Kafka sink also takes."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")


class Record(msgspec.Struct, Generic[T], frozen=True, gc=False):
    """A value with its key and place; a Kafka sink writes the value under this key with these headers.

    ``Record(key="ann", value=None)`` is a tombstone for "ann". For output, key and value are enough.
    """

    value: T
    key: Any = None
    """bytes, or a value of the source's `key=`; None for a null key."""
    timestamp_ms: int | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    topic: str = ""
    partition: int = -1
    offset: int = -1


key_of_message: Callable[[Any], Any] = attrgetter("key")
"""The key of a `Record`: the key of the rows of a table."""

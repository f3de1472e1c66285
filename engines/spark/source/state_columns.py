"""The state of one operator as Arrow batches.

Invariant: a row has the value of its key, or there is an error that names the key: states of an older version are shown
as today's only by the pipeline's own migrations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql import types as spark
from pyspark.sql.pandas.types import to_arrow_schema

from exactlyonce.engines.savepoints.kept_state import KeptEntry, portions
from exactlyonce.engines.spark.source.state_types import SparkColumn, Unfit, as_json, column
from exactlyonce.pipeline.errors import RecordError
from exactlyonce.state.state_type import StateType, joined

BATCH_ENTRIES = 10_000
BATCH_BYTES = 16 * 1024 * 1024


class Columns:
    """Makes the rows. *key* is the schema of the keys; *written* and *version* are those of the newest states, *today*
    is what the pipeline makes of them, if it is known."""

    def __init__(
        self,
        operator: str,
        checkpoint: int,
        *,
        key: Any,
        written: Any,
        version: int,
        today: StateType[Any] | None,
        in_json: bool,
    ) -> None:
        self._operator, self._checkpoint = operator, checkpoint
        self._written, self._version, self._today = written, version, today
        shown = written if today is None else today.schema
        self._key, self._value = (as_json(each) if in_json else column(each) for each in (key, shown))
        self.schema = (
            spark.StructType()
            .add("key", self._key.type)
            .add("value", self._value.type)
            .add("key_group", spark.IntegerType())
            .add("checkpoint", spark.LongType())
        )
        self._arrow = to_arrow_schema(self.schema, timezone="UTC")

    def batches(self, entries: Iterable[KeptEntry]) -> Iterator[pa.RecordBatch]:
        """The rows of *entries*. Raises `RecordError` for what a column cannot hold, `StateIncompatible`."""
        for some in portions(entries, BATCH_BYTES, BATCH_ENTRIES):
            yield self._batch(some)

    def _batch(self, entries: Sequence[KeptEntry]) -> pa.RecordBatch:
        keys, values = [], []
        for entry, state in zip(entries, self._states(entries), strict=True):
            key = msgspec.msgpack.decode(entry.key)
            keys.append(self._fitting(self._key, "key", key, key))
            values.append(self._fitting(self._value, "state", key, msgspec.msgpack.decode(state)))
        columns = [keys, values, [each.group for each in entries], [self._checkpoint] * len(entries)]
        arrays = [pa.array(each, of.type) for each, of in zip(columns, self._arrow, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._arrow)

    def _states(self, entries: Sequence[KeptEntry]) -> list[bytes]:
        """The states as msgpack, in the version that is shown."""
        found: list[bytes] = []
        for version, same in groupby(entries, key=lambda entry: entry.version):
            states = [entry.state for entry in same]
            if self._today is not None:
                self._today.require_migrations(version, self._version)
                states = self._today.split(joined(states), self._written, version)
            elif version != self._version:
                raise RecordError(
                    f"Operator {self._operator!r} has states of version {version} that no record has changed since the "
                    f"pipeline went on with version {self._version}: what they mean now the pipeline's migrations say. "
                    f"Name it by the option types, as types=orders:pipeline."
                )
            found += states
        return found

    def _fitting(self, column: SparkColumn, what: str, key: Any, value: Any) -> Any:
        try:
            return column.value(value)
        except (Unfit, msgspec.ValidationError, TypeError, OverflowError) as error:
            other = ", or say what it is by keyType" if what == "key" else ""
            raise RecordError(
                f"Operator {self._operator!r}: the {what} of key {key!r} is no {column.type.simpleString()}: {error}. "
                f"Read it as text, by the option json=true{other}."
            ) from None

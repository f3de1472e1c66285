"""The writer of one subtask: rows are Arrow from the worker's encoder to the leader's insert.

Invariant: a block is one stream of Arrow, of whole rows, with the columns of `staged_schema`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow as pa

from exactlyonce.pipeline.arrow import arrow_schema
from exactlyonce.pipeline.columns import Column
from exactlyonce.sinks.lake.columns import DELETED, TableRows, nullable
from exactlyonce.sinks.sql.fields import ChangedRows
from exactlyonce.sinks.write_ahead.writer import CHUNK_SIZE, RowsWriter, require_room

KIND = "duckdb"


def staged_schema(columns: Sequence[Column], *, changes: bool) -> Any:
    """The columns of a block; *changes*: with that of `TableRows` for rows that are gone."""
    schema = arrow_schema(columns)
    return nullable(schema).append(pa.field(DELETED, pa.bool_())) if changes else schema


def as_stream(rows: Any) -> bytes:
    """A table, or a batch, as a stream of Arrow."""
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, rows.schema) as writer:
        writer.write(rows)
    body: bytes = stream.getvalue().to_pybytes()
    return body


class BoundedBatches(TableRows):
    """Encodes records as batches of Arrow; a row that is larger than a block is refused."""

    def __init__(self, columns: Sequence[Column], changed: ChangedRows | None) -> None:
        super().__init__(columns, arrow_schema(columns), changed)

    def encode(self, records: Sequence[Any]) -> Any:
        batch = super().encode(records)
        if batch.nbytes > CHUNK_SIZE:
            require_room(max(len(as_stream(batch.slice(row, 1))) for row in range(batch.num_rows)))
        return batch


@dataclass
class BatchesWriter(RowsWriter):
    """Stages batches of Arrow as blocks."""

    kind: ClassVar[str] = KIND

    def _chunks_of(self, outputs: Any) -> Iterator[tuple[list[Any], int]]:
        return (([part], part.nbytes) for part in _parts(outputs))

    def _body(self, rows: list[Any]) -> bytes:
        return as_stream(pa.Table.from_batches(rows).combine_chunks())


def _parts(batch: Any) -> Iterator[Any]:
    """*batch* in parts that fit into a block; none if it is empty."""
    if batch.num_rows <= 1 or batch.nbytes <= CHUNK_SIZE:
        yield from [batch] if batch.num_rows else []
        return
    middle = batch.num_rows // 2
    yield from _parts(batch.slice(0, middle))
    yield from _parts(batch.slice(middle))

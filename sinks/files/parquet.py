"""Parquet, by pyarrow: `FileSink` imports it with the format."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from exactlyonce.connectors.filestore.store import NewFile
from exactlyonce.pipeline.arrow import ArrowEncoder
from exactlyonce.pipeline.columns import Column

_ARRAY_BYTES = 400
"""The measured size of an array of one row: objects, and buffers of 64 bytes."""


def _arrays(type_: Any) -> int:
    """The number of arrays in an array of the type."""
    return 1 + sum(_arrays(type_.field(index).type) for index in range(type_.num_fields))


class Parquet:
    """The format, of these columns. *schema*: their Arrow fields, where a table has them already."""

    suffix = "parquet"

    def __init__(self, columns: Sequence[Column], schema: Any = None) -> None:
        self._encoder = ArrowEncoder(columns, schema)
        self.schema = self._encoder.schema
        self.part_bytes = _ARRAY_BYTES * sum(_arrays(field.type) for field in self.schema)

    def encode(self, groups: Sequence[Sequence[Any]]) -> list[tuple[Any, int]]:
        """A record batch for each group. All are slices of one, which lives as long as any of them."""
        records = groups[0] if len(groups) == 1 else list(chain.from_iterable(groups))
        batch = self._encoder.encode(records)
        if len(groups) == 1:
            return [(batch, batch.nbytes)]
        row_size = batch.nbytes / len(records)
        starts = accumulate(map(len, groups), initial=0)
        return [
            (batch.slice(start, len(group)), round(row_size * len(group)))
            for start, group in zip(starts, groups, strict=False)
        ]

    def joined(self, contents: list[Any]) -> Any:
        """One batch, in memory of its own."""
        columns = [pa.concat_arrays(arrays) for arrays in zip(*(batch.columns for batch in contents), strict=True)]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def open(self, file: NewFile) -> ParquetFile:
        """A new file."""
        return ParquetFile(file, self.schema)


class ParquetFile:
    """A file of row groups."""

    def __init__(self, file: NewFile, schema: Any) -> None:
        self._schema = schema
        self._writer = pq.ParquetWriter(file, schema)

    def write(self, contents: list[Any]) -> None:
        """Write batches as a row group."""
        self._writer.write_table(pa.Table.from_batches(contents, self._schema).combine_chunks())

    def finish(self) -> None:
        """Write the footer."""
        self._writer.close()

"""Parquet, by pyarrow. The only module that needs it: `FileSink` imports it with the format."""

from __future__ import annotations

from array import array as c_array
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from exactlyonce.connectors.filestore.store import NewFile
from exactlyonce.pipeline.shape import Form, Shape
from exactlyonce.sinks.files.columns import Column, columns_of, plain

DECIMAL_DIGITS, DECIMAL_SCALE = 38, 18
"""The type of every decimal, as Spark's default."""

_ARRAY_BYTES = 400
"""The measured size of an array of one row: objects, and buffers of 64 bytes."""
_SCALARS = {
    Form.BOOL: pa.bool_(),
    Form.INT: pa.int64(),
    Form.FLOAT: pa.float64(),
    Form.STR: pa.string(),
    Form.BYTES: pa.binary(),
    Form.DECIMAL: pa.decimal128(DECIMAL_DIGITS, DECIMAL_SCALE),
    Form.DATE: pa.date32(),
    Form.TIME: pa.time64("us"),
    Form.UUID: pa.string(),
}


def arrow_type(shape: Shape) -> Any:
    """The Arrow type of values other than None."""
    shape = plain(shape)
    match shape.form:
        case Form.LIST:
            return pa.list_(arrow_type(shape.parts[0]))
        case Form.DICT:
            return pa.map_(*map(arrow_type, shape.parts))
        case Form.RECORD:
            return pa.struct([_field(column) for column in columns_of(shape.type)])
        case Form.DATETIME:
            return pa.timestamp("us", tz="UTC" if shape.tz else None)
    return _SCALARS[shape.form]


def _arrays(type_: Any) -> int:
    """The number of arrays in an array of the type."""
    return 1 + sum(_arrays(type_.field(index).type) for index in range(type_.num_fields))


def _field(column: Column) -> Any:
    return pa.field(column.field.name, arrow_type(column.shape), nullable=column.field.nullable)


def arrow_schema(columns: Sequence[Column]) -> Any:
    """The fields of new files or tables."""
    return pa.schema([_field(column) for column in columns])


class Parquet:
    """The format, of these columns. *schema*: their Arrow fields, where a table has them already."""

    suffix = "parquet"

    def __init__(self, columns: Sequence[Column], schema: Any = None) -> None:
        self._columns = columns
        self.schema = arrow_schema(columns) if schema is None else schema
        self.part_bytes = _ARRAY_BYTES * sum(_arrays(field.type) for field in self.schema)

    def encode(self, groups: Sequence[Sequence[Any]]) -> list[tuple[Any, int]]:
        """A record batch for each group. All are slices of one, which lives as long as any of them."""
        records = groups[0] if len(groups) == 1 else list(chain.from_iterable(groups))
        arrays = [self._array(column, records) for column in self._columns]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self.schema)
        if len(groups) == 1:
            return [(batch, batch.nbytes)]
        row_size = batch.nbytes / len(records)
        starts = accumulate(map(len, groups), initial=0)
        return [
            (batch.slice(start, len(group)), round(row_size * len(group)))
            for start, group in zip(starts, groups, strict=False)
        ]

    def _array(self, column: Column, records: Sequence[Any]) -> Any:
        name = column.field.name
        field = self.schema.field(name)
        values = column.values(records)
        try:
            array = pa.array(values, field.type)
        except OverflowError:
            raise ValueError(f"{name}: a number is larger than 64 bits") from None
        except (pa.ArrowException, UnicodeError) as error:
            raise ValueError(f"{name}: {error}") from None
        if array.null_count and not column.field.nullable:
            raise ValueError(f"{name}: None, which the type does not admit")
        if array.null_count and not field.nullable:
            raise ValueError(f"{name}: None, and the column is required")
        if pa.types.is_float32(field.type) and not array.cast(pa.float64()).equals(pa.array(values, pa.float64())):
            _require_single(name, values)
        return array

    def joined(self, contents: list[Any]) -> Any:
        """One batch, in memory of its own."""
        columns = [pa.concat_arrays(arrays) for arrays in zip(*(batch.columns for batch in contents), strict=True)]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def open(self, file: NewFile) -> ParquetFile:
        """A new file."""
        return ParquetFile(file, self.schema)


def _require_single(name: str, values: Sequence[Any]) -> None:
    """ValueError for a value that 32 bits round; NaN, which equals nothing, is none."""
    for value in values:
        if value is not None and value == value and c_array("f", [value])[0] != value:
            raise ValueError(f"{name}: {value!r} would be rounded, for the column has 32 bits")


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

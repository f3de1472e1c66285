"""Avro, by fastavro: a container file of the same columns as Parquet's, deflated."""

from __future__ import annotations

import re
import secrets
import zlib
from collections.abc import Iterator, Sequence
from io import BytesIO
from typing import Any, NamedTuple

import fastavro

from exactlyonce.connectors.filestore.store import NewFile
from exactlyonce.pipeline.columns import DECIMAL_DIGITS, DECIMAL_SCALE, Column, columns_of, plain
from exactlyonce.pipeline.shape import Form, Shape, UnsupportedType

BLOCK_BYTES = 1 << 18
"""The approximate size of a block, which a reader has in memory as a whole."""
SYNC_BYTES = 16

_SCALARS: dict[Form, Any] = {
    Form.BOOL: "boolean",
    Form.INT: "long",
    Form.FLOAT: "double",
    Form.STR: "string",
    Form.BYTES: "bytes",
    Form.DECIMAL: {"type": "bytes", "logicalType": "decimal", "precision": DECIMAL_DIGITS, "scale": DECIMAL_SCALE},
    Form.DATE: {"type": "int", "logicalType": "date"},
    Form.TIME: {"type": "long", "logicalType": "time-micros"},
    Form.UUID: "string",
}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z", re.ASCII)


def avro_type(shape: Shape, path: str, *, nullable: bool) -> Any:
    """The Avro type of values; *path* names records within records. Raises `UnsupportedType`."""
    if nullable:
        return ["null", avro_type(shape, path, nullable=False)]
    shape = plain(shape)
    match shape.form:
        case Form.LIST:
            return {"type": "array", "items": avro_type(shape.parts[0], path, nullable=shape.parts[0].nullable)}
        case Form.DICT if plain(shape.parts[0]).form in (Form.STR, Form.UUID):
            return {"type": "map", "values": avro_type(shape.parts[1], path, nullable=shape.parts[1].nullable)}
        case Form.DICT:
            raise UnsupportedType(f"{path} is a dict whose keys are no str, and Avro has no other maps")
        case Form.RECORD:
            return avro_record(columns_of(shape.type), path)
        case Form.DATETIME:
            return {"type": "long", "logicalType": "timestamp-micros" if shape.tz else "local-timestamp-micros"}
    return _SCALARS[shape.form]


def avro_record(columns: Sequence[Column], name: str) -> Any:
    """The Avro record of these columns. Raises `UnsupportedType`."""
    fields = []
    for column in columns:
        own = column.field.name
        if not _NAME.match(own):
            raise UnsupportedType(f"the field {own!r} cannot be one in Avro: use letters, digits and _ in its name")
        type_ = avro_type(column.shape, f"{name}_{own}", nullable=column.field.nullable)
        fields.append({"name": own, "type": type_})
    return {"type": "record", "name": name, "fields": fields}


class EncodedRows(NamedTuple):
    rows: int
    data: bytes


class Avro:
    """The format, of these columns of records called *name*."""

    suffix = "avro"
    part_bytes = 100

    def __init__(self, columns: Sequence[Column], name: str) -> None:
        self._columns = columns
        self._schema = fastavro.parse_schema(avro_record(columns, re.sub(r"\W", "_", name, flags=re.ASCII)))

    def encode(self, groups: Sequence[Sequence[Any]]) -> list[tuple[EncodedRows, int]]:
        """The rows of each group."""
        encoded = (EncodedRows(len(group), b"".join(self._rows(group))) for group in groups)
        return [(rows, len(rows.data)) for rows in encoded]

    def _rows(self, records: Sequence[Any]) -> Iterator[bytes]:
        names = [column.field.name for column in self._columns]
        for values in zip(*(self._values(column, records) for column in self._columns), strict=True):
            out = BytesIO()
            try:
                fastavro.schemaless_writer(out, self._schema, dict(zip(names, values, strict=True)))
            except (ArithmeticError, AttributeError, LookupError) as error:
                raise ValueError(f"a value does not fit its field: {error}") from None
            yield out.getvalue()

    def _values(self, column: Column, records: Sequence[Any]) -> list[Any]:
        values = column.values(records)
        if not column.field.nullable and None in values:
            raise ValueError(f"{column.field.name}: None, which the type does not admit")
        return values

    def joined(self, contents: list[EncodedRows]) -> EncodedRows:
        """The rows, joined."""
        return EncodedRows(sum(rows for rows, _ in contents), b"".join(data for _, data in contents))

    def open(self, file: NewFile) -> AvroFile:
        """A new file."""
        return AvroFile(file, self._schema)


class AvroFile:
    """A file of blocks: the number of its rows, its size, its rows deflated, and the file's own mark."""

    def __init__(self, file: NewFile, schema: Any) -> None:
        self._file, self._sync = file, secrets.token_bytes(SYNC_BYTES)
        header = BytesIO()
        fastavro.writer(header, schema, [], codec="deflate", sync_marker=self._sync)
        file.write(header.getvalue())

    def write(self, contents: list[EncodedRows]) -> None:
        """Write rows as blocks."""
        waiting, size = list[EncodedRows](), 0
        for rows in contents:
            waiting.append(rows)
            size += len(rows.data)
            if size >= BLOCK_BYTES:
                self._write_block(waiting)
                waiting, size = [], 0
        if waiting:
            self._write_block(waiting)

    def _write_block(self, contents: list[EncodedRows]) -> None:
        compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
        data = b"".join([*(compressor.compress(data) for _, data in contents), compressor.flush()])
        rows = sum(rows for rows, _ in contents)
        self._file.write(b"".join([_long(rows), _long(len(data)), data, self._sync]))

    def finish(self) -> None:
        """Blocks need no end."""


def _long(number: int) -> bytes:
    """A count as Avro writes it: zigzag, then seven bits a byte.

    >>> _long(1), _long(64)
    (b'\\x02', b'\\x80\\x01')
    """
    number <<= 1
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)

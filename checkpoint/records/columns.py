"""Lists of records by columns, deflated: what repeats, or grows by steps, takes next to nothing. Pure.

A list of records is written field by field, each over all records; a list of lists as its lengths, then the items of
all. Numbers are steps from the one before; equal texts in a row are one text and its count. Each column is an Avro
array. Invariants: what is read is what was written; bytes of any form allocate no more than a small multiple of
`COLUMNS_SIZE_MAX`.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain, groupby, repeat
from operator import attrgetter, sub
from typing import Any

import msgspec
from fastavro import parse_schema, schemaless_reader, schemaless_writer

COLUMNS_SIZE_MAX = 16 * 1024 * 1024
"""The most bytes of all columns before they are deflated."""
_LEVEL = 6
_LONG_MIN, _LONGS = -(1 << 63), 1 << 64
_ARRAYS = {
    name: parse_schema({"type": "array", "items": items})
    for name, items in {
        "long": "long",
        "string": "string",
        "bytes": "bytes",
        "boolean": "boolean",
        "sha256": {"type": "fixed", "name": "Sha256", "size": 32},
    }.items()
}


class BadColumns(ValueError):
    """The columns are not those of any record."""


class ListOf(msgspec.Struct, frozen=True):
    """The kind of a list; in Python it is a tuple."""

    items: Kind


class RecordOf(msgspec.Struct, frozen=True):
    """The kind of a record: its fields in order, and how records become columns and are made of them."""

    fields: Mapping[str, Kind]
    split: Callable[[Sequence[Any]], Iterable[Sequence[Any]]]
    join: Callable[[Sequence[Sequence[Any]]], Sequence[Any]]


Kind = str | ListOf | RecordOf
"""The kind of a value: a key of `_ARRAYS`, a list, or a record."""


def record_of(struct: type[msgspec.Struct], **fields: Kind) -> RecordOf:
    """The kind of *struct*; fields that are not among *fields* are not written, and read with their defaults."""
    names = tuple(fields)
    return RecordOf(
        fields,
        lambda records: [list(map(attrgetter(name), records)) for name in names],
        lambda columns: [struct(**dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)],
    )


def tuple_of(**fields: Kind) -> RecordOf:
    """The kind of a plain tuple with these items."""
    return RecordOf(
        fields,
        lambda rows: list(zip(*rows, strict=True)) or [()] * len(fields),
        lambda columns: list(zip(*columns, strict=True)),
    )


def pack(layout: Mapping[str, Kind], record: msgspec.Struct) -> bytes:
    """The fields of *record* that *layout* names, by columns."""
    stream = io.BytesIO()
    for name, kind in layout.items():
        _write(stream, kind, [getattr(record, name)])
    return stream.getvalue()


def unpack(layout: Mapping[str, Kind], columns: bytes) -> dict[str, Any]:
    """The fields that `pack` wrote. Raises `BadColumns`, or an error of Avro's decoder."""
    stream = io.BytesIO(columns)
    fields = {name: _read(stream, kind, 1, len(columns))[0] for name, kind in layout.items()}
    if stream.tell() != len(columns):
        raise BadColumns(f"its lists have {len(columns) - stream.tell():,} bytes too many")
    return fields


def deflate(columns: bytes) -> bytes:
    """*columns* for `inflate`."""
    return zlib.compress(columns, _LEVEL)


def inflate(body: bytes, size: int) -> bytes:
    """The *size* bytes that were deflated to *body*. Raises `BadColumns` if they are fewer or more."""
    if not 0 <= size <= COLUMNS_SIZE_MAX:
        raise BadColumns(f"its lists claim {size:,} bytes; the limit is {COLUMNS_SIZE_MAX:,}")
    inflater = zlib.decompressobj()
    try:
        columns = inflater.decompress(body, size + 1)
    except zlib.error as error:
        raise BadColumns(f"its lists do not inflate: {error}") from error
    if len(columns) != size or not inflater.eof or inflater.unused_data:
        raise BadColumns(f"its lists are not the {size:,} bytes that they claim")
    return columns


# --- columns


def _write(stream: io.BytesIO, kind: Kind, values: Sequence[Any]) -> None:
    if isinstance(kind, RecordOf):
        for field, column in zip(kind.fields.values(), kind.split(values), strict=True):
            _write(stream, field, column)
    elif isinstance(kind, ListOf):
        _write(stream, "long", list(map(len, values)))
        _write(stream, kind.items, list(chain.from_iterable(values)))
    elif kind == "long":
        _write_array(stream, kind, _wrapped(list(map(sub, values, chain((0,), values)))))
    elif kind == "string":
        runs = [(text, sum(1 for _ in run)) for text, run in groupby(values)]
        _write_array(stream, "long", [length for _, length in runs])
        _write_array(stream, kind, [text for text, _ in runs])
    else:
        _write_array(stream, kind, values)


def _read(stream: io.BytesIO, kind: Kind, count: int, items_max: int) -> Sequence[Any]:
    """*count* values. No list has more than *items_max* items: each takes a byte at least, besides texts."""
    if isinstance(kind, RecordOf):
        return kind.join([_read(stream, field, count, items_max) for field in kind.fields.values()])
    if isinstance(kind, ListOf):
        lengths = _read(stream, "long", count, items_max)
        total = sum(lengths)
        if min(lengths, default=0) < 0 or total > items_max:
            raise BadColumns("the length of a list cannot be")
        items = _read(stream, kind.items, total, items_max)
        return [tuple(items[end - length : end]) for length, end in zip(lengths, accumulate(lengths), strict=True)]
    if kind == "long":
        return _wrapped(list(accumulate(_read_array(stream, kind, count))))
    if kind == "string":
        lengths = _array_in(stream, "long")
        if min(lengths, default=1) < 1 or sum(lengths) != count:
            raise BadColumns("a column of texts has another length")
        return list(chain.from_iterable(map(repeat, _read_array(stream, kind, len(lengths)), lengths)))
    return _read_array(stream, kind, count)


def _write_array(stream: io.BytesIO, kind: str, values: Sequence[Any]) -> None:
    schemaless_writer(stream, _ARRAYS[kind], values)


def _read_array(stream: io.BytesIO, kind: str, count: int) -> Sequence[Any]:
    values = _array_in(stream, kind)
    if len(values) != count:
        raise BadColumns("a column has another length")
    return values


def _array_in(stream: io.BytesIO, kind: str) -> list[Any]:
    values: Any = schemaless_reader(stream, _ARRAYS[kind], None)
    return list(values)


def _wrapped(values: list[int]) -> list[int]:
    """*values* in 64 bits: the step from the lowest number to the highest would need more."""
    if min(values, default=0) >= _LONG_MIN and max(values, default=0) < -_LONG_MIN:
        return values
    return [(value - _LONG_MIN) % _LONGS + _LONG_MIN for value in values]

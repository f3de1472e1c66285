"""Lists of records by columns, deflated: what repeats, or grows by steps, takes next to nothing. Pure.

A list of records is written field by field, each over all records; a list of lists as its lengths, then the items of
all. Numbers are steps from the one before; equal texts in a row are one text and its count. The columns are arrays of
one Avro record. Invariants: what is read is what was written; bytes of any form allocate no more than a fixed multiple
of `COLUMNS_SIZE_MAX`.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, groupby, islice, repeat
from operator import attrgetter, sub
from typing import Any

import msgspec
from fastavro import parse_schema, schemaless_reader, schemaless_writer

COLUMNS_SIZE_MAX = 16 * 1024 * 1024
"""The most bytes of all columns before they are deflated."""
_LEVEL = 6
_LONG_MIN, _LONGS = -(1 << 63), 1 << 64
_SHA256 = {"type": "fixed", "name": "Sha256", "size": 32}


class BadColumns(ValueError):
    """The columns are not those of any record."""


@dataclass(frozen=True, eq=False)
class ListOf:
    """The kind of a list; in Python it is a tuple."""

    items: Kind

    @cached_property
    def width(self) -> int:
        """The number of columns of its items."""
        return sum(1 for _ in _columns_of(self.items))


class RecordOf(msgspec.Struct, frozen=True):
    """The kind of a record: its fields in order, and how records become columns and are made of them."""

    fields: Mapping[str, Kind]
    split: Callable[[Sequence[Any]], Iterable[Sequence[Any]]]
    join: Callable[[Sequence[Sequence[Any]]], Sequence[Any]]


Kind = str | ListOf | RecordOf
"""The kind of a value: "long", "string", "boolean", "bytes" or "sha256", a list, or a record."""


class Layout(msgspec.Struct, frozen=True):
    """The fields of a record that are packed together, in order."""

    fields: Mapping[str, Kind]
    schema: Any
    """Of their columns, as fastavro has parsed it."""


def layout_of(**fields: Kind) -> Layout:
    columns = [column for kind in fields.values() for column in _columns_of(kind)]
    types: list[object] = [_SHA256["name"] if column == "sha256" else column for column in columns]
    if "sha256" in columns:
        types[columns.index("sha256")] = _SHA256  # it is defined where it comes first
    arrays = [{"name": f"c{place}", "type": {"type": "array", "items": items}} for place, items in enumerate(types)]
    return Layout(fields, parse_schema({"type": "record", "name": "Columns", "fields": arrays}))


def _columns_of(kind: Kind) -> Iterator[str]:
    """The columns of a value, as `_split` writes them."""
    if isinstance(kind, RecordOf):
        for field in kind.fields.values():
            yield from _columns_of(field)
    elif isinstance(kind, ListOf):
        yield "long"
        yield from _columns_of(kind.items)
    else:
        yield from ("long", "string") if kind == "string" else (kind,)


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


def pack(layout: Layout, record: msgspec.Struct) -> bytes:
    """The fields of *record* that *layout* names, by columns."""
    columns: list[Sequence[Any]] = []
    for name, kind in layout.fields.items():
        _split(columns, kind, [getattr(record, name)])
    stream = io.BytesIO()
    schemaless_writer(stream, layout.schema, {f"c{place}": column for place, column in enumerate(columns)})
    return stream.getvalue()


def unpack(layout: Layout, packed: bytes) -> dict[str, Any]:
    """The fields that `pack` wrote. Raises `BadColumns`, or an error of Avro's decoder."""
    stream = io.BytesIO(packed)
    record: Any = schemaless_reader(stream, layout.schema, None)
    if stream.tell() != len(packed):
        raise BadColumns(f"its lists have {len(packed) - stream.tell():,} bytes too many")
    columns = iter(record.values())
    return {name: _joined(columns, kind, 1, len(packed))[0] for name, kind in layout.fields.items()}


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


def _split(columns: list[Sequence[Any]], kind: Kind, values: Sequence[Any]) -> None:
    """Add the columns of *values* to *columns*."""
    if isinstance(kind, RecordOf):
        for field, column in zip(kind.fields.values(), kind.split(values), strict=True):
            _split(columns, field, column)
    elif isinstance(kind, ListOf):
        _split(columns, "long", list(map(len, values)))
        _split(columns, kind.items, list(chain.from_iterable(values)))
    elif kind == "long":
        columns.append(_wrapped(list(map(sub, values, chain((0,), values)))))
    elif kind == "string":
        runs = [(text, sum(1 for _ in run)) for text, run in groupby(values)]
        columns.append([length for _, length in runs])
        columns.append([text for text, _ in runs])
    else:
        columns.append(values)


def _joined(columns: Iterator[list[Any]], kind: Kind, count: int, items_max: int) -> Sequence[Any]:
    """*count* values. No list has more than *items_max* items: each takes a byte at least, besides texts."""
    if kind == "string":
        lengths, texts = next(columns), next(columns)
        if min(lengths, default=1) < 1 or sum(lengths) != count or len(texts) != len(lengths):
            raise BadColumns("a column of texts has another length")
        return texts if len(texts) == count else list(chain.from_iterable(map(repeat, texts, lengths)))
    if isinstance(kind, str):
        values = next(columns)
        if len(values) != count:
            raise BadColumns("a column has another length")
        return _wrapped(list(accumulate(values))) if kind == "long" else values
    if isinstance(kind, RecordOf):
        return kind.join([_joined(columns, field, count, items_max) for field in kind.fields.values()])
    sizes = _joined(columns, "long", count, items_max)
    total = sum(sizes)
    if min(sizes, default=0) < 0 or total > items_max:
        raise BadColumns("the length of a list cannot be")
    if not total:  # as in most lists of most records
        if any(islice(columns, kind.width)):
            raise BadColumns("a column has another length")
        return [()] * count
    items = _joined(columns, kind.items, total, items_max)
    return [tuple(items[end - size : end]) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _wrapped(values: list[int]) -> list[int]:
    """*values* in 64 bits: the step from the lowest number to the highest would need more."""
    if not values or (min(values) >= _LONG_MIN and max(values) < -_LONG_MIN):
        return values
    return [(value - _LONG_MIN) % _LONGS + _LONG_MIN for value in values]

"""Lists by columns: what was written is read, and no bytes make more of themselves."""

from __future__ import annotations

import io
import zlib
from typing import Any

import msgspec
import pytest
from fastavro import parse_schema, schemaless_writer
from hypothesis import given
from hypothesis import strategies as st

from exactlyonce.checkpoint.records.encoding import (
    COLUMNS_SIZE_MAX,
    BadColumns,
    ListOf,
    deflate,
    inflate,
    layout_of,
    pack,
    record_of,
    tuple_of,
    unpack,
)


class Point(msgspec.Struct, frozen=True):
    x: int
    name: str
    path: tuple[tuple[int, ...], ...] = ()
    seen: bool = False
    body: bytes = b""
    added: int = 7


class Drawing(msgspec.Struct, frozen=True):
    points: tuple[Point, ...]
    sizes: tuple[tuple[str, int], ...] = ()


POINT = record_of(Point, x="long", name="string", path=ListOf(ListOf("long")), seen="boolean", body="bytes")
LAYOUT = layout_of(points=ListOf(POINT), sizes=ListOf(tuple_of(name="string", size="long")))
longs = st.one_of(st.integers(-(1 << 63), (1 << 63) - 1), st.sampled_from((0, 1, (1 << 63) - 1, -(1 << 63))))
texts = st.one_of(st.sampled_from(("", "a", "totals")), st.text(max_size=5))
points = st.builds(
    Point, longs, texts, st.lists(st.lists(longs, max_size=3).map(tuple), max_size=3).map(tuple), st.booleans(),
    st.binary(max_size=4),
)  # fmt: skip
drawings = st.builds(
    Drawing, st.lists(points, max_size=6).map(tuple), st.lists(st.tuples(texts, longs), max_size=6).map(tuple)
)


@given(drawings)
def test_what_is_packed_is_unpacked(drawing: Drawing) -> None:
    columns = pack(LAYOUT, drawing)
    assert inflate(deflate(columns), len(columns)) == columns
    assert Drawing(**unpack(LAYOUT, columns)) == drawing


def test_a_field_that_is_not_written_has_its_default() -> None:
    """So an older layout is read."""
    columns = pack(LAYOUT, Drawing((Point(1, "a", added=9),)))
    assert unpack(LAYOUT, columns)["points"][0].added == 7


def test_what_repeats_or_grows_by_steps_takes_next_to_nothing() -> None:
    drawing = Drawing(tuple(Point(1_000_000 + 3 * number, "a name of some length") for number in range(10_000)))
    assert len(deflate(pack(LAYOUT, drawing))) < 300


@given(drawings, st.data())
def test_damaged_columns_are_no_other_error(drawing: Drawing, data: st.DataObject) -> None:
    columns = bytearray(pack(LAYOUT, drawing))
    for place in data.draw(st.lists(st.integers(0, len(columns) - 1), min_size=1, max_size=4)):
        columns[place] ^= data.draw(st.integers(1, 255))
    try:
        unpack(LAYOUT, bytes(columns))
    except MemoryError:
        raise
    except Exception:  # `decode` makes a `DamagedRecord` of whatever it is
        pass


BOMB = zlib.compress(bytes(COLUMNS_SIZE_MAX + 1))
INFLATING: dict[str, tuple[bytes, int, str]] = {
    "more than is claimed": (deflate(bytes(2_000)), 1_000, "not the 1,000 bytes"),
    "less than is claimed": (deflate(bytes(500)), 1_000, "not the 1,000 bytes"),
    "cut off": (deflate(bytes(range(256)) * 4)[:-5], 1_024, "not the 1,024 bytes"),
    "bytes too many": (deflate(bytes(10)) + b"x", 10, "not the 10 bytes"),
    "no deflated bytes": (b"hello", 10, "do not inflate"),
    "a bomb": (BOMB, COLUMNS_SIZE_MAX, "not the 16,777,216 bytes"),
    "an honest bomb": (BOMB, COLUMNS_SIZE_MAX + 1, "claim 16,777,217 bytes; the limit is 16,777,216"),
    "a size below 0": (deflate(b""), -1, "claim -1 bytes"),
}


@pytest.mark.parametrize("case", INFLATING)
def test_what_does_not_inflate(case: str) -> None:
    body, size, why = INFLATING[case]
    with pytest.raises(BadColumns, match=why):
        inflate(body, size)


def arrays(*columns: tuple[str, list[Any]]) -> bytes:
    stream = io.BytesIO()
    for kind, values in columns:
        schemaless_writer(stream, parse_schema({"type": "array", "items": kind}), values)
    return stream.getvalue()


NAMES = layout_of(names=ListOf("string"))
NUMBERS = layout_of(numbers=ListOf(ListOf("long")))
HOSTILE: dict[str, tuple[Any, bytes]] = {
    "a list of more items than bytes": (NAMES, arrays(("long", [1 << 40]), ("long", [1 << 40]), ("string", ["a"]))),
    "a list of less than nothing": (NUMBERS, arrays(("long", [2]), ("long", [5, -9]), ("long", [1]))),
    "runs that are longer than their column": (NAMES, arrays(("long", [1]), ("long", [9]), ("string", ["a"]))),
    "a run of nothing": (NAMES, arrays(("long", [1]), ("long", [1, 0]), ("string", ["a", "b"]))),
    "a run below nothing": (NAMES, arrays(("long", [1]), ("long", [2, -1]), ("string", ["a", "b"]))),
    "more runs than texts": (NAMES, arrays(("long", [2]), ("long", [1, 1]), ("string", ["a"]))),
    "a column that is too short": (NUMBERS, arrays(("long", [1]), ("long", [2]), ("long", [1]))),
    "a column that is too long": (NUMBERS, arrays(("long", [1]), ("long", [1]), ("long", [1, 1]))),
    "two lists where there is one": (NAMES, arrays(("long", [0, 0]), ("long", []), ("string", []))),
    "bytes too many": (NAMES, arrays(("long", [0]), ("long", []), ("string", [])) + b"x"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_columns_that_no_record_has(case: str) -> None:
    layout, columns = HOSTILE[case]
    with pytest.raises(BadColumns):
        unpack(layout, columns)

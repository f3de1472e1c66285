"""Rows of a stream and of a page give the same texts, and the values that msgspec reads of them are the texts' own."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import make_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.postgres import types

from exactlyonce.connectors import PostgresChanges
from exactlyonce.connectors.postgres.change_stream import Begin, Column, Relation, RowChange
from exactlyonce.connectors.postgres.change_values import ChangeDecoder, RowReader, row_texts, rows_of_page

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=300)
ODD = ["", "t", "n\\N", "\\", "\t\n\v\b\f\r\x01\x1f\x7f", '"\\N"', "é" * 200, "x" * 255, "x" * 256, "t" * 70_000]


def of_stream(texts: Sequence[str | None]) -> bytes:
    """A row as pgoutput has it."""
    values = [b"n" if text is None else struct.pack("!cI", b"t", len(text.encode())) + text.encode() for text in texts]
    return struct.pack("!H", len(texts)) + b"".join(values)


def of_pages(rows: Sequence[Sequence[str | None]]) -> bytes:
    """Rows as COPY writes them."""
    return b"".join(b"\t".join([b"\\N" if text is None else escaped(text) for text in row]) + b"\n" for row in rows)


def escaped(text: str) -> bytes:
    for character, letter in (
        ("\\", "\\"),
        ("\b", "b"),
        ("\f", "f"),
        ("\n", "n"),
        ("\r", "r"),
        ("\t", "t"),
        ("\v", "v"),
    ):
        text = text.replace(character, f"\\{letter}")
    return text.encode()


@given(st.integers(1, 3).flatmap(
    lambda count: st.lists(st.tuples(*[st.none() | TEXTS | st.sampled_from(ODD)] * count), min_size=1, max_size=5)
))  # fmt: skip
def test_texts(rows: list[tuple[str | None, ...]]) -> None:
    """Any text is read as it was written."""
    assert [tuple(row_texts(of_stream(row))) for row in rows] == rows
    assert [tuple(row_texts(row)) for row in rows_of_page(of_pages(rows))] == rows


NUMBERS = ["0", "-7", "9007199254740993", "12"]
FLOATS = ["1", "-0", "1.5", "1e+30", "NaN", "Infinity", "-Infinity", "0.1", "1.7976931348623157e+308", "5e-324"]
TIMES = [
    "2026-01-02 03:04:05",
    "0001-01-01 00:00:00.5",
    "2026-01-02 03:04:05.123456",
    "infinity",
    "12026-01-01 00:00:00",
]
OF_COLUMNS: list[tuple[str, Any, list[str]]] = [
    *[("int8", type, NUMBERS) for type in (int, int | None, float, Decimal, int | float)],
    ("int4", Annotated[int, msgspec.Meta(gt=5)], NUMBERS),
    *[("float8", type, FLOATS) for type in (float, float | None, int)],
    *[("numeric", type, ["12.50", "5.00", "7", "NaN", "1e400"]) for type in (Decimal, Decimal | None, float, int)],
    *[("bool", type, ["t", "f"]) for type in (bool, bool | None)],
    *[("text", type, ["null", "a", "1", *ODD]) for type in (str, str | None, Any)],
    ("text", Annotated[str, msgspec.Meta(max_length=3)], ["null", "a"]),
    ("text", Literal["a", "null"] | None, ["null", "a", "b"]),
    *[("varchar", type, ["null", "1"]) for type in (str, int | str)],
    *[("uuid", type, ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"]) for type in (UUID, str)],
    *[("date", type, ["2026-01-02", "infinity", "0044-03-15 BC"]) for type in (date, str, date | None)],
    *[("timestamp", type, TIMES) for type in (datetime, str, datetime | None)],
    ("timestamp", Annotated[datetime, msgspec.Meta(tz=True)], TIMES),
    *[("timestamptz", type, [f"{text}+00" for text in TIMES]) for type in (datetime, str, datetime | None)],
    ("timestamptz", Annotated[datetime, msgspec.Meta(tz=False)], TIMES),
    *[("time", type, ["03:04:05.5", "24:00:00"]) for type in (time, str)],
    *[("timetz", type, ["03:04:05+00", "03:04:05.5+05:30"]) for type in (time, str)],
    *[("interval", type, ["P1DT2H", "PT0.5S", "P1M", "P-1DT-2H"]) for type in (timedelta, str)],
    *[("bytea", type, ["\\x00ff", "\\x"]) for type in (bytes, str, bytes | None)],
    *[("jsonb", type, ['{"a": 1}', "null", "[1]"]) for type in (dict[str, int], Any, dict[str, int] | None)],
    *[("_int4", type, ["{1,2}", "{}", "{{1}}"]) for type in (list[int], str)],
    ("int4range", str, ["[1,2)"]),
]  # fmt: skip


def result(function: Any, *arguments: Any) -> Any:
    """What it gives, or why it does not."""
    try:
        return function(*arguments)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(("base", "type", "texts"), OF_COLUMNS, ids=str)
@pytest.mark.parametrize("kind", ["struct", "dataclass"])
@pytest.mark.parametrize("order", [("id", "value"), ("value", "more", "id")], ids=len)
def test_values(base: str, type: Any, texts: list[str], kind: str, order: tuple[str, ...]) -> None:
    """A value, or the reason why it is none, is that of its text, whatever else is in the row."""
    fields = [("id", int), ("value", type)]
    row_type = msgspec.defstruct("Row", fields) if kind == "struct" else make_dataclass("Row", fields)
    source = PostgresChanges[Any]("rows", dsn="env:SHOP_DSN", key="id", value=row_type)
    known = types.get(base.removeprefix("_"))
    oid = 0 if known is None else known.array_oid if base.startswith("_") else known.oid
    oids = {"id": 20, "value": oid, "more": 25}
    relation, begin = Relation(1, tuple(Column(name, oids[name]) for name in order)), Begin(1, 2, 3)
    decode, reader = ChangeDecoder(source).decode, RowReader(source, relation)
    for text in [*texts, None]:
        values = {"id": "7", "value": text, "more": "x" * 300}
        row = [values[name] for name in order]
        (of_page,) = rows_of_page(of_pages([row]))
        expected = result(reader.row_of_texts, of_stream(row), None)
        for row_bytes in (of_stream(row), of_page):
            got = result(decode, RowChange("table rows", "insert", relation, begin, row_bytes))
            assert repr(getattr(got, "after", got)) == repr(expected)
            assert isinstance(got, str) or got.key == 7


def test_most_values_are_read_at_once() -> None:
    """The rows of plain types take no detour by their texts."""

    class Plain(msgspec.Struct):
        id: int
        name: str | None
        rate: float
        price: Decimal
        paid: bool
        at: datetime
        number: UUID

    source = PostgresChanges[Any]("rows", dsn="env:SHOP_DSN", key="id", value=Plain)
    bases = ("int8", "text", "float8", "numeric", "bool", "timestamptz", "uuid")
    columns = [Column(name, types[base].oid) for name, base in zip(Plain.__struct_fields__, bases, strict=True)]
    reader = RowReader(source, Relation(1, tuple(columns)))
    row = ["7", None, "0.5", "1.50", "t", "2026-01-02 03:04:05+00", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"]
    assert reader.make is Plain
    assert Plain(*reader.values(of_stream(row))) == reader.row_of_texts(of_stream(row), None)

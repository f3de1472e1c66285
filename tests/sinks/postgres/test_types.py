"""Values come into columns as they were, or are refused before they are on their way."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from postgres_rows import Database, Total, chunks, entry

from exactlyonce.pipeline.errors import StoreError

UTC = timezone.utc
OF_TOTALS = '(the column of table "public"."totals" is'


class Size(Enum):
    """An enum, here and there."""

    SMALL = "s"
    LARGE = "l, or larger"


class Inner(msgspec.Struct):
    """A record in a record."""

    a: int
    b: str | None = None


class Wide(msgspec.Struct):
    """A field of each kind."""

    boolean: bool | None
    whole: int | None
    number: float | None
    text: str | None
    raw: bytes | None
    money: Decimal | None
    moment: datetime | None
    day: date | None
    clock: time | None
    span: timedelta | None
    id: UUID | None
    inner: Inner | None
    mapping: dict[str, Any] | None
    names: list[str | None] | None
    raws: list[bytes] | None
    numbers: tuple[int, ...] | None


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
ZONES = [UTC, timezone(timedelta(hours=5.5)), timezone(timedelta(hours=-23, seconds=7))]
MOMENTS = st.datetimes(datetime(2, 1, 1), datetime(9998, 1, 1), timezones=st.sampled_from(ZONES))
WIDE = st.builds(
    Wide,
    boolean=st.none() | st.booleans(),
    whole=st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
    number=st.none() | st.floats(allow_nan=False),
    text=st.none() | TEXT | st.sampled_from(["\\N", "\\.", "", "\t", "a\r\nb", "NULL", "{}", "\x01", "\\"]),
    raw=st.none() | st.binary(),
    money=st.none() | st.decimals(allow_nan=False, allow_infinity=False),
    moment=st.none() | MOMENTS,
    day=st.none() | st.dates(),
    clock=st.none() | st.times(),
    span=st.none() | st.timedeltas(min_value=timedelta(days=-99999), max_value=timedelta(days=99999)),
    id=st.none() | st.uuids(),
    inner=st.none() | st.builds(Inner, a=st.integers(-(1 << 40), 1 << 40), b=st.none() | TEXT),
    mapping=st.none() | st.dictionaries(TEXT, TEXT | st.integers(-999, 999) | st.none()),
    names=st.none() | st.lists(st.none() | TEXT | st.sampled_from(["NULL", '"', "\\", ",", "{"])),
    raws=st.none() | st.lists(st.binary()),
    numbers=st.none() | st.lists(st.integers(-(1 << 63), (1 << 63) - 1)).map(tuple),
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(WIDE, max_size=5))
def test_every_value_comes_back_as_it_was(database: Database, rows: list[Wide]) -> None:
    """Whatever values the fields of a record have, a reader of the table finds the same."""
    store = database.store(Wide, table="wide")
    store.check()
    database.execute("TRUNCATE wide")
    store.write(chunks(store, rows, rows=2))
    store.close()
    names = ", ".join(f'"{name}"' for name in Wide.__struct_fields__)
    found = [Wide(*row) for row in database.execute(f"SELECT {names} FROM wide ORDER BY ctid")]
    for row in found:
        row.inner = None if row.inner is None else msgspec.convert(row.inner, Inner)
        row.numbers = None if row.numbers is None else tuple(row.numbers)
    assert found == rows


def test_the_columns_that_are_created(database: Database) -> None:
    """A created table has the column types of the page, NOT NULL where the field is never None, and the key."""

    class Row(msgspec.Struct):
        key: str
        perhaps: int | None
        sizes: list[float]
        any: Any
        size: Size

    database.store(Row, mode="upsert", key=("key",)).check()
    columns = database.execute(
        "SELECT attname, format_type(atttypid, atttypmod), attnotnull FROM pg_attribute "
        "WHERE attrelid = 'totals'::regclass AND attnum > 0 ORDER BY attnum"
    )
    assert columns == [
        ("key", "text", True), ("perhaps", "bigint", False), ("sizes", "double precision[]", True),
        ("any", "jsonb", False), ("size", "text", True),
    ]  # fmt: skip
    assert database.execute("SELECT indisprimary FROM pg_index WHERE indrelid = 'totals'::regclass") == [(True,)]


def of_type(type_: Any) -> Any:
    """A record with one field."""
    return msgspec.defstruct("Row", [("v", type_)])


def stored(database: Database, type_: Any, column: str) -> Callable[[Any], Any]:
    """A function that writes a value to a column of the type, and reads it as text."""
    database.execute("CREATE TYPE size AS ENUM ('s', 'l, or larger')")
    database.execute("CREATE DOMAIN short AS varchar(3) NOT NULL")
    database.execute(f"CREATE TABLE totals (n serial, v {column})")
    row = of_type(type_)
    store = database.store(row)
    store.check()

    def through(value: Any) -> Any:
        store.write(chunks(store, [row(value)]))
        return database.execute("SELECT v::text FROM totals ORDER BY n DESC LIMIT 1")[0][0]

    return through


@pytest.mark.parametrize(
    ("type_", "column", "value", "text"),
    [
        (int, "smallint", -32768, "-32768"), (int, "integer", 2**31 - 1, "2147483647"),
        (int, "bigint", 2**63 - 1, str(2**63 - 1)), (int, "bigint", -(2**63), str(-(2**63))),
        (int, "numeric", 10**300, str(10**300)), (int, "numeric", 2**64, str(2**64)),
        (int, "numeric(3,0)", 999, "999"), (float, "real", 1.5, "1.5"), (float, "real", float("nan"), "NaN"),
        (float, "double precision", float("-inf"), "-Infinity"), (float, "real", 3.4028234e38, "3.4028235e+38"),
        (float, "real", 1.5e-45, "1e-45"), (float, "double precision", 5, "5"),
        (str, "varchar(3)", "äöü", "äöü"), (str, "char(3)", "a", "a"), (str, "size", "l, or larger", "l, or larger"),
        (Size, "size", Size.SMALL, "s"), (str, "short", "abc", "abc"),
        (Decimal, "numeric(5,2)", Decimal("-999.9900"), "-999.99"),
        (Decimal, "numeric(2,4)", Decimal("0.0099"), "0.0099"), (Decimal, "numeric(5,2)", Decimal("-NaN"), "NaN"),
        (Decimal, "numeric", Decimal(f"1.{'0' * 16382}1"), f"1.{'0' * 16382}1"),
        (Decimal, "numeric", Decimal("NaN"), "NaN"), (Decimal, "numeric", Decimal("1E+5"), "100000"),
        (datetime, "timestamp", datetime(1, 1, 1), "0001-01-01 00:00:00"),
        (datetime, "timestamp(0)", datetime(9999, 12, 31, 23, 59, 59), "9999-12-31 23:59:59"),
        (list[int], "jsonb", [1, 2], "[1, 2]"), (list[list[int]], "json", [[1], []], "[[1],[]]"),
        (list[int], "smallint[]", [1], "{1}"),
        (list[Size], "size[]", [Size.LARGE, Size.SMALL], '{"l, or larger",s}'),
        (list[str], "varchar(2)[]", ["NULL", "b"][1:], "{b}"),
        (str | int, "jsonb", "a\nb", '"a\\nb"'), (dict[str, str], "json", {"a": "\0"}, '{"a":"\\u0000"}'),
        (dict[str, str], "jsonb", {"a": "\\u0000"}, '{"a": "\\\\u0000"}'), (str | None, "text", None, None),
    ],
)  # fmt: skip
def test_values_at_the_edge_fit(database: Database, type_: Any, column: str, value: Any, text: str | None) -> None:
    """The largest, the smallest and the strangest that a column takes comes in unchanged."""
    found = stored(database, type_, column)(value)
    assert (found.strip() if isinstance(found, str) else found) == text


@pytest.mark.parametrize(
    ("type_", "column", "value", "text"),
    [
        (int, "smallint", 32768, f"v: 32768 is out of range, -32768 to 32767 {OF_TOTALS} smallint)"),
        (int, "bigint", -(2**63) - 1, "out of range"), (int, "numeric(3,0)", 1000, "does not fit 3 digits"),
        (float, "real", 3.5e38, "out of range"), (float, "real", 1e-50, "out of range"),
        (float, "real", -3.4028236e38, "out of range"),
        (str, "varchar(3)", "abcd", f"v: 'abcd' has 4 characters, and 3 fit {OF_TOTALS} character varying(3))"),
        (str, "text", "a\0b", r"v: 'a\x00b' has a null character"), (str, "text", "\ud800", "half a character"),
        (str, "size", "xl", "none of its labels, s, l, or larger"), (str, "short", "abcd", "3 fit"),
        (str, "char(3)", "a ", "v: 'a ' ends with a blank, which char drops: use varchar or text"),
        (list[str], "char(3)[]", ["a", "b "], "'b ' ends with a blank"), (str, "bpchar", "a ", "ends with a blank"),
        (str | None, "text not null", None, f"v: None does not fit, for the column is NOT NULL {OF_TOTALS} text)"),
        (str | None, "short", None, "NOT NULL"),
        (Decimal, "numeric(5,2)", Decimal("1.005"), "v: 1.005 does not fit 3 digits before the point and 2 after it"),
        (Decimal, "numeric(5,2)", Decimal(1000), "round it"), (Decimal, "numeric(5,2)", Decimal("inf"), "does not fit"),
        (Decimal, "numeric", Decimal("sNaN"), "no number that numeric holds"),
        (Decimal, "numeric", Decimal("1e200000"), "no number"),
        (Decimal, "numeric", Decimal("1e-20000"), "no number"),
        (Decimal, "numeric", Decimal(f"1.{'0' * 16383}1"), "no number"),
        (Decimal, "numeric", Decimal("1.23e-16382"), "no number"),
        (datetime, "timestamptz", datetime(2026, 1, 2), "v: 2026-01-02T00:00:00 has no time zone: give it one"),
        (datetime, "timestamp", datetime(2026, 1, 2, tzinfo=UTC), "has a time zone, which would be lost"),
        (datetime, "timestamp(3)", datetime(2026, 1, 2, 3, 4, 5, 6), "more than 3 digits after the second"),
        (time, "time", time(1, tzinfo=UTC), "has a time zone"),
        (dict[str, str], "jsonb", {"a": "\0"}, "null character, which jsonb does not store"),
        (dict[str, float], "jsonb", {"a": float("nan")}, "it holds nan, for which JSON has no number"),
        (list[int], "smallint[]", [1, 32768], "32768 is out of range"),
        (list[str], "text[]", ["a", "b\0"], "null character"),
        (int, "bigint", "1", f"v: '1' is str, not int {OF_TOTALS} bigint)"),
        (bytes, "bytea", "1", "v: '1' is str, not bytes"),
    ],
)  # fmt: skip
def test_what_the_column_would_refuse_is_refused(
    database: Database, type_: Any, column: str, value: Any, text: str
) -> None:
    """A value that the column does not hold, or would change, is an error that names field, value and column."""
    write = stored(database, type_, column)
    with pytest.raises((ValueError, TypeError), match=re.escape(text)):
        write(value)


@pytest.mark.parametrize(
    ("type_", "column", "wanted"),
    [
        (int, "text", "make it bigint"), (int, "double precision", "make it bigint"),
        (float, "numeric", "make it double precision"),
        (str, "uuid", "make it text"), (str, "jsonb", "make it text"), (Decimal, "double precision", "make it numeric"),
        (datetime, "date", "make it timestamp"), (date, "timestamp", "make it date"), (bytes, "text", "make it bytea"),
        (time, "timetz", "make it time without time zone"), (timedelta, "interval day", "make it interval"),
        (list[int], "text[]", "make it an array"), (dict[str, int], "text", "make it jsonb"),
        (UUID, "text", "make it uuid"),
    ],
)  # fmt: skip
def test_a_column_of_another_type_is_refused_at_the_start(
    database: Database, type_: Any, column: str, wanted: str
) -> None:
    """A field and a column that do not go together are an error of the check, which says what the column may be."""
    with pytest.raises(StoreError, match=f'table "public"."totals": its column \'v\' is .*{re.escape(wanted)}'):
        stored(database, type_, column)


@pytest.mark.parametrize(
    ("key", "fits", "refused"),
    [
        ((str, bytes), ("é" * 1000, b"x" * 600), ("é" * 1000, b"x" * 601)),
        ((str, int), ("x" * 2600, 1), ("x" * 2601, 1)), ((bytes,), (bytes(range(250)) * 10,), (b"x" * 2601,)),
    ],
)  # fmt: skip
def test_a_key_that_is_too_long_for_an_index_is_refused(database: Database, key: Any, fits: Any, refused: Any) -> None:
    """A key longer than what a btree surely holds is an error of its record; one that is as long as may be goes in."""
    names = tuple("abc"[: len(key)])
    row = msgspec.defstruct("Row", [*zip(names, key, strict=True), ("cents", int)])
    store = database.ready(row, mode="upsert", key=names)
    database.execute("ALTER TABLE totals ALTER a SET STORAGE EXTERNAL")
    assert store.apply(chunks(store, [row(*fits, 1), row(*fits, 2)]), entry(1))
    assert database.execute("SELECT cents FROM totals") == [(2,)]
    with pytest.raises(ValueError, match=r": a key of 2,601 bytes is longer than the 2,600 .* a digest of it"):
        store.encoder().encode([row(*fits, 1), row(*refused, 1)])


def test_a_key_of_a_delete_may_be_of_any_length(database: Database) -> None:
    """It needs no index, and finds what is there."""
    database.execute("CREATE TABLE totals (customer text, cents bigint)")
    database.execute("INSERT INTO totals SELECT string_agg(md5(n::text), ''), 1 FROM generate_series(1, 200) n")
    ((name, _),) = database.totals()
    store = database.ready(mode="delete", key=("customer",))
    assert store.apply(chunks(store, [Total(name, 0)]), entry(1))
    assert database.totals() == []


def test_a_refusal_leaves_the_other_records_alone(database: Database) -> None:
    """An encoder that has refused a record goes on with the others."""
    store = database.ready()
    encoder = store.encoder()
    total = of_type(int)
    with pytest.raises(TypeError, match="customer: the record has no such field"):
        encoder.encode([total(1)])
    assert encoder.encode([]) == []
    assert store.apply([], entry(1))

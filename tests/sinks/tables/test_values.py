"""Values in columns: each comes back equal, or is refused by the encoder with field, value and column."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from table_rows import ORIGIN, Total
from table_stores import Tables, on_mariadb, on_postgres

from exactlyonce.pipeline.errors import StoreError

UTC = timezone.utc
SIZES = "CREATE TYPE size AS ENUM ('s', 'l, or larger'); CREATE DOMAIN short AS varchar(3) NOT NULL"


class Size(Enum):
    SMALL = "s"
    LARGE = "l, or larger"


class Inner(msgspec.Struct):
    a: int
    b: str | None = None


ANY_TEXT = st.text(st.characters()) | st.text(st.sampled_from("'\"\\`%;,()-#/*{}\0\n\r\t\x1a\f\v é\u2028\U0001f600x"))
TEXTS = ANY_TEXT | st.sampled_from(["\\N", "\\.", "NULL", "'); DROP TABLE totals; -- ", "\\'", "''", "%s", ",\f", "a "])
ZONES = [UTC, timezone(timedelta(hours=5.5)), timezone(timedelta(hours=-23, seconds=7))]
DATETIMES = st.datetimes(datetime(2, 1, 1), datetime(9998, 1, 1))
SCALARS = st.none() | st.booleans() | st.integers(-(1 << 53), 1 << 53) | ANY_TEXT
DOCUMENTS = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3)
)
DRAWN: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers() | st.integers(-300, 300) | st.integers(-(1 << 63), (1 << 64) - 1),
    float: st.floats(),
    str: TEXTS,
    bytes: st.binary() | st.binary(max_size=2),
    Decimal: st.decimals() | st.decimals(-1000, 1000, places=2),
    datetime: DATETIMES | st.builds(lambda at: at.replace(microsecond=0), DATETIMES)
    | st.datetimes(datetime(1970, 1, 2), datetime(2038, 1, 18), timezones=st.sampled_from(ZONES))
    | st.datetimes(datetime(2, 1, 1), datetime(9998, 1, 1), timezones=st.sampled_from(ZONES)),
    date: st.dates(),
    time: st.times() | st.times().map(lambda at: at.replace(microsecond=at.microsecond // 1000 * 1000)),
    timedelta: st.timedeltas(timedelta(days=-99999), timedelta(days=99999))
    | st.timedeltas(timedelta(hours=-838), timedelta(hours=838)),
    UUID: st.uuids(),
    Inner: st.builds(Inner, a=st.integers(-(1 << 40), 1 << 40), b=st.none() | ANY_TEXT),
    dict[str, Any]: st.dictionaries(ANY_TEXT, DOCUMENTS, max_size=3),
    list[Any]: st.lists(DOCUMENTS, max_size=3),
    list[str | None]: st.lists(st.none() | TEXTS, max_size=4),
    list[bytes]: st.lists(st.binary(), max_size=4),
    tuple[int, ...]: st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=4).map(tuple),
}  # fmt: skip
COLUMNS: dict[str, list[tuple[Any, str]]] = {
    "postgres": [
        *((bool, "boolean"), (int, "smallint"), (int, "integer"), (int, "bigint"), (int, "numeric")),
        *((int, "numeric(3,0)"), (float, "real"), (float, "double precision"), (str, "text"), (str, "varchar(3)")),
        *((str, "char(3)"), (bytes, "bytea"), (Decimal, "numeric"), (Decimal, "numeric(5,2)")),
        *((datetime, "timestamptz"), (datetime, "timestamp"), (datetime, "timestamp(0)"), (date, "date")),
        *((time, "time"), (time, "time(3)"), (timedelta, "interval"), (UUID, "uuid"), (Inner, "jsonb")),
        *((dict[str, Any], "jsonb"), (dict[str, Any], "json"), (list[Any], "jsonb"), (list[str | None], "text[]")),
        *((list[str | None], "varchar(2)[]"), (list[bytes], "bytea[]"), (tuple[int, ...], "bigint[]")),
        *((tuple[int, ...], "smallint[]"),),
    ],
    "mariadb": [
        *((bool, "BOOLEAN"), (int, "TINYINT"), (int, "INT UNSIGNED"), (int, "BIGINT"), (int, "BIGINT UNSIGNED")),
        *((int, "DECIMAL(5)"), (float, "DOUBLE"), (float, "DOUBLE UNSIGNED"), (str, "LONGTEXT"), (str, "TINYTEXT")),
        *((str, "VARCHAR(3)"), (str, "CHAR(3)"), (str, "TEXT CHARACTER SET latin1")),
        (str, "TEXT CHARACTER SET utf8mb3"),
        *((bytes, "LONGBLOB"), (bytes, "VARBINARY(2)"), (bytes, "BINARY(2)"), (Decimal, "DECIMAL(38,9)")),
        *((Decimal, "DECIMAL(5,2)"), (Decimal, "DECIMAL(5,2) UNSIGNED"), (datetime, "DATETIME(6)")),
        *((datetime, "DATETIME"), (datetime, "TIMESTAMP(6) NULL"), (datetime, "TIMESTAMP NULL"), (date, "DATE")),
        *((time, "TIME(6)"), (time, "TIME(3)"), (timedelta, "TIME(6)"), (timedelta, "TIME"), (UUID, "UUID")),
        *((UUID, "CHAR(36)"), (UUID, "BINARY(16)"), (Inner, "JSON"), (dict[str, Any], "JSON"), (list[Any], "JSON")),
        *((dict[str, Any], "TINYTEXT"),),
    ],
}  # fmt: skip


def as_number(column: str, number: float | Decimal) -> Any:
    """A number that is equal to itself, and has no more digits than the column."""
    if math.isnan(number):
        return "NaN"
    return struct.unpack("f", struct.pack("f", number))[0] if column == "real" else number


def as_read(server: str, column: str, value: Any) -> Any:
    """A value as the plain driver of the server reads it."""
    if isinstance(value, float | Decimal):
        return as_number(column, value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Inner):
        return msgspec.to_builtins(value)
    if isinstance(value, tuple):
        return list(value)
    if server == "mariadb" and isinstance(value, datetime) and value.tzinfo:
        return value.astimezone(UTC).replace(tzinfo=None)
    if server == "mariadb" and isinstance(value, time):
        return datetime.combine(date(2000, 1, 1), value) - datetime(2000, 1, 1)
    return value


def as_found(type_: Any, column: str, found: Any) -> Any:
    """The rows of the plain driver, with JSON and UUIDs parsed, and without the blanks that fill a char."""
    if isinstance(found, float | Decimal):
        return as_number(column, found)
    if type_ is UUID and not isinstance(found, UUID):
        return UUID(bytes=found) if isinstance(found, bytes) else UUID(found)
    if column in ("JSON", "TINYTEXT") and type_ is not str:
        return json.loads(found)
    return found.rstrip(" ") if column.startswith("char") and found is not None else found


class Filled:
    """A table with a column for each of *columns*, of which each record fills one."""

    def __init__(self, tables: Tables, columns: Sequence[tuple[Any, str]]) -> None:
        self._tables, self._columns = tables, columns
        self._names = [f"c{number}" for number in range(len(columns))]
        sql = ", ".join(f"{name} {column}" for name, (_, column) in zip(self._names, columns, strict=True))
        tables.sql(f"CREATE TABLE totals (place bigint, {sql})")
        fields: list[Any] = [(name, type_ | None, None) for name, (type_, _) in zip(self._names, columns, strict=True)]
        self._type: Any = msgspec.defstruct("Row", [("place", int), *fields])
        self._store = tables.of(self._type)
        self._store.check()
        self._encoder = self._store.encoder()

    def refused(self, values: Sequence[tuple[int, Any]]) -> list[int]:
        """Write each value, by its column's number, and compare what comes back; -> the places of the others."""
        self._tables.sql("DELETE FROM totals")
        rows: dict[int, bytes] = {}
        says: dict[int, str] = {}
        for place, (number, value) in enumerate(values):
            try:
                (rows[place],) = self._encoder.encode([self._type(place, **{self._names[number]: value})])
            except (ValueError, TypeError) as error:
                says[place] = str(error).partition(": ")[0]
        assert all(name == self._names[values[place][0]] for place, name in says.items())
        self._store.write([b"".join(rows.values())])
        found = {row[0]: row[1:] for row in self._tables.sql("SELECT * FROM totals")}
        assert found.keys() == rows.keys()
        for place in rows:
            number, value = values[place]
            type_, column = self._columns[number]
            came_back = as_found(type_, column, found[place][number])
            assert came_back == as_read(self._tables.name, column, value), (column, value)
            assert [each for each in found[place] if each is not None] == [found[place][number]]
        return list(says)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_every_value_comes_back_or_is_refused(tables: Tables, data: st.DataObject) -> None:
    if not tables.filled:
        tables.filled.append(Filled(tables, COLUMNS[tables.name]))
    numbers = st.sampled_from(range(len(COLUMNS[tables.name])))
    values = numbers.flatmap(lambda number: st.tuples(st.just(number), DRAWN[COLUMNS[tables.name][number][0]]))
    tables.filled[0].refused(data.draw(st.lists(values, max_size=40)))


def nested(levels: int) -> Any:
    return [] if levels == 1 else [nested(levels - 1)]


FITS: dict[str, list[tuple[Any, str, Sequence[Any]]]] = {
    "postgres": [
        (int, "smallint", [-32768, 32767]), (int, "integer", [2**31 - 1]), (int, "bigint", [2**63 - 1, -(2**63)]),
        (int, "numeric", [10**300, 2**64]), (int, "numeric(3,0)", [999]),
        (float, "real", [1.5, math.nan, 3.4028234e38, 1.5e-45]), (float, "double precision", [-math.inf, 5]),
        (str, "varchar(3)", ["äöü"]), (str, "char(3)", ["a"]), (str, "size", ["l, or larger"]),
        (Size, "size", [Size.SMALL]), (str, "text", ["\\N", "\\.", "", "\t", "a\r\nb", "NULL", "{}", "\x01", "\\"]),
        (Decimal, "numeric(5,2)", [Decimal("-999.9900"), Decimal("-NaN")]),
        (Decimal, "numeric(2,4)", [Decimal("0.0099")]),
        (Decimal, "numeric", [Decimal(f"1.{'0' * 16382}1"), Decimal("NaN"), Decimal("1E+5")]),
        (datetime, "timestamp", [datetime(1, 1, 1)]), (datetime, "timestamp(0)", [datetime(9999, 12, 31, 23, 59, 59)]),
        (list[int], "jsonb", [[1, 2]]), (list[list[int]], "json", [[[1], []]]), (list[int], "smallint[]", [[1]]),
        (list[str], "varchar(2)[]", [["b"]]), (str | int, "jsonb", ["a\nb"]), (dict[str, str], "json", [{"a": "\0"}]),
        (dict[str, str], "jsonb", [{"a": "\\u0000"}]),
    ],
    "mariadb": [
        (str, "LONGTEXT", ["'); DROP TABLE totals; -- ", "\\", "\\'", "'", "''", "\\\\'", "\f", ",\f", "%s"]),
        (str, "LONGTEXT", ["", " ", "\0"]),
        (bytes, "LONGBLOB", [bytes(range(256)), b"\\'", b""]), (float, "DOUBLE", [5e-324, -math.ulp(0), 1e22, 0.1]),
        (float, "DOUBLE UNSIGNED", [0.0, -0.0, 5e-324, 1.7976931348623157e308]),
        (Decimal, "DECIMAL(38,9)", [*map(Decimal, ("-0.000000001", "-0", "1E+28", "1.0000", "7"))]),
        (int, "BIGINT UNSIGNED", [0, (1 << 64) - 1]), (list[Any], "JSON", [nested(31)]),
        (UUID, "CHAR(36)", [UUID(int=12345)]), (UUID, "BINARY(16)", [UUID(int=12345)]),
        (timedelta, "TIME", [timedelta(hours=838, minutes=59, seconds=59)]),
    ],
}  # fmt: skip


def test_values_at_the_edge_fit(tables: Tables) -> None:
    if tables.name == "postgres":
        tables.sql(SIZES)
    columns = [(type_, column) for type_, column, _ in FITS[tables.name]]
    values = [(number, value) for number, (_, _, fits) in enumerate(FITS[tables.name]) for value in fits]
    refused = Filled(tables, columns).refused(values)
    assert [(columns[values[place][0]][1], values[place][1]) for place in refused] == []


NO_NONE = "None does not fit, for the column is NOT NULL"
IN_POSTGRES, IN_MARIADB = '(the column of table "public"."totals" is', "(the column of table totals is"
REFUSED: dict[str, list[tuple[Any, str, Any, str]]] = {
    "postgres": [
        (int, "smallint", 32768, f"v: 32768 is out of range, -32768 to 32767 {IN_POSTGRES} smallint)"),
        (int, "bigint", -(2**63) - 1, "out of range"), (int, "numeric(3,0)", 1000, "does not fit 3 digits"),
        (float, "real", 3.5e38, "out of range"), (float, "real", 1e-50, "out of range"),
        (float, "real", -3.4028236e38, "out of range"),
        (str, "varchar(3)", "abcd", f"v: 'abcd' has 4 characters, and 3 fit {IN_POSTGRES} character varying(3))"),
        (str, "text", "a\0b", r"v: 'a\x00b' has a null character"), (str, "text", "\ud800", "half a character"),
        (str, "size", "xl", "none of its labels, s, l, or larger"), (str, "short", "abcd", "3 fit"),
        (str, "char(3)", "a ", "v: 'a ' ends with a blank, which char drops: use varchar or text"),
        (list[str], "char(3)[]", ["a", "b "], "'b ' ends with a blank"), (str, "bpchar", "a ", "ends with a blank"),
        (str | None, "text not null", None, f"v: {NO_NONE} {IN_POSTGRES} text NOT NULL)"),
        (str | None, "short", None, "NOT NULL"),
        (Decimal, "numeric(5,2)", Decimal("1.005"), "v: 1.005 does not fit 3 digits before the point and 2 after it"),
        (Decimal, "numeric(5,2)", Decimal(1000), "round it"), (Decimal, "numeric(5,2)", Decimal("inf"), "does not fit"),
        (Decimal, "numeric", Decimal("sNaN"), "no number that numeric holds"),
        *((Decimal, "numeric", Decimal(text), "no number")
          for text in ("1e200000", "1e-20000", f"1.{'0' * 16383}1", "1.23e-16382")),
        (datetime, "timestamptz", datetime(2026, 1, 2), "v: 2026-01-02T00:00:00 has no time zone: give it one"),
        (datetime, "timestamp", datetime(2026, 1, 2, tzinfo=UTC), "has a time zone, which would be lost"),
        (datetime, "timestamp(3)", datetime(2026, 1, 2, 3, 4, 5, 6), "more than 3 digits after the second"),
        (time, "time", time(1, tzinfo=UTC), "has a time zone"),
        (dict[str, str], "jsonb", {"a": "\0"}, "null character, which jsonb does not store"),
        (dict[str, float], "jsonb", {"a": math.nan}, "it holds nan, for which JSON has no number"),
        (list[int], "smallint[]", [1, 32768], "32768 is out of range"),
        (list[str], "text[]", ["a", "b\0"], "null character"),
        (int, "bigint", "1", f"v: '1' is str, not int {IN_POSTGRES} bigint)"),
        (bytes, "bytea", "1", "v: '1' is str, not bytes"),
    ],
    "mariadb": [
        (int, "TINYINT", 128, f"v: it is outside of -128 to 127 {IN_MARIADB} tinyint"),
        (int, "INT UNSIGNED", -1, "it is outside of 0 to 4294967295"), (int, "BIGINT", 1 << 63, "it is outside of"),
        (int | None, "BIGINT NOT NULL", None, f"v: {NO_NONE} {IN_MARIADB} bigint(20) NOT NULL)"),
        (int, "BIGINT", "1", f"v: '1' is str, not int {IN_MARIADB} bigint"),
        (int, "DECIMAL(5)", 100_000, "it has more than 5 digits before the point"),
        (float, "DOUBLE", math.nan, "it is nan, which MySQL does not have"),
        (float, "DOUBLE", -math.inf, "it is -inf, which MySQL does not have"),
        (float, "DOUBLE UNSIGNED", -1.0, f"v: it is negative {IN_MARIADB} double unsigned"),
        (Decimal, "DECIMAL(5,2)", Decimal("1000"), "it has more than 3 digits before the point"),
        (Decimal, "DECIMAL(5,2)", Decimal("1.234"), "it has more than 2 digits after the point"),
        (Decimal, "DECIMAL(5,2)", Decimal("1e-999999"), "it has more than 2 digits after the point"),
        (Decimal, "DECIMAL(5,2) UNSIGNED", Decimal("-1"), "it is negative"),
        (Decimal, "DECIMAL(5,2)", Decimal("NaN"), "it is NaN, which MySQL does not have"),
        (str, "VARCHAR(3)", "four", "it has 4 characters, and 3 fit"),
        (str, "VARCHAR(3)", "ab  ", "it has 4 characters, and 3 fit"),
        (str, "CHAR(3)", "a ", "it ends with a blank, which CHAR would drop: use VARCHAR"),
        (str, "TINYTEXT", "é" * 128, "it has 256 bytes, and 255 fit"),
        (str, "TEXT CHARACTER SET latin1", "Ω", "'Ω' is in it, which has no place in latin1"),
        (str, "TEXT CHARACTER SET utf8mb3", "\U0001f600", "which has no place in utf8mb3: use utf8mb4"),
        (str, "TEXT CHARACTER SET ascii", "é", "'é' is in it, which has no place in ascii"),
        (str, "LONGTEXT", "\ud800", "'\\ud800' is in it, which has no place in utf8mb4"),
        (bytes, "VARBINARY(2)", b"abc", "it has 3 bytes, and 2 fit"),
        (bytes, "BINARY(2)", b"a", "it has 1 bytes, and exactly 2 fit"),
        (datetime, "DATETIME", datetime(2026, 1, 1, microsecond=1), "its fraction of a second has more than 0 digits"),
        (datetime, "DATETIME(6)", datetime(2026, 1, 1, tzinfo=UTC), "which DATETIME does not keep: use TIMESTAMP"),
        (datetime, "DATETIME(6)", datetime(999, 1, 1), "it is before the year 1000"),
        (datetime, "TIMESTAMP(6) NULL", datetime(2026, 1, 1), "it has no time zone, and a TIMESTAMP is a moment"),
        (datetime, "TIMESTAMP(6) NULL", datetime(2039, 1, 1, tzinfo=UTC), "it is outside of 1970-01-01"),
        (datetime, "TIMESTAMP NULL", datetime(2026, 1, 1, 0, 0, 0, 1, UTC), "fraction of a second has more than 0"),
        (date, "DATE", date(1, 1, 1), "it is before the year 1000"),
        (time, "TIME(3)", time(1, 2, 3, 4), "its fraction of a second has more than 3 digits"),
        (time, "TIME", time(1, tzinfo=UTC), "it has a time zone, which TIME does not keep"),
        (timedelta, "TIME", timedelta(hours=839), "it is longer than 838:59:59"),
        (UUID, "UUID", UUID("7dfb4d2e-17f5-c13e-6ce3-8d733ed6ff1a"), "it is of no variant that the type UUID takes"),
        (dict, "JSON", {"a": [math.nan]}, "it holds nan, for which JSON has no number"),
        (dict, "TINYTEXT", {"a": "x" * 300}, "it has 308 characters, and 255 fit"),
        (list, "JSON", nested(32), "v: it is nested deeper than 31 levels"),
    ],
}  # fmt: skip


def test_what_the_column_would_refuse_or_change_is_refused(tables: Tables) -> None:
    if tables.name == "postgres":
        tables.sql(SIZES)
    for number, (type_, column, value, text) in enumerate(REFUSED[tables.name]):
        row = msgspec.defstruct("Row", [("v", type_)])
        tables.sql(f"CREATE TABLE t{number} (v {column})")
        encoder = tables.of(row, f"t{number}").encoder()
        said = text.replace("totals", f"t{number}")
        with pytest.raises((ValueError, TypeError), match=re.escape(said)):
            encoder.encode([row(value)])


ROUNDING = "which rounds: ALTER TABLE `totals` MODIFY `v` DOUBLE"
OTHER_TYPES: dict[str, list[tuple[Any, str, str]]] = {
    "postgres": [
        (int, "text", "make it bigint"), (int, "double precision", "make it bigint"),
        (float, "numeric", "make it double precision"), (str, "uuid", "make it text"),
        (str, "jsonb", "make it text"), (Decimal, "double precision", "make it numeric"),
        (datetime, "date", "make it timestamp"), (date, "timestamp", "make it date"),
        (bytes, "text", "make it bytea"), (time, "timetz", "make it time without time zone"),
        (timedelta, "interval day", "make it interval"), (list[int], "text[]", "make it an array"),
        (dict[str, int], "text", "make it jsonb"), (UUID, "text", "make it uuid"),
    ],
    "mariadb": [(float, "DOUBLE(10,2)", ROUNDING), (float, "DOUBLE(10,0) UNSIGNED", f"{ROUNDING} UNSIGNED")],
}  # fmt: skip


def test_a_column_of_another_type(tables: Tables) -> None:
    for type_, column, wanted in OTHER_TYPES[tables.name]:
        tables.sql("DROP TABLE IF EXISTS totals")
        tables.sql(f"CREATE TABLE totals (v {column})")
        row = msgspec.defstruct("Row", [("v", type_)])
        with pytest.raises(StoreError, match=rf"column 'v' is .*{re.escape(wanted)}") as raised:
            tables.of(row).check()
        for alter in re.findall(r"ALTER TABLE `totals` MODIFY `v` [A-Z ]+", str(raised.value)):
            assert wanted.endswith(alter)
            tables.sql(alter)
            tables.of(row).check()


CREATED = {
    "postgres": (
        "SELECT attname, format_type(atttypid, atttypmod), attnotnull, attnum = ANY(i.indkey) FROM pg_attribute "
        "JOIN pg_index i ON indrelid = attrelid AND indisprimary WHERE attrelid = 'totals'::regclass AND attnum > 0 "
        "ORDER BY attnum",
        [("key", "text", True, True), ("perhaps", "bigint", False, False), ("sizes", "double precision[]", True, False),
         ("any", "jsonb", False, False), ("size", "text", True, False),
         ("at", "timestamp with time zone", True, False)],
    ),
    "mariadb": (
        "SELECT column_name, column_type, is_nullable = 'NO', column_key = 'PRI' FROM information_schema.columns "
        "WHERE table_schema = DATABASE() AND table_name = 'totals' ORDER BY ordinal_position",
        [("key", "varchar(255)", True, True), ("perhaps", "bigint(20)", False, False),
         ("sizes", "longtext", True, False), ("any", "longtext", False, False), ("size", "longtext", True, False),
         ("at", "datetime(6)", True, False)],
    ),
}  # fmt: skip


def test_the_columns_that_are_created(tables: Tables) -> None:
    """Columns are created as on the page: NOT NULL if the field is never None, a primary key except in append."""

    class Row(msgspec.Struct):
        key: str
        perhaps: int | None
        sizes: list[float]
        any: Any
        size: Size
        at: datetime

    tables.of(Row, create=True, mode="upsert", key=("key",)).check()
    query, expected = CREATED[tables.name]
    assert tables.sql(query) == expected
    appending = tables.of(Row, "log", create=True)
    appending.check()
    appending.fence("p", "log", 1, ORIGIN)
    at = datetime(2026, 1, 2, tzinfo=UTC if tables.name == "postgres" else None)
    appending.write(appending.encoder().encode([Row("a", None, [], None, Size.SMALL, at)]) * 2)
    assert tables.sql("SELECT count(*) FROM log") == [(2,)]


# --- what only one of them has ----------------------------------------------------------------------------------------


@on_postgres
@pytest.mark.parametrize(
    ("key", "fits", "refused"),
    [
        ((str, bytes), ("é" * 1000, b"x" * 600), ("é" * 1000, b"x" * 601)),
        ((str, int), ("x" * 2600, 1), ("x" * 2601, 1)), ((bytes,), (bytes(range(250)) * 10,), (b"x" * 2601,)),
    ],
)  # fmt: skip
def test_a_key_that_is_too_long_for_an_index(tables: Tables, key: Any, fits: Any, refused: Any) -> None:
    names = tuple("abc"[: len(key)])
    row: Any = msgspec.defstruct("Row", [*zip(names, key, strict=True), ("cents", int)])
    store = tables.of(row, create=True, mode="upsert", key=names)
    store.check()
    tables.sql("ALTER TABLE totals ALTER a SET STORAGE EXTERNAL")
    store.write([b"".join(store.encoder().encode([row(*fits, 1), row(*fits, 2)]))])
    assert tables.sql("SELECT cents FROM totals") == [(2,)]
    with pytest.raises(ValueError, match=r": a key of 2,601 bytes is longer than the 2,600 .* a digest of it"):
        store.encoder().encode([row(*fits, 1), row(*refused, 1)])


@on_mariadb
@pytest.mark.parametrize("mode", ["'ANSI,NO_BACKSLASH_ESCAPES,STRICT_ALL_TABLES'", "'ORACLE'"])
def test_a_literal_means_the_same_in_every_mode(tables: Any, mode: str) -> None:
    """Rows are read alike whatever the sql_mode, which the session pins all the same."""
    tables.sql("CREATE TABLE totals (customer LONGTEXT, cents INT)")
    texts = ["'; --", "\\", "\\'", 'a"b', "`", "x\\\n'"]
    encoded = tables.of(Total).encoder().encode([Total(text, number) for number, text in enumerate(texts)])
    with tables.server.connection() as connection:
        connection.query(f"SET sql_mode = {mode}")
        connection.query(b"INSERT INTO totals VALUES " + b"".join(encoded)[:-2])
    assert [text for text, _ in tables.sql("SELECT customer, cents FROM totals ORDER BY cents")] == texts


@on_mariadb
def test_a_row_longer_than_a_packet(tables: Any) -> None:
    tables.sql("CREATE TABLE totals (customer LONGTEXT, cents INT)")
    tables.sql("SET GLOBAL max_allowed_packet = 1048576")
    try:
        encoder = tables.of(Total).encoder()
        with pytest.raises(ValueError, match=r"longer than the 1048\d+ that max_allowed_packet leaves"):
            encoder.encode([Total("x" * 1_100_000, 1)])
    finally:
        tables.sql("SET GLOBAL max_allowed_packet = 16777216")

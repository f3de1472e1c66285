"""Values as literals of SQL: every value comes back from the server as it was, or is refused with a reason."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from exactlyonce.pipeline.errors import StoreError

FEW = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
UTF8 = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
NASTY = st.text(st.sampled_from("'\"\\`%;,()-#/*\0\n\r\x1a\f\v é\u2028\U0001f600x"), max_size=30)
ZONES = st.sampled_from([timezone.utc, timezone(timedelta(hours=5, minutes=30))])


class Text(msgspec.Struct):
    id: int
    value: str


class Blob(msgspec.Struct):
    id: int
    value: bytes


class Numbers(msgspec.Struct):
    id: int
    ratio: float
    price: Decimal
    is_new: bool
    none: int | None


class Times(msgspec.Struct):
    id: int
    local: datetime
    moment: datetime
    day: date
    hour: time
    length: timedelta


class Document(msgspec.Struct):
    id: int
    value: dict[str, Any]
    items: list[Any]
    uuid: UUID


Back = Callable[[Any, str, Sequence[Any]], list[tuple[Any, ...]]]


@pytest.fixture
def back(mariadb: Any, stores: Callable[..., Any]) -> Iterator[Back]:
    """`back(type_, columns, records)`: the rows that the records have become, read by the plain driver."""

    def write(type_: Any, columns: str, records: Sequence[Any]) -> list[tuple[Any, ...]]:
        if not made:
            reader.execute(f"CREATE TABLE totals (id INT PRIMARY KEY, {columns})")
            made.append(stores(type_))
            made.append(made[0].encoder())
        reader.execute("DELETE FROM totals")
        rows = made[1].encode(records)
        assert len(rows) == len(records)
        made[0].write([b"".join(rows)])
        reader.execute("SELECT * FROM totals ORDER BY id")
        return [row[1:] for row in reader.fetchall()]

    made: list[Any] = []
    with mariadb.connection() as connection:
        reader = connection.cursor()
        yield write


@given(texts=st.lists(UTF8 | NASTY, max_size=8))
@example(texts=["'); DROP TABLE totals; -- ", "\\", "\\'", "'", "''", "\\\\'", "\f", ",\f", "%s", "", " ", "\0"])
@FEW
def test_every_text_comes_back(back: Back, texts: list[str]) -> None:
    """Quotes, backslashes, control characters and all planes of Unicode: what is read is what was written."""
    assert back(Text, "value LONGTEXT", [Text(n, text) for n, text in enumerate(texts)]) == [(text,) for text in texts]


@given(values=st.lists(st.binary(max_size=300), max_size=8))
@example(values=[bytes(range(256)), b"\\'", b""])
@FEW
def test_every_bytes_value_comes_back(back: Back, values: list[bytes]) -> None:
    """Bytes of any value are read as they were written."""
    rows = back(Blob, "value LONGBLOB", [Blob(n, value) for n, value in enumerate(values)])
    assert rows == [(value,) for value in values]


@given(
    rows=st.lists(
        st.tuples(
            st.floats(allow_nan=False, allow_infinity=False),
            st.decimals(allow_nan=False, allow_infinity=False, places=9).filter(lambda value: abs(value) < 10**29),
            st.booleans(),
            st.none() | st.integers(0, (1 << 64) - 1),
        ),
        max_size=8,
    )
)
@example(rows=[(5e-324, Decimal("-0.000000001"), True, None), (1.7976931348623157e308, Decimal("-0"), False, 0)])
@example(
    rows=[(0.1, Decimal("1E+28"), True, 1), (-1e22, Decimal("1.0000"), True, 1), (2.0**53 + 2, Decimal(7), True, 1)]
)
@FEW
def test_every_number_comes_back(back: Back, rows: list[tuple[Any, ...]]) -> None:
    """Doubles to the last bit, decimals to the last digit, unsigned integers up to 64 bits, None as NULL."""
    columns = "ratio DOUBLE NOT NULL, price DECIMAL(38,9) NOT NULL, is_new BOOLEAN NOT NULL, none BIGINT UNSIGNED"
    assert back(Numbers, columns, [Numbers(n, *row) for n, row in enumerate(rows)]) == rows


@given(
    rows=st.lists(
        st.tuples(
            st.datetimes(datetime(1000, 1, 1)),
            st.datetimes(datetime(1970, 1, 2), datetime(2038, 1, 18), timezones=ZONES),
            st.dates(date(1000, 1, 1)),
            st.times(),
            st.timedeltas(timedelta(hours=-838), timedelta(hours=838)),
        ),
        max_size=8,
    )
)  # fmt: skip
@FEW
def test_every_time_comes_back(back: Back, rows: list[tuple[Any, ...]]) -> None:
    """Naive times in DATETIME, moments of any zone in TIMESTAMP, as UTC; days, hours, lengths; to the microsecond."""
    columns = "local DATETIME(6), moment TIMESTAMP(6) NULL, day DATE, hour TIME(6), length TIME(6)"
    midnight = datetime(2000, 1, 1)
    assert back(Times, columns, [Times(n, *row) for n, row in enumerate(rows)]) == [
        (
            local,
            moment.astimezone(timezone.utc).replace(tzinfo=None),
            day,
            midnight.replace(hour=hour.hour, minute=hour.minute, second=hour.second, microsecond=hour.microsecond)
            - midnight,
            length,
        )
        for local, moment, day, hour, length in rows
    ]


UUIDS = st.uuids().filter(lambda uuid: not uuid.bytes[6] & -uuid.bytes[8] & 0x80)
SCALARS = st.none() | st.booleans() | st.integers(-(1 << 53), 1 << 53) | UTF8 | NASTY
NESTED = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(UTF8, inner, max_size=3))


DOCUMENTS = st.tuples(st.dictionaries(NASTY, NESTED, max_size=3), st.lists(NESTED, max_size=3), UUIDS)


@given(rows=st.lists(DOCUMENTS, max_size=5))
@FEW
def test_every_document_comes_back(back: Back, rows: list[tuple[Any, ...]]) -> None:
    """Dicts, lists and what is nested come back as the JSON that they are; UUIDs in a column of that type."""
    found = back(Document, "value JSON, items JSON, uuid UUID", [Document(n, *row) for n, row in enumerate(rows)])
    assert [(json.loads(value), json.loads(items), UUID(uuid)) for value, items, uuid in found] == rows


def test_a_double_without_a_sign_holds_what_is_not_negative(mariadb: Any, back: Back) -> None:
    """Zero, and whatever is above it, comes back from a column that is UNSIGNED."""
    row = msgspec.defstruct("Ratio", [("id", int), ("value", float)])
    values = [0.0, -0.0, 5e-324, 1.7976931348623157e308]
    found = back(row, "value DOUBLE UNSIGNED NOT NULL", [row(n, value) for n, value in enumerate(values)])
    assert found == [(value,) for value in values]


@pytest.mark.parametrize(("column", "made"), [("DOUBLE(10,2)", "DOUBLE"), ("DOUBLE(10,0) UNSIGNED", "DOUBLE UNSIGNED")])
def test_a_double_that_rounds_is_refused(mariadb: Any, stores: Callable[..., Any], column: str, made: str) -> None:
    """A column with a number of digits behind the point is refused at the start, with the SQL that takes them away."""
    mariadb.sql(f"CREATE TABLE totals (value {column})")
    row = msgspec.defstruct("Ratio", [("value", float)])
    with pytest.raises(StoreError, match=r"column 'value' is double\(10,.\).*, which rounds: ALTER") as raised:
        stores(row).check()
    (alter,) = re.findall(r"ALTER TABLE `totals` MODIFY `value` [A-Z ]+", str(raised.value))
    assert alter.endswith(f" {made}")
    mariadb.sql(alter)
    stores(row).check()


def test_a_uuid_goes_into_characters_and_bytes(mariadb: Any, stores: Callable[..., Any]) -> None:
    """A UUID is 36 characters or 16 bytes, as the column has it."""

    class Ids(msgspec.Struct):
        text: UUID
        short: UUID

    mariadb.sql("CREATE TABLE totals (text CHAR(36), short BINARY(16))")
    store, uuid = stores(Ids), UUID(int=12345)
    store.write(store.encoder().encode([Ids(uuid, uuid)]))
    assert mariadb.sql("SELECT * FROM totals") == [(str(uuid), uuid.bytes)]


@pytest.mark.parametrize("mode", ["''", "'ANSI,NO_BACKSLASH_ESCAPES,STRICT_ALL_TABLES'", "'ORACLE'", "'ANSI_QUOTES'"])
def test_a_literal_means_the_same_in_every_mode(mariadb: Any, stores: Callable[..., Any], mode: str) -> None:
    """Rows are read alike whatever the sql_mode, which the session pins all the same."""
    mariadb.sql("CREATE TABLE totals (id INT PRIMARY KEY, value LONGTEXT)")
    texts = ["'; --", "\\", "\\'", 'a"b', "`", "x\\\n'"]
    encoded = stores(Text).encoder().encode([Text(n, text) for n, text in enumerate(texts)])
    with mariadb.connection() as connection:
        connection.query(f"SET sql_mode = {mode}")
        connection.query(b"INSERT INTO totals VALUES " + b"".join(encoded)[:-2])
    assert [row[1] for row in mariadb.sql("SELECT * FROM totals ORDER BY id")] == texts


REFUSED: list[tuple[str, Any, Any, str]] = [
    ("TINYINT", int, 128, "value: it is outside of -128 to 127 (the column of table totals is tinyint"),
    ("INT UNSIGNED", int, -1, "it is outside of 0 to 4294967295"),
    ("BIGINT", int, 1 << 63, "it is outside of"),
    ("BIGINT NOT NULL", int, None, "value: it is None (the column of table totals is bigint(20) NOT NULL)"),
    ("BIGINT", int, "1", "value: '1' is str, not int (the column of table totals is bigint"),
    ("DECIMAL(5)", int, 100_000, "it has more than 5 digits before the point"),
    ("DOUBLE", float, float("nan"), "it is nan, which MySQL does not have"),
    ("DOUBLE", float, float("-inf"), "it is -inf, which MySQL does not have"),
    ("DOUBLE UNSIGNED", float, -1.0, "value: it is negative (the column of table totals is double unsigned"),
    ("DECIMAL(5,2)", Decimal, Decimal("1000"), "it has more than 3 digits before the point"),
    ("DECIMAL(5,2)", Decimal, Decimal("1.234"), "it has more than 2 digits behind the point"),
    ("DECIMAL(5,2)", Decimal, Decimal("1e-999999"), "it has more than 2 digits behind the point"),
    ("DECIMAL(5,2) UNSIGNED", Decimal, Decimal("-1"), "it is negative"),
    ("DECIMAL(5,2)", Decimal, Decimal("NaN"), "it is NaN, which MySQL does not have"),
    ("VARCHAR(3)", str, "four", "it has 4 characters, and 3 fit"),
    ("VARCHAR(3)", str, "ab  ", "it has 4 characters, and 3 fit"),
    ("CHAR(3)", str, "a ", "it ends with a blank, which CHAR would drop: use VARCHAR"),
    ("TINYTEXT", str, "é" * 128, "it has 256 bytes, and 255 fit"),
    ("TEXT CHARACTER SET latin1", str, "Ω", "'Ω' is in it, which has no place in latin1"),
    ("TEXT CHARACTER SET utf8mb3", str, "\U0001f600", "which has no place in utf8mb3: use utf8mb4"),
    ("TEXT CHARACTER SET ascii", str, "é", "'é' is in it, which has no place in ascii"),
    ("LONGTEXT", str, "\ud800", "'\\ud800' is in it, which has no place in utf8mb4"),
    ("VARBINARY(2)", bytes, b"abc", "it has 3 bytes, and 2 fit"),
    ("BINARY(2)", bytes, b"a", "it has 1 bytes, and exactly 2 fit"),
    ("DATETIME", datetime, datetime(2026, 1, 1, microsecond=1), "its fraction of a second has more than 0 digits"),
    ("DATETIME(6)", datetime, datetime(2026, 1, 1, tzinfo=timezone.utc), "which DATETIME does not keep: use TIMESTAMP"),
    ("DATETIME(6)", datetime, datetime(999, 1, 1), "it is before the year 1000"),
    ("TIMESTAMP(6) NULL", datetime, datetime(2026, 1, 1), "it has no time zone, and a TIMESTAMP is a moment"),
    ("TIMESTAMP(6) NULL", datetime, datetime(2039, 1, 1, tzinfo=timezone.utc), "it is outside of 1970-01-01"),
    (
        "TIMESTAMP NULL",
        datetime,
        datetime(2026, 1, 1, 0, 0, 0, 1, timezone.utc),
        "fraction of a second has more than 0",
    ),
    ("DATE", date, date(1, 1, 1), "it is before the year 1000"),
    ("TIME(3)", time, time(1, 2, 3, 4), "its fraction of a second has more than 3 digits"),
    ("TIME", time, time(1, tzinfo=timezone.utc), "it has a time zone, which TIME does not keep"),
    ("TIME", timedelta, timedelta(hours=839), "it is longer than 838:59:59"),
    ("UUID", UUID, UUID("7dfb4d2e-17f5-c13e-6ce3-8d733ed6ff1a"), "it is of no variant that the type UUID takes"),
    ("JSON", dict, {"a": [float("nan")]}, "it holds nan, for which JSON has no number"),
    ("TINYTEXT", dict, {"a": "x" * 300}, "it has 308 characters, and 255 fit"),
]


@pytest.mark.parametrize(
    ("column", "type_", "value", "said"), REFUSED, ids=[f"{c}-{v!r:.12}" for c, _, v, _ in REFUSED]
)
def test_what_would_be_changed_or_refused_is_refused_before(
    mariadb: Any, stores: Callable[..., Any], column: str, type_: Any, value: Any, said: str
) -> None:
    """The encoder names the field, what is wrong with the value, and the column; the server is not asked."""
    row = msgspec.defstruct("Row", [("value", type_ | None if value is None else type_)])
    mariadb.sql(f"CREATE TABLE totals (value {column})")
    encoder = stores(row).encoder()
    with pytest.raises((ValueError, TypeError), match=re.escape(said)):
        encoder.encode([row(value=value)])
    assert mariadb.sql("SELECT count(*) FROM totals") == [(0,)]


def test_json_is_refused_where_the_server_would_find_it_too_deep(mariadb: Any, stores: Callable[..., Any]) -> None:
    """MariaDB takes 31 levels of JSON; a level more is refused by the encoder, and would be by the server."""
    mariadb.sql("CREATE TABLE totals (id INT, value JSON, items JSON, uuid UUID)")
    store = stores(Document)

    def nested(levels: int) -> Any:
        return [] if levels == 1 else [nested(levels - 1)]

    store.write(store.encoder().encode([Document(1, {}, nested(31), UUID(int=1))]))
    with pytest.raises(ValueError, match="items: it is nested deeper than 31 levels"):
        store.encoder().encode([Document(1, {}, nested(32), UUID(int=1))])
    assert mariadb.sql("SELECT json_valid(%s)", [json.dumps(nested(32))]) == [(0,)]


def test_a_row_longer_than_a_packet_is_refused(mariadb: Any, stores: Callable[..., Any]) -> None:
    """What the server would not take as one statement is refused by the encoder."""
    mariadb.sql("CREATE TABLE totals (id INT, value LONGTEXT)")
    mariadb.sql("SET GLOBAL max_allowed_packet = 1048576")
    try:
        encoder = stores(Text).encoder()
        with pytest.raises(ValueError, match=r"longer than the 1048\d+ that max_allowed_packet leaves"):
            encoder.encode([Text(1, "x" * 1_100_000)])
    finally:
        mariadb.sql("SET GLOBAL max_allowed_packet = 16777216")

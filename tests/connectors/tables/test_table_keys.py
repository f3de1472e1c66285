"""Keys of tables: of every type that is taken, in the database's order; what cannot be read by a key is refused."""

from __future__ import annotations

from datetime import date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
import pytest
from shop import on_postgres
from table_reading import Named, read

from exactlyonce.connectors import tables
from exactlyonce.pipeline.errors import ConfigError, Halt


@pytest.fixture
def pages_of_two(monkeypatch: pytest.MonkeyPatch, shop: Any) -> None:
    module = "postgres" if shop.kind == "postgres" else "mysql"
    for name in (f"exactlyonce.connectors.{module}.table_rows", tables.__name__):
        monkeypatch.setattr(f"{name}.PAGE_ROWS", 2)


TEXTS = ["''", "'a'", "'B'", "'b ä'", "'ab'", "'C'", "'%s'", "'é'", "'z{0}'"]
INTEGERS = ["-5", "0", "3", "20", "100"]
DATES = ["'2026-01-01'", "'1969-12-31'", "'2026-11-27'", "'2026-02-01'"]
POSTGRES = {
    "bigint": [*INTEGERS, "9223372036854775807"], "numeric": ["-1.5", "0.1", "0.10001", "12", "1e30"],
    "text": TEXTS, 'text COLLATE "und-x-icu"': TEXTS, "char(5)": TEXTS,
    "uuid": ["'00000000-0000-0000-0000-00000000000a'", "'f0000000-0000-0000-0000-000000000000'", "gen_random_uuid()"],
    "timestamp": [*DATES, "'2026-01-01 00:00:00.000001'"],
    "timestamptz": ["'2026-01-01 05:00+05'", "'2026-01-01 00:00:00.5+00'", "'1900-01-01'"],
    "bytea": [r"'\x00'", r"'\xff00'", r"'\x'", r"'\x61'"],
}  # fmt: skip
MARIADB = {
    "int": INTEGERS, "bigint unsigned": ["0", "18446744073709551615", "9"], "decimal(20,5)": ["-1.5", "0.1", "12"],
    "varchar(9) COLLATE utf8mb4_general_ci": ["''", "'a'", "'B'", "'ab'", "'%s'", "'z{0}'"],
    "varchar(9) COLLATE utf8mb4_bin": TEXTS, "varchar(9) CHARACTER SET latin1": ["'a'", "'B'", "'é'"],
    "uuid": ["'00000000-0000-0000-0000-00000000000a'", "'f0000000-0000-0000-0000-000000000000'", "uuid()"],
    "datetime(6)": [*DATES, "'2026-01-01 00:00:00.000001'"],
    "timestamp(3)": ["'2026-01-01 00:00:00.5'", "'2026-01-01'", "'2000-01-01'"],
    "varbinary(9)": ["x'00'", "x'ff00'", "x'61'", "''"],
}  # fmt: skip


@pytest.mark.exhaustive(but=["postgres-text", "mariadb-int"])
@pytest.mark.parametrize(
    ("shop", "type_", "values"),
    [
        pytest.param(kind, type_, values, id=f"{kind}-{type_}")
        for kind, types in {"postgres": POSTGRES, "mariadb": MARIADB}.items()
        for type_, values in types.items()
    ],
    indirect=["shop"],
)
def test_keys_of_every_type(type_: str, values: list[str], shop: Any, pages_of_two: None) -> None:
    """Alone and as a part of a key, whose columns have names that have to be quoted."""
    quote = '"' if shop.kind == "postgres" else "`"
    first, second = f"{quote}a % key{quote}", f"{quote}Select{quote}"
    columns = f"{first} {type_} NOT NULL, {second} int NOT NULL, name varchar(9) NOT NULL"
    shop.sql(f"CREATE TABLE one ({columns}, PRIMARY KEY ({first}))")
    shop.sql(f"CREATE TABLE two ({columns}, PRIMARY KEY ({second}, {first}))")
    for number, value in enumerate(values):
        shop.sql(f"INSERT INTO one VALUES ({value}, {number % 2}, '{number}')")
    shop.sql("INSERT INTO two SELECT * FROM one")
    by_first = [row[0] for row in shop.sql(f"SELECT name FROM one ORDER BY {first}")]
    by_both = [row[0] for row in shop.sql(f"SELECT name FROM two ORDER BY {second}, {first}")]
    assert [row.name for row in read(shop.source("one", key="a % key", value=Named))] == by_first
    assert [row.name for row in read(shop.source("two", key=("Select", "a % key"), value=Named))] == by_both
    assert len(by_both) == len(values)


@on_postgres
def test_splits_have_each_row_once(shop: Any) -> None:
    shop.sql("CREATE TABLE large (shop int, number text, name text, PRIMARY KEY (shop, number))")
    shop.sql("INSERT INTO large SELECT i %% 7, 'n' || i, i::text FROM generate_series(1, %s) i", 4_000)
    source = shop.source("large", key=("shop", "number"), value=Named)
    finder = source.finder("s")
    splits = finder.find(())
    finder.close()
    assert len(splits) == 8
    found = [row.name for row in read(source, 99)]
    assert sorted(map(int, found)) == list(range(1, 4_001))


def test_an_empty_table_has_ended(shop: Any) -> None:
    shop.sql("CREATE TABLE empty (id int PRIMARY KEY, name text)")
    assert read(shop.source("empty", value=Named)) == []


WRONG = {
    "id int, name text": "takes NULL",
    "id int NOT NULL, name text": "it has no unique index on (id)",
    "id float NOT NULL PRIMARY KEY, name text": "its column 'id' of the key is float",
    "id int PRIMARY KEY": "it has no column 'name'",
    "other int PRIMARY KEY, name text": "it has no column 'id'",
    "id int PRIMARY KEY, name int": "which the record's field, str, does not take",
    "id int NOT NULL, other int NOT NULL, name text, UNIQUE (id, other)": "it has no unique index on (id)",
}


def test_a_table_that_cannot_be_read_by_its_key(shop: Any) -> None:
    for number, (columns, said) in enumerate(WRONG.items()):
        shop.sql(f"CREATE TABLE wrong{number} ({columns})")
        with pytest.raises(ConfigError) as raised:
            shop.source(f"wrong{number}", value=Named).finder("s").find(())
        assert said in str(raised.value)


def test_no_table(shop: Any) -> None:
    with pytest.raises(ConfigError, match="there is no table missing"):
        shop.source("missing", value=Named).finder("s").find(())


@on_postgres
def test_a_view_and_a_table_that_was_made_anew(shop: Any) -> None:
    shop.sql("CREATE TABLE names (id int PRIMARY KEY, name text)")
    shop.sql("CREATE VIEW seen AS SELECT * FROM names")
    with pytest.raises(ConfigError, match="it is a view"):
        shop.source("seen", value=Named).finder("s").find(())
    source = shop.source("names", value=Named)
    finder = source.finder("s")
    (start,) = finder.find(())
    finder.close()
    shop.sql("DROP TABLE names CASCADE")
    shop.sql("CREATE TABLE names (id int PRIMARY KEY, name text)")
    with pytest.raises(Halt, match="was dropped and created again"):
        source.open_split(start)


@on_postgres
def test_a_refused_table_is_not_kept_locked(shop: Any) -> None:
    shop.sql("CREATE TABLE keyless (id int, name text)")
    finder = shop.source("keyless", value=Named).finder("s")
    with pytest.raises(ConfigError, match="takes NULL"):
        finder.find(())
    with shop.connection() as other:
        other.execute("SET lock_timeout = '30s'")
        other.execute("DROP TABLE keyless")


class Values(msgspec.Struct):
    flag: bool
    number: Decimal
    large: int
    data: bytes
    at: datetime
    day: date
    hour: time
    key: UUID
    tags: list[str]
    missing: int | None
    later: str = "not a column"


EXPECTED = Values(
    True, Decimal("12.30"), 1 << 62, bytes(range(100)), datetime(2026, 1, 2, 3, 4, 5, 678), date(2026, 1, 2),
    time(3, 4, 5), UUID(int=7), ["a", "b"], None,
)  # fmt: skip


def test_values_of_many_types(shop: Any) -> None:
    """A field without a column has its default."""
    data, key = EXPECTED.data.hex(), str(EXPECTED.key)
    types = ("bytea", "timestamp", "jsonb") if shop.kind == "postgres" else ("longblob", "datetime(6)", "json")
    shop.sql(
        f"CREATE TABLE kinds (id int PRIMARY KEY, flag boolean, number decimal(9, 2), large bigint, data {types[0]}, "
        f"at {types[1]}, day date, hour time, `key` uuid, tags {types[2]}, missing int)".replace(
            "`", '"' if shop.kind == "postgres" else "`"
        )
    )
    hexed = f"'\\x{data}'" if shop.kind == "postgres" else f"x'{data}'"
    shop.sql(
        f"INSERT INTO kinds VALUES (1, true, 12.3, {1 << 62}, {hexed}, '2026-01-02 03:04:05.000678', '2026-01-02', "
        f"'03:04:05', '{key}', '[\"a\", \"b\"]', NULL)"
    )
    assert read(shop.source("kinds", value=Values)) == [EXPECTED]

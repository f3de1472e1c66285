"""Rows of each mode, beyond the tests of `StoreContract`."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from decimal import Decimal

import msgspec
import pytest
from table_rows import ORIGIN, Total, entry
from table_stores import TOTALS, Tables, on_mariadb

from exactlyonce.pipeline.errors import StoreError


def test_the_last_row_of_a_key_wins(tables: Tables) -> None:
    store = tables.ready("upsert")
    names = ["Ann", "ann", "bob", "x" * 200, *(["y" * 2500] if tables.name == "postgres" else [])]
    encoded = store.encoder().encode([Total(name, turn) for turn in range(300) for name in names])
    assert store.apply([b"".join(encoded[at : at + 100]) for at in range(0, len(encoded), 100)], entry(1))
    assert tables.totals() == sorted((name, 299) for name in names)
    assert store.apply(store.encoder().encode([Total("Ann", 9), Total("Ann", 7), Total("cy", 8)]), entry(2))
    assert [row for row in tables.totals() if row[1] != 299] == [("Ann", 7), ("cy", 8)]


def test_an_upsert_of_nothing_but_a_key(tables: Tables) -> None:
    store = tables.of(Total, create=True, mode="upsert", key=("cents", "customer"))
    store.check()
    rows = [Total("ann", 1), Total("ann", 1), Total("ann", 2)]
    for _ in range(2):
        store.write(store.encoder().encode(rows))
    assert tables.totals() == [("ann", 1), ("ann", 2)]


class Order(msgspec.Struct):
    shop: int
    customer: str
    note: str | None = None


@pytest.mark.parametrize("key", [("shop", "customer"), ("customer",), ("shop",)], ids="-".join)
def test_a_delete_removes_the_rows_of_its_keys(tables: Tables, key: tuple[str, ...]) -> None:
    everything = [(n // 40, f"c{n}") for n in range(2000)]
    tables.sql("CREATE TABLE totals (shop bigint, customer varchar(20), note text)")
    tables.sql("CREATE INDEX by_key ON totals (shop, customer)")
    tables.sql("INSERT INTO totals VALUES " + ", ".join(f"({shop}, '{customer}', '')" for shop, customer in everything))
    store = tables.of(Order, mode="delete", key=key)
    gone: set[tuple[object, ...]] = set()
    for removed in ([], everything[:1], [*everything[100:1500], (99, "nobody")]):
        store.write([b"".join(store.encoder().encode([Order(*row) for row in removed]))])
        gone |= {tuple(getattr(Order(*row), name) for name in key) for row in removed}
    left = [row for row in everything if tuple(getattr(Order(*row), name) for name in key) not in gone]
    assert sorted(tables.sql("SELECT shop, customer FROM totals")) == sorted(left)


LEDGER_OF_MYISAM = """CREATE OR REPLACE TABLE exactlyonce_ledger (pipeline VARCHAR(9), sink VARCHAR(9), subtask INT,
checkpoint BIGINT, incarnation BIGINT, origin VARCHAR(9), PRIMARY KEY (pipeline, sink, subtask)) ENGINE=MyISAM"""


@on_mariadb
def test_a_ledger_of_an_older_version_is_read(tables: Tables) -> None:
    """Rows that no checkpoint had written had checkpoint -1 there, and rows of subtasks no origin."""
    store = tables.ready()
    waiting = tables.chunks(store)
    tables.sql("UPDATE exactlyonce_ledger SET checkpoint = -1")
    tables.sql("INSERT INTO exactlyonce_ledger VALUES ('p', 's', 0, 5, 1, ''), ('p', 's', 1, -1, 0, '')")
    assert store.fence("p", "s", 1, ORIGIN) == {0: 5, 1: 0}
    assert not store.apply(waiting, entry(5))
    assert store.apply(waiting, entry(6))
    assert store.apply(waiting, entry(1, subtask=1))
    assert tables.sql("SELECT subtask, checkpoint FROM exactlyonce_ledger ORDER BY 1") == [(-1, -1), (0, 6), (1, 1)]
    assert tables.totals() == sorted([*TOTALS, *TOTALS])


EMPTIED = "has no row of sink 's', pipeline 'p'.* the database was restored"
GONE, DROPPED = "DELETE FROM exactlyonce_ledger", "DROP TABLE exactlyonce_ledger"


@pytest.mark.parametrize(
    ("tables", "statement", "said"),
    [
        ("postgres", GONE, EMPTIED),
        ("postgres", DROPPED, "The ledger.* is gone. Restore it"),
        ("mariadb", GONE, EMPTIED),
        ("mariadb", DROPPED, "The ledger exactlyonce_ledger at .* is gone. Restore it"),
        ("mariadb", LEDGER_OF_MYISAM, "has the engine MyISAM; it must have InnoDB"),
        ("mariadb", "ALTER TABLE totals ENGINE=MyISAM", "totals at .* has the engine MyISAM; it must have"),
    ],
    indirect=["tables"],
)
def test_a_ledger_lost_during_the_run_stops_it(tables: Tables, statement: str, said: str) -> None:
    waiting = tables.chunks(tables.ready())
    tables.sql(statement)
    with pytest.raises(StoreError, match=said):
        tables.store().apply(waiting, entry(1))
    assert tables.totals() == []


class Priced(msgspec.Struct, frozen=True):
    """A row whose values a column may round or shift."""

    customer: str
    price: Decimal
    at: datetime
    size: float


PRICED = {
    "postgres": (
        "customer varchar(9) UNIQUE NOT NULL, price numeric(9,2), at timestamptz, size double precision",
        datetime(2026, 3, 1, 12, 0, 0, 500000, timezone(timedelta(hours=2))),
    ),
    "mariadb": (
        "customer VARCHAR(9) PRIMARY KEY, price DECIMAL(9,2), at DATETIME(6), size DOUBLE",
        datetime(2026, 3, 1, 12, 0, 0, 500000),
    ),
}
REPLACED = f"RENAME TO before; CREATE TABLE totals ({PRICED['postgres'][0].replace('timestamptz', 'timestamp')})"
CHANGES = {
    "postgres": [
        "ALTER COLUMN price TYPE numeric(9,1)", "ALTER COLUMN price TYPE double precision",
        "ALTER COLUMN at TYPE timestamp", "ALTER COLUMN at TYPE timestamptz(0)", REPLACED,
    ],
    "mariadb": [
        "MODIFY price DECIMAL(9,1)", "MODIFY at DATETIME(0)", "MODIFY at TIMESTAMP(6)", "MODIFY customer CHAR(20)",
        "MODIFY size DOUBLE(9,1)", "CHANGE size SIZE DOUBLE(9,1)",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("tables", "change"), [(name, each) for name, some in CHANGES.items() for each in some], indirect=["tables"]
)
def test_a_column_that_becomes_another_while_rows_wait(tables: Tables, change: str) -> None:
    """A column that would round or shift values is refused, until it is what it was; the same, only wider, is taken."""
    columns, at = PRICED[tables.name]
    tables.sql(f"CREATE TABLE totals ({columns})")
    store, again = (tables.of(Priced, mode="upsert", key=("customer",)) for _ in range(2))
    store.check()
    store.fence("p", "s", 1, ORIGIN)
    row = ("ann ", Decimal("1.25"), at, 1.25)
    waiting = store.encoder().encode([Priced(*row)])
    tables.sql(f"ALTER TABLE totals {change}")
    for each in (store, again):
        with pytest.raises(StoreError, match=r"no column .size.|encoded for other columns.*table as it was"):
            each.apply(waiting, entry(1))
    assert tables.sql("SELECT count(*) FROM totals") == [(0,)]
    tables.sql("DROP TABLE totals")
    tables.sql(f"CREATE TABLE totals ({columns.replace('(9)', '(30)').replace('9,2', '12,2')})")
    assert store.apply(waiting, entry(1))
    assert tables.sql("SELECT * FROM totals") == [row]


# --- on MariaDB -------------------------------------------------------------------------------------------------------


@on_mariadb
def test_a_chunk_larger_than_a_packet_is_several_statements(tables: Tables) -> None:
    store = tables.ready()
    encoded = [b"".join(store.encoder().encode([Total("c" * 5000 + str(n), n) for n in range(400)]))]
    assert len(encoded[0]) > 1 << 20
    tables.sql("SET GLOBAL max_allowed_packet = 16384")
    try:
        assert tables.store().apply(encoded, entry(1))
        counted = "SELECT count(*), count(DISTINCT customer), sum(cents) FROM totals"
        assert tables.sql(counted) == [(400, 400, 79800)]
        tables.sql("SET GLOBAL max_allowed_packet = 4096")
        with pytest.raises(StoreError, match="longer than the server now takes: its max_allowed_packet is 4096"):
            tables.store().apply(encoded, entry(2))
    finally:
        tables.sql("SET GLOBAL max_allowed_packet = 16777216")
    assert tables.sql("SELECT count(*) FROM totals") == [(400,)]


@on_mariadb
def test_a_zero_stays_zero_where_numbers_are_given_out(tables: Tables) -> None:
    tables.sql("CREATE TABLE totals (cents INT AUTO_INCREMENT PRIMARY KEY, customer VARCHAR(20))")
    store = tables.ready()
    store.write(store.encoder().encode([Total("ann", 0), Total("bob", 5)]))
    assert tables.totals() == [("ann", 0), ("bob", 5)]

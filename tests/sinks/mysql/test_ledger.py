"""Rows and ledger in one transaction: what is applied once, by whom, and after which failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from exactlyonce.pipeline.errors import Fenced, InvariantViolation, StoreError
from exactlyonce.sinks.write_ahead.store import ForeignLedger, LedgerBehind, LedgerEntry


class Total(msgspec.Struct):
    customer: str
    cents: int


class Order(msgspec.Struct):
    shop: int
    customer: str
    note: str | None = None


Stores = Callable[..., Any]
SHORT_COLUMNS = """(pipeline VARCHAR(9), sink VARCHAR(9), subtask INT, checkpoint BIGINT, incarnation BIGINT,
origin VARCHAR(9), PRIMARY KEY (pipeline, sink, subtask))"""


def entry(
    checkpoint: int, *, subtask: int = 0, incarnation: int = 1, pipeline: str = "p", sink: str = "s"
) -> LedgerEntry:
    return LedgerEntry(
        pipeline=pipeline, sink=sink, subtask=subtask, checkpoint=checkpoint, previous=0, incarnation=incarnation,
        origin="origin",
    )  # fmt: skip


def opened(store: Any, incarnation: int = 1, **names: str) -> Any:
    store.check()
    store.fence(names.get("pipeline", "p"), names.get("sink", "s"), incarnation, "origin")
    return store


def rows(store: Any, *totals: tuple[str, int]) -> list[bytes]:
    return [b"".join(store.encoder().encode([Total(*total) for total in totals]))]


def totals(mariadb: Any) -> list[tuple[Any, ...]]:
    return list(mariadb.sql("SELECT customer, cents FROM totals ORDER BY customer, cents"))


def test_a_checkpoint_is_applied_once(mariadb: Any, stores: Stores) -> None:
    """The second apply of a checkpoint, by any store, says that it was applied, and changes nothing."""
    store = opened(stores(Total, create=True))
    assert store.apply(rows(store, ("ann", 1), ("bob", 2)), entry(1))
    assert not store.apply(rows(store, ("ann", 1)), entry(1))
    assert not stores(Total).apply(rows(store, ("ann", 1)), entry(1))
    assert store.apply(rows(store, ("ann", 3)), entry(2))
    assert totals(mariadb) == [("ann", 1), ("ann", 3), ("bob", 2)]
    assert store.fence("p", "s", 2, "origin") == {0: 2}


def test_an_older_checkpoint_is_applied_already(mariadb: Any, stores: Stores) -> None:
    """A zombie with the rows of an older checkpoint writes nothing, for the ledger is past it."""
    store = opened(stores(Total, create=True))
    assert store.apply(rows(store, ("ann", 1)), entry(7))
    assert not store.apply(rows(store, ("bob", 1)), entry(6))
    assert totals(mariadb) == [("ann", 1)]


def test_two_committables_of_one_checkpoint_do_not_hide_each_other(mariadb: Any, stores: Stores) -> None:
    """Each subtask has its row of the ledger, and no rows but the ledger's is a commit as well."""
    store = opened(stores(Total, create=True))
    assert store.apply(rows(store, ("ann", 1)), entry(1, subtask=0))
    assert store.apply(rows(store, ("bob", 1)), entry(1, subtask=1))
    assert store.apply([], entry(1, subtask=2))
    assert store.fence("p", "s", 1, "origin") == {0: 1, 1: 1, 2: 1}
    assert totals(mariadb) == [("ann", 1), ("bob", 1)]


def test_pipelines_and_sinks_do_not_disturb_each_other(mariadb: Any, stores: Stores) -> None:
    """A name is compared exactly: two that differ in case have rows of their own in one ledger."""
    names: list[dict[str, Any]] = [
        {"pipeline": "p"},
        {"pipeline": "P"},
        {"sink": "S"},
        {"pipeline": "p-2", "sink": "s"},
    ]
    store = stores(Total, create=True)
    for name in names:
        opened(store, 5, **name)
        assert store.apply(rows(store, ("ann", 1)), entry(3, incarnation=5, **name))
    assert len(totals(mariadb)) == len(names)
    assert store.fence("P", "s", 6, "origin") == {0: 3}
    assert store.apply([], entry(4, incarnation=5, pipeline="p"))


def test_an_older_incarnation_is_fenced(mariadb: Any, stores: Stores) -> None:
    """After a fence neither apply nor fence of an older incarnation changes anything; the same one may go on."""
    zombie, newer = opened(stores(Total, create=True), 1), stores(Total)
    assert newer.fence("p", "s", 3, "origin") == {}
    with pytest.raises(Fenced, match="has incarnation 3: a newer instance has taken over from incarnation 1"):
        zombie.apply(rows(zombie, ("ann", 1)), entry(1))
    with pytest.raises(Fenced):
        zombie.fence("p", "s", 2, "origin")
    assert totals(mariadb) == []
    assert newer.fence("p", "s", 3, "origin") == {}
    assert newer.apply(rows(newer, ("ann", 1)), entry(1, incarnation=3))


def test_a_ledger_of_another_origin_is_left_as_it_is(mariadb: Any, stores: Stores) -> None:
    """A ledger begun for another checkpoint topic is named, whatever the incarnation, and not changed."""
    store = opened(stores(Total, create=True), 1)
    before = mariadb.sql("SELECT * FROM exactlyonce_ledger")
    for incarnation in (0, 9):
        with pytest.raises(ForeignLedger) as raised:
            store.fence("p", "s", incarnation, "another")
        assert raised.value.args == ("origin",)
    assert mariadb.sql("SELECT * FROM exactlyonce_ledger") == before


def test_a_ledger_from_a_backup_shows_its_older_numbers(mariadb: Any, stores: Stores) -> None:
    """Restored from a backup, the store has older rows and an older ledger; a fence tells so, as it is."""
    store = opened(stores(Total, create=True))
    store.apply(rows(store, ("ann", 1)), entry(5))
    backup = mariadb.sql("SELECT * FROM exactlyonce_ledger")
    store.apply(rows(store, ("ann", 2)), entry(6))
    mariadb.sql("DELETE FROM exactlyonce_ledger")
    for row in backup:
        mariadb.sql("INSERT INTO exactlyonce_ledger VALUES (%s, %s, %s, %s, %s, %s)", row)
    assert store.fence("p", "s", 2, "origin") == {0: 5}


def test_a_ledger_behind_what_was_committed_before_stops_it(mariadb: Any, stores: Stores) -> None:
    """Where the ledger has less than the checkpoint before, the store was restored in between: nothing is written."""
    store = opened(stores(Total, create=True))
    with pytest.raises(LedgerBehind) as raised:
        store.apply(rows(store, ("ann", 1)), replace(entry(3), previous=2))
    assert raised.value.args == (0,)
    assert store.apply(rows(store, ("ann", 1)), replace(entry(3), previous=0))
    with pytest.raises(LedgerBehind) as raised:
        store.apply(rows(store, ("ann", 2)), replace(entry(6), previous=5))
    assert raised.value.args == (3,)
    assert not store.apply(rows(store, ("ann", 1)), replace(entry(3), previous=2))
    assert store.apply(rows(store, ("ann", 2)), replace(entry(6), previous=3))
    assert totals(mariadb) == [("ann", 1), ("ann", 2)]
    assert store.fence("p", "s", 1, "origin") == {0: 6}


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("DELETE FROM exactlyonce_ledger", "has lost its rows of pipeline p, sink s, since this run began"),
        ("DROP TABLE exactlyonce_ledger", "exactlyonce_ledger at .* is gone"),
        (
            f"CREATE OR REPLACE TABLE exactlyonce_ledger {SHORT_COLUMNS} ENGINE=MyISAM",
            "has the engine MyISAM; it is to be one of InnoDB",
        ),
        ("ALTER TABLE totals ENGINE=MyISAM", "table totals at .* has the engine MyISAM; it is to be one of InnoDB"),
    ],
)
def test_a_ledger_lost_during_the_run_stops_it(mariadb: Any, stores: Stores, statement: str, said: str) -> None:
    """Without its rows, or the transactions that they stand on, nothing is written."""
    store = opened(stores(Total, create=True))
    encoded = rows(store, ("ann", 1))
    mariadb.sql(statement)
    other = stores(Total)
    with pytest.raises(StoreError, match=said):
        other.apply(encoded, entry(1))
    assert totals(mariadb) == []


def test_a_failure_leaves_neither_rows_nor_ledger(mariadb: Any, stores: Stores) -> None:
    """What raises within an apply, the chunks themselves or the server, undoes all of it; the next apply does it."""
    store = opened(stores(Total, create=True, mode="upsert", key=("customer",)))

    def broken() -> Any:
        yield from rows(store, ("ann", 1))
        raise LookupError("a block is gone")

    with pytest.raises(LookupError):
        store.apply(broken(), entry(1))
    (good,) = rows(store, ("ann", 1))
    mark = good[: good.index(b"(")]
    with pytest.raises(StoreError, match="Column count doesn't match"):
        store.apply([good, mark + b"('x',2,3),\f"], entry(1))
    with pytest.raises(StoreError, match="encoded for other types"):
        store.apply([good, good + b"('x',2),\f"], entry(1))
    with pytest.raises(InvariantViolation, match="Chunks consist of whole rows"):
        store.apply([good, good + b"('x',2)"], entry(1))
    assert (totals(mariadb), store.fence("p", "s", 1, "origin")) == ([], {})
    assert store.apply(rows(store, ("ann", 1)), entry(1))
    assert totals(mariadb) == [("ann", 1)]


def test_the_last_row_of_a_key_wins(mariadb: Any, stores: Stores) -> None:
    """An upsert inserts or changes; within a chunk, over chunks and over checkpoints the last one is what stays."""
    store = opened(stores(Total, create=True, mode="upsert", key=("customer",)))
    store.apply(rows(store, ("ann", 1), ("bob", 1), ("ann", 2)) + rows(store, ("bob", 7), ("Ann", 3)), entry(1))
    assert totals(mariadb) == [("Ann", 3), ("ann", 2), ("bob", 7)]
    store.apply(rows(store, ("ann", 9), ("ann", 4)), entry(2))
    assert totals(mariadb) == [("Ann", 3), ("ann", 4), ("bob", 7)]


def test_an_upsert_of_nothing_but_a_key_inserts_it(mariadb: Any, stores: Stores) -> None:
    """Where the key is all that a record has, a row that is there stays as it is."""

    class Key(msgspec.Struct):
        customer: str

    store = opened(stores(Key, create=True, mode="upsert", key=("customer",)))
    assert store.apply([b"".join(store.encoder().encode([Key("ann"), Key("ann")]))], entry(1))
    assert mariadb.sql("SELECT * FROM totals") == [("ann",)]


@pytest.mark.parametrize("key", [("shop", "customer"), ("customer",), ("shop",)])
def test_a_delete_removes_the_rows_of_its_keys(mariadb: Any, stores: Stores, key: tuple[str, ...]) -> None:
    """One key, or thousands, of one column or more; nothing else is removed, and what is not there is no error."""
    mariadb.sql(
        "CREATE TABLE totals (shop INT, customer VARCHAR(20) COLLATE utf8mb4_bin, note TEXT, KEY (shop, customer))"
    )
    with mariadb.connection() as connection:
        everything = [(n // 40, f"c{n}") for n in range(2000)]
        connection.cursor().executemany("INSERT INTO totals VALUES (%s, %s, '')", everything)
    store = opened(stores(Order, mode="delete", key=key))

    def apply(checkpoint: int, removed: list[tuple[int, str]]) -> None:
        assert store.apply([b"".join(store.encoder().encode([Order(*row) for row in removed]))], entry(checkpoint))

    apply(1, everything[:1])
    apply(2, [*everything[100:1500], (99, "nobody")])
    gone = {
        (shop, "") if key == ("shop",) else (shop, customer) for shop, customer in everything[:1] + everything[100:1500]
    }
    left = [row for row in everything if ((row[0], "") if key == ("shop",) else row) not in gone]
    assert mariadb.sql("SELECT shop, customer FROM totals ORDER BY shop, length(customer), customer") == left


def test_a_chunk_larger_than_a_packet_is_several_statements(mariadb: Any, stores: Stores) -> None:
    """Rows go in as many statements as max_allowed_packet asks for; one that is no longer taken is named."""
    store = opened(stores(Total, create=True))
    big = [("c" * 5000 + str(n), n) for n in range(400)]
    encoded = rows(store, *big)
    assert len(encoded[0]) > 1 << 20
    mariadb.sql("SET GLOBAL max_allowed_packet = 16384")
    try:
        small = stores(Total)
        assert small.apply(encoded, entry(1))
        assert mariadb.sql("SELECT count(*), count(DISTINCT customer), sum(cents) FROM totals") == [(400, 400, 79800)]
        mariadb.sql("SET GLOBAL max_allowed_packet = 4096")
        with pytest.raises(StoreError, match="longer than the server now takes: its max_allowed_packet is 4096"):
            stores(Total).apply(encoded, entry(2))
    finally:
        mariadb.sql("SET GLOBAL max_allowed_packet = 16777216")
    assert mariadb.sql("SELECT count(*) FROM totals") == [(400,)]


def test_rows_without_a_ledger_are_written_as_often_as_asked(mariadb: Any, stores: Stores) -> None:
    """`write` is one transaction for all chunks, and knows of no checkpoint: what is written twice is there twice."""
    store = stores(Total, create=True)
    store.check()
    encoded = rows(store, ("ann", 1))
    store.write(encoded)
    store.write(encoded)
    with pytest.raises(StoreError):
        store.write([*encoded, b"(1,2,3),\f"])
    assert totals(mariadb) == [("ann", 1), ("ann", 1)]


def test_a_zero_stays_zero_where_numbers_are_given_out(mariadb: Any, stores: Stores) -> None:
    """In an AUTO_INCREMENT column 0 is written as 0, and not as the next number."""
    mariadb.sql("CREATE TABLE totals (cents INT AUTO_INCREMENT PRIMARY KEY, customer VARCHAR(20))")
    store = opened(stores(Total))
    store.apply(rows(store, ("ann", 0), ("bob", 5)), entry(1))
    assert totals(mariadb) == [("ann", 0), ("bob", 5)]

"""Rows and ledger in one transaction: what is applied once, by whom, and after which failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from exactlyonce.pipeline.errors import InvariantViolation, StoreError
from exactlyonce.sinks.write_ahead.store import LedgerEntry


class Total(msgspec.Struct):
    customer: str
    cents: int


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


def test_a_zero_stays_zero_where_numbers_are_given_out(mariadb: Any, stores: Stores) -> None:
    """In an AUTO_INCREMENT column 0 is written as 0, and not as the next number."""
    mariadb.sql("CREATE TABLE totals (cents INT AUTO_INCREMENT PRIMARY KEY, customer VARCHAR(20))")
    store = opened(stores(Total))
    store.apply(rows(store, ("ann", 0), ("bob", 5)), entry(1))
    assert totals(mariadb) == [("ann", 0), ("bob", 5)]

"""The server's disk has ledger and rows of a part together, or neither."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from redis_rows import LEDGER, begun, chunks_of, entry, store_of, totals

from exactlyonce.pipeline.errors import StoreUnavailable
from exactlyonce.sinks.ledger import ForeignLedger, LedgerBehind
from exactlyonce.testing.servers.redis import RedisServer

Own = Callable[..., RedisServer]


def test_rows_and_ledger_are_one_transaction_of_the_log(own_server: Own) -> None:
    server = own_server()
    store = begun(store_of(server.url))
    store.apply(chunks_of(store, totals(3)), entry(1))
    (log,) = server.log_files
    transactions = log.read_bytes().split(b"MULTI")
    assert transactions[-1].count(b"total:customer-") == 3
    assert b"0:checkpoint" in transactions[-1].split(b"EXEC")[0]


def test_a_log_that_ends_within_a_part_has_nothing_of_it(own_server: Own) -> None:
    """After a loss of power rows and ledger go back together, which the next apply finds."""
    server = own_server()
    store = begun(store_of(server.url, kind="stream", key=lambda _: "totals"))
    store.apply(chunks_of(store, totals(10)), entry(1))
    (log,) = server.log_files
    whole = log.stat().st_size
    store.apply(chunks_of(store, totals(10)), entry(2))
    server.kill()
    with log.open("r+b") as file:
        file.truncate(whole + int((log.stat().st_size - whole) * 0.5))
    server.start()
    assert server.client.xlen("totals") == 10
    assert store_of(server.url).fence("shop", "totals", 2, "t") == {0: 1}
    with pytest.raises(LedgerBehind, match=r"^1$"):
        store_of(server.url).apply([], entry(3, incarnation=2))


def test_what_was_answered_is_there_after_a_kill(own_server: Own) -> None:
    """Answered rows survive with appendfsync always; otherwise a busy server may lose answered rows."""
    server = own_server(appendfsync="always")
    store = begun(store_of(server.url, part_rows=50))
    for checkpoint in range(1, 6):
        store.apply(chunks_of(store, totals(120)), entry(checkpoint))
        server.restart()
        store.close()
    assert store.fence("shop", "totals", 2, "t") == {0: 5}


def test_an_answer_waits_for_the_disk(own_server: Own) -> None:
    server = own_server(appendfsync="everysec")
    if not server.has_waitaof:
        pytest.skip("this server is older than 7.2, and has no WAITAOF")
    store = begun(store_of(server.url))
    store.fence("shop", "totals", 1, "t")
    assert store.apply(chunks_of(store, totals(3)), entry(1))
    assert not store.apply(chunks_of(store, totals(3)), entry(1))
    store.write(chunks_of(store, totals(3)))
    assert server.client.info("commandstats")["cmdstat_waitaof"]["calls"] == 4
    quick = begun(store_of(server.url, durable=False))
    quick.apply([], entry(2))
    assert server.client.info("commandstats")["cmdstat_waitaof"]["calls"] == 4


def test_a_server_that_cannot_tell_is_asked_once(own_server: Own) -> None:
    server = own_server(appendfsync="everysec")
    if server.has_waitaof:
        pytest.skip("this server is of 7.2 or newer, and has WAITAOF")
    quick, store = begun(store_of(server.url, durable=False)), store_of(server.url)
    quick.check()
    store.check()
    client = server.client
    client.config_resetstat()
    quick.write(chunks_of(quick, totals(3)))
    quick.apply([], entry(1))
    assert _errors(client) == {"errorstat_NOSCRIPT": 2}
    store.apply([], entry(2))
    store.apply([], entry(3))
    assert _errors(client) == {"errorstat_NOSCRIPT": 2, "errorstat_ERR": 1}


def _errors(client: Any) -> dict[str, int]:
    return {name: about["count"] for name, about in client.info("errorstats").items()}


def test_a_disk_that_is_never_reached_is_no_answer(own_server: Own) -> None:
    server = own_server()
    if not server.has_waitaof:
        pytest.skip("this server is older than 7.2, and has no WAITAOF")
    store = begun(store_of(server.url))
    store._timeout_s = 0.5
    server.client.config_set("appendfsync", "no")
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=r"not brought what was written onto its disk .* appendfsync is no"):
            store.apply(chunks_of(store, totals(3)), entry(1))
    server.client.config_set("appendfsync", "always")
    assert not store.apply(chunks_of(store, totals(3)), entry(1))


def test_a_server_that_forgets_all_is_found(own_server: Own) -> None:
    server = own_server(appendonly="no")
    store = begun(store_of(server.url, durable=False))
    store.fence("shop", "totals", 1, "t")
    store.apply(chunks_of(store, totals(3)), entry(1))
    server.restart()
    store.close()
    with pytest.raises(ForeignLedger, match=r"^$"):
        store.apply(chunks_of(store, totals(3)), entry(2))
    assert server.client.keys() == []
    assert store.fence("shop", "totals", 2, "t") == {}
    assert server.client.hget(LEDGER, "incarnation") == "2"

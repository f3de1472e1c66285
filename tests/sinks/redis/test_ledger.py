"""The ledger decides: lost answers, late requests, zombies, neighbours, a ledger that went back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from redis_rows import LEDGER, begun, chunks_of, entry, limit, store_of, totals

from exactlyonce.pipeline.errors import Fenced, StoreUnavailable
from exactlyonce.sinks.ledger import LedgerBehind
from exactlyonce.sinks.redis.store import RedisStore
from exactlyonce.testing.servers.redis import RedisServer


def a_stream(server: RedisServer, **options: Any) -> RedisStore:
    """A store for a stream: there a row that comes twice is two rows."""
    return begun(store_of(server.url, kind="stream", key=lambda _: "totals", **options))


def sums(server: RedisServer) -> list[int]:
    return [int(fields["sum"]) for _, fields in server.client.xrange("totals")]


def test_an_answer_that_is_lost_and_lands_late(server: RedisServer) -> None:
    store = a_stream(server)
    assert store.apply([], entry(1)), "the server knows the script"
    chunks = chunks_of(store, totals(10))
    server.pause()
    limit(store, 0.3)
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="has not answered for"):
            store.apply(chunks, entry(2))
    server.go_on()
    a_stream(server).apply(chunks, entry(2))
    assert not a_stream(server).apply(chunks, entry(2))
    assert sums(server) == list(range(10))


def test_a_part_that_lands_late_changes_nothing(server: RedisServer) -> None:
    store = a_stream(server, part_rows=3)
    chunks = chunks_of(store, totals(10), 2)

    def paused_on_the_way() -> Iterator[bytes]:
        for number, chunk in enumerate(chunks):
            if number == 3:
                server.pause()
                limit(store, 0.3)
            yield chunk

    with pytest.raises(StoreUnavailable):
        store.apply(paused_on_the_way(), entry(1))
    server.go_on()
    assert len(sums(server)) in (3, 6)
    assert server.client.hget(LEDGER, "0:checkpoint") is None
    other_size = a_stream(server, part_rows=4)
    assert other_size.apply(chunks, entry(1))
    assert sums(server) == list(range(10))
    assert server.client.hget(LEDGER, "0:part") is None


def test_another_applies_parts_meanwhile(server: RedisServer) -> None:
    first, second = a_stream(server, part_rows=2), a_stream(server, part_rows=3)
    chunks = chunks_of(first, totals(9), 1)

    def with_another() -> Iterator[bytes]:
        for number, chunk in enumerate(chunks):
            if number == 4:
                assert second.apply(chunks, entry(1))
            yield chunk

    assert not first.apply(with_another(), entry(1))
    assert sums(server) == list(range(9))


def test_a_zombie_of_an_older_incarnation_is_fenced(server: RedisServer) -> None:
    zombie, newer = a_stream(server, part_rows=2), a_stream(server)
    zombie.fence("shop", "totals", 1, "t")

    def overtaken() -> Iterator[bytes]:
        yield from chunks_of(zombie, totals(2))
        yield from chunks_of(zombie, totals(2))
        assert newer.fence("shop", "totals", 2, "t") == {}
        yield from chunks_of(zombie, totals(6))

    with pytest.raises(Fenced, match="has incarnation 2: a newer instance"):
        zombie.apply(overtaken(), entry(1))
    before = server.client.dump(LEDGER)
    with pytest.raises(Fenced):
        zombie.fence("shop", "totals", 1, "t")
    with pytest.raises(Fenced):
        zombie.apply([], entry(2, 0))
    assert server.client.dump(LEDGER) == before
    assert newer.apply(chunks_of(newer, totals(7)), entry(1, incarnation=2))
    assert sums(server) == list(range(7))


def test_a_ledger_that_went_back_into_a_checkpoint_is_found(server: RedisServer) -> None:
    """A part of an older checkpoint lets no newer one in."""
    store = a_stream(server)
    server.client.hset(LEDGER, mapping={"0:checkpoint": "1", "0:part": "2 10"})
    with pytest.raises(LedgerBehind):
        store.apply([], entry(3, previous=1))


def test_parts_that_are_gone_are_applied_again(server: RedisServer) -> None:
    store = a_stream(server, part_rows=2)
    chunks = chunks_of(store, totals(8), 1)

    def forgetting() -> Iterator[bytes]:
        for number, chunk in enumerate(chunks):
            if number == 5:
                server.client.delete("totals")
                server.client.hdel(LEDGER, "0:part")
            yield chunk

    with pytest.raises(StoreUnavailable, match="has lost rows of checkpoint 1 that it had answered for"):
        store.apply(forgetting(), entry(1))
    assert store.apply(chunks, entry(1))
    assert sums(server) == list(range(8))

"""A reader that is slower than the server keeps its stream and its place, and holds no more than it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from changing_table import Shop
from waiting import until

from exactlyonce.connectors import splits
from exactlyonce.connectors.postgres import change_split, change_stream

LIMIT_S = 1
"""The server's time limit for a stream whose reader says nothing."""
ROWS = 60_000
"""A transaction of 24 MB, which no socket holds."""
BATCH = 1_000


def begin(shop: Shop) -> None:
    """A large transaction of which a batch was read, and the server waits for the reader of the others."""
    shop.sql(f"ALTER SYSTEM SET wal_sender_timeout = '{LIMIT_S}s'")
    shop.sql("SELECT pg_reload_conf()")
    until(lambda: shop.sql("SHOW wal_sender_timeout") == [(f"{LIMIT_S}s",)])
    shop.begin(snapshot="never")
    shop.read_all()
    shop.sql(f"INSERT INTO accounts SELECT i, repeat('x', 400), i FROM generate_series(1, {ROWS}) i")
    until(lambda: shop.poll(BATCH))
    until(lambda: stuck(shop))


def stuck(shop: Shop) -> bool:
    """Whether the server waits until its client takes more of the stream."""
    return shop.sql("SELECT wait_event FROM pg_stat_activity WHERE backend_type = 'walsender'") == [
        ("WalSenderWriteData",)
    ]


def streams(shop: Shop) -> list[tuple[int]]:
    """The processes of the server that stream."""
    return shop.sql("SELECT pid FROM pg_stat_replication")


def let_the_limit_pass(shop: Shop, meanwhile: Callable[[], Any]) -> None:
    """Let the server wait for three times its limit."""
    ((began,),) = shop.sql("SELECT clock_timestamp()")

    def is_over() -> bool:
        meanwhile()
        ((over,),) = shop.sql(f"SELECT clock_timestamp() - %s > interval '{3 * LIMIT_S} s'", began)
        return bool(over)

    until(is_over)


def keys(shop: Shop) -> list[int]:
    return [change.key for change in shop.changes]


def test_a_stream_outlasts_a_sink_that_blocks(shop: Shop) -> None:
    """Also where the server's own limit is short: else a large transaction would be sent again and again."""
    begin(shop)
    sender = streams(shop)
    let_the_limit_pass(shop, lambda: None)
    until(lambda: not shop.poll(BATCH) and len(shop.changes) >= ROWS, pause_s=0)
    assert keys(shop) == list(range(1, ROWS + 1))
    assert streams(shop) == sender


def test_a_worker_whose_sink_blocks_keeps_the_stream(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks how far its sources are in their logs, while it reads nothing."""
    monkeypatch.setattr(change_stream, "TIMEOUT_MS", 0)
    monkeypatch.setattr(change_stream, "STATUS_S", LIMIT_S / 8)
    monkeypatch.setattr(splits, "LOG_INTERVAL_S", 0)
    begin(shop)
    sender = streams(shop)
    let_the_limit_pass(shop, lambda: shop.reader.logs())
    assert streams(shop) == sender
    assert stuck(shop)


def test_a_stream_that_is_lost_again_and_again_within_a_transaction(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time it goes on where the reader was, and each change comes once."""
    monkeypatch.setattr(change_stream, "TIMEOUT_MS", 0)
    monkeypatch.setattr(change_stream, "STATUS_S", LIMIT_S / 8)
    monkeypatch.setattr(change_split, "SKIPPED_MAX", 500)
    begin(shop)
    for _ in range(3):
        until(lambda: not streams(shop))
        count = len(shop.changes)
        until(lambda: shop.poll(BATCH) and stuck(shop), pause_s=0)
        assert len(shop.changes) > count
    shop.end()
    until(lambda: not shop.poll(BATCH) and len(shop.changes) >= ROWS, pause_s=0)
    assert keys(shop) == list(range(1, ROWS + 1))


def test_a_reader_holds_a_batch(shop: Shop) -> None:
    """Others of the transaction are the server's."""
    begin(shop)
    shop.reader.poll(BATCH, 0.0)
    before = memory_mb()
    for _ in range(ROWS // BATCH // 2):
        until(lambda: shop.reader.poll(BATCH, 0.0))
        until(lambda: stuck(shop))
    assert memory_mb() - before < 10


def memory_mb() -> float:
    """This process's memory that is not in a file or a socket."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) / 1024

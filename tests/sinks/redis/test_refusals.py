"""Refusals of the server, and what it cannot do: each error says what is missing and what to do, with no secret."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import refusing
from redis_rows import LEDGER, Total, begun, chunks_of, entry, store_of, totals
from waiting import until

from exactlyonce.pipeline.errors import ConfigError, StoreError, StoreUnavailable
from exactlyonce.sinks.redis.scripts import KINDS
from exactlyonce.testing.servers.redis import RedisServer

Own = Callable[..., RedisServer]
CANARY = "c4nary-Zr9"
refused = partial(refusing.refused, secrets=[CANARY])
ALLOWED = [
    "+info", "+config|get", "+command|info", "+eval", "+evalsha", "+waitaof", "+hmget", "+hgetall", "+hset", "+hdel",
    "+set", "+del", "+type", "+exists", "+xinfo|stream", "+xadd",
]  # fmt: skip


def with_user(server: RedisServer, *rules: str) -> str:
    known = [rule for rule in rules if rule != "+waitaof" or server.has_waitaof]
    server.client.acl_setuser("sink", enabled=True, reset=True, passwords=[f"+{CANARY}"])
    server.client.execute_command("ACL", "SETUSER", "sink", *known)
    return f"redis://sink:{CANARY}@127.0.0.1:{server.port}/0"


def test_a_password_that_is_missing_or_wrong(own_server: Own) -> None:
    server = own_server(requirepass=CANARY)
    address = f"127.0.0.1:{server.port}"
    texts = (f"Redis at {address} refuses the user or the password", "Correct them in the URL")
    for url in (server.url, f"redis://:{CANARY}x@{address}/0", f"redis://ann:{CANARY}@{address}/0"):
        refused(store_of(url).check, StoreError, *texts)
    store_of(f"redis://:{CANARY}@{address}").check()


def test_the_url_is_looked_up_late(server: RedisServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = store_of("env:THE_REDIS")
    refused(store.check, ConfigError, "no variable THE_REDIS")
    for url, said in (
        (f"http://{CANARY}", "begins with none of redis://"), (f"{server.url}?{CANARY}=1", "unknown parameter")
    ):  # fmt: skip
        monkeypatch.setenv("THE_REDIS", url)
        refused(store.check, ConfigError, said)
    options = "retry_on_timeout=yes&socket_timeout=1&protocol=3&decode_responses=yes"
    monkeypatch.setenv("THE_REDIS", f"{server.url}?{options}")
    store.check()
    (tmp_path / "url").write_text(f"{server.url}\n")
    store_of(f"file:{tmp_path / 'url'}").check()


def test_a_place_that_is_not_there(server: RedisServer) -> None:
    refused(store_of(server.url.replace("/0", "/99")).check, StoreError, "DB index is out of range")
    refused(store_of("redis://nowhere.invalid").check, StoreUnavailable, "Redis at nowhere.invalid:6379")


# --- rights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_rights_of_the_page_are_enough(server: RedisServer, kind: Any) -> None:
    """A user with these, and no others, checks, fences and applies; CONFIG and COMMAND may be forbidden."""
    keys = ("~total:*", "~exactlyonce_ledger:*")
    for rights in (ALLOWED, [right for right in ALLOWED if not right.startswith(("+config", "+command"))]):
        store = begun(store_of(with_user(server, *rights, *keys), kind=kind))
        store.check()
    store.fence("shop", "totals", 1, "t")
    assert store.apply(chunks_of(store, [Total("ann", 1)]), entry(1))
    assert server.client.exists("total:ann")


@pytest.mark.parametrize(
    ("kind", "missing"),
    [("string", "set"), ("string", "hmget"), ("hash", "hdel"), ("stream", "xadd"), ("string", "eval"),
     ("string", "info")],
)  # fmt: skip
def test_a_right_that_is_missing(server: RedisServer, kind: Any, missing: str) -> None:
    store = store_of(with_user(server, *(right for right in ALLOWED if right != f"+{missing}"), "~*"), kind=kind)
    assert re.search(rf"\b{missing}\b", refused(store.check, StoreError, "NOPERM", "ACL SETUSER"))


def test_a_key_that_is_not_allowed(server: RedisServer) -> None:
    store = begun(store_of(with_user(server, *ALLOWED, "~total:a*", "~exactlyonce_ledger:*"), kind="stream"))
    store.check()
    waiting = chunks_of(store, [Total("ann", 1), Total("bob", 1)])
    refused(lambda: store.apply(waiting, entry(1)), StoreError, "NOPERM")
    assert server.client.keys("total:*") == []


def test_the_key_of_the_ledger_has_to_be_allowed(server: RedisServer) -> None:
    refused(store_of(with_user(server, "+@all", "~total:*")).check, StoreError, "~exactlyonce_ledger:*")


# --- settings of the server -------------------------------------------------------------------------------------------

UNSAFE = [
    ({"maxmemory_policy": "allkeys-lru"}, {"durable": False}, ("maxmemory-policy allkeys-lru", "to noeviction"),
     "volatile-lru", {}),
    ({"appendonly": "no"}, {}, ("appendonly no", "durable=False"), "", {"durable": False}),
    ({"appendfsync": "no"}, {}, ("appendfsync no",), "everysec", {}),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "options", "texts", "better", "accepted"), UNSAFE)
def test_a_server_that_may_lose_rows(
    own_server: Own, settings: dict[str, str], options: dict[str, Any], texts: tuple[str, ...], better: str,
    accepted: dict[str, Any],
) -> None:  # fmt: skip
    server = own_server(**settings)
    refused(store_of(server.url, **options).check, StoreError, *texts)
    if better:
        server.client.config_set(next(iter(settings)).replace("_", "-"), better)
    store = begun(store_of(server.url, **accepted))
    store.check()
    assert store.apply(chunks_of(store, totals(3)), entry(1))


def test_full_memory_is_all_or_nothing(server: RedisServer) -> None:
    """A part is refused at once with noeviction, or is written whole though it exceeds the limit."""
    store = begun(store_of(server.url, kind="stream", part_rows=50))
    chunks = chunks_of(store, [Total(f"customer-{number}", number, "x" * 20_000) for number in range(300)], 10)
    used = server.client.info("memory")["used_memory"]
    server.client.config_set("maxmemory", used + 3_000_000)
    try:
        texts = ("its memory is full: make room, or raise maxmemory",)
        refused(lambda: store.apply(chunks, entry(1)), StoreUnavailable, *texts)
        written = len(server.client.keys("total:*"))
        assert 0 < written < 300
        assert server.client.hget(LEDGER, "0:part") == f"1 {written}"
    finally:
        server.client.config_set("maxmemory", 0)
    assert store.apply(chunks, entry(1))
    assert len(server.client.keys("total:*")) == 300
    assert all(server.client.xlen(key) == 1 for key in server.client.keys("total:*"))


# --- what passes by itself --------------------------------------------------------------------------------------------


def test_a_replica(own_server: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    primary, replica = own_server(), own_server()
    begun(store_of(primary.url))
    monkeypatch.setenv("THE_REDIS", replica.url)
    store = begun(store_of("env:THE_REDIS"))
    store.check()
    replica.client.replicaof("127.0.0.1", replica.bus_port)  # nobody's: what a primary sends would have to be loaded
    said = "is a replica now: a failover is under way"
    refused(lambda: store.apply([], entry(1)), StoreUnavailable, said)
    refused(store_of(replica.url).check, StoreError, "Give the address of the primary")
    monkeypatch.setenv("THE_REDIS", primary.url)
    assert store.apply([], entry(1))
    assert primary.client.exists(LEDGER)


def play_a_replica(listener: socket.socket) -> None:
    """A server that takes everything but WAITAOF, as one from 7.2 on that became a replica after the rows."""
    connection, _ = listener.accept()
    with connection, connection.makefile("rwb", buffering=0) as stream:
        while count := stream.readline()[1:]:
            words = [stream.read(int(stream.readline()[1:]) + 2) for _ in range(int(count))]
            no = b"-ERR WAITAOF cannot be used with replica instances. Please also note that writes to replicas are\r\n"
            stream.write(no if words[0] == b"WAITAOF\r\n" else b"+OK\r\n")


def test_a_primary_that_is_a_replica_by_the_time_the_disk_has_the_rows() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=play_a_replica, args=(listener,), daemon=True).start()
        store = store_of(f"redis://127.0.0.1:{listener.getsockname()[1]}")
        refused(lambda: store.write([]), StoreUnavailable, "is a replica now: a failover is under way")
        store.close()


def test_a_disk_that_cannot_be_written(own_server: Own) -> None:
    server = own_server(save="3600 1", appendonly="no")
    store = begun(store_of(server.url, durable=False, kind="stream"))
    (server.folder / "dump.rdb").mkdir()
    server.client.set("a", 1)
    server.client.bgsave()
    until(lambda: server.client.info("persistence")["rdb_last_bgsave_status"] != "ok")
    waiting = chunks_of(store, totals(3))
    refused(lambda: store.apply(waiting, entry(1)), StoreUnavailable, "it cannot write to its disk")
    assert sorted(server.client.keys()) == ["a", LEDGER]
    (server.folder / "dump.rdb").rmdir()
    server.client.save()
    assert store.apply(waiting, entry(1))


@pytest.mark.parametrize(
    ("settings", "act", "said"),
    [
        ({"min_replicas_to_write": "1"}, lambda store: store.apply([], entry(1)), "too few of its replicas"),
        ({"maxclients": "1"}, lambda store: store.check(), "maxclients"),
    ],
    ids=["NOREPLICAS", "maxclients"],
)
def test_a_server_at_a_limit(own_server: Own, settings: Mapping[str, str], act: Any, said: str) -> None:
    server = own_server()
    begun(store_of(server.url)).close()
    taken = server.client.connection_pool.get_connection()
    taken.connect()
    for name, value in settings.items():
        server.client.config_set(name.replace("_", "-"), value)
    refused(lambda: act(store_of(server.url)), StoreUnavailable, said)
    taken.disconnect()


def test_a_server_that_loads_its_data(own_server: Own) -> None:
    """Meanwhile it answers INFO, which tells of a disabled append-only log."""
    server = own_server()
    store = store_of(server.url)
    store.write(chunks_of(store, totals(3_000)))
    server.client.bgrewriteaof()
    until(lambda: not server.client.info("persistence")["aof_rewrite_in_progress"])
    server.kill()
    server.settings |= {"key-load-delay": "10000", "loading-process-events-interval-bytes": "1024"}
    server.launch()
    text = ""
    while "it still loads its data" not in text:
        text = refused(store.check, StoreUnavailable)

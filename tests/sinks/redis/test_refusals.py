"""Refusals of the server, and what it cannot do: each error says what is missing and what to do, with no secret."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from redis_rows import LEDGER, Total, begun, chunks_of, entry, hasty, store_of, totals
from redis_server import RedisServer

from exactlyonce.pipeline.errors import ConfigError, StoreError, StoreUnavailable
from exactlyonce.sinks.redis.scripts import KINDS

Own = Callable[..., RedisServer]
CANARY = "c4nary-Zr9"
ALLOWED = (
    "+info +config|get +command|info +eval +evalsha +waitaof +hmget +hget +hgetall +hset +hdel +set +del +type "
    "+exists +xinfo|stream +xadd"
)


def with_user(server: RedisServer, name: str, *rules: str) -> str:
    """The URL of a user with these rules."""
    known = [rule for rule in rules if rule != "+waitaof" or server.has_waitaof]
    server.client.acl_setuser(name, enabled=True, reset=True, passwords=[f"+{CANARY}"])
    server.client.execute_command("ACL", "SETUSER", name, *known)
    return f"redis://{name}:{CANARY}@127.0.0.1:{server.port}/0"


def refused(act: Callable[[], Any], kind: type[Exception] | tuple[type[Exception], ...] = StoreError) -> str:
    """The text of the error that *act* raises, which has no secret in any place."""
    with pytest.raises(kind) as caught:
        act()
    error: BaseException | None = caught.value
    text = str(error)
    while error is not None:
        assert CANARY not in str(error) + repr(error)
        error = None if error.__suppress_context__ else error.__context__
    return text


def test_a_wrong_password_is_named(server: RedisServer) -> None:
    """User and password are wrong, or are needed; the URL is not shown."""
    server.client.acl_setuser("ann", enabled=True, reset=True, passwords=["+right"])
    text = refused(store_of(f"redis://ann:{CANARY}@127.0.0.1:{server.port}/0").check)
    assert f"Redis at 127.0.0.1:{server.port} refuses the user or the password" in text
    assert "Correct them in the URL" in text


def test_a_password_that_is_missing_is_named(own_server: Own) -> None:
    """A server that asks for one gets none."""
    server = own_server(requirepass=CANARY)
    assert "refuses the user or the password" in refused(store_of(server.url).check)
    store_of(f"redis://:{CANARY}@127.0.0.1:{server.port}").check()


def test_the_url_is_looked_up_when_a_connection_is_made(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the environment or in a file; one that is missing or wrong is told without it."""
    store = store_of("env:THE_REDIS")
    assert "no variable THE_REDIS" in refused(store.check, ConfigError)
    monkeypatch.setenv("THE_REDIS", f"http://{CANARY}")
    assert "begins with none of redis://" in refused(store.check, ConfigError)
    monkeypatch.setenv("THE_REDIS", f"{server.url}?{CANARY}=1")
    assert "unknown parameter" in refused(store.check, ConfigError)
    monkeypatch.setenv(
        "THE_REDIS", f"{server.url}?retry_on_timeout=yes&socket_timeout=1&protocol=3&decode_responses=yes"
    )
    store.check()
    (tmp_path / "url").write_text(f"{server.url}\n")
    store_of(f"file:{tmp_path / 'url'}").check()


def test_a_database_that_is_missing_is_named(server: RedisServer) -> None:
    """Its index is out of range."""
    assert "DB index is out of range" in refused(store_of(server.url.replace("/0", "/99")).check)


def test_a_server_that_is_away_is_waited_for(own_server: Own) -> None:
    """Refused, killed, paused: it is unavailable, and nothing hangs."""
    server = own_server()
    store = begun(hasty(store_of(server.url), 0.3))
    store.check()
    server.kill()
    for _ in range(2):
        assert "Nothing is lost; it is tried again" in refused(store.check, StoreUnavailable)
    server.start()
    store.check()
    server.pause()
    for act in (store.check, lambda: store.fence("shop", "totals", 1, "t"), lambda: store.apply([], entry(1))):
        assert "Timeout" in refused(act, StoreUnavailable)
    server.resume()
    assert store.fence("shop", "totals", 1, "t") == {}


def test_a_host_that_is_unknown_is_waited_for() -> None:
    """Its name may come to be."""
    assert "Redis at nowhere.invalid:6379" in refused(store_of("redis://nowhere.invalid").check, StoreUnavailable)


@pytest.mark.parametrize("kind", KINDS)
def test_the_rights_of_the_page_are_enough(server: RedisServer, kind: Any) -> None:
    """A user with these, and no others, checks, fences and applies."""
    keys = ("~total:*", "~exactlyonce_ledger:*")
    store = begun(store_of(with_user(server, "sink", *ALLOWED.split(), *keys), kind=kind))
    store.check()
    store.fence("shop", "totals", 1, "t")
    rows: list[Any] = [Total("ann", 1)]
    assert store.apply(chunks_of(store, rows), entry(1))
    assert server.client.exists("total:ann")


@pytest.mark.parametrize(
    ("kind", "missing"),
    [
        ("string", "set"),
        ("string", "hmget"),
        ("hash", "hdel"),
        ("stream", "xadd"),
        ("string", "eval"),
        ("string", "info"),
    ],
)
def test_a_right_that_is_missing_is_named(server: RedisServer, kind: Any, missing: str) -> None:
    """The check names it, before anything is written."""
    rights = [each for each in ALLOWED.split() if each != f"+{missing}"]
    store = store_of(with_user(server, "sink", *rights, "~*"), kind=kind)
    text = refused(store.check)
    assert "NOPERM" in text
    assert "ACL SETUSER" in text
    assert re.search(rf"\b{missing}\b", text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_is_not_allowed_is_found_before_anything_is_written(server: RedisServer, kind: Any) -> None:
    """Among keys that are: none of them is written."""
    url = with_user(server, "sink", *ALLOWED.split(), "~total:a*", "~exactlyonce_ledger:*")
    store = begun(store_of(url, kind=kind))
    store.check()
    text = refused(lambda: store.apply(chunks_of(store, [Total("ann", 1), Total("bob", 1)]), entry(1)))
    assert "NOPERM" in text
    assert server.client.keys("total:*") == []


def test_the_key_of_the_ledger_has_to_be_allowed(server: RedisServer) -> None:
    """The check names its pattern."""
    assert "~exactlyonce_ledger:*" in refused(store_of(with_user(server, "sink", "+@all", "~total:*")).check)


def test_settings_of_the_server_need_not_be_readable(server: RedisServer) -> None:
    """CONFIG and COMMAND may be forbidden."""
    rights = [each for each in ALLOWED.split() if not each.startswith(("+config", "+command"))]
    store_of(with_user(server, "sink", *rights, "~*")).check()


@pytest.mark.parametrize("kind", KINDS)
def test_full_memory_is_all_or_nothing(server: RedisServer, kind: Any) -> None:
    """With noeviction a part is refused at once, or is written whole though it goes beyond the limit."""
    store = begun(store_of(server.url, kind=kind, part_rows=50))
    chunks = chunks_of(store, [Total(f"customer-{number}", number, "x" * 20_000) for number in range(1_000)], 10)
    used = server.client.info("memory")["used_memory"]
    server.client.config_set("maxmemory", used + 10_000_000)
    try:
        text = refused(lambda: store.apply(chunks, entry(1)), StoreUnavailable)
        assert "its memory is full: make room, or raise maxmemory" in text
        written, part = (
            len(server.client.keys("total:*")),
            server.client.hget("exactlyonce_ledger:shop:totals", "0:part"),
        )
        assert 0 < written < 1_000
        assert part == f"1 {written}"
    finally:
        server.client.config_set("maxmemory", 0)
    assert store.apply(chunks, entry(1))
    assert len(server.client.keys("total:*")) == 1_000
    if kind == "stream":
        assert {server.client.xlen(key) for key in server.client.keys("total:*")} == {1}


def test_a_value_longer_than_the_server_takes(server: RedisServer) -> None:
    """The setting is named, once an answer is read before the server hangs up; by it the same rows come in."""
    store = begun(store_of(server.url))
    waiting = chunks_of(store, [Total("ann", 1, "x" * 2_000_000)], 10)
    server.client.config_set("proto-max-bulk-len", 1 << 20)
    try:
        said = ""
        while "then run again" not in said:
            said = refused(lambda: store.apply(waiting, entry(1)), (StoreError, StoreUnavailable))
        assert "raise its proto-max-bulk-len, then run again" in said
    finally:
        server.client.config_set("proto-max-bulk-len", 512 << 20)
    assert store.apply(waiting, entry(1))


def test_deletions_go_through_where_memory_is_full(server: RedisServer) -> None:
    """Not even: the ledger comes first, which needs room too; nothing is deleted then."""
    server.client.set("total:ann", "old")
    store = begun(store_of(server.url, Total | None, key=lambda _: "total:ann"))
    server.client.config_set("maxmemory", 1)
    try:
        refused(lambda: store.apply(chunks_of(store, [None]), entry(1)), StoreUnavailable)
        assert server.client.get("total:ann") == "old"
    finally:
        server.client.config_set("maxmemory", 0)
    assert store.apply(chunks_of(store, [None]), entry(1))


def test_a_server_that_may_evict_is_refused(own_server: Own) -> None:
    """Policies for all keys are; those for keys that expire are not."""
    server = own_server(maxmemory_policy="allkeys-lru")
    text = refused(store_of(server.url, durable=False).check)
    assert "maxmemory-policy allkeys-lru" in text
    assert "Set maxmemory-policy to noeviction" in text
    server.client.config_set("maxmemory-policy", "volatile-lru")
    store_of(server.url).check()


def test_a_server_without_a_log_is_refused(own_server: Own) -> None:
    """Unless the sink says that nothing has to last."""
    server = own_server(appendonly="no")
    text = refused(store_of(server.url).check)
    assert "appendonly no" in text
    assert "durable=False" in text
    store = begun(store_of(server.url, durable=False))
    store.check()
    store.fence("shop", "totals", 1, "t")
    assert store.apply(chunks_of(store, totals(3)), entry(1))


def test_a_server_that_never_waits_for_its_disk_is_refused(own_server: Own) -> None:
    """appendfsync no; the other two are taken."""
    server = own_server(appendfsync="no")
    assert "appendfsync no" in refused(store_of(server.url).check)
    store_of(server.url, durable=False).check()
    server.client.config_set("appendfsync", "everysec")
    store_of(server.url).check()


def test_a_replica_is_refused(own_server: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check asks for the primary; one that becomes a replica during a run is waited for, and the URL read again."""
    primary, replica = own_server(), own_server()
    begun(store_of(primary.url))
    monkeypatch.setenv("THE_REDIS", replica.url)
    store = begun(store_of("env:THE_REDIS"))
    store.check()
    replica.client.replicaof("127.0.0.1", primary.port)
    assert "is a replica now: a failover is under way" in refused(lambda: store.apply([], entry(1)), StoreUnavailable)
    assert "Give the address of the primary" in refused(store_of(replica.url).check)
    monkeypatch.setenv("THE_REDIS", primary.url)
    assert store.apply([], entry(1))
    assert primary.client.exists("exactlyonce_ledger:shop:totals")


def test_a_disk_that_cannot_be_written_is_waited_for(own_server: Own) -> None:
    """MISCONF: nothing is written, and the error says that the server's disk is the matter."""
    server = own_server(save="3600 1", appendonly="no")
    store = begun(store_of(server.url, durable=False, kind="stream"))
    (server.folder / "dump.rdb").mkdir()
    server.client.set("a", 1)
    server.client.bgsave()
    while server.client.info("persistence")["rdb_last_bgsave_status"] == "ok":
        pass
    text = refused(lambda: store.apply(chunks_of(store, totals(3)), entry(1)), StoreUnavailable)
    assert "it cannot write to its disk" in text
    assert sorted(server.client.keys()) == ["a", LEDGER]
    (server.folder / "dump.rdb").rmdir()
    server.client.save()
    assert store.apply(chunks_of(store, totals(3)), entry(1))


def test_replicas_that_the_server_asks_for_are_waited_for(own_server: Own) -> None:
    """NOREPLICAS."""
    server = own_server()
    store = begun(store_of(server.url))
    server.client.config_set("min-replicas-to-write", 1)
    assert "too few of its replicas" in refused(lambda: store.apply([], entry(1)), StoreUnavailable)


def test_a_server_with_too_many_clients_is_waited_for(own_server: Own) -> None:
    """maxclients."""
    server = own_server(maxclients="1")
    first = server.client
    taken = first.connection_pool.get_connection()
    taken.connect()
    assert "maxclients" in refused(store_of(server.url).check, StoreUnavailable)
    taken.disconnect()


def test_a_script_of_somebody_else_is_waited_for(own_server: Own) -> None:
    """BUSY, while it runs."""
    server = own_server(**{"busy-reply-threshold": "50"})
    store = begun(hasty(store_of(server.url), 10))
    other = server.client.connection_pool.get_connection()
    other.send_command("EVAL", "while true do end", 0)
    assert "a script of somebody else keeps it busy" in refused(lambda: store.apply([], entry(1)), StoreUnavailable)
    server.client.script_kill()
    with pytest.raises(redis.ResponseError, match="killed"):
        other.read_response()
    assert store.apply([], entry(1))


def test_a_server_that_loads_its_data_is_waited_for(own_server: Own) -> None:
    """LOADING, until it has."""
    server = own_server(appendonly="no")
    store = store_of(server.url, durable=False)
    store.write(chunks_of(store, totals(3_000)))
    server.client.save()
    server.kill()
    server.settings |= {"key-load-delay": "1000", "loading-process-events-interval-bytes": "1024"}
    server.launch()
    text = ""
    while "it still loads its data" not in text:
        text = refused(store.check, StoreUnavailable)

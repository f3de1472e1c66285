"""Rows in a real server, as another client reads them: kinds, deletions, parts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import redis
from redis_rows import LEDGER, Total, begun, chunks_of, entry, key_of, store_of, totals

from exactlyonce import AvroCodec, Record
from exactlyonce.pipeline.errors import StoreError
from exactlyonce.sinks.redis.rows import ENTRY_FIELDS_MAX
from exactlyonce.sinks.redis.scripts import KINDS
from exactlyonce.testing.servers.redis import RedisServer

ann, bob = Total("ann", 1), Total("bob", 2, "often")


def test_of_a_key_the_last_row_counts(server: RedisServer) -> None:
    store = begun(store_of(server.url, Record[int], key=None))
    rows = [("a", 1), ("a", 2), ("b", 3), ("b", None), ("c", None), ("c", 4), ("d", None)]
    server.client.set("d", "old")
    assert store.apply(chunks_of(store, [Record(value, key) for key, value in rows], 2), entry(1))
    assert {key: server.client.get(key) for key in "abcd"} == {"a": "2", "b": None, "c": "4", "d": None}


def test_hashes_get_the_fields_of_records(server: RedisServer) -> None:
    server.client.hset("total:ann", mapping={"note": "old", "other": "stays"})
    server.client.hset("total:eve", mapping={"sum": "3"})
    store = begun(store_of(server.url, Record[Total], kind="hash", key=lambda record: f"total:{record.key}"))
    rows: list[Record[Any]] = [
        Record(ann, "ann"),
        Record(bob, "bob"),
        Record(None, "eve"),
        Record(Total("bob", 5), "bob"),
    ]
    assert store.apply(chunks_of(store, rows), entry(1))
    assert server.client.hgetall("total:ann") == {"customer": "ann", "sum": "1", "other": "stays"}
    assert server.client.hgetall("total:bob") == {"customer": "bob", "sum": "5"}
    assert not server.client.exists("total:eve")


def test_a_hash_may_have_more_fields_than_lua_has_room_for(server: RedisServer) -> None:
    store = begun(store_of(server.url, dict[str, int | None], kind="hash", key=lambda _: "wide"))
    many: dict[str, int | None] = {f"field-{number}": number for number in range(10_001)}
    assert store.apply(chunks_of(store, [many]), entry(1))
    assert server.client.hlen("wide") == 10_001
    assert store.apply(chunks_of(store, [{**dict.fromkeys(list(many)[1:]), "last": 1}]), entry(2))
    assert server.client.hgetall("wide") == {"field-0": "0", "last": "1"}


def test_streams_get_an_entry_for_each_record(server: RedisServer) -> None:
    store = begun(store_of(server.url, kind="stream", key=lambda _: "totals", maxlen=100))
    assert store.apply(chunks_of(store, [ann, bob]), entry(1))
    assert [fields for _, fields in server.client.xrange("totals")] == [
        {"customer": "ann", "sum": "1"}, {"customer": "bob", "sum": "2", "note": "often"}
    ]  # fmt: skip
    assert store.apply(chunks_of(store, totals(5_000)), entry(2))
    assert 100 <= server.client.xlen("totals") < 500
    assert server.client.xrevrange("totals", count=1)[0][1]["customer"] == "customer-4999"


def test_a_stream_with_a_codec_has_one_field(server: RedisServer) -> None:
    store = begun(store_of(server.url, kind="stream", value=AvroCodec(Total), key=lambda _: "totals"))
    store.apply(chunks_of(store, [ann]), entry(1))
    client: Any = redis.Redis(port=server.port)
    (_, fields), *others = client.xrange("totals")
    assert (fields, others) == ({b"value": AvroCodec(Total).encode(ann)}, [])


def test_an_entry_may_have_three_thousand_fields(server: RedisServer) -> None:
    store = begun(store_of(server.url, dict[str, int], kind="stream", key=lambda _: "wide", maxlen=10))
    many = {f"field-{number}": number for number in range(ENTRY_FIELDS_MAX)}
    assert store.apply(chunks_of(store, [many]), entry(1))
    assert len(server.client.xrange("wide")[0][1]) == ENTRY_FIELDS_MAX


@pytest.mark.parametrize(("kind", "part_rows"), [("string", 1), ("hash", 7), ("stream", 10), ("stream", 1_000)])
def test_parts_make_a_whole(server: RedisServer, kind: Any, part_rows: int) -> None:
    key = (lambda _: "stream") if kind == "stream" else key_of
    store = begun(store_of(server.url, kind=kind, key=key, part_rows=part_rows))
    assert store.apply(chunks_of(store, totals(70), 9), entry(1))
    assert not store.apply(chunks_of(store, totals(70), 9), entry(1))
    client = server.client
    if kind == "stream":
        assert [fields["sum"] for _, fields in client.xrange("stream")] == [str(number) for number in range(70)]
    else:
        assert len(client.keys("total:*")) == 70
    assert client.hget(LEDGER, "0:part") is None


@pytest.mark.parametrize("kind", KINDS)
def test_another_type_under_a_key_is_found_before_anything_is_written(server: RedisServer, kind: Any) -> None:
    server.client.rpush("total:bob", "a list")
    store = begun(store_of(server.url, kind=kind))
    if kind == "string":
        assert store.apply(chunks_of(store, [ann, bob]), entry(1))
        return
    with pytest.raises(StoreError, match=f"holds a list under the key 'total:bob', where the sink writes a {kind}"):
        store.apply(chunks_of(store, [ann, bob]), entry(1))
    assert server.client.keys("total:*") == ["total:bob"]
    server.client.delete("total:bob")
    assert store.apply(chunks_of(store, [ann, bob]), entry(1))


def test_a_stream_that_is_full_is_found_before_anything_is_written(server: RedisServer) -> None:
    server.client.xadd("total:bob", {"a": "1"}, id="18446744073709551615-18446744073709551615")
    store = begun(store_of(server.url, kind="stream"))
    with pytest.raises(StoreError, match="'total:bob' whose last id is the last there can be"):
        store.apply(chunks_of(store, [ann, bob]), entry(1))
    assert server.client.keys("total:*") == ["total:bob"]


def test_a_write_without_a_ledger_is_in_parts_too(server: RedisServer) -> None:
    store = store_of(server.url, part_rows=2, delivery="at_least_once")
    store.write(chunks_of(store, totals(5), 2))
    assert len(server.client.keys()) == 5


def test_bytes_come_as_they_are(server: RedisServer) -> None:
    every = bytes(range(256)) + b"\r\n$1\r\n"
    store = begun(store_of(server.url, bytes, key=lambda value: value[::-1]))
    assert store.apply(chunks_of(store, [every, b""]), entry(1))

    class Blob(msgspec.Struct):
        blob: bytes

    fields = begun(store_of(server.url, Blob, kind="hash", key=lambda _: "blob"))
    assert fields.apply(chunks_of(fields, [Blob(every)]), entry(1, subtask=1))
    client = redis.Redis(port=server.port)
    assert [client.get(every[::-1]), client.get(b""), client.hget("blob", "blob")] == [every, b"", every]

"""The description of a Redis sink: its problems, what it is, and that it tells no secret."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from redis_rows import Total, key_of

from exactlyonce import AvroCodec, Record
from exactlyonce.sinks import RedisSink

URL = "redis://ann:c4nary-Zr9@cache:6379/0"


def problems(type_: Any = Total, url: str = "env:CACHE", **options: Any) -> list[str]:
    return list(RedisSink(url, **{"key": key_of, **options}).problems(type_))


@pytest.mark.parametrize(
    "options",
    [
        {}, {"kind": "hash"}, {"kind": "stream", "maxlen": 10}, {"kind": "stream", "value": AvroCodec(Total)},
        {"value": AvroCodec(Total), "hash_tag": "shop", "durable": False, "part_rows": 1},
        {"delivery": "at_least_once"}, {"url": "redis://cache:6379/0"}, {"url": "redis://ann@cache:6379/0"},
        {"url": "file:/run/secrets/cache"}, {"url": "rediss://cache"}, {"url": "unix:///run/redis.sock?db=1"},
        {"type_": Record[Total], "key": None}, {"type_": dict[str, int], "kind": "hash"},
        {"type_": Total | None, "kind": "hash"}, {"type_": str},
    ],
    ids=lambda options: ",".join(options) or "nothing",
)  # fmt: skip
def test_what_is_right_has_no_problem(options: dict[str, Any]) -> None:
    assert problems(**options) == []


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"url": "http://c4nary-Zr9"}, "begins with none of redis://"),
        ({"url": "redis://"}, "names no host"),
        ({"url": "unix://"}, "names no socket"),
        ({"url": "redis://:c4nary-Zr9@cache:port"}, "a port or a host that is none"),
        ({"url": "redis://cache:6379/orders"}, "a database that is no number"),
        ({"url": 7}, "must be text"),
        ({"url": URL}, "has a password written out: put all of it into a variable, 'env:NAME', or into a file"),
        ({"url": "redis://:c4nary-Zr9@cache"}, "has a password written out"),
        ({"url": "unix:///run/redis.sock?password=c4nary-Zr9"}, "has a password written out"),
        ({"url": "rediss://cache?ssl_password=c4nary-Zr9"}, "has a password written out"),
        ({"url": "redis://ann:6379?c4nary-Zr9@cache"}, "in a password a / is written %2F"),
        ({"url": "redis://ann:12/c4nary-Zr9@cache"}, "in a password a / is written %2F"),
        ({"kind": "list"}, "kind='list' must be one of string, hash, stream"),
        ({"key": None}, "key= is missing"),
        ({"key": "total"}, "key='total' must be a function"),
        ({"durable": "yes"}, "durable='yes' must be True or False"),
        ({"part_rows": 0}, "part_rows=0 must be a number from 1 to 100000"),
        ({"part_rows": True}, "part_rows=True must be"),
        ({"hash_tag": "{shop}"}, "hash_tag='{shop}' must be text without braces"),
        ({"hash_tag": ""}, "hash_tag='' must be text"),
        ({"maxlen": 10}, "maxlen= is of streams"),
        ({"maxlen": 0, "kind": "stream"}, "maxlen=0 must be a number from 1 on"),
        ({"kind": "hash", "value": str}, "a hash has the fields of the record"),
        ({"kind": "hash", "type_": str}, "the stream is of str: use a msgspec Struct"),
        ({"kind": "hash", "type_": Total | int}, "kind='hash' writes the fields of a record"),
        ({"kind": "stream", "type_": str}, "or give value="),
        ({"value": str}, "value= encodes str, and the stream is of Total"),
        ({"type_": Callable}, "cannot be encoded"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said(options: dict[str, Any], problem: str) -> None:
    found = problems(**options)
    assert any(problem in each for each in found), found
    assert "c4nary" not in str(found)


def test_it_tells_no_secret() -> None:
    sink = RedisSink(URL, key=key_of)
    assert "c4nary" not in repr(sink) + str(sink.describe(Total)) + str(vars(sink.store(Total).encoder()))


def test_what_it_is() -> None:
    described = RedisSink(URL, key=key_of).describe(Total)
    assert described["sink"] == "redis"
    assert described == RedisSink("env:OTHER", key=str).describe(Total)
    kinds: list[Any] = ["string", "hash", "stream"]
    different = [
        RedisSink(URL, key=key_of, kind=kind).describe(type_) for kind in kinds for type_ in (Total, dict[str, int])
    ]
    assert len({msgspec.json.encode(each) for each in different}) == 6
    assert RedisSink(URL, kind="hash", key=key_of).describe(Record[Total])["value"] == described["value"]["schema"]

"""The settings of a registry are checked without connecting, and no message has a secret."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import pytest

from exactlyonce import AvroCodec, DebeziumCodec, JsonSchemaCodec, Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.connectors.registry import check_reading
from exactlyonce.connectors.registry.client import looked_up, problems
from exactlyonce.errors import ConfigError, GraphError
from exactlyonce.sinks import KafkaSink, RedisSink

URL = "http://127.0.0.1:8081"


class Order(msgspec.Struct):
    id: int


@pytest.mark.parametrize(
    ("registry", "problem"),
    [
        (URL, None),
        ({"url": "env:REGISTRY", "basic.auth.user.info": "file:/run/secrets/login", "timeout": 5}, None),
        ({"timeout": 5}, "names no URL"),
        ("127.0.0.1:8081", "begins with neither http:// nor https://"),
        ("http://host:port", "a host or a port that is none"),
        ("http://ann:hunter2@host:8081", "it has a login in it"),
        ({"url": URL, "basic.auth.user.info": "ann:hunter2"}, "has basic.auth.user.info written out"),
        ({"url": URL, "ssl.key.password": "hunter2"}, "has ssl.key.password written out"),
        ({"url": URL, "bearer.auth.client.secret": "env:"}, "it names no variable"),
        ({"url": URL, "timeout": ["hunter2"]}, "neither text nor a number"),
    ],
)
def test_mistakes_are_named_without_secrets(registry: Any, problem: str | None) -> None:
    found = " ".join(problems(AvroCodec(Order, registry=registry)))
    assert problem in found if problem else not found
    assert "hunter2" not in found
    pipeline = Pipeline("p")
    orders = pipeline.source("orders", KafkaSource("orders", value=AvroCodec(Order, registry=registry)))
    orders.sink("out", KafkaSink("out", value=AvroCodec(Order, registry=registry)))
    if problem is None:
        graph = pipeline.build()
        described = msgspec.json.encode([source.source.describe() for source in graph.sources if source.source])
        assert not any(part in described for part in (b"8081", b"REGISTRY", b"/run/secrets"))
    else:
        with pytest.raises(GraphError, match="cannot be built") as error:
            pipeline.build()
        assert problem in str(error.value)
        assert "hunter2" not in str(error.value)


def test_references_are_looked_up_for_each_client(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = AvroCodec(Order, registry={"url": URL, "basic.auth.user.info": "env:LOGIN"}).registry
    assert registry is not None
    for login in ("ann:one", "ann:two"):
        monkeypatch.setenv("LOGIN", login)
        settings, secrets = looked_up(registry)
        assert settings["basic.auth.user.info"] == login
        assert secrets == [login]
    monkeypatch.delenv("LOGIN")
    with pytest.raises(ConfigError, match=r"basic.auth.user.info of registry= is env:LOGIN, but the environment"):
        looked_up(registry)
    assert "LOGIN" not in repr(registry)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"register": True}, "give registry="),
        ({"subjects": "record"}, "give registry="),
        ({"registry": URL, "subjects": "table"}, "must be one of 'topic', 'record', 'topic-record'"),
        ({"registry": URL, "schema_id": 7}, "leave out registry="),
        ({"registry": 8081}, "must be a URL, or a dict of settings"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(arguments: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        AvroCodec(Order, **arguments)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"retries": 3}, "Confluent's client refuses: Unrecognized properties: retries"),
        ({"ssl.ca.location": "/nowhere.pem"}, "No such file"),
        ({"basic.auth.user.info": "env:LOGIN"}, "must be in the form"),
    ],
)
def test_settings_that_the_client_refuses(settings: Any, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("authlib", reason="SCHEMA REGISTRY NOT TESTED: its client needs the extra `registry`")
    monkeypatch.setenv("LOGIN", "hunter2")
    with pytest.raises(ConfigError, match=problem) as error:
        check_reading(AvroCodec(Order, registry={"url": URL, **settings}))
    assert "hunter2" not in str(error.value)


def test_the_description_has_the_schema_and_the_strategy_alone() -> None:
    plain, named = AvroCodec(Order), AvroCodec(Order, registry=URL, subjects="record", register=True)
    assert named.describe() == {**plain.describe(), "subjects": "record"}
    assert named.describe() == AvroCodec(Order, registry="http://other", subjects="record").describe()


@pytest.mark.parametrize("codec", [AvroCodec, JsonSchemaCodec, partial(DebeziumCodec, key="id")])
def test_the_place_of_an_id_is_checked(codec: Any) -> None:
    with pytest.raises(ConfigError, match="ids= are about a schema registry: give registry="):
        codec(Order, ids="header")
    with pytest.raises(ConfigError, match="ids='headers' must be one of 'prefix', 'header'"):
        codec(Order, registry=URL, ids="headers")


def test_a_codec_with_a_registry_is_for_topics() -> None:
    codec = AvroCodec(Order, registry=URL)
    assert any("registry=, which is for topics" in text for text in RedisSink("redis://h", value=codec).problems(Order))


def test_a_key_is_encoded_by_its_codec() -> None:
    sink: KafkaSink[Order] = KafkaSink("t", key=lambda order: order.id or None, key_codec=AvroCodec(int))
    assert sink.encoder(Order).keys([Order(7), Order(0)]) == [b"\x0e", None]
    source = KafkaSource.records("t", value=Order, key=AvroCodec(int))
    assert source.decode_key(b"\x0e") == 7
    with pytest.raises(GraphError, match="key= is a codec of Order, which must be one of bytes, str"):
        KafkaSource.records("t", value=Order, key=AvroCodec(Order))
    wrong: Any = str
    assert [*KafkaSink("t", key_codec=wrong).problems(Order)] == [
        "key_codec=<class 'str'> must be a codec, as AvroCodec(str)"
    ]
    assert sink.describe(Order)["key"] == AvroCodec(int).describe()
    assert "key" not in KafkaSink("t").describe(Order)

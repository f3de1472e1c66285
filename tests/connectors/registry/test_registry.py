"""Codecs with a registry, against Apicurio and Confluent's own serializers and deserializers."""

from __future__ import annotations

import json
import os
import re
import signal
from base64 import b64decode
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
import registry_pipelines
import shop_messages as shop

pytest.importorskip("authlib", reason="SCHEMA REGISTRY NOT TESTED: its client needs the extra `registry`")

from confluent_kafka import Message
from confluent_kafka.schema_registry import (
    SchemaRegistryClient,
    dual_schema_id_deserializer,
    header_schema_id_serializer,
    topic_subject_name_strategy,
)
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from proxies import asking_for_login, with_guids
from running import QUICK, Run, assert_updates, orders, run_here, stop, workers_of

from exactlyonce import AvroCodec, Change, DebeziumCodec, JsonSchemaCodec, KafkaSink, ProtobufCodec, Record
from exactlyonce.cli.main import main
from exactlyonce.connectors import KafkaSource
from exactlyonce.connectors.registry import check_reading, check_writing, client, opened
from exactlyonce.connectors.registry.codec import LOOKS
from exactlyonce.errors import ConfigError, Unavailable
from exactlyonce.testing.cluster import KafkaCluster
from exactlyonce.testing.servers.registry import ANSWER_S, RegistryServer

RIG = Path(__file__).parent / "rig"
BY_TOPIC = {"subject.name.strategy": topic_subject_name_strategy}
"""Else Confluent's serializers ask the registry for each record."""
ROOT = Path(__file__).parents[3]


class Item(msgspec.Struct):
    sku: str
    count: int = 1


class Order(msgspec.Struct):
    id: int
    customer: str
    items: list[Item]
    note: str | None = None


class Stock(msgspec.Struct):
    shop: str
    nr: int
    name: str


class Total(msgspec.Struct):
    customer: str
    sum: int


ORDER = Order(7, "ann", [Item("tea", 2), Item("jam")])
OLD_ORDER = {
    "type": "record",
    "name": "Order",
    "namespace": "shop",
    "fields": [{"name": "customer", "type": "string"}, {"name": "id", "type": "int"}, {"name": "page", "type": "long"}],
}


class NewOrder(msgspec.Struct):
    id: float
    customer: str
    tags: dict[str, int] = {}
    note: str | None = None


@pytest.fixture(autouse=True)
def waits_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry on a busy machine is no outage."""
    monkeypatch.setitem(client._DEFAULTS, "timeout", ANSWER_S)


@pytest.fixture
def confluent(registry: RegistryServer) -> SchemaRegistryClient:
    return SchemaRegistryClient({"url": registry.url, "timeout": ANSWER_S})


def record_in(topic: str, part: str = "value") -> SerializationContext:
    return SerializationContext(topic, MessageField(part))


def test_avro(registry: RegistryServer, confluent: SchemaRegistryClient, topic_name: str) -> None:
    codec = AvroCodec(Order, registry=registry.url, register=True)
    ours = opened(codec, topic_name, "value")
    encoded = ours.encode(ORDER)
    assert encoded[0] == 0
    theirs = AvroDeserializer(confluent)(encoded, record_in(topic_name))
    assert theirs == msgspec.to_builtins(ORDER)
    again = AvroSerializer(confluent, json.dumps(codec.schema), conf=BY_TOPIC)(theirs, record_in(topic_name))
    assert again == encoded
    assert ours.decode(encoded) == ORDER


def test_debeziums_envelope(registry: RegistryServer, confluent: SchemaRegistryClient, topic_name: str) -> None:
    """Keys and values have their schemas under subjects of their own, before anything is written."""
    codec = DebeziumCodec(Order, "id", registry=registry.url, register=True, name="shop.orders")
    sink: KafkaSink[Any] = KafkaSink(topic_name, value=codec)
    sink.check_services(Change[Order])
    assert {f"{topic_name}-key", f"{topic_name}-value"} <= {*registry.ask("subjects")}
    changes = [Change("insert", 7, ORDER, None, "orders", 5, 8, 9), Change("delete", 7, None, None, "orders", 6, 9, 9)]
    outputs = sink.encoder(Change[Order]).encode(changes)
    assert outputs.values[2] is None
    keys = [AvroDeserializer(confluent)(key, record_in(topic_name, "key")) for key in outputs.keys or ()]
    assert keys == [{"id": 7}] * 3
    first, second = (AvroDeserializer(confluent)(value, record_in(topic_name)) for value in outputs.values[:2])
    items = '[{"sku":"tea","count":2},{"sku":"jam","count":1}]'
    assert (first["op"], first["after"]) == ("c", {"id": 7, "customer": "ann", "items": items, "note": None})
    assert (second["op"], second["before"]["id"], second["source"]["lsn"]) == ("d", 7, 9)
    reading = KafkaSource(topic_name, value=DebeziumCodec(Order, "id", registry=registry.url))
    reading.check_services()
    assert [reading.decode_value(value) for value in outputs.values[:2]] == changes


def test_debeziums_own_avro(registry: RegistryServer, topic_name: str) -> None:
    """Messages that Debezium wrote are read by their schema, under the id that this registry gives it."""
    recorded = json.loads((ROOT / "tests/pipeline/debezium.json").read_text())
    messages = [message for message in recorded["messages"] if message["table"] == "plain" and message["avro"]]
    source: KafkaSource[Any] = KafkaSource(
        topic_name, value=DebeziumCodec(Stock, ("shop", "nr"), registry=registry.url)
    )
    for message in messages:
        id = registry.register(f"{topic_name}-value", recorded["schemas"][message["avro_schema"]])
        data = b"\0" + id.to_bytes(4, "big") + b64decode(message["avro"])[5:]
        change = source.decode_value(data)
        assert (change.op, change.key) == (
            ("delete", '["a","1"]') if message["payload"]["op"] == "d" else
            ("read", '["a","1"]') if message["payload"]["op"] == "r" else ("insert", '["b","2"]')
        )  # fmt: skip


def test_json(registry: RegistryServer, confluent: SchemaRegistryClient, topic_name: str) -> None:
    codec = JsonSchemaCodec(Order, registry=registry.url, register=True)
    ours = opened(codec, topic_name, "value")
    encoded = ours.encode(ORDER)
    schema = json.dumps(codec.schema)
    theirs = JSONDeserializer(schema, schema_registry_client=confluent)(encoded, record_in(topic_name))
    assert theirs == msgspec.to_builtins(ORDER)
    again = JSONSerializer(schema, confluent)(theirs, record_in(topic_name))
    assert again is not None
    assert again[:5] == encoded[:5]
    assert ours.decode(again) == ORDER
    with pytest.raises(ValueError, match=r"Expected `int`, got `str` - at `\$.id`"):
        ours.decode(encoded[:5] + b'{"id":"7"}')


@pytest.mark.parametrize("message", [shop.Money(cents=5), shop.Order(id=7, total={"cents": 5}), shop.Address(city="x")])
def test_protobuf(registry: RegistryServer, confluent: SchemaRegistryClient, topic_name: str, message: Any) -> None:
    """A first message, one that imports another file, and a nested one.

    Apicurio gives no descriptor back that was registered in base64: the deserializer knows it by the serializer's look.
    """
    class_ = type(message)
    ours = opened(ProtobufCodec(class_, registry=registry.url, register=True), topic_name, "value")
    encoded = ours.encode(message)
    assert ProtobufSerializer(class_, confluent, {})(message, record_in(topic_name)) == encoded
    assert ProtobufDeserializer(class_, {}, confluent)(encoded, record_in(topic_name)) == message
    assert ours.decode(encoded) == message
    other = ProtobufCodec(shop.Customer, registry=registry.url)
    with pytest.raises(ValueError, match=r"it is shop\.\w+( with nested ones)?, by its indexes"):
        opened(other, topic_name, "value").decode(encoded)


def test_a_schema_in_protobufs_language_is_read(registry: RegistryServer, topic_name: str) -> None:
    text = """
        syntax = "proto3"; // message Not { }
        package shop;
        option java_package = "message Neither { ";
        message First { string message = 1; message Inner { int64 a = 1; } }
        /* message Nor {} */
        message Money { int64 cents = 1; string currency = 2; map<string, int64> rates = 3; }
    """
    id = registry.register(f"{topic_name}-value", text, "PROTOBUF").to_bytes(4, "big")
    decode = opened(ProtobufCodec(shop.Money, registry=registry.url), topic_name, "value").decode
    assert decode(b"\0" + id + b"\x02\x02\x08\x05") == shop.Money(cents=5)
    for data, why in (
        (b"\0\x08\x05", "it is shop.First"),
        (b"\x02\x04\x08\x05", "it is a message that its schema lacks"),
        (b"\x04\x02\x00", "it is shop.Money with nested ones"),
        (b"", "it ends within the indexes"),
        (b"\x02\x02\x08", "the bytes are no shop.Money"),
    ):
        with pytest.raises(ValueError, match=why):
            decode(b"\0" + id + data)


@pytest.mark.parametrize("part", ["key", "value"])
def test_keys_and_values_have_subjects_of_their_own(registry: RegistryServer, topic_name: str, part: Any) -> None:
    codec = AvroCodec(str, registry=registry.url, register=True)
    encode = opened(codec, topic_name, part).encode
    assert opened(codec, topic_name, part).decode(encode("ann")) == "ann"
    assert f"{topic_name}-{part}" in registry.ask("subjects")


@pytest.mark.parametrize(
    ("subjects", "subject"), [("topic", "{}-value"), ("record", "shop.{}"), ("topic-record", "{}-shop.{}")]
)
def test_subjects_by_strategy(registry: RegistryServer, topic_name: str, subjects: Any, subject: str) -> None:
    name = topic_name.replace("-", "_")
    schema = {"type": "record", "name": name, "namespace": "shop", "fields": [{"name": "sum", "type": "long"}]}
    codec = AvroCodec(dict[str, int], schema, registry=registry.url, subjects=subjects, register=True)
    check_writing(codec, name, "value")
    assert subject.format(name, name) in registry.ask("subjects")


def test_an_older_schema(registry: RegistryServer, confluent: SchemaRegistryClient, topic_name: str) -> None:
    codec = AvroCodec(
        NewOrder,
        {
            "type": "record", "name": "Order", "namespace": "shop", "fields": [
                {"name": "id", "type": "double"}, {"name": "customer", "type": "string"},
                {"name": "tags", "type": {"type": "map", "values": "long"}, "default": {"new": 1}},
                {"name": "note", "type": ["null", "string"], "default": None},
            ],
        },
        registry=registry.url,
    )  # fmt: skip
    write = AvroSerializer(confluent, json.dumps(OLD_ORDER), conf=BY_TOPIC)
    old = write({"id": 7, "customer": "ann", "page": 2}, record_in(topic_name))
    first, second = map(opened(codec, topic_name, "value").decode, (old, old))
    assert first == second == NewOrder(7.0, "ann", {"new": 1})
    assert isinstance(first.id, float)
    assert first.tags is not second.tags


def test_references_are_resolved(registry: RegistryServer, topic_name: str) -> None:
    """Both parts use a third one, and the record uses all."""
    unit = {"type": "enum", "name": "Unit", "namespace": "shop", "symbols": ["KG", "L"]}
    part = {"type": "record", "namespace": "shop", "fields": [{"name": "unit", "type": "Unit"}]}
    names = {name: f"{topic_name}-{name}" for name in ("Unit", "Net", "Gross")}
    registry.register(names["Unit"], unit)
    of_unit = {"name": "shop.Unit", "subject": names["Unit"], "version": 1}
    referred = [of_unit]
    for name in ("Net", "Gross"):
        registry.register(names[name], {**part, "name": name}, references=(of_unit,))
        referred.append({"name": f"shop.{name}", "subject": names[name], "version": 1})
    fields = [{"name": "net", "type": "shop.Net"}, {"name": "gross", "type": ["null", "shop.Gross"]}]
    whole = {"type": "record", "name": "Load", "namespace": "shop", "fields": fields}
    id = registry.register(f"{topic_name}-value", whole, references=tuple(referred))
    inner = {**part, "name": "Net", "fields": [{"name": "unit", "type": unit}]}
    reader = {**whole, "fields": [{"name": "net", "type": inner}]}
    codec = AvroCodec(dict[str, dict[str, str]], reader, registry=registry.url)
    decode = opened(codec, topic_name, "value").decode
    assert decode(b"\0" + id.to_bytes(4, "big") + b"\x02\x02\x00") == {"net": {"unit": "L"}}


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b'{"id": 7}', "it begins with b'{\"id\"'"),
        (b"", "it begins with b''"),
        (b"\0\0\0", "and not with a zero byte and the id"),
        (b"\2" + bytes(20), "it was written without a registry"),
    ],
)
def test_other_bytes_are_named(registry: RegistryServer, data: bytes, named: str) -> None:
    with pytest.raises(ValueError, match=r"it begins with") as error:
        opened(AvroCodec(Total, registry=registry.url), "t", "value").decode(data)
    assert named in str(error.value)


@pytest.mark.parametrize("metadata", [True, False])
def test_values_with_their_ids_in_headers(registry: RegistryServer, topic_name: str, metadata: bool) -> None:
    """Of Confluent's serializers, beside those with the id before the value; and keys, too."""
    make: Any = KafkaSource.records if metadata else KafkaSource
    in_header: Any = {"schema.id.serializer": header_schema_id_serializer, **BY_TOPIC}
    order: Any = msgspec.to_builtins(ORDER)
    with with_guids(registry) as url:
        server = SchemaRegistryClient({"url": url, "timeout": ANSWER_S})
        avro = AvroCodec(Order, registry=url)
        json_codec = JsonSchemaCodec(Order, registry=url)
        schema = json.dumps(json_codec.schema)
        codecs: list[tuple[Any, Any, Any, Any]] = [
            (avro, AvroSerializer(server, json.dumps(avro.schema), conf=in_header), order, ORDER),
            (json_codec, JSONSerializer(schema, server, conf=in_header), order, ORDER),
            *(
                (ProtobufCodec(type(each), registry=url), ProtobufSerializer(type(each), server, in_header), each, each)
                for each in (shop.Money(cents=5), shop.Address(city="x"))
            ),
        ]
        for number, (codec, write, given, read) in enumerate(codecs):
            topic = f"{topic_name}-{number}"
            headers: list[Any] = [("trace", b"7")]
            value = write(given, SerializationContext(topic, MessageField.VALUE, headers))
            message = Message(topic=topic, value=value, headers=headers)
            assert headers[1][1][0] == 1
            decoder = make(topic, value=codec).decoder()
            found = decoder.decode(decoder.parts([message])[0])
            assert (found.value if metadata else found) == read
        encode = opened(AvroCodec(Total, registry=url, register=True), topic_name, "value").encode
        before = Message(topic=topic_name, value=encode(Total("ann", 7)))
        decoder = make(topic_name, value=AvroCodec(Total, registry=url)).decoder()
        found = decoder.decode(decoder.parts([before])[0])
        assert (found.value if metadata else found) == Total("ann", 7)
        if metadata:
            headers = []
            text = AvroSerializer(server, '"string"', conf=in_header)
            key = text("ann", SerializationContext(topic_name, MessageField.KEY, headers))
            message = Message(topic=topic_name, key=key, value=b"7", headers=headers)
            decoder = KafkaSource.records(topic_name, value=int, key=AvroCodec(str, registry=url)).decoder()
            assert decoder.decode(decoder.parts([message])[0]).key == "ann"


def test_ids_are_written_into_headers(registry: RegistryServer, topic_name: str) -> None:
    """Confluent's deserializers find them there, and so do sources; the value alone is that of the codec.

    The key is long because their AvroDeserializer refuses less than six bytes, wherever the id is.
    """
    dual: Any = {"schema.id.deserializer": dual_schema_id_deserializer, **BY_TOPIC}
    with with_guids(registry) as url:
        server = SchemaRegistryClient({"url": url, "timeout": ANSWER_S})
        given: Any = {"registry": url, "register": True, "ids": "header"}
        json_codec = JsonSchemaCodec(Order, **given)
        json_read = JSONDeserializer(json.dumps(json_codec.schema), schema_registry_client=server, conf=dual)
        plain = msgspec.to_builtins(ORDER)
        cases: list[tuple[Any, Any, Any, Any]] = [
            (AvroCodec(Order, **given), AvroDeserializer(server, conf=dual), ORDER, plain),
            (json_codec, json_read, ORDER, plain),
            *(
                (ProtobufCodec(type(each), **given), ProtobufDeserializer(type(each), dual, server), each, each)
                for each in (shop.Money(cents=5), shop.Address(city="x"))
            ),
        ]
        for number, (codec, read, value, expected) in enumerate(cases):
            topic = f"{topic_name}-{number}"
            if codec.kind == "PROTOBUF":  # Apicurio gives no descriptor back: the deserializer knows it by this look
                ProtobufSerializer(codec.type, server, BY_TOPIC)(value, record_in(topic))
            key_codec = AvroCodec(str, **given)
            sink: KafkaSink[Any] = KafkaSink(
                topic, value=codec, key=lambda _: "ann of Ulm", key_codec=key_codec, headers=lambda _: [("trace", b"7")]
            )
            sink.check_services(codec.type)
            outputs = sink.encoder(codec.type).encode([value, value])
            assert outputs.values[0] == codec.encode(value)
            for encoded, key, headers in zip(outputs.values, outputs.keys or (), outputs.headers or (), strict=True):
                assert [name for name, _ in headers] == ["trace", "__value_schema_id", "__key_schema_id"]
                of_value = SerializationContext(topic, MessageField.VALUE, headers)
                assert read(encoded, of_value) == expected
                of_key = SerializationContext(topic, MessageField.KEY, headers)
                assert AvroDeserializer(server, conf=dual)(key, of_key) == "ann of Ulm"
                decoder = KafkaSource.records(topic, value=codec, key=key_codec).decoder()
                message = Message(topic=topic, value=encoded, key=key, headers=headers)
                record = decoder.decode(decoder.parts([message])[0])
                assert (record.key, record.value) == ("ann of Ulm", value)


@pytest.mark.parametrize("ids", ["prefix", "header"])
def test_a_record_does_not_keep_the_header_of_another_schema(
    registry: RegistryServer, topic_name: str, ids: Any
) -> None:
    """Nulls have no id; a copied record has the id that its new value was written with."""
    with with_guids(registry) as url:
        codec = AvroCodec(Total, registry=url, register=True, ids=ids)
        encoder = KafkaSink(topic_name, value=codec).encoder(Record[Total | None])
        of_another = (("__value_schema_id", b"\1" + bytes(16)), ("trace", b"7"))
        records = [Record(value, key="a", headers=of_another) for value in (Total("ann", 7), None)]
        outputs = encoder.encode(records)
        names = [[name for name, _ in headers] for headers in outputs.headers or ()]
        assert names == [["trace", *(["__value_schema_id"] if ids == "header" else [])], ["trace"]]
        decoder = KafkaSource(topic_name, value=AvroCodec(Total, registry=url)).decoder()
        assert outputs.headers is not None
        message = Message(topic=topic_name, value=outputs.values[0], headers=outputs.headers[0])
        assert decoder.decode(decoder.parts([message])[0]) == Total("ann", 7)


def test_debeziums_envelope_with_ids_in_headers(registry: RegistryServer, topic_name: str) -> None:
    """Of its keys, too; a tombstone has the id of its key alone."""
    with with_guids(registry) as url:
        codec = DebeziumCodec(Order, "id", registry=url, register=True, ids="header")
        sink: KafkaSink[Any] = KafkaSink(topic_name, value=codec)
        change: Change[Order] = Change("delete", 7, None, None, "orders", 6, 9, 9)
        outputs = sink.encoder(Change[Order]).encode([change])
        names = [[name for name, _ in headers] for headers in outputs.headers or ()]
        assert names == [["__value_schema_id", "__key_schema_id"], ["__key_schema_id"]]


@pytest.mark.parametrize("register", [True, False])
def test_a_registry_without_guids_has_none_for_a_header(
    registry: RegistryServer, topic_name: str, register: bool
) -> None:
    check_writing(AvroCodec(Total, registry=registry.url, register=True), topic_name, "value")
    codec = AvroCodec(Total, registry=registry.url, register=register, ids="header")
    with pytest.raises(ConfigError, match=r"gives its schemas none: Confluent's does, since 8.0. Leave out ids=: the"):
        check_writing(codec, topic_name, "value")


def test_a_guid_that_the_registry_does_not_know(registry: RegistryServer, topic_name: str) -> None:
    """Also where it knows none at all. A value is never read as if it began with an id."""
    codec = AvroCodec(Total, registry=registry.url, register=True)
    encoded = opened(codec, topic_name, "value").encode(Total("ann", 7))
    message = Message(topic=topic_name, value=encoded, headers=[("__value_schema_id", b"\1" + bytes(16))])
    with with_guids(registry) as url:
        for each in (registry.url, url):
            decoder = KafkaSource(topic_name, value=AvroCodec(Total, registry=each)).decoder()
            for _ in range(LOOKS - 1):
                with pytest.raises(Unavailable, match=f"has no schema of its id {UUID(int=0)}"):
                    decoder.decode(decoder.parts([message])[0])
            with pytest.raises(ValueError, match="Was it written with another registry"):
                decoder.decode(decoder.parts([message])[0])


def test_a_schema_that_the_type_cannot_read(registry: RegistryServer, topic_name: str) -> None:
    in_json = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object"}
    cases = [
        (in_json, "JSON", "is one of JSON, and the codec one of AVRO"),
        (OLD_ORDER, "AVRO", "it is a shop.Order, and Total is read: give schema="),
        ({**OLD_ORDER, "name": "Total"}, "AVRO", "No default value for field sum"),
    ]
    decode = opened(AvroCodec(Total, registry=registry.url), topic_name, "value").decode
    for number, (schema, kind, why) in enumerate(cases):
        id = registry.register(f"{topic_name}-{number}", schema, kind)
        with pytest.raises(ValueError, match=why):
            decode(b"\0" + id.to_bytes(4, "big") + b"\x06ann\x02\x02")


def test_an_unknown_id_is_an_outage_at_first(registry: RegistryServer, topic_name: str) -> None:
    decode = opened(AvroCodec(Total, registry=registry.url), topic_name, "value").decode
    unknown = b"\0\x00\xff\xff\xff" + b"\x06ann\x02"
    for _ in range(LOOKS - 1):
        with pytest.raises(Unavailable, match="has no schema of its id 16777215"):
            decode(unknown)
    with pytest.raises(ValueError, match="Was it written with another registry"):
        decode(unknown)


def test_a_missing_schema_is_registered_or_refused(registry: RegistryServer, topic_name: str) -> None:
    with pytest.raises(ConfigError, match=rf"subject '{topic_name}-value' .* lacks the schema of the values") as error:
        check_writing(AvroCodec(Total, registry=registry.url), topic_name, "value")
    assert "register=True" in str(error.value)
    assert '"name": "Total"' in str(error.value)
    assert f"{topic_name}-value" not in registry.ask("subjects")
    check_writing(AvroCodec(Total, registry=registry.url, register=True), topic_name, "value")
    check_writing(AvroCodec(Total, registry=registry.url), topic_name, "value")


@pytest.mark.parametrize("register", [True, False])
def test_an_incompatible_schema(registry: RegistryServer, topic_name: str, register: bool) -> None:
    subject = f"{topic_name}-value"
    registry.register(subject, {"type": "record", "name": "Total", "fields": [{"name": "sum", "type": "long"}]})
    registry.must_be(subject, "BACKWARD")
    reason = r"does not take .*Incompatible.*customer" if register else r"would not be compatible with the newest"
    with pytest.raises(ConfigError, match=reason):
        check_writing(AvroCodec(Total, registry=registry.url, register=register), topic_name, "value")
    assert registry.ask(f"subjects/{subject}/versions") == [1]


def test_a_registry_that_is_away_is_an_outage(registry: RegistryServer, topic_name: str) -> None:
    nowhere = AvroCodec(Total, registry="http://127.0.0.1:9")
    wrong = AvroCodec(Total, registry=registry.url.replace("/apis/ccompat/v7", "/nothing"))
    for codec, why in (
        (nowhere, r"does not answer: .*\. Start it, or correct registry=\.$"),
        (wrong, r"has no such page: .*\. Correct registry=: it takes the URL of the registry's API"),
    ):
        codec_of_values = opened(codec, topic_name, "value")
        calls: list[Callable[[], object]] = [
            partial(check_reading, codec),
            partial(check_writing, codec, topic_name, "value"),
            partial(codec_of_values.encode, Total("ann", 7)),
            partial(codec_of_values.decode, bytes(20)),
        ]
        for call in calls:
            with pytest.raises(Unavailable, match=why):
                call()


def test_a_login_by_reference(registry: RegistryServer, topic_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with asking_for_login(registry, "ann:hunter2-hunter2") as url:
        settings = {"url": url, "basic.auth.user.info": "env:REGISTRY_LOGIN"}
        codec = AvroCodec(Total, registry=settings, register=True)
        monkeypatch.setenv("REGISTRY_LOGIN", "ann:hunter3-hunter3")
        with pytest.raises(Unavailable, match=r"refuses the login; correct basic\.auth\.user\.info") as error:
            check_writing(codec, topic_name, "value")
        assert "hunter" not in str(error.value)
        monkeypatch.setenv("REGISTRY_LOGIN", "ann:hunter2-hunter2")
        check_writing(codec, topic_name, "value")
        ours = opened(codec, topic_name, "value")
        assert ours.decode(ours.encode(Total("ann", 7))) == Total("ann", 7)


def encoded_orders(
    confluent: SchemaRegistryClient, name: str, first: int, count: int, schema: Any = None
) -> list[tuple[str, bytes]]:
    """Orders *first* and on for NAME-in, each with its key, by Confluent's serializer."""
    write = AvroSerializer(confluent, json.dumps(schema or AvroCodec(registry_pipelines.Order).schema), conf=BY_TOPIC)
    return [(key, write(json.loads(order), record_in(f"{name}-in"))) for key, order in orders(count, first=first)]


def fed(kafka: KafkaCluster, confluent: SchemaRegistryClient, name: str, first: int, count: int) -> None:
    kafka.produce(f"{name}-in", encoded_orders(confluent, name, first, count))


def assert_totals(kafka: KafkaCluster, confluent: SchemaRegistryClient, name: str, count: int) -> None:
    """The running totals of orders 0 and on are in NAME-out, each once and in order, by Confluent's deserializer."""
    read, topic = AvroDeserializer(confluent, conf=BY_TOPIC), f"{name}-out"
    totals: list[Any] = []
    for record in kafka.read_committed(topic):
        totals.append(read(record.value, record_in(topic)))
        assert read(record.key, record_in(topic, "key")) == totals[-1]["customer"]
    assert_updates(totals, orders(count))


@pytest.fixture
def start(
    run: Callable[..., Run], registry: RegistryServer, kafka: KafkaCluster, topic_name: str
) -> Callable[..., Run]:
    kafka.create_topic(f"{topic_name}-in", 3)
    params = ("--param", f"name={topic_name}", "--param", f"registry={registry.url}", *QUICK)

    def begin(*arguments: str) -> Run:
        environment = {"PYTHONPATH": str(RIG)}
        return run("registry_pipelines:totals", *params, "--parallelism", "2", *arguments, env=environment)

    return begin


def test_a_run_and_bounded_work_read_and_write_what_confluents_serializers_do(
    kafka: KafkaCluster, confluent: SchemaRegistryClient, registry: RegistryServer, topic_name: str
) -> None:
    kafka.create_topic(f"{topic_name}-in", 3)
    params = ("--param", f"name={topic_name}", "--param", f"registry={registry.url}")
    fed(kafka, confluent, topic_name, 0, 300)
    ended = run_here(
        kafka.bootstrap_servers, "registry_pipelines:totals", *params, *QUICK, "--inline", "--until", "latest"
    )
    assert ended.code == 0, ended.said
    fed(kafka, confluent, topic_name, 300, 300)
    servers = ("--bootstrap-servers", kafka.bootstrap_servers)
    assert main(["catch-up", "registry_pipelines:totals", *params, *servers, "--on", "driver"]) == 0
    assert_totals(kafka, confluent, topic_name, 600)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_totals_are_exact_after_a_kill_and_an_outage_of_the_registry(
    start: Callable[..., Run], registry: RegistryServer, kafka: KafkaCluster, confluent: SchemaRegistryClient,
    topic_name: str,
) -> None:  # fmt: skip
    """A schema that no worker has seen comes while the registry is away: nothing is skipped, and the run goes on."""
    fed(kafka, confluent, topic_name, 0, 2_000)
    first = start()
    first.await_checkpoint()
    os.kill(workers_of(first)[0], signal.SIGKILL)
    fed(kafka, confluent, topic_name, 2_000, 2_000)
    first.await_checkpoint()
    first.kill()
    second = start()
    second.await_step("deployed")
    evolved = {**AvroCodec(registry_pipelines.Order).schema, "doc": "evolved"}
    evolved["fields"] = [*evolved["fields"], {"name": "page", "type": ["null", "long"], "default": None}]
    later = encoded_orders(confluent, topic_name, 4_000, 2_000, evolved)
    second.await_checkpoint()
    with registry.away():
        kafka.produce(f"{topic_name}-in", later)
        second.await_event(lambda event: "the codec met an outage" in event.get("text", ""))
        second.await_step("deployed")
    second.await_checkpoint()
    stop(second)
    assert start("--until", "latest").wait() == 0
    assert_totals(kafka, confluent, topic_name, 6_000)


def test_a_start_without_registry_or_schema(kafka: KafkaCluster, registry: RegistryServer, topic_name: str) -> None:
    kafka.create_topic(f"{topic_name}-in")
    for params, code, why in (
        ((f"registry={registry.url}", "register=false"), 2, r"Sink 'out': .* lacks the schema of the values"),
        (("registry=http://127.0.0.1:9",), 4, r"Source 'orders': .*http://127.0.0.1:9 does not answer"),
    ):
        arguments = [argument for param in (f"name={topic_name}", *params) for argument in ("--param", param)]
        ended = run_here(kafka.bootstrap_servers, "registry_pipelines:totals", *arguments, "--inline")
        assert ended.code == code
        assert re.search(why, ended.said)
    assert kafka.read_committed(f"{topic_name}-in") == []

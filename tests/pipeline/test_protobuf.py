"""Messages of generated classes as records."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import shop_messages as shop

from exactlyonce import Pipeline, ProtobufCodec
from exactlyonce.connectors import KafkaSource
from exactlyonce.errors import ConfigError, GraphError
from exactlyonce.pipeline.shape import UnsupportedType
from exactlyonce.sinks import KafkaSink


def test_messages_are_plain_without_a_registry() -> None:
    codec = ProtobufCodec(shop.Money)
    money = shop.Money(cents=5, currency="EUR")
    assert codec.encode(money) == money.SerializeToString()
    assert codec.decode(codec.encode(money)) == money
    with pytest.raises(ValueError, match=r"the bytes are no shop\.Money"):
        codec.decode(b"\xff")
    with pytest.raises(TypeError, match=r"it is a Order, and shop\.Money is written"):
        codec.encode(shop.Order())


@pytest.mark.parametrize(
    ("type_", "indexes"), [(shop.Customer, b"\0"), (shop.Order, b"\x02\x02"), (shop.Address, b"\x04\0\x02")]
)
def test_the_indexes_say_which_message_of_its_file_a_value_is(type_: Any, indexes: bytes) -> None:
    assert ProtobufCodec(type_).message_indexes == indexes


def test_the_description_has_the_message_and_a_digest_of_all_files() -> None:
    described = ProtobufCodec(shop.Order).describe()
    assert described["schema"]["message"] == "shop.Order"
    assert described == ProtobufCodec(shop.Order).describe() != ProtobufCodec(shop.Customer).describe()
    money, order = (ProtobufCodec(type_).published for type_ in (shop.Money, shop.Order))
    assert [(reference.name, reference.schema) for reference in order.references] == [("money.proto", money)]


def test_only_generated_classes_are_taken() -> None:
    with pytest.raises(UnsupportedType, match="takes a class that protoc has generated, not int"):
        ProtobufCodec(int)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.protobuf.message", None)
    with pytest.raises(ConfigError, match=r"ProtobufCodec needs protobuf, .* Run: pip install 'protobuf"):
        ProtobufCodec(shop.Money)


def test_messages_go_from_a_source_to_a_sink_but_not_to_another_process() -> None:
    def cents(money: shop.Money) -> int:
        return int(money.cents)

    pipeline = Pipeline("p")
    money = pipeline.source("money", KafkaSource("money", value=ProtobufCodec(shop.Money)))
    money.filter(lambda money: money.cents > 0).sink("out", KafkaSink("out", value=ProtobufCodec(shop.Money)))
    money.map(cents).key_by(lambda cents: cents % 2).reduce("most", max).sink("most-out", KafkaSink("most"))
    assert pipeline.build().fingerprint()
    money.key_by(lambda money: money.currency).reduce("first", min).sink("first-out", KafkaSink("first"))
    with pytest.raises(GraphError, match="records may be sent to another process, and Money"):
        pipeline.build()

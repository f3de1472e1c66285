"""The description of a Kafka topic as a source: its types, its decoders, and what it says of a bad record."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from datetime import datetime, timezone
from operator import itemgetter
from typing import Any

import msgspec
import pytest
from contract_part import only

from exactlyonce import AvroCodec, Record
from exactlyonce.checkpoint.records.manifest import TopicSplit
from exactlyonce.connectors import KafkaSource
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.reader import Consumers, exact_consumer
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.connectors.source import RangeContext, ReaderClients
from exactlyonce.testing.source_contract import SPLITS, SourceContract


class Order(msgspec.Struct):
    id: int


@pytest.mark.parametrize(
    ("source", "type_"),
    [
        (KafkaSource("t", value=Order), Order),
        (KafkaSource("t", value=Order | None), Order | None),
        (KafkaSource("t", value=bytes), bytes),
        (KafkaSource("t", value=list[Order]), list[Order]),
        (KafkaSource("t", value=AvroCodec(Order)), Order),
        (KafkaSource.records("t", value=Order), Record[Order]),
        (KafkaSource.records("t", value=Order | None), Record[Order | None]),
    ],
)
def test_the_type_of_its_records(source: KafkaSource[Any], type_: Any) -> None:
    assert source.type == type_


def test_a_null_value_needs_a_type_that_admits_none() -> None:
    assert KafkaSource("t", value=Order | None).decode_value(None) is None
    assert KafkaSource("t", value=Order | None).decode_value(b'{"id":1}') == Order(1)
    source = KafkaSource("t", value=Order)
    with pytest.raises(TypeError) as raised:
        source.decode_value(None)
    assert source.value_problem(None, raised.value) == (
        "the value is null (a tombstone): declare value=Order | None if the topic has them"
    )


@pytest.mark.parametrize("value", [bytes, str, Order, AvroCodec(Order)], ids=["bytes", "str", "json", "avro"])
def test_no_codec_takes_null_for_a_value(value: Any) -> None:
    with pytest.raises((TypeError, AttributeError)):
        KafkaSource("t", value=value).decode_value(None)


def test_a_bad_value_is_told_with_its_field() -> None:
    source = KafkaSource("t", value=Order)
    with pytest.raises(ValueError, match="id") as raised:
        source.decode_value(b'{"id":"x"}')
    problem = source.value_problem(b'{"id":"x"}', raised.value)
    assert problem == "the value is not Order in json: Expected `int`, got `str` - at `$.id`"


def test_keys_decode_by_their_own_type() -> None:
    assert KafkaSource.records("t", value=Order).decode_key(b"7") == b"7"
    assert KafkaSource.records("t", value=Order, key=str).decode_key(b"7") == "7"
    assert KafkaSource.records("t", value=Order, key=int).decode_key(b"7") == 7
    assert KafkaSource.records("t", value=Order, key=int).decode_key(None) is None


def test_where_it_starts_is_not_what_it_is() -> None:
    late = KafkaSource("t", value=Order, start=datetime(2026, 1, 1, tzinfo=timezone.utc), on_error="skip")
    assert late.describe() == KafkaSource("t", value=Order).describe()
    assert late.describe()["value"]["codec"] == "json"
    assert late.describe() != KafkaSource.records("t", value=Order).describe()


# --- the contract of a source, on a real broker -----------------------------------------------------------------------


@pytest.mark.broker
class TestKafkaSource(SourceContract):
    finds_splits = False

    @pytest.fixture(autouse=True)
    def _topic(self, kafka: Any, topic_name: str) -> None:
        self.kafka, self.name = kafka, kafka.create_topic(topic_name, SPLITS)
        self.client = {"bootstrap.servers": kafka.bootstrap_servers}

    def source(self) -> Any:
        return KafkaSource(self.name, value=str)

    def append(self, split: int, records: Sequence[str]) -> None:
        self.kafka.produce(self.name, [text.encode() for text in records], partition=split)

    def identity(self, split: int) -> str:
        with closing(Topics(ClientConfig(self.client))) as topics:
            return topics.describe([self.name])[self.name].topic_id

    def clients(self) -> ReaderClients:
        return Clients(ClientConfig(self.client))

    def add_split(self) -> int:
        self.kafka.add_partitions(self.name, SPLITS + 1)
        return SPLITS

    def remove(self, split: int, before: int) -> None:
        self.kafka.delete_records(self.name, {split: before})

    def append_damaged(self, split: int) -> None:
        self.kafka.produce(self.name, [b"\xff"], partition=split)


def shortest_first(fetched: Mapping[int, int], expected: Collection[int], records_max: int) -> list[tuple[int, int]]:
    """A few records of each split, most of the last one."""
    runs: list[tuple[int, int]] = []
    for split, there in sorted(fetched.items(), key=itemgetter(1)):
        count = min(there, 2 + 3 * len(runs), records_max - sum(taken for _, taken in runs))
        runs += [(split, count)] if count else []
    return runs


@pytest.mark.broker
@only(
    "test_records_come_in_order", "test_runs", "test_a_batch_is_as_long_as_it_may_be", "test_positions_are_exact",
    "test_positions_stand_still", "test_every_position_can_be_gone_to", "test_targets", "test_lag", "test_quiet",
    "test_a_split_is_added", "test_a_position_that_was_removed",
)  # fmt: skip
class TestDivided(TestKafkaSource):
    """Batches are divided among partitions, of which records are fetched."""

    divide = staticmethod(shortest_first)


@pytest.mark.broker
@only(
    "test_records_come_in_order", "test_positions_are_exact", "test_nothing_is_remembered_elsewhere", "test_targets",
    "test_a_split_is_added", "test_a_position_that_was_removed", "test_ranges",
)  # fmt: skip
class TestPattern(TestKafkaSource):
    """Each split is the only partition of a topic."""

    @pytest.fixture(autouse=True)
    def _topic(self, kafka: Any, topic_name: str) -> None:
        self.kafka, self.name = kafka, topic_name
        for split in range(SPLITS):
            kafka.create_topic(self.topic(split))
        self.client = {"bootstrap.servers": kafka.bootstrap_servers}

    def topic(self, split: int) -> str:
        return f"{self.name}-{split}"

    def source(self) -> Any:
        return KafkaSource(pattern=rf"{self.name}-\d", value=str)

    def append(self, split: int, records: Sequence[str]) -> None:
        self.kafka.produce(self.topic(split), [text.encode() for text in records])

    def identity(self, split: int) -> str:
        with closing(Topics(ClientConfig(self.client))) as topics:
            topic = topics.describe([self.topic(split)])[self.topic(split)]
        return str(TopicSplit(topic.topic_id, 0, 0, topic.name))

    def add_split(self) -> int:
        self.kafka.create_topic(self.topic(SPLITS))
        return SPLITS

    def remove(self, split: int, before: int) -> None:
        self.kafka.delete_records(self.topic(split), {0: before})

    def append_damaged(self, split: int) -> None:
        self.kafka.produce(self.topic(split), [b"\xff"])

    def test_topics_that_are_found(self) -> None:
        """They get numbers above all others, in the order of their names, and begin at their earliest offset, which is
        in their identity. What is known stays."""
        self.append(1, ["a", "b", "c"])
        self.remove(1, before=2)
        with closing(Topics(ClientConfig(self.client))) as topics:
            found = self.source().finder("s", topics).find(())
            assert [position.partition for position in found] == list(range(SPLITS))
            assert [position.offset for position in found] == [0, 2, *[0] * (SPLITS - 2)]
            self.kafka.add_partitions(self.topic(0), 2)
            self.kafka.create_topic(self.topic(SPLITS))
            new = self.source().finder("s", topics).find(found[1:])
        at = [(start.partition, start.in_cluster.topic, start.in_cluster.partition) for start in new]
        assert at == [(SPLITS, self.topic(0), 0), (SPLITS + 1, self.topic(0), 1), (SPLITS + 2, self.topic(SPLITS), 0)]
        early = msgspec.structs.replace(found[1], offset=0)
        context = RangeContext(start=early, end=3, client=self.client, kilobytes=4_096)
        with closing(self.source().open_range(context)) as ranged:
            assert [record.part.value() for record in ranged.read(10)] == [b"c"], "a replay begins where it began, too"


class Clients:
    def __init__(self, config: ClientConfig) -> None:
        self._config = config

    def consumers(self, topic: str, client: ClientConfig | None = None) -> Consumers:
        return Consumers((client or self._config).confluent({"group.id": topic}), exact_consumer)

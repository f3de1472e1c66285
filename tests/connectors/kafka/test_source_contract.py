"""A topic as a source, on a real broker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from exactlyonce.connectors import KafkaSource
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.reader import Consumers, exact_consumer
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.connectors.source import ReaderClients
from exactlyonce.testing.source_contract import SourceContract
from exactlyonce.testing.source_contract.sources import SPLITS

pytestmark = pytest.mark.broker


class TestKafkaSource(SourceContract):
    @pytest.fixture(autouse=True)
    def _topic(self, kafka: Any, topic_name: str) -> None:
        self.kafka, self.name = kafka, kafka.create_topic(topic_name, SPLITS)
        self.client = {"bootstrap.servers": kafka.bootstrap_servers}

    def source(self) -> Any:
        return KafkaSource(self.name, value=str)

    def append(self, split: int, records: Sequence[str]) -> None:
        self.kafka.produce(self.name, [text.encode() for text in records], partition=split)

    def topic_id(self, split: int) -> str:
        topics = Topics(ClientConfig(self.client))
        try:
            return topics.describe([self.name])[self.name].topic_id
        finally:
            topics.close()

    def clients(self) -> ReaderClients:
        return Clients(ClientConfig(self.client))

    def add_split(self) -> int:
        self.kafka.add_partitions(self.name, SPLITS + 1)
        return SPLITS

    def remove(self, split: int, before: int) -> None:
        self.kafka.delete_records(self.name, {split: before})

    def append_damaged(self, split: int) -> None:
        self.kafka.produce(self.name, [b"\xff"], partition=split)


class Clients:
    def __init__(self, config: ClientConfig) -> None:
        self._config = config

    def consumers(self, topic: str, client: ClientConfig | None = None) -> Consumers:
        return Consumers((client or self._config).confluent({"group.id": topic}), exact_consumer)

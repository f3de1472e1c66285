"""The checkpoint topic as a block storage, on a real broker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from confluent_kafka import Producer
from contract_part import only

from exactlyonce.checkpoint.block_storage import BlockStorage
from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.checkpoint.requests import Outcome
from exactlyonce.connectors.kafka.checkpoint_topic.blocks import TopicStorage
from exactlyonce.testing.cluster import LIMIT_S
from exactlyonce.testing.storage_contract import BlockStorageContract
from tests.testing.conftest import Mutant


class TestTopicStorage(BlockStorageContract):
    beginning = (0,) * 5
    in_topic = True
    stays_connected = False
    # A topic is away where its broker is: tests/engines/test_broker_faults.py.
    test_a_storage_that_is_away_is_waited_for: Any = None
    test_who_waits_looks_meanwhile: Any = None
    test_reading_while_it_is_away: Any = None

    @pytest.fixture(autouse=True)
    def _topic(self, store: Any) -> None:
        self.store = store

    def storage(self) -> BlockStorage:
        keeps = self.stays_connected
        return TopicStorage(self.store.client, self.store.topic, stays_connected=keeps, keeps_producer=keeps)

    def decided(self, refs: Sequence[BlockRef]) -> None:
        assert self.store.living().appended(blocks_dropped=refs) is Outcome.DONE

    def laid(self, key: str, value: bytes) -> tuple[int, int]:
        lies: list[Any] = []
        producer = Producer(self.store.config)
        topic = self.store.topic.name
        producer.produce(
            topic, value, key, 2, on_delivery=lambda _, each: lies.append((each.partition(), each.offset()))
        )
        assert producer.flush(LIMIT_S) == 0
        partition, offset = lies[0]
        return partition, offset

    def lost(self, ref: BlockRef) -> BlockRef:
        return msgspec.structs.replace(ref, offset=ref.offset + 1_000_000)


@pytest.mark.exhaustive
@only(
    "test_what_is_put_can_be_had",
    "test_a_reader_goes_on",
    "test_a_key_is_put_once",
    "test_two_processes_of_one_attempt",
)
class TestTopicStorageThatStaysConnected(TestTopicStorage):
    stays_connected = True


SINCE = TopicStorage.since
MUTANTS = {
    "ends are not looked at": Mutant(
        TopicStorage, "since", lambda self, ends: SINCE(self, (0,) * 5), "orphans_are_listed", "is not asked for"),
    "ends say one too much": Mutant(
        TopicStorage, "since", lambda self, ends: SINCE(self, [each + 1 for each in ends]), "ends_only_grow",
        "nobody remembers it"),
}  # fmt: skip


@pytest.mark.parametrize("rule", MUTANTS)
def test_a_rule_that_is_left_out_is_missed(rule: str, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    contract = TestTopicStorage()
    contract.store, contract._to_close = store, []
    MUTANTS[rule].is_missed_by(contract, monkeypatch)

"""The checkpoint topic: made as it must be, or refused; and its blocks keep the contract of a block storage."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import msgspec
import pytest
from confluent_kafka import Producer
from contract_part import only

from exactlyonce.checkpoint.block_storage import BlockStorage
from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.checkpoint.requests import Outcome
from exactlyonce.connectors.kafka.checkpoint_topic import topic
from exactlyonce.connectors.kafka.checkpoint_topic.blocks import TopicStorage
from exactlyonce.connectors.kafka.checkpoint_topic.topic import NEEDS, find_topic, min_insync_needed, prepare_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.pipeline.errors import BrokerUnavailable, TopicError
from exactlyonce.testing.cluster import LIMIT_S
from exactlyonce.testing.storage_contract import BlockStorageContract
from tests.testing.conftest import Mutant

GOOD = {need.setting.replace(".", "_"): need.value for need in NEEDS}


def config(kafka: Any) -> ClientConfig:
    return ClientConfig({"bootstrap.servers": kafka.bootstrap_servers})


class TestTopic:
    def test_a_missing_topic_is_created_as_it_must_be(self, kafka: Any, topic_name: str) -> None:
        created = prepare_topic(config(kafka), topic_name, partitions=3)
        assert (created.name, created.partitions) == (f"{topic_name}.checkpoints", 3)
        with closing(Topics(config(kafka))) as topics:
            found = topics.settings(created.name)
        assert {need.setting: found[need.setting] for need in NEEDS} == {n.setting: n.value for n in NEEDS}
        assert prepare_topic(config(kafka), topic_name, partitions=7) == created
        assert find_topic(config(kafka), topic_name) == created

    def test_two_instances_that_start_at_once(self, kafka: Any, topic_name: str) -> None:
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(lambda _: prepare_topic(config(kafka), topic_name), range(2))
        assert first == second

    def test_a_setting_that_is_stale(self, kafka: Any, topic_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """A setting may be wrong right after an AlterConfigs, also another instance's; one that stays so is refused."""
        real, stale = Topics.settings, iter(range(2))

        def lagging(topics: Topics, name: str) -> dict[str, str | None]:
            found = real(topics, name)
            return found | {"min.insync.replicas": "2"} if next(stale, None) is not None else found

        created = prepare_topic(config(kafka), topic_name)
        monkeypatch.setattr(Topics, "settings", lagging)
        assert prepare_topic(config(kafka), topic_name) == created
        assert next(stale, None) is None
        stale = iter(range(1_000_000))
        monkeypatch.setattr(topic, "_SETTLING_S", 0.0)
        with pytest.raises(TopicError, match=r"min.insync.replicas is 2, must be <= 1"):
            prepare_topic(config(kafka), topic_name)

    @pytest.mark.parametrize("policy", ["delete", "compact,delete"])
    def test_a_topic_that_deletes_is_refused(self, kafka: Any, topic_name: str, policy: str) -> None:
        kafka.create_topic(f"{topic_name}.checkpoints", 5, **GOOD | {"cleanup_policy": policy})
        with pytest.raises(TopicError) as refused:
            prepare_topic(config(kafka), topic_name)
        assert f"cleanup.policy is {policy}, must be = compact" in str(refused.value)
        assert f"--entity-name {topic_name}.checkpoints --add-config cleanup.policy=compact" in str(refused.value)

    @pytest.mark.parametrize(
        ("setting", "value"),
        [
            ("segment_bytes", 1 << 30),
            ("segment_ms", 3_600_000),
            ("delete_retention_ms", 60_000),
            ("min_cleanable_dirty_ratio", 0.5),
            ("max_compaction_lag_ms", 1 << 60),
            ("max_message_bytes", 1_048_588),
            ("unclean_leader_election_enable", "true"),
        ],
    )
    def test_other_settings_that_are_not_safe(self, kafka: Any, topic_name: str, setting: str, value: object) -> None:
        kafka.create_topic(f"{topic_name}.checkpoints", 5, **GOOD | {setting: value})
        with pytest.raises(TopicError, match=rf"{setting.replace('_', '.')} is {value}, must be"):
            prepare_topic(config(kafka), topic_name)

    def test_a_topic_of_one_partition_is_refused(self, kafka: Any, topic_name: str) -> None:
        kafka.create_topic(f"{topic_name}.checkpoints", 1, **GOOD)
        with pytest.raises(TopicError, match="has 1 partition"):
            prepare_topic(config(kafka), topic_name)


class TestNoBroker:
    @pytest.mark.exhaustive  # eight seconds for what test_bad_input.py shows, but for the password
    def test_nobody_listens_and_no_secret_is_told(self) -> None:
        login = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.username": "me"}
        config = ClientConfig({"bootstrap.servers": "127.0.0.1:1", **login, "sasl.password": "canary-4711"})
        match = r"no broker answers at 127\.0\.0\.1:1 .*Connection refused"
        with pytest.raises(BrokerUnavailable, match=match) as error:
            prepare_topic(config, "p")
        assert "canary-4711" not in str(error.value) + repr(error.value)


def test_replicas_that_must_be_in_sync() -> None:
    """One of three replicas or more may be away, and no more: neither decisions nor progress are lost with a broker."""
    assert [min_insync_needed(replicas) for replicas in (1, 2, 3, 5)] == [1, 1, 2, 4]


# --- as a block storage, on a real broker -----------------------------------------------------------------------------


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

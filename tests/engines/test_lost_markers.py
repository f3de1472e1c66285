"""A broker that dies behind its answer to EndTxn may lose markers: what was decided becomes visible nevertheless."""

from __future__ import annotations

from typing import cast

import pytest
from blank_manifest import blank_committable
from confluent_kafka import Producer
from waiting import until

from exactlyonce.checkpoint.records.committable import Committable, Written
from exactlyonce.checkpoint.records.topic_info import TopicInfo
from exactlyonce.checkpoint.requests import drive
from exactlyonce.checkpoint.transactions.broker_answers import EndAnswer, TransactionState
from exactlyonce.checkpoint.transactions.commit import commit, resolve_unknown
from exactlyonce.checkpoint.transactions.markers import ending
from exactlyonce.connectors.kafka.checkpoint_topic.log_requests import LogRequests
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.log import Log
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.connections import Performer
from exactlyonce.testing.broker.interface import Error
from exactlyonce.testing.broker.real_broker import RealBroker
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster, OwnCluster

pytestmark = pytest.mark.slow

KILLS_MAX = 12
PARTITIONS = 8


class Stage:
    def __init__(self, cluster: KafkaCluster, topic: str) -> None:
        self.topic = cluster.create_topic(topic, PARTITIONS)
        self.config = ClientConfig({"bootstrap.servers": cluster.bootstrap_servers})
        self.transactions = Transactions(self.config)
        self.log = Log(self.config)
        self.writers: list[Producer] = []
        no_log = LogRequests(self.config, TopicInfo(topic, "", PARTITIONS, 1))
        self.performer = Performer(self.config, self.transactions, self.log, no_log, 60_000)

    def open(self, transactional_id: str) -> Committable:
        settings = {"transactional.id": transactional_id, "log_level": 0}
        producer = Producer(self.config.confluent(settings))
        self.writers.append(producer)
        producer.init_transactions(LIMIT_S)
        producer.begin_transaction()
        for partition in range(PARTITIONS):
            producer.produce(self.topic, transactional_id, partition=partition)
        assert producer.flush(LIMIT_S) == 0
        state = self.state(transactional_id)
        written = tuple(
            Written(each.topic, each.partition, cast(int, each.transaction_start_offset), each.last_sequence + 1)
            for each in self.transactions.producers(state.partitions)
            if each.producer_id == state.producer_id
        )
        return blank_committable(
            transactional_id=transactional_id, producer_id=state.producer_id, epoch=state.epoch, cluster_id="",
            checkpoint=1, written=written,
        )  # fmt: skip

    def state(self, transactional_id: str) -> TransactionState:
        state = self.transactions.describe([transactional_id])[transactional_id]
        assert state is not None
        return state

    def is_complete(self, committable: Committable) -> bool:
        return self.state(committable.transactional_id).state == "CompleteCommit"

    def hanging(self, committable: Committable) -> list[tuple[str, int]]:
        partitions = [(each.topic, each.partition) for each in committable.written]
        return [
            (each.topic, each.partition)
            for each in self.transactions.producers(partitions)
            if each.producer_id == committable.producer_id and each.transaction_start_offset is not None
        ]


@pytest.fixture
def stage(stoppable: OwnCluster, topic_name: str) -> Stage:
    return Stage(stoppable, topic_name)


def killed_behind_its_answer(cluster: OwnCluster, stage: Stage, transactional_id: str) -> tuple[Committable, bool]:
    """A committed transaction, and whether the broker, killed right behind its answer, has lost a marker of it."""
    committable = stage.open(transactional_id)
    assert stage.transactions.end_all([ending(committable)], commit=True) == [EndAnswer.COMPLETED]
    cluster.broker.kill()
    cluster.broker.start()
    until(lambda: stage.is_complete(committable))
    return committable, bool(stage.hanging(committable))


@pytest.mark.exhaustive
@pytest.mark.parametrize("broken_off", [False, True], ids=["at once", "broken off before"])
def test_a_commit_whose_markers_were_lost(broken_off: bool, stoppable: OwnCluster, stage: Stage) -> None:
    """Every time the commit that recovery asks for again makes all records visible and adds none."""
    cluster, committed = stoppable, list[str]()
    lost = False
    while not lost and len(committed) < KILLS_MAX:
        name = f"{stage.topic}-{len(committed)}"
        committable, lost = killed_behind_its_answer(cluster, stage, name)
        committed.append(name)
        if broken_off:
            first, now = committable.written[0], stage.state(name)
            added = RealBroker(cluster.bootstrap_servers).add_to_transaction(
                name, now.producer_id, now.epoch, first.topic, first.partition
            )
            assert added is Error.NONE
        commits = drive(commit([committable]), stage.performer)
        assert drive(resolve_unknown(commits), stage.performer).fates == {
            name: "proven" if lost or broken_off else "committed"
        }
        assert stage.hanging(committable) == []
        shown = sorted(record.value.decode() for record in cluster.read_committed(stage.topic) if record.value)
        assert shown == sorted(committed * PARTITIONS)

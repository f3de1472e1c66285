"""A broker that dies behind its answer to EndTxn may lose markers: what was decided becomes visible nevertheless."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from real_broker import RealBroker
from waiting import until

from exactlyonce.checkpoint.records.manifest import Committable, TopicInfo
from exactlyonce.checkpoint.requests import EndAnswer, drive
from exactlyonce.checkpoint.transactions.commit import commit, ending, resolve_unknown
from exactlyonce.connectors.kafka.checkpoint_topic.log_requests import LogRequests
from exactlyonce.connectors.kafka.log import Log
from exactlyonce.engines.connections import Performer
from exactlyonce.testing.broker.interface import Error
from exactlyonce.testing.cluster import KafkaCluster, OwnCluster
from tests.connectors.conftest import Cluster

pytestmark = pytest.mark.slow

KILLS_MAX = 12
PARTITIONS = 8


class Stage(Cluster):
    def __init__(self, cluster: KafkaCluster, topic: str) -> None:
        super().__init__(cluster.bootstrap_servers)
        self.topic = cluster.create_topic(topic, PARTITIONS)
        no_log = LogRequests(self.config, TopicInfo(topic, "", PARTITIONS, 1))
        self.performer = Performer(self.config, self.transactions, Log(self.config), no_log, 60_000)

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
def stage(stoppable: OwnCluster, topic_name: str) -> Iterator[Stage]:
    with closing(Stage(stoppable, topic_name)) as stage:
        yield stage


def killed_behind_its_answer(cluster: OwnCluster, stage: Stage, transactional_id: str) -> tuple[Committable, bool]:
    """A committed transaction, and whether the broker, killed right behind its answer, has lost a marker of it."""
    stage.open(transactional_id, stage.topic, [transactional_id.encode()] * PARTITIONS)
    committable = stage.committable(transactional_id)
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

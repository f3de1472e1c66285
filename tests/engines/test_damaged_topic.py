"""A damaged bit in the checkpoint topic costs an older checkpoint, or is a halt where the newest one needs it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from damaging import damage
from running import QUICK, assert_totals, orders
from unreferenced import unreferenced_blocks

from exactlyonce.checkpoint.records.encoding import Block
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import BlockRef, Manifest
from exactlyonce.checkpoint.store.blocks import BlockReader, BlockWriter, scan_blocks
from exactlyonce.checkpoint.store.log_reader import read_history
from exactlyonce.checkpoint.store.storage import DamagedBlock
from exactlyonce.checkpoint.store.topic import prepare_topic
from exactlyonce.pipeline.names import checkpoint_topic
from exactlyonce.testing.cluster import OwnCluster

pytestmark = [pytest.mark.broker, pytest.mark.slow]

HALT = 6


class Job:
    """The linear pipeline on a broker that may be stopped, run to the end of its input again and again."""

    def __init__(self, kafka: OwnCluster, name: str, run: Any) -> None:
        self.kafka, self.name, self._run = kafka, name, run
        self.fed: list[tuple[str, str]] = []
        kafka.create_topic(f"{name}-in", 3)

    def feed(self) -> None:
        """A hundred orders more."""
        more = orders(100, first=len(self.fed))
        self.kafka.produce(f"{self.name}-in", more)
        self.fed += more

    def run(self) -> Any:
        """One incarnation, which is over."""
        arguments = ("pipelines:linear", "--param", f"name={self.name}", "--until", "latest", "--inline", *QUICK)
        incarnation = self._run(*arguments, servers=self.kafka.bootstrap_servers)
        incarnation.wait()
        return incarnation

    @property
    def history(self) -> History:
        return read_history({"bootstrap.servers": self.kafka.bootstrap_servers}, self.name)

    def listed(self) -> dict[int, dict[str, Any]]:
        """What `exactlyonce checkpoints` says, by checkpoint."""
        command = [sys.executable, "-m", "exactlyonce.cli.main", "checkpoints", self.name, "--json"]
        servers = ["--bootstrap-servers", self.kafka.bootstrap_servers]
        said = subprocess.run([*command, *servers], capture_output=True, text=True, check=True).stdout
        return {each["checkpoint"]: each for each in json.loads(said)["checkpoints"]}

    def damage(self, partition: int, key: str, *, known_checksum: bool = False) -> None:
        """A bit of the value under *key*."""
        damage(self.kafka, checkpoint_topic(self.name), partition, key.encode(), known_checksum=known_checksum)


@pytest.fixture
def job(stoppable: OwnCluster, topic_name: str, run: Any) -> Job:
    """One that has completed three checkpoints and more."""
    made = Job(stoppable, topic_name, run)
    for _ in range(3):
        made.feed()
        assert made.run().process.returncode == 0
    assert len(made.history.retained) == 3
    return made


def index_of(manifest: Manifest) -> BlockRef:
    """The first index block of its only operator."""
    return manifest.operators[0].index[0][0]


@pytest.mark.exhaustive
def test_a_damaged_batch_among_others(stoppable: OwnCluster, topic_name: str) -> None:
    """Blocks before and behind a damaged batch of many are read and found; one of its own is named as damaged."""
    kafka = stoppable
    config = {"bootstrap.servers": kafka.bootstrap_servers}
    topic, refs = prepare_topic(config, topic_name, 2), []
    writer = BlockWriter.connected(config, topic, 1, 0)
    for part in range(3):
        blocks = [Block("totals", 1, "state", "none", "text", b"x" * 40) for _ in range(20)]
        tickets = [writer.write(block, group, part) for group, block in enumerate(blocks)]
        writer.wait(60.0)
        refs += [ticket.ref for ticket in tickets if ticket.ref is not None]
    lost = refs[30]
    damage(kafka, topic.name, 1, lost.key.encode(), known_checksum=False)
    found = scan_blocks(config, topic, (0, 0))
    first, last = map(int, found.unreadable[0].rpartition("offsets ")[2].split(" to "))
    whole = [ref for ref in refs if not first <= ref.offset <= last]
    assert first <= lost.offset <= last
    assert set(found.blocks) == set(whole)
    assert {ref for ref, _ in BlockReader(config, topic).fetch(whole)} == set(whole)
    with pytest.raises(DamagedBlock, match="CRC32C") as error:
        list(BlockReader(config, topic).fetch([*whole, lost]))
    assert error.value.ref == lost


@pytest.mark.exhaustive
@pytest.mark.parametrize("known_checksum", [False, True])
def test_blocks(known_checksum: bool, job: Job) -> None:
    """A damaged index of an older checkpoint is noted, and goes when that expires; of the newest one it is a halt."""
    older = job.history.retained[1]
    ref = index_of(older)
    job.damage(ref.partition, ref.key, known_checksum=known_checksum)
    assert [each["state"] for each in job.listed().values()] == ["finalized", "damaged", "finalized"]
    assert ref.key in job.listed()[older.checkpoint]["damage"]
    job.feed()
    incarnation = job.run()
    assert incarnation.process.returncode == 0, incarnation.said
    assert f"checkpoint {older.checkpoint} is damaged and can be restored from no more" in incarnation.said
    assert ref.key in incarnation.said
    while older.checkpoint in job.history.manifests:
        job.feed()
        assert job.run().process.returncode == 0
    assert unreferenced_blocks(job.kafka, job.name) <= ({ref.key} if not known_checksum else set())
    assert_totals(job.kafka, f"{job.name}-out", job.fed)
    newest = index_of(job.history.retained[-1])
    job.damage(newest.partition, newest.key, known_checksum=known_checksum)
    incarnation = job.run()
    assert incarnation.process.returncode == HALT, incarnation.said
    assert newest.key in incarnation.said
    assert "Choices:" in incarnation.said


@pytest.mark.exhaustive
def test_decisions(job: Job) -> None:
    """A damaged batch of decisions is noted where a newer manifest lies behind it; else it may hide one: a halt."""
    older, newest = job.history.retained[0], job.history.retained[-1]
    job.damage(0, f"manifest/{older.checkpoint}")
    job.feed()
    incarnation = job.run()
    assert incarnation.process.returncode == 0, incarnation.said
    assert "of the decision log" in incarnation.said
    assert_totals(job.kafka, f"{job.name}-out", job.fed)
    newest = job.history.retained[-1]
    job.damage(0, f"manifest/{newest.checkpoint}")
    incarnation = job.run()
    assert incarnation.process.returncode == HALT, incarnation.said
    assert "may be visible" in incarnation.said


@pytest.mark.exhaustive
@pytest.mark.parametrize("known_checksum", [False, True])
def test_a_damaged_decision_expires(known_checksum: bool, job: Job) -> None:
    """The checkpoint of a damaged older decision counts as retained until newer ones are, and then goes with its
    blocks."""
    older = job.history.retained[0].checkpoint
    job.damage(0, f"manifest/{older}", known_checksum=known_checksum)
    assert job.history.damaged_checkpoints() == [older]
    for _ in range(3):
        job.feed()
        incarnation = job.run()
        assert incarnation.process.returncode == 0, incarnation.said
    assert job.history.damaged_checkpoints() == []
    assert unreferenced_blocks(job.kafka, job.name) == set()
    assert_totals(job.kafka, f"{job.name}-out", job.fed)

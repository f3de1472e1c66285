"""A damaged bit in the checkpoint topic costs an older checkpoint, or is a halt where the newest one needs it."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from damaging import damage
from running import Job
from unreferenced import unreferenced_blocks

from exactlyonce.checkpoint.block_storage import DamagedBlock
from exactlyonce.checkpoint.records.encoding import Block
from exactlyonce.checkpoint.records.manifest import BlockRef, Manifest
from exactlyonce.connectors.kafka.checkpoint_topic.blocks import BlockReader, BlockWriter, scan_blocks
from exactlyonce.connectors.kafka.checkpoint_topic.topic import prepare_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.pipeline.names import checkpoint_topic
from exactlyonce.testing.cluster import OwnCluster

pytestmark = pytest.mark.slow

HALT = 6


def damage_in(job: Job, partition: int, key: str, *, known_checksum: bool = False) -> None:
    assert isinstance(job.kafka, OwnCluster)
    damage(job.kafka, checkpoint_topic(job.name), partition, key.encode(), known_checksum=known_checksum)


def goes_on(job: Job) -> str:
    job.feed(100)
    return job.finish_here()


@pytest.fixture
def job(stoppable: OwnCluster, job_of: Callable[..., Job]) -> Job:
    job = job_of("linear", cluster=stoppable)
    for _ in range(3):
        goes_on(job)
    assert len(job.history().retained) == 3
    return job


def index_of(manifest: Manifest) -> BlockRef:
    return manifest.operators[0].index[0][0]


@pytest.mark.exhaustive
def test_a_damaged_batch_among_others(stoppable: OwnCluster, topic_name: str) -> None:
    kafka = stoppable
    config = {"bootstrap.servers": kafka.bootstrap_servers}
    topic, refs = prepare_topic(ClientConfig(config), topic_name, 2), []
    writer = BlockWriter.connected(config, topic, 1, 0)
    for part in range(3):
        blocks = [Block("totals", 1, "state", "none", "text", b"x" * 40) for _ in range(20)]
        tickets = [writer.write(block, group, part) for group, block in enumerate(blocks)]
        writer.wait(60.0)
        refs += [ticket.ref for ticket in tickets if ticket.ref is not None]
    lost = refs[30]
    damage(kafka, topic.name, 1, lost.key.encode(), known_checksum=False)
    found = scan_blocks(ClientConfig(config), topic, (0, 0))
    first, last = map(int, found.unreadable[0].rpartition("offsets ")[2].split(" to "))
    whole = [ref for ref in refs if not first <= ref.offset <= last]
    assert first <= lost.offset <= last
    assert set(found.blocks) == set(whole)
    assert {ref for ref, _ in BlockReader(config, topic).fetch(whole)} == set(whole)
    with pytest.raises(DamagedBlock, match="CRC32C") as error:
        list(BlockReader(config, topic).fetch([*whole, lost]))
    assert error.value.ref == lost


@pytest.mark.exhaustive
def test_blocks(job: Job) -> None:
    """A damaged index of an older checkpoint expires with it; that of the newest is a halt."""
    older = job.history().retained[1]
    ref = index_of(older)
    damage_in(job, ref.partition, ref.key, known_checksum=True)
    listed = json.loads(job.command("checkpoints", job.name, "--json"))["checkpoints"]
    found = {each["checkpoint"]: each for each in listed}
    assert [each["state"] for each in found.values()] == ["finalized", "damaged", "finalized"]
    assert ref.key in found[older.checkpoint]["damage"]
    said = goes_on(job)
    assert f"checkpoint {older.checkpoint} is damaged and can no longer be restored" in said
    assert ref.key in said
    while older.checkpoint in job.history().manifests:
        goes_on(job)
    assert unreferenced_blocks(job.kafka, job.name) == set()
    job.assert_totals()
    newest = index_of(job.history().retained[-1])
    damage_in(job, newest.partition, newest.key, known_checksum=True)
    said = job.finish_here(code=HALT)
    assert newest.key in said
    assert "Choices:" in said


@pytest.mark.exhaustive
def test_decisions(job: Job) -> None:
    """A damaged batch is noted if a newer manifest lies after it; else it may hide one, which is a halt."""
    damage_in(job, 0, f"manifest/{job.history().retained[0].checkpoint}")
    assert "of the decision log" in goes_on(job)
    job.assert_totals()
    damage_in(job, 0, f"manifest/{job.history().retained[-1].checkpoint}")
    assert "may be visible" in job.finish_here(code=HALT)


@pytest.mark.exhaustive
def test_a_damaged_decision_expires(job: Job) -> None:
    older = job.history().retained[0].checkpoint
    damage_in(job, 0, f"manifest/{older}")
    assert job.history().damaged_checkpoints() == [older]
    for _ in range(3):
        goes_on(job)
    assert job.history().damaged_checkpoints() == []
    assert unreferenced_blocks(job.kafka, job.name) == set()
    job.assert_totals()

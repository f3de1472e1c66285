"""A subtask's snapshot and its dependencies; declined snapshots and unreadable state on a full disk."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from exactlyonce.checkpoint.events import Ack
from exactlyonce.checkpoint.records.manifest import TopicInfo
from exactlyonce.connectors.kafka.checkpoint_topic.blocks import BlockWriter
from exactlyonce.engines.local.channels import LocalChannel
from exactlyonce.engines.local.inputs import ChannelInput
from exactlyonce.engines.local.task import Snapshots, Subtask
from exactlyonce.engines.runtime.assembler import TaskOperators
from exactlyonce.engines.runtime.batch import BatchCodec
from exactlyonce.engines.runtime.cut import WorkerBlocks
from exactlyonce.engines.runtime.watermarks import Barrier
from exactlyonce.state.blocks import IMAGE, BlockEncoder, EncodedBlock, encode_keys
from exactlyonce.state.chain import Chain
from exactlyonce.state.errors import SnapshotDeclined
from exactlyonce.testing.sink_contract.hooks import MemoryBlocks


class LateBlocks(MemoryBlocks):
    """Tells of what was written only when it is polled, as a broker does."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[str] = []
        self._told: list[Any] = []

    def produce(self, topic: str, value: bytes, key: str, partition: int, on_delivery: Any) -> None:
        self.keys.append(key)
        self._told.append(lambda: super(LateBlocks, self).produce(topic, value, key, partition, on_delivery))

    def poll(self, timeout_s: float) -> None:
        while self._told:
            self._told.pop(0)()


@dataclass
class Stuck:
    """A table whose disk becomes full behind the second block of a snapshot, if it ever does."""

    operator: str
    full_then: bool
    full: str = ""
    checkpoint: int = 0
    chain: Chain = field(default_factory=Chain)

    def fetch(self) -> bool:
        return False

    def freeze(self, checkpoint: int, base: int, *, whole: bool) -> Stuck:
        self.checkpoint = checkpoint
        return self

    def encode(self) -> Iterator[EncodedBlock | None]:
        encoder = BlockEncoder(self.operator, self.checkpoint)
        for group in range(3):
            if group == 2 and self.full_then:
                raise SnapshotDeclined("The disk is full.")
            encoder.add(group, IMAGE, encode_keys([b"k"], []), b"\x91\x01", 1)
            yield encoder.flush()

    def seal(self, refs: Any) -> tuple[bytes, ...]:
        return (b"index",)


def subtask_of(tables: list[Any], writer: Any, acks: list[Ack], channel: LocalChannel) -> Subtask:
    """One that reads *channel*; its clock goes on whenever it is read."""
    operators, monotonic_s = TaskOperators("task", 0, tables=tables), itertools.count(0.0).__next__
    return Subtask(
        operators=operators,
        inputs=[ChannelInput("in", channel, BatchCodec(str), lambda _: None)], outputs=[], fed=[],
        snapshots=Snapshots(operators, WorkerBlocks(writer), lambda message: acks.append(message.ack), monotonic_s),
        monotonic_s=monotonic_s,
        processing_s=monotonic_s,
    )  # fmt: skip


def test_what_was_written_for_a_declined_snapshot_is_acknowledged() -> None:
    """Otherwise nobody would know of its blocks and drop them."""
    blocks, acks, channel = LateBlocks(), list[Ack](), LocalChannel()
    writer = BlockWriter(blocks, TopicInfo("p", "id", 5, 1), incarnation=1, attempt=0, nonce="n")
    tables = [Stuck("roomy", full_then=False), Stuck("stuck", full_then=True)]
    subtask = subtask_of(tables, writer, acks, channel)
    channel.send_signal(Barrier(1, 0))
    subtask.step()
    while not acks:
        subtask.advance(1.0)
        writer.poll()
    assert acks[0].declined == "The disk is full."
    assert len(blocks.keys) == 3 + 1 + 2, "of the first its blocks and its index, of the second what had room"
    assert {ref.key for ref in acks[0].written} == set(blocks.keys)
    assert [each.operator for each in acks[0].operators] == ["roomy"]

"""Records on their way in more blocks than a manifest names: lists of blocks, which it names instead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from blank_manifest import blank_manifest

from exactlyonce.checkpoint.block_storage import DamagedBlock
from exactlyonce.checkpoint.events import Ack, PendingCheckpoint
from exactlyonce.checkpoint.records import encoding
from exactlyonce.checkpoint.records.encoding import TooLarge, decode, encode
from exactlyonce.checkpoint.records.manifest import MANIFEST_SIZE_MAX, BlockRef, ChannelLog, Manifest
from exactlyonce.checkpoint.references import listed_by, named_by, references_of
from exactlyonce.connectors.blocks.storage import FileStorage
from exactlyonce.engines.blocks import references
from exactlyonce.engines.local.channels import LocalChannel
from exactlyonce.engines.local.inputs import ChannelInput
from exactlyonce.engines.local.loops import FeedbackInput, LoopChannel
from exactlyonce.engines.local.messages import Acknowledge
from exactlyonce.engines.local.task import Snapshots, Subtask
from exactlyonce.engines.runtime import in_flight
from exactlyonce.engines.runtime.assembler import TaskOperators
from exactlyonce.engines.runtime.batch import Batch
from exactlyonce.engines.runtime.batch_codec import BatchCodec, Coordinates
from exactlyonce.engines.runtime.blocks import WorkerBlocks
from exactlyonce.engines.runtime.signals import Barrier
from exactlyonce.pipeline.graph import Kind, Node

CODEC = BatchCodec(int)
RECORDS = 40
LOOP = ">back:0"


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PIECE_BYTES", 80), ("NAMED_MAX", 2), ("LISTED_MAX", 3)):
        monkeypatch.setattr(in_flight, name, value)


def acknowledged(storage: FileStorage, records: int) -> Ack:
    """An acknowledgement of a loop's head, round which so many records go that all rest."""
    messages: list[Acknowledge] = []
    blocks, new = storage.begin(1, 0), LocalChannel()
    loop = LoopChannel(Node("back", Kind.FEEDBACK, pause_ms=60_000), Node("end", Kind.MAP), lambda: 0.0)
    inputs = [ChannelInput("new:0", new, CODEC, cast(Any, None)), FeedbackInput(LOOP, loop, CODEC, cast(Any, None))]
    operators = TaskOperators("head", 0)
    snapshots = Snapshots(operators, WorkerBlocks(blocks), messages.append, lambda: 0.0)
    subtask = Subtask(
        operators=operators, inputs=[*inputs], outputs=[], fed=[loop], snapshots=snapshots, monotonic_s=lambda: 0.0
    )
    for number in range(records):
        loop.send(frame(number), 1)
    new.send_signal(Barrier(1, 0))
    assert subtask.step()
    while not messages:
        subtask.advance(1.0)
        blocks.poll(0.01)
    return messages[0].ack


def frame(number: int) -> bytes:
    return CODEC.encode(Batch([number], [Coordinates("in", 0, number)], None))


@pytest.mark.usefixtures("few")
def test_a_manifest_names_lists_where_there_are_many_blocks(storage: FileStorage) -> None:
    ack = acknowledged(storage, RECORDS)
    log = ack.channel_log
    assert log is not None
    assert (log.indexed, log.records) == (True, RECORDS)
    assert 1 < len(log.blocks) < len(ack.on_their_way) / 2
    frames = [*in_flight.frames_of(log, storage)]
    assert [CODEC.decode(each.frame).records for each in frames] == [[number] for number in range(RECORDS)]
    manifest = blank_manifest(channel_logs=(log,))
    assert decode(encode(manifest), Manifest) == manifest
    written = set(storage.since((0,)).blocks)
    assert set(ack.written) == written
    assert references(manifest, storage) == written
    plan = cast(PendingCheckpoint, SimpleNamespace(acks={("head", 0): ack}, staged=[]))
    assert set(references_of(plan, manifest)) == written
    assert {*listed_by(plan), *named_by(manifest)} == written


def test_a_manifest_names_few_blocks_itself(storage: FileStorage) -> None:
    ack = acknowledged(storage, RECORDS)
    log = ack.channel_log
    assert log is not None
    assert (log.indexed, len(log.blocks), ack.on_their_way, ack.written) == (False, 1, (), log.blocks)
    assert references(blank_manifest(channel_logs=(log,)), storage) == {*log.blocks}


@pytest.mark.usefixtures("few")
def test_a_list_that_is_gone_is_damage(storage: FileStorage) -> None:
    log = acknowledged(storage, RECORDS).channel_log
    assert log is not None
    storage.dropped(log.blocks[-1:])
    with pytest.raises(DamagedBlock, match="is gone"):
        references(blank_manifest(channel_logs=(log,)), storage)
    with pytest.raises(DamagedBlock, match="is gone"):
        [*in_flight.frames_of(log, storage)]


def test_a_manifest_has_room_for_whatever_is_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 subtasks have 32 GB each in blocks; named one by one, these blocks would be too many."""
    key = "block/12/1234567/an-operator-of-usual-length/63/1234567/12-abcdef012345"
    ref = BlockRef(4, 1 << 40, key, 1 << 20, bytes(32))
    lists = in_flight.lists_of([ref] * ((32 << 30) // in_flight.PIECE_BYTES))
    assert max(map(len, lists)) < 1 << 20, "a list is a block"
    log = ChannelLog("an-operator-of-usual-length", 63, 1 << 40, (ref,) * len(lists), indexed=True)
    manifest = blank_manifest(channel_logs=(log,) * 64)
    assert len(encode(manifest)) < MANIFEST_SIZE_MAX / 2
    named = msgspec.structs.replace(log, blocks=(ref,) * ((2 << 30) // in_flight.PIECE_BYTES))
    monkeypatch.setattr(encoding, "COLUMNS_SIZE_MAX", 100_000)
    with pytest.raises(TooLarge, match="is over the limit"):
        encode(blank_manifest(channel_logs=(named,)))

"""Records on their way at a snapshot are captured, whole and in order, and taken as before; blocks give them back."""

from __future__ import annotations

import socket
import zlib
from collections import deque
from typing import Any

import msgspec
import pytest
from blank_manifest import blank_manifest

from exactlyonce import Pipeline
from exactlyonce.checkpoint.records.encoding import Block
from exactlyonce.checkpoint.records.manifest import BlockRef, ChannelLog
from exactlyonce.connectors import KafkaSource
from exactlyonce.engines.local.channels import INBOX_BYTES_MAX, Channel, LocalChannel, SocketChannel
from exactlyonce.engines.local.inputs import ChannelInput, RestoredInput
from exactlyonce.engines.local.pace import HURRIED_SLICE_S, OVERTAKING, slice_pace
from exactlyonce.engines.runtime import in_flight
from exactlyonce.engines.runtime.assembler import RestoredEdge
from exactlyonce.engines.runtime.batch import Batch
from exactlyonce.engines.runtime.batch_codec import BatchCodec, Coordinates, records_in
from exactlyonce.engines.runtime.in_flight import InFlightFrame
from exactlyonce.engines.runtime.order_log import OrderRuns
from exactlyonce.engines.runtime.signals import Barrier
from exactlyonce.pipeline.errors import GraphError
from exactlyonce.pipeline.keys import canonical_key, key_groups
from exactlyonce.sinks import KafkaSink
from exactlyonce.state.errors import DamagedState
from exactlyonce.state.key_groups import group_range


class Number(msgspec.Struct):
    n: int


CODEC = BatchCodec(Number)


def frame(first: int, count: int) -> bytes:
    records = [Number(n) for n in range(first, first + count)]
    return CODEC.encode(Batch(records, [Coordinates("t", 0, 0)] * count, [canonical_key(each.n) for each in records]))


def numbers(frames: Any) -> list[int]:
    return [record.n for each in frames for record in CODEC.decode(each.frame).records]


def ends(local: bool) -> tuple[Channel, Channel]:
    if local:
        channel = LocalChannel()
        return channel, channel
    ours, theirs = socket.socketpair()
    for each in (ours, theirs):
        each.setblocking(False)
    return SocketChannel(ours), SocketChannel(theirs)


@pytest.mark.parametrize("local", [True, False], ids=["local", "socket"])
def test_a_capture_has_what_is_taken_later_and_was_sent_before_the_barrier(local: bool) -> None:
    writer, reader = ends(local)
    read = ChannelInput("edge:0", reader, CODEC, lambda _: None)

    def arrive() -> None:
        if isinstance(writer, SocketChannel) and isinstance(reader, SocketChannel):
            writer.flush()
            reader.fill()

    writer.send(frame(0, 4), 4)
    writer.send(frame(4, 10), 10)
    arrive()
    taken = [n for _ in range(2) for n in _records(read, 6)]
    assert taken == list(range(10))
    writer.send(frame(14, 2), 2)
    arrive()
    first = read.capture(7)
    second = read.capture(8)
    writer.send(frame(16, 1), 1)
    writer.send_signal(Barrier(7, 6))
    writer.send(frame(17, 1), 1)
    arrive()
    assert (first.whole, second.whole) == (True, False)
    assert numbers(first.frames()) == list(range(10, 17))
    writer.send_signal(Barrier(8, 6))
    writer.send(frame(18, 1), 1)
    arrive()
    assert second.whole
    assert numbers(second.frames()) == list(range(10, 18))
    later: list[Any] = []
    while (item := read.next(100)) is not None:
        assert isinstance(item, Barrier | Batch)
        later += [item.checkpoint * 100] if isinstance(item, Barrier) else [each.n for each in item.records]
    assert later == [*range(10, 17), 700, 17, 800, 18]


def _records(read: ChannelInput, room: int) -> list[int]:
    batch = read.next(room)
    assert isinstance(batch, Batch)
    read.processed()
    return [each.n for each in batch.records]


def test_a_reader_lets_come_what_there_is_until_the_barrier_and_no_more() -> None:
    writer, reader = ends(False)
    assert isinstance(writer, SocketChannel)
    assert isinstance(reader, SocketChannel)
    large = bytes(INBOX_BYTES_MAX // 2)
    for _ in range(6):
        writer.send(large, 1)
    writer.send_signal(Barrier(1, 0))
    for _ in range(6):
        writer.send(large, 1)
    for _ in range(200):
        writer.flush()
        reader.fill()
    assert not reader.hungry
    assert writer.unsent
    capture = reader.capture(1)
    for _ in range(200):
        writer.flush()
        reader.fill()
    assert capture.whole
    assert len(capture.frames) == 6
    assert writer.unsent, "what is behind the barrier is not let in"
    assert not reader.hungry
    got: list[Any] = []
    while writer.unsent or got[-1:] != [None]:
        writer.flush()
        reader.fill()
        got.append(reader.receive())
    assert [each for each in got if each is not None] == [large] * 6 + [Barrier(1, 0)] + [large] * 6


def test_what_is_restored_is_handed_out_frame_by_frame_and_what_is_left_can_be_captured() -> None:
    pushed: list[str] = []
    edges = {
        "a>b": RestoredEdge(CODEC, lambda _: pushed.append("b")),
        "a>c": RestoredEdge(CODEC, lambda _: pushed.append("c")),
    }
    restored = RestoredInput(deque([InFlightFrame("a>b:2", frame(0, 5)), InFlightFrame("a>c:0", frame(5, 2))]), edges)
    assert [each.n for each in restored.next(3).records] == [0, 1, 2]
    restored.note(order := OrderRuns())
    assert (restored.name, restored.over, order.runs) == ("a>b:2", False, [0, 3])
    assert [(each.channel, numbers([each])) for each in restored.left()] == [("a>b:2", [3, 4]), ("a>c:0", [5, 6])]
    restored.next(3)
    restored.push(Batch([], []))
    restored.next(3)
    restored.push(Batch([], []))
    assert (restored.over, restored.left(), pushed) == (True, [], ["b", "c"])


def test_slices_are_shorter_while_a_barrier_is_under_way() -> None:
    pace = slice_pace(bounds=OVERTAKING)
    for _ in range(12):
        pace.took(pace.size, pace.size * 0.001)
    assert pace.within(False) == pace.size == 20
    assert pace.within(True) == HURRIED_SLICE_S / 0.001
    pace.took(1, 3.0)
    assert pace.within(True) == 1


# --- blocks ---------------------------------------------------------------------------------------------------------


def test_a_log_is_cut_into_blocks_and_put_together_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "PIECE_BYTES", 300)
    frames = [InFlightFrame(f"a>b:{n % 3}", frame(n, count)) for n, count in enumerate((1, 200, 3, 40) * 40)]
    bodies = [body for body in in_flight.encode(frames) if body is not None]
    assert max(len(zlib.decompress(body)) for body in bodies) == 300
    assert [*in_flight.decode(bodies)] == frames
    assert sum(in_flight.records_by_channel(frames).values()) == 244 * 40
    for damaged in (bodies[:-1], [*bodies[:-1], b"no zlib"]):
        with pytest.raises(DamagedState, match="Records on their way cannot be read"):
            [*in_flight.decode(damaged)]


@pytest.mark.parametrize("count", [0, 1, 15, 16, 70_000])
def test_a_frame_tells_how_many_records_it_has(count: int) -> None:
    assert records_in(frame(0, count)) == count


class Kept:
    def __init__(self) -> None:
        self.found: dict[BlockRef, Block] = {}

    def log(self, task: str, subtask: int, frames: list[InFlightFrame]) -> ChannelLog:
        refs = []
        for body in in_flight.encode(frames):
            if body is not None:
                refs.append(BlockRef(1, len(self.found), "", len(body), b""))
                self.found[refs[-1]] = Block(task, 1, "in-flight", "zlib", "frames", body)
        return ChannelLog(task, subtask, sum(records_in(each.frame) for each in frames), tuple(refs))

    def fetch(self, refs: Any) -> Any:
        return [(ref, self.found[ref]) for ref in reversed([*refs])]


def _graph(name: str = "p") -> Any:
    pipeline = Pipeline(name, max_parallelism=8)

    def count(total: int | None, number: Number) -> tuple[int, Number]:
        return (total or 0) + 1, number

    (
        pipeline.source("in", KafkaSource("in", value=Number))
        .key_by(lambda number: number.n, id="one")
        .stateful_map("inner", count)
        .key_by(lambda number: number.n, id="two")
        .stateful_map("outer", count)
        .sink("out", KafkaSink("out"))
    )
    return pipeline.build()


@pytest.mark.parametrize(("before", "after"), [(3, 3), (3, 2), (2, 3), (3, 1), (1, 3)])
def test_every_record_on_its_way_is_restored_once_by_who_owns_its_key_in_its_order(before: int, after: int) -> None:
    """The parallelism may be any; records of the second of two shuffles go before those of the first."""
    graph, kept = _graph(), Kept()
    groups = dict(zip(range(300), key_groups([canonical_key(n) for n in range(300)], 8), strict=True))
    logs = []
    for subtask in range(before):
        mine = [n for n in range(300) if groups[n] in group_range(subtask, before, 8)]
        for task, edge in (("in", "one>inner"), ("inner", "two>outer")):
            keys, records = [canonical_key(n) for n in mine], [Number(n) for n in mine]
            sent = CODEC.encode(Batch(records, [Coordinates("t", 0, 0)] * len(mine), keys))
            frames = [InFlightFrame(f"{edge}:{sender}", sent) for sender in range(before)]
            logs.append(kept.log(task, subtask, frames))
    own: dict[str, Any] = {"fingerprint": graph.fingerprint(), "max_parallelism": 8}
    manifest = blank_manifest(**own, parallelism=before, channel_logs=tuple(logs))
    seen: list[tuple[str, int]] = []
    for subtask in range(after):
        found = in_flight.restored(manifest, graph, subtask, after, kept)
        assert [each.edge for each in found] == sorted((each.edge for each in found), reverse=True)
        assert {groups[n] for n in numbers(found)} <= {*group_range(subtask, after, 8)}
        for n in {*numbers(found)}:
            senders = [each.channel for each in found for record in CODEC.decode(each.frame).records if record.n == n]
            assert senders == [f"{edge}:{i}" for edge in ("two>outer", "one>inner") for i in range(before)]
        seen += [(each.channel, n) for each in found for n in numbers([each])]
    wanted = [(f"{edge}:{i}", n) for edge in ("one>inner", "two>outer") for i in range(before) for n in range(300)]
    assert sorted(seen) == sorted(wanted)


def test_another_graph_does_not_take_what_was_on_its_way_in_this_one() -> None:
    graph, kept = _graph(), Kept()
    logs = (kept.log("in", 0, [InFlightFrame("one>inner:0", frame(0, 1))]),)
    own: dict[str, Any] = {"fingerprint": graph.fingerprint(), "max_parallelism": 8}
    with pytest.raises(GraphError, match=r"is unaligned: .* --until latest"):
        in_flight.restored(blank_manifest(**own, channel_logs=logs), _graph("other"), 0, 1, kept)
    assert in_flight.restored(blank_manifest(**own), _graph("other"), 0, 1, kept) == []

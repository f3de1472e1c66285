"""Records on their way at a snapshot are captured, whole and in order, and taken as before; blocks give them back."""

from __future__ import annotations

import socket
import zlib
from typing import Any

import msgspec
import pytest
from blank_manifest import blank_manifest

from exactlyonce import Pipeline
from exactlyonce.checkpoint.records.encoding import Block
from exactlyonce.checkpoint.records.manifest import BlockRef, ChannelLog
from exactlyonce.connectors import KafkaSource
from exactlyonce.engines.local.channels import INBOX_BYTES_MAX, Channel, LocalChannel, SocketChannel
from exactlyonce.engines.runtime import in_flight
from exactlyonce.engines.runtime.batch import Batch, BatchCodec, Coordinates, records_in
from exactlyonce.engines.runtime.cut import InFlightCapture
from exactlyonce.engines.runtime.in_flight import InFlightFrame
from exactlyonce.engines.runtime.watermarks import Barrier
from exactlyonce.pipeline.errors import GraphError
from exactlyonce.pipeline.keys import canonical_key
from exactlyonce.sinks import KafkaSink
from exactlyonce.state.errors import DamagedState


class Number(msgspec.Struct):
    n: int


CODEC = BatchCodec(Number)


def frame(first: int, count: int) -> bytes:
    records = [Number(n) for n in range(first, first + count)]
    return CODEC.encode(Batch(records, [Coordinates("t", 0, 0)] * count, [canonical_key(each.n) for each in records]))


def ends(local: bool) -> tuple[Channel, Channel]:
    if local:
        channel = LocalChannel()
        return channel, channel
    ours, theirs = socket.socketpair()
    for each in (ours, theirs):
        each.setblocking(False)
    return SocketChannel(ours), SocketChannel(theirs)


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
    capture = InFlightCapture("channel", 1, [])
    reader.capture(capture)
    for _ in range(200):
        writer.flush()
        reader.fill()
    assert capture.whole
    assert len(capture.sent) == 6
    assert writer.unsent, "what is behind the barrier is not let in"
    assert not reader.hungry
    got: list[Any] = []
    while writer.unsent or got[-1:] != [None]:
        writer.flush()
        reader.fill()
        got.append(reader.receive())
    assert [each for each in got if each is not None] == [large] * 6 + [Barrier(1, 0)] + [large] * 6


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


def test_another_graph_does_not_take_what_was_on_its_way_in_this_one() -> None:
    graph, kept = _graph(), Kept()
    logs = (kept.log("in", 0, [InFlightFrame("one>inner:0", frame(0, 1))]),)
    own: dict[str, Any] = {"fingerprint": graph.fingerprint(), "max_parallelism": 8}
    with pytest.raises(GraphError, match=r"is unaligned: .* --until latest"):
        in_flight.restored(blank_manifest(**own, channel_logs=logs), _graph("other"), 0, 1, kept)
    assert in_flight.restored(blank_manifest(**own), _graph("other"), 0, 1, kept) == []

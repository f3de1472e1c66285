"""Records on their way, taken over by a pipeline that has changed since."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from blank_manifest import blank_manifest

from exactlyonce import Pipeline
from exactlyonce.checkpoint.records.encoding import Block
from exactlyonce.checkpoint.records.manifest import BlockRef, ChannelLog, RecordPlace
from exactlyonce.connectors import KafkaSource
from exactlyonce.engines.local import job
from exactlyonce.engines.plan import feedback_edges
from exactlyonce.engines.runtime import in_flight
from exactlyonce.engines.runtime.batch import Batch, BatchCodec, Coordinates
from exactlyonce.engines.runtime.cut import SubtaskBlocks, WorkerBlocks
from exactlyonce.engines.runtime.in_flight import InFlightFrame
from exactlyonce.engines.savepoints.contents import LoopEntry, require_same
from exactlyonce.pipeline.errors import GraphError, RecordError
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.records import apart, wire_schema
from exactlyonce.sinks import KafkaSink


class Order(msgspec.Struct):
    id: int
    total: int


class Renamed(msgspec.Struct):
    id: int
    amount: int = 0


def graph(type_: Any, source: str) -> LogicalGraph:
    pipeline = Pipeline("p")
    loop = pipeline.feedback("back", type_)
    first, *others = apart(type_).values() or [type_]
    orders = pipeline.source(source, KafkaSource("in", value=first)).union(loop)
    for each in others:
        orders = orders.union(pipeline.source(f"of-{each.__name__}", KafkaSource(each.__name__, value=each)))
    orders.filter(lambda order: bool(order.id)).feed(loop)
    orders.filter(lambda order: not order.id).map(str, output=str).sink("out", KafkaSink("out"))
    return pipeline.build()


class Log:
    """A checkpoint with an in-flight order, or *record*; it names the type of its records unless *older*."""

    def __init__(self, type_: Any = Order, record: Any = None, *, older: bool = False) -> None:
        before = graph(type_, "orders")
        (edge,) = feedback_edges(before)
        frame = BatchCodec(type_).encode(Batch([record or Order(1, 500)], [Coordinates("in", 0, 7)], None))
        self.said = in_flight.FRAMES if older else in_flight.record_schemas({"back": wire_schema(type_)})
        self.bodies = [body for body in in_flight.encode([InFlightFrame(f"{edge.name}:0", frame)]) if body]
        refs = [BlockRef(1, n, f"k{n}", len(each), hashlib.sha256(each).digest()) for n, each in enumerate(self.bodies)]
        logs = (ChannelLog("task", 0, 1, tuple(refs)),)
        own: dict[str, Any] = {"fingerprint": before.fingerprint(), "max_parallelism": before.max_parallelism}
        self.manifest = blank_manifest(channel_logs=logs, **own)

    def fetch(self, refs: Iterable[BlockRef]) -> Iterator[tuple[BlockRef, Block]]:
        return ((ref, Block("task", 3, "in-flight", "zlib", self.said, self.bodies[ref.offset])) for ref in refs)

    def restored(self, graph: LogicalGraph) -> list[InFlightFrame]:
        return in_flight.restored(self.manifest, graph, 0, 1, self)


def test_a_changed_pipeline_goes_on_with_what_went_round_a_loop() -> None:
    log = Log()
    (frame,) = log.restored(graph(Order, "renamed"))
    assert BatchCodec(Order).decode(frame.frame).records == [Order(1, 500)]
    (one,) = log.manifest.channel_logs
    log.manifest = msgspec.structs.replace(
        log.manifest, parallelism=4, channel_logs=(msgspec.structs.replace(one, subtask=3),)
    )
    counts = [len(in_flight.restored(log.manifest, graph(Order, "renamed"), subtask, 2, log)) for subtask in (0, 1)]
    assert counts == [0, 1], "one subtask takes them, though there are fewer now"


def test_what_stems_from_a_skipped_record_is_not_restored() -> None:
    log = Log()
    for offset, left in ((7, 0), (6, 1)):
        skips = (RecordPlace("in", 0, offset), RecordPlace("in", 1, 7), RecordPlace("other", 0, 7))
        assert len(in_flight.restored(log.manifest, graph(Order, "orders"), 0, 1, log, skips)) == left
    codec, places = BatchCodec(int), [Coordinates("in", 0, offset) for offset in (3, 4, 4, 5)]
    for keys, kept in ((None, None), ([b"a", b"b", b"c", b"d"], [b"a", b"d"])):
        frame = codec.without(codec.encode(Batch([1, 2, 3, 4], places, keys)), [RecordPlace("in", 0, 4)])
        assert frame is not None
        batch = codec.decode(frame)
        assert (batch.records, batch.keys, list(batch.origins)) == ([1, 4], kept, [places[0], places[3]])


@pytest.mark.parametrize("older", [False, True])
def test_a_loop_of_another_type(older: bool) -> None:
    with pytest.raises(GraphError, match=r"round loop 'back', written as another type .* Give the loop its old type"):
        Log(older=older).restored(graph(Renamed, "orders"))


class Grown(msgspec.Struct):
    id: int
    total: int
    note: str = ""


def test_a_loop_whose_type_has_grown() -> None:
    (frame,) = Log().restored(graph(Grown, "orders"))
    assert BatchCodec(Grown).decode(frame.frame).records == [Grown(1, 500)]
    with pytest.raises(GraphError, match="they would not be what they were"):
        Log(older=True).restored(graph(Grown, "orders"))


class Refund(msgspec.Struct):
    id: int


class Credit(msgspec.Struct):
    id: int


def test_a_loop_of_classes_without_tags() -> None:
    """Classes may be added; one whose records go round may not go."""
    log = Log(Order | Refund, Refund(7))
    (frame,) = log.restored(graph(Order | Refund | Credit, "orders"))
    assert BatchCodec(Order | Refund | Credit).decode(frame.frame).records == [Refund(7)]
    (frame,) = log.restored(graph(Refund | Credit, "orders"))
    assert BatchCodec(Refund | Credit).decode(frame.frame).records == [Refund(7)]
    for type_ in (Order | Credit, Order, Refund):
        with pytest.raises(GraphError, match=r"round loop 'back', written as another type"):
            log.restored(graph(type_, "orders"))
    entry = LoopEntry(0, msgspec.msgpack.encode(["Refund", {"id": 7}]), "in", 0, 7)
    written = wire_schema(Order | Refund)
    require_same("back", Order | Refund | Credit, [entry], "savepoint", written)
    with pytest.raises(GraphError, match=r"written as another type than Order . Credit"):
        require_same("back", Order | Credit, [entry], "savepoint", written)


def test_a_record_of_no_class_of_a_union_is_an_error_of_it() -> None:
    with pytest.raises(RecordError, match=r"not a valid Order . Refund: a Credit is none .* in\[0\] offset 8"):
        BatchCodec(Order | Refund).encode(Batch([Order(1, 2), Credit(3)], [Coordinates("in", 0, n) for n in (7, 8)]))


class Array(msgspec.Struct, array_like=True):
    customer: int
    retries: int


class ArraySwapped(msgspec.Struct, array_like=True):
    retries: int
    customer: int


def test_a_loop_of_a_type_with_the_same_bytes() -> None:
    """Records that would be something else by the same bytes; tests of state have all kinds of such types."""
    record, why = Array(7, 1), r"ArraySwapped \(its fields are stored by position\)"
    with pytest.raises(GraphError, match=rf"loop 'back', written as another type .*: {why} would be lost\. Give"):
        Log(Array, record).restored(graph(ArraySwapped, "orders"))
    entries = [LoopEntry(0, msgspec.msgpack.encode(record), "in", 0, 7)]
    with pytest.raises(GraphError, match=rf"loop 'back', written as another type than ArraySwapped, .*: {why}"):
        require_same("back", ArraySwapped, entries, "savepoint", wire_schema(Array))
    require_same("back", Array, entries, "savepoint", wire_schema(Array))


def test_a_loop_that_is_gone() -> None:
    """Its records are never left behind, even by a subtask without key groups."""
    log = Log()
    (one,) = log.manifest.channel_logs
    log.manifest = msgspec.structs.replace(
        log.manifest, parallelism=2, max_parallelism=1, channel_logs=(msgspec.structs.replace(one, subtask=1),)
    )
    pipeline = Pipeline("p", max_parallelism=1)
    pipeline.source("orders", KafkaSource("in", value=Order)).sink("out", KafkaSink("out"))
    without = pipeline.build()
    assert in_flight.restored(log.manifest, without, 0, 2, log) == []
    with pytest.raises(GraphError, match="records that went round loop 'back', which the pipeline has no longer"):
        in_flight.restored(log.manifest, without, 1, 2, log)


def test_blocks_say_the_schemas_of_loops() -> None:
    log, said = Log(), list[str]()
    attempt = SimpleNamespace(write=lambda block, *_: said.append(block.schema), pending=0)
    blocks = SubtaskBlocks(WorkerBlocks(cast(Any, attempt), {"back": wire_schema(Order)}), 4, "task", 0)
    next(blocks.in_flight([in_flight.InFlightFrame(">back:0", b"frame")]))
    assert said == [log.said] == [in_flight.record_schemas({"back": wire_schema(Order)})]


@pytest.mark.parametrize(("rounds", "said"), [(True, "1 records went round loops"), (False, "between operators")])
def test_what_is_said_where_a_stop_comes_before_the_end(rounds: bool, said: str) -> None:
    """An older checkpoint may have overtaken records: without a loop, none is named."""
    assert said in job._stopped_in_flight(Log().manifest, loops=rounds)

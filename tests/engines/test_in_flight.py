"""Records on their way, taken over by a pipeline that has changed since."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from exactlyonce import Pipeline
from exactlyonce.checkpoint.records.encoding import Block
from exactlyonce.checkpoint.records.manifest import BlockRef, ChannelLog, Manifest
from exactlyonce.connectors import KafkaSource
from exactlyonce.engines import in_flight
from exactlyonce.engines.activity import Activity
from exactlyonce.engines.batch_codec import BatchCodec, Coordinates
from exactlyonce.engines.in_flight import InFlightFrame
from exactlyonce.engines.local import building, job, loops
from exactlyonce.engines.operators import Batch
from exactlyonce.engines.plan import feedback_edges, plan
from exactlyonce.pipeline.errors import GraphError
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.sinks import KafkaSink


class Order(msgspec.Struct):
    """What went round."""

    id: int
    total: int


class Renamed(msgspec.Struct):
    """As which it could be read, without its total."""

    id: int
    amount: int = 0


def graph(type_: Any, source: str) -> LogicalGraph:
    """A loop of *type_*."""
    pipeline = Pipeline("p")
    loop = pipeline.feedback("back", type_)
    orders = pipeline.source(source, KafkaSource("in", value=type_)).union(loop)
    orders.filter(lambda order: bool(order.id)).feed(loop)
    orders.filter(lambda order: not order.id).sink("out", KafkaSink("out"))
    return pipeline.build()


class Log:
    """A checkpoint of `graph(Order, "orders")`, with an order on its way."""

    def __init__(self) -> None:
        before = graph(Order, "orders")
        (edge,) = feedback_edges(before)
        frame = BatchCodec(Order).encode(Batch([Order(1, 500)], [Coordinates("in", 0, 7)], None))
        self.bodies = [body for body in in_flight.encode([InFlightFrame(f"{edge.name}:0", frame)]) if body]
        refs = [BlockRef(1, n, f"k{n}", len(each), hashlib.sha256(each).digest()) for n, each in enumerate(self.bodies)]
        self.manifest = Manifest(
            pipeline="p", checkpoint=3, incarnation=1, attempt=0, kind="checkpoint", base=2, previous=2,
            triggered_at_ms=0, completed_at_ms=0, fingerprint=before.fingerprint(),
            max_parallelism=before.max_parallelism, parallelism=1, block_partitions=2, block_end_offsets=(),
            written_bytes=0, offsets=(), operators=(), order_logs=(), committables=(), sinks=(),
            channel_logs=(ChannelLog("task", 0, 1, tuple(refs)),),
        )  # fmt: skip

    def fetch(self, refs: Iterable[BlockRef]) -> Iterator[tuple[BlockRef, Block]]:
        return ((ref, Block("task", 3, "in-flight", "zlib", "frames", self.bodies[ref.offset])) for ref in refs)

    def restored(self, graph: LogicalGraph) -> list[InFlightFrame]:
        return in_flight.restored(self.manifest, graph, 0, 1, self)


def test_a_changed_pipeline_goes_on_with_what_went_round_a_loop() -> None:
    """Its id and its type are the same."""
    log = Log()
    (frame,) = log.restored(graph(Order, "renamed"))
    assert BatchCodec(Order).decode(frame.frame).records == [Order(1, 500)]


def test_a_loop_of_another_type() -> None:
    """Records that can be read as it, but not without loss, are refused, with what to do."""
    with pytest.raises(GraphError, match=r"round loop 'back', written as another type .* Give the loop its old type"):
        Log().restored(graph(Renamed, "orders"))


def test_a_loop_that_is_gone() -> None:
    """Its records are not left behind, also where the subtask that had them has no key groups."""
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


def test_a_loop_has_room_beside_what_its_subtask_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes first feeds it, before anything that it is fed is taken: with fewer subtasks than before as much as
    several of them had."""
    monkeypatch.setattr(loops, "LOOP_RECORDS_MAX", 0)
    monkeypatch.setattr(loops, "ROUND_RECORDS_MAX", 0)
    monkeypatch.setattr(building, "state_backend", lambda *_: None)
    log, nobody = Log(), cast(Any, None)
    start = SimpleNamespace(subtask=0, attempt=0, unaligned=False, state=None, parallelism=1, manifest=log.manifest)
    clients = SimpleNamespace(block_reader=lambda: log)
    built = building.Built(nobody, Activity(), backend=nobody)
    builder = building._Builder(cast(Any, start), nobody, plan(graph(Order, "orders"), 1), cast(Any, clients), built)
    (loop,) = builder.loops.values()
    loop.send(b"", 1)
    with pytest.raises(GraphError, match="feeds more and more"):
        loop.send(b"", 1)


@pytest.mark.parametrize(("rounds", "said"), [(True, "1 records went round loops"), (False, "between operators")])
def test_what_is_said_where_a_stop_comes_before_the_end(rounds: bool, said: str) -> None:
    """Its checkpoint may be an older one, whose barriers had overtaken records: where there is no loop, none is
    named."""
    assert said in job._stopped_on_the_way(Log().manifest, loops=rounds)

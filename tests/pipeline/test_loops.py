"""Loops while a pipeline is written: what is built, what is refused, and how it is split into tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from exactlyonce import Emit, Output, Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.engines.plan import plan
from exactlyonce.errors import GraphError
from exactlyonce.sinks import KafkaSink


class Order(msgspec.Struct):
    id: int


class Refund(msgspec.Struct):
    id: int


again = Output("again", Order)


def attempt(order: Order, emit: Emit[Order]) -> None:
    emit(order)


def count(total: int | None, order: Order) -> tuple[int, Order]:
    return (total or 0) + 1, order


def written(name: str = "retrying", pause: str = "500ms") -> Pipeline:
    pipeline = Pipeline(name)
    loop = pipeline.feedback("retry", Order, pause=pause)
    tried = pipeline.source("in", KafkaSource("in", value=Order)).union(loop).split(attempt, id="try", outputs=[again])
    tried.side(again).feed(loop)
    tried.sink("out", KafkaSink("out"))
    return pipeline


def test_a_loop_is_a_node_that_is_fed_from_behind() -> None:
    graph = written().build()
    assert "  retry           feedback          <~ try.again  after 500 ms  : Order" in graph.explain().splitlines()
    assert [node.id for node in graph.loops] == ["retry"]
    assert graph.above("out") == {"in", "retry", "union-after-in", "try"}


def test_the_fingerprint_tells_loops_but_not_their_pauses() -> None:
    assert written(pause="1s").build().fingerprint() == written().build().fingerprint()
    other = Pipeline("retrying")
    orders = other.source("in", KafkaSource("in", value=Order)).split(attempt, id="try", outputs=[again])
    orders.side(again).union(orders, id="union-after-in").sink("out", KafkaSink("out"))
    assert other.build().fingerprint() != written().build().fingerprint()


@pytest.mark.parametrize("parallelism", [1, 3])
def test_a_back_edge_is_a_channel_at_any_parallelism(parallelism: int) -> None:
    physical = plan(written().build(), parallelism)
    assert physical.channels() == [(">retry", i, i) for i in range(parallelism)]
    assert [task.name for task in physical.tasks] == ["retry"]
    assert physical.shuffles == ()


Written = Callable[[Any, Any, Any], object]
WRONG: dict[str, Written] = {
    "loop 'loop' has no input": lambda p, s, f: s.union(f).sink("x", KafkaSink("x")),
    "no record ever enters loop 'loop'": lambda p, s, f: f.filter(lambda o: o.id > 0).feed(f),
    "no record ever leaves loop 'loop'": lambda p, s, f: s.union(f).map(lambda o: o, output=Order).feed(f),
    "that is no cycle": lambda p, s, f: (f.sink("x", KafkaSink("x")), s.feed(f)),
    "already has an input": lambda p, s, f: [s.union(f).filter(lambda o: o.id > 0).feed(f) for _ in range(2)],
    "gets records of type Refund, but is declared with Order": lambda p, s, f: (
        s.union(f).filter(lambda o: o.id > 0).map(lambda o: Refund(o.id), output=Refund).feed(f)
    ),
    "this is another stream": lambda p, s, f: s.union(f).feed(s),
    "records also come from a loop": lambda p, s, f: (
        s.union(f).key_by(lambda o: o.id, partitioned=True).stateful_map("c", count).filter(lambda o: o.id > 0).feed(f)
    ),
    "the type of the records of loop 'other' is unknown": lambda p, s, f: p.feedback("other", object),
    "pause is 'soon'": lambda p, s, f: p.feedback("other", Order, pause="soon"),
    "the records of 'loop' are not used: add a stream's .union": lambda p, s, f: s.feed(f),
}


@pytest.mark.parametrize("said", WRONG)
def test_a_wrong_loop_is_refused_where_it_is_written(said: str) -> None:
    pipeline = Pipeline("wrong")
    loop = pipeline.feedback("loop", Order)
    source = pipeline.source("in", KafkaSource("in", value=Order))
    source.sink("out", KafkaSink("out"))
    WRONG[said](pipeline, source, loop)
    with pytest.raises(GraphError, match=said) as refused:
        pipeline.build()
    assert f"{__file__.rpartition('/')[2]}:" in str(refused.value)


def test_a_loop_that_meets_no_stream_before_a_shuffle_is_refused() -> None:
    """Above parallelism 1 no barrier would come to its task."""
    pipeline = Pipeline("alone")
    loop = pipeline.feedback("loop", Order)
    counted = loop.key_by(lambda order: order.id).stateful_map("count", count)
    both = counted.union(pipeline.source("in", KafkaSource("in", value=Order)))
    both.filter(lambda order: order.id > 0).feed(loop)
    both.sink("out", KafkaSink("out"))
    graph = pipeline.build()
    assert len(plan(graph, 1).tasks) == 1
    with pytest.raises(GraphError, match="no barrier would come to it"):
        plan(graph, 2)

"""Wrong pipelines: all mistakes are named at once, each with its line and how to fix it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import msgspec
import pytest

from exactlyonce import AvroCodec, Operator, Output, Pipeline, Stream
from exactlyonce.connectors import FileSource, GeneratorSource, KafkaSource
from exactlyonce.errors import GraphError
from exactlyonce.sinks import KafkaSink, PrintSink


class Order(msgspec.Struct):
    id: int
    customer: str


class Refund(msgspec.Struct):
    id: int


class Unwritable:
    pass


def unwritable(order: Order) -> Unwritable:
    return Unwritable()


def refund(order: Order) -> Refund:
    return Refund(order.id)


def no_none(state: int, order: Order) -> tuple[int, int]:
    return state, 1


def two_types(state: int | None, order: Order) -> tuple[str, int]:
    return "", 1


def unwritable_state(state: Unwritable | None, order: Order) -> tuple[Unwritable, int]:
    return Unwritable(), 1


def yields(order: Order) -> Iterator[int]:
    yield 1


def yields_state(state: int | None, order: Order) -> Iterator[tuple[int, int]]:
    yield 1, 1


async def waits(order: Order) -> int:
    return 1


class Resource(Operator):
    def __call__(self, order: Order) -> int:
        return 1


def first(state: Any, order: Order) -> Any:
    return state, order


late = Output("late", Order)
undeclared = Output("undeclared", Order)
out: Any = PrintSink()
other: Any = Pipeline("q").source("orders", KafkaSource("orders", value=Order))

Write = Callable[[Any, Any], object]
"""A function that writes a test's steps: of a pipeline, and its stream of orders."""

MISTAKES: dict[str, Write] = {
    "has no sink: end with .sink": lambda p, s: s.peek(),
    "records of 'orders' are not used: add .sink": lambda p, s: None,
    "records of 'map-after-orders' are not used": lambda p, s: (s.map(len), s.sink("out", out)),
    "records of 'key_by-after-orders' are not used: add an operator with state": lambda p, s: s.key_by(len),
    "table 'side' is not used: add .as_of": lambda p, s: (
        s.sink("out", out),
        p.table("side", KafkaSource.records("side", key=str, value=Order)),
    ),
    r"id 'out' of this sink is that of the sink at .*test_validation.py:\d+, .*: 'out-out' is free": lambda p, s: (
        s.sink("out", out),
        s.sink("out", out),
    ),
    "id 't' of this sink is that of the reduce at .*: 't-out-2' is free": lambda p, s: (
        s.map(len, id="t-out").key_by(abs).reduce("t", max).sink("t", out)
    ),
    "id 'orders' of this map is that of the source at .*: 'orders-map' is free": lambda p, s: s.map(len, id="orders"),
    "id 'a b' must be made of letters": lambda p, s: s.sink("a b", out),
    r"id 'x+' is longer than 100": lambda p, s: s.sink("x" * 101, out),
    "expected a sink, as KafkaSink": lambda p, s: s.sink("out", KafkaSink),
    "expected a source, as KafkaSource": lambda p, s: p.source("b", KafkaSource),
    "'b' already reads 'file:/in', and a record is named by that": lambda p, s: (
        p.source("b", FileSource("/in", value=Order, files="a*")),
        p.source("c", FileSource("/in", value=Order, files="b*")),
    ),
    "'orders' already reads topic 'orders'": lambda p, s: p.source("b", KafkaSource("orders", value=Order)),
    "topic 'p.checkpoints' holds the checkpoints": lambda p, s: s.sink("out", KafkaSink("p.checkpoints")),
    "topic 'a b' must be 1 to 249 letters": lambda p, s: s.sink("out", KafkaSink("a b")),
    "topic 'ä' must be": lambda p, s: p.source("b", KafkaSource("ä", value=Order)),
    "start='latets' must be": lambda p, s: p.source("b", KafkaSource("b", value=Order, start="latets")),  # type: ignore[call-overload]  # it is wrong on purpose
    "has no time zone": lambda p, s: p.source("b", KafkaSource("b", value=Order, start=datetime(2026, 1, 1))),
    "must map partitions to offsets": lambda p, s: p.source("b", KafkaSource("b", value=Order, start={0: -1})),
    "start_group='' must be the name of": lambda p, s: p.source("b", KafkaSource("b", value=Order, start_group="")),
    "start_group='p' is the pipeline's own name": lambda p, s: p.source(
        "b", KafkaSource("b", value=Order, start_group="p")
    ),
    "on_error='ignore' must be": lambda p, s: p.source("b", KafkaSource("b", value=Order, on_error="ignore")),  # type: ignore[call-overload]  # it is wrong on purpose
    "key='id' must be a function": lambda p, s: s.sink("out", KafkaSink("out", key="id")),  # type: ignore[arg-type]  # it is wrong on purpose
    "partition=2 must be a function": lambda p, s: s.sink("out", KafkaSink("out", partition=2)),  # type: ignore[arg-type]  # it is wrong on purpose
    "create_partitions=0 must be": lambda p, s: s.sink("out", KafkaSink("out", create_partitions=0)),
    "value= encodes Refund, and the stream is of Order": lambda p, s: s.sink(
        "out", KafkaSink("out", value=AvroCodec(Refund))
    ),
    "expected a function of .record., got 5": lambda p, s: s.map(5),
    "waits is async": lambda p, s: s.map(waits),
    "yields is a generator, which this operator cannot take: use flat_map": lambda p, s: s.map(yields),
    "yields is a generator, which this operator cannot take: return a value": lambda p, s: s.filter(yields),
    "use stateful_flat_map": lambda p, s: s.key_by(len).stateful_map("t", yields_state),
    r"return \(state, outputs\)": lambda p, s: s.key_by(len).stateful_flat_map("t", yields_state),
    "pass the class, Resource": lambda p, s: s.map(Resource()),
    r"must take \(state, record\)": lambda p, s: s.key_by(len).stateful_map("t", len),
    "the type of the records is unknown, and the sink encodes them by it. They come from 'map-after-orders' "
    r"\(.*:\d+\): annotate what its function returns, or give output=": lambda p, s: (
        s.map(lambda order: order.id).filter(bool).sink("out", KafkaSink("out"))
    ),
    "may be sent to another process. They come from 'map-after-orders'": lambda p, s: (
        s.map(lambda order: order.id).union(s).key_by(len).reduce("t", max).sink("out", out)
    ),
    "They come from 'route' .*: annotate emit: Emit": lambda p, s: s.split(lambda order, emit: None, id="route").sink(
        "out", KafkaSink("out")
    ),
    "records may be sent to another process, and Unwritable cannot be encoded": lambda p, s: (
        s.map(unwritable).key_by(len).reduce("t", max).sink("out", out)
    ),
    "Unwritable cannot be encoded": lambda p, s: s.map(unwritable).sink("out", KafkaSink("out")),
    "the key must be encoded, and Unwritable": lambda p, s: s.key_by(unwritable).reduce("t", max).sink("out", out),
    "all Struct types must be tagged": lambda p, s: s.union(s.map(refund)).sink("out", KafkaSink("out")),
    "the type of the state is unknown: annotate it": lambda p, s: s.key_by(len).stateful_map("t", first),
    "the state cannot be kept in a checkpoint: Unwritable": lambda p, s: s.key_by(len).stateful_map(
        "t", unwritable_state
    ),
    "state= is a codec, 'avro', and a state is kept by its type": lambda p, s: s.key_by(len).stateful_map(
        "t", first, state=AvroCodec(int)
    ),
    r"no_none takes state int, but a new key has None: make it int \| None": lambda p, s: s.key_by(len).stateful_map(
        "t", no_none
    ),
    "two_types takes and returns state of two types, int and str": lambda p, s: s.key_by(len).stateful_map(
        "t", two_types
    ),
    "union of a stream of another pipeline, 'q'": lambda p, s: s.union(other),
    "union of 5, which is not a stream": lambda p, s: s.union(5),
    "union of a keyed stream": lambda p, s: s.union(s.key_by(len)),
    "needs at least one other stream": lambda p, s: s.union(),
    "'undeclared' is not an output of 'route': declare it": lambda p, s: s.split(
        lambda order, emit: None, id="route", outputs=[late]
    ).side(undeclared),
    "records of output 'late' are not used": lambda p, s: s.split(lambda order, emit: None, id="route", outputs=[late]),
    "'undeclared' is not an output of 't': declare it in stateful_map": lambda p, s: (
        s.key_by(len).stateful_map("t", lambda state, order, emit: (1, 1), outputs=[late]).side(undeclared)
    ),
    r"must take \(state, record, emit\)": lambda p, s: s.key_by(len).stateful_map("t", len, outputs=[late]),
    r"side\(\) needs the main stream of an operator with outputs=.* one of source": lambda p, s: s.side(late),
    "and this is one of a side output": lambda p, s: (
        s.split(lambda order, emit: None, id="route", outputs=[late]).side(late).side(late)
    ),
    "two outputs have the same name": lambda p, s: s.split(lambda order, emit: None, outputs=[late, late]),
    "partitioned=True is about the source's topic": lambda p, s: (
        s.key_by(len).reduce("a", max).key_by(len, partitioned=True).reduce("b", max).sink("out", out)
    ),
    "partitioned='murmur3' must be True or one of murmur2_random, ": lambda p, s: (
        s.key_by(len, partitioned="murmur3").reduce("a", max).sink("out", out)
    ),
    "partitioned= is about the keys of messages, and these are Refund": lambda p, s: (
        s.key_by(refund, partitioned=True).reduce("a", max).sink("out", out)
    ),
    "partitions of a topic, and source 'n' reads none": lambda p, s: (
        p.source("n", GeneratorSource(abs, count=9)).key_by(abs, partitioned=True).reduce("b", max).sink("out", out)
    ),
    "partitions of a topic, and source 'f' reads none": lambda p, s: (
        s.union(p.source("f", FileSource("/in", value=Order)))
        .key_by(len, partitioned=True)
        .reduce("b", max)
        .sink("out", out)
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_line(mistake: str) -> None:
    pipeline = Pipeline("p")
    orders = pipeline.source("orders", KafkaSource("orders", value=Order))
    MISTAKES[mistake](pipeline, orders)
    with pytest.raises(GraphError, match=rf"test_validation\.py:\d+: .*{mistake}"):
        pipeline.build()


def test_all_mistakes_are_named_at_once() -> None:
    pipeline = Pipeline("p")
    orders: Any = pipeline.source("orders", KafkaSource("orders", value=Order))
    orders.map(waits).sink("out", KafkaSink("out"))
    orders.filter(5).sink("out", KafkaSink("out"))
    orders.key_by(len)
    with pytest.raises(GraphError) as raised:
        pipeline.build()
    assert str(raised.value).splitlines()[0] == "pipeline 'p' cannot be built:"
    assert len(raised.value.args[0].splitlines()) == 5


@pytest.mark.parametrize(
    ("pipeline", "mistake"),
    [
        (Pipeline("p"), "has no source"),
        (Pipeline("a.b"), "the pipeline's name 'a.b' must be made of letters"),
        (Pipeline(""), "the pipeline's name '' must be"),
        (Pipeline("p" * 101), "is longer than 100 characters"),
        (Pipeline("p", max_parallelism=0), "max_parallelism=0 must be from 1 to 32768"),
        (Pipeline("p", max_parallelism="8"), "max_parallelism='8' must be from 1 to 32768"),  # type: ignore[arg-type]  # it is wrong on purpose
    ],
)
def test_a_wrong_pipeline_as_a_whole(pipeline: Pipeline, mistake: str) -> None:
    with pytest.raises(GraphError, match=mistake):
        pipeline.build()


def test_a_source_of_a_wrong_type_is_told_at_its_line() -> None:
    with pytest.raises(GraphError, match=r"test_validation.py:\d+: KafkaSource\('t'\): complex cannot be encoded"):
        KafkaSource("t", value=complex)
    with pytest.raises(GraphError, match=r"test_validation.py:\d+: .* KafkaSource.records\(.*, key=...\)"):
        KafkaSource("t", value=Order, key=str)  # type: ignore[call-overload]  # it is wrong on purpose
    for source in (KafkaSource, FileSource):
        with pytest.raises(GraphError, match=rf"write {source.__name__}.records\(..., value=...\), without metadata="):
            source("t", value=Order, metadata=True)  # type: ignore[call-overload]  # it is wrong on purpose
    with pytest.raises(GraphError, match="key=Order must be one of bytes, str, int, float, bool"):
        KafkaSource.records("t", value=Order, key=Order)


def test_a_type_that_nothing_needs_may_be_unknown() -> None:
    pipeline = Pipeline("p")
    orders: Stream[Any] = pipeline.source("orders", KafkaSource("orders", value=Order))
    orders.map(lambda order: order.id).sink("print", PrintSink())
    orders.map(lambda order: order).sink("avro", KafkaSink("avro", value=AvroCodec(Order)))
    assert len(pipeline.build().sinks) == 2

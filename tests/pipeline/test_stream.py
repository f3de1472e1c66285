"""The graph that a written pipeline becomes: kinds, edges, ids and types."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from exactlyonce import Context, Count, Emit, Operator, Output, Pipeline, Record, Stream, Tumbling
from exactlyonce.connectors import KafkaSource
from exactlyonce.errors import GraphError
from exactlyonce.pipeline.graph import Input, LogicalGraph
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.sinks import PrintSink


class Order(msgspec.Struct):
    id: int
    customer: str
    total: int


class Total(msgspec.Struct):
    customer: str
    sum: int


def larger(left: Order, right: Order) -> Order:
    return max(left, right, key=lambda order: order.total)


def add(total: int | None, order: Order) -> tuple[int, Total]:
    total = (total or 0) + order.total
    return total, Total(order.customer, total)


def written(write: Callable[[Stream[Order]], Stream[Any]]) -> LogicalGraph:
    pipeline = Pipeline("p")
    write(pipeline.source("orders", KafkaSource("orders", value=Order))).sink("out", PrintSink())
    return pipeline.build()


def totals(orders: Stream[Order]) -> Stream[Total]:
    by_customer = orders.filter(lambda order: order.total > 0).key_by(lambda order: order.customer)
    return by_customer.stateful_map("totals", add)


def test_every_node_knows_its_line() -> None:
    for node in written(totals).nodes:
        assert node.location.startswith("tests/pipeline/test_stream.py:") or node.location.startswith("/")


def test_derived_ids_do_not_change_by_edits_elsewhere() -> None:
    pipeline = Pipeline("p")
    pipeline.source("others", KafkaSource("others", value=Order)).filter(bool).sink("others-out", PrintSink())
    totals(pipeline.source("orders", KafkaSource("orders", value=Order))).filter(bool).sink("out", PrintSink())
    ids = {node.id for node in pipeline.build().nodes}
    assert {"filter-after-others", "filter-after-orders", "key_by-after-orders", "filter-after-totals"} <= ids


def test_a_second_of_a_kind_is_numbered_and_any_may_be_named() -> None:
    graph = written(lambda orders: orders.peek().peek().peek(id="look").peek())
    ids = ["peek-after-orders", "peek-after-orders-2", "look", "peek-after-look"]
    assert [node.id for node in graph.nodes[1:5]] == ids


def words(order: Order) -> Iterator[str]:
    yield order.customer


def route(order: Order, emit: Emit[int]) -> None:
    emit(order.id)


class Enrich(Operator):
    def __init__(self, suffix: str = "!") -> None:
        self.suffix = suffix

    def open(self, context: Context) -> None:
        self.suffix += context.operator

    def __call__(self, order: Order) -> str:
        return order.customer + self.suffix


@pytest.mark.parametrize(
    ("write", "type_"),
    [
        (lambda s: s.map(lambda order: order.id), UNKNOWN),
        (lambda s: s.map(lambda order: order.id, output=int), int),
        (lambda s: s.map(lambda order: order.id, output=int | None), int | None),
        (lambda s: s.map(Enrich), str),
        (lambda s: s.flat_map(words), str),
        (lambda s: s.flat_map(lambda order: [order.id], output=int), int),
        (lambda s: s.filter(lambda order: True), Order),
        (lambda s: s.peek(), Order),
        (lambda s: s.split(route), int),
        (lambda s: s.split(lambda order, emit: None, output=int), int),
        (lambda s: s.union(s), Order),
        (lambda s: s.union(s.map(Enrich)), Order | str),
        (lambda s: s.union(s.map(lambda order: order)), UNKNOWN),
        (lambda s: s.key_by(lambda order: order.id).stateful_map("t", add), Total),
        (lambda s: s.key_by(lambda order: order.id).reduce("t", larger), Order),
        (lambda s: s.key_by(lambda o: o.id).stateful_map("t", lambda n, o: (n, o), state=int, output=Order), Order),
        (lambda s: s.key_by(lambda o: o.id).stateful_flat_map("t", lambda n, o: (n, [o]), state=int, output=int), int),
    ],
)
def test_the_type_of_a_stream(write: Callable[[Stream[Order]], Stream[Any]], type_: Any) -> None:
    graph = written(write)
    assert graph.type_of(graph.node("out").inputs[0]) == type_


def keep(state: dict[str, int] | None, order: Order) -> tuple[dict[str, int] | None, None]:
    return state, None


def keep_untyped(state, order) -> tuple[list[int] | None, int]:
    return state, 1


@pytest.mark.parametrize(
    ("fn", "state", "kept"),
    [
        (add, None, int),
        (keep, None, dict[str, int]),
        (keep_untyped, None, list[int]),
        (lambda state, order: (state, 1), set[str], set[str]),
        (add, float, float),
    ],
)
def test_the_type_of_the_state(fn: Any, state: Any, kept: Any) -> None:
    graph = written(lambda orders: orders.key_by(lambda order: order.id).stateful_map("t", fn, state=state, output=int))
    assert graph.node("t").state_type == kept


def test_the_state_of_reduce_is_a_record() -> None:
    graph = written(lambda orders: orders.key_by(lambda order: order.id).reduce("max", larger))
    assert graph.node("max").state_type is Order


def test_a_class_makes_one_instance_for_each_subtask() -> None:
    graph = written(lambda orders: orders.map(functools.partial(Enrich, "?"), id="enrich").filter(len, id="filter"))
    first, second = graph.node("enrich").make(), graph.node("enrich").make()
    assert isinstance(first, Enrich)
    assert first is not second
    assert first.suffix == "?"
    assert graph.node("filter").make() is len


def make_five():
    return 5


def test_a_factory_that_makes_no_function_is_told() -> None:
    graph = written(lambda orders: orders.map(make_five, id="five", output=int))
    with pytest.raises(TypeError, match=r"five .* made 5"):
        graph.node("five").make()


def test_side_outputs() -> None:
    late = Output("late", Order)
    pipeline = Pipeline("p")
    orders = pipeline.source("orders", KafkaSource.records("orders", value=Order))
    routed = orders.split(lambda record, emit: emit(1), id="route", outputs=[late], output=int)
    routed.sink("out", PrintSink())
    routed.side(late).sink("late-out", PrintSink())
    graph = pipeline.build()
    assert graph.type_of(Input("orders")) == Record[Order]
    assert graph.node("route").outputs == {"late": Order}
    assert graph.node("late-out").inputs == (Input("route", "late"),)
    assert [node.id for node in graph.consumers("route")] == ["out"]
    assert [node.id for node in graph.consumers("route", "late")] == ["late-out"]


@pytest.mark.parametrize("operator", ["stateful_map", "stateful_flat_map"])
def test_side_outputs_of_an_operator_with_state(operator: str) -> None:
    late = Output("late", Order)
    pipeline = Pipeline("p")
    keyed = pipeline.source("orders", KafkaSource("orders", value=Order)).key_by(lambda order: order.customer)
    given = {"state": int, "output": int, "outputs": [late]}
    totals = getattr(keyed, operator)("totals", lambda total, order, emit: (1, 1), **given)
    totals.sink("out", PrintSink())
    totals.side(late).sink("late-out", PrintSink())
    graph = pipeline.build()
    assert graph.node("totals").outputs == {"late": Order}
    assert graph.type_of(graph.node("late-out").inputs[0]) is Order
    assert "<- totals.late" in graph.explain()


def test_branches_read_the_same_output() -> None:
    graph = written(lambda orders: orders.union(orders, orders.map(Enrich), id="all"))
    assert [node.id for node in graph.consumers("orders")] == ["map-after-orders", "all", "all"]


def test_a_partitioned_key_needs_no_shuffle() -> None:
    graph = written(lambda orders: orders.key_by(lambda order: order.id, partitioned=True).reduce("max", larger))
    assert graph.shuffles == ()
    assert graph.node("max").stateful


def test_operators_out_of_place_say_where_they_stand() -> None:
    orders: Any = Pipeline("p").source("orders", KafkaSource("orders", value=Order))
    with pytest.raises(GraphError, match=r"test_stream.py:\d+: reduce keeps state by key: put .key_by"):
        orders.reduce("max", larger)
    with pytest.raises(GraphError, match=r"test_stream.py:\d+: map is not for keyed streams"):
        orders.key_by(len).map(len)
    with pytest.raises(GraphError, match="cannot be iterated"):
        list(orders)
    with pytest.raises(AttributeError, match="mapp"):
        orders.mapp(len)


GUESSES: dict[str, Callable[[Any], Any]] = {
    r"process takes a handler .* is .split\(fn, outputs=": lambda s: s.process("route", route),
    r"process takes a handler .* is .apply\(id, fn\)": lambda s: (
        s.key_by(len).window(Tumbling("1m")).process("all", len)
    ),
    r"split has no state, so its id has a name: split\(..., id='route'\)": lambda s: s.split("route", route),
    r"union has no state, so its id has a name: union\(..., id='all'\)": lambda s: s.union("all", s),
    r"the first argument of sink is its id in checkpoints, as sink\(\"sink\", ...\), and not Print": lambda s: s.sink(
        PrintSink()
    ),
    "the first argument of source is its id": lambda s: Pipeline("q").source(KafkaSource("q", value=int)),  # type: ignore[call-arg, arg-type]  # it is wrong on purpose
    "the first argument of stateful_map is its id": lambda s: s.key_by(len).stateful_map(add),
    "the first argument of aggregate is its id": lambda s: s.key_by(len).window(Tumbling("1m")).aggregate(Count()),
    "the first argument of in_order is its id .* None": lambda s: s.key_by(len).in_order(),
    r"with_time has no state, so its id has a name: with_time\(..., id='moved'\)": lambda s: s.with_time("moved", "id"),
    r"assignTimestampsAndWatermarks is time= of the source, or with_time\(fn\)": lambda s: (
        s.assignTimestampsAndWatermarks(len)
    ),
    "with_time is not for keyed streams: put it before .key_by": lambda s: s.key_by(len).with_time("id"),
    r"group_by is key_by\(fn\) here": lambda s: s.group_by(len),
    r"keyBy is key_by here": lambda s: s.keyBy(len),
    r"flatmap is flat_map here": lambda s: s.flatmap(list),
    r"a field is named by a function, key_by\(lambda record: record.name\); .* id='name'": lambda s: s.key_by("name"),
    r"to is sink\(id, KafkaSink": lambda s: s.to("topic"),
    r"foreach is peek\(fn\) here": lambda s: s.foreach(print),
    r"mapValues is map\(fn\) here": lambda s: s.mapValues(len),
    r"aggregate is of windows: put .key_by\(fn\).window\(Tumbling\(\"1m\"\)\) before it": lambda s: s.aggregate(
        "n", Count()
    ),
    r"fold is of windows: put .window\(Tumbling\(\"1m\"\)\) before it": lambda s: s.key_by(len).fold("n", int, max),
    "count is key_by.*stateful_map": lambda s: s.key_by(len).count(),
    "reduce is not for windows: put it before .window": lambda s: s.key_by(len).window(Tumbling("1m")).reduce("r", max),
    "sink is not for windows: put it before .key_by.*or after an operator": lambda s: (
        s.key_by(len).window(Tumbling("1m")).sink("out", PrintSink())
    ),
    "map is not for tables: a keyed stream reads one by": lambda s: (
        Pipeline("q").table("t", KafkaSource.records("t", key=str, value=int)).map(len)  # type: ignore[attr-defined]  # it is wrong on purpose
    ),
}


@pytest.mark.parametrize("told", GUESSES)
def test_a_guess_is_answered_with_what_does_it(told: str) -> None:
    orders = Pipeline("p").source("orders", KafkaSource("orders", value=Order))
    with pytest.raises(GraphError, match=rf"^[^ ]*test_stream.py:\d+: {told}"):
        GUESSES[told](orders)


def test_checkpoints_tell_a_split_by_its_earlier_name() -> None:
    graph = written(lambda orders: orders.split(route, id="route"))
    described = {node["id"]: node["kind"] for node in graph.describe()["nodes"]}
    assert described == {"orders": "source", "route": "process", "out": "sink"}
    assert "  route   split  " in graph.explain()

"""`with_broadcast` in the graph: a table whose rows go to all subtasks, and each mistake with its remedy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from exactlyonce import Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.engines.plan import plan
from exactlyonce.errors import GraphError
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.sinks import KafkaSink


class Order(msgspec.Struct):
    id: int
    customer: str


class Checked(msgspec.Struct):
    id: int
    limit: int


def check(order: Order, limits: Mapping[str, int]) -> Checked:
    return Checked(order.id, limits.get(order.customer, 0))


def of_customer(order: Order) -> str:
    return order.customer


orders = KafkaSource("orders", value=Order)
limits = KafkaSource.records("limits", key=str, value=int)
OUT: KafkaSink[Any] = KafkaSink("out")


def graph(write: Callable[[Pipeline], Any]) -> LogicalGraph:
    pipeline = Pipeline("p")
    write(pipeline).sink("out", OUT)
    return pipeline.build()


def checked(pipeline: Pipeline, fn: Any = check, **options: Any) -> Any:
    table = pipeline.table("limits", limits)
    return pipeline.source("orders", orders).with_broadcast("checked", table, fn, **options)


def keyed(pipeline: Pipeline, fn: Any = check, *, partitioned: bool = False) -> Any:
    by_customer = pipeline.source("orders", orders).key_by(of_customer, partitioned=partitioned)
    counted = by_customer.with_broadcast("checked", pipeline.table("limits", limits), fn)
    return counted.stateful_map("counted", lambda count, checked: (count, checked), state=int, output=Checked)


def test_rows_are_kept_by_key_and_go_to_all_subtasks() -> None:
    built = graph(checked)
    assert [node.id for node in built.stateful] == ["checked-rows"]
    sent = {edge.name: edge.to_all for edge in plan(built, 2).shuffles}
    assert sent == {"key_by-after-limits>checked-rows": False, "checked-rows>checked>1": True}
    assert plan(built, 1).shuffles == ()
    assert "with_broadcast    <- orders, <* checked-rows  : Checked" in built.explain()
    tasks = [[node.id for node in task.nodes] for task in plan(built, 2).tasks]
    assert ["orders", "checked", "out"] in tasks, "its records are not shuffled"


def test_outputs_of_a_keyed_stream_are_shuffled_by_the_keys_of_their_records() -> None:
    built = graph(keyed)
    assert built.node("counted").key_type is str
    names = [edge.name for edge in plan(built, 2).shuffles]
    assert names == [
        "key_by-after-limits>checked-rows", "key_by-after-checked>counted", "checked-rows>checked>1"
    ]  # fmt: skip


def test_one_table_may_be_read_several_times() -> None:
    def write(pipeline: Pipeline) -> Any:
        table, source = pipeline.table("limits", limits), pipeline.source("orders", orders)
        source.key_by(of_customer).lookup("looked-up", table).sink("found", OUT)
        source.with_broadcast("again", table, lambda order, limits: len(limits), output=int).sink("counts", OUT)
        return source.with_broadcast("checked", table, check)

    assert len(graph(write).broadcasts) == 2


def test_rows_may_be_those_of_a_join_of_tables() -> None:
    def write(pipeline: Pipeline) -> Any:
        by_id = pipeline.table("by-id", KafkaSource.records("by-id", key=int, value=Order))
        joined = by_id.join_table("joined", pipeline.table("limits", limits), by=of_customer)
        return pipeline.source("orders", orders).with_broadcast("all", joined, lambda order, rows: 0, output=int)

    assert graph(write).node("all-rows").kept.name == "Joined[int, Order, int]"


def _by_customer(pipeline: Pipeline) -> Any:
    return pipeline.source("t", KafkaSource("t", value=Order)).key_by(of_customer)


MISTAKES: dict[str, Callable[[Pipeline], Any]] = {
    r"the lambda.* must take \(record, rows\)": lambda p: checked(p, lambda order: order),
    r"with_broadcast\(\) with 5, which is not a table$": lambda p: (
        p.source("orders", orders).with_broadcast("checked", 5, check)  # type: ignore[call-overload]  # a mistake
    ),
    r"with_broadcast\(id, table, fn\) takes the table before the function, and got them swapped$": lambda p: (
        p.source("orders", orders).with_broadcast("checked", check, p.table("limits", limits))  # type: ignore[call-overload]  # a mistake
    ),
    r"with_broadcast\(\) with the function check, which is not a table$": lambda p: (
        p.source("orders", orders).with_broadcast("checked", check, check)  # type: ignore[call-overload]  # a mistake
    ),
    r"with_broadcast\(\) with a KafkaSource, which is not a table: read it by pipeline.table\(": lambda p: (
        p.source("orders", orders).with_broadcast("checked", orders, check)  # type: ignore[call-overload]  # a mistake
    ),
    r"a table needs a source of messages with their keys, .*, got a KafkaSource without them": lambda p: (
        p.source("orders", orders).with_broadcast("checked", p.table("limits", orders), check)  # type: ignore[arg-type]  # a mistake
    ),
    r"with_broadcast\(\) with a stream without keys, and it takes a table, pipeline\.table": lambda p: (
        (stream := p.source("orders", orders)).with_broadcast("checked", stream, check)  # type: ignore[call-overload]  # a mistake
    ),
    r"with_broadcast\(\) with a keyed stream, and it takes a table, pipeline\.table": lambda p: (
        p.source("orders", orders).with_broadcast("checked", _by_customer(p), check)
    ),
    "partitioned=True is about the source's topic, but the records were shuffled": lambda p: keyed(p, partitioned=True),
    "the type of the records is unknown, .*come from 'checked'": lambda p: keyed(p, lambda order, limits: order),
    "id 'checked-rows' of this .* is that of": lambda p: checked(p).map(check, id="checked-rows", output=int),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_line(mistake: str) -> None:
    with pytest.raises(GraphError, match=rf"test_broadcast\.py:\d+: .*{mistake}"):
        graph(MISTAKES[mistake])


def test_streams_of_one_source_cannot_meet_so_with_several_subtasks() -> None:
    def write(pipeline: Pipeline) -> Any:
        table = pipeline.table("limits", limits)
        return table.changes().with_broadcast("checked", table, lambda limit, limits: len(limits), output=int)

    built = graph(write)
    assert plan(built, 1).shuffles == ()
    with pytest.raises(GraphError, match="what comes of them is united with a stream from before that"):
        plan(built, 2)

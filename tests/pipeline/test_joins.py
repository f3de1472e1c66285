"""Joins in the graph: two inputs that are told apart, and each mistake with its remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from exactlyonce import Joined, Output, Pipeline, Record, Session, Tumbling
from exactlyonce.connectors import KafkaSource
from exactlyonce.engines.plan import plan
from exactlyonce.errors import GraphError
from exactlyonce.pipeline.foreign_keys import Subscribing
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.sinks import KafkaSink


class Order(msgspec.Struct):
    id: int
    customer: str
    at: int


class Customer(msgspec.Struct):
    name: str
    at: int


def of_customer(order: Order) -> str:
    return order.customer


def of_id(order: Order) -> int:
    return order.id


orders = KafkaSource("orders", value=Order, time="at")
timeless = KafkaSource("timeless", value=Order)
customers = KafkaSource.records("customers", key=str, value=Customer, time="at")
unstamped = KafkaSource.records("table", key=str, value=Customer)
late = Output("late", Customer)
OUT: KafkaSink[Any] = KafkaSink("out")


def graph(write: Callable[[Pipeline], Any]) -> LogicalGraph:
    pipeline = Pipeline("p")
    write(pipeline).sink("out", OUT)
    return pipeline.build()


def itself(pipeline: Pipeline, **within: Any) -> Any:
    keyed = pipeline.source("orders", orders).key_by(of_customer)
    default: dict[str, Any] = {} if "window" in within else {"within": ("0s", "1s")}
    return keyed.join("joined", keyed, **default | within)


def test_both_edges_of_a_join_of_a_stream_with_itself_are_channels_of_their_own() -> None:
    joined = graph(itself)
    names = [edge.name for edge in plan(joined, 2).shuffles]
    assert names == ["key_by-after-orders>joined", "key_by-after-orders>joined>1"]
    assert "<= key_by-after-orders, <= key_by-after-orders  inner within 0s to 1s" in joined.explain()
    assert plan(joined, 1).shuffles == ()


def test_sides_bounds_and_outer_sides_are_part_of_the_fingerprint() -> None:
    def two(pipeline: Pipeline, *, swapped: bool = False) -> Any:
        sides = [pipeline.source(name, KafkaSource(name, value=Order, time="at")).key_by(of_id) for name in "ab"]
        left, right = reversed(sides) if swapped else sides
        return left.join("joined", right, within=("0s", "1s"))

    graphs = [
        graph(two), graph(lambda p: two(p, swapped=True)), graph(itself), graph(lambda p: itself(p, how="full")),
        graph(lambda p: itself(p, within=("-1s", "1s"))), graph(lambda p: itself(p, window=Tumbling("1s"))),
        graph(lambda p: itself(p, window=Tumbling("1s"), how="left")), graph(lambda p: itself(p, window=Session("1s"))),
    ]  # fmt: skip
    assert len({joined.fingerprint() for joined in graphs}) == len(graphs)


def test_types_of_results_have_none_for_the_side_that_may_be_missing() -> None:
    def result(write: Callable[[Pipeline], Any]) -> str:
        return graph(write).explain().splitlines()[-2].rpartition("  : ")[2]

    assert result(lambda p: itself(p, how="right")) == "Joined[str, Optional[Order], Order]"
    full = result(lambda p: itself(p, how="full", window=Tumbling("1s")))
    assert full == "Windowed[str, Pair[Optional[Order], Optional[Order]]]"
    assert result(lambda p: _enriched(p, "as_of")) == "Joined[str, Order, Optional[Customer]]"
    assert result(lambda p: _enriched(p, "lookup", how="inner")) == "Joined[str, Order, Customer]"


def _enriched(pipeline: Pipeline, kind: str, source: Any = orders, key: Any = of_customer, **options: Any) -> Any:
    table = pipeline.table("customers", customers)
    return getattr(pipeline.source("orders", source).key_by(key), kind)("joined", table, **options)


def test_windows_behind_a_lookup_need_no_times_in_its_table() -> None:
    def write(pipeline: Pipeline) -> Any:
        table = pipeline.table("table", unstamped)
        named = pipeline.source("orders", orders).key_by(of_customer).lookup("named", table)
        return named.key_by(lambda joined: joined.key).window(Tumbling("1s")).fold("n", int, lambda n, joined: n + 1)

    assert len(graph(write).timed) == 1


orders_by_id = KafkaSource.records("orders-by-id", key=int, value=Order)


def _tables(pipeline: Pipeline, by: Any = of_customer, right: Any = unstamped, **options: Any) -> Any:
    lefts, rights = pipeline.table("lefts", orders_by_id), pipeline.table("rights", right)
    return lefts.join_table("joined", rights, by=by, **options).changes()


def _keyed(pipeline: Pipeline) -> Any:
    return pipeline.source("t", timeless).key_by(of_customer)


def test_tables_are_joined_by_three_steps_with_exchanges() -> None:
    joined = graph(_tables)
    assert [node.id for node in joined.stateful] == ["joined-subscribe", "joined-answer", "joined"]
    assert len(plan(joined, 2).shuffles) == 5
    assert plan(joined, 1).shuffles == ()
    assert not joined.timed, "none waits for time"
    subscribing = joined.node("joined-subscribe").timed
    assert isinstance(subscribing, Subscribing)
    assert subscribing.right_key is str
    assert joined.node("out").inputs[0].node == "joined", "changes have no key_by"
    types = [graph(lambda p, how=how: _tables(p, how=how)).node("joined").type for how in ("inner", "left")]  # type: ignore[misc]  # how is bound
    assert types == [
        Record[Joined[int, Order, Customer] | None], Record[Joined[int, Order, Customer | None] | None],
    ]  # fmt: skip
    assert graph(_tables).fingerprint() != graph(lambda p: _tables(p, how="left")).fingerprint()


def test_a_joined_table_is_joined_again_looked_up_and_joined_with_itself() -> None:
    def write(pipeline: Pipeline) -> Any:
        rights = pipeline.table("rights", unstamped)
        lefts = pipeline.table("lefts", orders_by_id)
        again = lefts.join_table("joined", rights, by=of_customer).join_table(
            "again", lefts, by=lambda joined: joined.left.id, how="left"
        )
        looked_up = pipeline.source("orders", orders).key_by(of_id).lookup("looked-up", again)
        looked_up.sink("found", OUT)
        return lefts.join_table("itself", lefts, by=of_id).changes()

    again = graph(write).node("again").type
    assert again == Record[Joined[int, Joined[int, Order, Customer], Order | None] | None]


def test_the_changes_of_a_table_are_a_stream() -> None:
    changes = graph(lambda p: p.table("table", unstamped).changes())
    assert [node.id for node in changes.nodes] == ["table", "out"]
    assert changes.node("table").type == Record[Customer | None]


def _partitioned(pipeline: Pipeline, *, right: bool, topic: str = "orders") -> Any:
    sources: dict[str, Any] = {name: pipeline.source(name, KafkaSource(name, value=Order, time="at"))
                               for name in {"orders", topic}}  # fmt: skip
    keyed = sources[topic].key_by(of_customer, partitioned=right)
    return sources["orders"].key_by(of_customer, partitioned=True).join("joined", keyed, within=("0s", "1s"))


def test_partitioned_sides_of_one_source_need_no_shuffle() -> None:
    assert plan(graph(lambda p: _partitioned(p, right=True)), 2).shuffles == ()


MISTAKES: dict[str, Callable[[Pipeline], Any]] = {
    r"within=\('1s', '0s'\) is empty: give the earlier bound first": lambda p: itself(p, within=("1s", "0s")),
    "within='1s' must be two bounds of the right record's time less the left": lambda p: itself(p, within="1s"),
    "within= is 'soon': write a number with a unit": lambda p: itself(p, within=("-1s", "soon")),
    "how='outer' must be one of 'inner', 'left', 'right', 'full'": lambda p: itself(p, how="outer"),
    "join.. needs within=, .*, or window=, .*, and not both": lambda p: itself(p, window=None, within=None),
    "window=Tumbling.* and not both": lambda p: itself(p, window=Tumbling("1s"), within=("0s", "1s")),
    r"expected a window, as Tumbling\(\"10s\"\), got '10s'": lambda p: itself(p, window="10s"),
    "the gap must be above 0": lambda p: itself(p, window=Session("0s")),
    "how='full' must be one of 'inner', 'left'": lambda p: _enriched(p, "lookup", how="full"),
    "keep is 'long'": lambda p: _enriched(p, "as_of", keep="long"),
    r"late records are Order, and 'late' is declared with Customer": lambda p: itself(p, late=late),
    "the keys of the left side are int, and those of the right one str": lambda p: _enriched(p, "as_of", key=of_id),
    "join goes by event time, and the records of 'timeless' have none": lambda p: (
        p.source("orders", orders).key_by(of_id).join(
            "joined", p.source("timeless", timeless).key_by(of_id), within=("0s", "1s")
        )
    ),
    r"join\(\) of 5, which is not a keyed stream": lambda p: (
        p.source("orders", orders).key_by(of_id).join("joined", 5, within=("0s", "1s"))  # type: ignore[call-overload]  # a mistake
    ),
    r"join\(\) of a KafkaSource, which is not a keyed stream: read it by pipeline\.source\(": lambda p: (
        p.source("orders", orders).key_by(of_id).join("joined", orders, within=("0s", "1s"))  # type: ignore[call-overload]  # a mistake
    ),
    r"join\(\) of a stream without keys: put": lambda p: (
        p.source("orders", orders).key_by(of_id).join("joined", p.source("t", timeless), within=("0s", "1s"))  # type: ignore[call-overload]  # a mistake
    ),
    r"join\(\) of a stream of another pipeline, 'q'": lambda p: (
        p.source("orders", orders).key_by(of_id).join(
            "joined", Pipeline("q").source("t", timeless).key_by(of_id), within=("0s", "1s")
        )
    ),
    "lookup goes by event time, and the records of 'table' have none": lambda p: (
        p.source("orders", orders).key_by(of_customer).lookup("joined", p.table("table", unstamped), ttl="7d")
    ),
    "ttl is 'soon'": lambda p: _enriched(p, "lookup", ttl="soon"),
    "a table needs a source of messages with their keys": lambda p: (
        p.source("orders", orders).key_by(of_id).lookup("joined", p.table("t", timeless))  # type: ignore[arg-type]  # a mistake
    ),
    "partitioned=True leaves them where": lambda p: _partitioned(p, right=False),
    "how='full' must be one of 'inner', 'left'.*": lambda p: _tables(p, how="full"),
    "by= gives keys of type int, and those of the right table are str": lambda p: _tables(p, by=of_id),
    r"the lambda.* must take \(row\)": lambda p: _tables(p, by=lambda one, other: "a"),
    r"join_table\(\) with 5, which is not a table": lambda p: (
        p.table("lefts", orders_by_id).join_table("joined", 5, by=of_customer).changes()  # type: ignore[call-overload]  # a mistake
    ),
    r"join_table\(\) with a stream without keys, and both sides are tables": lambda p: (
        p.table("lefts", orders_by_id).join_table("joined", p.source("t", timeless), by=of_customer).changes()  # type: ignore[call-overload]  # a mistake
    ),
    r"join_table\(\) with a keyed stream, and both sides are tables": lambda p: (
        p.table("lefts", orders_by_id).join_table("joined", _keyed(p), by=of_customer).changes()
    ),
    "leave it out, unless both sides are of one source": lambda p: _partitioned(p, right=True, topic="others"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_line(mistake: str) -> None:
    with pytest.raises(GraphError, match=rf"test_joins\.py:\d+: .*{mistake}"):
        graph(MISTAKES[mistake])

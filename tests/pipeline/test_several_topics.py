"""Sources of several topics and sinks that choose one are graphs of ordinary ones."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from exactlyonce import DeadLetters, Pipeline, Record
from exactlyonce.connectors import Cluster, KafkaSource
from exactlyonce.pipeline.errors import ExactlyOnceError, GraphError
from exactlyonce.sinks import KafkaSink
from exactlyonce.testing import assert_exactly_once


class Order(msgspec.Struct):
    customer: str
    total: int


def copies(topics: list[str], **options: Any) -> Pipeline:
    """Copies of each order to the topic that its customer names."""
    pipeline = Pipeline("regions")
    orders = pipeline.source("orders", KafkaSource.records(["orders.eu", "orders.us"], value=Order))
    copied = orders.map(lambda record: record.value, id="values", output=Order)
    copied.sink("out", KafkaSink(lambda order: order.customer, topics=topics), **options)
    return pipeline


EU, US = [Order("ann", 1), Order("bob.b", 2)], [Order("ann", 3), Order("ann", 4)]


def test_each_topic_has_a_source_and_a_sink_of_its_own() -> None:
    graph = copies(["ann", "bob.b"]).build()
    assert [node.id for node in graph.sources] == ["orders-orders_eu", "orders-orders_us"]
    assert [(node.id, node.sink.topic) for node in graph.sinks if node.sink] == [
        ("out-ann", "ann"), ("out-bob_b", "bob.b"),
    ]  # fmt: skip
    assert graph.fingerprint() != copies(["ann", "bob"]).build().fingerprint()


def test_every_record_is_in_its_topic_once() -> None:
    wanted = {"ann": [EU[0], *US], "bob.b": [EU[1]]}
    assert_exactly_once(copies(["ann", "bob.b"]), {"orders.eu": EU, "orders.us": US}, wanted, crashes_max=12)


def test_a_topic_that_is_not_declared_is_an_error_of_the_record() -> None:
    message = r"topic= has given 'bob\.b', which is not in topics=: ann"
    with pytest.raises(ExactlyOnceError, match=message):
        assert_exactly_once(copies(["ann"]), {"orders.eu": EU})
    with_letters = copies(["ann"], on_error=DeadLetters("dead"))
    wanted: dict[str, Any] = {"ann": [EU[0]], "dead": [msgspec.json.encode(EU[1])]}
    assert_exactly_once(with_letters, {"orders.eu": EU}, wanted, crashes_max=5)


def test_record_topic_tells_the_topics_apart() -> None:
    pipeline = Pipeline("topics")
    records = pipeline.source("in", KafkaSource.records(["a", "b"], value=int))

    def placed(record: Record[int]) -> str:
        return f"{record.topic} {record.value}"

    records.map(placed).sink("out", KafkaSink("out"))
    assert_exactly_once(pipeline, {"a": [1], "b": [2]}, {"out": [b"a 1", b"b 2"]}, crashes_max=5)


MISTAKES: dict[str, tuple[Any, str]] = {
    "no topic": (lambda: KafkaSource([], value=int), "give one topic or more, each once"),
    "shared id": (
        lambda: KafkaSource(["a.b", "a_b"], value=int),
        "topics 'a.b' and 'a_b' would have the same id, since a dot becomes an underscore",
    ),
    "shared id of a sink": (lambda: KafkaSink(lambda order: "a.b", topics=["a.b", "a_b"]), "would have the same id"),
    "twice": (lambda: KafkaSource(["a", "a"], value=int), "give one topic or more, each once"),
    "offsets": (lambda: KafkaSource(["a", "b"], value=int, start={0: 1}), r"start= gives offsets .* source of its own"),
    "a pattern and topics": (lambda: KafkaSource("a", pattern="a.*", value=int), "topics or a pattern, not both"),
    "no pattern": (lambda: KafkaSource(pattern="a(", value=int), "pattern= is no regular expression: missing"),
    "the start of a pattern": (
        lambda: KafkaSource(pattern="a.*", value=int, start="latest"),
        "topics of a pattern begin at their earliest offset",
    ),
    "a pattern elsewhere": (
        lambda: KafkaSource(pattern="a.*", value=int, cluster=Cluster("eu", {})),
        "a pattern is of the cluster that has the checkpoints",
    ),
    "no topics": (lambda: KafkaSink(lambda order: "a"), r"declare all topics that it may give, each once, as topics="),
    "a name with topics": (lambda: KafkaSink("a", topics=["a"]), r"topics= goes with a function as the topic"),
    "a number": (lambda: KafkaSink(7), r"the topic is 7, and must be a name, or a function"),  # type: ignore[arg-type]  # as a user may write it
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_say_what_to_do(mistake: str) -> None:
    make, message = MISTAKES[mistake]
    with pytest.raises(GraphError, match=message):
        make()


def test_a_pattern_is_no_topic() -> None:
    pipeline = Pipeline("patterns")
    pipeline.source("in", KafkaSource("orders-.*", value=int)).sink("out", KafkaSink("all-orders"))
    with pytest.raises(
        GraphError, match=r"topic 'orders-\.\*' must be .*: a pattern is no name; a source takes it as pattern="
    ):
        pipeline.build()

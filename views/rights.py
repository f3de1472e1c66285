"""The rights that a pipeline needs on a Kafka cluster with access control; see docs/settings.md, "Access rights"."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator
from typing import NamedTuple, cast

from exactlyonce.checkpoint.records.manifest import transaction_prefix
from exactlyonce.pipeline.grants import Grants
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.names import checkpoint_topic
from exactlyonce.sinks.http.sink import HttpSink, deliveries_topic
from exactlyonce.sinks.kafka.sink import KafkaSink

TOPIC, GROUP, TRANSACTIONS, CLUSTER = "topic", "group", "transactional-id", "cluster"
"""The resources, as options of `kafka-acls`."""


class Right(NamedTuple):
    """What a pipeline needs on one resource. Read and Write bring Describe with them."""

    resource: str
    name: str
    """Empty for the cluster."""
    operations: tuple[str, ...]
    creates: bool = False
    """Whether it also needs Create, as long as the topic is missing."""
    erased: bool = False
    """Whether `exactlyonce reset` also needs Delete."""

    @property
    def prefixed(self) -> bool:
        """Whether `name` is a prefix."""
        return self.resource == TRANSACTIONS

    def command(self, servers: str, principal: str, operations: Collection[str]) -> str:
        """The command of Kafka's tools that grants *operations* on it."""
        words = ["--add", "--allow-principal", principal]
        for operation in operations:
            words += ["--operation", operation]
        words += [f"--{self.resource}", *([self.name] if self.name else [])]
        words += ["--resource-pattern-type", "prefixed"] if self.prefixed else []
        return f"kafka-acls --bootstrap-server {servers} {shlex.join(words)}"


def rights_of(
    pipeline: str,
    inputs: Collection[str],
    outputs: Collection[str],
    start_groups: Collection[str] = (),
    *,
    created: Collection[str] = (),
    ledgers: Collection[str] = (),
) -> Iterator[Right]:
    """The rights of *pipeline*, which makes its *outputs* that are in *created* and missing, and its *ledgers*."""
    yield from (Right(TOPIC, topic, ("Read",)) for topic in inputs)
    yield from (Right(TOPIC, topic, ("Read", "Write"), topic in created) for topic in outputs)
    yield Right(TOPIC, checkpoint_topic(pipeline), ("Read", "Write", "DescribeConfigs"), creates=True, erased=True)
    yield from (Right(TOPIC, topic, ("Read", "Write", "DescribeConfigs"), creates=True) for topic in ledgers)
    yield Right(TRANSACTIONS, transaction_prefix(pipeline), ("Write",))
    yield Right(GROUP, pipeline, ("Read",), erased=True)
    yield from (Right(GROUP, group, ("Describe",)) for group in start_groups)
    yield Right(CLUSTER, "", ("DescribeConfigs",))


def grants_of_graph(graph: LogicalGraph, user: str, *, creates: bool) -> Iterator[tuple[str, Grants]]:
    """The rights of *user* in stores beside Kafka, by source or sink; with *creates* those to make missing tables."""
    for node in graph.sources:
        if node.source is not None and (grants := node.source.grants(user)) is not None:
            yield node.id, grants
    for node in graph.sinks:
        if node.sink is not None:
            grants = node.sink.grants(user, graph.type_of(node.inputs[0]), creates=creates)
            if grants is not None:
                yield node.id, grants


def rights_of_graph(graph: LogicalGraph) -> Iterator[Right]:
    """The rights of a first run of *graph* in the cluster of its checkpoints."""
    sources = [node.source for node in graph.sources if node.source and node.source.place == node.source.topic]
    sinks = [node.sink for node in graph.sinks if node.sink is not None and node.sink.topic]
    ledgers = [deliveries_topic(graph.pipeline_id, node.id) for node in graph.sinks if isinstance(node.sink, HttpSink)]
    made = {sink.topic for sink in sinks if isinstance(sink, KafkaSink) and sink.create_partitions is not None}
    return rights_of(
        graph.pipeline_id,
        sorted({source.place for source in sources}),
        sorted({cast("str", sink.topic) for sink in sinks}),
        sorted({source.start_group for source in sources if source.start_group}),
        created={topic for topic in made if topic},
        ledgers=ledgers,
    )

"""Runs of a user's pipeline on the same input, one with each crash: on a real cluster, and what memory shares with it.

Invariant: each run on a cluster has a pipeline and topics with a name of its own, and deletes no others. Its processes
are killed at failpoints of the protocol.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, cast

import msgspec
from confluent_kafka import Producer

from exactlyonce.connectors.kafka.source import KafkaSource
from exactlyonce.pipeline.errors import ConfigError, GraphError
from exactlyonce.pipeline.failpoints import NAMES
from exactlyonce.pipeline.graph import LogicalGraph, Node
from exactlyonce.pipeline.loading import reference_of
from exactlyonce.pipeline.names import checkpoint_topic
from exactlyonce.pipeline.records import Record
from exactlyonce.pipeline.stream import Pipeline
from exactlyonce.sinks.kafka.sink import KafkaSink, encode_key
from exactlyonce.sinks.writer import holds_records
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster
from exactlyonce.testing.scripted import Crash as ScriptedCrash

T = TypeVar("T")


class InputRecord(NamedTuple):
    """A record of an input topic, as a consumer gets it."""

    value: bytes | None
    key: bytes | None = None
    timestamp_ms: int = 0
    """0: none is given. Then a broker in memory takes `time_ms`, and a real one the present."""
    headers: tuple[tuple[str, bytes | None], ...] = ()
    time_ms: int = 0
    """What `time=` of the source gives; 0: nothing of use."""


Script = Sequence[InputRecord | ScriptedCrash]
OutputRecord = tuple[bytes | None, bytes | None]
"""Key and value."""
Stored = Callable[[str], Iterable[object]]
"""Gives the records that a reader of a store sees, after the run whose pipeline was made with that name."""


@dataclass(frozen=True)
class Run:
    """The end of a run."""

    outputs: dict[str, list[OutputRecord]]
    """The visible records of each sink."""
    crashed: str = ""
    """The crash, in words; "" without one."""


def evenly(crashes: Sequence[T], most: int | None) -> Iterator[T]:
    """*crashes*, or *most* of them, evenly chosen.

    >>> [*evenly("abcdef", 3)], [*evenly("ab", None)]
    (['a', 'c', 'e'], ['a', 'b'])
    """
    count = len(crashes) if most is None else min(most, len(crashes))
    return (crashes[place * len(crashes) // count] for place in range(count))


def encoded(graph: LogicalGraph, node: Node, wanted: Iterable[object]) -> Iterator[OutputRecord]:
    """Records of a sink as a reader sees them; without keys, unless one is a `Record`."""
    type_ = graph.type_of(node.inputs[0])
    encode = node.sink.codec(type_).encode if isinstance(node.sink, KafkaSink) else msgspec.json.encode
    for record in wanted:
        key, value = None, record
        if isinstance(record, Record) and (isinstance(node.sink, KafkaSink) or not holds_records(type_)):
            key, value = encode_key(record.key), record.value
        yield key, value if value is None or isinstance(value, bytes) else encode(value)


FAILPOINTS = (
    "worker-barrier", "worker-aligned", "worker-frozen", "worker-blocks", "worker-flushed", "worker-acknowledged",
    "coordinator-triggered", "coordinator-checked", "coordinator-decided", "coordinator-committed",
    "coordinator-finalized",
)  # fmt: skip
"""Those that a run without a fault passes, in their order."""


class BrokerRuns:
    """Runs of what *make* gives, on *kafka*; it is killed in the second half of the input."""

    def __init__(
        self,
        make: Pipeline | Callable[..., Pipeline],
        parallelism: int,
        kafka: KafkaCluster,
        stored: Mapping[str, Stored],
        *,
        drains: bool = True,
    ) -> None:
        """Raises `ConfigError` or `GraphError` for a pipeline that cannot be run so."""
        name = getattr(make, "__name__", "")
        if isinstance(make, Pipeline) or getattr(make, "__globals__", {}).get(name) is not make:
            raise ConfigError(
                "On a cluster assert_exactly_once takes a function of a module, def orders(name: str) -> Pipeline. It "
                "begins the names of the pipeline and its topics with the name: each run has one of its own."
            )
        self._reference = reference_of(make.__globals__, name)
        self._make, self._kafka, self._parallelism, self._stored = make, kafka, parallelism, stored
        self._drains = drains
        self.scripts: Mapping[str, Script] = {}
        """The script of each source, by its id; given before the first run."""
        self.graph = make("tested").build()
        others = {node.id for node in self.graph.sinks if not isinstance(node.sink, KafkaSink)}
        if unread := sorted(others - stored.keys()):
            raise GraphError(
                f"sink {unread[0]!r} writes to another store than Kafka: give stored={{{unread[0]!r}: a function of "
                f"the pipeline's name that reads its records}}, or leave the marker out"
            )
        if unknown := sorted(stored.keys() - others):
            raise ConfigError(f"stored= names {unknown[0]!r}, which is no sink of another store than Kafka.")

    def crashes(self, most: int | None) -> Iterator[str]:
        """The crashes to try, *most* of them at most; called after a run without one."""
        return evenly(FAILPOINTS, most)

    def run(self, crash: object) -> Run:
        """Run to the end of the input, with *crash*, one of `crashes`, or with none."""
        name = f"tested-{uuid.uuid4().hex[:12]}"
        graph = self._make(name).build()
        inputs = {node.id: cast("KafkaSource[object]", node.source).place for node in graph.sources}
        outputs = {node.id: node.sink for node in graph.sinks if isinstance(node.sink, KafkaSink)}
        topics = dict.fromkeys(inputs.values(), 1) | {s.topic: s.create_partitions or 1 for s in outputs.values()}
        if foreign := [topic for topic in (*topics, graph.pipeline_id) if not topic.startswith(name)]:
            raise GraphError(f"{', '.join(foreign)}: does not begin with the name that the function was given")
        crashed = ""
        try:
            for topic, partitions in topics.items():
                self._kafka.create_topic(topic, partitions)
            self._feed(inputs, 0)
            self._finish(name, {})
            self._feed(inputs, 1)
            at_end = ["--drain"] if self._drains else []
            if crash is None:
                self._finish(name, {}, *at_end)
            else:
                crashed = self._finish_killed(name, str(crash), *at_end)
            visible = {id: self._visible(sink.topic) for id, sink in outputs.items()}
            rows = {id: [*encoded(graph, graph.node(id), read(name))] for id, read in self._stored.items()}
            return Run(visible | rows, crashed)
        finally:
            self._kafka.delete_topics([*topics, checkpoint_topic(graph.pipeline_id)])

    def _feed(self, topics: Mapping[str, str], half: int) -> None:
        producer = Producer({"bootstrap.servers": self._kafka.bootstrap_servers, "enable.idempotence": True})
        for source, script in self.scripts.items():
            records = [step for step in script if isinstance(step, InputRecord)]
            middle = -(-len(records) // 2)
            for record in records[middle:] if half else records[:middle]:
                producer.produce(
                    topics[source], record.value, record.key, 0, timestamp=record.timestamp_ms,
                    headers=[*record.headers],
                )  # fmt: skip
        if producer.flush(LIMIT_S):
            raise AssertionError("not all of the input could be written")

    def _finish_killed(self, name: str, failpoint: str, *options: str) -> str:
        """The crash in words; "" if the pipeline does not come to *failpoint*."""
        with tempfile.TemporaryDirectory() as fired:
            armed = {"EXACTLYONCE_FAILPOINTS": f"{failpoint}=kill", "EXACTLYONCE_FAILPOINTS_FIRED": fired}
            self._finish(name, armed, *options)
            return f"a process is killed at {failpoint}: {NAMES[failpoint]}" if os.listdir(fired) else ""

    def _finish(self, name: str, armed: Mapping[str, str], *options: str) -> None:
        """Run to the end of the input, once more if the coordinator was killed."""
        module, attribute, path = (str(self._reference[part]) for part in ("module", "attribute", "path"))
        command = [
            *(sys.executable, "-m", "exactlyonce.cli.main", "run", f"{module}:{attribute}", "--param", f"name={name}"),
            *("--until", "latest", "--checkpoint-interval", "100ms", "--parallelism", str(self._parallelism)),
            *("--bootstrap-servers", self._kafka.bootstrap_servers), *options,
        ]  # fmt: skip
        for _ in range(1 + bool(armed)):
            done = subprocess.run(
                command, cwd=path, env={**os.environ, **armed}, capture_output=True, text=True, timeout=LIMIT_S,
                check=False,
            )  # fmt: skip
            if done.returncode != -signal.SIGKILL:
                break
        if done.returncode:
            cause = done.stderr.rpartition("exactlyonce: ")[2][-4_000:].strip()
            raise AssertionError(f"{cause}\n  That is code {done.returncode} of {' '.join(command)}")

    def _visible(self, topic: str) -> list[tuple[bytes | None, bytes | None]]:
        return [(record.key, record.value) for record in self._kafka.read_committed(topic)]

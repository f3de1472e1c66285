"""The runs of `assert_exactly_once` on a real cluster: processes of their own, killed at failpoints of the protocol.

Invariant: each run has a pipeline and topics with a name of its own, and deletes no others.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import cast

from confluent_kafka import Producer

from exactlyonce.connectors.kafka.source import KafkaSource
from exactlyonce.pipeline.errors import ConfigError, GraphError
from exactlyonce.pipeline.failpoints import NAMES
from exactlyonce.pipeline.loading import reference_of
from exactlyonce.pipeline.names import checkpoint_topic
from exactlyonce.pipeline.stream import Pipeline
from exactlyonce.sinks.kafka.sink import KafkaSink
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster
from exactlyonce.testing.runs import InputRecord, Run, Script, Stored, encoded, evenly

FAILPOINTS = (
    "worker-barrier", "worker-aligned", "worker-frozen", "worker-blocks", "worker-flushed", "worker-acknowledged",
    "coordinator-triggered", "coordinator-checked", "coordinator-decided", "coordinator-committed",
    "coordinator-finalized",
)  # fmt: skip
"""Those that a run without a fault passes, in their order."""


class BrokerRuns:
    """The `Runs` of what *make* gives, on *kafka*; it is killed in the second half of the input."""

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
        return evenly(FAILPOINTS, most)

    def run(self, crash: object) -> Run:
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

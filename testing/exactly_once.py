"""`assert_exactly_once`: a user's pipeline, killed at every step, compared with its expected output.

Invariant: all runs get the same input. So a record is lost or doubled only by the pipeline's own functions, or by an
error of exactlyonce.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import msgspec
from confluent_kafka import Message

from exactlyonce.connectors.kafka.source import KafkaSource
from exactlyonce.pipeline.errors import ConfigError, ExactlyOnceError, GraphError, users_errors
from exactlyonce.pipeline.event_time import ms_of
from exactlyonce.pipeline.graph import LogicalGraph, Node
from exactlyonce.pipeline.records import Record
from exactlyonce.pipeline.stream import Pipeline
from exactlyonce.sinks.kafka.sink import KafkaSink
from exactlyonce.testing.crashing_world import MemoryRuns
from exactlyonce.testing.runs import BrokerRuns, InputRecord, OutputRecord, Run, Script, Stored, encoded
from exactlyonce.testing.scripted import CRASH

if TYPE_CHECKING:
    from exactlyonce.testing.cluster import KafkaCluster

SHOWN_MAX = 5
"""The number of records that a failure shows of each kind."""
IMPURE = (
    "Functions may use nothing but their arguments and state: no global variable, attribute or closure that they "
    "change, no clock, no random number."
)
Check = Callable[[list[Any]], object]
Seen = dict[str, Sequence[Hashable]]
"""The records of each sink and each side effect at the end of a run."""


_cluster: ContextVar[KafkaCluster | None] = ContextVar("cluster", default=None)


@contextmanager
def on_cluster(kafka: KafkaCluster) -> Iterator[None]:
    """A context in which `assert_exactly_once` runs pipelines on *kafka*."""
    token = _cluster.set(kafka)
    try:
        yield
    finally:
        _cluster.reset(token)


def assert_exactly_once(
    pipeline: Pipeline | Callable[..., Pipeline],
    inputs: Mapping[str, Sequence[object]],
    expected: Mapping[str, Sequence[object] | Check] | None = None,
    *,
    side_effects: Mapping[str, Callable[[], Sequence[Hashable]]] | None = None,
    stored: Mapping[str, Stored] | None = None,
    parallelism: int = 2,
    crashes_max: int | None = None,
    drain: bool = True,
) -> None:
    """Assert that *pipeline*, or what the function makes for each process, gives *expected* exactly once. The function
    may take a name.

    It runs in this process on a broker in memory: without a crash, a second time, and then twice for each request of
    its processes that changes something: the process is killed before it sends the request, or after, before the answer
    comes. A worker is killed before each request by which it reads, too. In a test with the marker
    ``exactlyonce_broker`` it runs in processes of its own on the cluster of the fixture `kafka`, killed at failpoints.

    - *inputs*: by source or topic, the records in order: values as the source decodes them, `bytes` as they are, or
      `Record` with key, timestamp and headers. In memory, the timestamp of a message is what the source's ``time=``
      gives, unless it is given. `CRASH` kills a worker that has taken the records before it, in every run.
    - *expected*: by sink or topic, the visible records in any order, likewise; or a function of their values that
      raises AssertionError. None, or a sink left out: what the run without a crash gives.
    - *side_effects*: by name, a function that returns all that the pipeline's functions have done elsewhere so far.
    - *stored*: on a cluster, by sink that writes to another store than Kafka, a function that gives the records that a
      reader of the store sees, in any order. It takes the name that the pipeline's function was given.
    - *crashes_max*: try so many of the crashes, evenly chosen.
    - *drain*: whether all windows close and all timers of event time go off at the end of the inputs, as with
      ``--drain``; else what is open then is not seen.

    Raises AssertionError, which names the crash, and what was lost and doubled; `GraphError` for a pipeline that cannot
    run in memory; the error with which a run of the pipeline ends.

    >>> from exactlyonce import KafkaSink, KafkaSource, Pipeline
    >>> pipeline = Pipeline("doubles")
    >>> numbers = pipeline.source("numbers", KafkaSource("numbers", value=int))
    >>> _ = numbers.map(lambda number: 2 * number, output=int).sink("out", KafkaSink("doubled"))
    >>> assert_exactly_once(pipeline, {"numbers": [1, 2, 3]}, {"out": [2, 4, 6]}, crashes_max=10)
    """
    __tracebackhide__ = True  # pytest shows the caller's line and the message
    kafka = _cluster.get()
    runs: MemoryRuns | BrokerRuns
    if kafka is None:
        runs = MemoryRuns(pipeline, parallelism, drains=drain)
    else:
        runs = BrokerRuns(pipeline, parallelism, kafka, stored or {}, drains=drain)
    runs.scripts = scripts_of(runs.graph, inputs)
    try:
        _Experiment(runs, expected or {}, side_effects or {}).conduct(crashes_max)
    except (AssertionError, ExactlyOnceError) as error:  # the steps of the simulation tell nothing
        raise error.with_traceback(None)  # noqa: B904 - it is the same error


class _Experiment:
    """The runs of one pipeline, and the comparison of what is seen at their ends."""

    def __init__(
        self,
        runs: MemoryRuns | BrokerRuns,
        expected: Mapping[str, Sequence[object] | Check],
        side_effects: Mapping[str, Callable[[], Sequence[Hashable]]],
    ) -> None:
        self._runs, self._graph, self._side_effects = runs, runs.graph, side_effects
        self._expected: dict[str, list[object]] = {}
        self._checks: dict[str, Check] = {}
        for name, wanted in expected.items():
            sink = _named(name, self._graph.sinks, lambda node: node.sink.topic, "sink").id
            if callable(wanted):
                self._checks[sink] = wanted
            else:
                self._expected[sink] = list(wanted)

    def conduct(self, crashes_max: int | None) -> None:
        """See `assert_exactly_once`."""
        run, reference = self._lived(None)
        for sink, wanted in self._expected.items():
            node = self._graph.node(sink)
            with_keys = any(isinstance(record, Record) for record in wanted)
            visible = run.outputs[sink] if with_keys else [(None, value) for _, value in run.outputs[sink]]
            _compare({sink: [*encoded(self._graph, node, wanted)]}, {sink: visible}, "Wrong without any crash")
        again = self._lived(None)[1]
        _compare(reference, again, f"A second run, without any crash either, gives something else. {IMPURE}")
        for crash in self._runs.crashes(crashes_max):
            run, seen = self._lived(crash)
            _compare(reference, seen, f"Not exactly once: {run.crashed}")

    def _lived(self, crash: object) -> tuple[Run, Seen]:
        before = {name: len(effects()) for name, effects in self._side_effects.items()}
        run = self._runs.run(crash)
        for sink, check in self._checks.items():
            try:
                check(_decoded(self._graph, self._graph.node(sink), run.outputs[sink]))
            except AssertionError as error:
                raise AssertionError(f"{run.crashed or 'Without any crash'}: sink {sink!r}: {error}") from error
        seen: Seen = {sink: outputs for sink, outputs in run.outputs.items() if sink not in self._checks}
        for name, effects in self._side_effects.items():
            seen[f"side effect {name}"] = list(effects())[before[name] :]
        return run, seen


def scripts_of(graph: LogicalGraph, inputs: Mapping[str, Sequence[object]]) -> dict[str, Script]:
    """The script of each source, by its id, encoded as it decodes. `GraphError` for a source that cannot be fed."""
    for node in graph.sources:
        if not isinstance(node.source, KafkaSource) or node.source.topic is None or node.source.cluster is not None:
            raise GraphError(
                f"source {node.id!r} reads no topic of the one cluster that this test has: let the function that makes "
                f"the pipeline take the source, and give a KafkaSource without cluster= here"
            )
    scripts: dict[str, Script] = {node.id: [] for node in graph.sources}
    for name, records in inputs.items():
        node = _named(name, graph.sources, lambda node: node.source.topic, "source")
        scripts[node.id] = [_input(node.source, record) for record in records]
    return scripts


def _input(source: Any, record: object) -> InputRecord | Any:
    if record is CRASH:
        return CRASH
    if not isinstance(record, Record):
        return _timed(source, InputRecord(_bytes_of(source.value_codec, record)))
    key = None if record.key is None else _bytes_of(source.key_codec, record.key)
    timestamp_ms = record.timestamp_ms or 0
    return _timed(
        source, InputRecord(_bytes_of(source.value_codec, record.value), key, timestamp_ms, tuple(record.headers))
    )


def _timed(source: Any, record: InputRecord) -> InputRecord:
    """*record* with its event time, if it has a usable one; a run says what is wrong with another."""
    if source.event_time is None:
        return record
    message = Message(
        topic=source.place, partition=0, offset=0, key=record.key, value=record.value, headers=[*record.headers],
        timestamp=(1, record.timestamp_ms), leader_epoch=0,
    )  # fmt: skip
    decoder = source.decoder()
    try:
        (decoded,) = map(decoder.decode, decoder.parts([message]))
        return record._replace(time_ms=max(0, ms_of(source.event_time.function(decoded))))
    except users_errors():
        return record


def _bytes_of(codec: Any, value: object) -> bytes | None:
    return value if value is None or isinstance(value, bytes) else codec.encode(value)


def _named(name: str, nodes: Iterable[Node], topic: Callable[[Any], str | None], kind: str) -> Any:
    """The node of this id, or of this topic."""
    by_id = {node.id: node for node in nodes}
    by_topic = {topic(node): node for node in by_id.values()}
    if name not in by_id and name not in by_topic:
        raise ConfigError(f"The pipeline has no {kind} {name!r}: name one of {', '.join(sorted(by_id))}.")
    return by_id.get(name) or by_topic[name]


def _decoded(graph: LogicalGraph, node: Node, visible: Iterable[OutputRecord]) -> list[Any]:
    """The values that a sink has written."""
    type_ = graph.type_of(node.inputs[0])
    decode = node.sink.codec(type_).decode if isinstance(node.sink, KafkaSink) else msgspec.json.Decoder(type_).decode
    return [None if value is None else decode(value) for _, value in visible]


def _compare(wanted: Seen, seen: Seen, what: str) -> None:
    """Raise AssertionError with *what* and the differences, if there are any."""
    lines = [line for name in wanted for line in _differences(name, Counter(wanted[name]), Counter(seen[name]))]
    if lines:
        raise AssertionError("\n  ".join((what, *lines)))


def _differences(name: str, wanted: Counter[Hashable], seen: Counter[Hashable]) -> Iterator[str]:
    lost, more = wanted - seen, seen - wanted
    doubled = Counter({record: count for record, count in more.items() if record in wanted})
    for kind, records in (("lost", lost), ("doubled", doubled), ("unexpected", more - doubled)):
        for record in [*records][:SHOWN_MAX]:
            times = f" ({seen[record]} times instead of {wanted[record]})" if seen[record] and wanted[record] else ""
            yield f"{name}: {kind}: {_shown(record)}{times}"
        if len(records) > SHOWN_MAX:
            yield f"{name}: {kind}: and {len(records) - SHOWN_MAX} more"


def _shown(record: Hashable) -> str:
    if not isinstance(record, tuple):
        return repr(record)
    key, value = (None if part is None else part.decode(errors="backslashreplace") for part in record)
    return f"{value}" if key is None else f"{value} (key {key})"

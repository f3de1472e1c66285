"""The checks of a whole graph. One pass finds every mistake, with its file and line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from exactlyonce.pipeline import hints, shape
from exactlyonce.pipeline.dead_letters import DEAD_LETTERS
from exactlyonce.pipeline.durations import written_duration
from exactlyonce.pipeline.enrich import Calls
from exactlyonce.pipeline.graph import JOINS, Input, Kind, LogicalGraph, Node
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.map_batches import BatchCalls
from exactlyonce.pipeline.names import checkpoint_topic, name_problem
from exactlyonce.pipeline.records import key_of_message, wire_schema
from exactlyonce.pipeline.sink import delivery_problems
from exactlyonce.pipeline.source import Source
from exactlyonce.pipeline.timed import Expiry, Timed
from exactlyonce.pipeline.timers import Handling
from exactlyonce.pipeline.windows import Revised, Tumbling

MAX_PARALLELISM_MAX = 32_768
_WANTED = {
    Kind.KEY_BY: "an operator with state, as .reduce(id, fn)",
    Kind.FEEDBACK: "a stream's .union(...) with them",
}
"""The missing consumer of unused records by the kind of their node, other than a sink."""
_LETTING_NONE_OUT = (
    Kind.PART, Kind.UNION, Kind.FEEDBACK, Kind.MAP, Kind.PEEK, Kind.WITH_TIME, Kind.KEY_BY, Kind.STATEFUL_MAP,
    Kind.REDUCE, Kind.ENRICH, Kind.WITH_BROADCAST,
)  # fmt: skip
"""The kinds that drop no record."""
_PASSING_ON = (Kind.PART, Kind.FILTER, Kind.PEEK, Kind.WITH_TIME, Kind.KEY_BY, Kind.UNION, Kind.REDUCE)


def check(graph: LogicalGraph, written_at: str) -> Iterator[str]:
    """All mistakes in a graph, each with its line and its remedy; *written_at* is that of the pipeline."""
    yield from (f"{written_at}: {text}" for text in _whole(graph))
    for node in graph.nodes:
        yield from (f"{node.location}: {text}" for text in _node(graph, node))


def _whole(graph: LogicalGraph) -> Iterator[str]:
    if problem := name_problem(graph.pipeline_id):
        yield f"the pipeline's name {problem}"
    if not isinstance(graph.max_parallelism, int) or not 1 <= graph.max_parallelism <= MAX_PARALLELISM_MAX:
        yield f"max_parallelism={graph.max_parallelism!r} must be from 1 to {MAX_PARALLELISM_MAX}"
    if not graph.sources:
        yield "it has no source: start with pipeline.source(id, KafkaSource(...))"
    elif not graph.sinks:
        yield "it has no sink: end with .sink(id, KafkaSink(...))"


def _node(graph: LogicalGraph, node: Node) -> Iterator[str]:
    yield from _ends(graph, node)
    if node.source:
        yield from node.source.problems()
        if node.kind is Kind.SOURCE:
            yield from _source_place(graph, node, node.source)
        if node.source.start_group == graph.pipeline_id:
            yield (
                f"start_group={node.source.start_group!r} is the pipeline's own name, under which its offsets are "
                f"published: the group's would be overwritten. Give the pipeline another name"
            )
    if node.sink:
        yield from _sink(graph, node)
    if node.kind is Kind.KEY_BY:
        yield from _key_by(graph, node)
    if node.kind is Kind.FEEDBACK:
        yield from _loop(graph, node)
    if node.kind is Kind.WITH_TIME or (node.timed is not None and node.timed.goes_by_time):
        yield from _by_time(graph, node)
    elif node.timed is not None:
        yield from node.timed.problems
    if node.lookup is not None:
        yield from node.lookup.problems
    if node.kind in JOINS or node.kind is Kind.CO_PROCESS:
        yield from _sides(graph, node)
    if node.stateful:
        yield from _state(node)
    if node.calls is not None:
        yield from _calls(node.calls)
    if node.batch_calls is not None:
        yield from _batch_calls(graph, node, node.batch_calls)


def _ends(graph: LogicalGraph, node: Node) -> Iterator[str]:
    if node.kind is Kind.SINK:
        return
    if not graph.consumers(node.id) and not (node.kind is Kind.SOURCE and node.outputs):
        wanted = _WANTED.get(node.kind, ".sink(id, ...)")
        if node.fn is key_of_message:
            table = node.inputs[0].node
            yield (
                f"table {table!r} is not used: add .as_of(id, table) or .lookup(id, table) of a keyed stream, a "
                f".join_table(...), a .with_broadcast(id, table, fn) of a stream, or .changes().sink(...), or remove it"
            )
        else:
            yield f"the records of {node.id!r} are not used: add {wanted}, or remove it"
    for output in node.outputs:
        if not graph.consumers(node.id, output):
            yield f"the records of output {output!r} are not used: use .side(...) of it, or remove it"


def _source_place(graph: LogicalGraph, node: Node, source: Source[Any]) -> Iterator[str]:
    """A record is named by its place, so no two sources have one."""
    first = next(other for other in graph.sources if other.source and other.source.place == source.place)
    if not source.place or first is node:
        return
    if source.topic:
        yield f"{first.id!r} already reads topic {source.place!r}: use that stream a second time"
    else:
        yield (
            f"{first.id!r} already reads {source.place!r}, and a record is named by that in checkpoints and by --skip: "
            f"use that stream a second time; or, if the two have other records, give one of them a name="
        )


def _sink(graph: LogicalGraph, node: Node) -> Iterator[str]:
    if node.sink is None:
        return
    type_ = graph.type_of(node.inputs[0])
    if node.sink.needs_type and type_ is UNKNOWN:
        yield _unknown(graph, node.inputs[0], "the sink encodes them by it")
    if node.sink.topic == checkpoint_topic(graph.pipeline_id):
        yield f"topic {node.sink.topic!r} holds the checkpoints: write to another"
    if node.inputs[0].output == DEAD_LETTERS:
        yield from _letters(graph, node.sink.topic)
    yield from delivery_problems(node.sink.delivery, to_kafka=node.sink.topic is not None)
    yield from node.sink.problems(type_)


def _letters(graph: LogicalGraph, topic: str | None) -> Iterator[str]:
    """The mistakes in the *topic* of dead letters: these would be read as input, or as outputs."""
    if any(node.source is not None and node.source.place == topic for node in graph.sources):
        yield f"topic {topic!r} gets dead letters, which the pipeline reads: write them to another"
    for node in graph.sinks:
        if node.sink is not None and node.sink.topic == topic and node.inputs[0].output != DEAD_LETTERS:
            yield f"topic {topic!r} has the outputs of sink {node.id!r}: write dead letters to another"


def _by_time(graph: LogicalGraph, node: Node) -> Iterator[str]:
    above, sides = graph.above(node.id), [read.node for read in node.inputs]
    timing, timed = graph.above(*sides, timing=True).union(sides), node.timed
    if timed is not None:
        yield from timed.problems
    timeless = [source.id for source in graph.sources if source.id in timing and source.source is not None
                and source.source.event_time is None]  # fmt: skip
    if timeless and (timed is None or timed.needs_times):
        yield (
            f"{node.kind.value} goes by event time, and the records of {', '.join(map(repr, timeless))} have none: "
            f"give the source time=, as KafkaSource(..., time=lambda record: record.at)"
        )
    elif timeless and _has_timers(timed) and len(timeless) < len(timing & _ids(graph.sources)):
        yield (
            f"the handler has on_time(), which goes by the event time of all inputs, and the records of "
            f"{', '.join(map(repr, timeless))} have none: no timer would ever go off. Give the source time="
        )
    if isinstance(timed, Expiry) and not timed.problems:
        yield from _expiry(graph, timing, timed)
    if above & _ids(graph.loops):
        yield (
            f"{node.kind.value} cannot take records that come round a loop: how long such a record is on its way "
            f"depends on the run, and so would the results. Put it before the loop, or write the records to a topic "
            f"and read it"
        )
    if node.accumulator is not None and node.accumulator.merge is None and not isinstance(timed, Tumbling):
        kind = "Windows with early= or lateness=" if isinstance(timed, Revised) else f"{type(timed).__name__} windows"
        yield (
            f"{kind} are merged of parts, and fold() has no merge: give it a function of two accumulators, as "
            f"fold(id, new, add, merge)"
        )
    if isinstance(timed, Revised):
        yield from _revised(graph, node)


def _revised(graph: LogicalGraph, node: Node) -> Iterator[str]:
    counting = sorted(other.id for other in graph.after(node) if other.stateful or other.kind is Kind.FEEDBACK)
    if counting:
        yield (
            f"window {node.id!r} with early= or lateness= gives results again, and {', '.join(map(repr, counting))} "
            f"would count each of them: they may only go to sinks, through operators without state. Leave early= and "
            f"lateness= out, or use a second window for the sinks"
        )


def _has_timers(timed: Timed | None) -> bool:
    """Whether it may set timers of event time."""
    return isinstance(timed, Handling) and timed.on_time


def _ids(nodes: Iterable[Node]) -> set[str]:
    return {node.id for node in nodes}


def _expiry(graph: LogicalGraph, timing: set[str], expiry: Expiry) -> Iterator[str]:
    for node in graph.nodes:
        times = node.source.event_time if node.source is not None else None
        disorder_ms = node.disorder_ms if times is None else times.disorder_ms
        if node.id in timing and disorder_ms > expiry.ttl_ms:
            yield (
                f"ttl={expiry.ttl!r} is shorter than disorder={written_duration(disorder_ms)!r} of {node.kind.value} "
                f"{node.id!r}: records in time would find no state of those before them. Raise ttl=, or lower disorder="
            )


def _sides(graph: LogicalGraph, node: Node) -> Iterator[str]:
    sides = [graph.node(read.node) for read in node.inputs]
    if not any(side.partitioned for side in sides):
        return
    sources = {source.id for source in graph.sources} & graph.above(*(side.id for side in sides))
    if not all(side.partitioned for side in sides) or len(sources) > 1:
        yield (
            f"{node.kind.value} needs the records of a key of both sides in one place, and partitioned=True leaves "
            f"them where the partitions of one topic are: leave it out, unless both sides are of one source and have it"
        )


def _state(node: Node) -> Iterator[str]:
    if node.state_type is UNKNOWN:
        if node.kind not in (
            Kind.REDUCE,
            Kind.WINDOW,
            Kind.IN_ORDER,
            Kind.DEDUPLICATE,
            Kind.JOIN_TABLE,
            Kind.BROADCAST,
            *JOINS,
        ):  # these have types of inputs, or another mistake
            yield "the type of the state is unknown: annotate it as the function's first parameter, or give state="
    elif problem := _problem(lambda: node.kept.schema):
        yield f"the state cannot be kept in a checkpoint: {problem}"


def _calls(calls: Calls) -> Iterator[str]:
    yield from calls.problems
    if calls.answer is UNKNOWN:
        yield (
            "the type of the answers is unknown, and they are kept in checkpoints: annotate what the function returns, "
            "as async def fetch(records: list[Order]) -> list[Price], or give output=, the type of one answer"
        )
    elif problem := _problem(lambda: wire_schema(calls.answer)):
        yield f"the answers are kept in checkpoints, and {problem}"


def _batch_calls(graph: LogicalGraph, node: Node, calls: BatchCalls) -> Iterator[str]:
    taken = graph.type_of(node.inputs[0])
    if taken is UNKNOWN:
        yield _unknown(graph, node.inputs[0], "map_batches makes columns of their fields")
    if node.type is UNKNOWN and calls.schema is None:
        yield "schema= must be the type of the outputs, as a Struct, or a pyarrow.Schema"
    yield from calls.problems(taken, node.type)


def _reads_no_topic(node: Node) -> bool:
    return node.source is not None and node.source.topic is None


def _key_by(graph: LogicalGraph, node: Node) -> Iterator[str]:
    if node.type is UNKNOWN:
        yield _unknown(graph, Input(node.id), "they may be sent to another process")
    elif problem := _problem(lambda: wire_schema(node.type)):
        yield f"records may be sent to another process, and {problem}"
    if node.key_type is not UNKNOWN and (problem := _problem(lambda: shape.describe(node.key_type))):
        yield f"the key must be encoded, and {problem}"
    kinds = {*hints.members(node.key_type)} - {UNKNOWN}
    if node.partitioned and kinds - {str, bytes, int}:
        yield (
            f"partitioned= is about the keys of messages, and these are {shape.type_name(node.key_type)}: make key_by "
            f"return text, bytes or an int, as the messages have it, or leave it out"
        )
    above = graph.above(node.id)
    if node.partitioned and above & {edge.stateful for edge in graph.shuffles}:
        yield "partitioned=True is about the source's topic, but the records were shuffled since: leave it out"
    elif node.partitioned and (others := sorted(id for id in above if _reads_no_topic(graph.node(id)))):
        yield f"partitioned=True is about the partitions of a topic, and source {others[0]!r} reads none: leave it out"
    elif node.partitioned and above & {loop.id for loop in graph.loops}:
        yield "partitioned=True is about the source's topic, but records also come from a loop: leave it out"


def _loop(graph: LogicalGraph, node: Node) -> Iterator[str]:
    if node.type is UNKNOWN:
        yield f"the type of the records of loop {node.id!r} is unknown: give it to pipeline.feedback(id, type)"
    elif problem := _problem(lambda: wire_schema(node.type)):
        yield f"the records of a loop are kept in checkpoints, and {problem}"
    if not node.inputs:
        yield f"loop {node.id!r} has no input: give it records by .feed(...) of a stream"
    elif node.id not in (above := graph.above(node.id)):
        yield f"loop {node.id!r} gets no record back from itself: that is no cycle, use .union(...)"
    elif not any(graph.node(node_id).kind is Kind.SOURCE for node_id in above):
        yield f"no record ever enters loop {node.id!r}: unite it with a stream of a source by .union(...)"
    elif not _lets_out(graph, node):
        yield (
            f"no record ever leaves loop {node.id!r}: every operator in it passes on each one. Put a filter, a "
            f"flat_map or a split(...) there, so that only some records are fed back"
        )


def _lets_out(graph: LogicalGraph, loop: Node) -> bool:
    """Whether every path of the loop has an operator that can drop a record."""
    ways, seen = [read.node for read in loop.inputs if read.output is None], set[str]()
    while ways:
        node = graph.node(ways.pop())
        if node is loop:
            return False
        if node.kind in _LETTING_NONE_OUT and node.id not in seen:
            seen.add(node.id)
            ways += [read.node for read in node.inputs if read.output is None]
    return True


def _problem(describe: Callable[[], Any]) -> str | None:
    try:
        describe()
    except shape.UnsupportedType as error:
        return str(error)
    return None


def _unknown(graph: LogicalGraph, origin: Input, why: str) -> str:
    """The mistake of an unknown type, with the operator that it comes from, which may be far upstream."""
    node = graph.node(origin.node)
    while node.kind in _PASSING_ON and node.inputs:
        origin = next((read for read in node.inputs if graph.type_of(read) is UNKNOWN), node.inputs[0])
        node = graph.node(origin.node)
    if origin.output is not None:
        fix = f"give Output({origin.output!r}, type) a type"
    elif node.kind is Kind.SOURCE:
        fix = "give the source a type"
    elif node.kind is Kind.SPLIT:
        fix = "annotate emit: Emit[type] in its function, or give output="
    else:
        fix = "annotate what its function returns, or give output="
    return f"the type of the records is unknown, and {why}. They come from {node.id!r} ({node.location}): {fix}"

"""Pipelines of the simulator, drawn from a seed: the same steps as a `Pipeline` of the public API, and as plain data.

A record knows the input record that it stems from, the branches that it took, and the totals that it was given; so
whoever sees it can say whether it may be there. What a step does to a record is said here once for the engine
(`Event` to `Event`) and stated in words in `Step`; the oracle works from the words.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec

from exactlyonce import Pipeline
from exactlyonce.connectors.kafka.source import KafkaSource
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.output import Output
from exactlyonce.sinks.kafka.sink import KafkaSink

PIPELINE = "p"
ROUND = "@"
CYCLE = 7
"""A key's total begins again after so many: its state is deleted then."""
MAX_PARALLELISM = 8


class Event(msgspec.Struct, frozen=True):
    """A record anywhere in a pipeline."""

    source: str
    partition: int
    offset: int
    first: str
    second: str
    """Two keys."""
    way: str = ""
    """The branches that it took."""
    totals: tuple[int, ...] = ()
    """What the counts on its way made of it."""


class Tally(msgspec.Struct):
    """A state that is changed in place."""

    total: int


@dataclass(frozen=True)
class Step:
    """One node, and what it does.

    - source: gives every record of its topic.
    - branch: passes on every record, with its id in `way`.
    - twice: passes on every record two times, with its id and a mark in `way`.
    - keep: passes on the records whose offset is not 1 modulo 3.
    - split: passes those whose offset is 0 modulo 4 to its side output, "<id>~", all others on.
    - union: passes on what its inputs give.
    - again: passes records to its side output, "<id>~", until its mark is in `way` as often as the offset modulo 4
      says, each time with its id and the mark; then on.
    - loop: passes on what its input gives, which comes after it: a back edge. That of id "back" rests a while.
    - count: appends to `totals` how many records of the same key it has had, 1 to `CYCLE` and again.
    - tally: likewise; its state is a mutable one.
    - sink: writes every record, keyed.
    - store: writes every record, to a store that keeps a ledger.
    """

    kind: str
    id: str
    inputs: tuple[str, ...] = ()
    key: str = "first"
    """Of a count, a tally or a sink: the field that is the key."""


@dataclass(frozen=True)
class Topology:
    """Steps in an order in which each comes after its inputs, but for a loop."""

    name: str
    steps: tuple[Step, ...]
    simple: bool = False

    def of(self, *kinds: str) -> list[Step]:
        """The steps of these kinds."""
        return [each for each in self.steps if each.kind in kinds]

    @property
    def is_stateless(self) -> bool:
        """Whether it is made of chains without state: no subtask has a second input."""
        return not self.of("count", "tally", "union")

    @property
    def loops(self) -> list[str]:
        return [each.id for each in self.of("loop")]

    @property
    def sources(self) -> list[str]:
        return [each.id for each in self.of("source")]

    @property
    def sinks(self) -> list[str]:
        """Those that write to Kafka."""
        return [each.id for each in self.of("sink")]

    @property
    def stores(self) -> list[str]:
        """Those that write to a store."""
        return [each.id for each in self.of("store")]


def topic_of(source: str) -> str:
    """The topic that a source reads. A sink's has the name of the sink."""
    return f"topic-{source}"


# --- for the engine -------------------------------------------------------------------------------------------------


def _branch(id: str) -> Callable[[Event], Event]:
    def branch(event: Event) -> Event:
        return Event(
            event.source, event.partition, event.offset, event.first, event.second, f"{event.way}{id}/", event.totals
        )

    return branch


def _twice(id: str) -> Callable[[Event], Iterator[Event]]:
    one, other = _branch(f"{id}1"), _branch(f"{id}2")

    def twice(event: Event) -> Iterator[Event]:
        yield one(event)
        yield other(event)

    return twice


def _keep(event: Event) -> bool:
    return event.offset % 3 != 1


def _split(output: Output[Event]) -> Callable[[Event, Any], None]:
    def split(event: Event, emit: Any) -> None:
        if event.offset % 4 == 0:
            emit(event, output)
        else:
            emit(event)

    return split


def marked(id: str) -> str:
    """What step *id* adds to `way` of a record that it sends round."""
    return f"{id}{ROUND}/"


def _again(id: str, output: Output[Event]) -> Callable[[Event, Any], None]:
    round_again = _branch(f"{id}{ROUND}")

    def again(event: Event, emit: Any) -> None:
        if event.way.count(marked(id)) < event.offset % 4:
            emit(round_again(event), output)
        else:
            emit(event)

    return again


def _counted(event: Event, total: int) -> Event:
    return Event(
        event.source, event.partition, event.offset, event.first, event.second, event.way, (*event.totals, total)
    )


def _count(total: int | None, event: Event) -> tuple[int | None, Event]:
    total = (total or 0) + 1
    return (None if total == CYCLE else total), _counted(event, total)


def _tally(tally: Tally | None, event: Event) -> tuple[Tally | None, Event]:
    tally = tally or Tally(0)
    tally.total += 1
    return (None if tally.total == CYCLE else tally), _counted(event, tally.total)


def _key(name: str) -> Callable[[Event], str]:
    def first(event: Event) -> str:
        return event.first

    def second(event: Event) -> str:
        return event.second

    return first if name == "first" else second


@lru_cache
def graph_of(topology: Topology) -> LogicalGraph:
    """The topology, which writes to no store, as a pipeline."""
    return built(topology, lambda id: None)


def built(topology: Topology, stored: Callable[[str], Any]) -> LogicalGraph:
    """The topology as a pipeline; *stored* describes a sink that writes to a store."""
    pipeline = Pipeline(PIPELINE, max_parallelism=MAX_PARALLELISM)
    streams: dict[str, Any] = {}
    for step in topology.steps:
        inputs = [streams[each] for each in step.inputs] if step.kind != "loop" else []
        match step.kind:
            case "source":
                streams[step.id] = pipeline.source(step.id, KafkaSource(topic_of(step.id), value=Event))
            case "branch":
                streams[step.id] = inputs[0].map(_branch(step.id), id=step.id)
            case "twice":
                streams[step.id] = inputs[0].flat_map(_twice(step.id), id=step.id, output=Event)
            case "keep":
                streams[step.id] = inputs[0].filter(_keep, id=step.id)
            case "split":
                output = Output("side", Event)
                streams[step.id] = inputs[0].process(step.id, _split(output), outputs=[output], output=Event)
                streams[f"{step.id}~"] = streams[step.id].side(output)
            case "again":
                output = Output("side", Event)
                streams[step.id] = inputs[0].process(step.id, _again(step.id, output), outputs=[output], output=Event)
                streams[f"{step.id}~"] = streams[step.id].side(output)
            case "loop":
                streams[step.id] = pipeline.feedback(step.id, Event, pause="30ms" if step.id == "back" else "0ms")
            case "union":
                streams[step.id] = inputs[0].union(*inputs[1:], id=step.id)
            case "count":
                streams[step.id] = inputs[0].key_by(_key(step.key)).stateful_map(step.id, _count)
            case "tally":
                streams[step.id] = inputs[0].key_by(_key(step.key)).stateful_map(step.id, _tally)
            case "sink":
                inputs[0].sink(step.id, KafkaSink(step.id, key=_key(step.key)))
            case "store":
                inputs[0].sink(step.id, stored(step.id))
    for step in topology.of("loop"):
        streams[step.inputs[0]].feed(streams[step.id])
    return pipeline.build()


# --- drawn ----------------------------------------------------------------------------------------------------------


def chain(count: str = "count") -> Topology:
    """source > count > sink."""
    return Topology(
        "chain", (Step("source", "in"), Step(count, "totals", ("in",)), Step("sink", "out", ("totals",))), simple=True
    )


def several_sinks(count: str) -> Topology:
    """What is read, some of it, and two copies of what is counted."""
    return Topology(
        "sinks",
        (
            Step("source", "in"),
            Step("sink", "seen", ("in",)),
            Step("keep", "some", ("in",)),
            Step("sink", "few", ("some",)),
            Step(count, "totals", ("in",)),
            Step("sink", "out", ("totals",)),
            Step("sink", "copy", ("totals",), "second"),
        ),
    )


def diamond(count: str) -> Topology:
    """A stream parts and meets again."""
    return Topology(
        "diamond",
        (
            Step("source", "in"),
            Step("branch", "left", ("in",)),
            Step("keep", "some", ("in",)),
            Step("twice", "right", ("some",)),
            Step("union", "both", ("left", "right")),
            Step(count, "totals", ("both",)),
            Step("sink", "out", ("totals",)),
        ),
    )


def union(count: str) -> Topology:
    """Two sources, one count."""
    return Topology(
        "union",
        (
            Step("source", "in"),
            Step("source", "more"),
            Step("branch", "other", ("more",)),
            Step("union", "both", ("in", "other")),
            Step(count, "totals", ("both",)),
            Step("sink", "out", ("totals",)),
        ),
    )


def two_shuffles(count: str) -> Topology:
    """Counted by one key, then by another."""
    return Topology(
        "shuffles",
        (
            Step("source", "in"),
            Step("count", "inner", ("in",)),
            Step("sink", "between", ("inner",)),
            Step(count, "totals", ("inner",), "second"),
            Step("sink", "out", ("totals",), "second"),
        ),
    )


def side_outputs(count: str) -> Topology:
    """A part goes its own way, uncounted, and another copy of it is counted."""
    return Topology(
        "sides",
        (
            Step("source", "in"),
            Step("split", "parted", ("in",)),
            Step("sink", "late", ("parted~",)),
            Step(count, "totals", ("parted",)),
            Step(count, "lates", ("parted~",), "second"),
            Step("sink", "out", ("totals",)),
            Step("sink", "counted", ("lates",), "second"),
        ),
    )


def two_sources(count: str) -> Topology:
    """Two sources with a count each, whose updates go to one sink."""
    return Topology(
        "sources",
        (
            Step("source", "in"),
            Step("source", "more"),
            Step(count, "totals", ("in",)),
            Step("count", "others", ("more",), "second"),
            Step("union", "both", ("totals", "others")),
            Step("sink", "out", ("both",)),
            Step("sink", "alone", ("others",), "second"),
        ),
    )


COMPLEX = (several_sinks, diamond, union, two_shuffles, side_outputs, two_sources)
SHAPES = {"chain": chain, "sinks": several_sinks, "diamond": diamond, "union": union, "shuffles": two_shuffles,
          "sides": side_outputs, "sources": two_sources}  # fmt: skip


def with_stores(topology: Topology, *stores: Step, without: tuple[str, ...] = ()) -> Topology:
    """*topology* with sinks that write to a store, and without some of its own."""
    kept = tuple(step for step in topology.steps if step.id not in without)
    return Topology(f"store-{topology.name}", (*kept, *stores), topology.simple)


def store_chain(count: str) -> Topology:
    """What is counted goes to Kafka and to a store."""
    return with_stores(chain(count), Step("store", "rows", ("totals",)))


def store_alone(count: str) -> Topology:
    """To stores only: what is read, and what is counted. There is no transaction of any sink."""
    alone = with_stores(
        chain(count), Step("store", "rows", ("totals",)), Step("store", "raw", ("in",)), without=("out",)
    )
    return Topology("store-alone", alone.steps, simple=True)


def store_diamond(count: str) -> Topology:
    """A stream parts, and meets again; both parts and the whole are stored."""
    return with_stores(
        diamond(count), Step("store", "rows", ("totals",)), Step("store", "lefts", ("left",)),
        Step("store", "rights", ("right",)),
    )  # fmt: skip


def store_shuffles(count: str) -> Topology:
    """Counted by one key, then by another; both go to Kafka and to a store."""
    return with_stores(two_shuffles(count), Step("store", "inners", ("inner",)), Step("store", "rows", ("totals",)))


def stateless(_: str) -> Topology:
    """Maps, filters and flat maps alone."""
    return Topology(
        "stateless",
        (
            Step("source", "in"),
            Step("branch", "mapped", ("in",)),
            Step("keep", "some", ("mapped",)),
            Step("twice", "doubled", ("some",)),
            Step("sink", "out", ("doubled",)),
        ),
        simple=True,
    )


def cycle(count: str) -> Topology:
    """What is counted comes round, up to three times."""
    return Topology(
        "cycle",
        (
            Step("source", "in"),
            Step("loop", "back", ("around~",)),
            Step("union", "both", ("in", "back")),
            Step(count, "totals", ("both",)),
            Step("sink", "every", ("totals",)),
            Step("again", "around", ("totals",)),
            Step("sink", "out", ("around",)),
        ),
    )


def nested(count: str) -> Topology:
    """A loop in a loop, with a count in each."""
    return Topology(
        "nested",
        (
            Step("source", "in"),
            Step("loop", "outer", ("far~",)),
            Step("union", "all", ("in", "outer")),
            Step("count", "firsts", ("all",)),
            Step("loop", "inner", ("near~",)),
            Step("union", "both", ("firsts", "inner")),
            Step(count, "totals", ("both",), "second"),
            Step("again", "near", ("totals",)),
            Step("again", "far", ("near",)),
            Step("sink", "out", ("far",)),
        ),
    )


def mutual(count: str) -> Topology:
    """Two loops that feed each other."""
    return Topology(
        "mutual",
        (
            Step("source", "in"),
            Step("source", "more"),
            Step("loop", "left", ("right-again~",)),
            Step("count", "firsts", ("in",), "second"),
            Step("union", "lefts", ("firsts", "left")),
            Step(count, "totals", ("lefts",)),
            Step("again", "left-again", ("totals",)),
            Step("sink", "out", ("left-again",)),
            Step("loop", "right", ("left-again~",)),
            Step("union", "rights", ("more", "right")),
            Step("count", "others", ("rights",), "second"),
            Step("again", "right-again", ("others",)),
            Step("sink", "copy", ("right-again",), "second"),
        ),
    )


STORE_SHAPES = {"store-chain": store_chain, "store-alone": store_alone, "store-diamond": store_diamond,
                "store-shuffles": store_shuffles}  # fmt: skip
LOOP_SHAPES = {"cycle": cycle, "nested": nested, "mutual": mutual}
NAMED_SHAPES = {**STORE_SHAPES, "stateless": stateless, **LOOP_SHAPES}
"""Reached by name only: what a seed draws without is what it always drew."""
ANY_STORE = "stores"
"""The name of any of them, as drawn."""


@dataclass
class Input:
    """What is written to a source's topic: the two keys of each record, by partition."""

    partitions: list[list[tuple[str, str]]] = field(default_factory=list)
    at_first: int = 0
    """How many of the partitions are there from the beginning."""


def drawn(rng: random.Random, name: str | None = None) -> Topology:
    """Half of all are chains, which are cheap."""
    count = rng.choice(("count", "tally"))
    if name == ANY_STORE:
        return rng.choice(list(STORE_SHAPES.values()))(count)
    if name is not None:
        return (SHAPES | NAMED_SHAPES)[name](count)
    return chain(count) if rng.random() < 0.5 else rng.choice(COMPLEX)(count)


def inputs_for(topology: Topology, rng: random.Random) -> dict[str, Input]:
    """What its sources read."""
    keys = [f"k{i}" for i in range(rng.randint(2, 5))]
    most = 100 if topology.simple else 50
    found = {}
    for source in topology.sources:
        partitions = [
            [(rng.choice(keys), rng.choice(keys)) for _ in range(rng.randint(12, most))]
            for _ in range(rng.randint(1, 3))
        ]
        at_first = len(partitions) - (len(partitions) > 1 and rng.random() < 0.25)
        found[source] = Input(partitions, at_first)
    return found

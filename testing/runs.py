"""Runs of a user's pipeline on the same input, one with each crash: what `assert_exactly_once` asks of a broker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from exactlyonce.pipeline.graph import LogicalGraph, Node
from exactlyonce.pipeline.records import Record
from exactlyonce.sinks.kafka.sink import KafkaSink, encode_key
from exactlyonce.sinks.writer import holds_records
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


class Runs(Protocol):
    """Runs of one pipeline."""

    @property
    def graph(self) -> LogicalGraph:
        """The pipeline as it runs."""

    scripts: Mapping[str, Script]
    """The script of each source, by its id; given before the first run."""

    def run(self, crash: object) -> Run:
        """Run to the end of the input, with *crash*, one of `crashes`, or with none."""

    def crashes(self, most: int | None) -> Iterator[object]:
        """The crashes to try, *most* of them at most; called after a run without one."""

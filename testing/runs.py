"""Runs of a user's pipeline on the same input, one with each crash: what `assert_exactly_once` asks of a broker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.testing.scripted import Crash as ScriptedCrash

T = TypeVar("T")


class InputRecord(NamedTuple):
    """A record of an input topic, as a consumer gets it."""

    value: bytes | None
    key: bytes | None = None
    timestamp_ms: int = 0
    headers: tuple[tuple[str, bytes | None], ...] = ()


Script = Sequence[InputRecord | ScriptedCrash]
OutputRecord = tuple[bytes | None, bytes | None]
"""Key and value."""


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

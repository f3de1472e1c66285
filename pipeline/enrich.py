"""Calls of a service for the records of a stream, as data: `Stream.enrich`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from exactlyonce.pipeline.durations import Duration, duration_ms, duration_problems, write_durations
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.sizes import is_count

R = TypeVar("R")
A = TypeVar("A")


class Enriched(msgspec.Struct, Generic[R, A], frozen=True):
    """A record with the answer of a service."""

    record: R
    answer: A


@dataclass(frozen=True)
class Calls:
    """How the function of `Stream.enrich` is called."""

    answer: Any
    """The type of an answer, or UNKNOWN."""
    batch: int
    """The most records of a call."""
    in_flight: int
    """The most records of all calls at a time, in each subtask."""
    timeout: Duration
    retries: int
    """The further attempts of a call that fails."""

    def __post_init__(self) -> None:
        write_durations(self)

    @property
    def timeout_s(self) -> float:
        return duration_ms(self.timeout, "timeout") / 1000

    @property
    def problems(self) -> list[str]:
        """The mistakes, each with its remedy."""
        problems = []
        if not is_count(self.batch):
            problems.append(f"batch={self.batch!r} must be 1 record or more")
        elif not is_count(self.in_flight, least=self.batch):
            problems.append(f"in_flight={self.in_flight!r} must be {self.batch} or more: the records of a call")
        if not is_count(self.retries, least=0):
            problems.append(f"retries={self.retries!r} must be 0 or more")
        return problems + duration_problems(self.timeout, "timeout")

    def __str__(self) -> str:
        return f"calls of {self.batch}, {self.in_flight} in flight, timeout {self.timeout}, retries {self.retries}"


def enriched_type(record: Any, answer: Any) -> Any:
    """The type of what `enrich` gives, from the types of records and answers."""
    return UNKNOWN if UNKNOWN in (record, answer) else Enriched[record, answer]

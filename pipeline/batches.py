"""Batches: lists of the records of a key, by their number and the clock; what `KeyedStream.batches` makes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

from exactlyonce.pipeline.durations import Duration, duration_ms, duration_problems
from exactlyonce.pipeline.functions import Function
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.output import Emit
from exactlyonce.pipeline.sizes import is_count
from exactlyonce.pipeline.timers import Handling, Timers

T = TypeVar("T")
Begun = tuple[int, list[T]]
"""When a batch is given at the latest, in ms since 1970, and its records."""


@dataclass(frozen=True, kw_only=True)
class Batches(Handling):
    """How records are gathered."""

    count: int | Any
    timeout: Duration | None = None

    @property
    def problems(self) -> list[str]:
        problems = [] if self.timeout is None else duration_problems(self.timeout, "timeout")
        if not is_count(self.count):
            problems.insert(0, f"a batch of {self.count!r} records: give a whole number above 0")
        return problems

    @cached_property
    def timeout_ms(self) -> int | None:
        return None if self.timeout is None else duration_ms(self.timeout, "timeout")

    @property
    def function(self) -> Function:
        """Makes the handler."""
        return Function(partial(Gathers, self), "batches", factory=True)

    def kept_state(self, record: Any) -> Any:
        """The type of the state of a key."""
        return UNKNOWN if record is UNKNOWN else tuple[int, list[record]]

    def describe(self) -> dict[str, Any]:
        return {"batches": self.order}

    def __str__(self) -> str:
        return f"of {self.count}" + (f", after {self.timeout} at the latest" if self.timeout else "")


class Gathers(Generic[T]):
    """The handler."""

    def __init__(self, batches: Batches) -> None:
        self._count, self._timeout_ms = batches.count, batches.timeout_ms

    def on_record(
        self, key: Any, begun: Begun[T] | None, record: T, timers: Timers, emit: Emit[list[T]]
    ) -> Begun[T] | None:
        if begun is None:
            begun = (0 if self._timeout_ms is None else (timers.clock.now_ms or 0) + self._timeout_ms), []
            if self._timeout_ms is not None:
                timers.clock.set(begun[0])
        end_ms, records = begun
        records.append(record)
        if len(records) < self._count:
            return begun
        if self._timeout_ms is not None:
            timers.clock.delete(end_ms)
        emit(records)
        return None

    def on_clock(self, key: Any, begun: Begun[T] | None, at: datetime, timers: Timers, emit: Emit[list[T]]) -> None:
        if begun is not None:
            emit(begun[1])

"""Operators that wait for the time of records: sorting them, and leaving out duplicates."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

from exactlyonce.pipeline.durations import Duration, duration_ms, duration_problems
from exactlyonce.pipeline.expiry import shared_slot
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.timed import Timed
from exactlyonce.pipeline.timers import Order


@dataclass(frozen=True)
class InOrder(Timed):
    """Gives the records of a key by time. A slot is the time of its records."""

    @property
    def problems(self) -> list[str]:
        return []

    def describe(self) -> dict[str, Any]:
        return {"in_order": "time"}

    def __str__(self) -> str:
        return "in order of time"

    def kept_state(self, record: Any) -> Any:
        """The type of what is kept for a slot: the records, each with its topic, partition and offset."""
        return UNKNOWN if record is UNKNOWN else list[tuple[str, int, int, record]]


@dataclass(frozen=True)
class Deduplicate(Timed):
    """Leaves out the records of a key within a time after one that it has given.

    A slot is the time of held records, or an end of the time after a record that was given: these share slots.
    """

    within: Duration
    order: Order | Any = "time"
    by_key = True

    @property
    def problems(self) -> list[str]:
        """The mistakes, each with its remedy."""
        problems = duration_problems(self.within, "within")
        if self.order not in get_args(Order):
            problems.append(f"order={self.order!r} must be one of {', '.join(map(repr, get_args(Order)))}")
        return problems

    def describe(self) -> dict[str, Any]:
        return {"deduplicate": self.within_ms, "order": self.order}

    def __str__(self) -> str:
        return f"within {self.within}, in order of {self.order}"

    @cached_property
    def within_ms(self) -> int:
        return duration_ms(self.within)

    def slot(self, time: int) -> int:
        """The slot that remembers a record that was given at *time*: none that it leaves out comes later.

        The table is fast with few slots. Two records of a key that are given are `within` apart, so each has its own.
        """
        return shared_slot(time + self.within_ms - 1, self.within_ms)

    def kept_state(self, record: Any) -> Any:
        """The type of what is kept for a slot: the time of a record that was given, and held records; see `InOrder`."""
        held = InOrder().kept_state(record)
        if self.order == "arrival":
            return int
        return UNKNOWN if held is UNKNOWN else tuple[int | None, held]  # type: ignore[valid-type]  # known here only

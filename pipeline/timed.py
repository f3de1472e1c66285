"""The description of an operator that keeps its state by time: the base, and `ttl=`, `in_order` and `deduplicate`.
Windows, joins and timers have modules of their own.

The engine makes the operator by the class of it, and all refusals and descriptions go by its facts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

from exactlyonce.pipeline.durations import Duration, duration_ms, duration_problems, write_durations
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.versions import VersionedState, parameter_type

Order = Literal["time", "arrival"]
"""How an operator takes the records of a key."""


class Timed(ABC):
    """How an operator keeps its state by time: a frozen dataclass."""

    def __post_init__(self) -> None:
        write_durations(self)

    @property
    def by_key(self) -> bool:
        """Whether the operator asks for the slots of a key."""
        return False

    @property
    def goes_by_time(self) -> bool:
        """Whether its slots are times. If not, it only needs a table in which a key has several states."""
        return True

    @property
    def needs_times(self) -> bool:
        """Whether all of its records must have event times."""
        return True

    @property
    def has_clock(self) -> bool:
        """Whether it goes by the clock, too. Its results then depend on the run."""
        return False

    @property
    def holds_records(self) -> bool:
        """Whether it holds each record until the watermark is there: what is read far ahead is much to hold."""
        return False

    @property
    def of_several_keys(self) -> bool:
        """Whether a state has entries of several keys of a key group."""
        return False

    @property
    @abstractmethod
    def problems(self) -> list[str]:
        """The mistakes, each with its remedy."""

    def state_of(self, entry: Any) -> Any:
        """The type of the state that the user's function has, in what is kept as *entry*."""
        return entry

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What its slots stand for, by name, with sizes in ms. State of another meaning is not read as this."""

    @abstractmethod
    def __str__(self) -> str:
        """It in a line, for `explain`."""


SLOTS = 16
"""The slots of a time to live, or of what is left out as a duplicate: a state moves to a later one so often at most."""


def shared_slot(end_ms: int, span_ms: int) -> int:
    """The slot of what is over at *end_ms* and was kept for *span_ms*: at or less than a part of the span after it.

    >>> shared_slot(1_001, 160), shared_slot(1_010, 160), shared_slot(1_001, 15)
    (1010, 1010, 1001)
    """
    return end_ms + -end_ms % max(1, span_ms // SLOTS)


@dataclass(frozen=True)
class Expiry(Timed):
    """A state has expired for a record *ttl* or more after the last record of its key.

    What is kept of a key is (the time of its last record in ms, its state). Its slot ends at or after the moment from
    which no record finds it.
    """

    ttl: Duration | Any
    by_key = True

    @property
    def problems(self) -> list[str]:
        return duration_problems(self.ttl, "ttl")

    @cached_property
    def ttl_ms(self) -> int:
        return duration_ms(self.ttl, "ttl")

    def slot(self, last_ms: int) -> int:
        """The slot of a state whose last record was at *last_ms*."""
        return shared_slot(last_ms + self.ttl_ms, self.ttl_ms)

    def state_of(self, entry: Any) -> Any:
        return get_args(entry)[1]

    def describe(self) -> dict[str, Any]:
        return {"ttl": self.ttl_ms}

    def __str__(self) -> str:
        return f"ttl {self.ttl}"


def kept_until(kept: VersionedState) -> VersionedState:
    """What is kept of a key whose state is *kept*: the time of its last record, too."""
    return replace(
        kept,
        type=entry_type(kept.type),
        migrations={version: _migrated(migrate) for version, migrate in kept.migrations.items()},
    )


def entry_type(state: Any) -> Any:
    """The type of what is kept of a key with *state*."""
    return UNKNOWN if state is UNKNOWN else tuple[int, state]


def _migrated(migrate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def migrated(entry: Any) -> Any:
        return (entry[0], migrate(entry[1]))

    migrated.__annotations__ = {"entry": entry_type(parameter_type(migrate))}
    return migrated


@dataclass(frozen=True)
class InOrder(Timed):
    """Gives the records of a key by time. A slot is the last time in its blocks of records."""

    holds_records = of_several_keys = True

    @property
    def problems(self) -> list[str]:
        return []

    def describe(self) -> dict[str, Any]:
        return {"in_order": "time", "in": "blocks"}

    def __str__(self) -> str:
        return "in order of time"

    def kept_state(self, record: Any) -> Any:
        """The type of a block: the records, each with its time, key, key group, topic, partition and offset."""
        return UNKNOWN if record is UNKNOWN else list[tuple[int, bytes, int, str, int, int, record]]


@dataclass(frozen=True)
class Deduplicate(Timed):
    """Leaves out the records of a key within a time after one that it has given.

    A slot is the last time in its blocks of held records, or an end of the time after records that were given.
    """

    within: Duration
    order: Order | Any = "time"
    of_several_keys = True

    @property
    def holds_records(self) -> bool:
        return bool(self.order == "time")

    @property
    def problems(self) -> list[str]:
        """The mistakes, each with its remedy."""
        problems = duration_problems(self.within, "within")
        if self.order not in get_args(Order):
            problems.append(f"order={self.order!r} must be one of {', '.join(map(repr, get_args(Order)))}")
        return problems

    def describe(self) -> dict[str, Any]:
        return {"deduplicate": self.within_ms, "order": self.order, "in": "blocks"}

    def __str__(self) -> str:
        return f"within {self.within}, in order of {self.order}"

    @cached_property
    def within_ms(self) -> int:
        return duration_ms(self.within)

    def slots(self, times: Iterable[int]) -> list[int]:
        """The slots that remember records given at *times*, until none that one leaves out can come.

        The table is fast with few slots. Two records of a key that are given are `within` apart, so each has its own.
        """
        after, width = self.within_ms - 1, max(1, self.within_ms // SLOTS)
        return [time + after + -(time + after) % width for time in times]

    def kept_state(self, record: Any) -> Any:
        """The type of a block: the keys and the times of records that were given, packed, and held records; see
        `InOrder`."""
        held = InOrder().kept_state(record)
        if self.order == "arrival":
            return tuple[bytes, bytes]
        return UNKNOWN if held is UNKNOWN else tuple[bytes, bytes, held]  # type: ignore[valid-type]  # known here only

"""Joins of two keyed streams, left and right: which records of a key belong together, in milliseconds.

Invariant: whether two records belong together depends on their own times and floors, never on which of them came first;
`Lookup` alone goes by arrival.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Literal, TypeVar, get_args

import msgspec

from exactlyonce.pipeline import hints
from exactlyonce.pipeline.durations import Duration, duration_ms, duration_problems
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.timed import Timed
from exactlyonce.pipeline.windows import Window, Windowed, kept_state, window_problems

K = TypeVar("K")
L = TypeVar("L")
R = TypeVar("R")

How = Literal["inner", "left", "right", "full"]
"""The side whose records come out alone, too, if they have no match: neither, one, or both."""
Enrichment = Literal["inner", "left"]


class Joined(msgspec.Struct, Generic[K, L, R], frozen=True):
    """A record of each side of a join, with their key; None stands for a missing one."""

    key: K
    left: L
    right: R


class Pair(msgspec.Struct, Generic[L, R], frozen=True):
    """A record of each side of a join in a window; None stands for a missing one."""

    left: L
    right: R


def result_type(join: Join, key: Any, left: Any, right: Any) -> Any:
    """The type of what *join* gives, from the types of keys and records."""
    left = hints.union([*hints.members(left), type(None)]) if join.how in ("right", "full") else left
    right = hints.union([*hints.members(right), type(None)]) if join.how in ("left", "full") else right
    if isinstance(join, WindowJoin):
        return Windowed[key, Pair[left, right]]
    return Joined[key, left, right]


def _how_problems(how: str, allowed: Any) -> list[str]:
    names = get_args(allowed)
    return [] if how in names else [f"how={how!r} must be one of {', '.join(map(repr, names))}"]


def _versions(record: Any, *, changelog: bool) -> Any:
    args = get_args(record) if changelog else (record,)
    return hints.without_none(args[0]) if args else hints.UNKNOWN


def _signed_ms(bound: Duration) -> int:
    if isinstance(bound, str) and bound.strip().startswith("-"):
        return -duration_ms(bound.strip()[1:], "within=")
    return duration_ms(bound, "within=")


@dataclass(frozen=True)
class IntervalJoin(Timed):
    """A left record at time t belongs to the right ones from t + *earliest* to t + *latest*, both inclusive."""

    earliest: Duration
    latest: Duration
    how: str = "inner"
    by_key = True
    holds_records = True

    @property
    def problems(self) -> list[str]:
        """The mistakes, each with its remedy."""
        problems = _how_problems(self.how, How)
        try:
            if self.earliest_ms > self.latest_ms:
                problems.append(
                    f"within=({self.earliest!r}, {self.latest!r}) is empty: give the earlier bound first, as "
                    f'within=("-5m", "1h")'
                )
        except ConfigError as error:
            problems.append(str(error).removesuffix("."))
        return problems

    @cached_property
    def earliest_ms(self) -> int:
        return _signed_ms(self.earliest)

    @cached_property
    def latest_ms(self) -> int:
        return _signed_ms(self.latest)

    @property
    def left_ms(self) -> int:
        """The time after a left record at which the last right one may match it."""
        return max(0, self.latest_ms)

    @property
    def right_ms(self) -> int:
        """The time after a right record at which the last left one may match it."""
        return max(0, -self.earliest_ms)

    def right(self, record: Any) -> Any:
        """The type of right sides, from the type of the right records."""
        return record

    def describe(self) -> dict[str, Any]:
        return {"from": self.earliest_ms, "to": self.latest_ms, "how": self.how}

    def kept_state(self, left: Any, right: Any) -> Any:
        """The type of a state: (time, whether it has a match, record) of each left and each right record."""
        return tuple[list[tuple[int, bool, left]], list[tuple[int, bool, right]]]

    def __str__(self) -> str:
        return f"{self.how} within {self.earliest} to {self.latest}"


@dataclass(frozen=True)
class WindowJoin(Timed):
    """A left record belongs to all right ones of its window."""

    window: Window
    how: str = "inner"
    holds_records = True

    @property
    def by_key(self) -> bool:
        return self.window.by_key

    @property
    def problems(self) -> list[str]:
        """The mistakes, each with its remedy."""
        return [*_how_problems(self.how, How), *window_problems(self.window)]

    def right(self, record: Any) -> Any:
        """The type of right sides, from the type of the right records."""
        return record

    def describe(self) -> dict[str, Any]:
        return {**self.window.describe(), "how": self.how}

    def kept_state(self, left: Any, right: Any) -> Any:
        """The type of a state: (time, topic, partition, offset, record) of each left and each right record."""
        lefts, rights = (list[tuple[int, str, int, int, of]] for of in (left, right))  # type: ignore[valid-type]  # made here
        return kept_state(self.window, tuple[lefts, rights])  # type: ignore[valid-type]  # likewise

    def __str__(self) -> str:
        return f"{self.how} in {self.window}"


@dataclass(frozen=True)
class AsOf(Timed):
    """A left record belongs to the newest version of its key at or before its time."""

    keep: Duration = "0s"
    how: str = "left"
    changelog: bool = False
    """Whether the versions are values of `Record`, as in a table."""
    holds_records = of_several_keys = True

    @property
    def problems(self) -> list[str]:
        """The mistakes, each with its remedy."""
        return [*_how_problems(self.how, Enrichment), *duration_problems(self.keep, "keep", least_ms=0)]

    @cached_property
    def keep_ms(self) -> int:
        return duration_ms(self.keep, "keep")

    def right(self, record: Any) -> Any:
        """The type of versions, from the type of the right records."""
        return _versions(record, changelog=self.changelog)

    def describe(self) -> dict[str, Any]:
        return {"as_of": self.keep_ms, "how": self.how, "in": "blocks"}

    def kept_state(self, left: Any, right: Any) -> Any:
        """The type of a state: (time, key, topic, partition, offset, floor, record) of each left record of a block, and
        (time, topic, partition, offset, the time from which it counts, value) of each version of a key."""
        value = hints.union([*hints.members(right), type(None)])
        lefts = list[tuple[int, bytes, str, int, int, int, left]]
        versions = list[tuple[int, str, int, int, int, value]]  # type: ignore[valid-type]  # likewise
        return tuple[lefts, versions]

    def __str__(self) -> str:
        return f"{self.how} as of, keep {self.keep}"


@dataclass(frozen=True)
class Lookup:
    """A left record belongs to the version of its key that came last, in order of arrival."""

    how: str = "left"
    changelog: bool = False

    @property
    def problems(self) -> list[str]:
        """The mistakes, each with its remedy."""
        return _how_problems(self.how, Enrichment)

    def right(self, record: Any) -> Any:
        """The type of versions, from the type of the right records."""
        return _versions(record, changelog=self.changelog)

    def describe(self) -> dict[str, Any]:
        return {"lookup": True, "how": self.how}

    def kept_state(self, left: Any, right: Any) -> Any:
        """The type of a state: a version."""
        return right

    def __str__(self) -> str:
        return f"{self.how} by arrival"


Join = IntervalJoin | WindowJoin | AsOf | Lookup

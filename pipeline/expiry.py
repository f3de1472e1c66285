"""Expiry: how long a key's state is kept after its last record; what `ttl=` of an operator with state makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, get_args

from exactlyonce.pipeline.durations import Duration, duration_ms, duration_problems
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.timed import Timed
from exactlyonce.pipeline.versions import VersionedState, parameter_type

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

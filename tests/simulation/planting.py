"""A planted defect: a rule of the protocol left out of shipped code, and what the oracle says of what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest.mock import patch

from exactlyonce.engines.bounded.unit import ordering
from exactlyonce.pipeline.errors import Halt, require

STATE = r"the state of \w+ at checkpoint \d+ is not that of the input before Sn"
COUNT = r"sink \w+ of checkpoint \d+ has \d+ records, not \d+"
DISORDER = r"comes out of order in|comes instead of|stems from another record in|and .* in another sink"
TWICE = r"is visible twice in"
TWICE_ON_ITS_WAY = r"is twice on its way to"
LEFT = r"leaves .* behind, which nothing refers to"
SWEPT = r"writes though it was swept"
OPEN = r"is left |have been open for longer|are held back"
STUCK = r"the job has not come to its end|shows \d+ of \d+ decided records"
ABORTED = r"is aborted though it is decided"
TOMBSTONED = r"stands on block .*, which is tombstoned"
UNCOMMITTED = r"is finalized though it is not committed"
UNNAMED = r"is committed though no durable record names it"
LATE = r"no checkpoint completes within \d+ ms"
CROWDED = r"\d+ records wait before \w+, and \d+ at most leave it in \d+ ms"
RETAKEN = r"is used again before its checkpoint is finalized"

WRONG = f"{STATE}|{COUNT}"
REPEATED = f"{DISORDER}|{TWICE}"
OVERLOADED = f"{LATE}|{CROWDED}"

Patch = AbstractContextManager[Any]
Patches = Callable[[], Iterable[Patch]]


class Mutant(NamedTuple):
    patches: Patches
    expected: str
    """A pattern, found in the message."""
    shape: str | None = None
    """The topology in which it shows; None: any."""
    luck: str | None = None
    """The luck with which it shows; None: any."""
    first: int = 0
    """The seed from which it is looked for: those before are known not to show it."""


MUTANTS: dict[str, Mutant] = {}
"""Mutants by name."""


def mutant(name: str, expected: str, *patches: Patch, **where: Any) -> Callable[[Patches], None]:
    """Enter a mutant that *patches* plant; without them this decorates what gives them."""

    def enter(planting: Patches) -> None:
        MUTANTS[name] = Mutant(planting, expected, **where)

    if patches:
        enter(lambda: patches)
    return enter


def in_place_of(owner: Any, name: str, *more: Patch) -> Callable[[Callable[..., Any]], Patches]:
    """Plant the decorated function in place of *owner*'s *name*, which it gets as its first argument."""

    def planting(defect: Callable[..., Any]) -> Patches:
        return lambda: (replaced(owner, name, defect), *more)

    return planting


def replaced(owner: Any, name: str, defect: Callable[..., Any]) -> Patch:
    real = getattr(owner, name)
    return patch.object(owner, name, lambda *given, **named: defect(real, *given, **named))


def unchecked(module: Any, rule: str) -> Patch:
    """A context in which *module* does not check *rule*, which would notice the defect before the oracle does."""
    return patch.object(module, "require", lambda holds, what: require(holds or what.startswith(rule), what))


def unfitting() -> Patch:
    """A context in which a replay silently takes by time what an order log that does not fit leaves over."""

    def take_along(real: Any, lanes: Any, sources: Any, logs: Any, operators: Any, left: Any = None) -> None:
        try:
            real(lanes, sources, logs, operators, left)
        except Halt:
            ordering.take_by_time(lanes, {}, operators, ordering.BatchTime())

    return replaced(ordering, "take_along", take_along)

"""The findings of an examination: what is wrong, whose it is, what to do; and what could not be looked at.

Invariants: a check that was not made, or not whole, is among `unchecked` with the reason: silence means that it was
made and found nothing. A question that fails takes no other check with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from exactlyonce.pipeline.errors import BrokerRefused, Halt, UserError

PROBLEM, NOTE = "problem", "note"
"""A note is worth knowing, and nothing has to be done: it goes away by itself, or with the next run."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """One thing that is not as it should be."""

    about: str
    """The kind of check, in a word."""
    what: str
    """The fault, as a sentence without its full stop."""
    whose: str = ""
    """Who has to do something about it, or whose transaction it is; empty: that is plain from `what`."""
    do: str
    """The remedy."""
    run: tuple[str, ...] = ()
    """Commands that do it, or begin it."""
    level: str = PROBLEM


class Unchecked(NamedTuple):
    """A check that was not made, or not whole."""

    what: str
    why: str
    failed: bool = False
    """It was to be looked at, and a question about it had no answer, or was refused."""


@dataclass
class Findings:
    """All of one examination."""

    diagnoses: list[Diagnosis] = field(default_factory=list)
    unchecked: list[Unchecked] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    """The checks that were made."""

    @property
    def problems(self) -> int:
        """How many things are wrong."""
        return sum(each.level == PROBLEM for each in self.diagnoses)

    @property
    def failed(self) -> int:
        """How many checks could not be made, though they were to be."""
        return sum(each.failed for each in self.unchecked)

    def add(
        self, about: str, what: str, *, do: str, run: Iterable[str] = (), whose: str = "", level: str = PROBLEM
    ) -> None:
        """Something was found."""
        self.diagnoses.append(Diagnosis(about=about, what=what, whose=whose, do=do, run=tuple(run), level=level))

    def not_checked(self, what: str, why: str, *, failed: bool = False) -> None:
        """Something was not looked at."""
        self.unchecked.append(Unchecked(what, why, failed))

    @contextmanager
    def checking(self, what: str) -> Iterator[None]:
        """While *what* is looked at: whatever keeps it from being looked at to the end is why it is not checked."""
        try:
            yield
        except (UserError, BrokerRefused, Halt) as error:
            self.not_checked(what, str(error), failed=True)
        else:
            self.checked.append(what)

"""The findings of an examination: each fault with its owner and its remedy, and the checks that could not be made.

Invariants: a check that was not made, or not whole, is among `unchecked` with the reason; silence means that it was
made and found nothing. A failed check is reported; the others still run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from exactlyonce.pipeline.errors import BrokerRefused, Halt, UserError

PROBLEM, NOTE = "problem", "note"
"""A note needs no action: it goes away by itself, or with the next run."""
CAUSES = ("rights", "settings", "stores", "inputs", "blocks", "decisions", "readers")
"""Kinds of checks: each can be the cause of what a later one finds. A kind that is not here comes first."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """One fault, or a note."""

    about: str
    """The kind of check, in a word."""
    what: str
    """The fault, as a sentence without its full stop."""
    whose: str = ""
    """The owner of the fault or of the transaction; empty: plain from `what`."""
    do: str
    """The remedy."""
    run: tuple[str, ...] = ()
    """Commands for the remedy."""
    level: str = PROBLEM


class Unchecked(NamedTuple):
    """A check that was not made, or not whole."""

    what: str
    why: str
    failed: bool = False
    """A request for it had no answer, or was refused."""


@dataclass
class Findings:
    diagnoses: list[Diagnosis] = field(default_factory=list)
    unchecked: list[Unchecked] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    """The checks that were made."""

    @property
    def in_order(self) -> list[Diagnosis]:
        """Problems before notes, and what may be a cause before its effects."""

        def rank(diagnosis: Diagnosis) -> tuple[bool, int]:
            kind = diagnosis.about
            return diagnosis.level == NOTE, CAUSES.index(kind) if kind in CAUSES else -1

        return sorted(self.diagnoses, key=rank)

    @property
    def problems(self) -> int:
        """The number of problems."""
        return sum(diagnosis.level == PROBLEM for diagnosis in self.diagnoses)

    @property
    def failed(self) -> int:
        """The number of failed checks."""
        return sum(unchecked.failed for unchecked in self.unchecked)

    def add(
        self, about: str, what: str, *, do: str, run: Iterable[str] = (), whose: str = "", level: str = PROBLEM
    ) -> None:
        self.diagnoses.append(Diagnosis(about=about, what=what, whose=whose, do=do, run=tuple(run), level=level))

    def not_checked(self, what: str, why: str, *, failed: bool = False) -> None:
        self.unchecked.append(Unchecked(what, why, failed))

    @contextmanager
    def checking(self, what: str) -> Iterator[None]:
        """Check *what*; an error means that it is not checked."""
        try:
            yield
        except (UserError, BrokerRefused, Halt) as error:
            self.not_checked(what, str(error), failed=True)
        else:
            self.checked.append(what)

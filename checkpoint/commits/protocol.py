"""The seam between a leader and a family of sinks: how their committables are committed.

Invariants: only committables that a durable manifest or repair names are committed; commits are repeated, by any
process, until the fate is known; an answer that fits both "done" and "lost" proves nothing. All are procedures, run by
one leader, one at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from exactlyonce.checkpoint.records.committable import Precommit
from exactlyonce.checkpoint.records.manifest import Incarnation, Manifest, Repair, StagedAck
from exactlyonce.checkpoint.requests import Outputs, Procedure
from exactlyonce.pipeline.errors import BrokerUnavailable, ExactlyOnceError


@dataclass(frozen=True)
class Refuse:
    """The checkpoint was not decided: it never happened."""

    reason: str

    def __str__(self) -> str:
        return self.reason


Check = Procedure[Refuse | None]
"""A condition of a decision."""


def objection(check: Check) -> Procedure[Refuse | ExactlyOnceError | None]:
    """The objection to the decision, or None. An error is returned, to be raised once nothing is under way."""
    try:
        return (yield from check)
    except BrokerUnavailable as error:
        return Refuse(str(error))
    except ExactlyOnceError as error:
        return error


def gravest(objections: Sequence[Refuse | ExactlyOnceError | None]) -> Refuse | ExactlyOnceError | None:
    """An error before a refusal: a fault for people is not hidden by one that a restart fixes."""
    errors = (problem for problem in objections if isinstance(problem, Exception))
    return next(errors, None) or next((problem for problem in objections if problem is not None), None)


class Planned(Protocol):
    """The output of a checkpoint that is to be decided."""

    @property
    def precommits(self) -> Sequence[Precommit]: ...

    @property
    def ages_ms(self) -> Mapping[str, int]:
        """How long each precommit's transaction has been open, by transactional id."""

    @property
    def staged(self) -> Sequence[StagedAck]: ...


@dataclass(frozen=True)
class Fates:
    """The fates of a manifest's committables after their commit."""

    known: Mapping[str, str] = field(default_factory=dict)
    """The fates of committed ones, by name."""
    unsettled: Mapping[str, str] = field(default_factory=dict)
    """The state of the others, by name: "refused", "unknown", "held" by an earlier one. See `finish`."""


class CommitProtocol(ABC):
    """The commit of one family of sinks. A leader calls these in order; the defaults do nothing."""

    # --- recovery

    @abstractmethod
    def begin(self, incarnation: Incarnation, fenced_below: tuple[int, int], origin: str) -> None:
        """*incarnation* leads. Attempts before *fenced_below* (incarnation, attempt) are fenced permanently.

        *origin* is the id of the checkpoint topic.
        """

    @abstractmethod
    def begin_attempt(self, attempt: int) -> None:
        """The previous attempt's workers are dead: forget what they acknowledged and nobody decided."""

    def hasten(self, unfinalized: Manifest, repairs: Iterable[Repair]) -> Procedure[None]:
        """Commit those committables of *unfinalized* that cannot wait for another family's stores."""
        yield from ()

    def fence(self, newest: Manifest | None, finalized: Manifest | None) -> Procedure[None]:
        """Let no older incarnation commit undecided output, as far as that can be done before `finish`.

        Raises Halt if the committed output contradicts the decisions. *newest* is the newest manifest, *finalized* the
        newest finalized one.
        """
        yield from ()

    @abstractmethod
    def finish(
        self, manifest: Manifest, repairs: Iterable[Repair], *, accept_loss: bool
    ) -> Procedure[Mapping[str, str]]:
        """Commit, prove or repair all committables of *manifest*, which is decided; returns their fates by name.

        No sink of the pipeline runs. Raises Halt, with the choices, if one is lost; with *accept_loss* it is given up
        instead.
        """

    def clean(self) -> Procedure[None]:
        """All decisions are committed, and no worker runs: fence older attempts, then drop what they left."""
        yield from ()

    # --- decisions

    def acknowledged(self, precommits: Iterable[Precommit], outputs: Outputs) -> Procedure[None]:
        """Look at *precommits* as they come. Facts that are not known yet are left to `prepare`.

        *outputs* are the topics that sinks write to, by the last look.
        """
        yield from ()

    def prepare(self, plan: Planned, checks: Callable[[], Sequence[Check]]) -> Procedure[Refuse | None]:
        """Find the committables of *plan*; *checks* come first, and may refuse it."""
        yield from ()
        return None

    @abstractmethod
    def entered(self, manifest: Manifest, plan: Planned, before: Manifest | None) -> Manifest:
        """*manifest* with the committables of *plan*, which is prepared; *before* is the newest manifest so far."""

    def check(self, plan: Planned) -> Check:
        """Refuse *plan* unless all of it can still be committed. Called when all have acknowledged."""
        yield from ()
        return None

    @abstractmethod
    def commit(self, manifest: Manifest) -> Procedure[Fates]:
        """Commit the committables of *manifest*, which has just become durable."""

    # --- during the run, and at its end

    def watch(self) -> Procedure[None]:
        """Now and then: fence zombies that have come back, where they could do harm."""
        yield from ()

    def conclude(self, checkpoint: int) -> Procedure[None]:
        """After a clean stop at *checkpoint*: Halt unless readers see all committed output."""
        yield from ()

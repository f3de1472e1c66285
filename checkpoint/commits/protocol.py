"""The seam between a leader and a family of sinks: how what they have pre-committed comes to be committed.

Invariants: nothing is committed that no durable manifest, or repair, names; what a manifest names is asked to be
committed until its fate is known, by whichever process, as often as it takes; no answer that "it was done" and "it was
lost" share proves anything. All are procedures, run by one leader, one at a time.
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
    """The objection to the decision, or None. An error is kept until nothing is under way any more."""
    try:
        return (yield from check)
    except BrokerUnavailable as error:
        return Refuse(str(error))
    except ExactlyOnceError as error:
        return error


def gravest(objections: Sequence[Refuse | ExactlyOnceError | None]) -> Refuse | ExactlyOnceError | None:
    """An error before a refusal: what needs a person is not hidden by what a restart would fix."""
    errors = (each for each in objections if isinstance(each, Exception))
    return next(errors, None) or next((each for each in objections if each is not None), None)


class Planned(Protocol):
    """What the sinks have acknowledged for a checkpoint that is to be decided."""

    @property
    def precommits(self) -> Sequence[Precommit]: ...

    @property
    def ages_ms(self) -> Mapping[str, int]:
        """How long each precommit's transaction has been open, by transactional id."""

    @property
    def staged(self) -> Sequence[StagedAck]: ...


class Acknowledgement(Protocol):
    """What the sinks of one subtask have acknowledged for a checkpoint."""

    @property
    def precommits(self) -> Sequence[Precommit]: ...


@dataclass(frozen=True)
class Fates:
    """Those of the committables of a manifest, once their commit was asked for; each is in one of both."""

    known: Mapping[str, str] = field(default_factory=dict)
    """By name, the fates of those that are known to be committed."""
    unsettled: Mapping[str, str] = field(default_factory=dict)
    """By name, why it is not known of the others: "refused", "unknown", "held" behind an earlier one. See `finish`."""


class CommitProtocol(ABC):
    """Of one family of sinks. What a leader calls, in the order in which it does; what a family has no need of does
    nothing."""

    # --- recovery

    @abstractmethod
    def begin(self, incarnation: Incarnation, fenced_below: tuple[int, int], origin: str) -> None:
        """*incarnation* leads, in an attempt of which nothing is known yet. Nothing is asked.

        Whoever belongs to an attempt before *fenced_below* (incarnation, attempt) was fenced for good. *origin* is the
        id of the checkpoint topic.
        """

    @abstractmethod
    def begin_attempt(self, attempt: int) -> None:
        """The workers of the attempt before are dead: what they acknowledged, and nobody decided, counts no more."""

    def hasten(self, unfinalized: Manifest, repairs: Iterable[Repair]) -> Procedure[None]:
        """Commit, of what *unfinalized* names, all that would not wait for as long as another family may take."""
        yield from ()

    def fence(self, newest: Manifest | None, finalized: Manifest | None) -> Procedure[None]:
        """Let no older incarnation commit what nobody decided, as far as that can be done before `finish`; Halt if what
        was committed is not what the decisions say. *newest* is the newest manifest, *finalized* the newest that is."""
        yield from ()

    @abstractmethod
    def finish(
        self, manifest: Manifest, repairs: Iterable[Repair], *, accept_loss: bool
    ) -> Procedure[Mapping[str, str]]:
        """Commit, prove or repair all that *manifest* names, which is decided: the fate of each, by name.

        No sink of the pipeline runs. Raises Halt, with the choices, where something is lost; with *accept_loss* it is
        given up instead.
        """

    def clean(self) -> Procedure[None]:
        """All that was decided is committed, and no worker runs: fence whoever belongs to an older attempt, then drop
        what they have left, which nobody names."""
        yield from ()

    # --- decisions

    def acknowledged(self, flushed: Iterable[Acknowledgement], outputs: Outputs) -> Procedure[None]:
        """Look at what sinks have flushed, as it comes. What cannot be known yet is left to `prepare`.

        *outputs* are the topics that sinks write to, as they were last looked at.
        """
        yield from ()

    def prepare(self, plan: Planned, checks: Callable[[], Sequence[Check]]) -> Procedure[Refuse | None]:
        """Learn what the manifest of *plan* is to name; *checks* say first why that may be impossible."""
        yield from ()
        return None

    @abstractmethod
    def entered(self, manifest: Manifest, plan: Planned, before: Manifest | None) -> Manifest:
        """*manifest* with the committables of *plan*, which was prepared; *before* is the newest one so far."""

    def check(self, plan: Planned) -> Check:
        """Refuse *plan* unless all of it can still be committed. Asked when all have acknowledged."""
        yield from ()
        return None

    @abstractmethod
    def commit(self, manifest: Manifest) -> Procedure[Fates]:
        """Commit what *manifest*, which has just become durable, names."""

    # --- while it runs, and at the end

    def watch(self) -> Procedure[None]:
        """Now and then: fence zombies that have come back meanwhile, where they could do harm."""
        yield from ()

    def conclude(self, checkpoint: int) -> Procedure[None]:
        """After a clean stop at *checkpoint*: Halt unless readers see all that the last decisions have committed."""
        yield from ()

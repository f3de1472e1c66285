"""The seam between a decision and the families of sinks; and how a decided checkpoint is finalized, or finished.

`Leader.decide` is the decision: check, manifest, commit, finalize. `finish` is for one that a crash has left decided.

Invariants: nothing of checkpoint *n* is committed before its manifest is durable; at most the highest manifest is
unfinalized. Each family of sinks has its own commit, a `CommitProtocol`: only committables that a durable manifest or
repair names are committed; commits are repeated, by any process, until the fate is known; an answer that fits both
"done" and "lost" proves nothing.
Every function is a procedure (see `requests`): it can be stopped between any two requests and run again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.events import PendingCheckpoint, Refuse
from exactlyonce.checkpoint.records.manifest import (
    Finalized,
    Incarnation,
    Manifest,
    Precommit,
    Repair,
    StoredBlock,
)
from exactlyonce.checkpoint.requests import Outcome, Outputs, Procedure
from exactlyonce.pipeline.errors import BrokerUnavailable, ExactlyOnceError, Undetermined, require

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


@dataclass(frozen=True)
class Fates:
    """The fates of a manifest's committables after their commit."""

    known: Mapping[str, str] = field(default_factory=dict)
    """The fates of committed ones, by name."""
    unsettled: Mapping[str, str] = field(default_factory=dict)
    """The state of the others, by name: "refused", "unknown", "held" by an earlier one. See `finish`."""


class CommitProtocol(ABC):
    """The commit of one family of sinks. A leader calls these in order, one at a time; the defaults do nothing."""

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

    def is_prepared(self, plan: PendingCheckpoint) -> bool:
        """Whether `prepare` asks nobody; else the leader's own checks come before it."""
        return True

    def prepare(self, plan: PendingCheckpoint) -> Procedure[Refuse | None]:
        """Find the committables of *plan*, or refuse it."""
        yield from ()
        return None

    @abstractmethod
    def with_committables(self, manifest: Manifest, plan: PendingCheckpoint, before: Manifest | None) -> Manifest:
        """*manifest* with the committables of *plan*, which is prepared; *before* is the newest manifest so far."""

    def check(self, plan: PendingCheckpoint) -> Check:
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


Dropped = tuple[tuple[int, ...], tuple[StoredBlock, ...]]
"""Checkpoints whose manifests are to be dropped, and blocks."""
Expire = Callable[[Manifest], Procedure[Dropped]]
"""Given a manifest that is about to be finalized: what to drop in the same transaction."""


def keep_all(manifest: Manifest) -> Procedure[Dropped]:
    """The `Expire` that drops nothing."""
    yield from ()
    return (), ()


def finalize(
    manifest: Manifest,
    fates: Mapping[str, str],
    incarnation: int,
    at_ms: int,
    manifests_dropped: tuple[int, ...] = (),
    blocks_dropped: tuple[StoredBlock, ...] = (),
    *,
    decided_at_ms: int = 0,
    stats: bytes = b"",
) -> Procedure[None]:
    """Record that every committable of *manifest* is committed, and drop what it made superfluous."""
    known = manifest.decided <= set(fates)
    require(known, "a checkpoint is finalized only when the fate of every committable is known")
    mark = Finalized(manifest.checkpoint, incarnation, at_ms, tuple(sorted(fates.items())), decided_at_ms, stats)
    outcome = yield ask.Append((mark,), manifests_dropped, blocks_dropped)
    if outcome is not Outcome.DONE:
        raise Undetermined(
            f"Checkpoint {manifest.checkpoint} is complete and committed, but the mark that says so could not be "
            f"written ({outcome.value}). Nothing is lost: run the pipeline again, it reads what is true."
        )


def finish(
    manifest: Manifest,
    repairs: Iterable[Repair],
    protocols: Iterable[CommitProtocol],
    incarnation: int,
    now_ms: Callable[[], int],
    expire: Expire = keep_all,
    *,
    accept_loss: bool = False,
) -> Procedure[dict[str, str]]:
    """Commit, prove or repair every committable of a decided checkpoint, then finalize it.

    No sink of this pipeline may be running, and *repairs* must have been read from the log since this procedure last
    ran. Raises Halt if a committable is lost and cannot be written again.
    """
    fates, known = dict[str, str](), tuple(repairs)
    for protocol in protocols:
        fates.update((yield from protocol.finish(manifest, known, accept_loss=accept_loss)))
    at_ms = now_ms()
    dropped = yield from expire(manifest)
    yield from finalize(manifest, fates, incarnation, at_ms, *dropped)
    return fates

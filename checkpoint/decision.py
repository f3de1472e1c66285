"""The decision: check, manifest, commit, finalize; and how a decided checkpoint is finished after a crash.

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
from exactlyonce.checkpoint.decision_log import DecisionLog
from exactlyonce.checkpoint.events import Decided, PendingCheckpoint, Refuse, Unresolved, Verdict
from exactlyonce.checkpoint.records.encoding import TooLarge
from exactlyonce.checkpoint.records.manifest import (
    Finalized,
    Incarnation,
    Manifest,
    Precommit,
    Repair,
    StoredBlock,
)
from exactlyonce.checkpoint.requests import Outcome, Outputs, Procedure, concurrently
from exactlyonce.pipeline.errors import BrokerUnavailable, ExactlyOnceError, Undetermined, require
from exactlyonce.pipeline.names import setting

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

    def prepare(self, plan: PendingCheckpoint, checks: Callable[[], Sequence[Check]]) -> Procedure[Refuse | None]:
        """Find the committables of *plan*; *checks* come first, and may refuse it."""
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


def decide(
    plan: PendingCheckpoint,
    protocols: Sequence[CommitProtocol],
    log: DecisionLog,
    *,
    make_manifest: Callable[[Outputs], Manifest],
    expire: Expire,
    now_ms: Callable[[], int],
    checks: Callable[[], Sequence[Check]] = tuple,
    stats: Callable[[], bytes] = bytes,
) -> Procedure[Verdict]:
    """Check, then decide, then commit and finalize *plan*.

    *checks* must hold once all have acknowledged. The manifest is produced while they are under way, and only its
    commit waits for them. *expire* is called once all of the manifest is committed, and *stats* for its mark.
    """
    for protocol in protocols:
        refusal = yield from protocol.prepare(plan, checks)
        if refusal is not None:
            return refusal
    manifest: Manifest | Refuse | None = None
    while manifest is None:
        conditions = [*(protocol.check(plan) for protocol in protocols), *checks()]
        manifest = yield from _produced(log, conditions, make_manifest)
    if isinstance(manifest, Refuse):
        return manifest
    yield ask.Reached("coordinator-checked")
    if (yield from log.commit()) is not Outcome.DONE:
        return Unresolved(manifest.checkpoint)
    decided_at_ms = now_ms()
    yield ask.Appended((manifest,))
    fates, unsettled = dict[str, str](), dict[str, str]()
    for protocol in protocols:
        committed = yield from protocol.commit(manifest)
        fates.update(committed.known)
        unsettled.update(committed.unsettled)
    decided = Decided(manifest, fates, unsettled, decided_at_ms, now_ms())
    if decided.finalized:
        dropped = yield from expire(manifest)
        at_ms = decided.committed_at_ms
        yield from finalize(
            manifest, fates, manifest.incarnation, at_ms, *dropped, decided_at_ms=decided_at_ms, stats=stats()
        )
    return decided


def _produced(
    log: DecisionLog, checks: Iterable[Check], make_manifest: Callable[[Outputs], Manifest]
) -> Procedure[Manifest | Refuse | None]:
    """Produce the manifest into its transaction while *checks* are under way; take it back if one of them refuses.

    None: the checks have found more partitions of an output than the manifest says, so another one is needed.
    """
    outputs: Outputs = yield ask.KnownOutputs()
    manifest = make_manifest(outputs)
    try:
        producing = log.produce(manifest)
    except TooLarge as error:
        return Refuse(_no_room(manifest, error))
    produced, *objections = yield from concurrently(producing, *map(objection, checks))
    problem = gravest(objections)
    if not produced:
        problem = problem or Refuse(f"the manifest of checkpoint {manifest.checkpoint} was not written: {log.refusal}")
    elif problem is not None:
        yield from log.take_back(str(problem))
    elif (yield ask.KnownOutputs()) == outputs:
        return manifest
    else:
        yield from log.take_back("a topic of its sinks has more partitions")
    if isinstance(problem, Exception):
        raise problem
    return problem


def _no_room(manifest: Manifest, why: TooLarge) -> str:
    """The reason for a refusal; a restart, which carries nothing over, may do better."""
    written = sum(len(committable.written) for committable in manifest.committables)
    return (
        f"checkpoint {manifest.checkpoint} names more than a manifest has room for: {why}. It has "
        f"{len(manifest.committables)} transactions in {written} output partitions, rows for {len(manifest.staged)} "
        f"commits to stores, the state of {sum(operator.parallelism for operator in manifest.operators)} subtasks, "
        f"{len(manifest.order_logs)} order logs and {len(manifest.offsets)} input partitions. If that happens again, "
        f"use a lower {setting('parallelism')} or {setting('tolerable_failed')}, or output topics with fewer partitions"
    )


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

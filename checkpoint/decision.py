"""The decision: check, manifest, commit, finalize; and how a decided checkpoint is finished after a crash.

Invariants: nothing of checkpoint *n* is committed before its manifest is durable; at most the highest manifest is
unfinalized. Each family of sinks has its own commit: see `commits.protocol`.
Every function is a procedure (see `requests`): it can be stopped between any two requests and run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.commits.protocol import Check, CommitProtocol, Planned, Refuse, gravest, objection
from exactlyonce.checkpoint.decision_log import DecisionLog
from exactlyonce.checkpoint.records.encoding import TooLarge
from exactlyonce.checkpoint.records.manifest import Finalized, Manifest, Repair, StoredBlock
from exactlyonce.checkpoint.requests import Outputs, Procedure, concurrently
from exactlyonce.checkpoint.transactions.broker_answers import Outcome
from exactlyonce.pipeline.errors import Undetermined, require
from exactlyonce.pipeline.names import setting

Dropped = tuple[tuple[int, ...], tuple[StoredBlock, ...]]
"""Checkpoints whose manifests are to be dropped, and blocks."""
Expire = Callable[[Manifest], Procedure[Dropped]]
"""Given a manifest that is about to be finalized: what to drop in the same transaction."""


@dataclass(frozen=True)
class Decided:
    """The manifest is durable; finalized too, unless a commit was refused or its fate is unknown."""

    manifest: Manifest
    fates: Mapping[str, str] = field(default_factory=dict)
    unsettled: Mapping[str, str] = field(default_factory=dict)
    """See `commits.protocol.Fates`."""
    decided_at_ms: int = field(default=0, compare=False)
    """When the manifest was durable."""
    committed_at_ms: int = field(default=0, compare=False)
    """When all fates were known; this and the other in ms since 1970."""

    @property
    def finalized(self) -> bool:
        """Whether every committable is known to be committed."""
        return not self.unsettled


@dataclass(frozen=True)
class Unresolved:
    """It is unknown whether the manifest is durable: the process must end, and the next incarnation reads the log."""

    checkpoint: int


def keep_all(manifest: Manifest) -> Procedure[Dropped]:
    """The `Expire` that drops nothing."""
    yield from ()
    return (), ()


def decide(
    plan: Planned,
    protocols: Sequence[CommitProtocol],
    log: DecisionLog,
    *,
    make_manifest: Callable[[Outputs], Manifest],
    expire: Expire,
    now_ms: Callable[[], int],
    checks: Callable[[], Sequence[Check]] = tuple,
    stats: Callable[[], bytes] = bytes,
) -> Procedure[Decided | Refuse | Unresolved]:
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

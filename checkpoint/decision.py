"""The decision: check, manifest, commit, finalize; and how a decided checkpoint is finished after a crash.

Invariants: nothing of checkpoint *n* is committed before its manifest is durable; at most the highest manifest is
unfinalized. What a commit is, each family of sinks knows: see `commits.protocol`.
Every function is a procedure (see `requests`): it can be stopped between any two requests and run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from exactlyonce.checkpoint.commits.protocol import Check, CommitProtocol, Planned, Refuse, gravest, objection
from exactlyonce.checkpoint.decision_log import DecisionLog
from exactlyonce.checkpoint.records.encoding import TooLarge
from exactlyonce.checkpoint.records.manifest import Finalized, Manifest, Repair, StoredBlock
from exactlyonce.checkpoint.requests import (
    Append,
    Appended,
    KnownOutputs,
    Outputs,
    Procedure,
    Reached,
    concurrently,
)
from exactlyonce.checkpoint.transactions.broker_answers import Outcome
from exactlyonce.pipeline.errors import Undetermined, require
from exactlyonce.pipeline.names import setting

Dropped = tuple[tuple[int, ...], tuple[StoredBlock, ...]]
"""Checkpoints whose manifests may go, and blocks that may."""
Expire = Callable[[Manifest], Procedure[Dropped]]
"""Told that a manifest is about to be finalized: what may go in the same transaction."""


@dataclass(frozen=True)
class Decided:
    """The manifest is durable; finalized too, unless the commit of something was refused or its fate is unknown."""

    manifest: Manifest
    fates: Mapping[str, str] = field(default_factory=dict)
    unsettled: Mapping[str, str] = field(default_factory=dict)
    """See `commits.protocol.Fates`."""

    @property
    def finalized(self) -> bool:
        """Whether every committable is known to be committed."""
        return not self.unsettled


@dataclass(frozen=True)
class Unresolved:
    """It is unknown whether the manifest is durable: the process must end; the next incarnation reads what is true."""

    checkpoint: int


def keep_all(manifest: Manifest) -> Procedure[Dropped]:
    """The `Expire` of whoever drops nothing."""
    yield from ()
    return (), ()


def decide(
    plan: Planned,
    protocols: Sequence[CommitProtocol],
    log: DecisionLog,
    *,
    make_manifest: Callable[[Outputs], Manifest],
    expire: Expire,
    checks: Callable[[], Sequence[Check]] = tuple,
) -> Procedure[Decided | Refuse | Unresolved]:
    """Check, then decide, then commit and finalize *plan*.

    *checks* must hold once all have acknowledged; they are asked for separately, at the same time. The manifest is
    produced while they are under way; only its commit waits for them. *expire* is told that the manifest is durable and
    all of it committed.
    """
    for each in protocols:
        refusal = yield from each.prepare(plan, checks)
        if refusal is not None:
            return refusal
    manifest: Manifest | Refuse | None = None
    while manifest is None:
        manifest = yield from _produced(log, (*(each.check(plan) for each in protocols), *checks()), make_manifest)
    if isinstance(manifest, Refuse):
        return manifest
    yield Reached("coordinator-checked")
    if (yield from log.commit()) is not Outcome.DONE:
        return Unresolved(manifest.checkpoint)
    yield Appended((manifest,))
    fates, unsettled = dict[str, str](), dict[str, str]()
    for each in protocols:
        found = yield from each.commit(manifest)
        fates.update(found.known)
        unsettled.update(found.unsettled)
    decided = Decided(manifest, fates, unsettled)
    if decided.finalized:
        dropped = yield from expire(manifest)
        yield from finalize(manifest, fates, manifest.incarnation, manifest.completed_at_ms, *dropped)
    return decided


def _produced(
    log: DecisionLog, checks: Iterable[Check], make_manifest: Callable[[Outputs], Manifest]
) -> Procedure[Manifest | Refuse | None]:
    """The manifest, produced into its transaction while *checks* are under way; or, taken back, what one of them says
    against it. None: they have found that an output has more partitions than it says, so that another is to be made."""
    outputs: Outputs = yield KnownOutputs()
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
    elif (yield KnownOutputs()) == outputs:
        return manifest
    else:
        yield from log.take_back("a topic of its sinks has more partitions")
    if isinstance(problem, Exception):
        raise problem
    return problem


def _no_room(manifest: Manifest, why: TooLarge) -> str:
    """Why there is no checkpoint of all that *manifest* names: a restart carries nothing over, and may do better."""
    written = sum(len(each.written) for each in manifest.committables)
    return (
        f"checkpoint {manifest.checkpoint} names more than a manifest has room for: {why}. It has "
        f"{len(manifest.committables)} transactions in {written} output partitions, rows for {len(manifest.staged)} "
        f"commits to stores, the state of {sum(each.parallelism for each in manifest.operators)} subtasks, "
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
) -> Procedure[None]:
    """Write that every committable of *manifest* is known to be committed, and clean what it made superfluous."""
    known = manifest.decided <= set(fates)
    require(known, "a checkpoint is finalized only when the fate of every committable is known")
    mark = Finalized(manifest.checkpoint, incarnation, at_ms, tuple(sorted(fates.items())))
    outcome = yield Append((mark,), manifests_dropped, blocks_dropped)
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
    at_ms: int,
    expire: Expire = keep_all,
    *,
    accept_loss: bool = False,
) -> Procedure[dict[str, str]]:
    """Bring a decided checkpoint to its end: commit, prove or repair every committable, then finalize.

    No sink of this pipeline may be running, and *repairs* must have been read from the log since this procedure last
    ran. Raises Halt where a committable is lost and cannot be made again.
    """
    fates, known = dict[str, str](), tuple(repairs)
    for each in protocols:
        fates.update((yield from each.finish(manifest, known, accept_loss=accept_loss)))
    dropped = yield from expire(manifest)
    yield from finalize(manifest, fates, incarnation, at_ms, *dropped)
    return fates

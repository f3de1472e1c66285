"""The decision: check, manifest, commit, finalize; and how a decided checkpoint is finished after a crash.

Invariants: nothing of checkpoint *n* is committed before its manifest is durable; at most the highest manifest is
unfinalized; a decided committable that was refused ends as proven committed, repaired, or a halt that names it.
Every function is a procedure (see `requests`): it can be stopped between any two requests and run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from exactlyonce.checkpoint.commit import Commits, commit, look, sweep
from exactlyonce.checkpoint.committable import Committable, TransactionalId, Written
from exactlyonce.checkpoint.manifest import BlockRef, Finalized, Manifest, Repair
from exactlyonce.checkpoint.requests import (
    Append,
    BlockEndOffsets,
    CopyTransaction,
    DescribeProducers,
    DescribeTransactions,
    Procedure,
)
from exactlyonce.checkpoint.settings import TIME_LEFT_MARGIN_MS
from exactlyonce.checkpoint.transaction import Outcome, ProducerState, TransactionState
from exactlyonce.pipeline.errors import Halt, Undetermined, require

REPAIRS_MAX = 5


class Precommit(msgspec.Struct, frozen=True):
    """A transaction that a sink subtask has flushed for a checkpoint, as the sink knows it."""

    transactional_id: str
    producer_id: int
    epoch: int
    sink: str
    subtask: int
    checkpoint: int
    records: int
    open_ms: int
    """How long it had been open when it was acknowledged."""


@dataclass(frozen=True)
class Life:
    """Which life of the pipeline's coordinator decides, and in which attempt."""

    pipeline: str
    incarnation: int
    attempt: int
    cluster_id: str
    transaction_version: int
    transaction_timeout_ms: int
    fenced_below: int = 0


@dataclass(frozen=True)
class Refuse:
    """The checkpoint was not decided: it never happened."""

    reason: str


@dataclass(frozen=True)
class Decided:
    """The manifest is durable; finalized too, unless a committable was refused or its fate is unknown."""

    manifest: Manifest
    commits: Commits

    @property
    def finalized(self) -> bool:
        """Whether every committable is known to be committed."""
        return not (self.commits.lost or self.commits.unknown)


@dataclass(frozen=True)
class Unresolved:
    """Whether the manifest is durable cannot be known here: the process must end; the next life reads what is true."""

    checkpoint: int


def _checked(precommit: Precommit, state: TransactionState | None, age_ms: int, life: Life) -> str | None:
    """Why *precommit* cannot be decided on, or None."""
    name = precommit.transactional_id
    if state is None or state.state != "Ongoing":
        return f"transaction {name} is {state.state if state else 'unknown to the broker'}, not Ongoing"
    if (state.producer_id, state.epoch) != (precommit.producer_id, precommit.epoch):
        return f"transaction {name} belongs to another producer now"
    left_ms = life.transaction_timeout_ms - age_ms
    if left_ms < min(TIME_LEFT_MARGIN_MS, life.transaction_timeout_ms // 4):
        return f"transaction {name} has only {left_ms} ms left before the broker ends it"
    return None


def _written(
    precommit: Precommit, partitions: Iterable[tuple[str, int]], producers: list[ProducerState]
) -> list[Written]:
    """What the broker says that *precommit* wrote. Its epoch is fresh, so that its sequences began at 0."""
    wanted = set(partitions)
    return [
        Written(each.topic, each.partition, each.transaction_start_offset, each.last_sequence + 1)
        for each in producers
        if (each.producer_id, each.epoch) == (precommit.producer_id, precommit.epoch)
        and (each.topic, each.partition) in wanted
        and each.transaction_start_offset is not None
        and each.last_sequence >= 0
    ]


def check(
    precommits: Iterable[Precommit], ages_ms: Mapping[str, int], life: Life
) -> Procedure[list[Committable] | Refuse]:
    """Make committables of *precommits*, in the broker's own words, or say why the checkpoint must fail."""
    wanted = [each for each in precommits if each.records]
    if not wanted:
        return []
    states = yield DescribeTransactions(tuple(each.transactional_id for each in wanted))
    for each in wanted:
        problem = _checked(each, states.get(each.transactional_id), ages_ms[each.transactional_id], life)
        if problem:
            return Refuse(problem)
    touched = {each: states[each.transactional_id].partitions for each in wanted}
    producers = yield DescribeProducers(tuple(sorted({p for partitions in touched.values() for p in partitions})))
    committables = []
    for each, partitions in touched.items():
        committable = Committable(
            each.transactional_id, each.producer_id, each.epoch, life.transaction_version, life.cluster_id,
            each.sink, each.subtask, each.checkpoint, tuple(_written(each, partitions, producers)),
        )  # fmt: skip
        if committable.records != each.records:
            return Refuse(
                f"transaction {each.transactional_id} holds {committable.records} records on the broker, "
                f"but {each.records} were produced"
            )
        committables.append(committable)
    return committables


def decide(
    precommits: Iterable[Precommit],
    ages_ms: Mapping[str, int],
    life: Life,
    make_manifest: Callable[[tuple[Committable, ...], tuple[int, ...]], Manifest],
    expire: Callable[[Manifest], tuple[tuple[int, ...], tuple[BlockRef, ...]]],
) -> Procedure[Decided | Refuse | Unresolved]:
    """Check, then decide, then commit and finalize a checkpoint.

    *make_manifest* is given the committables and the block partitions' end offsets; *expire* is told that the manifest
    is durable and returns the manifests and blocks that may go.
    """
    checked = yield from check(precommits, ages_ms, life)
    if isinstance(checked, Refuse):
        return checked
    manifest = make_manifest(tuple(checked), (yield BlockEndOffsets()))
    outcome = yield Append((manifest,))
    if outcome is Outcome.NOT_WRITTEN:
        return Refuse(f"the manifest of checkpoint {manifest.checkpoint} was not written")
    if outcome is Outcome.UNKNOWN:
        return Unresolved(manifest.checkpoint)
    commits = yield from commit(manifest.committables)
    decided = Decided(manifest, commits)
    if decided.finalized:
        yield from finalize(manifest, commits.fates, life.incarnation, manifest.completed_at_ms, *expire(manifest))
    return decided


def finalize(
    manifest: Manifest,
    fates: Mapping[str, str],
    incarnation: int,
    at_ms: int,
    manifests_dropped: tuple[int, ...] = (),
    blocks_dropped: tuple[BlockRef, ...] = (),
) -> Procedure[None]:
    """Write that every committable of *manifest* is known to be committed, and clean what it made superfluous."""
    names = {each.transactional_id for each in manifest.committables if each.records}
    require(names <= set(fates), "a checkpoint is finalized only when the fate of every committable is known")
    mark = Finalized(manifest.checkpoint, incarnation, at_ms, tuple(sorted(fates.items())))
    outcome = yield Append((mark,), manifests_dropped, blocks_dropped)
    if outcome is not Outcome.DONE:
        raise Undetermined(
            f"Checkpoint {manifest.checkpoint} is complete and committed, but the mark that says so could not be "
            f"written ({outcome.value}). Nothing is lost: run the pipeline again, it reads what is true."
        )


def finish(
    manifest: Manifest, repairs: Iterable[Repair], life: Life, at_ms: int, *, accept_loss: bool = False
) -> Procedure[dict[str, str]]:
    """Bring a decided checkpoint to its end: commit, prove or repair every committable, then finalize.

    No sink of this pipeline may be running. Raises Halt where a committable is lost and cannot be copied.
    """
    stand_ins: dict[str, Repair] = {}
    for each in sorted(repairs, key=lambda r: r.number):
        stand_ins[each.replaced] = each
    originals = {c.transactional_id: c for c in manifest.committables if c.records}
    current = {name: stand_ins[name].committable if name in stand_ins else c for name, c in originals.items()}
    by_current = {c.transactional_id: name for name, c in current.items()}
    commits = yield from commit(current.values())
    if commits.unknown or commits.lost:
        yield from sweep(
            life.pipeline, life.incarnation, life.attempt, protected=by_current, fenced_below=life.fenced_below
        )
        commits = yield from look(commits)
    fates = {}
    for name, fate in commits.fates.items():
        original = by_current[name]
        fates[original] = "repaired" if original in stand_ins else fate
    for gone in commits.gone:
        if not accept_loss:
            raise Halt(
                _explain(manifest, gone, "its records are no longer in the output log, so their fate is unknown")
            )
        fates[by_current[gone.transactional_id]] = "loss accepted"
    number = 1 + max((each.number for each in stand_ins.values()), default=0)
    for lost in commits.lost:
        name = by_current[lost.transactional_id]
        fates[name] = yield from _repair(manifest, originals[name], number, life, accept_loss)
        number += REPAIRS_MAX
    yield from finalize(manifest, fates, life.incarnation, at_ms)
    return fates


def _repair(manifest: Manifest, lost: Committable, number: int, life: Life, accept_loss: bool) -> Procedure[str]:
    """Copy repair: the aborted bytes, verbatim, in a new transaction that a durable record names before its commit."""
    for k in range(number, number + REPAIRS_MAX):
        slot = f"repair-{manifest.checkpoint}-{k}"
        name = TransactionalId(life.pipeline, lost.sink, lost.subtask, life.incarnation, str(life.attempt), slot)
        copied = yield CopyTransaction(lost, str(name))
        if isinstance(copied, str):
            if accept_loss:
                return "loss accepted"
            raise Halt(_explain(manifest, lost, f"the broker aborted it, and it cannot be copied: {copied}"))
        repair = Repair(manifest.checkpoint, k, life.incarnation, lost.transactional_id, copied)
        outcome = yield Append((repair,))
        if outcome is not Outcome.DONE:
            raise Undetermined(
                f"The repair of checkpoint {manifest.checkpoint} could not be recorded ({outcome.value}). "
                f"Nothing is lost: run the pipeline again, it reads what is true."
            )
        commits = yield from look((yield from commit([copied])))
        if commits.fates:
            return "repaired"
    raise Halt(_explain(manifest, lost, f"{REPAIRS_MAX} repairs of it were aborted by the broker one after the other"))


def _explain(manifest: Manifest, lost: Committable, what: str) -> str:
    """The text of a halt: which records, and the choices."""
    where = ", ".join(
        f"{w.topic}[{w.partition}] offsets {w.first_offset} and on, {w.count} records" for w in lost.written
    )
    return (
        f"Checkpoint {manifest.checkpoint} was decided, but the output of sink {lost.sink!r} subtask {lost.subtask} for it is "
        f"not visible to readers: {what}.\n  Affected: {where} (transaction {lost.transactional_id}).\n"
        f"  Choices: (1) if the output log can be restored from a replica or a backup, do so and run the pipeline again; "
        f"(2) `exactlyonce reset {manifest.pipeline}` and recompute the output from the input into a new topic; "
        f"(3) go on without these {lost.records} records: `exactlyonce run ... --accept-loss {manifest.checkpoint}`.\n"
        f"  Nothing else is affected: state and the other sinks are at checkpoint {manifest.checkpoint}."
    )

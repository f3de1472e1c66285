"""The decision: check, manifest, commit, finalize; and how a decided checkpoint is finished after a crash.

Invariants: nothing of checkpoint *n* is committed before its manifest is durable; at most the highest manifest is
unfinalized; a decided committable that was refused ends as proven committed, repaired, or a halt that names it; what
follows it from the same sink subtask becomes visible behind its repair, never before.
Every function is a procedure (see `requests`): it can be stopped between any two requests and run again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from exactlyonce.checkpoint.records.committable import Committable, TransactionalId, Written
from exactlyonce.checkpoint.records.manifest import BlockRef, Finalized, Manifest, Repair
from exactlyonce.checkpoint.requests import (
    Append,
    BlockEndOffsets,
    CopyTransaction,
    DescribeProducers,
    DescribeTransactions,
    Procedure,
    ReplayTransaction,
)
from exactlyonce.checkpoint.settings import TIME_LEFT_MARGIN_MS
from exactlyonce.checkpoint.transactions.broker_answers import Outcome, ProducerState, TransactionState
from exactlyonce.checkpoint.transactions.commit import Commits, commit, end, look, sweep
from exactlyonce.checkpoint.transactions.markers import await_markers, ending
from exactlyonce.pipeline.errors import BrokerUnavailable, Halt, Undetermined, require

Dropped = tuple[tuple[int, ...], tuple[BlockRef, ...]]
"""Checkpoints whose manifests may go, and blocks that may."""
Expire = Callable[[Manifest], Procedure[Dropped]]
"""Told that a manifest is about to be finalized: what may go in the same transaction."""

REPAIRS_MAX = 5
LOSS_ACCEPTED = "loss accepted"


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
    fenced_below: tuple[int, int] = (0, 0)
    """(incarnation, attempt): the transactional ids of all attempts below it have been fenced; see `sweep`."""


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
            transactional_id=each.transactional_id, producer_id=each.producer_id, epoch=each.epoch,
            transaction_version=life.transaction_version, cluster_id=life.cluster_id, sink=each.sink,
            subtask=each.subtask, checkpoint=each.checkpoint, written=tuple(_written(each, partitions, producers)),
        )  # fmt: skip
        if committable.records != each.records:
            return Refuse(
                f"transaction {each.transactional_id} holds {committable.records} records on the broker, "
                f"but {each.records} were produced"
            )
        committables.append(committable)
    return committables


def keep_all(manifest: Manifest) -> Procedure[Dropped]:
    """The `Expire` of whoever drops nothing."""
    return (), ()
    yield  # never: it makes this a procedure


def decide(
    precommits: Iterable[Precommit],
    ages_ms: Mapping[str, int],
    life: Life,
    make_manifest: Callable[[tuple[Committable, ...], tuple[int, ...]], Manifest],
    expire: Expire,
) -> Procedure[Decided | Refuse | Unresolved]:
    """Check, then decide, then commit and finalize a checkpoint.

    *make_manifest* is given the committables and the block partitions' end offsets; *expire* is told that the manifest
    is durable and all of it committed.
    """
    try:
        checked = yield from check(precommits, ages_ms, life)
        if isinstance(checked, Refuse):
            return checked
        manifest = make_manifest(tuple(checked), (yield BlockEndOffsets()))
    except BrokerUnavailable as error:
        return Refuse(str(error))
    outcome = yield Append((manifest,))
    if outcome is Outcome.NOT_WRITTEN:
        return Refuse(f"the manifest of checkpoint {manifest.checkpoint} was not written")
    if outcome is Outcome.UNKNOWN:
        return Unresolved(manifest.checkpoint)
    commits = yield from commit(manifest.committables)
    decided = Decided(manifest, commits)
    if decided.finalized:
        dropped = yield from expire(manifest)
        yield from finalize(manifest, commits.fates, life.incarnation, manifest.completed_at_ms, *dropped)
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
    manifest: Manifest,
    repairs: Iterable[Repair],
    life: Life,
    at_ms: int,
    expire: Expire = keep_all,
    *,
    accept_loss: bool = False,
) -> Procedure[dict[str, str]]:
    """Bring a decided checkpoint to its end: commit, prove or repair every committable, then finalize.

    No sink of this pipeline may be running, and *repairs* must have been read from the log since this procedure last
    ran. Raises Halt where a committable is lost and can neither be copied nor be made again by a replay.
    """
    stand_ins = {each.replaced: each for each in sorted(repairs, key=lambda repair: repair.number)}
    originals = {c.transactional_id: c for c in manifest.committables if c.records}
    current = {name: stand_ins[name].committable if name in stand_ins else c for name, c in originals.items()}
    by_current = {c.transactional_id: name for name, c in current.items()}
    numbers = itertools.count(1 + max((each.number for each in stand_ins.values()), default=0))
    fates: dict[str, str] = {}
    waiting, swept = list(current.values()), False
    while waiting:
        commits = yield from commit(waiting)
        if not swept and (commits.unknown or commits.lost):
            outputs = {(written.topic, written.partition) for each in waiting for written in each.written}
            yield from sweep(
                life.pipeline, life.incarnation, life.attempt,
                protected=by_current, fenced_below=life.fenced_below, outputs=outputs,
            )  # fmt: skip
            swept = True
        if not commits.lost:
            commits = yield from look(commits)
        for name, fate in commits.fates.items():
            fates[by_current[name]] = "repaired" if by_current[name] in stand_ins else fate
        fates.update((by_current[name], fate) for name, fate in _gone(manifest, commits, accept_loss).items())
        for lost in commits.lost:
            chain = [lost, *(each for each in commits.held if each.writer == lost.writer)]
            superseded = {by_current[each.transactional_id]: each for each in chain}
            aborted = [originals[name].within(each) for name, each in superseded.items()]
            fates.update((yield from _repair(manifest, aborted, superseded, numbers, life, accept_loss)))
        waiting = [c for name, c in current.items() if name not in fates]
    dropped = yield from expire(manifest)
    yield from finalize(manifest, fates, life.incarnation, at_ms, *dropped)
    return fates


def standing(manifest: Manifest, repairs: Iterable[Repair], fates: Mapping[str, str]) -> tuple[Committable, ...]:
    """What of the finalized *manifest* readers must see: its committables, where they were lost their repairs, the
    newest for each partition, and nothing of those whose loss was accepted."""
    found = []
    newest_first = sorted(repairs, key=lambda repair: repair.number, reverse=True)
    for original in manifest.committables:
        if fates.get(original.transactional_id) == LOSS_ACCEPTED:
            continue
        repaired: set[tuple[str, int]] = set()
        stand_ins = [each.committable for each in newest_first if each.replaced == original.transactional_id]
        for each in (*stand_ins, original):
            left = tuple(written for written in each.written if (written.topic, written.partition) not in repaired)
            repaired.update((written.topic, written.partition) for written in left)
            if left:
                found.append(msgspec.structs.replace(each, written=left))
    return tuple(found)


def _repair(
    manifest: Manifest,
    chain: Sequence[Committable],
    superseded: Mapping[str, Committable],
    numbers: Iterator[int],
    life: Life,
    accept_loss: bool,
) -> Procedure[dict[str, str]]:
    """The same records in new transactions, which a durable record names before they are committed.

    *chain* begins with a lost committable; the others, from the same sink subtask, come behind it in the log again.
    *superseded* are, by transactional id, what the manifest or older repairs name for them.
    """
    fates: dict[str, str] = {}
    for _ in range(REPAIRS_MAX):
        repairs = []
        for lost in chain:
            number = next(numbers)
            slot = f"repair-{manifest.checkpoint}-{number}"
            name = TransactionalId(life.pipeline, lost.sink, lost.subtask, life.incarnation, str(life.attempt), slot)
            again = yield from _written_again(manifest, lost, str(name))
            if not isinstance(again, str):
                repairs.append(Repair(manifest.checkpoint, number, life.incarnation, lost.transactional_id, again))
            elif accept_loss:
                fates[lost.transactional_id] = LOSS_ACCEPTED
            else:
                raise Halt(_explain(manifest, lost, f"the broker aborted it, and {again}"))
        if repairs:
            yield from _record(manifest, repairs)
        aborted = [superseded[each.replaced] for each in repairs]
        yield from end(map(ending, aborted), commit=False)
        yield from await_markers(aborted, commit=False)
        superseded = {each.replaced: each.committable for each in repairs}
        commits = yield from look((yield from commit(superseded.values())))
        outcome = {**dict.fromkeys(commits.fates, "repaired"), **_gone(manifest, commits, accept_loss)}
        replaced = {each.committable.transactional_id: each.replaced for each in repairs}
        fates.update((replaced[name], fate) for name, fate in outcome.items())
        partly = {replaced[each.transactional_id]: each for each in commits.lost}
        chain = [
            each.within(partly.get(each.transactional_id, each)) for each in chain if each.transactional_id not in fates
        ]
        if not chain:
            return fates
    raise Halt(
        _explain(manifest, chain[0], f"{REPAIRS_MAX} repairs of it were aborted by the broker one after the other")
    )


def _written_again(manifest: Manifest, lost: Committable, transactional_id: str) -> Procedure[Committable | str]:
    """What *lost* held in a new transaction: copied from the output log (copy repair), or else computed again from the
    input and the checkpoint before (replay repair), if that gives as many records in every partition; or why not."""
    copied: Committable | str = yield CopyTransaction(lost, transactional_id)
    if not isinstance(copied, str):
        return copied
    replayed: Committable | str = yield ReplayTransaction(manifest, lost, transactional_id)
    if isinstance(replayed, str):
        return f"it cannot be copied: {copied}\n  Nor can it be made again by a replay: {replayed}"
    if replayed.counts != lost.counts:
        return f"it cannot be copied: {copied}\n  A replay gives other counts: {_where(replayed)}"
    return replayed


def _record(manifest: Manifest, repairs: Iterable[Repair]) -> Procedure[None]:
    """Make durable what stands in for what, before any of it is committed."""
    outcome = yield Append(tuple(repairs))
    if outcome is not Outcome.DONE:
        raise Undetermined(
            f"The repair of checkpoint {manifest.checkpoint} could not be recorded ({outcome.value}). "
            f"Nothing is lost: run the pipeline again, it reads what is true."
        )


def _gone(manifest: Manifest, commits: Commits, accept_loss: bool) -> dict[str, str]:
    """The fates of those that nothing can be learnt of: a halt, unless the user has accepted the loss."""
    for gone in commits.gone:
        if not accept_loss:
            raise Halt(
                _explain(manifest, gone, "its records are no longer in the output log, so their fate is unknown")
            )
    return {each.transactional_id: LOSS_ACCEPTED for each in commits.gone}


def _explain(manifest: Manifest, lost: Committable, what: str) -> str:
    """The text of a halt: which records, and the choices."""
    return (
        f"Checkpoint {manifest.checkpoint} was decided, but the output of sink {lost.sink!r} subtask {lost.subtask} "
        f"for it is not visible to readers: {what}.\n"
        f"  Affected: {_where(lost)} (transaction {lost.transactional_id}).\n"
        f"  Choices: (1) if the output log can be restored from a replica or a backup, do so and run it again; "
        f"(2) `exactlyonce reset {manifest.pipeline}` and recompute the output from the input into a new topic; "
        f"(3) go on without these {lost.records} records: `exactlyonce run ... --accept-loss {manifest.checkpoint}`.\n"
        f"  Nothing else is affected: state and the other sinks are at checkpoint {manifest.checkpoint}."
    )


def _where(committable: Committable) -> str:
    """Its records by place."""
    return ", ".join(
        f"{w.topic}[{w.partition}] offsets {w.first_offset} and on, {w.count} records" for w in committable.written
    )

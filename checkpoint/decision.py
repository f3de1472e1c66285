"""The decision: check, manifest, commit, finalize; and how a decided checkpoint is finished after a crash.

Invariants: nothing of checkpoint *n* is committed before its manifest is durable; at most the highest manifest is
unfinalized; a decided committable that was refused ends as proven committed, repaired, or a halt that names it; what
follows it from the same sink subtask becomes visible behind its repair, never before.
Every function is a procedure (see `requests`): it can be stopped between any two requests and run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from exactlyonce.checkpoint.decision_log import DecisionLog
from exactlyonce.checkpoint.records.committable import Committable, TransactionalId, Written
from exactlyonce.checkpoint.records.manifest import BlockRef, Finalized, Manifest, Repair
from exactlyonce.checkpoint.requests import (
    Append,
    Appended,
    CopyTransaction,
    DescribeProducers,
    DescribeTransactions,
    KnownOutputs,
    Outputs,
    Procedure,
    Reached,
    ReplayTransaction,
    concurrently,
)
from exactlyonce.checkpoint.settings import TIME_LEFT_MARGIN_MS
from exactlyonce.checkpoint.transactions.broker_answers import Outcome, ProducerState, TransactionState
from exactlyonce.checkpoint.transactions.commit import Commits, commit, end, resolve_unknown, sweep
from exactlyonce.checkpoint.transactions.markers import await_markers, ending
from exactlyonce.checkpoint.transactions.resolution import LOSS_ACCEPTED, Resolution, places_of
from exactlyonce.pipeline.errors import BrokerUnavailable, ExactlyOnceError, Halt, Undetermined, require

Dropped = tuple[tuple[int, ...], tuple[BlockRef, ...]]
"""Checkpoints whose manifests may go, and blocks that may."""
CommitStaged = Callable[[Manifest], Procedure[dict[str, str]]]
"""Told that a manifest is durable: the fates of what it has staged for stores, by name, once all of that is known."""
Expire = Callable[[Manifest], Procedure[Dropped]]
"""Told that a manifest is about to be finalized: what may go in the same transaction."""

REPAIRS_MAX = 5
"""How often a run repairs what is lost, before it halts."""
TRIES_AGAIN = "tries it again"


class Precommit(msgspec.Struct, frozen=True, kw_only=True):
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


@dataclass(frozen=True, kw_only=True)
class Decider:
    """Who decides: an incarnation of the pipeline's coordinator, in an attempt, on a cluster."""

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

    def __str__(self) -> str:
        return self.reason


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
    """It is unknown whether the manifest is durable: the process must end; the next incarnation reads what is true."""

    checkpoint: int


def _why_not(precommit: Precommit, state: TransactionState | None, age_ms: int, decider: Decider) -> str | None:
    """Why *precommit* cannot be decided on, or None."""
    name = precommit.transactional_id
    if state is None or state.state != "Ongoing":
        return f"transaction {name} is {state.state if state else 'unknown to the broker'}, not Ongoing"
    if (state.producer_id, state.epoch) != (precommit.producer_id, precommit.epoch):
        return f"transaction {name} belongs to another producer now"
    left_ms = decider.transaction_timeout_ms - age_ms
    if left_ms < min(TIME_LEFT_MARGIN_MS, decider.transaction_timeout_ms // 4):
        return f"transaction {name} has only {left_ms} ms left before the broker ends it"
    return None


def _written(
    precommit: Precommit, partitions: Iterable[tuple[str, int]], producers: list[ProducerState]
) -> list[Written]:
    """The records of *precommit* as the broker counts them. Its epoch is fresh, so that its sequences began at 0."""
    wanted = set(partitions)
    return [
        Written(each.topic, each.partition, each.transaction_start_offset, each.last_sequence + 1)
        for each in producers
        if (each.producer_id, each.epoch) == (precommit.producer_id, precommit.epoch)
        and (each.topic, each.partition) in wanted
        and each.transaction_start_offset is not None
        and each.last_sequence >= 0
    ]


def _committable(
    precommit: Precommit, partitions: Iterable[tuple[str, int]], producers: list[ProducerState], decider: Decider
) -> Committable:
    return Committable(
        transactional_id=precommit.transactional_id,
        producer_id=precommit.producer_id,
        epoch=precommit.epoch,
        transaction_version=decider.transaction_version,
        cluster_id=decider.cluster_id,
        sink=precommit.sink,
        subtask=precommit.subtask,
        checkpoint=precommit.checkpoint,
        written=tuple(_written(precommit, partitions, producers)),
    )


def _is_whole(committable: Committable, precommit: Precommit) -> bool:
    """Whether the broker has as many records as were produced."""
    return committable.records == precommit.records


def count(precommits: Iterable[Precommit], outputs: Outputs, decider: Decider) -> Procedure[dict[str, Committable]]:
    """Make committables, in the broker's own words, of those precommits of which it has as many records as were
    produced.

    It may be asked as soon as a precommit is there, and holds when it is decided: a sink writes nothing behind its
    flush, and no other transaction has this producer id and epoch. Whether that one is still open is asked then, and
    those that are left out here are checked again, in all partitions that the broker knows of.
    """
    wanted = [each for each in precommits if each.records]
    places = {each.sink: list[tuple[str, int]]() for each in wanted}
    for sink, topic, partitions in outputs:
        if sink in places:
            places[sink] += [(topic, partition) for partition in range(partitions)]
    asked = {place for some in places.values() for place in some}
    if not asked:
        return {}
    producers = yield DescribeProducers(tuple(sorted(asked)))
    found = ((each, _committable(each, places[each.sink], producers, decider)) for each in wanted)
    return {each.transactional_id: made for each, made in found if _is_whole(made, each)}


def _open(
    precommits: Sequence[Precommit], ages_ms: Mapping[str, int], decider: Decider
) -> Procedure[Mapping[str, TransactionState] | Refuse]:
    """The transactions of *precommits* by their ids; the refusal if one cannot be decided on, whatever was counted."""
    if not precommits:
        return {}
    states: Mapping[str, TransactionState] = yield DescribeTransactions(
        tuple(each.transactional_id for each in precommits)
    )
    for each in precommits:
        problem = _why_not(each, states.get(each.transactional_id), ages_ms[each.transactional_id], decider)
        if problem:
            return Refuse(problem)
    return states


def _check_open(
    precommits: Sequence[Precommit], ages_ms: Mapping[str, int], decider: Decider
) -> Procedure[Refuse | None]:
    states = yield from _open(precommits, ages_ms, decider)
    return states if isinstance(states, Refuse) else None


def check(
    precommits: Iterable[Precommit], ages_ms: Mapping[str, int], decider: Decider
) -> Procedure[list[Committable] | Refuse]:
    """Make committables of *precommits*, in the broker's own words, or say why the checkpoint must fail."""
    wanted = [each for each in precommits if each.records]
    states = yield from _open(wanted, ages_ms, decider)
    if isinstance(states, Refuse):
        return states
    if not wanted:
        return []
    touched = {each: states[each.transactional_id].partitions for each in wanted}
    producers = yield DescribeProducers(tuple(sorted({p for partitions in touched.values() for p in partitions})))
    committables = []
    for each, partitions in touched.items():
        committable = _committable(each, partitions, producers, decider)
        if not _is_whole(committable, each):
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


def none_staged(manifest: Manifest) -> Procedure[dict[str, str]]:
    """The `CommitStaged` of whoever writes to no store but Kafka."""
    require(not manifest.staged, "what is staged for a store is committed before its checkpoint is finalized")
    return {}
    yield  # never: it makes this a procedure


@dataclass(frozen=True)
class Grounds:
    """The grounds of a decision, beside its precommits: counts and checks."""

    counted: Mapping[str, Committable]
    """By transactional id, what was counted as it arrived; see `count`."""
    checks: Callable[[], Sequence[Procedure[Refuse | None]]] = tuple
    """The conditions that must hold once all have acknowledged: asked for separately, at the same time."""


def decide(
    precommits: Iterable[Precommit],
    ages_ms: Mapping[str, int],
    decider: Decider,
    log: DecisionLog,
    *,
    make_manifest: Callable[[tuple[Committable, ...], Outputs], Manifest],
    expire: Expire,
    grounds: Grounds,
    commit_staged: CommitStaged = none_staged,
) -> Procedure[Decided | Refuse | Unresolved]:
    """Check, then decide, then commit and finalize a checkpoint.

    The manifest is produced while the last checks are under way; only its commit waits for them. *make_manifest* is
    given the committables and the outputs. *expire* is told that the manifest is durable and all of it committed.
    """
    wanted = [each for each in precommits if each.records]
    committables = yield from _committables(wanted, ages_ms, decider, grounds)
    if isinstance(committables, Refuse):
        return committables
    manifest: Manifest | Refuse | None = None
    while manifest is None:
        checks = (_check_open(wanted, ages_ms, decider), *grounds.checks())
        manifest = yield from _produced(log, checks, lambda outputs: make_manifest(committables, outputs))
    if isinstance(manifest, Refuse):
        return manifest
    yield Reached("coordinator-checked")
    if (yield from log.commit()) is not Outcome.DONE:
        return Unresolved(manifest.checkpoint)
    yield Appended((manifest,))
    commits = yield from commit(manifest.committables)
    staged = yield from commit_staged(manifest)
    decided = Decided(manifest, commits)
    if decided.finalized:
        fates, dropped = commits.fates | staged, (yield from expire(manifest))
        yield from finalize(manifest, fates, decider.incarnation, manifest.completed_at_ms, *dropped)
    return decided


def _produced(
    log: DecisionLog, checks: Iterable[Procedure[Refuse | None]], make_manifest: Callable[[Outputs], Manifest]
) -> Procedure[Manifest | Refuse | None]:
    """The manifest, produced into its transaction while *checks* are under way; or, taken back, what one of them says
    against it. None: they have found that an output has more partitions than it says, so that another is to be made."""
    outputs: Outputs = yield KnownOutputs()
    manifest = make_manifest(outputs)
    produced, *objections = yield from concurrently(log.produce(manifest), *map(_objection, checks))
    problem = _gravest(objections)
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


def _committables(
    wanted: Sequence[Precommit], ages_ms: Mapping[str, int], decider: Decider, grounds: Grounds
) -> Procedure[tuple[Committable, ...] | Refuse]:
    """Those that were counted; the others are checked first, all else before them, so that it says why they fail."""
    found = {each.transactional_id: made for each in wanted if (made := _counted(each, grounds)) is not None}
    missing = [each for each in wanted if each.transactional_id not in found]
    if missing:
        problem = _gravest((yield from concurrently(*map(_objection, grounds.checks()))))
        if isinstance(problem, Exception):
            raise problem
        try:
            checked = problem or (yield from check(missing, ages_ms, decider))
        except BrokerUnavailable as error:
            return Refuse(str(error))
        if isinstance(checked, Refuse):
            return checked
        found.update((each.transactional_id, each) for each in checked)
    return tuple(found[each.transactional_id] for each in wanted)


def _counted(precommit: Precommit, grounds: Grounds) -> Committable | None:
    """Of *precommit*: its id is used again, and the commit of an older transaction of the id would prove nothing."""
    made = grounds.counted.get(precommit.transactional_id)
    own = made is not None and (made.producer_id, made.epoch) == (precommit.producer_id, precommit.epoch)
    return made if own else None


def _objection(check: Procedure[Refuse | None]) -> Procedure[Refuse | ExactlyOnceError | None]:
    """The objection to the decision, or None. An error is kept until nothing is under way any more."""
    try:
        return (yield from check)
    except BrokerUnavailable as error:
        return Refuse(str(error))
    except ExactlyOnceError as error:
        return error


def _gravest(objections: Sequence[Refuse | ExactlyOnceError | None]) -> Refuse | ExactlyOnceError | None:
    errors = (each for each in objections if isinstance(each, Exception))
    return next(errors, None) or next((each for each in objections if each is not None), None)


def finalize(
    manifest: Manifest,
    fates: Mapping[str, str],
    incarnation: int,
    at_ms: int,
    manifests_dropped: tuple[int, ...] = (),
    blocks_dropped: tuple[BlockRef, ...] = (),
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
    decider: Decider,
    at_ms: int,
    expire: Expire = keep_all,
    *,
    accept_loss: bool = False,
    commit_staged: CommitStaged = none_staged,
) -> Procedure[dict[str, str]]:
    """Bring a decided checkpoint to its end: commit, prove or repair every committable, then finalize.

    No sink of this pipeline may be running, and *repairs* must have been read from the log since this procedure last
    ran. Raises Halt where a committable is lost and can neither be copied nor be made again by a replay.
    """
    resolution = Resolution(manifest, repairs, accept_loss=accept_loss)
    swept = False
    while waiting := resolution.waiting:
        commits = yield from commit(waiting)
        # A look at records waits for the last stable offset, and a repair writes behind it: both need that nothing
        # undecided is open before them. Only then, for a sweep asks every broker, and the usual crash needs none.
        if not swept and (commits.unknown or commits.lost):
            outputs = {(written.topic, written.partition) for each in waiting for written in each.written}
            yield from sweep(
                decider.pipeline, decider.incarnation, decider.attempt,
                protected=resolution.named, fenced_below=decider.fenced_below, outputs=outputs,
            )  # fmt: skip
            swept = True
        # What is held behind a loss is open and protected, perhaps in front of what is unknown: a look would wait for
        # it. Its repair ends it; what is unknown until then is asked about, and looked at, in the next round.
        if not commits.lost:
            commits = yield from resolve_unknown(commits)
        resolution.note(commits)
        for chain in resolution.chains(commits):
            yield from _repair(resolution, chain, decider)
    fates = resolution.fates | (yield from commit_staged(manifest))
    dropped = yield from expire(manifest)
    yield from finalize(manifest, fates, decider.incarnation, at_ms, *dropped)
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


def _repair(resolution: Resolution, chain: Sequence[str], decider: Decider) -> Procedure[None]:
    """The same records in new transactions, which a durable record names before they are committed.

    *chain* begins with a lost committable; the others, from the same sink subtask, come behind it in the log again.
    """
    manifest = resolution.manifest
    for _ in range(REPAIRS_MAX):
        repairs = []
        for name in chain:
            lost, number = resolution.lost(name), resolution.next_number()
            slot = f"repair-{manifest.checkpoint}-{number}"
            new = TransactionalId(
                decider.pipeline, lost.sink, lost.subtask, decider.incarnation, str(decider.attempt), slot
            )
            again = yield from _written_again(manifest, lost, str(new))
            if isinstance(again, str):
                resolution.give_up(name, again)
            else:
                repairs.append(Repair(manifest.checkpoint, number, decider.incarnation, name, again))
        if repairs:
            yield from _record(manifest, repairs)
        superseded = resolution.replace_by(repairs)
        yield from end(map(ending, superseded), commit=False)
        yield from await_markers(superseded, commit=False)
        commits = yield from resolve_unknown((yield from commit(each.committable for each in repairs)))
        resolution.note(commits)
        fates = resolution.fates
        chain = [name for name in chain if name not in fates]
        if not chain:
            return
    aborted = f"{REPAIRS_MAX} repairs of it were aborted by the broker one after the other; another run {TRIES_AGAIN}"
    raise Halt(resolution.explain(resolution.lost(chain[0]), aborted))


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
        return f"it cannot be copied: {copied}\n  A replay gives other counts: {places_of(replayed)}"
    return replayed


def _record(manifest: Manifest, repairs: Iterable[Repair]) -> Procedure[None]:
    """Make durable what stands in for what, before any of it is committed."""
    outcome = yield Append(tuple(repairs))
    if outcome is not Outcome.DONE:
        raise Undetermined(
            f"The repair of checkpoint {manifest.checkpoint} could not be recorded ({outcome.value}). "
            f"Nothing is lost: run the pipeline again, it reads what is true."
        )

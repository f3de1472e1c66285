"""Ending transactions: the only place where the protocol commits or aborts.

Invariants: only a committable that a durable manifest or repair names is committed; after an unknown answer the commit
is repeated, never followed by an abort; nothing counts as committed before its markers are there; an aborted
transaction is named by no durable record, or a durable repair stands in for it; transactions of one sink subtask are
committed in their order, so that a repair never lands after a later one. The live commit, recovery and Spark run these
same lines.

Markers end a transaction in each of its partitions; a broker may lose them (docs/design/repair.md). Invariants of
markers: a transaction counts as ended only once no partition shows it as open; a lost marker is written again with the
verdict of the durable record, by a transaction without records under the id's present epoch. That epoch was asked for
before a partition showed the marker as lost: an id that has gone on since has another one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.records.manifest import (
    COMMITTED,
    PROVEN,
    Committable,
    TransactionalId,
    Written,
    transaction_prefix,
)
from exactlyonce.checkpoint.requests import (
    EndAnswer,
    Ending,
    Fate,
    ListedTransaction,
    Procedure,
    ProducerState,
    TransactionState,
    TxnState,
)
from exactlyonce.pipeline.errors import BrokerUnavailable, Halt

MARKERS_LOST_AFTER_MS = 5_000
"""Markers take milliseconds. Writing one that was only late once more does no harm."""
PAUSE_FIRST_MS, PAUSE_LONGEST_MS = 3, 50

UNREACHABLE = "They cannot be written again"

Partition = tuple[str, int]
_Open = dict[tuple[str, int], list[Partition]]
"""The partitions of open transactions, by transactional id and producer id."""


def ending(committable: Committable) -> Ending:
    return Ending(committable.transactional_id, committable.producer_id, committable.epoch)


def await_markers(committables: Sequence[Committable], *, commit: bool) -> Procedure[set[str]]:
    """Wait until every partition has the markers of *committables*, which were all ended by *commit* or by abort.

    Returns the transactional ids whose markers were written again. That takes a transaction, which the broker aborts if
    nobody ends it in time: only the records show the verdict of these markers.
    """
    names = {
        (written.topic, written.partition, one.producer_id, written.first_offset): one.transactional_id
        for one in committables
        for written in one.written
    }

    def owner(state: ProducerState) -> str | None:
        place = (state.topic, state.partition, state.producer_id)
        start_offset = state.transaction_start_offset
        return None if start_offset is None else names.get((*place, start_offset))

    return (yield from _await_none_open({(topic, partition) for topic, partition, _, _ in names}, owner, commit=commit))


def release(names: Mapping[int, str], partitions: Collection[Partition]) -> Procedure[None]:
    """Wait until no transaction of these producer ids holds readers of *partitions* back.

    All were aborted, or older ones are finalized. *names* are their transactional ids.
    """

    def owner(state: ProducerState) -> str | None:
        return None if state.transaction_start_offset is None else names.get(state.producer_id)

    yield from _await_none_open(partitions if names else (), owner, commit=False)


def await_ended(last: Ending, partitions: Collection[Partition], *, commit: bool) -> Procedure[bool]:
    """Whether the producer id of *last* has no open transaction in *partitions*.

    *last* is the epoch at which the id shows that it was ended by *commit*. Lost markers are written again at that
    epoch, once; then the caller looks at the id anew, since it may show another end by now.
    """

    def owner(state: ProducerState) -> str | None:
        return last.transactional_id if held_by(last.producer_id, [state]) else None

    return not (yield from _await_none_open(partitions, owner, commit=commit, epoch=last.epoch))


def held_by(producer_id: int, producers: Iterable[ProducerState]) -> bool:
    """Whether a transaction of the producer id is open."""
    return any(state.producer_id == producer_id and state.transaction_start_offset is not None for state in producers)


def _await_none_open(
    partitions: Collection[Partition],
    owner: Callable[[ProducerState], str | None],
    *,
    commit: bool,
    epoch: int | None = None,
) -> Procedure[set[str]]:
    """Ask until *owner* claims no producer's transaction; after a while write the markers of those that it claims.

    A broker that is away is waited for. Returns the ids whose markers were written again. With an *epoch* they are
    written once, and only at that one: the verdict is right for no other.
    """
    rewritten: set[str] = set()
    waited_ms, pause_ms = 0, PAUSE_FIRST_MS
    open_: _Open = {}
    while partitions:
        try:
            # The epoch is asked for before the partitions, which then show no later transaction as open.
            lost = open_ if waited_ms >= MARKERS_LOST_AFTER_MS else {}
            epochs = dict.fromkeys(lost, epoch) if epoch is not None else (yield from _epochs(lost, commit=commit))
            open_ = yield from _claimed(partitions, owner)
            if not open_:
                break
            for (name, producer_id), present in epochs.items():
                if held := open_.get((name, producer_id)):
                    rewritten.add(name)
                    yield ask.RewriteMarkers(name, producer_id, tuple(held), commit, present)
            if epochs:
                if epoch is not None:
                    break
                waited_ms, pause_ms = 0, PAUSE_FIRST_MS
        except BrokerUnavailable:
            waited_ms = 0
        yield ask.Pause(pause_ms)
        waited_ms += pause_ms
        pause_ms = min(pause_ms + 1, PAUSE_LONGEST_MS)
    return rewritten


def _claimed(partitions: Collection[Partition], owner: Callable[[ProducerState], str | None]) -> Procedure[_Open]:
    open_: defaultdict[tuple[str, int], list[Partition]] = defaultdict(list)
    for state in (yield ask.DescribeProducers(tuple(sorted(partitions)))):
        if (name := owner(state)) is not None:
            open_[name, state.producer_id].append((state.topic, state.partition))
    return dict(open_)


def _epochs(lost: _Open, *, commit: bool) -> Procedure[dict[tuple[str, int], int]]:
    """The present epochs of ids whose markers are *lost*, except those that are just being ended.

    Raises Halt if an id has expired, or has another producer id: then nobody can write its markers.
    """
    if not lost:
        return {}
    states: Mapping[str, TransactionState | None] = yield ask.DescribeTransactions(tuple(name for name, _ in lost))
    epochs = {}
    for (name, producer_id), held in lost.items():
        state = states[name]
        if state is None or state.producer_id != producer_id:
            raise Halt(_unreachable(name, producer_id, held, commit=commit))
        if state.state not in (TxnState.PREPARE_COMMIT, TxnState.PREPARE_ABORT):
            epochs[name, producer_id] = state.epoch
    return epochs


def _unreachable(name: str, producer_id: int, held: Sequence[Partition], *, commit: bool) -> str:
    where = ", ".join(f"{topic}-{partition}" for topic, partition in held)
    by_hand = (
        "abort it there, as the broker has, and run again (`kafka-transactions --bootstrap-server <servers> "
        "find-hanging` shows its start offset, `... abort --topic <topic> --partition <n> --start-offset <offset>` "
        "ends it); or "
    )
    return (
        f"The broker has ended transaction {name} but lost its markers in {where} (KAFKA-20734). {UNREACHABLE}: its id "
        f"no longer has producer id {producer_id}, so that readers are held there permanently.\n"
        f"  Choices: {'' if commit else by_hand}restore these partitions from a replica that has the markers; or write "
        f"the output anew into another topic."
    )


BUSY_PAUSE_MS = 5
SWEEP_PAUSE_MS = 50
SWEEPS_MAX = 200


@dataclass
class Commits:
    """The fates of a set of committables that a durable record names."""

    fates: dict[str, str] = field(default_factory=dict)
    """`COMMITTED` or `PROVEN`, by transactional id."""
    unknown: list[Committable] = field(default_factory=list)
    lost: list[Committable] = field(default_factory=list)
    """Decided ones that the broker aborted, reduced to the partitions where it did."""
    gone: list[Committable] = field(default_factory=list)
    """Their records' offsets have been removed, so that their fate is unknown."""
    held: list[Committable] = field(default_factory=list)
    """Not asked about yet: an earlier transaction of their sink subtask is not known to be committed."""


def end(endings: Iterable[Ending], *, commit: bool) -> Procedure[dict[str, EndAnswer]]:
    """End all; ask again while the broker is busy with one."""
    answers: dict[str, EndAnswer] = {}
    remaining = tuple(endings)
    while remaining:
        for one, answer in zip(remaining, (yield ask.EndTransactions(remaining, commit)), strict=True):
            answers[one.transactional_id] = answer
        remaining = tuple(one for one in remaining if answers[one.transactional_id] is EndAnswer.BUSY)
        if remaining:
            yield ask.Pause(BUSY_PAUSE_MS)
    return answers


def commit(committables: Iterable[Committable]) -> Procedure[Commits]:
    """Commit *committables*, which a durable record names, and sort the answers.

    All go in one request, except those of one sink subtask, carried from aborted checkpoints: those go one after the
    other. Those with markers in all partitions are committed. If markers were lost and written again, the outcome is
    unknown, since that transaction may have timed out. The same holds for an unknown one that is still open somewhere.
    """
    commits = Commits()
    waiting = sorted((one for one in committables if one.records), key=lambda one: one.checkpoint)
    while waiting:
        first: dict[tuple[str, int], Committable] = {}
        for one in waiting:
            first.setdefault(one.writer, one)
        answers = yield from end(map(ending, first.values()), commit=True)
        ended = [c for c in first.values() if answers[c.transactional_id] is not EndAnswer.REFUSED]
        rewritten = yield from await_markers(ended, commit=True)
        for committable in first.values():
            answer = answers[committable.transactional_id]
            if answer is EndAnswer.COMPLETED and committable.transactional_id not in rewritten:
                commits.fates[committable.transactional_id] = COMMITTED
            elif answer is EndAnswer.REFUSED:
                commits.lost.append(committable)
            else:
                commits.unknown.append(committable)
        stuck = {one.writer for one in commits.lost + commits.unknown}
        later = [one for one in waiting if one is not first[one.writer]]
        commits.held += [one for one in later if one.writer in stuck]
        waiting = [one for one in later if one.writer not in stuck]
    return commits


def resolve_unknown(commits: Commits) -> Procedure[Commits]:
    """Settle the unknown ones by their records. Undecided transactions must have been swept, since they hold readers.

    Each partition is looked at by itself: if only some had lost their markers, and writing them again timed out, those
    are lost and the others committed.
    """
    for committable in commits.unknown:
        shown: dict[Fate, list[Written]] = {}
        for written in committable.written:
            fate = yield ask.Look(msgspec.structs.replace(committable, written=(written,)))
            shown.setdefault(fate, []).append(written)
        if Fate.ABORTED in shown:
            lost = (*shown[Fate.ABORTED], *shown.get(Fate.GONE, ()))
            commits.lost.append(msgspec.structs.replace(committable, written=lost))
        elif Fate.COMMITTED in shown:
            commits.fates[committable.transactional_id] = PROVEN
        else:
            commits.gone.append(committable)
    commits.unknown = []
    return commits


def incarnation_latest(listed: Iterable[ListedTransaction]) -> int:
    """The highest incarnation in a transactional id; 0 without any."""
    names = (TransactionalId.parse(transaction.transactional_id) for transaction in listed)
    return max((name.incarnation for name in names if name is not None), default=0)


def is_older(transactional_id: TransactionalId, incarnation: int, attempt: int) -> bool:
    """Whether the id belongs to an attempt before (*incarnation*, *attempt*)."""
    return transactional_id.written_in < (incarnation, attempt)


def _is_over(listed: ListedTransaction, fenced: Container[str], *, before: bool) -> bool:
    """Whether a sweep is done with an id; *before*: an earlier sweep has fenced it.

    A complete transaction is not fenced: its producer holds the epoch at which the next one begins. So each complete id
    is ended once more, and left alone only after that; any other is ended until it is over.
    """
    return listed.state in TxnState.ENDED and (before or listed.transactional_id in fenced)


def sweep(
    pipeline: str,
    incarnation: int,
    attempt: int,
    *,
    protected: Container[str] = (),
    fenced_below: tuple[int, int] = (0, 0),
    outputs: Collection[tuple[str, int]] = (),
) -> Procedure[int]:
    """Abort and fence every transactional id of older attempts, in whatever state; returns how many.

    Ids of attempts below *fenced_below* (incarnation, attempt) are left alone once complete, so that they expire; see
    docs/design/commit.md. Ids in *protected* are named by a durable record and not touched; no *fenced_below* follows
    from such a sweep. In the partitions *outputs* none of the others is open in the end, even if the broker has lost
    markers.
    """
    fenced: set[str] = set()
    names: dict[int, str] = {}
    """By producer id."""
    committed: set[int] = set()
    """Producer ids that showed a commit before they were ended here."""
    # A zombie may initialise or begin between listing and end, which then fails by the epoch: it is listed again.
    # A zombie that comes back later has a fenced epoch, or an id that the next sweep finds.
    for _ in range(SWEEPS_MAX):
        targets = []
        for listed in (yield ask.ListTransactions(transaction_prefix(pipeline))):
            name = TransactionalId.parse(listed.transactional_id)
            if name is None or name.pipeline != pipeline or not is_older(name, incarnation, attempt):
                continue
            if listed.transactional_id in protected:
                continue
            names[listed.producer_id] = listed.transactional_id
            if listed.state in (TxnState.PREPARE_COMMIT, TxnState.COMPLETE_COMMIT):
                committed.add(listed.producer_id)
            if not _is_over(listed, fenced, before=name.written_in < fenced_below):
                targets.append(listed.transactional_id)
        if not targets:
            break
        states = yield ask.DescribeTransactions(tuple(targets))
        endings = [Ending(s.transactional_id, s.producer_id, s.epoch) for s in states.values() if s is not None]
        answers = yield from end(endings, commit=False)
        fenced.update(name for name, answer in answers.items() if answer is EndAnswer.COMPLETED)
        fenced.update(name for name, state in states.items() if state is None)  # expired since: nobody holds it
        if fenced.issuperset(targets):
            break
        yield ask.Pause(SWEEP_PAUSE_MS)
    else:
        raise BrokerUnavailable(
            f"The transactions of older instances of pipeline {pipeline!r} could not be ended: the broker goes on "
            f"refusing. Nothing was lost. Check the broker's health and its log, then run the pipeline again."
        )
    # Ended is not released: a marker that a broker lost would hide all later records. Those of a commit are left to the
    # process that decided it: several processes may share an incarnation.
    yield from release({number: name for number, name in names.items() if number not in committed}, outputs)
    return len(fenced)


def settle(transactional_id: str, partitions: Collection[Partition]) -> Procedure[None]:
    """Wait until no transaction of a coordinator's id is open in *partitions* and no producer of it can begin another.

    See docs/design/decision.md. A transaction whose commit was never asked for is aborted. Invariants: nobody acts
    upon a decision, or begins another, before readers see it. So at most one lacks its markers, and either end is
    right, if it is the same in every partition. It gets the end that the id shows, at the epoch that the id shows.
    """
    while True:
        state = (yield ask.DescribeTransactions((transactional_id,)))[transactional_id]
        if state is None:
            return
        now = Ending(transactional_id, state.producer_id, state.epoch)
        if state.state in (TxnState.PREPARE_COMMIT, TxnState.PREPARE_ABORT):
            yield ask.Pause(PAUSE_LONGEST_MS)
        elif state.state == TxnState.ONGOING:
            yield from end([now], commit=False)
        else:
            commit = state.state == TxnState.COMPLETE_COMMIT
            if not (yield from await_ended(now, partitions, commit=commit)):
                continue
            answer = (yield from end([now], commit=False))[transactional_id]
            producers = yield ask.DescribeProducers(tuple(sorted(partitions)))
            if answer is EndAnswer.COMPLETED and not held_by(state.producer_id, producers):
                return

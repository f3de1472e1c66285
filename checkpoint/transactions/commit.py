"""Ending transactions: the only place where the protocol commits or aborts.

Invariants: commit is asked only for a committable that a durable manifest or repair names; after an unknown answer the
same commit is asked again and abort never; nothing counts as committed before its markers are there; what is aborted is
named by no durable record, or a durable repair stands in for it; of one sink subtask, a later transaction is committed
only once the earlier ones are, so that a repair never lands behind it. The live commit, recovery and Spark run these
same lines.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass, field

import msgspec

from exactlyonce.checkpoint.records.committable import Committable, TransactionalId, Written, transaction_prefix
from exactlyonce.checkpoint.requests import (
    DescribeTransactions,
    Ending,
    EndTransactions,
    ListTransactions,
    Look,
    Pause,
    Procedure,
)
from exactlyonce.checkpoint.transactions.broker_answers import EndAnswer, Fate, ListedTransaction
from exactlyonce.checkpoint.transactions.markers import await_markers, ending, release
from exactlyonce.pipeline.errors import BrokerUnavailable

BUSY_PAUSE_MS = 5
SWEEP_PAUSE_MS = 50
SWEEPS_MAX = 200


@dataclass
class Commits:
    """The fates of a set of committables that a durable record names."""

    fates: dict[str, str] = field(default_factory=dict)
    """By transactional id: "committed" (the broker said so, its markers are there) or "proven" (its records are)."""
    unknown: list[Committable] = field(default_factory=list)
    lost: list[Committable] = field(default_factory=list)
    """Aborted by the broker, though decided; what is named is what they wrote to partitions where that is so."""
    gone: list[Committable] = field(default_factory=list)
    """Neither visible nor aborted in sight: its records' offsets have been removed."""
    held: list[Committable] = field(default_factory=list)
    """Not asked about: an earlier transaction of their sink subtask is not known to be committed."""


def end(endings: Iterable[Ending], *, commit: bool) -> Procedure[dict[str, EndAnswer]]:
    """End all; ask again while the broker is busy with one."""
    answers: dict[str, EndAnswer] = {}
    remaining = tuple(endings)
    while remaining:
        for each, answer in zip(remaining, (yield EndTransactions(remaining, commit)), strict=True):
            answers[each.transactional_id] = answer
        remaining = tuple(each for each in remaining if answers[each.transactional_id] is EndAnswer.BUSY)
        if remaining:
            yield Pause(BUSY_PAUSE_MS)
    return answers


def commit(committables: Iterable[Committable]) -> Procedure[Commits]:
    """Commit what a durable record names, and sort the answers; decides nothing about the refused and unknown.

    All in one request, but for the transactions of one sink subtask, which are carried from aborted checkpoints: those
    one after the other. Committed are those whose markers are known to be written. Where markers were lost and written
    again, the outcome is unknown: that may have been broken off, and timed out. So it is for an unknown one that is
    still open somewhere: it had been committed.
    """
    commits = Commits()
    waiting = sorted((each for each in committables if each.records), key=lambda each: each.checkpoint)
    while waiting:
        first: dict[tuple[str, int], Committable] = {}
        for each in waiting:
            first.setdefault(each.writer, each)
        answers = yield from end(map(ending, first.values()), commit=True)
        ended = [c for c in first.values() if answers[c.transactional_id] is not EndAnswer.REFUSED]
        rewritten = yield from await_markers(ended, commit=True)
        for committable in first.values():
            answer = answers[committable.transactional_id]
            if answer is EndAnswer.COMPLETED and committable.transactional_id not in rewritten:
                commits.fates[committable.transactional_id] = "committed"
            elif answer is EndAnswer.REFUSED:
                commits.lost.append(committable)
            else:
                commits.unknown.append(committable)
        stuck = {each.writer for each in commits.lost + commits.unknown}
        later = [each for each in waiting if each is not first[each.writer]]
        commits.held += [each for each in later if each.writer in stuck]
        waiting = [each for each in later if each.writer not in stuck]
    return commits


def resolve_unknown(commits: Commits) -> Procedure[Commits]:
    """Settle the unknown by their records. Undecided transactions must have been swept, for they pin the readers.

    Each partition is looked at by itself: where only some had lost their markers, and writing them again timed out,
    those are lost and the others are committed.
    """
    for committable in commits.unknown:
        shown: dict[Fate, list[Written]] = {}
        for written in committable.written:
            fate = yield Look(msgspec.structs.replace(committable, written=(written,)))
            shown.setdefault(fate, []).append(written)
        if Fate.ABORTED in shown:
            lost = (*shown[Fate.ABORTED], *shown.get(Fate.GONE, ()))
            commits.lost.append(msgspec.structs.replace(committable, written=lost))
        elif Fate.COMMITTED in shown:
            commits.fates[committable.transactional_id] = "proven"
        else:
            commits.gone.append(committable)
    commits.unknown = []
    return commits


def incarnation_latest(listed: Iterable[ListedTransaction]) -> int:
    """The highest incarnation that a transactional id names; 0 without any."""
    names = (TransactionalId.parse(each.transactional_id) for each in listed)
    return max((name.incarnation for name in names if name is not None), default=0)


def is_older(transactional_id: TransactionalId, incarnation: int, attempt: int) -> bool:
    """Whether the id belongs to an attempt before (*incarnation*, *attempt*)."""
    return transactional_id.written_in < (incarnation, attempt)


def _is_over(listed: ListedTransaction, fenced: Container[str], *, before: bool) -> bool:
    """Whether a sweep is done with an id; *before*: it was, when older attempts were fenced.

    Complete is not fenced: its producer holds the epoch at which a next transaction begins. So each complete id is
    ended once by somebody, and is left alone only after that; whatever else is ended until it is.
    """
    return listed.state in ("CompleteCommit", "CompleteAbort", "Dead") and (before or listed.transactional_id in fenced)


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

    An id in state `Empty` belongs to a producer that may still open a transaction: aborting it raises the epoch, which
    fences that producer. Ids of attempts below *fenced_below* (incarnation, attempt) are left alone once complete, else
    each sweep would end all of them again, and renew them, so that they never expired. That is safe: a sweep for
    *fenced_below* has ended every id that was there, so that the epoch of every producer of that time is stale; and
    whoever has initialised one since shows as `Empty`, then as `Ongoing`, until an end of its transaction, by whomever,
    makes its epoch stale as well. A sweep that protects ids fences only the others: no *fenced_below* follows from it.
    Ids in *protected* are named by a durable record and are not touched. In the partitions *outputs* none of the others
    is open in the end, even if the broker has lost markers.
    """
    fenced: set[str] = set()
    names: dict[int, str] = {}
    """By producer id."""
    committed: set[int] = set()
    """Producer ids that showed a commit before they were ended here."""
    # A zombie may initialise or begin between listing and end, which then fails by the epoch: it is listed again.
    # What comes back after that holds a fenced epoch, or an id that the next sweep finds.
    for _ in range(SWEEPS_MAX):
        targets = []
        for each in (yield ListTransactions(transaction_prefix(pipeline))):
            name = TransactionalId.parse(each.transactional_id)
            if name is None or name.pipeline != pipeline or not is_older(name, incarnation, attempt):
                continue
            if each.transactional_id in protected:
                continue
            names[each.producer_id] = each.transactional_id
            if each.state in ("PrepareCommit", "CompleteCommit"):
                committed.add(each.producer_id)
            if not _is_over(each, fenced, before=name.written_in < fenced_below):
                targets.append(each.transactional_id)
        if not targets:
            break
        states = yield DescribeTransactions(tuple(targets))
        endings = [Ending(s.transactional_id, s.producer_id, s.epoch) for s in states.values() if s is not None]
        answers = yield from end(endings, commit=False)
        fenced.update(each for each, answer in answers.items() if answer is EndAnswer.COMPLETED)
        fenced.update(each for each, state in states.items() if state is None)  # expired since: nobody holds it
        if all(each in fenced for each in targets):
            break
        yield Pause(SWEEP_PAUSE_MS)
    else:
        raise BrokerUnavailable(
            f"The transactions of older instances of pipeline {pipeline!r} could not be ended: the broker goes on "
            f"refusing. Nothing was lost. Check the broker's health and its log, then run the pipeline again."
        )
    # Ended is not released: a marker that a broker lost would go on hiding all that is written behind it. Those of a
    # commit are left to whoever has decided it: where several processes share an incarnation, it may be another one.
    yield from release({each: name for each, name in names.items() if each not in committed}, outputs)
    return len(fenced)

"""Ending transactions: the only place where the protocol commits or aborts.

Invariants: only a committable that a durable manifest or repair names is committed; after an unknown answer the commit
is repeated, never followed by an abort; nothing counts as committed before its markers are there; an aborted
transaction is named by no durable record, or a durable repair stands in for it; transactions of one sink subtask are
committed in their order, so that a repair never lands after a later one. The live commit, recovery and Spark run these
same lines.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass, field

import msgspec

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.records.committable import Committable, TransactionalId, Written, transaction_prefix
from exactlyonce.checkpoint.requests import Ending, Procedure
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
    """"committed" (the broker said so, its markers are there) or "proven" (its records are), by transactional id."""
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
                commits.fates[committable.transactional_id] = "committed"
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
            commits.fates[committable.transactional_id] = "proven"
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

    Ids of attempts below *fenced_below* (incarnation, attempt) are left alone once complete, so that they expire; see
    docs/design/sink-transactions.md. Ids in *protected* are named by a durable record and not touched; no
    *fenced_below* follows from such a sweep. In the partitions *outputs* none of the others is open in the end, even if
    the broker has lost markers.
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
            if listed.state in ("PrepareCommit", "CompleteCommit"):
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

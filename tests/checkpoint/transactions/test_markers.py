"""Markers that the broker writes late, or never."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from blank_manifest import blank_committable, blank_manifest
from scripted_broker import transactions

from exactlyonce.checkpoint.decision import finish
from exactlyonce.checkpoint.records.manifest import Committable, Written
from exactlyonce.checkpoint.requests import (
    Append,
    CopyTransaction,
    DescribeProducers,
    DescribeTransactions,
    EndAnswer,
    EndTransactions,
    Fate,
    ListedTransaction,
    ListTransactions,
    Look,
    Outcome,
    Pause,
    ProducerState,
    Request,
    RewriteMarkers,
    TransactionState,
    drive,
)
from exactlyonce.checkpoint.transactions.commit import (
    MARKERS_LOST_AFTER_MS,
    PAUSE_LONGEST_MS,
    await_markers,
    commit,
    release,
    sweep,
)
from exactlyonce.pipeline.errors import BrokerUnavailable, Halt

PLACES = (("t", 0), ("t", 1))


def committable(name: str = "a", producer_id: int = 7, checkpoint: int = 1) -> Committable:
    written = tuple(Written(topic, partition, 10, 5) for topic, partition in PLACES)
    return blank_committable(transactional_id=name, producer_id=producer_id, checkpoint=checkpoint, written=written)


class Broker:
    """Partitions where transactions are open, by (topic, partition, producer id) with their start offsets."""

    def __init__(self, *producer_ids: int, start: int = 10) -> None:
        self.open = {(*place, each): start for place in PLACES for each in producer_ids}
        self.rewrites_lost = 0
        self.written_at_ms: int | None = None
        self.away_until_ms = 0
        self.answers: dict[str, EndAnswer] = {}
        self.fates: list[Fate] = []
        self.listed: list[ListedTransaction] = []
        self.asked: list[Request] = []
        self.now_ms = 0
        self.epoch = 4
        """The epoch of every id: the end of its transaction has raised it."""
        self.unknown_ids: set[str] = set()
        self.overtaken: list[Callable[[], None]] = []
        """The acts of another process between the question for the epoch and the one for the partitions."""

    def __call__(self, request: Request) -> Any:
        self.asked.append(request)
        match request:
            case DescribeProducers(partitions):
                return self._described(partitions)
            case DescribeTransactions(names):
                shown = {name: self._state(name) for name in names}
                while self.overtaken:
                    self.overtaken.pop()()
                return shown
            case ListTransactions():
                return self.listed
            case Look(looked):
                return self.fates[looked.written[0].partition]
            case CopyTransaction(lost, name):
                return msgspec.structs.replace(lost, transactional_id=name, producer_id=77, epoch=0)
            case Append():
                return Outcome.DONE
            case RewriteMarkers(_, producer_id, partitions, _, epoch):
                if epoch == self.epoch:
                    self._rewritten(producer_id, partitions)
                return None
            case EndTransactions(endings):
                return [self.answers.get(each.transactional_id, EndAnswer.COMPLETED) for each in endings]
            case Pause(duration_ms):
                self.now_ms += duration_ms
                return None
        raise AssertionError(request)

    def _described(self, partitions: tuple[tuple[str, int], ...]) -> list[ProducerState]:
        if self.now_ms < self.away_until_ms:
            raise BrokerUnavailable("away")
        if self.written_at_ms is not None and self.now_ms >= self.written_at_ms:
            self.open.clear()
        return [
            ProducerState(topic, partition, producer_id, 3, 4, 0, start)
            for (topic, partition, producer_id), start in self.open.items()
            if (topic, partition) in partitions
        ]

    def _state(self, name: str) -> TransactionState | None:
        if name in self.unknown_ids:
            return None
        producer_id = {"a": 7, "b": 8}.get(name) or next(
            e.producer_id for e in self.listed if e.transactional_id == name
        )
        return TransactionState(name, "CompleteCommit", producer_id, self.epoch, 1000, 0, ())

    def _rewritten(self, producer_id: int, partitions: tuple[tuple[str, int], ...]) -> None:
        if self.rewrites_lost:
            self.rewrites_lost -= 1
        else:
            for place in partitions:
                self.open.pop((*place, producer_id), None)

    def of(self, kind: type) -> list[Any]:
        return [each for each in self.asked if isinstance(each, kind)]


def test_markers_that_are_there_cost_one_question() -> None:
    broker = Broker()
    drive(await_markers([committable("a", 7), committable("b", 8)], commit=True), broker)
    assert broker.asked == [DescribeProducers(PLACES)]


def test_late_markers_are_waited_for_with_growing_pauses() -> None:
    broker = Broker(7)
    broker.written_at_ms = 2_000
    drive(await_markers([committable()], commit=True), broker)
    pauses_ms = [each.duration_ms for each in broker.of(Pause)]
    assert pauses_ms == sorted(pauses_ms)
    assert (pauses_ms[0], pauses_ms[-1]) == (3, PAUSE_LONGEST_MS)
    assert broker.now_ms - broker.written_at_ms < PAUSE_LONGEST_MS
    assert broker.of(RewriteMarkers) == []


@pytest.mark.parametrize("commit", [True, False])
def test_lost_markers_are_written_again_where_they_are_missing_with_the_same_verdict(commit: bool) -> None:
    broker = Broker(7)
    del broker.open["t", 0, 7]
    drive(await_markers([committable("a", 7), committable("b", 8)], commit=commit), broker)
    assert broker.of(RewriteMarkers) == [RewriteMarkers("a", 7, (("t", 1),), commit, 4)]
    assert broker.now_ms >= MARKERS_LOST_AFTER_MS
    assert isinstance(broker.asked[-1], DescribeProducers)


def test_markers_that_are_lost_again_are_written_again() -> None:
    broker = Broker(7)
    broker.rewrites_lost = 2
    drive(await_markers([committable()], commit=True), broker)
    assert len(broker.of(RewriteMarkers)) == 3
    assert broker.now_ms >= 3 * MARKERS_LOST_AFTER_MS


def test_a_broker_that_is_away_is_waited_for() -> None:
    """While no broker answers nothing is taken for lost: only a partition that answers can show that."""
    broker = Broker(7)
    broker.away_until_ms = 2 * MARKERS_LOST_AFTER_MS
    broker.written_at_ms = broker.away_until_ms + 1_000
    drive(await_markers([committable()], commit=True), broker)
    assert broker.of(RewriteMarkers) == []


@pytest.mark.parametrize("other", [Broker(9), Broker(7, start=30)], ids=["another producer", "a later one of ours"])
def test_transactions_of_others_are_not_ours(other: Broker) -> None:
    drive(await_markers([committable()], commit=True), other)
    assert other.asked == [DescribeProducers(PLACES)]


@pytest.mark.parametrize("commit", [True, False])
def test_a_marker_that_cannot_be_written_halts(commit: bool) -> None:
    """A forgotten id finalizes nothing. A person may abort what the broker aborted, never what it committed."""
    broker = Broker(7)
    broker.unknown_ids.add("a")
    with pytest.raises(Halt, match=r"lost its markers in t-0, t-1 \(KAFKA-20734\)") as halt:
        drive(await_markers([committable()], commit=commit), broker)
    assert ("find-hanging" in str(halt.value)) == (not commit)


def test_an_id_with_another_producer_halts() -> None:
    """Its old producer id writes no marker any more."""
    broker = Broker(9)
    with pytest.raises(Halt, match="its id no longer has producer id 9"):
        drive(await_markers([committable("a", 9)], commit=True), broker)


def test_an_id_that_is_in_use_again_is_left_alone() -> None:
    """Another process has written the markers, and the id has a later, undecided transaction with another epoch."""
    broker = Broker(7)

    def finish_elsewhere() -> None:
        broker.open.clear()
        broker.epoch = 6

    broker.overtaken = [finish_elsewhere]
    assert drive(await_markers([committable()], commit=True), broker) == set()
    assert broker.of(RewriteMarkers) == []


def test_markers_are_written_only_at_the_epoch_that_was_seen_before_they_were_missing() -> None:
    broker = Broker(7)
    broker.overtaken = [lambda: setattr(broker, "epoch", 5)]
    drive(await_markers([committable()], commit=True), broker)
    assert [each.epoch for each in broker.of(RewriteMarkers)] == [4, 5]
    assert not broker.open


def test_a_commit_is_known_only_with_its_markers() -> None:
    broker = Broker(7)
    broker.written_at_ms = MARKERS_LOST_AFTER_MS // 2
    commits = drive(commit([committable("a", 7, 1), committable("b", 8, 2)]), broker)
    assert commits.fates == {"a": "committed", "b": "committed"}
    first, second = broker.of(EndTransactions)
    between = broker.asked[broker.asked.index(first) + 1 : broker.asked.index(second)]
    assert isinstance(between[-1], DescribeProducers)
    assert broker.now_ms >= broker.written_at_ms


def test_markers_that_were_written_again_prove_nothing() -> None:
    """The transaction may have been aborted before they were written: its records are looked at first."""
    broker = Broker(7)
    first, second = committable("a", 7, 1), committable("b", 8, 2)
    commits = drive(commit([first, second]), broker)
    assert (commits.fates, commits.unknown, commits.held) == ({}, [first], [second])
    kinds = [type(each) for each in broker.asked if isinstance(each, EndTransactions | RewriteMarkers)]
    assert kinds == [EndTransactions, RewriteMarkers]


def test_an_unknown_one_that_is_still_open_gets_its_markers_before_anybody_looks() -> None:
    """A rewriting was broken off, and the commit is UNKNOWN: a look would wait for the lost marker without end."""
    broker = Broker(7)
    broker.answers = {"a": EndAnswer.UNKNOWN}
    commits = drive(commit([committable()]), broker)
    assert [each.transactional_id for each in commits.unknown] == ["a"]
    assert broker.of(RewriteMarkers) == [RewriteMarkers("a", 7, PLACES, True, 4)]


def test_a_refused_one_gets_no_commit_markers() -> None:
    """It is repaired whole, also where its abort markers are missing."""
    broker = Broker(7)
    broker.answers = {"a": EndAnswer.REFUSED}
    assert [each.transactional_id for each in drive(commit([committable()]), broker).lost] == ["a"]
    assert broker.of(RewriteMarkers) == []


@pytest.mark.parametrize("start", [10, 30])
def test_what_holds_readers_back_is_released_by_abort(start: int) -> None:
    broker = Broker(7, 9, start=start)
    drive(release({7: "a"}, PLACES), broker)
    assert broker.of(RewriteMarkers) == [RewriteMarkers("a", 7, PLACES, False, 4)]
    assert {owner for _, _, owner in broker.open} == {9}


def test_without_committables_or_anybody_to_release_nothing_is_asked() -> None:
    broker = Broker(7)
    drive(await_markers([], commit=True), broker)
    drive(release({}, PLACES), broker)
    drive(release({7: "a"}, ()), broker)
    assert broker.asked == []


def test_a_sweep_releases_what_older_ids_hold_back_and_not_what_is_protected() -> None:
    """A transaction named by a durable record can still be committed; one that shows a commit is its decider's."""
    broker = Broker(6, 7, 8, 9)
    states = {"eo:p:out:0:1.0:0": (7, "CompleteAbort"), "eo:p:out:0:2.0:0": (8, "CompleteCommit")}
    newer = {"eo:p:out:0:3.0:0": (9, "Ongoing"), "eo:p:out:1:1.0:0": (6, "CompleteCommit")}
    broker.listed = [ListedTransaction(name, *state) for name, state in {**states, **newer}.items()]
    drive(sweep("p", 3, 0, protected={"eo:p:out:0:2.0:0"}, fenced_below=(2, 0), outputs=PLACES), broker)
    assert broker.of(RewriteMarkers) == [RewriteMarkers("eo:p:out:0:1.0:0", 7, PLACES, False, 4)]
    assert {owner for _, _, owner in broker.open} == {6, 8, 9}


def test_what_is_lost_in_one_partition_is_repaired_there_alone() -> None:
    """Writing lost markers again was begun and timed out: some partitions are aborted, the others visible."""
    broker = Broker()
    broker.answers = {"eo:p:out:0:2.0:0": EndAnswer.UNKNOWN}
    broker.fates = [Fate.COMMITTED, Fate.ABORTED]
    decided = committable("eo:p:out:0:2.0:0")
    manifest = blank_manifest(checkpoint=1, incarnation=2, base=0, previous=0, committables=(decided,))
    assert drive(finish(manifest, [], [transactions(attempt=0)], 3, lambda: 9), broker) == {
        decided.transactional_id: "repaired"
    }
    part = msgspec.structs.replace(decided, written=decided.written[1:])
    assert broker.of(CopyTransaction) == [CopyTransaction(part, "eo:p:out:0:3.0:repair-1-1")]

"""Ending transactions: commit, resolve what is unknown, sweep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from blank_manifest import blank_committable
from scripted_broker import World

from exactlyonce.checkpoint.records.manifest import Committable, TransactionalId, Written
from exactlyonce.checkpoint.requests import (
    DescribeProducers,
    DescribeTransactions,
    EndAnswer,
    Ending,
    EndTransactions,
    Fate,
    ListedTransaction,
    ListTransactions,
    Look,
    Pause,
    Request,
    TransactionState,
    drive,
)
from exactlyonce.checkpoint.transactions.commit import (
    SWEEPS_MAX,
    Commits,
    commit,
    incarnation_latest,
    is_older,
    resolve_unknown,
    sweep,
)
from exactlyonce.pipeline.errors import BrokerUnavailable


def committable(name: str, subtask: int = 0, checkpoint: int = 1, records: int = 5) -> Committable:
    written = (Written("t", 0, 10, records),)
    return blank_committable(transactional_id=name, subtask=subtask, checkpoint=checkpoint, written=written)


def rounds(world: World) -> list[list[str]]:
    return [[each.transactional_id for each in request.endings] for request in world.of(EndTransactions)]


def names(committables: list[Committable]) -> list[str]:
    return [each.transactional_id for each in committables]


def test_a_commit_asks_for_exactly_the_transaction_that_the_committable_names() -> None:
    world = World()
    assert drive(commit([committable("a")]), world).fates == {"a": "committed"}
    assert world.asked == [EndTransactions((Ending("a", 7, 3),), commit=True), DescribeProducers((("t", 0),))]


def test_answers_are_sorted_and_nothing_is_decided_about_the_refused_and_unknown() -> None:
    world = World({"b": "R", "c": "U"})
    commits = drive(commit([committable(name, subtask) for subtask, name in enumerate("abc")]), world)
    assert (commits.fates, names(commits.lost), names(commits.unknown)) == ({"a": "committed"}, ["b"], ["c"])
    assert (commits.held, commits.gone) == ([], [])
    assert rounds(world) == [["a", "b", "c"]]


def test_while_the_broker_is_busy_the_same_commit_is_asked_again() -> None:
    world = World({"b": "BBC"})
    commits = drive(commit([committable("a", 0), committable("b", 1)]), world)
    assert commits.fates == {"a": "committed", "b": "committed"}
    assert rounds(world) == [["a", "b"], ["b"], ["b"]]
    assert all(each.commit for each in world.of(EndTransactions))
    assert len(world.of(Pause)) == 2


def test_a_transaction_without_records_is_not_asked_about() -> None:
    world = World()
    assert drive(commit([committable("a", records=0)]), world) == Commits()
    assert world.asked == []


def test_the_transactions_of_one_subtask_are_committed_in_the_order_of_their_checkpoints() -> None:
    carried = [
        committable("a3", 0, 3), committable("a1", 0, 1), committable("b2", 1, 2), committable("a2", 0, 2),
    ]  # fmt: skip
    world = World({"a1": "BC"})
    assert drive(commit(carried), world).fates.keys() == {"a1", "a2", "a3", "b2"}
    assert rounds(world) == [["a1", "b2"], ["a1"], ["a2"], ["a3"]]


@pytest.mark.parametrize("answer", ["R", "U"])
def test_behind_one_that_is_not_known_to_be_committed_the_later_ones_are_held(answer: str) -> None:
    """A repair of it must come before them in the log."""
    chain = [committable("a1", 0, 1), committable("a2", 0, 2), committable("a3", 0, 3), committable("b1", 1, 1)]
    world = World({"a2": answer})
    commits = drive(commit(chain), world)
    assert commits.fates == {"a1": "committed", "b1": "committed"}
    assert names(commits.lost + commits.unknown) == ["a2"]
    assert names(commits.held) == ["a3"]


@pytest.mark.parametrize(
    ("fate", "fates", "lost", "gone"),
    [(Fate.COMMITTED, {"a": "proven"}, [], []), (Fate.ABORTED, {}, ["a"], []), (Fate.GONE, {}, [], ["a"])],
)
def test_the_unknown_are_settled_by_their_records(
    fate: Fate, fates: dict[str, str], lost: list[str], gone: list[str]
) -> None:
    commits = drive(resolve_unknown(Commits(unknown=[committable("a")])), World(fates={"a": fate}))
    assert (commits.fates, names(commits.lost), names(commits.gone)) == (fates, lost, gone)
    assert commits.unknown == []


@pytest.mark.parametrize(
    ("fates", "lost", "proven"),
    [("CCC", [], True), ("CAC", [1], False), ("AAC", [0, 1], False), ("GAC", [0, 1], False), ("GGC", [], True)],
)
def test_each_partition_of_an_unknown_one_is_looked_at(fates: str, lost: list[int], proven: bool) -> None:
    """Aborted partitions are lost; one whose records are gone is proven by the others, or lost if any is aborted."""
    whole = msgspec.structs.replace(committable("a"), written=tuple(Written("t", p, 10, 5) for p in range(3)))
    letters = {"C": Fate.COMMITTED, "A": Fate.ABORTED, "G": Fate.GONE}

    def shown(request: Request) -> Fate:
        assert isinstance(request, Look)
        (written,) = request.committable.written
        return letters[fates[written.partition]]

    commits = drive(resolve_unknown(Commits(unknown=[whole])), shown)
    assert sorted(w.partition for each in commits.lost for w in each.written) == lost
    assert commits.fates == ({"a": "proven"} if proven else {})
    assert commits.gone == commits.unknown == []


@pytest.mark.parametrize(
    ("incarnation", "attempt", "older"), [(2, 9, True), (3, 1, True), (3, 2, False), (3, 3, False), (4, 0, False)]
)
def test_an_id_is_older_by_incarnation_and_then_by_attempt(incarnation: int, attempt: int, older: bool) -> None:
    name = TransactionalId("p", "out", 0, incarnation, f"{attempt}-stage", "0")
    assert is_older(name, 3, 2) is older


def test_the_highest_incarnation_is_learnt_from_the_ids_that_parse() -> None:
    ids = ["eo:p:coordinator", "eo:p:out:0:7.0:0", "eo:p:out:9:3.8:repair-9-9", "eo:p:out:0:99.x:0"]
    assert incarnation_latest(ListedTransaction(each, 0, "Empty") for each in ids) == 7
    assert incarnation_latest([]) == 0


class Broker:
    def __init__(self, states: dict[str, str]) -> None:
        self.states = {name: (state, number, 0) for number, (name, state) in enumerate(states.items())}
        self.pauses = 0
        self.ended: list[str] = []
        self.busy: dict[str, int] = {}
        self.before_listing: list[Callable[[], None]] = []

    def __call__(self, request: Request) -> Any:
        match request:
            case ListTransactions(prefix):
                if self.before_listing:
                    self.before_listing.pop(0)()
                return [
                    ListedTransaction(name, producer_id, state)
                    for name, (state, producer_id, _) in self.states.items()
                    if name.startswith(prefix)
                ]
            case DescribeTransactions(ids):
                return {each: self._described(each) for each in ids}
            case EndTransactions(endings, commit):
                assert not commit
                return [self._abort(each) for each in endings]
            case Pause():
                self.pauses += 1
                return None
        raise AssertionError(request)

    def _described(self, name: str) -> TransactionState | None:
        if name not in self.states:
            return None
        state, producer_id, epoch = self.states[name]
        return TransactionState(name, state, producer_id, epoch, 60_000, 0, ())

    def _abort(self, ending: Ending) -> EndAnswer:
        _, producer_id, epoch = self.states[ending.transactional_id]
        if self.busy.get(ending.transactional_id, 0):
            self.busy[ending.transactional_id] -= 1
            return EndAnswer.BUSY
        if (producer_id, epoch) != (ending.producer_id, ending.epoch):
            return EndAnswer.UNKNOWN
        self.ended.append(ending.transactional_id)
        self.states[ending.transactional_id] = ("CompleteAbort", producer_id, epoch + 1)
        return EndAnswer.COMPLETED


ANY_STATE = ("Empty", "Ongoing", "PrepareCommit", "PrepareAbort", "CompleteCommit", "CompleteAbort", "Dead")


@pytest.mark.parametrize("state", ANY_STATE)
def test_an_older_id_is_aborted_in_whatever_state_it_is(state: str) -> None:
    broker = Broker({"eo:p:out:0:1.0:0": state})
    assert drive(sweep("p", 2, 0), broker) == 1
    assert broker.ended == ["eo:p:out:0:1.0:0"]
    assert broker.states["eo:p:out:0:1.0:0"][2] == 1


@pytest.mark.parametrize("state", ANY_STATE)
def test_a_sweep_touches_only_older_ids_of_its_own_pipeline(state: str) -> None:
    foreign = [
        "eo:p:out:0:2.1:0", "eo:p:out:0:2.2:0", "eo:p:out:0:3.0:0", "eo:p:coordinator", "eo:p-q:out:0:1.0:0",
        "eo:pq:out:0:1.0:0", "eo:p:out:0:1.x:0", "eo:p:out:0:1.0:0:0", "eo:p:out:0:1.0", "eop:out:0:1.0:0",
    ]  # fmt: skip
    broker = Broker(dict.fromkeys(foreign, state))
    before = dict(broker.states)
    assert drive(sweep("p", 2, 1), broker) == 0
    assert broker.states == before


@pytest.mark.parametrize("state", ANY_STATE)
def test_a_protected_id_is_not_touched(state: str) -> None:
    broker = Broker({"eo:p:out:0:1.0:0": state, "eo:p:out:0:1.0:1": "Ongoing"})
    assert drive(sweep("p", 2, 0, protected={"eo:p:out:0:1.0:0"}), broker) == 1
    assert broker.ended == ["eo:p:out:0:1.0:1"]


def test_ids_that_were_fenced_before_are_passed_over_only_once_complete() -> None:
    """Only ids below the incarnation mark that are open or Empty are aborted, so that the others can expire."""
    older = {f"eo:p:out:0:1.0:{slot}": state for slot, state in enumerate(ANY_STATE)}
    newer = {f"eo:p:out:0:2.0:{slot}": state for slot, state in enumerate(ANY_STATE)}
    broker = Broker(older | newer)
    drive(sweep("p", 3, 0, fenced_below=(2, 0)), broker)
    at_rest = {"CompleteCommit", "CompleteAbort", "Dead"}
    assert set(broker.ended) == {name for name, state in older.items() if state not in at_rest} | set(newer)


def test_a_sweep_goes_on_until_nothing_older_is_open() -> None:
    zombie, late = "eo:p:out:0:1.0:0", "eo:p:out:0:1.0:1"
    broker = Broker({zombie: "Ongoing"})
    broker.busy[zombie] = 2

    def wake() -> None:
        broker.states[zombie] = ("Ongoing", 0, 5)
        broker.states[late] = ("Ongoing", 9, 0)

    def race(request: Request) -> Any:
        if isinstance(request, EndTransactions) and not broker.pauses and zombie not in broker.ended:
            broker.states[zombie] = ("Ongoing", 0, 4)  # initialised again between describe and end
            broker.busy.clear()
        return broker(request)

    broker.before_listing = [lambda: None, wake]
    assert drive(sweep("p", 2, 0), race) == 2
    assert {name: state for name, (state, _, _) in broker.states.items()} == dict.fromkeys(
        (zombie, late), "CompleteAbort"
    )


def test_an_id_that_expires_meanwhile_needs_no_fence() -> None:
    broker = Broker({"eo:p:out:0:1.0:0": "CompleteAbort"})

    def forgetful(request: Request) -> Any:
        if isinstance(request, DescribeTransactions):
            return dict.fromkeys(request.transactional_ids)
        return broker(request)

    assert drive(sweep("p", 2, 0), forgetful) == 1
    assert broker.ended == []


def test_a_sweep_that_never_succeeds_says_so() -> None:
    broker = Broker({"eo:p:out:0:1.0:0": "Ongoing"})

    def refuse(request: Request) -> Any:
        return [EndAnswer.UNKNOWN] * len(request.endings) if isinstance(request, EndTransactions) else broker(request)

    with pytest.raises(BrokerUnavailable, match="Nothing was lost"):
        drive(sweep("p", 2, 0), refuse)
    assert broker.pauses == SWEEPS_MAX

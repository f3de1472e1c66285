"""Settling a transactional id before its next producer: by the verdict that it shows, and never by another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from exactlyonce.checkpoint.requests import (
    DescribeProducers,
    DescribeTransactions,
    EndTransactions,
    Pause,
    Request,
    RewriteMarkers,
    drive,
)
from exactlyonce.checkpoint.transactions.broker_answers import EndAnswer, ProducerState, TransactionState
from exactlyonce.checkpoint.transactions.settling import settle

NAME = "eo:totals:coordinator"
LOG = [("totals.checkpoints", 0), ("totals.checkpoints", 1)]


class Broker:
    """One transactional id of a broker, with producer id 7; *open_* are the partitions where it lacks its markers."""

    def __init__(self, state: str | None, *open_: tuple[str, int]) -> None:
        self.state = state
        self.epoch = 3
        self.open = set(open_)
        self.verdicts: list[tuple[str, bool]] = []
        """Of rewritten markers and of ends, in order."""
        self.writes_before_the_fence = 0
        """How often a zombie completes a transaction just before the end that would fence it."""
        self.overtaken: list[Callable[[], None]] = []
        """What another settler does just before markers are written again."""

    def __call__(self, request: Request) -> Any:
        match request:
            case DescribeTransactions((name,)):
                return {name: self._described()}
            case DescribeProducers(partitions):
                return [ProducerState(*each, 7, 3, 4, 0, 10) for each in sorted(self.open) if each in partitions]
            case RewriteMarkers(_, 7, partitions, commit, epoch):
                for overtake in self.overtaken:
                    overtake()
                self.overtaken = []
                if epoch == self.epoch:
                    self._ended("markers", commit)
                    self.open -= set(partitions)
                return None
            case EndTransactions((ending,), commit):
                return [self._end(ending.epoch, commit)]
            case Pause():
                if self.state in ("PrepareCommit", "PrepareAbort"):
                    self.state = self.state.replace("Prepare", "Complete")
                return None
        raise AssertionError(request)

    def _described(self) -> TransactionState | None:
        return None if self.state is None else TransactionState(NAME, self.state, 7, self.epoch, 1000, 0, ())

    def _end(self, epoch: int, commit: bool) -> EndAnswer:
        if self.writes_before_the_fence:
            self.writes_before_the_fence -= 1
            self.epoch += 1
        if epoch != self.epoch:
            return EndAnswer.UNKNOWN
        if self.state == "Ongoing":
            self.open.clear()
        self._ended("end", commit)
        return EndAnswer.COMPLETED

    def _ended(self, how: str, commit: bool) -> None:
        self.verdicts.append((how, commit))
        self.state = "CompleteCommit" if commit else "CompleteAbort"
        self.epoch += 1


def test_an_id_that_was_never_used_needs_nothing() -> None:
    broker = Broker(None)
    drive(settle(NAME, LOG), broker)
    assert broker.verdicts == []


@pytest.mark.parametrize("state", ["Empty", "CompleteCommit", "CompleteAbort"])
def test_an_idle_writer_is_fenced(state: str) -> None:
    broker = Broker(state)
    drive(settle(NAME, LOG), broker)
    assert broker.verdicts == [("end", False)]


@pytest.mark.parametrize(("state", "commit"), [("CompleteCommit", True), ("CompleteAbort", False)])
def test_lost_markers_get_the_verdict_that_the_id_shows(state: str, commit: bool) -> None:
    broker = Broker(state, LOG[0])
    drive(settle(NAME, LOG), broker)
    assert broker.verdicts == [("markers", commit), ("end", False)]
    assert broker.open == set()


@pytest.mark.parametrize(("state", "commit"), [("CompleteCommit", False), ("CompleteAbort", True)])
def test_a_verdict_that_was_overtaken_is_written_nowhere(state: str, commit: bool) -> None:
    """Another settler has ended the transaction otherwise in one partition meanwhile: it ends alike in the others."""
    broker = Broker(state, *LOG)

    def settled_otherwise() -> None:
        broker._ended("other", commit)
        broker.open -= {LOG[0]}

    broker.overtaken = [settled_otherwise]
    drive(settle(NAME, LOG), broker)
    assert broker.verdicts == [("other", commit), ("markers", commit), ("end", False)]
    assert broker.open == set()


@pytest.mark.parametrize(("state", "commit"), [("PrepareCommit", True), ("PrepareAbort", False)])
def test_an_end_under_way_is_waited_for(state: str, commit: bool) -> None:
    broker = Broker(state, *LOG)
    drive(settle(NAME, LOG), broker)
    assert broker.verdicts == [("markers", commit), ("end", False)]


def test_what_was_not_asked_to_be_committed_is_aborted() -> None:
    broker = Broker("Ongoing", *LOG)
    drive(settle(NAME, LOG), broker)
    assert broker.verdicts == [("end", False), ("end", False)]


def test_a_writer_that_is_quicker_than_the_fence_is_looked_at_again() -> None:
    broker = Broker("CompleteCommit")
    broker.writes_before_the_fence = 2
    drive(settle(NAME, LOG), broker)
    assert broker.verdicts == [("end", False)]


def test_what_nobody_knows_the_end_of_is_aborted() -> None:
    """Open, and the id was initialised since: nobody has acted upon what readers never saw, so that it is aborted."""
    broker = Broker("Empty", LOG[0])
    drive(settle(NAME, LOG), broker)
    assert broker.verdicts == [("markers", False), ("end", False)]
    assert broker.open == set()


def test_another_producer_on_the_log_is_none_of_ours() -> None:
    broker = Broker("CompleteCommit")

    def perform(request: Request) -> Any:
        if isinstance(request, DescribeProducers):
            return [msgspec.structs.replace(ProducerState(*LOG[0], 7, 3, 4, 0, 10), producer_id=8)]
        return broker(request)

    drive(settle(NAME, LOG), perform)
    assert broker.verdicts == [("end", False)]

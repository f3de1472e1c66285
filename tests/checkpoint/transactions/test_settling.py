"""Settling a transactional id before its next producer: by the verdict that it shows, and never by another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from exactlyonce.checkpoint.requests import (
    DescribeProducers,
    DescribeTransactions,
    EndAnswer,
    EndTransactions,
    Pause,
    ProducerState,
    Request,
    RewriteMarkers,
    TransactionState,
    drive,
)
from exactlyonce.checkpoint.transactions.commit import settle

NAME = "eo:totals:coordinator"
LOG = [("totals.checkpoints", 0), ("totals.checkpoints", 1)]


class Broker:
    """One transactional id of a broker, with producer id 7; *open_* are the partitions where it lacks its markers."""

    def __init__(self, state: str | None, *open_: tuple[str, int]) -> None:
        self.state = state
        self.epoch = 3
        self.open = set(open_)
        self.verdicts: list[tuple[str, bool]] = []
        """The rewritten markers and ends, in order."""
        self.writes_before_the_fence = 0
        """How often a zombie completes a transaction just before the end that would fence it."""
        self.overtaken: list[Callable[[], None]] = []
        """The acts of another settler just before markers are written again."""

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


FENCED = ("end", False)
SETTLED: dict[str, tuple[str | None, list[tuple[str, int]], list[tuple[str, bool]]]] = {
    "an id that was never used needs nothing": (None, [], []),
    **{f"an idle writer is fenced: {state}": (state, [], [FENCED])
       for state in ("Empty", "CompleteCommit", "CompleteAbort")},
    "lost markers get the verdict that the id shows: commit": ("CompleteCommit", LOG[:1], [("markers", True), FENCED]),
    "lost markers get the verdict that the id shows: abort": ("CompleteAbort", LOG[:1], [("markers", False), FENCED]),
    "an end under way is waited for: commit": ("PrepareCommit", LOG, [("markers", True), FENCED]),
    "an end under way is waited for: abort": ("PrepareAbort", LOG, [("markers", False), FENCED]),
    "what was not asked to be committed is aborted": ("Ongoing", LOG, [("end", False), FENCED]),
    "what is open though the id was initialised since has been seen by nobody, and is aborted": (
        "Empty", LOG[:1], [("markers", False), FENCED]),
}  # fmt: skip


@pytest.mark.parametrize("case", SETTLED)
def test_an_id_is_settled_by_the_verdict_that_it_shows(case: str) -> None:
    state, open_, verdicts = SETTLED[case]
    broker = Broker(state, *open_)
    drive(settle(NAME, LOG), broker)
    assert (broker.verdicts, broker.open) == (verdicts, set())


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


def test_a_writer_that_is_quicker_than_the_fence_is_looked_at_again() -> None:
    broker = Broker("CompleteCommit")
    broker.writes_before_the_fence = 2
    drive(settle(NAME, LOG), broker)
    assert broker.verdicts == [("end", False)]


def test_another_producer_on_the_log_is_none_of_ours() -> None:
    broker = Broker("CompleteCommit")

    def perform(request: Request) -> Any:
        if isinstance(request, DescribeProducers):
            return [msgspec.structs.replace(ProducerState(*LOG[0], 7, 3, 4, 0, 10), producer_id=8)]
        return broker(request)

    drive(settle(NAME, LOG), perform)
    assert broker.verdicts == [("end", False)]

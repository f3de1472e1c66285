"""The check before the decision: committables in the broker's own words, or why not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from blank_manifest import blank_committable
from scripted_broker import name, precommit, transactions

from exactlyonce.checkpoint.events import Refuse
from exactlyonce.checkpoint.records.manifest import Committable, Precommit, Written
from exactlyonce.checkpoint.requests import (
    DescribeProducers,
    DescribeTransactions,
    ProducerState,
    Request,
    TransactionState,
    drive,
)


class Asked:
    def __init__(self, states: Iterable[TransactionState], producers: Iterable[ProducerState]) -> None:
        self.states = {each.transactional_id: each for each in states}
        self.producers = list(producers)
        self.asked: list[Request] = []

    def __call__(self, request: Request) -> Any:
        self.asked.append(request)
        match request:
            case DescribeTransactions(ids):
                return {each: self.states.get(each) for each in ids}
            case DescribeProducers(partitions):
                return [each for each in self.producers if (each.topic, each.partition) in partitions]
        raise AssertionError(request)


def ongoing(each: Precommit, *partitions: tuple[str, int], state: str = "Ongoing", epoch: int = 3) -> TransactionState:
    return TransactionState(each.transactional_id, state, each.producer_id, epoch, 100_000, 0, partitions)


def producing(each: Precommit, partition: int, records: int, start: int | None = 50, epoch: int = 3) -> ProducerState:
    return ProducerState("t", partition, each.producer_id, epoch, records - 1, 0, start)


def checked(precommits: list[Precommit], world: Asked, age_ms: int = 0) -> list[Committable] | Refuse:
    ages_ms = {each.transactional_id: age_ms for each in precommits}
    return drive(transactions().check_uncounted(precommits, ages_ms), world)


def test_a_committable_is_made_of_the_brokers_own_words() -> None:
    """Producers of others, partitions that it is not in, and those that it has written nothing to are left out."""
    ours, theirs = precommit(0, records=7), precommit(1)
    world = Asked(
        [ongoing(ours, ("t", 0), ("t", 1), ("t", 2))],
        [
            producing(ours, 0, 3, 50), producing(ours, 1, 4, 60), producing(ours, 2, 0, None),
            producing(theirs, 0, 9), producing(ours, 1, 9, epoch=2), producing(ours, 3, 9),
        ],
    )  # fmt: skip
    written = (Written("t", 0, 50, 3), Written("t", 1, 60, 4))
    assert checked([ours], world) == [blank_committable(transactional_id=name(0), producer_id=10, written=written)]
    assert world.asked == [
        DescribeTransactions((name(0),)), DescribeProducers((("t", 0), ("t", 1), ("t", 2)))
    ]  # fmt: skip


def test_precommits_without_records_are_no_committables_and_nothing_is_asked() -> None:
    world = Asked([], [])
    assert checked([precommit(0, records=0)], world) == []
    assert world.asked == []


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (None, "unknown to the broker, not Ongoing"),
        (ongoing(precommit(0), ("t", 0), state="CompleteAbort"), "is CompleteAbort, not Ongoing"),
        (ongoing(precommit(0), ("t", 0), state="Empty"), "is Empty, not Ongoing"),
        (ongoing(precommit(0), ("t", 0), epoch=4), "belongs to another producer now"),
        (msgspec.structs.replace(ongoing(precommit(0)), producer_id=99), "belongs to another producer now"),
    ],
)
def test_a_transaction_that_is_not_open_under_our_producer_refuses_the_checkpoint(
    state: TransactionState | None, said: str
) -> None:
    verdict = checked([precommit(0)], Asked([state] if state else [], [producing(precommit(0), 0, 5)]))
    assert isinstance(verdict, Refuse)
    assert said in verdict.reason


@pytest.mark.parametrize(
    ("timeout_ms", "age_ms", "refused"),
    [(100_000, 95_000, False), (100_000, 95_001, True), (4_000, 3_000, False), (4_000, 3_001, True)],
)
def test_a_transaction_with_little_time_left_refuses_the_checkpoint(
    timeout_ms: int, age_ms: int, refused: bool
) -> None:
    """The commit might come too late with less than five seconds left, or a quarter of a short timeout."""
    world = Asked([ongoing(precommit(0), ("t", 0))], [producing(precommit(0), 0, 5)])
    verdict = drive(transactions(timeout_ms=timeout_ms).check_uncounted([precommit(0)], {name(0): age_ms}), world)
    assert isinstance(verdict, Refuse) is refused


@pytest.mark.parametrize(
    "producers",
    [
        [],
        [producing(precommit(0), 0, 4)],
        [producing(precommit(0), 0, 6)],
        [producing(precommit(0), 0, 5, start=None)],
        [producing(precommit(0), 0, 5, epoch=4)],
        [producing(precommit(0), 0, 5), producing(precommit(0), 1, 1)],
    ],
)
def test_a_count_that_is_not_the_brokers_refuses_the_checkpoint(producers: list[ProducerState]) -> None:
    verdict = checked([precommit(0)], Asked([ongoing(precommit(0), ("t", 0), ("t", 1))], producers))
    assert isinstance(verdict, Refuse)
    assert "but 5 were produced" in verdict.reason

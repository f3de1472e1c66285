"""Faults on order, in front of the model and of a real broker alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from broker_histories import CreateTopic, Describe, End, Init, Produce, Read, Stage, play

from exactlyonce.testing import BrokerModel, Error, Fault, NoAnswer, SimulatedClock, UnreliableBroker

OPEN = (CreateTopic("t"), Init("a"), Produce("a", "t", 0, ["x"]))
COMMITTED = ("NONE", (0, 2, 2), [(0, None, "x")])


@pytest.fixture(params=["model", pytest.param("real", marks=pytest.mark.broker)])
def unreliable(request: pytest.FixtureRequest) -> tuple[Stage, UnreliableBroker]:
    """A stage with an open transaction of producer a, and the network before its broker."""
    stage: Stage = request.getfixturevalue(f"new_{request.param}_stage")()
    clock, wait = SimulatedClock(), stage.pause
    if isinstance(stage.broker, BrokerModel):
        broker = UnreliableBroker(BrokerModel(clock), clock)
        stage = Stage(broker, clock.advance, "")
    else:  # however slow it is: what is delayed comes when the test waits for it

        def pause(duration_ms: int) -> None:
            clock.advance(duration_ms)
            wait(duration_ms)

        stage.broker = broker = UnreliableBroker(stage.broker, clock)
        stage.pause = pause
    play(OPEN, stage)
    return stage, broker


def unanswered(ask: Callable[[], object]) -> None:
    with pytest.raises(NoAnswer):
        ask()


def test_a_lost_request_is_never_carried_out(unreliable: tuple[Stage, UnreliableBroker]) -> None:
    stage, broker = unreliable
    broker.inject("end_txn", Fault.REQUEST_LOST)
    unanswered(lambda: play([End("a", commit=True)], stage))
    assert play([Describe("a"), End("a", commit=True), Read("t", 0)], stage) == [
        ("Ongoing", "p0", 0, 60_000, True, [("t", 0)]),
        "NONE",
        COMMITTED,
    ]


def test_a_lost_answer_hides_that_it_was_carried_out(unreliable: tuple[Stage, UnreliableBroker]) -> None:
    stage, broker = unreliable
    broker.inject("end_txn", Fault.ANSWER_LOST)
    unanswered(lambda: play([End("a", commit=True)], stage))
    assert play([End("a", commit=True), Read("t", 0)], stage) == ["NONE", COMMITTED]


def test_a_delayed_end_meets_another_time(unreliable: tuple[Stage, UnreliableBroker]) -> None:
    """An EndTxn that arrives when the next producer has its transaction open is fenced by its epoch."""
    stage, broker = unreliable
    broker.inject("end_txn", Fault.DELAYED, delay_ms=50)
    unanswered(lambda: play([End("a", commit=True)], stage))
    play([Init("a"), Produce("a", "t", 0, ["y"])], stage)
    stage.pause(100)
    assert play([Describe("a"), Read("t", 0)], stage) == [
        ("Ongoing", "p0", 2, 60_000, True, [("t", 0)]),
        ("NONE", (0, 2, 3), []),
    ]


def test_a_delayed_batch_still_joins_an_open_transaction(unreliable: tuple[Stage, UnreliableBroker]) -> None:
    stage, broker = unreliable
    broker.inject("produce", Fault.DELAYED, delay_ms=50)
    unanswered(lambda: play([Produce("a", "t", 0, ["late"])], stage))
    assert play([Read("t", 0, committed=False)], stage) == [("NONE", (0, 0, 1), [(0, None, "x")])]
    stage.pause(100)
    assert play([Read("t", 0, committed=False)], stage) == [("NONE", (0, 0, 2), [(0, None, "x"), (1, None, "late")])]


def test_a_request_that_arrives_twice(unreliable: tuple[Stage, UnreliableBroker]) -> None:
    stage, broker = unreliable
    broker.inject("produce", Fault.APPLIED_TWICE)
    broker.inject("init_transactions", Fault.APPLIED_TWICE, nth=2)
    twice = (Produce("a", "t", 0, ["y"], sequence=1), Read("t", 0, committed=False), Init("b"), Init("c"))
    assert play(twice, stage) == [
        ("NONE", 1),
        ("NONE", (0, 0, 2), [(0, None, "x"), (1, None, "y")]),
        ("NONE", "p1", 0),
        ("NONE", "p2", 1),
    ]


def test_a_fault_meets_the_call_it_was_ordered_for(unreliable: tuple[Stage, UnreliableBroker]) -> None:
    stage, broker = unreliable
    broker.inject("fetch", Fault.REQUEST_LOST, nth=2)
    play([Read("t", 0), Describe("a")], stage)
    assert (len(broker.pending), broker.fired) == (1, [])
    unanswered(lambda: play([Read("t", 0)], stage))
    play([Read("t", 0)], stage)
    assert broker.pending == []
    assert [(each.api, each.fault) for each in broker.fired] == [("fetch", Fault.REQUEST_LOST)]


def test_a_broker_that_is_down_cannot_be_reached(clock: SimulatedClock, model: BrokerModel) -> None:
    """A request delayed past the broker's end finds nobody and disturbs nobody."""
    broker = UnreliableBroker(model, clock)
    _, producer_id, epoch = broker.init_transactions("a")
    broker.inject("end_txn", Fault.DELAYED, delay_ms=10)
    unanswered(lambda: broker.end_txn("a", producer_id, epoch, commit=False))
    clock.advance(20)
    model.stop()
    unanswered(lambda: broker.list_transactions())
    model.start()
    assert [each.state for each in broker.list_transactions()] == ["Empty"]
    assert broker.end_txn("a", producer_id, epoch, commit=False) is Error.NONE

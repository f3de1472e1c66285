"""Time passes for a broker: timeouts, expiry, compaction, and restarts.

The tests run on the model and on a real broker with short intervals; they wait for states, never for times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest
from broker_histories import (
    AWAIT_LIMIT_MS,
    Await,
    CreateTopic,
    Describe,
    End,
    Init,
    Kill,
    Produce,
    Producers,
    Read,
    Stage,
    Step,
    play,
)
from real_broker import RealBroker

from exactlyonce.testing import BrokerModel, BrokerSettings, SimulatedClock

QUICK = {
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "100",
    "transaction.remove.expired.transaction.cleanup.interval.ms": "100",
    "producer.id.expiration.check.interval.ms": "100",
    "log.cleaner.backoff.ms": "100",
    "log.cleaner.min.cleanable.ratio": "0.0001",
    "log.roll.ms": "100",
}
FORGETFUL = {"transactional.id.expiration.ms": "5000", "producer.id.expiration.ms": "5000"}

NewStage = Callable[[Mapping[str, str]], tuple[Stage, Callable[[], None]]]
"""Given Kafka's settings, makes a stage, and a function that kills its broker and brings it up again."""


def new_model(settings: Mapping[str, str]) -> tuple[Stage, Callable[[], None]]:
    broker_settings = BrokerSettings(
        timeout_check_interval_ms=int(settings["transaction.abort.timed.out.transaction.cleanup.interval.ms"]),
        expiration_check_interval_ms=int(settings["transaction.remove.expired.transaction.cleanup.interval.ms"]),
        transactional_id_expiration_ms=int(settings.get("transactional.id.expiration.ms", 604_800_000)),
        producer_id_expiration_ms=int(settings.get("producer.id.expiration.ms", 86_400_000)),
    )
    clock = SimulatedClock()
    model = BrokerModel(clock, broker_settings)

    def restart() -> None:
        model.stop()
        clock.advance(5_000)
        model.start()

    return Stage(model, clock.advance, ""), restart


@pytest.fixture(params=["model", pytest.param("real", marks=[pytest.mark.broker, pytest.mark.slow])])
def new_stage(request: pytest.FixtureRequest) -> Iterator[NewStage]:
    if request.param == "model":
        yield new_model
        return
    own_broker, pause = request.getfixturevalue("own_broker"), request.getfixturevalue("pause")
    brokers = []

    def new_real(settings: Mapping[str, str]) -> tuple[Stage, Callable[[], None]]:
        cluster = own_broker(settings)
        brokers.append(RealBroker(cluster.bootstrap_servers))

        def restart() -> None:
            cluster.broker.kill()
            cluster.broker.start()

        return Stage(brokers[-1], pause, ""), restart

    yield new_real
    for broker in brokers:
        broker.close()


def await_seen(stage: Stage, step: Step, expected: object) -> None:
    for _ in range(AWAIT_LIMIT_MS // 10):
        seen = step.play(stage)
        if seen == expected:
            return
        stage.pause(10)
    assert seen == expected


@pytest.mark.exhaustive(but=["model"])
def test_the_broker_aborts_what_stays_open_too_long(new_stage: NewStage) -> None:
    """A commit that comes after the timeout is INVALID_TXN_STATE: the committable is lost, its records are not."""
    stage, _ = new_stage(QUICK)
    history = (CreateTopic("t"), Init("a", timeout_ms=1_000), Produce("a", "t", 0, ["x"]), Kill("a"))
    late = (Await("a", "CompleteAbort"), End("a", commit=True), End("a", commit=False), Describe("a"), Read("t", 0))
    zombie = (Produce("a", "t", 0, ["z"], life=0), Read("t", 0, committed=False), Init("a"))
    assert play([*history, *late, *zombie], stage)[5:] == [
        "INVALID_TXN_STATE",
        "NONE",
        ("CompleteAbort", "p0", 1, 1_000, True, []),
        ("NONE", (0, 2, 2), []),
        ("INVALID_PRODUCER_EPOCH", -1),
        ("NONE", (0, 2, 2), [(0, None, "x")]),
        ("NONE", "p0", 2),
    ]


@pytest.mark.exhaustive(but=["model"])
def test_ids_and_producers_expire(new_stage: NewStage) -> None:
    """An id that nobody used for long is unknown, its commit unprovable but by its records; an open one stays."""
    stage, _ = new_stage(QUICK | FORGETFUL)
    opened = (CreateTopic("t", 2), Init("b"), Produce("b", "t", 1, ["y"]))
    ended = (Init("a"), Produce("a", "t", 0, ["x"]), End("a", commit=True), Await("a", "none"))
    assert play([*opened, *ended, End("a", commit=True), Read("t", 0), Describe("b")], stage)[7:] == [
        "INVALID_PRODUCER_ID_MAPPING",
        ("NONE", (0, 2, 2), [(0, None, "x")]),
        ("Ongoing", "p0", 0, 60_000, True, [("t", 1)]),
    ]
    await_seen(stage, Producers("t", 0), [])
    assert play([Producers("t", 1), Init("a")], stage) == [[("p0", 0, 0, 0)], ("NONE", "p2", 0)]


@pytest.mark.exhaustive(but=["model"])
def test_nothing_is_lost_when_the_broker_is_killed(new_stage: NewStage) -> None:
    """Committed stays committed, open stays open and can go on, and what was fenced stays fenced."""
    stage, restart = new_stage(QUICK)
    ended = (CreateTopic("t"), Init("a"), Produce("a", "t", 0, ["x"]), End("a", commit=True))
    opened = (Init("b"), Produce("b", "t", 0, ["y"]), Init("c"), Produce("c", "t", 0, ["z"]), Init("c"))
    play([*ended, *opened], stage)
    restart()
    zombie = Produce("c", "t", 0, ["z"], life=0, added=True)
    assert play([Describe("b"), End("a", commit=True), zombie, Producers("t", 0), Read("t", 0)], stage) == [
        ("Ongoing", "p1", 0, 60_000, True, [("t", 0)]),
        "NONE",
        ("INVALID_PRODUCER_EPOCH", -1),
        [("p0", 1, -1, None), ("p1", 0, 0, 2), ("p2", 1, -1, None)],
        ("NONE", (0, 2, 5), [(0, None, "x")]),
    ]
    assert play([Produce("b", "t", 0, ["w"]), End("b", commit=True), Read("t", 0)], stage) == [
        ("NONE", 5),
        "NONE",
        ("NONE", (0, 7, 7), [(0, None, "x"), (2, None, "y"), (5, None, "w")]),
    ]


@pytest.mark.exhaustive(but=["model"])
def test_compaction_keeps_the_newest_committed_record_of_each_key(new_stage: NewStage) -> None:
    """Below the last stable offset only the newest record of a key stays, at its offset; aborted ones go."""
    stage, _ = new_stage(QUICK)
    first = (CreateTopic("c", compact=True), Init("a"), Produce("a", "c", 0, [("k", "1"), ("j", "1"), ("k", "2")]))
    aborted = (End("a", commit=True), Init("a"), Produce("a", "c", 0, [("j", "9")]), End("a", commit=False))
    opened = (Init("b"), Produce("b", "c", 0, [("k", "3")]))
    newer = (Init("i", transactional=False), Produce("i", "c", 0, [("j", "2")]))
    # A real broker compacts closed segments only: one older than log.roll.ms is closed by the next record.
    for history in ((*first, *aborted), (*opened, *newer), (Produce("i", "c", 0, [("l", "1")]),)):
        play(history, stage)
        stage.pause(2 * int(QUICK["log.roll.ms"]))
    if isinstance(stage.broker, BrokerModel):
        stage.broker.compact("c")
    kept = [(1, "j", "1"), (2, "k", "2")]
    unstable = [(6, "k", "3"), (7, "j", "2"), (8, "l", "1")]
    await_seen(stage, Read("c", 0, committed=False), ("NONE", (0, 6, 9), kept + unstable))
    assert play([Read("c", 0)], stage) == [("NONE", (0, 6, 9), kept)]

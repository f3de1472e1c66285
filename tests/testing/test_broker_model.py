"""The model alone can stand still, and crash between two markers."""

from __future__ import annotations

import pytest
from broker_histories import (
    Add,
    CreateTopic,
    End,
    Init,
    Produce,
    Read,
    Stage,
    play,
)

from exactlyonce.testing import BrokerModel, Error, Isolation, NoAnswer, SimulatedClock


@pytest.fixture
def stage(model: BrokerModel, clock: SimulatedClock) -> Stage:
    """Producer a has a record in each of two partitions, in an open transaction."""
    stage = Stage(model, clock.advance, "")
    play([CreateTopic("t", 2), Init("a"), Produce("a", "t", 0, ["x"]), Produce("a", "t", 1, ["y"])], stage)
    return stage


def values(model: BrokerModel, partition: int) -> list[bytes]:
    return [record.value for record in model.fetch("t", partition).records]


def state(model: BrokerModel) -> str:
    found = model.describe_transactions(["a"])["a"]
    assert found is not None
    return found.state


def test_a_commit_shows_one_partition_at_a_time(stage: Stage, model: BrokerModel, clock: SimulatedClock) -> None:
    play([End("a", commit=True, settle=False)], stage)
    seen = []
    for _ in range(4):
        seen.append((values(model, 0), values(model, 1), state(model)))
        clock.advance(model.settings.marker_delay_ms)
    assert seen == [
        ([], [], "PrepareCommit"),
        ([b"x"], [], "PrepareCommit"),
        ([b"x"], [b"y"], "PrepareCommit"),
        ([b"x"], [b"y"], "CompleteCommit"),
    ]


def test_missing_markers_are_written_by_the_next_life(stage: Stage, model: BrokerModel, clock: SimulatedClock) -> None:
    play([End("a", commit=True, settle=False)], stage)
    clock.advance(model.settings.marker_delay_ms)
    assert (values(model, 0), values(model, 1)) == ([b"x"], [])
    model.stop()
    clock.advance(1_000)
    model.start()
    assert play([End("a", commit=True)], stage) == ["NONE"]
    assert (values(model, 0), values(model, 1)) == ([b"x"], [b"y"])
    assert [model.fetch("t", partition).high_watermark for partition in (0, 1)] == [3, 2]


def test_a_lost_marker_hangs_its_partition(stage: Stage, model: BrokerModel, clock: SimulatedClock) -> None:
    play([End("a", commit=True, settle=False)], stage)
    model.stop()
    model.start(lose_markers=True)
    after = (Init("a"), Produce("a", "t", 0, ["z"]), End("a", commit=True))
    assert play([End("a", commit=True), *after], stage)[0] == "NONE"
    assert state(model) == "CompleteCommit"
    assert values(model, 1) == []
    assert model.fetch("t", 1).last_stable_offset == 0
    assert [each.transaction_start_offset for each in model.describe_producers([("t", 1)])] == [0]


@pytest.mark.parametrize(("commit", "shown"), [(True, [b"y"]), (False, [])])
def test_the_next_end_decides_what_hangs(stage: Stage, model: BrokerModel, commit: bool, shown: list[bytes]) -> None:
    play([End("a", commit=True, settle=False)], stage)
    model.stop()
    model.start(lose_markers=True)
    play([End("a", commit=True), Init("a"), Add("a", "t", 1), End("a", commit=commit)], stage)
    assert values(model, 1) == shown
    assert model.fetch("t", 1).last_stable_offset == model.fetch("t", 1).high_watermark


def test_nothing_answers_while_the_broker_is_down(stage: Stage, model: BrokerModel, clock: SimulatedClock) -> None:
    model.stop()
    with pytest.raises(NoAnswer):
        model.fetch("t", 0)
    with pytest.raises(NoAnswer):
        model.end_txn("a", 0, 0, commit=True)
    clock.advance(3_600_000)
    model.start()
    assert state(model) == "Ongoing"
    clock.advance(model.settings.timeout_check_interval_ms + 100)
    assert play([End("a", commit=True), Read("t", 0)], stage) == ["INVALID_TXN_STATE", ("NONE", (0, 2, 2), [])]


def test_a_jump_of_the_wall_clock_times_nothing_out(stage: Stage, model: BrokerModel, clock: SimulatedClock) -> None:
    clock.jump(3_600_000)
    clock.advance(20_000)
    clock.jump(-7_200_000)
    assert play([End("a", commit=True)], stage) == ["NONE"]


def test_a_compacted_tombstone_goes_on_a_later_round(model: BrokerModel, clock: SimulatedClock) -> None:
    stage = Stage(model, clock.advance, "")
    deleted = Produce("i", "c", 0, [("k", "1"), ("j", "1"), ("k", None)])
    play([CreateTopic("c", compact=True), Init("i", transactional=False), deleted], stage)
    model.compact("c")
    assert [record.offset for record in model.fetch("c", 0).records] == [1, 2]
    model.compact("c", drop_tombstones=True)
    assert [record.offset for record in model.fetch("c", 0, 0, Isolation.READ_UNCOMMITTED).records] == [1]
    assert model.fetch("c", 0, 2).error is Error.NONE
    assert model.fetch("c", 0).high_watermark == 3

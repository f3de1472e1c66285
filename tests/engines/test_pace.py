"""Slices are as long as they may be to take a short time, and channels hold what is processed in a short time."""

from __future__ import annotations

import socket
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from exactlyonce.engines.local.channels import WINDOW_AT_FIRST, Channel, LocalChannel, SocketChannel
from exactlyonce.engines.local.inputs import ChannelInput
from exactlyonce.engines.local.pace import (
    ALIGNED,
    BATCH_RECORDS_MAX,
    IN_FLIGHT_MIN,
    SLICE_CAUTIOUS,
    Outlet,
    Pace,
    slice_pace,
    snapshot_budget_s,
)
from exactlyonce.engines.runtime.activity import BREATH_INTERVAL_S, CHUNK_RECORDS, Activity
from exactlyonce.engines.runtime.batch import Batch
from exactlyonce.engines.runtime.batch_codec import BatchCodec, Coordinates
from exactlyonce.engines.runtime.operators import Map, Process, Stateful
from exactlyonce.engines.runtime.order_log import OrderRuns
from exactlyonce.engines.runtime.signals import Barrier
from exactlyonce.pipeline.errors import RecordError
from exactlyonce.state.hash_map import KeyedTable
from exactlyonce.state.stored import StoredState


def steps(pace: Pace, cost_s: Callable[[int], float], count: int) -> list[int]:
    """The sizes of *count* slices whose records cost *cost_s* of their size, the next one last."""
    sizes = [pace.size]
    for _ in range(count):
        pace.took(pace.size, pace.size * cost_s(pace.size))
        sizes.append(pace.size)
    return sizes


def test_a_fast_slice_is_followed_by_one_of_twice_its_size_up_to_the_most() -> None:
    assert steps(slice_pace(), lambda _: 4e-6, 10) == [4, 8, 16, 32, 64, 128, 256, 512, 1024, 2000, 2000]


def test_slices_of_slow_records_keep_to_the_time() -> None:
    assert steps(slice_pace(), lambda _: 0.05, 3) == [4, 1, 1, 1]
    assert steps(slice_pace(), lambda _: 0.001, 7)[-2:] == [75, 75]


def test_slices_of_an_operator_that_asks_for_many_at_a_time_have_as_many() -> None:
    """Such a slice takes as long as one record, also where the attempt is cautious or a barrier is under way."""
    assert steps(slice_pace(least=200, cautious=True), lambda size: 1.0 / size, 3) == [200, 200, 200, 200]
    pace = slice_pace(least=200)
    pace.took(200, 1.0)
    assert pace.within(hurried=True) == 200


def test_a_slice_that_was_slow_shrinks_the_next_at_once() -> None:
    pace = Pace(ALIGNED.slice_s, BATCH_RECORDS_MAX, BATCH_RECORDS_MAX)
    pace.took(2000, 100.0)
    assert pace.size == 1
    pace.took(0, 5.0)  # nothing was taken: that tells nothing
    assert pace.size == 1


@pytest.mark.parametrize("elapsed_s", [0.0, 1e-12, 1e6])
def test_a_pace_is_always_between_one_and_the_most(elapsed_s: float) -> None:
    pace = slice_pace()
    for _ in range(40):
        pace.took(pace.size, elapsed_s)
        assert 1 <= pace.size <= BATCH_RECORDS_MAX


class Number(msgspec.Struct):
    n: int


def numbers(first: int, count: int) -> Batch:
    records = [Number(n) for n in range(first, first + count)]
    return Batch(records, [Coordinates("t", 0, each.n) for each in records], [b"%d" % each.n for each in records])


def pairs() -> tuple[SocketChannel, SocketChannel]:
    ours, theirs = socket.socketpair()
    for each in (ours, theirs):
        each.setblocking(False)
    return SocketChannel(ours), SocketChannel(theirs)


def test_a_frame_is_handed_out_in_slices_and_the_barrier_after_the_last() -> None:
    channel = LocalChannel()
    codec = BatchCodec(Number)
    read = ChannelInput("edge:0", channel, codec, lambda _: None)
    channel.send(codec.encode(numbers(0, 50)), 50)
    channel.send(codec.encode(numbers(50, 3)), 3)
    channel.send_signal(Barrier(7, 6))
    channel.send(codec.encode(numbers(53, 1)), 1)
    taken: list[Any] = []
    order = OrderRuns()
    read.slices.pace = Pace(1e-9, 7, 7)
    while not isinstance(item := read.next(5), Barrier):
        assert isinstance(item, Batch)
        assert len(item.records) <= 5
        assert item.keys == [b"%d" % each.n for each in item.records]
        assert [each.offset() for each in item.origins] == [each.n for each in item.records]
        taken += item.records
        read.note(order)
        read.processed()
    assert [each.n for each in taken] == list(range(53))
    assert sum(order.runs[1::2]) == 53
    assert read.slices.pace.size == 1, "a slice that took longer than the time shrinks the next"
    assert isinstance(read.next(5), Batch)


@pytest.mark.parametrize("local", [True, False], ids=["local", "socket"])
def test_a_channel_has_room_for_what_its_reader_grants(local: bool) -> None:
    """Processed records, not received ones, make room again."""
    writer: Channel
    reader: Channel
    writer, reader = (both := LocalChannel(), both) if local else pairs()

    def exchange() -> None:
        for end in (writer, reader, writer):
            if isinstance(end, SocketChannel):
                end.flush()
                end.fill()
        if isinstance(writer, SocketChannel):
            writer.hear()

    assert writer.room == WINDOW_AT_FIRST
    writer.send(b"x" * 10, WINDOW_AT_FIRST)
    exchange()
    assert reader.receive() == b"x" * 10
    assert writer.room == 0
    writer.send_signal(Barrier(1, 0))
    exchange()
    assert reader.receive() == Barrier(1, 0), "a barrier is always accepted"
    reader.took(WINDOW_AT_FIRST // 2 - 1, WINDOW_AT_FIRST)
    exchange()
    assert writer.room == 0, "little room is none: batches would be small"
    reader.took(1, WINDOW_AT_FIRST)
    exchange()
    assert writer.room == WINDOW_AT_FIRST // 2
    reader.took(WINDOW_AT_FIRST // 2, 100)
    exchange()
    assert writer.room == 100
    writer.send(b"y", 60)
    reader.took(0, 5)
    exchange()
    assert writer.room == 0


def test_what_a_writer_does_not_hear_for_long_is_told_in_one() -> None:
    writer, reader = pairs()
    writer.send(b"x", 5000)
    for _ in range(5000):
        reader.took(1, 40)
        reader.flush()
    while writer.fill() or reader.flush():
        writer.hear()
    writer.hear()
    assert writer.room == 40


def test_an_operator_breathes_between_chunks_if_the_last_breath_is_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    breaths: list[int] = []
    done: list[int] = []
    activity = Activity()
    activity.breath = lambda: breaths.append(len(done))
    operator = Map("enrich", done.append, activity=activity)
    activity._breathe_at = float("inf")
    operator(numbers(0, 4 * CHUNK_RECORDS))
    assert breaths == []
    activity.turn()
    assert activity._breathe_at - activity.turned_s == pytest.approx(BREATH_INTERVAL_S)
    done.clear()
    activity._breathe_at = 0.0
    monkeypatch.setattr("exactlyonce.engines.runtime.activity.BREATH_INTERVAL_S", 3600.0)
    operator(numbers(0, CHUNK_RECORDS + 1))
    assert breaths == [CHUNK_RECORDS]


def test_what_an_operator_costs_is_its_own() -> None:
    now_s = [0.0]

    def taking(seconds: float) -> Callable[[Number], Number]:
        def take(number: Number) -> Number:
            now_s[0] += seconds
            return number

        return take

    activity = Activity(lambda: now_s[0])
    behind = Map("slow", taking(0.003), activity=activity)
    first = Map("fast", taking(0.001), activity=activity, downstream=[behind])
    first(numbers(0, 200))
    cost = activity.costliest()
    assert cost is not None
    assert (cost.operator, round(cost.share, 6), round(cost.record_ms, 6)) == ("slow", 0.75, 3.0)
    assert str(activity.current) == "operator 'slow'"
    activity.forget()
    assert activity.costliest() is None


@pytest.mark.parametrize("bad", [0, CHUNK_RECORDS - 1, CHUNK_RECORDS, 2 * CHUNK_RECORDS + 7])
def test_the_record_that_fails_is_found_in_any_chunk(bad: int) -> None:
    def fail(each: Number) -> Number:
        return Number(each.n // 0) if each.n == bad else each

    def fail_at_state(_: int | None, each: Number) -> tuple[int, Number]:
        return 1, fail(each)

    batch = numbers(0, 3 * CHUNK_RECORDS)
    table: KeyedTable[int] = KeyedTable(
        StoredState(operator="totals", type=int, groups=range(128), max_parallelism=128)
    )
    for operator in (
        Map("x", fail), Process("x", lambda each, emit: emit(fail(each))), Stateful("x", fail_at_state, table)
    ):  # fmt: skip
        with pytest.raises(RecordError, match=rf"t\[0\] offset {bad}\b"):
            operator(batch)


def test_outputs_do_not_depend_on_chunks() -> None:
    table: KeyedTable[int] = KeyedTable(
        StoredState(operator="totals", type=int, groups=range(128), max_parallelism=128)
    )
    pushed: list[Batch] = []
    operator = Stateful("totals", lambda n, _: ((n or 0) + 1,) * 2, table, downstream=[pushed.append])
    batch = numbers(0, 2 * CHUNK_RECORDS + 3)
    batch.keys = [b"k"] * len(batch.records)
    operator(batch)
    (out,) = pushed
    assert out.records == list(range(1, 2 * CHUNK_RECORDS + 4))


def test_a_frame_larger_than_what_is_read_ahead() -> None:
    writer, reader = pairs()
    frame = bytes(10 << 20)
    writer.send(frame, 1)
    writer.send_signal(Barrier(1, 0))
    received: list[object] = []
    while len(received) < 2:
        writer.flush()
        reader.fill()
        while (found := reader.receive()) is not None:
            received.append(found)
    assert received == [frame, Barrier(1, 0)]


class Place:
    """Something behind a subtask."""

    room, records = 100, 0


def test_a_subtask_takes_as_much_as_what_is_behind_it_has_room_for() -> None:
    """A channel for a tenth of the keys lets ten times its room come in; ten outputs a record, a tenth."""
    place = Place()
    outlet = Outlet(place)
    assert outlet.room == 100
    for _ in range(50):
        place.records += 100
        outlet.took(1_000)
    assert outlet.room == pytest.approx(1_000, rel=0.01)
    place.records += 10_000
    outlet.took(1_000)
    assert outlet.room == 10
    outlet.took(0)
    place.room = 3
    assert outlet.room == 1, "what there is room for comes on, if slowly"
    place.room = 0
    assert outlet.room == 0
    place.room = 100
    outlet.took(1_000)
    assert outlet.room == 100_000, "a place that gets nothing holds nobody back"


@pytest.mark.parametrize("siblings", [1, 4])
def test_a_channel_holds_what_has_left_it_lately(siblings: int) -> None:
    """Records cost nothing here, and the next operator takes 100 each half second."""
    now_s = [0.0]
    channel, codec = LocalChannel(), BatchCodec(Number)
    read = ChannelInput("edge:0", channel, codec, lambda _: None, siblings=siblings, now_s=lambda: now_s[0])
    read.slices.pace.size = BATCH_RECORDS_MAX

    def take(room: int) -> None:
        read.next(room)
        read.processed()

    windows = []
    for _ in range(8):  # nothing holds it up: what leaves grows with each turn
        channel.send(codec.encode(numbers(0, channel.room)), channel.room)
        while read.slices.rest is not None or channel.waits:
            take(BATCH_RECORDS_MAX)
        windows.append(read.window)
    assert all(1.5 * before <= after for before, after in pairwise(windows))
    now_s[0] += 1.0
    channel.send(codec.encode(numbers(0, 5_000)), 5_000)
    for _ in range(10):
        now_s[0] += 0.25
        take(50)
    assert read.window == 100
    now_s[0] += 100.0
    take(50)
    assert read.window == IN_FLIGHT_MIN // siblings, "it could have left in all of that time"
    read.close(True)
    take(50)
    assert channel.room == 0
    channel.took(5_000, 0)
    read.close(False)
    assert channel.room


def test_an_attempt_after_a_failure_begins_with_little() -> None:
    channel, codec = LocalChannel(), BatchCodec(Number)
    read = ChannelInput("edge:0", channel, codec, lambda _: None, cautious=True)
    channel.send(codec.encode(numbers(0, 4_000)), 4_000)
    for _ in range(20):
        batch = read.next(10_000)
        assert isinstance(batch, Batch)
        assert len(batch.records) <= SLICE_CAUTIOUS
        read.processed()
    read.trust()
    for _ in range(8):
        batch = read.next(10_000)
        assert isinstance(batch, Batch)
        read.slices.pace.took(len(batch.records), 0.0)
    assert read.slices.pace.size > SLICE_CAUTIOUS


def test_a_snapshot_goes_before_records_for_a_bounded_while() -> None:
    """It gets twice what records took, 8 ms at least and 20 at most; where records take longer, half of their time."""
    assert [round(1000 * snapshot_budget_s(each / 1000)) for each in (0, 2, 6, 10, 30, 40, 100)] == [
        8, 8, 12, 20, 20, 20, 50
    ]  # fmt: skip

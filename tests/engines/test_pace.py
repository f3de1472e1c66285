"""Slices are as long as they may be to take a short time, and channels hold what is processed in a short time."""

from __future__ import annotations

import socket
from collections.abc import Callable

import msgspec
import pytest

from exactlyonce.engines.local.channels import WINDOW_AT_FIRST, Channel, LocalChannel, SocketChannel
from exactlyonce.engines.local.inputs import ALIGNED, IN_FLIGHT_MIN, ChannelInput, Pace, slice_pace
from exactlyonce.engines.runtime.activity import BREATH_INTERVAL_S, CHUNK_RECORDS, Activity
from exactlyonce.engines.runtime.batch import Batch, BatchCodec, Coordinates
from exactlyonce.engines.runtime.operators import Map
from exactlyonce.engines.runtime.watermarks import Barrier


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


@pytest.mark.parametrize("away_s", [0.01, 0.6, 5.0])
def test_a_channel_whose_round_trip_is_long_comes_to_its_pace(away_s: float) -> None:
    """The window of a channel grows with each round trip, however long a busy machine takes for it, and not beyond the
    records that its reader processes in the bound of time."""
    now_s, codec, channel = [0.0], BatchCodec(Number), LocalChannel()
    source = ChannelInput("in", channel, codec, lambda _: None, now_s=lambda: now_s[0])

    def round_trips(count: int, record_s: float) -> int:
        for number in range(count):
            channel.send(codec.encode(numbers(number, source.window)), source.window)
            while channel.waits or source.slices.rest is not None:
                taken = source.next(source.window)
                assert isinstance(taken, Batch)
                now_s[0] += len(taken.records) * record_s
                source.processed()
            now_s[0] += away_s
        return source.window

    assert round_trips(1, 0.001) == 2 * IN_FLIGHT_MIN
    assert round_trips(12, 0.001) == pytest.approx(ALIGNED.in_flight_s / 0.001, rel=0.01)
    assert round_trips(12, 0.01) == pytest.approx(ALIGNED.in_flight_s / 0.01, rel=0.05)


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

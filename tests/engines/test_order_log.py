"""Order logs: what they say, however many runs there are, is what was noted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest

from exactlyonce.checkpoint.records.encoding import Block, encode
from exactlyonce.checkpoint.records.manifest import BLOCK_SIZE_MAX
from exactlyonce.engines.bounded.unit.ordering import ChannelLane, take_along
from exactlyonce.engines.runtime import order_log
from exactlyonce.engines.runtime.assembler import TaskOperators
from exactlyonce.engines.runtime.batch import Batch, BatchCodec, Coordinates
from exactlyonce.engines.runtime.cut import ORDER
from exactlyonce.engines.runtime.order_log import (
    CLOCK,
    FLOOR,
    IDLE,
    NOT_A_SOURCE,
    PART_SIZE_MAX,
    WATERMARK,
    LoggedInput,
    OrderRuns,
    runs_of,
)
from exactlyonce.engines.runtime.watermarks import Watermark
from exactlyonce.pipeline.errors import Halt
from exactlyonce.pipeline.event_time import END_OF_TIME, NO_WATERMARK

MANY = 6_000


def noted(runs: int, *, batches: bool = False) -> tuple[OrderRuns, list[tuple[LoggedInput, int]]]:
    order, expected = OrderRuns(batches), []
    for number in range(runs):
        place, count = LoggedInput("orders", number % 3), number % 700 + 1
        order.note(place.name, place.partition, count)
        expected.append((place, count))
        if batches and number % 2:
            order.end_batch()
            expected.append((place, 0))
    return order, expected


@pytest.mark.parametrize(("runs", "batches"), [(0, False), (1, False), (5, True), (MANY, False), (MANY, True)])
def test_a_log_is_cut_into_parts_that_are_blocks(runs: int, batches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(encode(Block("totals", 7, ORDER, "none", "msgpack", bytes(PART_SIZE_MAX)))) <= BLOCK_SIZE_MAX
    monkeypatch.setattr(order_log, "PART_SIZE_MAX", 1_000)
    order, expected = noted(runs, batches=batches)
    parts = order.cut()
    assert len(parts) == 1 if runs < MANY else len(parts) > 4
    assert max(map(len, parts)) <= 1_000
    assert list(runs_of(parts)) == expected
    assert list(runs_of(order.cut())) == []


def test_no_replay_follows_the_log_of_an_interval_that_is_not_exact() -> None:
    order, _ = noted(MANY)
    parts = order.cut(exact=False)
    assert len(parts) == 1
    assert list(runs_of(order.cut())) == []
    with pytest.raises(Halt, match="mode at_least_once"):
        take_along([], {}, parts, TaskOperators("totals", 0))


def test_an_interval_begins_with_the_times_of_before() -> None:
    order = OrderRuns(batches=True)
    order.watermark("by>n:0", Watermark(NO_WATERMARK, idle=True))
    order.note("by>n:1", NOT_A_SOURCE, 5)
    order.end_batch()
    order.watermark("by>n:1", Watermark(-70))
    order.floor("in", 3, END_OF_TIME)
    order.clock(10**12)
    known = [(LoggedInput("by>n:0", kind=IDLE), NO_WATERMARK), (LoggedInput("by>n:1", kind=WATERMARK), -70)]
    clock = (LoggedInput("", kind=CLOCK), 10**12)
    batch = [(LoggedInput("by>n:1"), 5), (LoggedInput("by>n:1"), 0)]
    floor = (LoggedInput("in", 3, FLOOR), END_OF_TIME)
    assert list(runs_of(order.cut())) == [known[0], *batch, known[1], floor, clock]
    assert order.empty
    order.watermark("by>n:1", Watermark(-69))
    assert not order.empty
    assert list(runs_of(order.cut())) == [*known, clock, (LoggedInput("by>n:1", kind=WATERMARK), -69)]


class Events:
    """What operators are given, in order, by a port and a batch."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def push(self, batch: Batch) -> None:
        self.seen += batch.records

    def advance(self, watermark: int, *, idle: bool = False) -> None:
        self.seen.append(Watermark(watermark, idle))


class Sent(NamedTuple):
    """The file of a channel."""

    items: Sequence[Any]

    def timed(self) -> Iterator[tuple[int, Any]]:
        for item in self.items:
            yield 0, item if isinstance(item, Watermark) else partial(frame, item)


def frame(record: int) -> bytes:
    return BatchCodec(int).encode(Batch([record], [Coordinates("t", 0, record)], [b"k"]))


def lane(events: Events, *items: Any, before: Sequence[int] = ()) -> ChannelLane:
    files: Any = Sent(items)
    return ChannelLane("by>n:0", [files], BatchCodec(int), events.push, list(map(frame, before)), events)


def test_a_replay_takes_watermarks_where_the_log_has_them() -> None:
    order, events = OrderRuns(), Events()
    order.note("by>n:0", NOT_A_SOURCE, 2)
    order.watermark("by>n:0", Watermark(6))
    order.note("by>n:0", NOT_A_SOURCE, 1)
    order.watermark("by>n:0", Watermark(8, idle=True))
    said = Watermark(5), Watermark(6), Watermark(8, idle=True)
    take_along([lane(events, 1, 2, *said[:2], 3, said[2])], {}, order.cut(), TaskOperators("n", 0))
    assert events.seen == [1, 2, Watermark(6), 3, Watermark(8, idle=True)]
    order.note("by>n:0", NOT_A_SOURCE, 1)
    order.watermark("by>n:0", Watermark(9))
    with pytest.raises(Halt, match=r"channel by>n:0: the log has the watermark 1970-01-01T00:00:00\.009"):
        take_along([lane(Events(), 1)], {}, order.cut(), TaskOperators("n", 0))


def test_watermarks_among_in_flight_records_are_those_of_the_log() -> None:
    order, events = OrderRuns(), Events()
    order.watermark("by>n:0", Watermark(4))
    order.note("by>n:0", NOT_A_SOURCE, 1)
    order.watermark("by>n:0", Watermark(5))
    order.note("by>n:0", NOT_A_SOURCE, 2)
    log = order.cut()
    take_along([lane(events, 3, before=[1, 2])], {}, log, TaskOperators("n", 0))
    assert events.seen == [Watermark(4), 1, Watermark(5), 2, 3]
    with pytest.raises(Halt, match="the log has the watermark"):
        take_along([lane(Events(), 1, 2, 3)], {}, log, TaskOperators("n", 0))

"""Watermarks through operators, channels and subtasks: what is due is out before anything else goes on."""

from __future__ import annotations

from itertools import chain
from typing import Any, cast

import msgspec

from exactlyonce.engines.local.channels import LocalChannel
from exactlyonce.engines.local.inputs import ChannelInput
from exactlyonce.engines.local.task import Snapshots, Subtask
from exactlyonce.engines.runtime import operators as ops
from exactlyonce.engines.runtime.assembler import TaskOperators
from exactlyonce.engines.runtime.batch import Batch, BatchCodec, Coordinates, floors_of, joined
from exactlyonce.engines.runtime.ordering import Sorter
from exactlyonce.engines.runtime.timed_operators import TimedParts
from exactlyonce.engines.runtime.watermarks import Barrier, MergedPorts, Watermark
from exactlyonce.pipeline.event_time import NO_FLOOR, NO_WATERMARK
from exactlyonce.pipeline.graph import Kind, Node
from exactlyonce.pipeline.timed import InOrder
from exactlyonce.pipeline.versions import VersionedState
from exactlyonce.state.hash_map import HashMapBackend
from exactlyonce.state.slots import TableTimes
from exactlyonce.state.stored import StoredState

CODEC = BatchCodec(int)


def batch(times: list[int], late: dict[int, int]) -> Batch:
    """Records that are their times; *late*: the floor by place."""
    floors = [late.get(place, NO_FLOOR) for place in range(len(times))] if late else None
    origins = [Coordinates("t", 0, offset) for offset in range(len(times))]
    return Batch(times, origins, [b"%d" % time for time in times], times, floors)


def test_every_way_of_a_batch_carries_its_floors() -> None:
    whole = batch([7, 5, 9], {1: 6})
    assert whole.part(1, 3).floors == [6, NO_FLOOR]
    assert whole.where([False, True, False]).floors == [6]
    assert whole.expanded([[1], [2, 3], []]).floors == [NO_FLOOR, 6, 6]
    assert whole.stemming(["x"], [1]).floors == [6]
    assert [share.floors for share in whole.dealt([0, 1, 0], 2)] == [[NO_FLOOR, NO_FLOOR], [6]]
    for same in (whole.of([1, 2, 3]), whole.unkeyed([1, 2, 3]), whole.keyed([b"k"] * 3)):
        assert same.floors == whole.floors
    mixed = joined([batch([1], {}), whole, batch([2], {})])
    assert mixed.floors == [NO_FLOOR, *floors_of(whole), NO_FLOOR]


def test_a_frame_carries_times_and_floors_and_an_older_one_has_none() -> None:
    for sent in (batch([7, 5, 9], {1: 6}), batch([7, 5], {})):
        got = CODEC.decode(CODEC.encode(sent))
        assert (got.records, got.times, got.floors) == (sent.records, sent.times, sent.floors)
    untimed = CODEC.encode(Batch([1], [Coordinates("t", 0, 0)]))
    assert len(msgspec.msgpack.decode(untimed)) == 6, "as it was before there were times"
    assert CODEC.decode(untimed).floors is None


def keyed(given: Batch) -> Batch:
    return given.keyed([b"%d" % time for time in given.records])


SECONDS = [*range(0, 25_000, 1_000)]
"""Times that are in a slice of a firing each."""


def sorter(id: str) -> Sorter:
    """Gives each record once its time has passed."""
    stored = StoredState[Any](
        operator=id, type=VersionedState(InOrder().kept_state(int)), groups=range(8), max_parallelism=8,
        times=TableTimes(),
    )  # fmt: skip
    table = HashMapBackend().timed_table(stored)
    node = Node(id, Kind.IN_ORDER)
    return Sorter.made(TimedParts(node=node, table=table, groups=range(8), max_parallelism=8, function=None))


class Rig:
    """A subtask of two fused operators between two channels and one; *room* is that of the output."""

    def __init__(self, room: int = 100) -> None:
        self.operators, self.out, self.channels = (
            TaskOperators("held", 0),
            LocalChannel(),
            [LocalChannel() for _ in "ab"],
        )
        self.out.took(0, room)
        first, second = sorter("first"), sorter("second")
        first.firings = second.firings = self.operators.firings
        first.downstream, first.ports = [lambda given: second(keyed(given))], [second]
        shuffle = ops.Shuffle("out", lambda _, sent: self.out.send(CODEC.encode(sent), len(sent.records)), 1, 8,
                              tell=self.out.send_signal)  # fmt: skip
        second.downstream, second.ports = [lambda given: shuffle(keyed(given))], [shuffle]
        ports = MergedPorts(first)
        self.subtask = Subtask(
            operators=self.operators,
            inputs=[ChannelInput(str(n), each, CODEC, first, port=ports.add()) for n, each in enumerate(self.channels)],
            outputs=[self.out], fed=[],
            snapshots=Snapshots(self.operators, cast(Any, None), lambda message: None, lambda: 0.0),
            monotonic_s=lambda: 0.0,
            processing_s=lambda: 0.0,
        )  # fmt: skip

    def send(self, channel: int, *items: int | Watermark | Barrier) -> None:
        for item in items:
            if isinstance(item, int):
                self.channels[channel].send(CODEC.encode(batch([item], {})), 1)
            else:
                self.channels[channel].send_signal(item)

    def steps(self) -> list[Any]:
        """The frames that come out."""
        while self.subtask.step():
            pass
        frames = iter(self.out.receive, None)
        return [tuple(CODEC.decode(frame).records) if isinstance(frame, bytes) else frame for frame in frames]


def test_results_go_before_their_watermark_and_a_barrier_after_it() -> None:
    rig = Rig()
    rig.send(0, 5, 3, Watermark(4), Barrier(1, 0))
    rig.send(1, 9)
    assert rig.steps() == [], "the other channel has said nothing"
    rig.send(1, Watermark(6), 6, Barrier(1, 0))
    assert rig.steps() == [(3,), Watermark(4), Barrier(1, 0)]
    rig.send(0, Watermark(20))
    assert rig.steps() == [(5, 6), Watermark(6)]
    rig.send(1, Watermark(6, idle=True))
    assert rig.steps() == [(9,), Watermark(20)]
    rig.send(0, Watermark(20, idle=True))
    assert rig.steps() == [Watermark(20, idle=True)]


def test_a_firing_goes_in_slices_that_the_output_has_room_for_and_a_barrier_comes_in_between() -> None:
    rig = Rig(room=10)
    rig.send(0, *SECONDS, Watermark(30_000), Barrier(1, 0))
    rig.send(1, Watermark(30_000))
    assert [*chain.from_iterable(rig.steps())] == SECONDS[:10]
    assert not rig.subtask.room
    rig.send(1, Barrier(1, 0))
    assert rig.steps() == [Barrier(1, 0)]
    given = SECONDS[:10]
    while len(given) < len(SECONDS):
        rig.out.took(10, 10)
        given += [*chain.from_iterable(step for step in rig.steps() if isinstance(step, tuple))]
    assert given == SECONDS


def test_an_unsent_watermark_is_merged_with_the_next_but_not_across_a_batch() -> None:
    channel = LocalChannel()
    for item in (Watermark(1), Watermark(2, idle=True), b"frame", Watermark(3), Barrier(1, 0), Watermark(4)):
        channel.send(item, 1) if isinstance(item, bytes) else channel.send_signal(item)
    assert [*iter(channel.receive, None)] == [
        Watermark(2, idle=True),
        b"frame",
        Watermark(3),
        Barrier(1, 0),
        Watermark(4),
    ]


def test_the_watermark_of_several_inputs_never_falls() -> None:
    shown: list[tuple[int, bool]] = []

    class Shown:
        def advance(self, watermark: int, *, idle: bool = False) -> None:
            shown.append((watermark, idle))

    ports = MergedPorts(Shown())
    one, other = ports.add(), ports.add()
    other.advance(NO_WATERMARK, idle=True)
    one.advance(8)
    other.advance(3)
    one.advance(10)
    other.advance(9)
    one.advance(10, idle=True)
    assert shown == [(8, False), (9, False)], "an input that comes back late holds the watermark, and does not lower it"

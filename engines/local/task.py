"""One subtask of a task: it takes batches from its inputs, aligns barriers, and takes snapshots.

Invariants: a batch goes through all operators before the next is taken. What a watermark makes due goes out in slices,
which take turns with the inputs; what fits into one slice is out before anything else is taken. Exactly once, nothing
of an input is taken between its barrier and the snapshot. The snapshot's synchronous part and the sending of the
barrier are one step, so that no record comes between them. Acknowledgements are sent in order. Restored in-flight
records go before anything else of their channel: all others first, then those that went round a loop, before what comes
round it now.

No snapshot waits for a loop: until the barrier has gone round, loop records are captured. A batch of a loop comes
between any two batches of new records. While too much goes round, only new records before a barrier are taken. The
channels into the subtask are closed then, and those into their writers. So only records in flight already lie before
barriers, and they need no room in a closed channel.

A barrier that overtakes takes its snapshot when it is due, wherever the barriers in the channels are, and without room
for outputs. It waits for the barriers of channels whose records go to all subtasks (docs/design/broadcast.md). Earlier
records that are not taken yet are captured, and count for the next interval. See
docs/design/unaligned-checkpoints.md and docs/design/backpressure.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from time import perf_counter
from typing import NamedTuple

from exactlyonce.checkpoint.alignment import Alignment
from exactlyonce.engines.local.channels import ROUND_BYTES_MAX, ROUND_RECORDS_MAX, Channel, LoopChannel
from exactlyonce.engines.local.inputs import (
    BATCH_RECORDS_MAX,
    ChannelInput,
    FeedbackInput,
    Outlet,
    PacedInput,
    RestoredInput,
    Slices,
    SourceInput,
    slice_pace,
)
from exactlyonce.engines.local.messages import Acknowledge
from exactlyonce.engines.runtime.assembler import TaskOperators
from exactlyonce.engines.runtime.batch import Batch
from exactlyonce.engines.runtime.cut import Cut, InFlightCapture, Stopwatch, WorkerBlocks
from exactlyonce.engines.runtime.watermarks import Barrier, Watermark
from exactlyonce.pipeline.errors import require
from exactlyonce.pipeline.failpoints import hit

FIRE_S = 0.02
"""The time after which no other slice of a firing begins in the same step."""
COMPLETES_WAIT_S = 1.0
"""The time that the last barrier waits for results that are due, before it leaves them to another one."""
FETCH_BUDGET_S = 0.02
"""The time between two batches for reading restored state that no record has asked for yet."""


class DueSnapshot(NamedTuple):
    """A triggered checkpoint without a snapshot."""

    frame: Barrier
    overtakes_s: float | None
    """The time when its barrier overtakes records; None: never."""


class Snapshots:
    """The snapshots of one subtask that are being written, oldest first."""

    def __init__(
        self,
        operators: TaskOperators,
        blocks: WorkerBlocks,
        acknowledge: Callable[[Acknowledge], None],
        processing_s: Callable[[], float],
    ) -> None:
        self._operators, self._blocks = operators, blocks
        self._acknowledge, self._processing_s = acknowledge, processing_s
        self._under_way: deque[Iterator[bool]] = deque()
        self.capturing = 0
        """How many capture records before barriers that have overtaken, or go round a loop."""

    @property
    def busy(self) -> bool:
        return bool(self._under_way)

    def begin(self, checkpoint: int, cut: Cut, stopwatch: Stopwatch) -> None:
        """Write *cut*, whose synchronous part is over."""
        self.capturing += bool(cut.captures)
        self._under_way.append(self._write(checkpoint, cut, stopwatch))

    def _write(self, checkpoint: int, cut: Cut, stopwatch: Stopwatch) -> Iterator[bool]:
        ack = yield from cut.acknowledge(self._operators.blocks(self._blocks, checkpoint), stopwatch)
        self.capturing -= bool(cut.captures)
        self._acknowledge(Acknowledge(ack))
        hit("worker-acknowledged")

    def advance(self, budget_s: float) -> bool:
        """Encode and write for about *budget_s*; True if anything was done."""
        if not self._under_way:
            return False
        end_s, moved = self._processing_s() + budget_s, False
        while self._under_way:
            progressed = next(self._under_way[0], None)
            if progressed is None:
                self._under_way.popleft()
            moved = moved or progressed is not False
            if not progressed or self._processing_s() >= end_s:
                break
        return moved


@dataclass
class Subtask:
    """The operators of one subtask between its inputs and outputs."""

    operators: TaskOperators
    inputs: list[PacedInput]
    outputs: list[Channel]
    """The channels of each shuffle that begins here, to every downstream subtask."""
    fed: list[LoopChannel]
    snapshots: Snapshots
    monotonic_s: Callable[[], float]
    processing_s: Callable[[], float]
    now_ms: Callable[[], int] = lambda: 0
    """The clock that operators may go by."""
    exactly_once: bool = True
    """Whether inputs are held back; see `Alignment`."""
    firing_slices: Callable[[], Slices] = lambda: Slices(slice_pace(), perf_counter)
    """Makes the slices in which an operator gives what is due."""
    least: int = 1
    """`Pace.least`: the records that are taken at least, if the outputs have any room."""
    incremental: bool = True
    """Whether a snapshot holds only changes, unless it is a savepoint."""
    restored: RestoredInput | None = None
    """The restored in-flight records, loop records last; None once all of them are taken."""

    def __post_init__(self) -> None:
        self._loops = [source for source in self.inputs if isinstance(source, FeedbackInput)]
        self._turn: deque[PacedInput] = deque(source for source in self.inputs if not isinstance(source, FeedbackInput))
        """The inputs of new records, which take turns."""
        self._to_all = [source for source in self._turn if isinstance(source, ChannelInput) and not source.overtaken]
        """The inputs of records that every subtask gets: its state at a barrier is theirs before it."""
        self.alignment = Alignment(
            (source.name for source in self._turn),
            feedback=(source.name for source in self._loops),
            exactly_once=self.exactly_once,
        )
        self._outlets = [*map(Outlet, self.outputs), *map(Outlet, self.operators.sinks)]
        self._firing_slices: dict[str, Slices] = {}
        """By operator."""
        self._fired = False
        """Whether the last step was a slice of a firing that is not over: an input has its turn."""
        self._completes_s: float | None = None
        """The time until which what is due goes before the last barrier; None: that waits for nothing."""
        self._came_round = False
        """Whether the batch taken last had gone round a loop."""
        self._last: int | None = None
        """The last checkpoint of the run: nothing is taken after it."""
        self._due: deque[DueSnapshot] = deque()
        """Checkpoints without a snapshot, oldest first."""
        self._barrier_s: dict[int, float] = {}
        """When the first barrier of each checkpoint came that has no snapshot yet."""
        self.fetching = False
        """Whether the last `advance` read stored state that no record had asked for."""

    @property
    def sources(self) -> list[SourceInput]:
        return [source for source in self.inputs if isinstance(source, SourceInput)]

    @property
    def going_round(self) -> int:
        """The number of records that wait to come round a loop."""
        restored = self.restored.waiting if self.restored is not None and self.restored.goes_round else 0
        return restored + sum(loop.channel.waiting for loop in self._loops)

    @property
    def full(self) -> bool:
        """Whether a disk has no room: records that can wait must not change any state."""
        return any(table.full for table in self.operators.tables)

    @property
    def room(self) -> int:
        """The number of records that may be taken; 0: the outputs must drain first."""
        return self._room_at(self._outlets)

    def _room_at(self, outlets: Iterable[Outlet]) -> int:
        room = min([BATCH_RECORDS_MAX, *[outlet.room for outlet in outlets]])
        return room and max(room, self.least)

    @property
    def _room_before_barrier(self) -> int:
        """The room for records before a barrier: a closed channel takes all of them."""
        closed = [channel.closed and not channel.full for channel in self.outputs]
        return self._room_at(outlet for outlet, is_closed in zip_longest(self._outlets, closed) if not is_closed)

    def step(self, *, hurried: bool = False) -> bool:
        """Take one batch or barrier from the next input that has one; True if there was any. *hurried*: a short batch,
        while a barrier is under way that has overtaken or goes round a loop."""
        crowded = bool(self._loops) and self._has_too_much
        closed = crowded or any(channel.closed for channel in self.outputs)
        for source in self._turn:
            if isinstance(source, ChannelInput):
                source.close(closed)
        room = self.room
        if self.operators.clocked and not self._is_over and self.operators.whole:
            self.operators.look_at_clock(self.now_ms())
        if not (self._fired and self._may_interrupt) and self._fire(hurried=hurried):
            return True
        self._fired = False
        if not self.operators.whole:
            return False
        return self._take(room, crowded=crowded, closed=closed, hurried=hurried) or self._fire(hurried=hurried)

    def _take(self, room: int, *, crowded: bool, closed: bool, hurried: bool) -> bool:
        """Take one batch or barrier from the next input that has one; True if there was any."""
        if self._due and any(self._take_next(source, BATCH_RECORDS_MAX, hurried) for source in self._to_all):
            return True  # a barrier that overtakes waits for them, and they need no room: they have no outputs
        room_of_new = self._room_before_barrier if closed and self._due else room
        if self.restored is not None and not self.restored.goes_round:
            return bool(room_of_new) and not self.full and self._take_restored(self.restored, room_of_new, hurried)
        rounds = self._rounds()
        for source in self._in_turn(rounds, crowded=crowded):
            if isinstance(source, RestoredInput):
                if room:
                    return self._take_restored(source, room, hurried)
                continue
            if self._take_next(source, room if isinstance(source, FeedbackInput) else room_of_new, hurried):
                return True
        return False

    def _take_next(self, source: SourceInput | ChannelInput, room: int, hurried: bool) -> bool:
        """Take the next batch or barrier of *source*, unless it is held back; True if there was any."""
        if self.alignment.is_held(source.name):
            return False
        while isinstance(item := source.next(room, hurried=hurried), Watermark):
            self.alignment.take(source.name)
            self.operators.advance(source.name, source.port, item)
            if self.operators.firings:
                return True
        if item is None:
            return False
        self._came_round = isinstance(source, FeedbackInput)
        if isinstance(item, Batch):
            self.alignment.take(source.name)
            self._process(source, item)
        else:
            self._barrier(source, item)
        return True

    def _fire(self, *, hurried: bool) -> bool:
        """Give a slice of what is due, or all if that takes no longer; True if anything was given."""
        operators, end_s = self.operators, None
        if self._is_over and self._completes_s is None:
            return False
        while operators.firings and (room := self._room_of_results):
            name = operators.firings[0].id
            slices = self._firing_slices.get(name)
            if slices is None:
                slices = self._firing_slices[name] = self.firing_slices()
            slices.handed_out(0)
            end_s = slices.handed_s + FIRE_S if end_s is None else end_s
            slices.count = operators.fire(slices.size(room, hurried=hurried), room)
            now_s = slices.processed()
            for outlet in self._outlets:
                outlet.fired()
            if now_s >= end_s:
                break
        self._fired = bool(operators.firings) and operators.whole
        return end_s is not None

    @property
    def _may_interrupt(self) -> bool:
        """Whether an input may have its turn during a firing: what is due goes before the last barrier, for a while."""
        return not self._due or self._completes_s is None or self.monotonic_s() >= self._completes_s

    @property
    def _room_of_results(self) -> int:
        """The number of results that the outputs should get now."""
        room = min([BATCH_RECORDS_MAX, *[outlet.output.room for outlet in self._outlets]])
        return room and max(room, self.least)

    def _take_restored(self, restored: RestoredInput, room: int, hurried: bool) -> bool:
        self._came_round = restored.goes_round
        self._process(restored, restored.next(room, hurried=hurried))
        if restored.over:
            self.restored = None
        return True

    def _rounds(self) -> Sequence[PacedInput]:
        """The loop inputs to take from: restored records first."""
        if self._is_over:
            return []
        if self.restored is not None:
            return [] if self.full else [self.restored]
        return [loop for loop in self._loops if loop.ready and not self.alignment.is_held(loop.name)]

    @property
    def _is_over(self) -> bool:
        """Whether the last snapshot of the run is taken."""
        return self._last is not None and self.alignment.checkpoint_latest >= self._last

    @property
    def _has_too_much(self) -> bool:
        """Whether too much goes round to take new records."""
        return self.going_round > ROUND_RECORDS_MAX or sum(loop.channel.size for loop in self._loops) > ROUND_BYTES_MAX

    def _in_turn(self, rounds: Sequence[PacedInput], *, crowded: bool) -> Iterator[PacedInput]:
        """The inputs in the order in which to ask them."""
        if not self._came_round:
            yield from rounds
        takes_new = self._due or not crowded  # new records before a barrier are always taken
        for _ in range(len(self._turn) if takes_new else 0):
            source = self._turn[0]
            self._turn.rotate(-1)
            yield source
        if self._came_round:
            yield from rounds

    def _process(self, source: PacedInput, batch: Batch) -> None:
        self.operators.take(source, batch)
        if (watermark := source.processed()) is not None:
            self.operators.advance(source.name, source.port, watermark)
        for outlet in self._outlets:
            outlet.took(len(batch.records))

    def _barrier(self, source: PacedInput, frame: Barrier) -> None:
        if isinstance(source, SourceInput):
            hit("worker-barrier")
        if frame.checkpoint > self.alignment.checkpoint_latest:
            self._barrier_s.setdefault(frame.checkpoint, self.monotonic_s())
        if self.alignment.barrier(source.name, frame.checkpoint, aligned=frame.savepoint):
            hit("worker-aligned")
            self._snapshot(frame, self._captures(self.alignment.owing(frame.checkpoint), frame.checkpoint))

    def _captures(self, owing: Collection[Hashable], checkpoint: int) -> list[InFlightCapture]:
        """The records before barrier *checkpoint* of the inputs that owe it."""
        channels = [source for source in self.inputs if isinstance(source, ChannelInput)]
        return [channel.capture(checkpoint) for channel in channels if channel.name in owing]

    def triggered(
        self, frame: Barrier, overtakes_s: float | None, *, final: bool = False, completes: bool = False
    ) -> None:
        """The coordinator has triggered a checkpoint; see `DueSnapshot`. *final*: nothing is taken after it.
        *completes*: but what is due goes on after it, for the next one."""
        self._last = frame.checkpoint if final else None
        self._completes_s = self.monotonic_s() + COMPLETES_WAIT_S if completes else None
        if frame.checkpoint > self.alignment.checkpoint_latest:
            self._due.append(DueSnapshot(frame, overtakes_s))

    def overtake(self) -> bool:
        """Take the snapshots whose barriers overtake now; True if there was one."""
        moved = False
        while (
            self.operators.whole
            and self._due
            and (at_s := self._due[0].overtakes_s) is not None
            and self.monotonic_s() >= at_s
            and not self._waits_for_all(self._due[0].frame.checkpoint)
        ):
            self._overtake(self._due[0].frame)
            moved = True
        return moved

    def _waits_for_all(self, checkpoint: int) -> bool:
        """Whether records before barrier *checkpoint* that every subtask gets may still come."""
        owing = self.alignment.owing(checkpoint) if self._to_all else ()
        return any(source.name in owing for source in self._to_all)

    def _overtake(self, frame: Barrier) -> None:
        checkpoint = frame.checkpoint
        for source in self.sources:
            if self.alignment.checkpoint_latest < checkpoint and not self.alignment.is_held(source.name):
                require(source.barrier() == frame, "a source injects every barrier, in its turn")
                self._barrier(source, frame)
        if self.alignment.checkpoint_latest < checkpoint:
            owing = self.alignment.overtake(checkpoint)
            hit("unaligned-overtaken")
            self._snapshot(frame, self._captures(owing, checkpoint))

    def _snapshot(self, frame: Barrier, captures: Sequence[InFlightCapture]) -> None:
        """Take the synchronous part, and begin to write the rest."""
        while self._due and self._due[0].frame.checkpoint <= frame.checkpoint:
            self._due.popleft()
        stopwatch = Stopwatch(self.monotonic_s, self._barrier_s.pop(frame.checkpoint, self.monotonic_s()))
        stopwatch.next_phase()
        offsets = tuple(offset for source in self.sources for offset in source.noted[frame.checkpoint])
        left = self.restored.left() if self.restored is not None else []
        cut = self.operators.cut(
            frame.checkpoint,
            frame.base,
            offsets,
            whole=frame.savepoint or not self.incremental,
            exact=self.alignment.exact,
            left=left,
            captures=captures,
            goes_on=self._completes_s is not None and bool(self.operators.firings),
        )
        for channel in chain(self.outputs, self.fed):
            channel.send_signal(frame)
        for source in self.inputs:
            source.trust()
        if self.restored is not None:
            self.restored.trust()
        hit("worker-frozen")
        stopwatch.next_phase()
        self.snapshots.begin(frame.checkpoint, cut, stopwatch)

    def advance(self, budget_s: float) -> bool:
        """Read restored state for about `FETCH_BUDGET_S`, then write snapshots for about *budget_s*; True if anything
        was done."""
        self.fetching = self._fetch(self.processing_s() + FETCH_BUDGET_S)
        return self.snapshots.advance(budget_s) or self.fetching

    def _fetch(self, end_s: float) -> bool:
        tables = self.operators.tables
        moved = any(table.fetch() for table in tables)
        while moved and self.processing_s() < end_s and any(table.fetch() for table in tables):
            pass
        return moved

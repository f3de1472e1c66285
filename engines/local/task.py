"""One subtask of a task: takes batches from its inputs, aligns barriers, takes snapshots.

Invariants: a batch goes through all operators before the next is taken; exactly once, nothing of an input is taken
between its barrier and the snapshot; the snapshot's synchronous part and the barrier's passing-on happen in one step,
so that no record comes between them; acknowledgements are sent in order. What was on its way at the restored checkpoint
is taken before anything else of its channel: what went round a loop before what comes round it, all other before
anything at all.

No snapshot waits for a loop: from it until the barrier has gone round, what comes round is captured too, and what is
left of what went round at the restored checkpoint. Between two batches of what is new comes one of what goes round,
where there is one; too much of that, and nothing new is taken but what lies before a barrier. The channels that lead
there are closed then, and those that lead to who writes them, up to the sources: so no more than what was on its way
lies before barriers, and that needs no room in a closed channel.

A barrier that may overtake is told by the worker as well, and takes its snapshot when it is due, wherever the barriers
in the channels are and whether or not there is room for outputs. What has not been taken then, and lies before those
barriers, is captured: it is taken as before, counts for the next interval, and is written beside the snapshot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, NamedTuple

from exactlyonce.checkpoint.alignment import Alignment
from exactlyonce.engines.local.channels import Channel
from exactlyonce.engines.local.inputs import ChannelCapture, ChannelInput, Input, RestoredInput, SourceInput
from exactlyonce.engines.local.loops import ROUND_BYTES_MAX, ROUND_RECORDS_MAX, FeedbackInput, LoopChannel
from exactlyonce.engines.local.messages import Acknowledge
from exactlyonce.engines.local.pace import BATCH_RECORDS_MAX, Outlet
from exactlyonce.engines.runtime.assembler import TaskOperators
from exactlyonce.engines.runtime.batch import Batch
from exactlyonce.engines.runtime.blocks import WorkerBlocks
from exactlyonce.engines.runtime.cut import Cut
from exactlyonce.engines.runtime.signals import Barrier
from exactlyonce.pipeline.errors import require
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.state.backend import Table

FETCH_BUDGET_S = 0.02
"""Between two batches, what reading of restored state may take that no record has wanted yet."""


class Due(NamedTuple):
    """A checkpoint that was triggered."""

    frame: Barrier
    overtakes_s: float | None
    """When its barrier stops waiting behind records; None: never."""


@dataclass
class Subtask:
    """The operators of one subtask, between its inputs and outputs."""

    operators: TaskOperators
    inputs: list[Input]
    outputs: list[Channel]
    """Of each shuffle that begins here, to every subtask behind it."""
    fed: list[LoopChannel]
    """The loops that are fed here."""
    blocks: WorkerBlocks
    acknowledge: Callable[[Acknowledge], None]
    monotonic_s: Callable[[], float]
    exactly_once: bool = True
    """Whether inputs are held back; see `Alignment`."""
    incremental: bool = True
    """Whether a snapshot holds only what has changed, unless it is a savepoint's."""
    restored: RestoredInput | None = None
    """None where nothing was on its way, and once all of it is taken; what went round loops comes last."""
    hurried: bool = False
    """Whether a barrier is under way in this worker that has overtaken or goes round a loop: slices are short then."""

    def __post_init__(self) -> None:
        self._loops = [each for each in self.inputs if isinstance(each, FeedbackInput)]
        self._turn: deque[Input] = deque(each for each in self.inputs if not isinstance(each, FeedbackInput))
        """What is new, which takes turns."""
        self._channels = [each for each in self._turn if isinstance(each, ChannelInput)]
        """Those that are closed while too much goes round here, or further on."""
        self.alignment = Alignment(
            (each.name for each in self._turn),
            feedback=(each.name for each in self._loops),
            exactly_once=self.exactly_once,
        )
        self._outlets = [*map(Outlet, self.outputs), *map(Outlet, self.operators.sinks)]
        self._came_round = False
        """Whether what was taken last had gone round."""
        self._last: int | None = None
        """The checkpoint behind which nothing is taken any more."""
        self._snapshots: deque[Iterator[bool]] = deque()
        self._due: deque[Due] = deque()
        """Those without a snapshot here, oldest first."""
        self._overtaken = 0
        """How many of the snapshots under way capture what comes before barriers that have overtaken, or go round."""
        self.fetching = False
        """Whether stored state was read by the last `advance`, and not because a record wanted it."""

    @property
    def name(self) -> str:
        """Of its task."""
        return self.operators.task

    @property
    def tables(self) -> list[Table[Any]]:
        """Of its operators."""
        return self.operators.tables

    @property
    def sources(self) -> list[SourceInput]:
        """Those of the inputs that read a topic."""
        return [each for each in self.inputs if isinstance(each, SourceInput)]

    @property
    def going_round(self) -> int:
        """How many records wait to come round a loop."""
        restored = self.restored.waiting if self.restored is not None and self.restored.goes_round else 0
        return restored + sum(each.waiting for each in self._loops)

    @property
    def busy(self) -> bool:
        """Whether a snapshot is under way."""
        return bool(self._snapshots)

    @property
    def overtaken(self) -> bool:
        """Whether one captures what comes before a barrier that has overtaken, or goes round."""
        return self._overtaken > 0

    @property
    def full(self) -> bool:
        """Whether what may wait, as records of sources do, must not change any state now: a disk has no room."""
        return any(table.full for table in self.tables)

    @property
    def room(self) -> int:
        """How many records may be taken; 0: what is behind this subtask must drain first."""
        return min([BATCH_RECORDS_MAX, *[each.room for each in self._outlets]])

    @property
    def _room_before_barrier(self) -> int:
        """How many that lie before a barrier: what is behind a closed channel takes them."""
        closed = [channel.closed and not channel.full for channel in self.outputs]
        needed = [outlet for outlet, is_closed in zip_longest(self._outlets, closed) if not is_closed]
        return min([BATCH_RECORDS_MAX, *[each.room for each in needed]])

    def step(self) -> bool:
        """Take one batch or barrier from the next input that has one; True if there was any."""
        crowded = bool(self._loops) and self._has_too_much
        closed = crowded or any(each.closed for each in self.outputs)
        for each in self._channels:
            each.close(closed)
        room = self.room
        room_of_new = self._room_before_barrier if closed and self._due else room
        if self.restored is not None and not self.restored.goes_round:
            return bool(room_of_new) and not self.full and self._take_restored(self.restored, room_of_new)
        rounds = self._rounds()
        for source in self._in_turn(rounds, crowded=crowded):
            if isinstance(source, RestoredInput):
                if room:
                    return self._take_restored(source, room)
                continue
            if self.alignment.is_held(source.name):
                continue
            goes_round = isinstance(source, FeedbackInput)
            item = source.next(room if goes_round else room_of_new, hurried=self.hurried)
            if item is None:
                continue
            self._came_round = goes_round
            if isinstance(item, Batch):
                self.alignment.take(source.name)
                self._process(source, item)
            else:
                self._barrier(source, item)
            return True
        return False

    def _take_restored(self, restored: RestoredInput, room: int) -> bool:
        """Take a batch of what was on its way at the restored checkpoint."""
        self._came_round = restored.goes_round
        self._process(restored, restored.next(room, hurried=self.hurried))
        if restored.over:
            self.restored = None
        return True

    def _rounds(self) -> Sequence[Input]:
        """The loops of which something is to be taken; first what went round them at the restored checkpoint."""
        if self._last is not None and self.alignment.checkpoint_latest >= self._last:
            return []
        if self.restored is not None:
            return [] if self.full else [self.restored]
        return [each for each in self._loops if each.ready and not self.alignment.is_held(each.name)]

    @property
    def _has_too_much(self) -> bool:
        """Whether too much goes round for anything new."""
        return self.going_round > ROUND_RECORDS_MAX or sum(each.size for each in self._loops) > ROUND_BYTES_MAX

    def _in_turn(self, rounds: Sequence[Input], *, crowded: bool) -> Iterator[Input]:
        """The inputs, in the order in which something is to be taken of them."""
        if not self._came_round:
            yield from rounds
        takes_new = self._due or not crowded  # before a barrier, what lies there
        for _ in range(len(self._turn) if takes_new else 0):
            source = self._turn[0]
            self._turn.rotate(-1)
            yield source
        if self._came_round:
            yield from rounds

    def _process(self, source: Input, batch: Batch) -> None:
        self.operators.take(source, batch)
        source.processed()
        for each in self._outlets:
            each.took(len(batch.records))

    def _barrier(self, source: Input, frame: Barrier) -> None:
        if isinstance(source, SourceInput):
            hit("worker-barrier")
        if self.alignment.barrier(source.name, frame.checkpoint, aligned=frame.savepoint):
            hit("worker-aligned")
            self._snapshots.append(
                self._snapshot(frame, self._captures(self.alignment.owing(frame.checkpoint), frame.checkpoint))
            )

    def _captures(self, owing: Collection[Hashable], checkpoint: int) -> list[ChannelCapture]:
        """Of the inputs that owe the barrier, what comes before it."""
        return [
            each.capture(checkpoint) for each in self.inputs if isinstance(each, ChannelInput) and each.name in owing
        ]

    def triggered(self, frame: Barrier, overtakes_s: float | None, *, final: bool = False) -> None:
        """The coordinator has triggered a checkpoint; see `Due`. *final*: nothing is taken behind it."""
        self._last = frame.checkpoint if final else None
        if frame.checkpoint > self.alignment.checkpoint_latest:
            self._due.append(Due(frame, overtakes_s))

    def overtake(self) -> bool:
        """Take the snapshots of the barriers that wait no longer; True if there was one."""
        moved = False
        while self._due and (at_s := self._due[0].overtakes_s) is not None and self.monotonic_s() >= at_s:
            self._overtake(self._due[0].frame)
            moved = True
        return moved

    def _overtake(self, frame: Barrier) -> None:
        checkpoint = frame.checkpoint
        for source in self.sources:
            if self.alignment.checkpoint_latest < checkpoint and not self.alignment.is_held(source.name):
                require(source.barrier() == frame, "a source injects every barrier, in its turn")
                self._barrier(source, frame)
        if self.alignment.checkpoint_latest < checkpoint:
            owing = self.alignment.overtake(checkpoint)
            hit("unaligned-overtaken")
            self._snapshots.append(self._snapshot(frame, self._captures(owing, checkpoint)))

    def _snapshot(self, frame: Barrier, captures: Sequence[ChannelCapture]) -> Iterator[bool]:
        """The synchronous part now; the rest as an iterator."""
        while self._due and self._due[0].frame.checkpoint <= frame.checkpoint:
            self._due.popleft()
        began_s = self.monotonic_s()
        offsets = tuple(offset for source in self.sources for offset in source.noted.pop(frame.checkpoint))
        left = self.restored.left() if self.restored is not None else []
        cut = self.operators.cut(
            frame.checkpoint,
            frame.base,
            offsets,
            whole=frame.savepoint or not self.incremental,
            exact=self.alignment.exact,
            left=left,
            captures=captures,
        )
        for channel in chain(self.outputs, self.fed):
            channel.send_signal(frame)
        for each in self.inputs:
            each.trust()
        if self.restored is not None:
            self.restored.trust()
        hit("worker-frozen")
        self._overtaken += bool(captures)
        return self._acknowledged(frame.checkpoint, cut, began_s, self.monotonic_s() - began_s)

    def _acknowledged(self, checkpoint: int, cut: Cut, began_s: float, sync_s: float) -> Iterator[bool]:
        ack = yield from cut.acknowledge(self.operators.blocks(self.blocks, checkpoint))
        self._overtaken -= bool(cut.captures)
        self.acknowledge(Acknowledge(ack, sync_s * 1000, (self.monotonic_s() - began_s) * 1000))
        hit("worker-acknowledged")

    def advance(self, budget_s: float) -> bool:
        """Read restored state for about `FETCH_BUDGET_S`, encode for about *budget_s*; True if anything was done."""
        self.fetching = moved = self._fetch(self.monotonic_s() + FETCH_BUDGET_S)
        end = self.monotonic_s() + budget_s
        while self._snapshots:
            progressed = next(self._snapshots[0], None)
            if progressed is None:
                self._snapshots.popleft()
            moved = moved or progressed is not False
            if not progressed or self.monotonic_s() >= end:
                break
        return moved

    def _fetch(self, end: float) -> bool:
        moved = any(table.fetch() for table in self.tables)
        while moved and self.monotonic_s() < end and any(table.fetch() for table in self.tables):
            pass
        return moved

"""The inputs of a task's subtask: sources and channels, alike to whoever reads them.

Invariants: an input hands out batches and barriers in order; a source's barrier comes between two batches, and Sn is
noted at that moment; after a final barrier a source hands out nothing more. A batch is as long as it may be to take a
short time, by the pace of those before it: a barrier, and all that a loop does between batches, waits for its end (a
shorter time, while a barrier that has overtaken is under way). Nobody waits in `next`; a source whose records are few
lets them gather for a moment, for which its barriers do not wait. Sn and order logs count what was handed out, never
what was fetched. What was on its way at the restored checkpoint is handed out first, and counts as come from its
channel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from time import perf_counter
from typing import NamedTuple, Protocol

from exactlyonce.checkpoint.records.manifest import RecordPlace, SourceOffset
from exactlyonce.connectors.source import Readable, SourceReader
from exactlyonce.engines.local.channels import Capture, Channel
from exactlyonce.engines.local.pace import (
    ALIGNED,
    BATCH_RECORDS_MAX,
    GATHER_S,
    IN_FLIGHT_CAUTIOUS,
    IN_FLIGHT_MIN,
    Bounds,
    Pace,
    slice_pace,
)
from exactlyonce.engines.runtime.activity import Activity
from exactlyonce.engines.runtime.assembler import RestoredEdge
from exactlyonce.engines.runtime.batch import Batch, Push
from exactlyonce.engines.runtime.batch_codec import BatchCodec, records_in
from exactlyonce.engines.runtime.in_flight import InFlightFrame, edge_of, loop_of
from exactlyonce.engines.runtime.signals import Barrier, Signal
from exactlyonce.engines.runtime.source_decoder import SourceDecoder
from exactlyonce.pipeline.departures import Departures


class Input(Protocol):
    """Where a subtask's records come from."""

    @property
    def name(self) -> str: ...
    @property
    def push(self) -> Push: ...

    def next(self, room: int, *, hurried: bool = False) -> Batch | Signal | None:
        """What comes next, *room* records at most, and *hurried* few; None: nothing at the moment. A barrier needs no
        room."""

    def runs(self) -> Iterable[tuple[int, int]]:
        """(partition or -1, count) of the batch just handed out."""

    def processed(self) -> None:
        """The batch just handed out has gone through all operators."""

    def trust(self) -> None:
        """A barrier has come through: what is handed out may be as much as its pace allows."""


class SourceTrigger(NamedTuple):
    """A barrier to be injected."""

    frame: Barrier
    final: bool
    added: Mapping[int, int]
    """By partition that is to be read from this barrier on, the offset to begin at."""


@dataclass
class SourceInput:
    """The partitions of a source that this subtask reads."""

    name: str
    reader: SourceReader
    source: Readable
    push: Push
    activity: Activity
    before: Sequence[SourceOffset] = ()
    """Where its partitions begin, with what was skipped up to there."""
    triggers: deque[SourceTrigger] = field(default_factory=deque)
    noted: dict[int, tuple[SourceOffset, ...]] = field(default_factory=dict)
    """Sn by checkpoint, until the snapshot takes it."""
    stopped: bool = False
    held: bool = False
    """Whether to hand out nothing but barriers: a store is behind."""
    records: int = 0
    notes: list[str] = field(default_factory=list)
    """What was skipped, until the worker tells the coordinator."""
    cautious: bool = False
    """Whether to hand out little until a barrier has come through: records that became slow may have kept the attempt
    before from that, and this one begins with the same records."""
    bounds: Bounds = ALIGNED
    now_s: Callable[[], float] = perf_counter
    """For what a slice takes."""
    due_s: float = 0.0
    """When it is asked again: until then its records gather."""
    skips: Iterable[RecordPlace] = ()
    """Records that are left out."""
    _count: int = 0
    _handed_s: float = 0.0

    def __post_init__(self) -> None:
        self.pace = slice_pace(cautious=self.cautious, bounds=self.bounds)
        self._phase = f"reading source {self.name!r}"
        self._decoder = SourceDecoder(self.name, self.source, self.notes.append, self.before, skips=self.skips)

    @property
    def skipped(self) -> int:
        """Records skipped because they do not decode."""
        return self._decoder.skipped_count

    def barrier(self) -> Barrier | None:
        """The oldest barrier that is to be injected, which now lies behind all that was handed out."""
        if not self.triggers:
            return None
        trigger = self.triggers.popleft()
        for partition, offset in trigger.added.items():
            self.reader.add(partition, offset)
        self.noted[trigger.frame.checkpoint] = tuple(map(self._decoder.noted, self.reader.positions()))
        self._decoder.tell()
        self.stopped = trigger.final
        return trigger.frame

    def next(self, room: int, *, hurried: bool = False) -> Batch | Signal | None:
        if self.triggers:
            return self.barrier()
        if not room or self.stopped or self.held or self.reader.idle or (asked_s := self.now_s()) < self.due_s:
            return None
        self.activity.phase(self._phase)
        count = min(self.pace.within(hurried), room)
        messages = self.reader.poll(count, 0.0)  # what else was fetched stays in the client
        if len(messages) < count:
            self.due_s = asked_s + GATHER_S
        if not messages:
            return None
        self._handed_s, self._count = self.now_s(), len(messages)
        self.records += len(messages)
        return self._decoder.decode(messages)

    def runs(self) -> Iterable[tuple[int, int]]:
        return self.reader.runs

    def processed(self) -> None:
        self.pace.took(self._count, self.now_s() - self._handed_s)

    def trust(self) -> None:
        self.pace.most = BATCH_RECORDS_MAX

    @property
    def finished(self) -> bool:
        """Whether all that the job is to read has been handed out."""
        return self.reader.finished


@dataclass
class Slices:
    """A frame's batch, handed out in slices by a pace."""

    pace: Pace
    now_s: Callable[[], float]
    rest: Batch | None = None
    """What is not handed out."""
    count: int = 0
    """Of the slice that was handed out last, how many records."""
    handed_s: float = 0.0
    """When that was."""

    def next(self, room: int, *, hurried: bool) -> Batch:
        """The next slice, of *room* records at most."""
        batch = self.rest
        assert batch is not None
        self.handed_s, size = self.now_s(), min(self.pace.within(hurried), room)
        whole = len(batch.records) <= size
        self.rest = None if whole else batch.part(size, len(batch.records))
        batch = batch if whole else batch.part(0, size)
        self.count = len(batch.records)
        return batch

    def processed(self) -> float:
        """The slice has gone through all operators; what time it is."""
        now_s = self.now_s()
        self.pace.took(self.count, now_s - self.handed_s)
        return now_s


@dataclass
class ChannelCapture:
    """What was on its way in one channel at a snapshot."""

    name: str
    begun: list[bytes]
    """The rest of the frame that was being handed out."""
    behind: Capture

    @property
    def whole(self) -> bool:
        """Whether nothing more can come."""
        return self.behind.whole

    def frames(self) -> Iterator[InFlightFrame]:
        """In their order."""
        return (InFlightFrame(self.name, frame) for frame in chain(self.begun, self.behind.frames))


@dataclass
class ChannelInput:
    """One channel into this subtask. A frame is handed out in slices, and the barrier behind it after the last one.

    As many records may be on their way in it as have left it lately, and a few at least; none while it is closed.
    """

    name: str
    channel: Channel
    codec: BatchCodec
    push: Push
    siblings: int = 1
    """How many channels come from the same shuffle, this one included."""
    cautious: bool = False
    """As of a source."""
    bounds: Bounds = ALIGNED
    now_s: Callable[[], float] = perf_counter
    """Likewise."""
    slices: Slices = field(init=False)
    closed: bool = False
    """Whether its writer is to send nothing; see `close`."""
    window: int = field(init=False)
    """How many records may be on their way, unless it is closed."""

    def __post_init__(self) -> None:
        self.slices = Slices(slice_pace(cautious=self.cautious, bounds=self.bounds), self.now_s)
        self._departures = Departures(self.bounds.in_flight_s)
        self._left_s: float | None = None
        """When the last record left, if more waited then."""
        self._least = max(1, IN_FLIGHT_MIN // self.siblings)
        self.window = self._least

    def next(self, room: int, *, hurried: bool = False) -> Batch | Signal | None:
        if self.slices.rest is None:
            frame = self.channel.receive()
            if not isinstance(frame, bytes):
                return frame
            self.slices.rest = self.codec.decode(frame)
        return self.slices.next(room, hurried=hurried) if room else None

    def capture(self, checkpoint: int) -> ChannelCapture:
        """All that is handed out from now on and was sent before barrier *checkpoint*."""
        rest = self.slices.rest
        return ChannelCapture(
            self.name, [] if rest is None else [self.codec.encode(rest)], self.channel.capture(checkpoint)
        )

    def runs(self) -> Iterable[tuple[int, int]]:
        return ((-1, self.slices.count),)

    def processed(self) -> None:
        now_s, slices = self.slices.processed(), self.slices
        since_s = slices.handed_s if self._left_s is None else self._left_s
        self._departures.left(slices.count, since_s=since_s, until_s=now_s)
        self._left_s = now_s if slices.rest is not None or self.channel.waits else None
        lately = self._departures.lately(now_s)
        self.window = max(self._least, min(lately, IN_FLIGHT_CAUTIOUS) if self.cautious else lately)
        self.channel.took(slices.count, 0 if self.closed else self.window)

    def close(self, closed: bool) -> None:
        """Have the writer send nothing more, or let it send again."""
        if closed != self.closed:
            self.closed = closed
            self.channel.took(0, 0 if closed else self.window)

    def trust(self) -> None:
        self.slices.pace.most, self.cautious = BATCH_RECORDS_MAX, False


@dataclass
class RestoredInput:
    """What was on its way to this subtask at the restored checkpoint, in the order in which it is to be taken."""

    frames: deque[InFlightFrame]
    edges: Mapping[str, RestoredEdge]
    cautious: bool = False
    """As of a source."""
    bounds: Bounds = ALIGNED
    now_s: Callable[[], float] = perf_counter
    """Likewise."""
    name: str = ""
    """Of the channel of what was handed out last."""
    slices: Slices = field(init=False)

    def __post_init__(self) -> None:
        self.slices = Slices(slice_pace(cautious=self.cautious, bounds=self.bounds), self.now_s)
        self.waiting = sum(records_in(each.frame) for each in self.frames)
        """How many records are not processed."""

    @property
    def goes_round(self) -> bool:
        """Whether what comes next went round a loop; all behind it did so too."""
        return bool(loop_of(self.name if self.slices.rest is not None else self.frames[0].channel))

    @property
    def push(self) -> Push:
        """What takes what was handed out last."""
        return self._edge.push

    @property
    def _edge(self) -> RestoredEdge:
        return self.edges[edge_of(self.name)]

    @property
    def over(self) -> bool:
        """Whether all was handed out."""
        return not self.frames and self.slices.rest is None

    def next(self, room: int, *, hurried: bool = False) -> Batch:
        """The next slice; there must be one."""
        if self.slices.rest is None:
            frame = self.frames.popleft()
            self.name = frame.channel
            self.slices.rest = self._edge.codec.decode(frame.frame)
        return self.slices.next(room, hurried=hurried)

    def left(self) -> list[InFlightFrame]:
        """What is not handed out."""
        rest = self.slices.rest
        begun = [] if rest is None else [InFlightFrame(self.name, self._edge.codec.encode(rest))]
        return [*begun, *self.frames]

    def runs(self) -> Iterable[tuple[int, int]]:
        return ((-1, self.slices.count),)

    def processed(self) -> None:
        self.slices.processed()
        self.waiting -= self.slices.count

    def trust(self) -> None:
        self.slices.pace.most = BATCH_RECORDS_MAX

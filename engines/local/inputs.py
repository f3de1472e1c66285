"""The inputs of a subtask: source partitions, channels, and restored in-flight records, with one interface.

Invariants: an input hands out batches, watermarks and barriers in order. A source injects its barrier between two
batches, and notes Sn at that moment; after a final barrier it hands out nothing more. Sn and order logs count records
handed out, never those fetched. Restored in-flight records come first, and count as records of their channel.

`next` never waits. A slice is as long as its pace allows, for a barrier waits for its end. A source with few records
lets them gather for a moment; its barriers do not wait for that.

`Pace` says how many records are taken at once, and `Outlet` how many may wait; see docs/design/backpressure.md. A slice
takes about a given time, by the cost of a record in the last slice. Its size grows to its double at most, and shrinks
at once, but not below what an operator asks services for at a time. A channel or a sink's client may hold as many
records as have left it lately. A subtask takes no more than its outputs have room for. Time is an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple, Protocol

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.source import SourceReader
from exactlyonce.engines.local.channels import Channel, LoopChannel
from exactlyonce.engines.local.messages import WatermarkOf
from exactlyonce.engines.local.pacing import SourcePacing
from exactlyonce.engines.runtime.activity import Activity
from exactlyonce.engines.runtime.assembler import RestoredEdge
from exactlyonce.engines.runtime.batch import Batch, BatchCodec, Push, records_in
from exactlyonce.engines.runtime.cut import InFlightCapture
from exactlyonce.engines.runtime.in_flight import InFlightFrame, edge_of, loop_of
from exactlyonce.engines.runtime.order_log import NOT_A_SOURCE, OrderRuns
from exactlyonce.engines.runtime.source_decoder import SourceDecoder, SourceTimes
from exactlyonce.engines.runtime.watermarks import Barrier, Port, Signal, Watermark
from exactlyonce.pipeline.event_time import END_OF_TIME
from exactlyonce.pipeline.rate_meter import RateMeter

BATCH_RECORDS_MAX = 2_000


class Bounds(NamedTuple):
    """Bounds in seconds of processing, by `Clock.processing_s`."""

    slice_s: float
    """The time of a slice: barriers, producers and blocks wait for its end."""
    in_flight_s: float
    """The time that a barrier waits behind records in front of a subtask, or that are being written."""


ALIGNED, OVERTAKING = Bounds(0.075, 0.5), Bounds(0.02, 0.2)
"""A barrier that overtakes only waits for the end of a slice, and overtaken records cost storage."""
HURRIED_SLICE_S = 0.005
"""The slice while a barrier that has overtaken is under way: several turns of the loop lie on its way."""
GATHER_S = 0.01
"""The pause after a poll of a source that gave less than a batch: a turn costs nearly as much with a few records as
with hundreds."""


@dataclass
class Pace:
    """The size of the next slice: about *target_s* of work, and *most* records at most.

    >>> pace = Pace(target_s=0.1, size=16, most=2_000)
    >>> for elapsed_s in (0.001, 0.002, 3.2, 0.05):
    ...     pace.took(pace.size, elapsed_s)
    ...     print(pace.size)
    32
    64
    2
    4
    """

    target_s: float
    size: int
    """Records."""
    most: int
    least: int = 1
    """Records that take no longer than one: a service is asked for all of them at a time."""
    _cost_s: float = 0.0
    """The cost of a record in the last slice."""

    def took(self, records: int, elapsed_s: float) -> None:
        if records:
            self._cost_s = elapsed_s / records
            fits = records * self.target_s / max(elapsed_s, 1e-9)
            self.size = max(self.least, min(int(fits), 2 * self.size, self.most))

    def within(self, hurried: bool) -> int:
        """The size of the next slice; *hurried*: of `HURRIED_SLICE_S` at most."""
        if not hurried or self._cost_s * self.size <= HURRIED_SLICE_S:
            return self.size
        return max(self.least, int(HURRIED_SLICE_S / self._cost_s))


SLICE_AT_FIRST = 4
"""Each record of a first slice may wait for stored state."""
SLICE_CAUTIOUS, IN_FLIGHT_CAUTIOUS = 16, 32
IN_FLIGHT_MIN = 8
"""The least window of all channels of a shuffle into a subtask. It can double with each round trip."""


def slice_pace(*, cautious: bool = False, bounds: Bounds = ALIGNED, least: int = 1) -> Pace:
    """The pace of an input. *cautious*: it stays small until `most` is raised. *least*: `Pace.least`."""
    most = SLICE_CAUTIOUS if cautious else BATCH_RECORDS_MAX
    return Pace(bounds.slice_s, max(SLICE_AT_FIRST, least), max(most, least), least)


class TakesRecords(Protocol):
    """An output of a subtask: a channel, or a sink's writer."""

    @property
    def room(self) -> int:
        """The records that it should get now; 0: pause."""

    @property
    def records(self) -> int:
        """The records that it got so far."""


SHARE_MIN = 1e-3
SHARE_RECORDS = 1_000


@dataclass
class Outlet:
    """An output, and the records that it gets for each record that the subtask takes.

    The share is far below 1 if a shuffle sends it few of the keys, and above 1 if operators multiply records. It rises
    at once, and falls over some `SHARE_RECORDS`.
    """

    output: TakesRecords
    share: float = 1.0
    _sent: int = 0

    @property
    def room(self) -> int:
        """The records that the subtask may take."""
        room = self.output.room
        return room and max(1, int(room / self.share))

    def fired(self) -> None:
        """The subtask has put out results without taking records: the share does not count them."""
        self._sent = self.output.records

    def took(self, records: int) -> None:
        """The subtask has taken *records* and put out their results."""
        if not records:
            return
        sent, self._sent = self.output.records - self._sent, self.output.records
        share = max(sent / records, SHARE_MIN)
        fall = min(1.0, records / SHARE_RECORDS)
        self.share = share if share > self.share else self.share + (share - self.share) * fall


def snapshot_budget_s(records_s: float) -> float:
    """The time for snapshots in a turn of the loop that spent *records_s* on records: twice that, for no output is
    visible before the next snapshot is done. It is 20 ms at most, or half of *records_s* if that is more.

    >>> [snapshot_budget_s(each) for each in (0.0, 0.003, 0.006, 0.03, 0.1)]
    [0.008, 0.008, 0.012, 0.02, 0.05]
    """
    return max(0.008, min(2 * records_s, 0.02), records_s / 2)


WATERMARK_RECORDS = 4 * BATCH_RECORDS_MAX
"""So many records of a backlog come between two watermarks, unless `TICK_S` is over: each makes operators look for what
is due, which costs less for more at once."""
TICK_S = 0.2
"""The interval in which idle splits are looked for, and the watermark of an idle source follows the clock."""


@dataclass
class Slices:
    """The size of the next slice of an input, by the time that the last ones took."""

    pace: Pace
    now_s: Callable[[], float]
    """`Clock.processing_s`: a wait for a processor is no cost of a record."""
    count: int = 0
    """Records in the slice handed out last."""
    handed_s: float = 0.0
    """The time when it was handed out."""

    def size(self, room: int, *, hurried: bool) -> int:
        """Records of the next slice, at most *room*."""
        return min(self.pace.within(hurried), room)

    def handed_out(self, count: int) -> None:
        """A slice of *count* records begins to be processed."""
        self.count, self.handed_s = count, self.now_s()

    def processed(self) -> float:
        """The slice has gone through all operators. Returns the time."""
        now_s = self.now_s()
        self.pace.took(self.count, now_s - self.handed_s)
        return now_s


@dataclass
class FrameSlices(Slices):
    """The slices of an input whose batches come in frames."""

    rest: Batch | None = None
    """The rest of the frame in hand."""

    def next(self, room: int, *, hurried: bool) -> Batch:
        """The next slice of the frame in hand."""
        batch = self.rest
        assert batch is not None
        size = self.size(room, hurried=hurried)
        whole = len(batch.records) <= size
        self.rest = None if whole else batch.part(size, len(batch.records))
        batch = batch if whole else batch.part(0, size)
        self.handed_out(len(batch.records))
        return batch


class SourceTrigger(NamedTuple):
    """A barrier to inject."""

    frame: Barrier
    final: bool
    added: Collection[SourceOffset]
    """The starts of splits that are read from this barrier on."""
    drains: bool = False
    """Whether the watermark goes to the end of time before it."""


@dataclass
class SourceInput:
    """The splits of a source that this subtask reads."""

    name: str
    reader: SourceReader
    decoder: SourceDecoder
    push: Push
    activity: Activity
    slices: Slices
    port: Port | None = None
    """Takes the watermarks; None: its records have no times."""
    triggers: deque[SourceTrigger] = field(default_factory=deque)
    noted: dict[int, tuple[SourceOffset, ...]] = field(default_factory=dict)
    """Sn by checkpoint, until it is finalized."""
    stopped: bool = False
    held: bool = False
    """Whether to hand out barriers only: a store is behind."""
    pacing: SourcePacing | None = None
    """Says when to take records, where these have times."""
    records: int = 0
    """Messages handed out."""
    due_s: float = 0.0
    """The time of the next poll: until then records gather."""

    def __post_init__(self) -> None:
        self._phase = f"reading source {self.name!r}"
        self._drained = False
        self._untold = 0
        """Records since the last look at the watermark."""
        self._ticks_s = 0.0
        """The time of the next look at the clock and at idle splits."""
        self._behind = True
        """Whether no poll since the last such look has got less than it asked for."""

    def barrier(self) -> Barrier | None:
        """Inject the oldest pending barrier after all that was handed out."""
        if not self.triggers:
            return None
        trigger = self.triggers.popleft()
        for start in trigger.added:
            self.reader.add(start)
            if self.decoder.times is not None:
                self.decoder.times.found(start.partition)
        self.noted[trigger.frame.checkpoint] = tuple(map(self.decoder.noted, self.reader.positions()))
        self.stopped = trigger.final
        return trigger.frame

    def finalized(self, checkpoint: int) -> None:
        """Tell the reader, which may tell its server, that nothing before Sn of *checkpoint* is read again."""
        for older in [each for each in self.noted if each < checkpoint]:
            del self.noted[older]
        if (positions := self.noted.pop(checkpoint, None)) is not None:
            self.reader.finalized(positions)

    def next(self, room: int, *, hurried: bool = False) -> Batch | Signal | None:
        if self.triggers:
            if self.triggers[0].drains and not self._drained and self.decoder.times is not None:
                self._drained = True
                return Watermark(END_OF_TIME)
            return self.barrier()
        if self.decoder.times is not None and (watermark := self._tick(self.decoder.times)) is not None:
            return watermark
        pacing, rests = self.pacing, self.stopped or self.reader.idle
        if rests and pacing is not None:
            pacing.rests()
        if not room or rests or self.held or (now_s := self.activity.now_s()) < self.due_s:
            return None
        if pacing is not None and pacing.waits_for_sources:
            return None
        self.activity.phase(self._phase)
        count = self.slices.size(room, hurried=hurried)
        messages = self.reader.poll(count, 0.0)
        if pacing is not None:
            pacing.took(len(messages), count)
        if len(messages) < count:
            self.due_s, self._behind = now_s + GATHER_S, False
        if not messages:
            return None
        self.slices.handed_out(len(messages))
        self.records += len(messages)
        return self.decoder.decode(messages, self.reader.runs)

    def _tick(self, times: SourceTimes) -> Watermark | None:
        """Every `TICK_S`, look which splits are idle; the watermark, if that or the clock has moved it."""
        now_s = self.activity.now_s()
        if now_s < self._ticks_s or self.stopped:
            return None
        quiet = self.reader.quiet()
        if unsure := times.unsure(quiet, now_s):
            quiet = self.reader.quiet(ask=unsure)
        asked_s = self.activity.now_s() - now_s
        times.rest(self.reader.positions(), quiet, now_s, behind=self._behind, asked_s=asked_s)
        self._ticks_s, self._behind = now_s + TICK_S, True
        return times.advanced(now_s)

    def note(self, order: OrderRuns) -> None:
        if self.decoder.times is not None:
            for split, floor in self.decoder.times.take_raised().items():
                order.floor(self.name, split, floor)
        for split, count in self.reader.runs:
            order.note(self.name, split, count)

    def processed(self) -> Watermark | None:
        self.slices.processed()
        times = self.decoder.times
        if times is None:
            return None
        self._untold += self.slices.count
        if self.slices.count == BATCH_RECORDS_MAX and self._untold < WATERMARK_RECORDS:
            return None
        self._untold = 0
        return times.advanced(self.activity.now_s())

    @property
    def watermark(self) -> WatermarkOf | None:
        """None: its records have no times."""
        times = self.decoder.times
        if times is None:
            return None
        slowest = times.slowest
        if slowest is None:
            return WatermarkOf(times.watermark, True)
        position = next(each for each in self.reader.positions() if each.partition == slowest)
        at = position.in_cluster or position
        waits = self.pacing is not None and not self.stopped and self.pacing.waits_for_sources
        why = "; it waits for slower sources" if waits else ""
        silent_ms = times.silent_ms(slowest, self.activity.now_s())
        return WatermarkOf(times.watermark, False, f"{at.topic}[{at.partition}]{why}", silent_ms, times.furthest)

    def trust(self) -> None:
        self.slices.pace.most = BATCH_RECORDS_MAX


@dataclass
class FramedInput:
    """An input whose batches come in frames."""

    cautious: bool = field(default=False, kw_only=True)
    """Whether to hand out little until a barrier has come through: slow records may have kept the last attempt from
    that, and this one begins with the same records."""
    bounds: Bounds = field(default=ALIGNED, kw_only=True)
    least: int = field(default=1, kw_only=True)
    """`Pace.least`."""
    now_s: Callable[[], float] = field(default=perf_counter, kw_only=True)
    slices: FrameSlices = field(init=False)

    def __post_init__(self) -> None:
        self.slices = FrameSlices(slice_pace(cautious=self.cautious, bounds=self.bounds, least=self.least), self.now_s)

    def trust(self) -> None:
        self.slices.pace.most, self.cautious = BATCH_RECORDS_MAX, False


@dataclass
class ChannelInput(FramedInput):
    """One channel into this subtask. It hands out a frame in slices, and a barrier after the last slice before it.

    The channel may hold as many records as have left it lately, and a few at least; none while it is closed. It may
    hold twice as many as left it since it was empty, if they leave in time: a round trip may take longer than that.
    """

    name: str
    channel: Channel
    codec: BatchCodec
    push: Push
    siblings: int = 1
    """The number of channels of the same shuffle, with this one."""
    overtaken: bool = True
    """Whether barriers may overtake its records; see `ShuffleEdge.to_all`."""
    port: Port | None = None
    """Takes the watermarks; None: none come."""
    closed: bool = False
    """Whether the writer must send nothing; see `close`."""
    window: int = field(init=False)
    """The records that the channel may hold, unless it is closed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._departures = RateMeter(self.bounds.in_flight_s)
        self._left_s: float | None = None
        """The time when the last record left, if more waited then."""
        self._round, self._round_s = 0, 0.0
        """The records that left since the channel was empty, and the time when the first of them came."""
        self._least = max(1, max(IN_FLIGHT_MIN, self.least) // self.siblings)
        self.window = self._least

    def next(self, room: int, *, hurried: bool = False) -> Batch | Signal | None:
        if self.slices.rest is None:
            frame = self.channel.receive()
            if not isinstance(frame, bytes):
                return frame
            self.slices.rest = self.codec.decode(frame)
        return self.slices.next(room, hurried=hurried) if room else None

    def note(self, order: OrderRuns) -> None:
        order.note(self.name, NOT_A_SOURCE, self.slices.count)

    def capture(self, checkpoint: int) -> InFlightCapture:
        """The records handed out from now on that were sent before barrier *checkpoint*."""
        rest = self.slices.rest
        capture = InFlightCapture(self.name, checkpoint, [] if rest is None else [self.codec.encode(rest)])
        self.channel.capture(capture)
        return capture

    def processed(self) -> None:
        now_s, slices = self.slices.processed(), self.slices
        since_s = slices.handed_s if self._left_s is None else self._left_s
        if self._left_s is None:
            self._round, self._round_s = 0, since_s
        self._round += slices.count
        self._departures.left(slices.count, since_s=since_s, until_s=now_s)
        self._left_s = now_s if slices.rest is not None or self.channel.waits else None
        lately, took_s = self._departures.lately(now_s), now_s - self._round_s
        if took_s < self.bounds.in_flight_s:
            fit = self._round * self.bounds.in_flight_s / max(took_s, 1e-9)
            lately = max(lately, min(int(fit), 2 * self._round))
        self.window = max(self._least, min(lately, IN_FLIGHT_CAUTIOUS) if self.cautious else lately)
        self.channel.took(slices.count, 0 if self.closed else self.window)

    def close(self, closed: bool) -> None:
        """Stop the writer, or let it send again."""
        if closed != self.closed:
            self.closed = closed
            self.channel.took(0, 0 if closed else self.window)


@dataclass
class FeedbackInput(ChannelInput):
    """A loop's channel as an input of its head."""

    channel: LoopChannel

    @property
    def ready(self) -> bool:
        """Whether `next` would hand out something."""
        return self.slices.rest is not None or self.channel.ready


@dataclass
class RestoredInput(FramedInput):
    """The in-flight records of the restored checkpoint, in the order in which this subtask takes them."""

    frames: deque[InFlightFrame]
    edges: Mapping[str, RestoredEdge]
    name: str = ""
    """The channel of the frame in hand."""
    port: None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.waiting = sum(records_in(frame.frame) for frame in self.frames)
        """The number of records not processed."""

    @property
    def goes_round(self) -> bool:
        """Whether the next record went round a loop; then all later ones did, too."""
        return bool(loop_of(self.name if self.slices.rest is not None else self.frames[0].channel))

    @property
    def push(self) -> Push:
        """The receiver of the batch handed out last."""
        return self._edge.push

    @property
    def _edge(self) -> RestoredEdge:
        return self.edges[edge_of(self.name)]

    @property
    def over(self) -> bool:
        return not self.frames and self.slices.rest is None

    def next(self, room: int, *, hurried: bool = False) -> Batch:
        """The next slice, unless `over`."""
        if self.slices.rest is None:
            frame = self.frames.popleft()
            self.name = frame.channel
            self.slices.rest = self._edge.codec.decode(frame.frame)
        return self.slices.next(room, hurried=hurried)

    def note(self, order: OrderRuns) -> None:
        order.note(self.name, NOT_A_SOURCE, self.slices.count)

    def left(self) -> list[InFlightFrame]:
        rest = self.slices.rest
        begun = [] if rest is None else [InFlightFrame(self.name, self._edge.codec.encode(rest))]
        return [*begun, *self.frames]

    def processed(self) -> None:
        self.slices.processed()
        self.waiting -= self.slices.count


PacedInput = SourceInput | ChannelInput | RestoredInput
"""An input that hands out what its pace allows. `next` gives the next item: a batch of so many records at most, and of
few if *hurried*, or a signal, which needs no room; None: nothing now. `processed` is called once a batch has gone
through all operators, and returns the watermark after it, if it is new. `trust`: a barrier has come through, stop being
cautious."""

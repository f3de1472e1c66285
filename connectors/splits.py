"""Sources whose splits are read one after the other: the reader, the range and the records of any of them.

A source names its splits, and opens one at a position; the rest is here (docs/writing-a-source.md). Invariants: a split
is read in its order, to its end unless it has no record at the moment, and is marked as ended with its last record. A
batch keeps what was read as it is, and makes a record with its place only where one is asked for. No I/O of its own.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar, overload

import msgspec

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.source import LogRead, RangeContext, ReaderContext, SplitFinder
from exactlyonce.pipeline import shape
from exactlyonce.pipeline.codec import codec_for
from exactlyonce.pipeline.dead_letters import DeadLetter, OnError
from exactlyonce.pipeline.errors import ConfigError, Halt
from exactlyonce.pipeline.records import Record
from exactlyonce.pipeline.source import AHEAD, EventTime, Routed, Source, TimeOf

T_co = TypeVar("T_co", covariant=True)
LOG_INTERVAL_S = 2.0
SPLIT_RECORDS = 1_000_000
"""The records that a split may have left, where only reading would count them."""


class OpenSplit(ABC):
    """A split that is being read. It belongs to the thread that opened it."""

    name: str
    """Its name for people, as the name of its file."""
    time_ms: int = 0
    """The time of its records, in ms since 1970; 0: they have none."""

    @property
    def ended(self) -> bool:
        """Whether all records have been read. A split that grows never ends."""
        return False

    def caught_up(self) -> bool:
        """Whether all records that are known to be there were read, once `read` gives fewer than it may."""
        return True

    @property
    def cursor(self) -> str | None:
        """The present `SourceOffset.cursor`. None: a record's number finds it, and finds the same one ever after."""
        return None

    @abstractmethod
    def read(self, records_max: int) -> Sequence[Any]:
        """The next records, as parts that the source's decoder takes; fewer than *records_max*: no more now, so that
        another split has its turn. It waits for none.

        Raises `Halt` if the next records were removed, `StoreUnavailable` where nobody answers: the job then restarts,
        and waits.
        """

    def buffered(self) -> int:
        """The records that are known to be there, not yet read; right after it was opened, all of them, if it grows."""
        return 0

    def log(self) -> LogRead | None:
        """How far it is in its server's log, if it reads one, and what its server says about that. It is asked every
        `LOG_INTERVAL_S`, between two calls of `read`; what the server does not say is None, and no error."""
        return None

    def finalized(self, position: SourceOffset) -> None:  # noqa: B027 - many have nothing to say to their server
        """A checkpoint with this *position* of it is finalized: what lies before is never read again."""

    def close(self) -> None:  # noqa: B027 - many have nothing open
        """Release what was opened."""


class SplitRecord(NamedTuple):
    """A record as read, with its place."""

    part: Any
    start: SourceOffset
    """A position of its split."""
    number: int
    name: str
    """The name of its split, for people."""
    time_ms: int
    mark: str
    """The mark of its split; empty: its number may be another record's the next time."""

    def topic(self) -> str:
        return self.start.topic

    def partition(self) -> int:
        return self.start.partition

    def offset(self) -> int:
        return self.number


class Run(NamedTuple):
    """Records of one split in a batch."""

    start: SourceOffset
    """The position of the first."""
    length: int
    name: str
    time_ms: int
    mark: str

    @classmethod
    def of(cls, opened: OpenSplit, start: SourceOffset, length: int) -> Run:
        """The run of *length* records that *opened* has read from *start* on."""
        return cls(start, length, opened.name, opened.time_ms, start.mark if opened.cursor is None else "")


class SplitBatch(Sequence[SplitRecord], ABC):
    """A batch: *parts* are the records as read, and a subclass says where each is from."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return len(self.parts)

    @overload
    def __getitem__(self, place: int) -> SplitRecord: ...
    @overload
    def __getitem__(self, place: slice) -> list[SplitRecord]: ...
    def __getitem__(self, place: int | slice) -> SplitRecord | list[SplitRecord]:
        at = range(len(self.parts))[place]
        return self._record(at) if isinstance(at, int) else list(map(self._record, at))

    def __iter__(self) -> Iterator[SplitRecord]:
        return map(self._record, range(len(self.parts)))

    @abstractmethod
    def _record(self, place: int) -> SplitRecord:
        """The record at *place*, from 0 on."""


def parts_of(records: Sequence[SplitRecord]) -> list[Any]:
    """The records as they were read."""
    return records.parts if isinstance(records, SplitBatch) else [record.part for record in records]


class SplitRecords(SplitBatch):
    """A batch, and the *runs* that say where its parts are from."""

    def __init__(self, parts: list[Any], runs: list[Run]) -> None:
        super().__init__(parts)
        self.runs = runs
        self._ends = list(accumulate(run.length for run in runs))

    def _record(self, place: int) -> SplitRecord:
        number = bisect_right(self._ends, place)
        run = self.runs[number]
        first = self._ends[number] - run.length
        number = run.start.offset + place - first
        return SplitRecord(self.parts[place], run.start, number, run.name, run.time_ms, run.mark)

    def __iter__(self) -> Iterator[SplitRecord]:
        parts = iter(self.parts)
        for start, length, name, time_ms, mark in self.runs:
            for number in range(start.offset, start.offset + length):
                yield SplitRecord(next(parts), start, number, name, time_ms, mark)


class SourceFinding(NamedTuple):
    """What is wrong in the server of a source, or will be; see `SplitSource.examine`."""

    what: str
    """A sentence without its full stop."""
    do: str
    """The remedy."""
    is_note: bool = False
    """Whether it needs no action now."""


OpensSplit = Callable[[SourceOffset], OpenSplit]
"""Opens a split at a position. Raises `Halt` if it is not the same any more, or has no such position."""


def require_reached(position: SourceOffset, name: str, reached: int) -> None:
    """Raise Halt unless the split at *position* has as many records as were read of it."""
    if reached < position.offset:
        raise _lost(
            position,
            f"must go on at {position.topic}[{position.partition}] offset {position.offset}, but {name} has only "
            f"{reached} records",
        )


def _lost(position: SourceOffset, what: str) -> Halt:
    """The error of a source that does not have the records up to *position* any more."""
    return Halt(
        f"Source {position.source!r} {what}.\n"
        f"  Choices: restore it as it was, and run again; or `exactlyonce reset` and recompute from what is there.",
        operator=position.source,
        topic=position.topic,
        partition=position.partition,
        offset=position.offset,
    )


class _Opening:
    """Opens the splits of one source, and holds them to what docs/writing-a-source.md says: a mistake there would lose
    or double records, or never end."""

    def __init__(self, open_split: OpensSplit, *, grows: bool) -> None:
        self._open_split, self._grows = open_split, grows

    def open(self, position: SourceOffset) -> OpenSplit:
        """The split at *position*. Raises Halt if it can neither grow nor end."""
        opened = self._open_split(position)
        if not self._grows and type(opened).ended is OpenSplit.ended:
            raise self._mistaken(
                position,
                f"{type(opened).__name__} has no `ended`, and the source no grows = True: bounded work would wait for "
                f"an end that never comes. Add grows = True if records of a split may come later; else let `ended` be "
                f"True once all were read",
            )
        return opened

    def read(self, opened: OpenSplit, start: SourceOffset, records_max: int) -> Sequence[Any]:
        """The next parts of *opened*, which stands at *start*. Raises Halt where there are too many, where a split that
        grows has ended, and where a cursor is no text."""
        read = opened.read(records_max)
        if len(read) > records_max:
            raise self._mistaken(
                start,
                f"read({records_max}) of {opened.name} gave {len(read)} records, of which the last would come twice in "
                f"bounded work. Give {records_max} at most, and the others at the next call",
            )
        if self._grows and opened.ended:
            raise self._mistaken(
                start,
                f"{opened.name} has ended, and the source says grows = True: what comes later would not be read. Leave "
                f"out `ended`; or grows = True, if a split is whole once it is found",
            )
        if not isinstance(opened.cursor, str | None):
            raise self._mistaken(start, f"the cursor of {opened.name} is {opened.cursor!r:.100}, and has to be text")
        return read

    def _mistaken(self, position: SourceOffset, what: str) -> Halt:
        return Halt(
            f"The code of source {position.source!r} is wrong: {what}. The job has stopped before it; nothing is lost.",
            operator=position.source,
        )


def _after(start: SourceOffset, opened: OpenSplit, count: int) -> SourceOffset:
    """The position of *opened* once *count* records from *start* on were read."""
    offset = start.offset + count
    return msgspec.structs.replace(start, offset=offset, ended=opened.ended, cursor=opened.cursor or "")


class SplitsReader:
    """The `SourceReader` of the splits of one subtask. Splits without a record at the moment take turns."""

    def __init__(self, context: ReaderContext, open_split: OpensSplit, *, endless: bool, grows: bool) -> None:
        """*endless*, *grows*: see `SplitSource`."""
        self.runs: list[tuple[int, int]] = []
        self.waiting = ""
        self._positions = {position.partition: position for position in context.positions}
        self._targets = context.targets or {}
        self._endless, self._grows = (endless or grows) and context.targets is None, grows
        self._opening = _Opening(open_split, grows=grows)
        self._opened: dict[int, OpenSplit] = {}
        self._logs: dict[int, LogRead] = {}
        """What the splits that read a log said last."""
        self._ask_logs_s = 0.0
        """The time to ask them again."""
        self._unended: list[int] = []
        self._quiet = set[int]()

    def open(self) -> None:
        self._unended = sorted(split for split, position in self._positions.items() if not position.ended)

    def add(self, start: SourceOffset) -> None:
        if start.ended:
            self._positions.pop(start.partition, None)
        elif start.partition not in self._positions:
            self._positions[start.partition] = start
            self._unended.append(start.partition)

    def poll(self, records_max: int, timeout_s: float) -> Sequence[Any]:
        self.runs = []
        parts: list[Any] = []
        runs: list[Run] = []
        for split in list(self._unended):
            if len(parts) == records_max:
                break
            opened, start = self._open(split), self._positions[split]
            asked = records_max - len(parts)
            read = self._opening.read(opened, start, asked)
            self._quiet.discard(split)
            if len(read) < asked and not opened.ended and opened.caught_up():
                self._quiet.add(split)
            if read:
                parts += read
                runs.append(Run.of(opened, start, len(read)))
                self.runs.append((split, len(read)))
            if read or opened.ended or (opened.cursor or "") != start.cursor:
                self._positions[split] = _after(start, opened, len(read))
            if opened.ended:
                self._unended.remove(split)
                self._opened.pop(split).close()
        return SplitRecords(parts, runs) if parts else []

    def _open(self, split: int) -> OpenSplit:
        if split not in self._opened:
            opened = self._opened[split] = self._opening.open(self._positions[split])
            if (log := opened.log()) is not None:
                self._logs[split] = log
        return self._opened[split]

    def positions(self) -> tuple[SourceOffset, ...]:
        return tuple(position for _, position in sorted(self._positions.items()))

    def finalized(self, positions: Sequence[SourceOffset]) -> None:
        for position in positions:
            if position.partition in self._opened:
                self._opened[position.partition].finalized(position)

    @property
    def idle(self) -> bool:
        return not self._positions

    @property
    def finished(self) -> bool:
        return not self._endless and all(map(self._is_through, self._unended))

    def _is_through(self, split: int) -> bool:
        if split in self._targets:
            return self._positions[split].offset >= self._targets[split]
        return self._grows and split in self._quiet

    def quiet(self, ask: Collection[int] = ()) -> set[int]:
        return self._quiet

    def lags(self) -> dict[tuple[str, int], int]:
        return {
            (self._positions[split].topic, split): opened.buffered()
            for split, opened in self._opened.items()
            if split not in self._logs
        }

    def logs(self) -> list[LogRead]:
        if self._logs and (now_s := time.monotonic()) >= self._ask_logs_s:
            self._ask_logs_s = now_s + LOG_INTERVAL_S
            asked = {split: opened.log() for split, opened in self._opened.items() if split in self._logs}
            self._logs = {split: log for split, log in asked.items() if log is not None}
        return list(self._logs.values())

    def close(self) -> None:
        for opened in self._opened.values():
            opened.close()


class SplitRange:
    """The `SplitReader` of a range."""

    def __init__(self, context: RangeContext, open_split: OpensSplit, *, grows: bool) -> None:
        """*grows*: see `SplitSource`."""
        self._position, self._end, self._to_end = context.start, context.end, context.to_end
        self._opening = _Opening(open_split, grows=grows)
        self._opened: OpenSplit | None = None

    def read(self, records_max: int) -> list[SplitRecord]:
        start = self._position
        if start.ended or start.offset >= self._end:
            return []
        if self._opened is None:
            self._opened = self._opening.open(start)
        opened = self._opened
        parts = list(self._opening.read(opened, start, min(records_max, self._end - start.offset)))
        if not parts and not self._to_end:
            require_reached(msgspec.structs.replace(start, offset=self._end), opened.name, start.offset)
        self._position = _after(start, opened, len(parts))
        return list(SplitRecords(parts, [Run.of(opened, start, len(parts))]))

    def position(self) -> SourceOffset:
        return self._position

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None


class NamedSplits:
    """The `SplitFinder` of splits that their source knows by their identities, which *find* gives."""

    def __init__(self, source: str, place: str, find: Callable[[], Iterable[str]]) -> None:
        self._source, self._place, self._find = source, place, find

    def find(self, known: Sequence[SourceOffset]) -> list[SourceOffset]:
        there = dict.fromkeys(self._find())
        for identity in there:
            if not isinstance(identity, str):
                raise ConfigError(
                    f"The code of source {self._source!r} is wrong: find_splits() gives {identity!r:.100}, and the "
                    f"identity of a split is text. Give str(...) of it."
                )
        for position in known:
            if position.identity not in there and not position.ended:
                read = f"{self._place} split {position.identity!r} up to record {position.offset}"
                raise _lost(position, f"has read {read}, and the split is gone")
        new = there.keys() - {position.identity for position in known}
        first = max((position.partition for position in known), default=-1) + 1
        return [
            SourceOffset(self._source, self._place, identity, number, 0)
            for number, identity in enumerate((identity for identity in there if identity in new), first)
        ]

    def close(self) -> None:
        """The source opens what it needs at each call."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SplitSource(Source[T_co]):
    """The base of a source whose splits are read one after the other; docs/writing-a-source.md has an example.

    A subclass has `type`, `place`, `find_splits` and `open_split`, all others have defaults. Its fields are as those of
    `KafkaSource`.
    """

    on_error: OnError = "fail"
    time: TimeOf[Any] | None = None

    endless: bool = field(default=False, init=False, repr=False)
    """Whether splits may come while a run goes on."""
    grows: bool = field(default=False, init=False, repr=False)
    """Whether records of a split may come while a run goes on: then it is endless, too, and no split ends. A bounded
    run ends with those that are there, as `OpenSplit.buffered` says."""

    @property
    def looks_at(self) -> str:
        """See `connectors.source.FindsSplits`."""
        return self.place

    @property
    def repeats(self) -> bool:
        """Whether a number has the same record whenever a split is read; else no range is read again."""
        return True

    def find_splits(self) -> Iterable[str]:
        """The identities of the splits that are there, also of those that were read; new ones in the order in which
        they get their numbers. The leader asks at the start, and at every checkpoint.

        Raises `StoreUnavailable` where nobody answers.
        """
        raise NotImplementedError(f"{type(self).__name__} must have find_splits(), which gives its splits' identities")

    def finder(self, source: str, topics: Any = None) -> SplitFinder:
        """See `connectors.source.FindsSplits`."""
        return NamedSplits(source, self.place, self.find_splits)

    def left(self, position: SourceOffset) -> int:
        """The records from *position* to the end of its split, for bounded work; a guess where they are not known, 0
        only if there are none. A split that grows is asked. Raises `ConfigError` if bounded work cannot read it."""
        if not self.grows:
            return 0 if position.ended else SPLIT_RECORDS
        if not self.repeats:
            raise ConfigError(
                f"Source {position.source!r} finds its records by a cursor, and bounded work reads ranges of numbers: "
                f"use `exactlyonce run`, with --until latest."
            )
        with closing(self.open_split(position)) as opened:
            return opened.buffered()

    @abstractmethod
    def open_split(self, position: SourceOffset) -> OpenSplit:
        """Open the split `SourceOffset.identity`, so that it gives the record with the number `SourceOffset.offset`
        next. Raises `Halt` if the split is not the same any more, or has no such position."""

    def open_reader(self, context: ReaderContext) -> SplitsReader:
        return SplitsReader(context, self.open_split, endless=self.endless, grows=self.grows)

    def open_range(self, context: RangeContext) -> SplitRange:
        return SplitRange(context, self.open_split, grows=self.grows)

    def decoder(self) -> SplitDecoder:
        """The decoder of the records of both readers. By default parts are bytes, which the codec of `type` decodes."""
        name = shape.type_name(self.type)
        return SplitDecoder(
            codec_for(self.type).decode, bytes, lambda part, error: f"the record is not {name}: {error}"
        )

    @property
    def event_time(self) -> EventTime[Any] | None:
        """See `Source`. Its records are no messages, whose timestamps would bound their times."""
        event_time = super().event_time
        return None if event_time is None else replace(event_time, ahead=None)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if isinstance(self.time, EventTime) and self.time.ahead not in (None, AHEAD):
            yield "ahead= is about the timestamps of messages of Kafka: leave it out"

    def examine(self, positions: Sequence[SourceOffset]) -> tuple[str, Sequence[SourceFinding]]:
        """What the server says about the source, whose newest *positions* these are, for `exactlyonce doctor`: its
        state as a phrase, which is empty if there is nothing to ask, and what is wrong. Raises `StoreUnavailable` where
        nobody answers, `StoreError` where the server refuses to."""
        return "", ()

    def describe(self) -> dict[str, Any]:
        """The class, the place and the type. Override it where more belongs to the identity, say a query."""
        value = shape.describe(self.type)
        return {"source": type(self).__name__, "place": self.place, "value": value, **self.describe_time()}


class SplitDecoder:
    """The `RecordDecoder` of parts that *decode* takes; *bytes_of* gives one for a dead letter, *refused* the reason
    why one does not decode."""

    def __init__(
        self,
        decode: Callable[[Any], Any],
        bytes_of: Callable[[Any], bytes | None],
        refused: Callable[[Any, BaseException], str],
    ) -> None:
        self.decode, self._bytes_of, self._refused = decode, bytes_of, refused

    def parts(self, records: Sequence[SplitRecord]) -> list[Any]:
        return parts_of(records)

    def problem(self, record: SplitRecord, error: BaseException) -> str:
        return f"in {record.name}, {self._refused(record.part, error)}"

    def letter(self, record: SplitRecord) -> DeadLetter:
        return Record(
            self._bytes_of(record.part), None, record.time_ms, (), record.topic(), record.partition(), record.offset()
        )

    def times_ms(self, records: Sequence[SplitRecord]) -> Iterator[int]:
        return (record.time_ms for record in records)


class SharedDecoder(SplitDecoder):
    """The decoder of a `SharedSource` of several members: *decoders* by their ids. A part has the `mark` of those that
    get it; it becomes one record for each of them, or is refused."""

    def __init__(self, routes: Mapping[str, tuple[str, ...]], decoders: Mapping[str, SplitDecoder]) -> None:
        by_mark = {mark: (ids, [decoders[id] for id in ids]) for mark, ids in routes.items()}
        routed = {mark: (ids, _all_of([decoder.decode for decoder in own])) for mark, (ids, own) in by_mark.items()}

        def decode(part: Any) -> Routed:
            ids, decode = routed[part.mark]
            return ids, decode(part)

        super().__init__(
            decode,
            lambda part: by_mark[part.mark][1][0]._bytes_of(part),
            lambda part, error: by_mark[part.mark][1][0]._refused(part, error),
        )


def _all_of(decodes: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    return decodes[0] if len(decodes) == 1 else lambda part: tuple([decode(part) for decode in decodes])


class PlacedDecoder(SplitDecoder):
    """A decoder that gives `Record`: what *decoder* gives, with its place. `Record.topic` is the name of the split."""

    def __init__(self, decoder: SplitDecoder) -> None:
        def decode(record: SplitRecord) -> Record[Any]:
            value, time_ms = decoder.decode(record.part), record.time_ms or None
            return Record(value, None, time_ms, (), record.name, record.partition(), record.offset())

        super().__init__(decode, decoder._bytes_of, decoder._refused)

    def parts(self, records: Sequence[SplitRecord]) -> list[Any]:
        return list(records)

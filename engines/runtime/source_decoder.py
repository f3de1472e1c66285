"""What a source's messages become in one subtask: records, their event times, and the watermark. No I/O, no clock.

Invariants of decoding: a batch is decoded in one pass, in time linear in the messages, and no good record is decoded
twice. Only what `engines.runtime.faults` calls a bad record is skipped. Every skipped record is counted by partition,
and noted.

The floor of a split is the greatest time before its next record, minus the disorder and 1 ms: a record is late if it is
older than that time by more than the disorder, so one of the same millisecond is not. Invariants of times: a floor
never falls, also over restarts, for `floor + 1` lies beside Sn; a record is late if its time is not above the floor
before it, whatever the batches are; the watermark is not above the floor of any later record. See docs/event-time.md.

A split that has had no record for a while is idle, and holds back nothing. Its floor follows the watermark. While all
are idle, the watermark follows the clock from the last record on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import accumulate, groupby
from operator import length_hint
from typing import Any

import msgspec

from exactlyonce.checkpoint.records.manifest import LATE_BELOW_LATEST, RecordPlace, SourceOffset
from exactlyonce.connectors.source import RawRecord, Readable
from exactlyonce.engines.runtime.batch import Batch, facts_of, or_skip
from exactlyonce.engines.runtime.faults import (
    RETRY_PAUSES_S,
    DeadLetterOutput,
    Notes,
    is_bad_record,
    is_outage,
    pause,
    place_of,
    record_error,
)
from exactlyonce.engines.runtime.watermarks import Watermark
from exactlyonce.pipeline.codec import Ignored
from exactlyonce.pipeline.dead_letters import DeadLetter, OnError
from exactlyonce.pipeline.durations import shown_duration
from exactlyonce.pipeline.errors import RecordError, Unavailable, require_whole, sendable, text_of, users_errors
from exactlyonce.pipeline.event_time import (
    END_OF_TIME,
    LATEST_MS,
    LIKE_SECONDS,
    NO_FLOOR,
    NO_WATERMARK,
    NoTime,
    ms_of,
    shown_time,
)
from exactlyonce.pipeline.source import EventTime

Runs = Sequence[tuple[int, int]]
"""(split, count) of consecutive records."""
PAUSE_S = 1.0
"""The time without a look at idle splits after which the process may have been stopped, and its clients with it."""
_BLOCK_RECORDS = 100
"""The records whose times are looked at together: few, so that most blocks span less than the disorder."""


class SourceTimes:
    """The times of a source's records; *before* are the starts of its splits, of other subtasks too."""

    def __init__(
        self, event_time: EventTime[Any], before: Iterable[SourceOffset] = (), rules: int = LATE_BELOW_LATEST
    ) -> None:
        """*rules* hold for the interval that is read; see `Manifest.rules`."""
        self._time = event_time.function
        self._idle_ms, self._ahead_ms = event_time.idle_ms, event_time.ahead_ms
        self.max_drift_ms = event_time.max_drift_ms
        self._below_ms = int(rules >= LATE_BELOW_LATEST)
        """How far a floor lies below the number beside Sn."""
        self._behind_ms = event_time.disorder_ms + self._below_ms
        """How far a floor lies behind the greatest time."""
        self.floors = {
            start.partition: start.floor if start.floor == NO_FLOOR else start.floor - self._below_ms
            for start in before
        }
        self._lowest = min(self.floors.values(), default=NO_FLOOR)
        """The floor of a split that no checkpoint knows."""
        self.watermark = NO_WATERMARK
        """The last one."""
        self._told = Watermark(NO_WATERMARK)
        self._splits: list[int] = []
        """All that the subtask reads."""
        self._quiet_since_s: dict[int, float] = {}
        """The time since which each quiet split has had no record, as far as it counts for `idle`."""
        self._silent_since_s: dict[int, float] = {}
        """The same, though records of other splits waited all the time: for people."""
        self._looked_s = 0.0
        """The time of the last look which splits are idle."""
        self.resting = set[int]()
        """The splits that hold back nothing: idle ones, and those that have ended."""
        self._raised: dict[int, int] = {}
        """The floors of splits that were idle, for the order log."""

    # --- records --------------------------------------------------------------------------------------------------

    def times(self, records: Sequence[Any], timestamps: Iterable[int]) -> list[int]:
        """The time of each of *records*; *timestamps* are of their messages.

        Raises `NoTime` if one has no usable time, or what the user's function raises.
        """
        given = list(map(self._time, records))
        require_whole(given, len(records))
        if set(map(type, given)) != {int} or min(given) < 0 or max(given) > LATEST_MS:
            given = list(map(ms_of, given))
        ahead_ms = self._ahead_ms
        if given and ahead_ms is not None:
            stamps = list(timestamps)
            if max(given) > min(stamps) + ahead_ms:
                for time, stamp in zip(given, stamps, strict=True):
                    if stamp >= 0 and time > stamp + ahead_ms:
                        raise _ahead(time, stamp, ahead_ms)
        return given

    def late(self, times: Sequence[int], runs: Runs) -> list[int] | None:
        """The floors of a batch with these *times*; see `Batch.floors`. The floors of its splits rise."""
        floors: list[int] | None = None
        behind_ms, start = self._behind_ms, 0
        for split, count in runs:
            floor, end = self._wake(split), start + count
            for begin in range(start, end, _BLOCK_RECORDS):
                block = times[begin : min(begin + _BLOCK_RECORDS, end)]
                after = max(floor, max(block) - behind_ms)
                if min(block) <= after:
                    late = _late(block, floor, behind_ms)
                    if floors is None and any(each != NO_FLOOR for each in late):
                        floors = [NO_FLOOR] * len(times)
                    if floors is not None:
                        floors[begin : begin + len(block)] = late
                floor = after
            self.floors[split] = floor
            start = end
        return floors

    def _wake(self, split: int) -> int:
        """The floor of *split*, which is no longer idle."""
        self._quiet_since_s.pop(split, None)
        self._silent_since_s.pop(split, None)
        floor = self.floors[split] = self.floor_of(split)
        if split in self.resting:
            self.resting.remove(split)
            self._raised[split] = floor
        return floor

    def floor_of(self, split: int) -> int:
        """The floor of the next record of *split*."""
        floor = self._own_floor(split)
        return max(floor, self.watermark) if split in self.resting else floor

    def _own_floor(self, split: int) -> int:
        """The floor by the records of *split* alone."""
        return self.floors.get(split, self._lowest)

    def found(self, split: int) -> None:
        """*split* is read from now on. It begins at the watermark, so that this does not fall."""
        self.floors.setdefault(split, max(self._lowest, self.watermark))
        if split not in self._splits:
            self._splits.append(split)

    def take_raised(self) -> dict[int, int]:
        """The floors that idle splits had as they went on, since the last call."""
        raised, self._raised = self._raised, {}
        return raised

    def noted(self, position: SourceOffset) -> SourceOffset:
        """*position* with the floor of its split."""
        floor = self.floor_of(position.partition)
        return msgspec.structs.replace(position, floor=floor if floor == NO_FLOOR else floor + self._below_ms)

    # --- the watermark --------------------------------------------------------------------------------------------

    def unsure(self, quiet: Collection[int], now_s: float) -> Collection[int]:
        """The splits of *quiet* whose servers must confirm before `rest` that they have no record: those that would
        become idle; after a pause of the process every one, for its client may not know yet what came meanwhile."""
        if self._idle_ms is None:
            return ()
        if now_s - self._looked_s > PAUSE_S:
            return quiet
        return self._silent(now_s).intersection(quiet) - self.resting

    def _silent(self, now_s: float) -> set[int]:
        """The splits that have been quiet for long enough to be idle."""
        idle_ms = self._idle_ms
        if idle_ms is None:
            return set()
        return {split for split, quiet_s in self._quiet_since_s.items() if 1000 * (now_s - quiet_s) >= idle_ms}

    def rest(
        self, positions: Sequence[SourceOffset], quiet: Collection[int], now_s: float, *, behind: bool,
        asked_s: float = 0.0,
    ) -> None:  # fmt: skip
        """Look which splits are idle at *now_s*. *positions* are those of all splits that the subtask reads; *quiet*
        splits have no record now. *behind*: since the last call, records waited all the time, or nothing was read: then
        no time counts, for what is there may not be known. The servers took *asked_s* from *now_s* on to confirm, which
        is no pause of the process, unless it is longer than they may take."""
        since_s, self._looked_s = self._quiet_since_s, now_s + min(asked_s, PAUSE_S)
        self._splits = [position.partition for position in positions]
        ended = {position.partition for position in positions if position.ended}
        for split in self.resting - ended - set(quiet):
            self._wake(split)
        self._quiet_since_s = {
            split: now_s if behind and split not in self.resting else since_s.get(split, now_s)
            for split in (*quiet, *ended)
        }
        self._silent_since_s = {split: self._silent_since_s.get(split, now_s) for split in quiet}
        self.resting |= ended | self._silent(now_s)

    def advanced(self, now_s: float) -> Watermark | None:
        """The watermark at *now_s*, if it is another one than the last."""
        splits, floors = self._splits, self._active_floors
        idle = not floors
        if not idle:
            watermark = min(floors)
        else:
            watermark = max(map(self._own_floor, splits), default=NO_WATERMARK)
            if watermark != NO_WATERMARK and self._idle_ms is not None:
                silent_ms = 1000 * (now_s - max(self._quiet_since_s.get(split, now_s) for split in splits))
                watermark += int(silent_ms) if silent_ms >= self._idle_ms else 0
        self.watermark = max(self.watermark, watermark)
        told = Watermark(self.watermark, idle)
        if told == self._told:
            return None
        self._told = told
        return told

    @property
    def reached(self) -> int:
        """The watermark as of the last record, without the clock."""
        return max(self.watermark, min(self._active_floors, default=NO_WATERMARK))

    @property
    def _active_floors(self) -> list[int]:
        """The floors of the splits that hold back others."""
        return [self._own_floor(split) for split in self._splits if split not in self.resting]

    @property
    def slowest(self) -> int | None:
        """The split that holds the watermark back; None: none does."""
        active = [split for split in self._splits if split not in self.resting]
        return min(active, key=self._own_floor, default=None)

    def silent_ms(self, split: int, now_s: float) -> int:
        """The time for which *split* has been at its end, without a record."""
        return int(1000 * (now_s - self._silent_since_s.get(split, now_s)))

    @property
    def furthest(self) -> int:
        """The floor of the split that has come furthest."""
        return max(map(self._own_floor, self._splits), default=NO_WATERMARK)

    # --- along an order log ---------------------------------------------------------------------------------------

    def follow(self, watermark: Watermark, *, may_end: bool) -> bool:
        """Take the *watermark* that an earlier run had here; False if that is not what its records give. It may be
        higher if splits were idle or had ended, as they can with *may_end*, and at the end of a drained source."""
        derived = max(self.watermark, min(map(self._own_floor, self._splits), default=NO_WATERMARK))
        if watermark.value < END_OF_TIME:
            self.watermark = max(self.watermark, watermark.value)
        may_be_higher = may_end or watermark.idle or self._idle_ms is not None or watermark.value == END_OF_TIME
        return watermark.value >= derived if may_be_higher else watermark.value == derived

    def follow_floor(self, split: int, floor: int) -> None:
        """The next record of *split* had *floor* at least in an earlier run: it was idle before it."""
        self.floors[split] = max(self.floor_of(split), floor)


def _late(times: Sequence[int], floor: int, behind_ms: int) -> list[int]:
    """The floor of each late one of *times*, `NO_FLOOR` of the others; *floor* is the floor of the first.

    >>> _late([10, 7, 12, 9, 11], NO_FLOOR, 2) == [NO_FLOOR, 8, NO_FLOOR, 10, NO_FLOOR]
    True
    """
    greatest = accumulate(times, max, initial=floor + behind_ms)
    floors = (time - behind_ms for time in greatest)
    return [floor if time <= floor else NO_FLOOR for time, floor in zip(times, floors, strict=False)]


def _ahead(time: int, stamp: int, ahead_ms: int) -> NoTime:
    return NoTime(
        f"its time {shown_time(time)} is {shown_duration(time - stamp)} after the timestamp of its message, and "
        f"ahead= allows {shown_duration(ahead_ms)}: it would make all records after it late"
    )


NAMED_MAX = 5
"""The skipped records of a partition that are known by their places: the first ones, and beside Sn the last ones."""


class Skipped(msgspec.Struct):
    """The skipped records of one partition: they do not decode, or were to be left out."""

    source: str
    topic: str
    partition: int
    count: int = 0
    first: list[tuple[int, str]] = []
    """The offsets of the first few, each with the record's place and its problem."""

    def add(self, other: Skipped) -> None:
        self.count += other.count
        self.first = [*self.first, *other.first][:NAMED_MAX]


class SourceDecoder:
    """Decodes for source *id*, counts skipped records, and notes them in *notes*."""

    def __init__(
        self,
        id: str,
        source: Readable,
        notes: Notes | None = None,
        before: Iterable[SourceOffset] = (),
        sleep: Callable[[float], None] = pause,
        skips: Iterable[RecordPlace] = (),
        dead_letters: DeadLetterOutput | None = None,
        rules: int = LATE_BELOW_LATEST,
    ) -> None:
        """*before*: the starts of its partitions, with the records skipped before them. *skips*: records of any topic
        that are left out undecoded. *dead_letters* takes bad records, where the source says so.
        *rules*: see `Manifest.rules`."""
        self.id = id
        self.skipped: dict[int, Skipped] = {}
        """The records skipped since the start, by partition."""
        self._notes = notes or Notes()
        self._before = {start.partition: (start.skipped, start.skipped_at) for start in before}
        self._last: dict[int, tuple[int, ...]] = {}
        """The offsets of the last few, by partition."""
        self._skips = {(place.partition, place.offset) for place in skips if place.topic == source.place}
        self._sleep = sleep
        self._on_error, self._dead_letters = source.on_error, dead_letters
        self.times: SourceTimes | None = None
        """None: its records have no event time."""
        if (event_time := source.event_time) is not None:
            self.times, self._on_time_error = SourceTimes(event_time, before, rules), event_time.on_error
        self._told_of_seconds = False
        self._decoder = source.decoder()

    @property
    def skipped_count(self) -> int:
        return sum(skipped.count for skipped in self.skipped.values())

    def noted(self, position: SourceOffset) -> SourceOffset:
        """*position*, the next offset to decode in its partition, with the records skipped before it and the floor."""
        if self.times is not None:
            position = self.times.noted(position)
        count, last = self._before.get(position.partition, (0, ()))
        if (skipped := self.skipped.get(position.partition)) is not None:
            count, last = count + skipped.count, (*last, *self._last[position.partition])[-NAMED_MAX:]
        return msgspec.structs.replace(position, skipped=count, skipped_at=last) if count else position

    def decode(self, messages: Sequence[Any], runs: Runs | None = None) -> Batch:
        """The batch of *messages*; *runs* tell their splits, if known.

        A bad one is an error, is skipped or becomes a dead letter, as the source says; so is one without a usable time.

        Dead letters have left when this returns. Raises `Unavailable` if the codec still meets an outage after
        `RETRY_PAUSES_S`.
        """
        read = len(messages)
        if self._skips:
            messages = self._without_skips(messages)
        parts, decode = self._decoder.parts(messages), self._decoder.decode
        values = iter(parts)
        records: list[Any] = []
        bad: list[int] = []
        letters: list[DeadLetter] = []
        retried, retries = -1, 0
        while True:
            try:
                records.extend(map(decode, values))  # keeps the records before an error
                require_whole(records, len(messages) - len(bad))
            except users_errors() as error:
                place = len(messages) - length_hint(values) - 1
                if is_outage(error):
                    retries = retries + 1 if place == retried else 0
                    if retries == len(RETRY_PAUSES_S):
                        raise self._unavailable(messages[place], error) from error
                    self._sleep(RETRY_PAUSES_S[retries])
                    retried, values = place, iter(parts[place:])
                else:
                    letter = None if isinstance(error, Ignored) else self._undecoded(messages[place], error)
                    if letter is not None:
                        letters.append(letter)
                    bad.append(place)
            else:
                break
        origins = self._without(messages, bad, letters)
        if self.times is None:
            return Batch(records, origins)
        return self._timed(self.times, Batch(records, origins), runs if len(origins) == read else None)

    def _without(self, messages: Sequence[Any], bad: Sequence[int], letters: list[DeadLetter]) -> Sequence[Any]:
        """*messages* without the *bad* ones, at these places; *letters* leave."""
        if not bad:
            return messages
        if letters and self._dead_letters is not None:
            self._dead_letters.push(letters, [messages[place] for place in bad])
        left_out = set(bad)
        return [message for place, message in enumerate(messages) if place not in left_out]

    def _timed(self, source_times: SourceTimes, batch: Batch, runs: Runs | None) -> Batch:
        """*batch* with times and floors, without the records that have no usable time. *runs* None: look at them."""
        if not batch.records:
            batch.times = []
            return batch
        try:
            times = source_times.times(batch.records, self._decoder.times_ms(batch.origins))
        except users_errors():
            batch, times = self._usable(source_times, batch)
            runs = None
        if runs is None:
            splits = groupby(origin.partition() or 0 for origin in batch.origins)
            runs = [(split, sum(1 for _ in group)) for split, group in splits]
        batch.times, batch.floors = times, source_times.late(times, runs)
        if times and times[0] in LIKE_SECONDS and not self._told_of_seconds:
            self._told_of_seconds = True
            self._notes.add(
                f"source {self.id!r}: time= gave {times[0]} ms since 1970 for {_place(batch.origins[0])}, which is "
                f"{shown_time(times[0])}: if these are seconds, let time= give 1000 * seconds"
            )
        return batch

    def _usable(self, source_times: SourceTimes, batch: Batch) -> tuple[Batch, list[int]]:
        """The records of *batch* that have a usable time, and their times."""
        records: list[Any] = []
        times: list[int] = []
        bad: list[int] = []
        letters: list[DeadLetter] = []
        for place, (record, origin) in enumerate(zip(batch.records, batch.origins, strict=True)):
            try:
                times += source_times.times([record], self._decoder.times_ms([origin]))
                records.append(record)
            except users_errors() as error:
                if is_outage(error):
                    raise record_error("time=", self.id, origin, error) from error
                if (letter := self._untimed(origin, error)) is not None:
                    letters.append(letter)
                bad.append(place)
        return Batch(records, self._without(batch.origins, bad, letters)), times

    def _without_skips(self, messages: Sequence[Any]) -> list[Any]:
        """*messages* without those to leave out, each of which is counted and named."""
        kept = []
        for message in messages:
            place = message.partition(), message.offset()
            if place in self._skips:
                self._skips.remove(place)
                self._count(message, partial(str, f"the record at {_place(message)}, as asked for by --skip"))
            else:
                kept.append(message)
        return kept

    def time_ms(self, message: Any) -> int:
        """The timestamp of *message*."""
        return next(iter(self._decoder.times_ms([message])))

    def _undecoded(self, message: Any, error: BaseException) -> DeadLetter | None:
        problem = partial(self._decoder.problem, message, error)
        return self._left_out(message, error, problem, "on_error={}", self._on_error, "the codec", "the type")

    def _untimed(self, message: Any, error: BaseException) -> DeadLetter | None:
        raised = f"time= raised {type(error).__name__}: {text_of(error)}"
        problem = partial(str, text_of(error) if isinstance(error, NoTime) else raised)
        on_error, place = self._on_time_error, place_of(error)
        option = "time=EventTime(..., on_error={})"
        return self._left_out(message, error, problem, option, on_error, "time=", "time=", place)

    def _left_out(
        self,
        message: Any,
        error: BaseException,
        problem: Callable[[], str],
        option: str,
        on_error: OnError,
        raiser: str,
        remedy: str,
        place: str = "",
    ) -> DeadLetter | None:
        """The letter of *message*; without dead letters it is counted as skipped; or raise. *on_error* is the value of
        *option*, *raiser* the code that has raised *error*, *remedy* what may have to be another, and *place* a line of
        code for a person: a letter has it in its traceback."""

        def why() -> str:
            return sendable(f"the record at {_place(message)}: {problem()}{place}.")

        if not is_bad_record(error):
            raise RecordError(
                f"Source {self.id!r}: {why()} The job has stopped before it; nothing is lost. "
                f"{type(error).__name__}{'' if place else place_of(error)} says neither that the record is bad nor "
                f"that something is away, so on_error= does not leave it out. Fix {raiser}: let it raise ValueError "
                f"for a bad record, and exactlyonce.errors.Unavailable for an outage{or_skip(message)}."
            ) from error
        if on_error == "fail":
            keeping, skipping = option.format('DeadLetters("topic")'), option.format('"skip"')
            raise RecordError(
                f"Source {self.id!r}: {why()} The job has stopped before it; nothing is lost. Fix {remedy} or the "
                f"producer, or let the source keep such records elsewhere: {keeping}, or "
                f"skip them: {skipping}{or_skip(message)}.",
                **facts_of(self.id, message),
            ) from error
        if on_error != "skip" and self._dead_letters is not None:
            return self._dead_letters.undecoded(message, error, sendable(problem()))
        self._count(message, why)
        return None

    def _count(self, message: Any, why: Callable[[], str]) -> None:
        """Count *message* as skipped; *why* says which it is, and its problem."""
        partition, offset = message.partition(), message.offset()
        skipped = self.skipped.setdefault(partition, Skipped(self.id, message.topic(), partition))
        skipped.count += 1
        self._last[partition] = (*self._last.get(partition, ()), offset)[-NAMED_MAX:]
        if len(skipped.first) < NAMED_MAX:
            skipped.first.append((offset, why()))
        self._notes.repeat(f"skipped: source {self.id!r}", why)

    def _unavailable(self, message: Any, error: BaseException) -> Unavailable:
        return Unavailable(
            sendable(
                f"Source {self.id!r}: the codec met an outage at {_place(message)}: {type(error).__name__}: "
                f"{text_of(error)}{place_of(error)}. Nothing is skipped or lost: the record is decoded again."
            )
        )


def _place(record: RawRecord) -> str:
    return f"{record.topic()}[{record.partition()}] offset {record.offset()}"

"""The decoder of a source: messages in, records out.

Invariants: a batch is decoded in one pass, in time linear in the messages, and no good record is decoded twice. Only
what `engines.runtime.outage` calls a bad record is skipped. Every skipped record is counted by partition, and noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from operator import length_hint
from typing import Any

import msgspec

from exactlyonce.checkpoint.records.manifest import LATE_BELOW_LATEST, RecordPlace, SourceOffset
from exactlyonce.connectors.source import RawRecord, Readable
from exactlyonce.engines.runtime.batch import Batch
from exactlyonce.engines.runtime.dead_letters import DeadLetterOutput
from exactlyonce.engines.runtime.notes import Notes
from exactlyonce.engines.runtime.operators import facts_of, or_skip, record_error
from exactlyonce.engines.runtime.outage import RETRY_PAUSES_S, is_bad_record, is_outage, pause
from exactlyonce.engines.runtime.source_times import Runs, SourceTimes
from exactlyonce.engines.runtime.users_code import place_of
from exactlyonce.pipeline.dead_letters import DeadLetter, OnError
from exactlyonce.pipeline.errors import USERS_ERRORS, RecordError, Unavailable, require_whole, sendable, text_of
from exactlyonce.pipeline.moments import LIKE_SECONDS, NoTime, shown_time

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
        self._looked_at_times = False
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
            except USERS_ERRORS as error:
                place = len(messages) - length_hint(values) - 1
                if is_outage(error):
                    retries = retries + 1 if place == retried else 0
                    if retries == len(RETRY_PAUSES_S):
                        raise self._unavailable(messages[place], error) from error
                    self._sleep(RETRY_PAUSES_S[retries])
                    retried, values = place, iter(parts[place:])
                else:
                    if (letter := self._undecoded(messages[place], error)) is not None:
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
            return batch
        try:
            times = source_times.times(batch.records, self._decoder.times_ms(batch.origins))
        except USERS_ERRORS:
            batch, times = self._usable(source_times, batch)
            runs = None
        if runs is None:
            splits = groupby(origin.partition() or 0 for origin in batch.origins)
            runs = [(split, sum(1 for _ in group)) for split, group in splits]
        batch.times, batch.floors = times, source_times.late(times, runs)
        if times and not self._looked_at_times:
            self._looked_at_times = True
            if times[0] in LIKE_SECONDS:
                self._notes.add(
                    f"source {self.id!r}: the time of its first record is {shown_time(times[0])}: if time= gives "
                    f"seconds, let it give ms, as 1000 * seconds"
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
            except USERS_ERRORS as error:
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

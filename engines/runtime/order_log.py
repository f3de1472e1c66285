"""Order logs: the order in which a subtask took the batches and watermarks of its inputs, and the time, for a replay.

    part = msgpack array: inputs, then flat: input, count, input, count ..., then zero

Each part is a block of at most `PART_SIZE_MAX` bytes. A source's counts are of messages, with skipped ones; a
channel's are of records. If the batches matter (see `engines.plan.rejoins`), each ends with a count of 0. What is not a
record has an input of its own (`LoggedInput.kind`), whose count is a time in ms after *zero*. Each interval begins with
the watermarks that the inputs have, and with the clock: a replay knows no earlier ones.

What a watermark or the clock makes due is out before the next entry, and not in the log. If others had a turn during
the firing, or the batches matter, its operator has entries: FIRED counts what was given before others had a turn, OVER
what was given then until its end.

An interval that begins within a firing says so first: FIRING counts the entries that come next, the watermarks of the
operators with something due, in their order, see `TimedOperator.due`. An empty FIRING ends the times of the beginning.

    part of answers = msgpack array: the operator's input alone, nothing, zero, bodies
    body            = msgpack array: the answers, then an object with the text of each failure by its place among them

The answers of services come after all runs, by operator. Bodies are in the order of the operator's records, and have an
answer or a failure for each. A replay takes all of them, and calls no service. What comes after the operator is the
answer as read back, in the run as in a replay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import inf
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from exactlyonce.engines.plan import ShuffleEdge, Task, rejoins
from exactlyonce.engines.runtime.watermarks import Watermark
from exactlyonce.pipeline.errors import Halt
from exactlyonce.pipeline.event_time import NO_WATERMARK
from exactlyonce.pipeline.graph import Kind
from exactlyonce.pipeline.records import wire_of

PART_SIZE_MAX = 512 * 1024
NOT_A_SOURCE = -1
"""The partition of a channel, of a watermark, and of the clock."""
RECORDS, WATERMARK, IDLE, FLOOR, CLOCK, ANSWERS = "", "watermark", "idle", "floor", "clock", "answers"
FIRED, OVER, FIRING = "fired", "over", "firing"
_COUNTED = (RECORDS, FIRED, OVER, FIRING)
"""The kinds whose number is no time."""


class LoggedInput(NamedTuple):
    """What an entry is about: records, or the time of something else."""

    name: str
    partition: int = NOT_A_SOURCE
    kind: str = RECORDS
    """WATERMARK: the input advances to this time; IDLE: likewise, and it is idle. FLOOR: that of the partition, which
    was idle, begins there. CLOCK: operators that go by it are told this time. ANSWERS: the bodies of a part are of
    the operator of this name. FIRED, OVER: the operator of this name has given so much, see `Due.taken`; then others
    had a turn, or its firing was over. FIRING: see above."""


INEXACT = LoggedInput("", -2)
_FIRING = LoggedInput("", kind=FIRING)

_encode = msgspec.msgpack.Encoder().encode


class _Part(msgspec.Struct, array_like=True):
    inputs: list[LoggedInput]
    flat: list[int]
    zero: int = 0
    bodies: list[bytes] = []


_decoder = msgspec.msgpack.Decoder(_Part)


@dataclass
class OrderRuns:
    """The order of a subtask's batches and times as run lengths, cut at every barrier."""

    batches: bool = False
    """Whether to note the end of each batch."""
    inputs: dict[LoggedInput, int] = field(default_factory=dict)
    runs: list[int] = field(default_factory=list)
    """Flat: input, count, input, count ..."""
    _watermarks: dict[str, Watermark] = field(default_factory=dict, init=False)
    """The last one of each input."""
    _clock_ms: int | None = field(default=None, init=False)
    _zero: int | None = field(default=None, init=False)
    """None: no time was noted since the last cut."""
    _known: int = field(default=0, init=False)
    """The length of `runs` when it had the times of the last cut alone."""
    _firing: str | None = field(default=None, init=False)
    """The operator whose firing is in the log, and not over."""
    _given: int = field(default=0, init=False)
    """What the firing under way has given since its last entry."""

    @property
    def empty(self) -> bool:
        """Whether nothing was noted since the last cut."""
        return len(self.runs) == self._known

    def note(self, name: str, partition: int, count: int) -> None:
        """*count* records were taken from *partition* of input *name*."""
        place = self._place(LoggedInput(name, partition))
        if self.runs and self.runs[-2] == place and self.runs[-1]:
            self.runs[-1] += count
        elif count:
            self.runs += (place, count)

    def end_batch(self) -> None:
        """Everything noted since the last call was one batch, of one record at least."""
        if self.batches and self.runs and self.runs[-1]:
            self.runs += (self.runs[-2], 0)

    def watermark(self, name: str, watermark: Watermark) -> None:
        """Input *name* has advanced to *watermark*."""
        self._watermarks[name] = watermark
        self._time(LoggedInput(name, kind=IDLE if watermark.idle else WATERMARK), watermark.value)

    def floor(self, name: str, partition: int, floor: int) -> None:
        """The next record of *partition* of source *name*, which was idle, has *floor* at least."""
        self._time(LoggedInput(name, partition, FLOOR), floor)

    def clock(self, now_ms: int) -> None:
        """The operators were told the time by the clock."""
        self._clock_ms = now_ms
        self._time(LoggedInput("", kind=CLOCK), now_ms)

    def gave(self, operator: str, count: int) -> None:
        """The firing of *operator* has given *count* in one batch."""
        self._given += count
        if self.batches and count:
            self._fired(operator)

    def interrupted(self, operator: str) -> None:
        """Others get a turn during the firing of *operator*."""
        if self._given or self._firing is None:
            self._fired(operator)

    def _fired(self, operator: str) -> None:
        self.runs += (self._place(LoggedInput(operator, kind=FIRED)), self._given)
        self._firing, self._given = operator, 0

    def begins_within(self, due: Mapping[str, Sequence[Watermark]]) -> None:
        """The interval begins with results of these operators due, see above; `begun` ends its times."""
        self.runs += (self._place(_FIRING), sum(map(len, due.values())))
        for operator, watermarks in due.items():
            for watermark in watermarks:
                self._time(LoggedInput(operator, kind=IDLE if watermark.idle else WATERMARK), watermark.value)
        self._firing = next(iter(due))

    def begun(self) -> None:
        """The times of an interval that begins within a firing are known."""
        self.runs += (self._place(_FIRING), 0)

    def over(self, operator: str) -> None:
        """The firing of *operator* is over."""
        if self._firing == operator:
            self.runs += (self._place(LoggedInput(operator, kind=OVER)), self._given)
            self._firing = None
        self._given = 0

    def _time(self, input: LoggedInput, time: int) -> None:
        if time != NO_WATERMARK:
            self._zero = time if self._zero is None else self._zero
            time -= self._zero
        self.runs += (self._place(input), time)

    def _place(self, input: LoggedInput) -> int:
        return self.inputs.setdefault(input, len(self.inputs))

    def cut(
        self,
        *,
        exact: bool = True,
        answers: Sequence[tuple[str, bytes]] = (),
        due: Mapping[str, Sequence[Watermark]] = MappingProxyType({}),
    ) -> tuple[bytes, ...]:
        """The encoded runs since the last cut, with the *answers* of operators: one part at least. *exact*: they are
        those between two barriers. *due*: see `begins_within`."""
        runs, zero, self.runs, self._zero = self.runs, self._zero or 0, [], None
        if due:
            self.begins_within(due)
        for name, watermark in self._watermarks.items():
            self.watermark(name, watermark)
        if self._clock_ms is not None:
            self.clock(self._clock_ms)
        if due:
            self.begun()
        self._known = len(self.runs)
        if not exact:
            return tuple(_parts([INEXACT], [0, 1], 0))
        return (*_parts(list(self.inputs), runs, zero), *_answer_parts(answers))


def _parts(inputs: list[LoggedInput], runs: list[int], zero: int) -> Iterator[bytes]:
    part = _encode((inputs, runs, zero))
    if len(part) <= PART_SIZE_MAX or len(runs) <= 2:
        yield part
        return
    middle = len(runs) // 4 * 2
    yield from _parts(inputs, runs[:middle], zero)
    yield from _parts(inputs, runs[middle:], zero)


def _answer_parts(answers: Iterable[tuple[str, bytes]]) -> Iterator[bytes]:
    for operator, pairs in groupby(sorted(answers, key=itemgetter(0)), itemgetter(0)):
        bodies, size = list[bytes](), 0
        for _, body in pairs:
            if bodies and size + len(body) > PART_SIZE_MAX:
                yield _encode(([LoggedInput(operator, kind=ANSWERS)], [], 0, bodies))
                bodies, size = [], 0
            bodies.append(body)
            size += len(body)
        yield _encode(([LoggedInput(operator, kind=ANSWERS)], [], 0, bodies))


def order_runs(task: Task, shuffles: Iterable[ShuffleEdge], *, several: bool) -> OrderRuns | None:
    """The `OrderRuns` of a subtask; None if only one order is possible and no
    service is called. *several*: it may have several inputs."""
    batches = rejoins(task, shuffles)
    asks = any(node.kind is Kind.ENRICH for node in task.nodes)
    return OrderRuns(batches) if batches or several or asks else None


def runs_of(logs: Iterable[bytes]) -> Iterator[tuple[LoggedInput, int]]:
    """The input and the count, or the time in ms, of each entry of consecutive *logs*. No records end a batch."""
    for log in logs:
        part = _decoder.decode(log)
        for place, count in zip(part.flat[::2], part.flat[1::2], strict=True):
            input = part.inputs[place]
            timed = input.kind not in _COUNTED and count != NO_WATERMARK
            yield input, count + part.zero if timed else count


def answers_in(logs: Iterable[bytes]) -> Iterator[tuple[str, bytes]]:
    """The operator and the body of all answers in consecutive *logs*."""
    for log in logs:
        part = _decoder.decode(log)
        for body in part.bodies:
            yield part.inputs[0].name, body


A = TypeVar("A")
BODY_SIZE_MAX = PART_SIZE_MAX - 1024
"""In bytes; a part has room for one body."""


class FetchFailed(Exception):
    """The function failed on one record for good, by an error of class *name* and with its text."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name

    @classmethod
    def read(cls, line: str) -> FetchFailed:
        """The failure of a `line`."""
        name, _, text = line.partition(": ")
        return cls(name, text)

    @property
    def line(self) -> str:
        return f"{self.name}: {self}"


class _Body(msgspec.Struct, Generic[A], array_like=True):
    answers: list[A]
    failed: dict[int, str] = {}


def _body_decoder(type_: Any) -> msgspec.msgpack.Decoder[_Body[Any]]:
    return msgspec.msgpack.Decoder(_Body[type_])


class AnswerCodec:
    """Encodes and decodes answers of one type, among them `FetchFailed`."""

    def __init__(self, type_: Any) -> None:
        self._wire = wire_of(type_)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = _body_decoder(self._wire.type)

    def encode(self, answers: Sequence[Any]) -> Iterator[bytes]:
        """Bodies of at most `BODY_SIZE_MAX` bytes. Raises ValueError for an answer that is larger, and TypeError,
        ValueError or OverflowError for one that cannot be encoded."""
        failed = {place: answer.line for place, answer in enumerate(answers) if isinstance(answer, FetchFailed)}
        given = [answer for answer in answers if not isinstance(answer, FetchFailed)]
        body = self._encoder.encode(_Body(given if self._wire.wrap is None else self._wire.wrap(given), failed))
        if len(body) <= BODY_SIZE_MAX:
            yield body
        elif len(answers) == 1:
            raise ValueError(f"it takes {len(body)} bytes, and the order log has room for {BODY_SIZE_MAX}")
        else:
            middle = len(answers) // 2
            yield from self.encode(answers[:middle])
            yield from self.encode(answers[middle:])

    def decode(self, body: bytes) -> list[Any]:
        """The answers and failures of a body. Raises `msgspec.ValidationError`."""
        read = self._decoder.decode(body)
        answers = read.answers if self._wire.unwrap is None else self._wire.unwrap(read.answers)
        if not read.failed:
            return answers
        given = iter(answers)
        places = range(len(answers) + len(read.failed))
        return [FetchFailed.read(read.failed[place]) if place in read.failed else next(given) for place in places]


@dataclass
class Answers:
    """The answers of one subtask since the last cut."""

    noted: list[tuple[str, bytes]] = field(default_factory=list)
    """(operator, body), in order."""
    replayed: dict[str, deque[bytes]] | None = None
    """The bodies of an earlier run by operator, not taken yet; None: services are called."""
    asks_alone: bool = False
    """Whether each record has a call of its own: restarts have not helped, and no checkpoint has completed since."""
    repeats_for_s: float = inf
    """Since the loop last came round: after that no call is repeated or divided, for a barrier may wait."""
    _read: dict[str, deque[Any]] = field(default_factory=dict, init=False)
    """By operator, what is read of them and not taken yet."""

    def replay(self, logs: Iterable[bytes]) -> None:
        """Take the answers of *logs* instead of calling services."""
        self.replayed = {}
        for operator, body in answers_in(logs):
            self.replayed.setdefault(operator, deque()).append(body)

    def take(self, operator: str, codec: AnswerCodec, count: int) -> list[Any]:
        """The next *count* replayed answers. Raises Halt if the log has fewer."""
        assert self.replayed is not None
        bodies, read = self.replayed.get(operator), self._read.setdefault(operator, deque())
        while len(read) < count:
            if not bodies:
                raise _misfit(operator, f"it has {len(read)} answers where {count} records come")
            try:
                read += codec.decode(bodies.popleft())
            except msgspec.ValidationError as error:
                raise _misfit(operator, f"an answer is of another type: {error}") from error
        return [read.popleft() for _ in range(count)]

    def require_taken(self) -> None:
        """Raise Halt if replayed answers are left over."""
        for operator, bodies in (self.replayed or {}).items():
            if bodies or self._read.get(operator):
                raise _misfit(operator, "it has answers for more records than come")

    def cut(self) -> list[tuple[str, bytes]]:
        noted, self.noted = self.noted, []
        return noted


def _misfit(operator: str, why: str) -> Halt:
    return Halt(
        f"The order log does not fit the records of operator {operator!r}: {why}. The input is not what the first run "
        f"read, or the pipeline does not do what it did (it depends on time, chance or its surroundings): it cannot be "
        f"recomputed."
    )

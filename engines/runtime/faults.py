"""Faults of records and of the user's code: whose they are, where, and who hears of them.

An error of the user's code is an outage, a bad record, or a defect of the code. An outage is an OSError (TimeoutError
and ConnectionError among them), an `Unavailable`, or an error raised from one (`raise ... from error`, as HTTP clients
do). The work is repeated: codecs after a pause, everything by a restart. A bad record is an error that decoders raise
on bytes. On any other error the job stops before the record.

Invariants: an error that may come from an outage never counts as a bad record, and makes no dead letter. A letter
depends only on the record, its place and the exception, so that a replay gives the same bytes; it leaves within the
call that takes the record, so that no barrier comes between. Of a fault that repeats, one record is named at once; the
others are one line with their number, from time to time.
"""

from __future__ import annotations

import os
import re
import struct
import time
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from gzip import BadGzipFile
from typing import Any, TypeVar

import msgspec
from fastavro.read import SchemaResolutionError

import exactlyonce
from exactlyonce.engines.runtime.batch import Batch, Origin, Push, facts_of, or_skip, result_of, shown_origin
from exactlyonce.engines.runtime.order_log import FetchFailed
from exactlyonce.pipeline.dead_letters import INPUT, RECORD, DeadLetter, Reason
from exactlyonce.pipeline.durations import shown_duration
from exactlyonce.pipeline.errors import (
    RecordError,
    Unavailable,
    sendable,
    text_of,
    users_errors,
)
from exactlyonce.pipeline.records import Record

T = TypeVar("T")

RETRY_PAUSES_S = (0.1, 0.5)
"""The pauses of a codec during an outage. After the last attempt the job restarts."""
pause: Callable[[float], None] = time.sleep
"""Waits for seconds; a parameter wherever it is used."""

_OF_THE_RECORD = (
    ValueError,  # msgspec's errors and UnicodeError are ValueErrors
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    EOFError,
    StopIteration,
    RecursionError,
    BadGzipFile,
    SchemaResolutionError,
    struct.error,
    zlib.error,
)
"""Errors of decoders on bytes, or on parsed values of another shape."""


def is_outage(error: BaseException) -> bool:
    """Whether *error* comes from an outage of a service that the user's code asks.

    >>> is_outage(ConnectionRefusedError()), is_outage(ValueError("no number"))
    (True, False)
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError | Unavailable) and not isinstance(cause, BadGzipFile):
            return True
        cause = cause.__cause__
    return False


def is_bad_record(error: BaseException) -> bool:
    """Whether *error* is one that a decoder raises on bytes that it cannot read.

    >>> is_bad_record(KeyError("id")), is_bad_record(RuntimeError()), is_bad_record(TimeoutError())
    (True, False, False)
    """
    return isinstance(error, _OF_THE_RECORD) and not is_outage(error)


def retried(call: Callable[[], T], sleep: Callable[[float], None] = pause) -> T:
    """The result of *call*, repeated after each of `RETRY_PAUSES_S` during an outage."""
    for pause_s in RETRY_PAUSES_S:
        try:
            return call()
        except users_errors() as error:
            if not is_outage(error):
                raise
        sleep(pause_s)
    return call()


_OURS = os.path.dirname(exactlyonce.__file__) + os.sep
"""The folder of stack frames that are not the user's."""


def _users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OURS)]


def place_of(error: BaseException) -> str:
    """The place in the user's code where *error* was raised, as `_shown` says; empty if it was elsewhere."""
    frames = _users_frames(error)
    return f" ({_shown(frames[-1])})" if frames else ""


def declared_at(function: Callable[..., Any]) -> str:
    """The place of the first line of *function*, as `place_of`; empty for one without code of its own."""
    code = getattr(function, "__code__", None)
    return "" if code is None else f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno} in {code.co_name})"


def _shown(frame: traceback.FrameSummary) -> str:
    """The file, without its folder, the line and the function of *frame*: the same on any machine."""
    return f"{os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}"


def users_traceback(error: BaseException) -> str:
    """The traceback of the user's exception that *error* stems from, without frames of this package; empty if none.

    The exception is a cause of *error* that was raised in other code.
    """
    cause = error.__cause__
    while cause is not None:
        trace = traceback.TracebackException.from_exception(cause)
        theirs = [place for place, frame in enumerate(trace.stack) if not frame.filename.startswith(_OURS)]
        if theirs:
            trace.stack = traceback.StackSummary.from_list(trace.stack[theirs[0] :])
            return sendable("".join(trace.format()))
        cause = cause.__cause__
    return ""


def portable_traceback(error: BaseException) -> str:
    """The user's frames of *error*, innermost last, each as `_shown` and with the text of its line."""
    return "\n".join(f"{_shown(frame)}: {frame.line}" for frame in _users_frames(error))


REPEATED_INTERVAL_S = 30.0
"""The least time between two lines about the same fault."""

Repeated = dict[str, tuple[int, str]]
"""By fault, the number of records, and the last one."""


@dataclass
class Notes:
    """The notes of a subtask since they were taken.

    >>> notes = Notes()
    >>> notes.add("paused")
    >>> notes.repeat("skipped: source 'a'", lambda: "in[0] offset 7 is no JSON")
    >>> notes.repeat("skipped: source 'a'", lambda: "in[0] offset 9 is no JSON", records=2)
    >>> notes.take_lines()
    ['paused', "skipped: source 'a': 3 records, the last: in[0] offset 9 is no JSON"]
    """

    _plain: list[str] = field(default_factory=list)
    _repeated: dict[str, tuple[int, Callable[[], str]]] = field(default_factory=dict)

    def add(self, line: str) -> None:
        self._plain.append(line)

    def repeat(self, fault: str, record: Callable[[], str], records: int = 1) -> None:
        """Note so many more *records* with a *fault*, as "dead letter: operator 'a'". *record* says which the last of
        them is, and why; it is called only if no other one comes after it."""
        count, _ = self._repeated.get(fault, (0, record))
        self._repeated[fault] = count + records, record

    def take(self) -> tuple[list[str], Repeated]:
        """The lines, and the faults that repeat."""
        plain, self._plain = self._plain, []
        repeated, self._repeated = self._repeated, {}
        return plain, {fault: (count, record()) for fault, (count, record) in repeated.items()}

    def take_lines(self) -> list[str]:
        """All of it as lines."""
        plain, repeated = self.take()
        return [*plain, *(_line(fault, count, record) for fault, (count, record) in repeated.items())]


class RepeatedNotes:
    """Adds up the faults that subtasks repeat, of all workers and attempts of a run.

    >>> told = []
    >>> notes = RepeatedNotes(told.append)
    >>> for now_s in (0, 1, 5, 40):
    ...     notes.add({"skipped: source 'a'": (1, f"in[0] offset {now_s}")}, now_s)
    >>> told
    ["skipped: source 'a': in[0] offset 0", "skipped: source 'a': 3 records in 40.0 s, the last: in[0] offset 40"]
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._since_s: dict[str, float] = {}
        """By fault, the time of its last line."""
        self._untold: Repeated = {}

    def add(self, repeated: Repeated, now_s: float) -> None:
        """Add what one subtask has taken at *now_s*, in seconds of a monotonic clock; say what is due."""
        for fault, (count, record) in repeated.items():
            if fault not in self._since_s:
                self._since_s[fault] = now_s
                self._note(_line(fault, count, record))
                continue
            before, _ = self._untold.get(fault, (0, ""))
            self._untold[fault] = before + count, record
        self.look(now_s)

    def look(self, now_s: float) -> None:
        """Say what is due at *now_s*."""
        self._tell(now_s, REPEATED_INTERVAL_S)

    def flush(self, now_s: float) -> None:
        """Say all that is not said yet."""
        self._tell(now_s, 0.0)

    def _tell(self, now_s: float, pause_s: float) -> None:
        for fault, (count, record) in [*self._untold.items()]:
            elapsed_s = now_s - self._since_s[fault]
            if elapsed_s >= pause_s:
                del self._untold[fault]
                self._since_s[fault] = now_s
                self._note(_line(fault, count, record, f" in {shown_duration(round(1000 * elapsed_s))}"))


def _line(fault: str, count: int, record: str, when: str = "") -> str:
    """A line about *count* records with a *fault*; *record* is the last of them."""
    return f"{fault}: {record}" if count == 1 else f"{fault}: {count:,} records{when}, the last: {record}"


TEXT_LENGTH_MAX = 4_000
"""Longer messages and tracebacks are cut, so that a letter has room in its topic."""
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
"""The address of an object in its default text, another one in each process."""


@dataclass
class DeadLetterOutput:
    """Takes the failed records of node *operator* of *pipeline*, and pushes letters."""

    pipeline: str
    operator: str
    kind: str
    """The kind of `Reason`."""
    notes: Notes
    inputs: Mapping[str, Callable[[Any], DeadLetter]] = field(default_factory=dict)
    """By topic, what makes a letter of an input record; empty: a record has only the place of its input record."""
    listeners: list[Push] = field(default_factory=list)
    count: int = 0

    def add(self, batch: Batch, failed: Sequence[tuple[int, BaseException]]) -> Batch:
        """*batch* without the records at the places of *failed*, which become letters: each with its exception."""
        places = {place for place, _ in failed}
        times = batch.times
        letters = [
            self.letter(batch.records[place], batch.origins[place], error, None if times is None else times[place])
            for place, error in failed
        ]
        self.push(letters, [batch.origins[place] for place, _ in failed])
        return batch.where([place not in places for place in range(len(batch.records))])

    def push(self, letters: list[DeadLetter], origins: Sequence[Origin]) -> None:
        for push in self.listeners:
            push(Batch(letters, origins))

    def letter(self, record: Any, origin: Origin, error: BaseException, event_time: int | None = None) -> DeadLetter:
        """The letter of a *record*, of *event_time*, on which a function raised *error*."""
        as_read = self.inputs.get(origin.topic() or "")
        letter: DeadLetter = Record(value_of(record)) if as_read is None else as_read(origin)
        return self._addressed(letter, RECORD if as_read is None else INPUT, origin, error, text_of(error), event_time)

    def undecoded(self, message: Any, error: BaseException, problem: str) -> DeadLetter:
        """The letter of a *message* that does not decode, because of *problem*."""
        return self._addressed(self.inputs[message.topic()](message), INPUT, message, error, problem)

    def _addressed(
        self,
        record: DeadLetter,
        holds: str,
        origin: Origin,
        error: BaseException,
        problem: str,
        event_time: int | None = None,
    ) -> DeadLetter:
        place: dict[str, Any] = {"topic": origin.topic(), "partition": origin.partition(), "offset": origin.offset()}
        if (result := result_of(origin)) is not None:
            place = dict(zip(("upstream", "time"), result, strict=True))
        reason = Reason(
            pipeline=self.pipeline,
            operator=self.operator,
            kind=self.kind,
            holds=holds,
            **place,
            error=error.name if isinstance(error, FetchFailed) else type(error).__name__,
            message=_portable(problem),
            traceback=_portable(portable_traceback(error)),
            event_time=event_time,
        )
        self.count += 1
        self.notes.repeat(
            f"dead letter: {self.kind} {self.operator!r}",
            lambda: f"{shown_origin(origin)}: {reason.error}: {reason.message}",
        )
        return msgspec.structs.replace(record, headers=(*record.headers, *reason.headers()))


def _portable(text: str) -> str:
    """*text*, the same in any process, and not too long; it may be of any class."""
    text = _ADDRESS.sub("0x...", text.encode(errors="replace").decode())
    return text if len(text) <= TEXT_LENGTH_MAX else f"{text[:TEXT_LENGTH_MAX]}..."


def value_of(record: Any) -> bytes:
    """*record* as the value of a letter: bytes as they are, else JSON, with the text of what JSON has no form for.

    >>> value_of({"id": 7, "at": {2, 1}}), value_of(object)
    (b'{"at":[1,2],"id":7}', b'"<class \\'object\\'>"')
    """
    if isinstance(record, bytes):
        return record
    try:
        return msgspec.json.encode(record, enc_hook=_text, order="deterministic")
    except (ValueError, TypeError, RecursionError):  # a number beyond 64 bits, text that is no Unicode, a cycle
        return msgspec.json.encode(_portable(_text(record)))


def _text(value: Any) -> str:
    return _portable(repr(value))


def record_error(
    subject: str, operator: str, origin: Origin | None, error: BaseException, *, on: str = "", at: str = ""
) -> RecordError | Unavailable:
    """The *error* that a user's function, named *subject*, raised on the record at *origin*; *on*: on what else.

    *at*: the place in the user's code, if the traceback does not tell.
    """
    text = text_of(error).removesuffix(".")
    raised = f"{subject} raised {type(error).__name__}: {text}{place_of(error) or at}, on {on or shown_origin(origin)}."
    if is_outage(error):
        return Unavailable(
            f"{raised} That is an outage: nothing is skipped or lost, and the record comes again.",
            **facts_of(operator, origin),
        )
    return RecordError(
        f"{raised} The job has stopped before it; nothing is lost. Fix the function or the record, then run again"
        f"{or_skip(origin)}.",
        **facts_of(operator, origin),
    )


def misfit(sink: str, origin: Origin | None, error: BaseException) -> RecordError | Unavailable:
    """The *error* of a sink whose target cannot take the record at *origin*."""
    if is_outage(error):
        return record_error(f"The codec of sink {sink!r}", sink, origin, error)
    kind = "" if isinstance(error, ValueError | TypeError) else f"{type(error).__name__}: "
    text = text_of(error).removesuffix(".")
    return RecordError(
        f"Sink {sink!r} cannot write {shown_origin(origin)}: {kind}{text}{place_of(error)}. The job has stopped "
        f"before it; nothing is lost. Change the target (a column's type, say), or filter or convert such records "
        f"before the sink, then run again{or_skip(origin)}.",
        **facts_of(sink, origin),
    )

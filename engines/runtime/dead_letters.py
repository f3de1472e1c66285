"""The dead letters of one source, operator or sink: the records that it cannot process, on their way to their sink.

Invariants: a letter depends only on the record, its place and the exception, so that a replay gives the same bytes; an
outage makes no letter; letters leave within the call that takes the record, so that no barrier comes between.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from exactlyonce.engines.runtime.answers import FetchFailed
from exactlyonce.engines.runtime.batch import Batch, Origin, Push, result_of, shown_origin
from exactlyonce.engines.runtime.notes import Notes
from exactlyonce.engines.runtime.users_code import portable_traceback
from exactlyonce.pipeline.dead_letters import INPUT, RECORD, DeadLetter, Reason
from exactlyonce.pipeline.errors import text_of
from exactlyonce.pipeline.records import Record

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
    """That of `Reason`."""
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

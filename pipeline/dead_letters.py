"""Dead letters: records that could not be processed, each kept with its reason, beside the pipeline's other outputs.

A dead letter is a `Record`, with the reason in headers whose names begin with `PREFIX`. It holds the input record as it
was, value, key and headers, where that is still at hand and in no state: before the first operator with state and the
first loop. Behind these its value is the record that the operator or sink was given, in JSON, unless it is bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from exactlyonce.pipeline.records import Record
from exactlyonce.pipeline.sink import Sink
from exactlyonce.pipeline.sizes import is_count

DEAD_LETTERS = "dead letters"
"""The output that a node's dead letters leave by. No output of a user's has a space in its name."""
PREFIX = "dead-letter."
DeadLetter = Record[bytes | None]
"""The type of dead letters."""
INPUT, RECORD = "input", "record"
SHARE_LETTERS_MIN = 1
"""So many letters of a checkpoint are no share too large: one bad record among few is no flood."""


_FIRST, _NOT_COMPARED = "pipeline", ("traceback", "event_time")
"""The first header of a reason; and those that an earlier version or another edit of the code writes otherwise."""


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """The headers of a dead letter, without `PREFIX`: the place of the input record or result, and the error."""

    pipeline: str
    operator: str
    """The id of the source, operator or sink that could not process it."""
    kind: str
    """"source", "operator" or "sink"."""
    holds: str
    """"input": the input record as it was; "record": what the operator or sink was given."""
    topic: str = ""
    """The topic of the input record that it stems from, with its partition and offset; empty: it stems from a result,
    and these are None."""
    partition: int | None = None
    offset: int | None = None
    upstream: str = ""
    """The operator that gave the result that it stems from as event time went on, with the time of the result."""
    time: str = ""
    error: str
    """The class of the exception."""
    message: str = ""
    traceback: str = ""
    """The frames of the user's code, with the names of files alone."""
    event_time: int | None = None
    """The event time of the record, in ms since 1970; None: not known, as of what a source could not decode."""

    @property
    def can_return(self) -> bool:
        """Whether the letter is the input record as it was, of a topic; other places have a colon."""
        return self.holds == INPUT and ":" not in self.topic

    @property
    def has_place(self) -> bool:
        """Whether it says what the letter stems from; not for a record that a service has refused."""
        return bool(self.topic or self.upstream)

    def headers(self) -> Iterator[tuple[str, bytes | None]]:
        """The headers; none for what is empty or None."""
        for name, fact in msgspec.structs.asdict(self).items():
            if fact not in ("", None):
                yield PREFIX + name, str(fact).encode()

    @classmethod
    def of(cls, headers: Iterable[tuple[str, bytes | None]]) -> Reason | None:
        """The last reason in *headers*; None: it is no dead letter."""
        headers = list(headers)
        facts = {name[len(PREFIX) :]: (value or b"").decode(errors="replace")
                 for name, value in headers[_reason_start(headers) :] if name.startswith(PREFIX)}  # fmt: skip
        try:
            return msgspec.convert(facts, cls, strict=False)
        except msgspec.ValidationError:
            return None


def as_input(letter: DeadLetter) -> DeadLetter:
    """*letter* without its reason, the last headers: those before are of the record, even if it is a letter itself."""
    return msgspec.structs.replace(letter, headers=letter.headers[: _reason_start(letter.headers)])


def _reason_start(headers: Sequence[tuple[str, bytes | None]]) -> int:
    """The place where the last reason in *headers* begins; their number: there is none."""
    return max((place for place, (name, _) in enumerate(headers) if name == PREFIX + _FIRST), default=len(headers))


def compared(headers: Iterable[tuple[str, bytes | None]]) -> tuple[tuple[str, bytes | None], ...]:
    """The *headers* that two computations of an output have alike: a traceback changes with any edit of the code."""
    return tuple(header for header in headers if header[0] not in {PREFIX + name for name in _NOT_COMPARED})


@dataclass(frozen=True)
class DeadLetterLimits:
    """The limits on the dead letters of one source, operator or sink in one checkpoint; None: there is none."""

    per_checkpoint: int | None = None
    share: float | None = None
    """The largest share of the input records of the checkpoint, from 0 to 1."""

    def exceeded(self, letters: int, records: int) -> str:
        """The limit that *letters* exceed if the checkpoint's input had so many *records*; empty if they do not."""
        if self.per_checkpoint is not None and letters > self.per_checkpoint:
            return f"max_per_checkpoint={self.per_checkpoint}"
        if self.share is not None and letters > max(SHARE_LETTERS_MIN, self.share * records):
            return f"max_share={self.share}, of {records:,} input records"
        return ""

    def problems(self) -> Iterator[str]:
        """The mistakes in the limits."""
        if self.per_checkpoint is not None and not is_count(self.per_checkpoint, 0):
            yield f"max_per_checkpoint={self.per_checkpoint!r} must be a number from 0 on, or None"
        if self.share is not None and not (_is_number(self.share) and 0 <= self.share <= 1):
            yield f"max_share={self.share!r} must be from 0 to 1, as 0.01 for one in a hundred, or None"


def _is_number(given: object) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool)


class DeadLetterTarget(ABC):
    """The value of ``on_error=`` that keeps records which cannot be processed."""

    limits: DeadLetterLimits

    @abstractmethod
    def sink(self) -> Sink[DeadLetter]:
        """The sink for the letters of one source, operator or sink."""


OnError = Literal["fail", "skip"] | DeadLetterTarget
"""The treatment of a record that a source cannot use."""

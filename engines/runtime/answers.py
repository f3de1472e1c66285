"""The answers that the operators of one subtask got from services: noted for the order log, or read back from it.

    body = msgpack array: the answers, then an object with the text of each failure by its place among them

Invariants: bodies are in the order of the operator's records, and have an answer or a failure for each. A replay takes
all of them, and calls no service. What comes after the operator is the answer as read back, in the run as in a replay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Generic, TypeVar

import msgspec

from exactlyonce.engines.runtime.order_log import PART_SIZE_MAX, answers_in
from exactlyonce.pipeline.errors import Halt
from exactlyonce.pipeline.wire import wire_of

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
        """That of a `line`."""
        name, _, text = line.partition(": ")
        return cls(name, text)

    @property
    def line(self) -> str:
        return f"{self.name}: {self}"


class _Body(msgspec.Struct, Generic[A], array_like=True):
    answers: list[A]
    failed: dict[int, str] = {}


def _decoder(type_: Any) -> msgspec.msgpack.Decoder[_Body[Any]]:
    return msgspec.msgpack.Decoder(_Body[type_])


class AnswerCodec:
    """Encodes and decodes answers of one type, among them `FetchFailed`."""

    def __init__(self, type_: Any) -> None:
        self._wire = wire_of(type_)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = _decoder(self._wire.type)

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
    """Those of one subtask since the last cut."""

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

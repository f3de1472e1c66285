"""A sink that prints records: for the first day."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from exactlyonce.pipeline.errors import UserError
from exactlyonce.pipeline.sink import AT_LEAST_ONCE, Sink
from exactlyonce.sinks.writer import FlushedInterval, IntervalWriter, Opened, WriterContext


@dataclass(frozen=True)
class PrintSink(Sink[object]):
    """Writes the repr of each record to the standard output, a line each.

    At least once, not exactly once: printed lines cannot be taken back, and come again after a failure. A character
    that the output's encoding lacks is written as an escape, and a reader that goes away ends the run.
    """

    prefix: str = ""
    delivery: str = field(default=AT_LEAST_ONCE, init=False, repr=False)

    @property
    def needs_type(self) -> bool:
        """False: anything has a repr."""
        return False

    def describe(self, type_: Any) -> dict[str, Any]:
        """The kind alone."""
        return {"sink": "print"}

    def open_writer(self, context: WriterContext) -> Opened:
        """See `Writable`; subtasks print whole lines."""
        return Opened(_Printer(context.sink), _Lines(self.prefix))


@dataclass
class _Lines:
    prefix: str

    def encode(self, records: Sequence[object]) -> list[str]:
        return [f"{self.prefix}{record!r}\n" for record in records]


class _Printer(IntervalWriter):
    """A writer that prints at once."""

    def write(self, outputs: list[str]) -> None:
        self.records += len(outputs)
        encoding = sys.stdout.encoding or "utf-8"
        text = "".join(outputs).encode(encoding, "backslashreplace").decode(encoding)
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            raise UserError(
                f"Sink {self.sink!r} has printed to a command that reads no more, as `head` does once it has its "
                f"lines: the run ends. What came since the last checkpoint is printed again by the next run."
            ) from None

    def barrier(self, checkpoint: int) -> None:
        self._flushed[checkpoint] = FlushedInterval()

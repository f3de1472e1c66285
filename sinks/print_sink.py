"""Prints records: for the first day."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from exactlyonce.pipeline.sink import Sink


@dataclass(frozen=True)
class PrintSink(Sink[object]):
    """Writes the repr of each record to the standard output, a line each.

    At least once, not exactly once: what is printed cannot be taken back, so after a failure lines come again.
    """

    prefix: str = ""

    @property
    def needs_type(self) -> bool:
        """False: anything has a repr."""
        return False

    @property
    def transactional(self) -> bool:
        """False: a printed line is out."""
        return False

    def line(self, output: object) -> str:
        """What is printed for one output."""
        return f"{self.prefix}{output!r}"

    def describe(self, type_: Any) -> dict[str, Any]:
        """That it prints."""
        return {"sink": "print"}

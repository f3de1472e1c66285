"""The progress of a long command: in a terminal a line that is written over and over, else a line a chunk."""

from __future__ import annotations

import json
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any

from exactlyonce.cli.text import duration

if TYPE_CHECKING:
    from exactlyonce.checkpoint.records.manifest import Manifest
    from exactlyonce.engines.bounded.advance import Advanced


class LineOfProgress:
    """A `CatchUpProgress` for people, and for machines that read stderr."""

    def __init__(self, pipeline: str) -> None:
        self._pipeline = pipeline
        self._in_terminal = sys.stderr.isatty()
        self._began_s = time.monotonic()
        self._total = self._done = self._records = 0
        self._stage = ""

    def note(self, text: str) -> None:
        """Something a person should know."""
        if self._in_terminal:
            self._erase()
            print(text, file=sys.stderr)
        else:
            self._line(event="note", text=text)

    def began(self, manifest: Manifest, offsets: int) -> None:
        """It goes on from *manifest*."""
        self._total, self._done = offsets, 0
        if not self._in_terminal:
            self._line(event="started", checkpoint=manifest.checkpoint, offsets=offsets)
        self._show()

    def stage(self, name: str, units: int) -> None:
        """A job begins."""
        self._stage = f"{name}, {units} {'unit' if units == 1 else 'units'}"
        self._show()

    def advanced(self, advanced: Advanced, offsets: int) -> None:
        """A checkpoint more."""
        self._done += offsets
        self._records += advanced.records
        if not self._in_terminal:
            self._line(
                event="checkpoint",
                checkpoint=advanced.manifest.checkpoint,
                records_in=advanced.records,
                records_committed=advanced.records_out,
                work_ms=advanced.elapsed_ms,
            )
        self._show()

    def passed(self, offsets: int) -> None:
        """So many offsets more are done, and nothing else is to be said."""
        self._done += offsets
        self._show()

    def close(self) -> None:
        """The line goes."""
        self._erase()

    def _line(self, **fields: Any) -> None:
        print(json.dumps({"pipeline": self._pipeline, **fields}), file=sys.stderr, flush=True)

    def _show(self) -> None:
        if not self._in_terminal or not self._total:
            return
        elapsed_s = time.monotonic() - self._began_s
        bar = "#" * (20 * self._done // self._total)
        line = f"[{bar:<20}] {self._done:,} of {self._total:,} offsets  {self._stage}"
        if self._records:
            left_ms = round(elapsed_s * 1000 * (self._total - self._done) / self._done) if self._done else 0
            line += f"  {self._records / elapsed_s:,.0f} records/s  {duration(left_ms)} left"
        width = shutil.get_terminal_size().columns - 1
        print("\r\x1b[K" + line[:width], end="", file=sys.stderr, flush=True)

    def _erase(self) -> None:
        if self._in_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

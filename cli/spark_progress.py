"""The progress of a long command: in a terminal one line, written again and again; else a line for each checkpoint."""

from __future__ import annotations

import json
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any

from exactlyonce.cli.lines import show_event, show_from_handler
from exactlyonce.engines import events
from exactlyonce.pipeline.durations import shown_duration
from exactlyonce.pipeline.sizes import counted

if TYPE_CHECKING:
    from exactlyonce.checkpoint.records.manifest import Manifest
    from exactlyonce.engines.bounded.advance import Advanced


class LineOfProgress:
    """A `CatchUpProgress` for people; with *json* or without a terminal, for machines that read stderr."""

    def __init__(self, pipeline: str, *, json: bool) -> None:
        self._pipeline = pipeline
        self._in_terminal = sys.stderr.isatty() and not json
        self._began_s = 0.0
        self._total = self._done = self._records = 0
        self._stage = ""

    def note(self, text: str) -> None:
        if self._in_terminal:
            self._erase()
            print(text, file=sys.stderr)
        else:
            show_event(events.note(self._pipeline, text))

    def note_from_handler(self, text: str) -> None:
        show_from_handler(f"\r\x1b[K{text}" if self._in_terminal else json.dumps(events.note(self._pipeline, text)))

    def began(self, manifest: Manifest, offsets: int) -> None:
        self._total, self._done, self._records = offsets, 0, 0
        self._began_s = time.monotonic()  # not before: Spark starts slowly, and --follow pauses
        if not self._in_terminal:
            self._event("started", checkpoint=manifest.checkpoint, offsets=offsets)
        self._show()

    def units(self, stage: str, done: int, units: int) -> None:
        """Show the units of a stage, as `engines.bounded.submit.UnitsDone`."""
        self._stage = f"{stage}, {done:,} of {counted(units, 'unit')}"
        self._show()

    def advanced(self, advanced: Advanced, offsets: int) -> None:
        self._done += offsets
        self._records += advanced.records
        if not self._in_terminal:
            self._event(
                "checkpoint",
                checkpoint=advanced.manifest.checkpoint,
                records_in=advanced.records,
                skipped=sum(partition.count for partition in advanced.skipped),
                records_committed=advanced.records_out,
                work_ms=advanced.elapsed_ms,
            )
        self._show()

    def passed(self, offsets: int) -> None:
        """Count *offsets* as done."""
        self._done += offsets
        self._show()

    def close(self) -> None:
        self._erase()

    def _event(self, kind: str, /, **fields: Any) -> None:
        show_event(events.event(kind, self._pipeline, **fields))

    def _show(self) -> None:
        if not self._in_terminal or not self._total:
            return
        elapsed_s = time.monotonic() - self._began_s
        bar = "#" * (20 * self._done // self._total)
        line = f"[{bar:<20}] {self._done:,} of {self._total:,} offsets"
        if self._records and elapsed_s:
            left_ms = round(elapsed_s * 1000 * (self._total - self._done) / self._done) if self._done else 0
            line += f"  {self._records / elapsed_s:,.0f} records/s  {shown_duration(left_ms)} left"
        if self._stage:
            line += f"  {self._stage}"
        width = shutil.get_terminal_size().columns - 1
        print("\r\x1b[K" + line[:width], end="", file=sys.stderr, flush=True)

    def _erase(self) -> None:
        if self._in_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

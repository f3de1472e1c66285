"""`exactlyonce run`, or another command that leads a pipeline, as a process, and its events."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster import WRITER

from exactlyonce.connectors.embedded.programs import dying_with_parent

HERE = Path(__file__).parent
LIMIT_S = 900.0

Event = dict[str, Any]


class Failed(Exception):
    """A benchmarked process ended badly, or its output is wrong: there is no figure to report."""


class Job:
    """One run of a pipeline of `benchmarked.py`; killed at the end of a `with`, and with its runner."""

    def __init__(self, servers: str, pipeline: str, *arguments: str, interval: str = "500ms", **params: str) -> None:
        run = "run", "--checkpoint-interval", interval, "--verbose"
        self._start(servers, pipeline, run, arguments, params)

    @classmethod
    def of(cls, command: str, servers: str, pipeline: str, *arguments: str, **params: str) -> Job:
        """A *command* other than `run`."""
        job = cls.__new__(cls)
        job._start(servers, pipeline, (command,), arguments, params)
        return job

    def _start(
        self, servers: str, pipeline: str, command: tuple[str, ...], arguments: tuple[str, ...], params: dict[str, str]
    ) -> None:
        self.started_ms = time.time_ns() // 1_000_000
        line = [
            *(sys.executable, "-m", "exactlyonce.cli.main", command[0], f"benchmarked:{pipeline}", *command[1:]),
            *("--bootstrap-servers", servers, "--json"),
            *(part for name, value in WRITER.items() for part in ("--kafka", f"{name}={value}")),
            *(part for name, value in params.items() for part in ("--param", f"{name}={value}")),
            *arguments,
        ]
        self.process = subprocess.Popen(dying_with_parent(line), cwd=HERE, stderr=subprocess.PIPE, text=True)
        self.events: list[Event] = []
        self._fresh: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._text: list[str] = []
        threading.Thread(target=self._follow, daemon=True).start()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *raised: object) -> None:
        self.process.kill()
        self.process.wait()

    def _follow(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            try:
                event = json.loads(line)
            except ValueError:
                self._text.append(line)
                continue
            if event["event"] in ("failed", "taken_over"):
                self._text.append(event["text"])
            self.events.append(event)
            self._fresh.put(event)
        self._fresh.put(None)

    def next(self, wanted: Callable[[Event], bool]) -> Event:
        """The next event for which *wanted* is true."""
        if (event := self._next(wanted)) is None:
            raise self._ended()
        return event

    def _next(self, wanted: Callable[[Event], bool]) -> Event | None:
        """The same; None if the command ends before."""
        deadline = time.monotonic() + LIMIT_S
        try:
            while event := self._fresh.get(timeout=max(0.0, deadline - time.monotonic())):
                if "restarting" in event.get("text", ""):
                    raise Failed(event["text"])
                if wanted(event):
                    return event
        except queue.Empty:
            raise Failed(f"nothing more came in {LIMIT_S:.0f} s; the last was {self.events[-1]}") from None
        return None

    def _ended(self) -> Failed:
        return Failed(f"the command ended with {self.process.wait(LIMIT_S)}: {''.join(self._text[-20:])}")

    def failure(self) -> str | None:
        """How it has failed, if it has."""
        return str(self._ended()) if self.process.poll() else None

    def next_checkpoint(self, records: int = 0) -> Event:
        """The next checkpoint after which this run has read *records* records in all."""
        return self.next(lambda event: event["event"] == "checkpoint" and event["records_in"] >= records)

    def first_record_ms(self) -> int:
        """The time of its first processed batch, in milliseconds since 1970."""
        return int(self.next(lambda event: event.get("step") == "first-record")["first_record_ms"])

    def finish(self) -> list[Event]:
        """Wait for the clean end; -> all checkpoints."""
        self._next(lambda event: False)
        if self.process.wait(LIMIT_S):
            raise self._ended()
        return self.checkpoints

    @property
    def checkpoints(self) -> list[Event]:
        """The checkpoints so far."""
        return [event for event in self.events if event["event"] == "checkpoint"]

    def stop(self) -> list[Event]:
        """Ask for a clean end; -> all checkpoints."""
        self.process.send_signal(signal.SIGTERM)
        return self.finish()

    def worker_bytes(self) -> int:
        """Resident memory of the largest of its workers."""
        deployed = next(event for event in self.events if event.get("step") == "deployed")
        return max(map(_resident_bytes, deployed["workers"]))

    def resident_bytes(self) -> int:
        """Resident memory of all its processes."""
        pids = [self.process.pid]
        for event in self.events:
            if event.get("step") == "deployed":
                pids = [self.process.pid, *event["workers"]]
        return sum(map(_resident_bytes, pids))


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

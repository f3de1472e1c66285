"""A writer whose work is done by a thread of its own, for stores that a worker's loop must not wait for.

Invariants: the steps of the work run in the order of the outputs and barriers; the backlog is bounded by bytes, by
`room`; an interval is told once its last step has ended. After an error no further step runs: the next call raises, and
nothing is acknowledged.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from exactlyonce.checkpoint.records.manifest import StagedAck, StoreCommittable
from exactlyonce.sinks.writer import ROOM, FlushedInterval, IntervalWriter


@dataclass(frozen=True)
class _Step:
    work: Callable[[], Any]
    size: int
    checkpoint: int | None
    """The one that it ends; its work returns the interval."""


class BackgroundWriter(IntervalWriter, ABC):
    """See the module. *target*: a word for the slow side; *backlog_max*: in bytes."""

    def __init__(self, sink: str, subtask: int, target: str, backlog_max: int) -> None:
        super().__init__(sink)
        self.subtask = subtask
        self._target, self._backlog_max = target, backlog_max
        self._interval_records = 0
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()  # all below is shared with the thread, under it
        self._steps: deque[_Step] = deque()
        """Those that have not ended, the one in progress first."""
        self._backlog_bytes = 0
        self._ended: list[tuple[int | None, Any]] = []
        self._failure: BaseException | None = None
        self._abandoned = False

    @abstractmethod
    def _end(self, checkpoint: int, records: int) -> FlushedInterval:
        """End an interval that has records. Runs on the thread."""

    @abstractmethod
    def _release(self) -> None:
        """Let go of files or connections. Runs on the thread, at its end."""

    @abstractmethod
    def _explained(self, failure: BaseException) -> Exception | None:
        """The error to raise for one of the thread; None: the same."""

    @property
    def room(self) -> int:
        """See `SinkWriter`: 0 while too much waits for the target."""
        return 0 if self._backlog_bytes > self._backlog_max else ROOM

    @property
    def held_up(self) -> str:
        """See `SinkWriter`: the target, while there is a backlog."""
        waiting = self._backlog_bytes
        return f"sink {self.sink!r} waits for its {self._target} to take {waiting:,} bytes" if waiting else ""

    def barrier(self, checkpoint: int) -> None:
        """See `SinkWriter`."""
        records, self._interval_records = self._interval_records, 0
        if records:
            self._submit(partial(self._end, checkpoint, records), checkpoint=checkpoint)
        else:
            self._flushed[checkpoint] = FlushedInterval()

    def _submit(self, work: Callable[[], Any], *, size: int = 0, checkpoint: int | None = None) -> None:
        """Let the thread do *work* after all before; *size*: in the backlog until then."""
        with self._changed:
            self._raise_failure()
            self._steps.append(_Step(work, size, checkpoint))
            self._backlog_bytes += size
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"{self._target} of {self.sink}", daemon=True)
            self._thread.start()

    def poll(self, wait_s: float = 0.0) -> bool:
        """See `SinkWriter`: whether a step has ended."""
        with self._changed:
            if wait_s and self._steps:
                self._changed.wait_for(lambda: self._ended or self._failure, wait_s)
            self._raise_failure()
            ended, self._ended = self._ended, []
        self._flushed.update((checkpoint, result) for checkpoint, result in ended if checkpoint is not None)
        return bool(ended)

    def _raise_failure(self) -> None:
        failure = self._failure
        if failure is not None:
            if (explained := self._explained(failure)) is not None:
                raise explained from failure
            raise failure

    def abandon(self) -> None:
        """End the thread after the step in progress."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def _staged(self, kind: str, checkpoint: int, records: int, body: bytes) -> FlushedInterval:
        committable = StoreCommittable(
            sink=self.sink, subtask=self.subtask, checkpoint=checkpoint, records=records, kind=kind, body=body
        )
        return FlushedInterval(staged=StagedAck(committable))

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            try:
                while (step := self._next()) is not None:
                    result = step.work()
                    with self._changed:
                        self._steps.popleft()
                        self._backlog_bytes -= step.size
                        self._ended.append((step.checkpoint, result))
                        self._changed.notify_all()
            finally:
                self._release()  # before a failure is told: the next attempt finds nothing that is still held
        except BaseException as failure:  # raised in the loop
            with self._changed:
                self._failure = failure
                self._steps.clear()
                self._backlog_bytes = 0
                self._changed.notify_all()

    def _next(self) -> _Step | None:
        with self._changed:
            self._changed.wait_for(lambda: self._steps or self._abandoned)
            return None if self._abandoned else self._steps[0]

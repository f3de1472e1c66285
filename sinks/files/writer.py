"""The writer of one subtask of a file sink: the loop hands rows over, and a thread of its own waits for the disk.

Invariants: rows and barriers go to the thread in the order in which they come; what is handed over and not written yet
is bounded by bytes, and `room` says when; the committable of an interval is told once its files are durable. What stops
the thread stops the sink: the next call raises, and nothing is acknowledged behind it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from exactlyonce.checkpoint.records.manifest import StagedAck, StoreCommittable
from exactlyonce.pipeline.errors import StoreError
from exactlyonce.sinks.files.folders import explanation
from exactlyonce.sinks.files.format import EncodedPart
from exactlyonce.sinks.files.layout import KIND, StagedList, WaitingFile, encode_staged
from exactlyonce.sinks.files.publishing import WaitingFileGone
from exactlyonce.sinks.files.staging import StagedFiles
from exactlyonce.sinks.writer import ROOM, FlushedInterval, IntervalWriter, SinkFailed

BACKLOG_BYTES_MAX = 32 << 20


@dataclass(frozen=True)
class _Cut:
    checkpoint: int
    records: int


class FilesWriter(IntervalWriter):
    """Stages files for `commits.of_stores`. With *publish* it publishes them itself, and there is no committable."""

    def __init__(
        self,
        sink: str,
        subtask: int,
        files: StagedFiles,
        publish: Callable[[StagedList, Sequence[WaitingFile]], None] | None = None,
    ) -> None:
        super().__init__(sink)
        self.subtask = subtask
        self._files = files
        self._publish = publish
        self._records_of_interval = 0
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()  # what follows is shared with the thread, under it
        self._inbox: deque[Sequence[EncodedPart] | _Cut] = deque()
        self._backlog_bytes = 0
        self._cuts_waiting = 0
        self._cut: list[tuple[int, FlushedInterval]] = []
        self._failure: BaseException | None = None
        self._abandoned = False

    # --- the loop's side --------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """None while the disk is behind. It gets on without a barrier."""
        return 0 if self._backlog_bytes > BACKLOG_BYTES_MAX else ROOM

    @property
    def held_up(self) -> str:
        """The disk, if there is something that it has not taken."""
        waiting = self._backlog_bytes
        return f"sink {self.sink!r} waits for its disk to take {waiting:,} bytes" if waiting else ""

    def write(self, outputs: Sequence[EncodedPart]) -> None:
        """Hand rows over."""
        rows = sum(part.rows for part in outputs)
        self.records += rows
        self._records_of_interval += rows
        self._hand_over(outputs, sum(part.size for part in outputs))

    def barrier(self, checkpoint: int) -> None:
        """All rows so far belong to *checkpoint*."""
        records, self._records_of_interval = self._records_of_interval, 0
        if records:
            self._hand_over(_Cut(checkpoint, records), 0)
        else:
            self._flushed[checkpoint] = FlushedInterval()

    def _hand_over(self, item: Sequence[EncodedPart] | _Cut, size: int) -> None:
        with self._changed:
            self._raise_failure()
            self._inbox.append(item)
            self._backlog_bytes += size
            self._cuts_waiting += isinstance(item, _Cut)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"files of {self.sink}", daemon=True)
            self._thread.start()

    def poll(self, wait_s: float = 0.0) -> bool:
        """Whether an interval has become durable."""
        with self._changed:
            if wait_s and self._cuts_waiting:
                self._changed.wait_for(lambda: self._cut or self._failure, wait_s)
            self._raise_failure()
            moved, self._cut = self._cut, []
        self._flushed.update(moved)
        return bool(moved)

    def _raise_failure(self) -> None:
        failure = self._failure
        if isinstance(failure, OSError):
            why = explanation(failure, self._files.folder.target)
            raise SinkFailed(f"sink {self.sink!r} cannot write files: {why} Nothing is lost.") from failure
        if isinstance(failure, WaitingFileGone):
            raise SinkFailed(
                f"sink {self.sink!r} cannot publish files: {failure} is gone, so another program has removed it. Keep "
                f"programs that clean out of {self._files.folder.root}; its rows are written again."
            ) from failure
        if isinstance(failure, StoreError):
            raise SinkFailed(f"sink {self.sink!r} cannot publish files: {failure}") from failure
        if failure is not None:
            raise failure

    def abandon(self) -> None:
        """The thread ends as soon as it is not waiting for the disk; its files stay as they are."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    # --- the thread's side ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (item := self._next()) is not None:
                if isinstance(item, _Cut):
                    flushed = self._flush(item)
                    with self._changed:
                        self._cut.append((item.checkpoint, flushed))
                        self._cuts_waiting -= 1
                        self._changed.notify_all()
                else:
                    self._files.write(item)
                    with self._changed:
                        self._backlog_bytes -= sum(part.size for part in item)
        except BaseException as failure:  # the loop raises it: a thread that ends without a word would stop the sink
            with self._changed:
                self._failure = failure
                self._inbox.clear()
                self._backlog_bytes = 0
                self._changed.notify_all()
        finally:
            self._files.abandon()

    def _next(self) -> Sequence[EncodedPart] | _Cut | None:
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or self._abandoned)
            return None if self._abandoned else self._inbox.popleft()

    def _flush(self, cut: _Cut) -> FlushedInterval:
        body, files = self._files.cut(cut.checkpoint)
        if self._publish is not None:
            self._publish(body, files)
            return FlushedInterval()
        committable = StoreCommittable(
            sink=self.sink,
            subtask=self.subtask,
            checkpoint=cut.checkpoint,
            records=cut.records,
            kind=KIND,
            body=encode_staged(body),
        )
        return FlushedInterval(staged=StagedAck(committable))

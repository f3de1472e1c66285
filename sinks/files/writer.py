"""The writer of one subtask of a file sink: a thread of its own waits for the disk.

Invariant: the committable of an interval is told once its files are durable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from exactlyonce.connectors.filestore.store import WaitingFile, WaitingFileGone
from exactlyonce.pipeline.errors import ConfigError, StorageUnavailable, StoreError
from exactlyonce.sinks.background import BackgroundWriter
from exactlyonce.sinks.files.format import EncodedPart
from exactlyonce.sinks.files.layout import KIND, StagedList, encode_staged
from exactlyonce.sinks.files.staging import StagedFiles
from exactlyonce.sinks.writer import FlushedInterval, SinkFailed

BACKLOG_BYTES_MAX = 32 << 20


class FilesWriter(BackgroundWriter):
    """Stages files for `commits.stores`. With *publish* it publishes them itself, and there is no committable."""

    def __init__(
        self,
        sink: str,
        subtask: int,
        files: StagedFiles,
        publish: Callable[[StagedList, Sequence[WaitingFile]], None] | None = None,
    ) -> None:
        super().__init__(sink, subtask, files.place.writes_to, BACKLOG_BYTES_MAX)
        self._files = files
        self._publish = publish

    def write(self, outputs: Sequence[EncodedPart]) -> None:
        """Hand rows over."""
        rows = sum(part.rows for part in outputs)
        self.records += rows
        self._interval_records += rows
        self._submit(partial(self._files.write, outputs), size=sum(part.size for part in outputs))

    def _end(self, checkpoint: int, records: int) -> FlushedInterval:
        listing, files = self._files.cut(checkpoint)
        if self._publish is not None:
            self._publish(listing, files)
            return FlushedInterval()
        return self._staged(KIND, checkpoint, records, encode_staged(listing))

    def _release(self) -> None:
        self._files.abandon()

    def abandon(self) -> None:
        self._files.place.give_up()
        super().abandon()

    def _explained(self, failure: BaseException) -> SinkFailed | None:
        place = self._files.place
        if isinstance(failure, StorageUnavailable | ConfigError):
            return SinkFailed(f"sink {self.sink!r} cannot write files: {failure} Nothing is lost.")
        if isinstance(failure, WaitingFileGone):
            return SinkFailed(
                f"sink {self.sink!r} cannot publish files: {failure} is gone, so another program has removed it. Keep "
                f"clean-up programs out of {place.root}; its rows are written again."
            )
        if isinstance(failure, StoreError):
            return SinkFailed(f"sink {self.sink!r} cannot publish files: {failure}")
        return None

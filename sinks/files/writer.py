"""The writer of one subtask of a file sink: its unpublished files, and the thread that waits for the disk.

Invariants: a file holds rows of one interval; when `cut` returns, the files of the interval and their list are durable
under names that nobody else uses; only then the committable is told.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from exactlyonce.checkpoint.clock import Clock
from exactlyonce.connectors.filestore.store import NewFile, WaitingFile, WaitingFileGone
from exactlyonce.pipeline.errors import ConfigError, StorageUnavailable, StoreError
from exactlyonce.sinks.background import BackgroundWriter
from exactlyonce.sinks.files.format import EncodedPart, FileFormat, RowsFile
from exactlyonce.sinks.files.layout import KIND, STAGED, StagedList, WriterId, encode_staged
from exactlyonce.sinks.files.place import Place
from exactlyonce.sinks.writer import FlushedInterval, SinkFailed

GROUP_BYTES = 16 << 20
"""Rows of one folder in memory, before they are written together."""
HELD_BYTES_MAX = 64 << 20
"""Rows of all folders in memory: half for joined contents, a quarter for loose ones, the rest to copy those."""
OPEN_MAX = 128
"""Open files: a sink that writes to more folders gets more and smaller files."""
SYNCED_AT_ONCE = 16
BACKLOG_BYTES_MAX = 32 << 20


def drop_older(place: Place, incarnation: int, attempt: int) -> None:
    """Drop the files of older attempts than that one, none of which is to be published. Files of other programs
    stay."""
    writers = ((WriterId.parsed(name), name) for name in place.names_in(STAGED))
    place.drop_staged([name for writer, name in writers if writer and writer.is_before(incarnation, attempt)])


@dataclass
class _Held:
    """Rows of a folder that are not written yet."""

    since_ms: int
    contents: list[Any] = field(default_factory=list)
    rows: int = 0
    size: int = 0
    joined: int = 0
    """The number of contents, from the first on, that are joined in memory of their own; the others are loose."""
    joined_size: int = 0
    memory: int = 0
    """The bytes of joined contents, overhead included."""


@dataclass
class _OpenFile:
    since_ms: int
    file: NewFile
    rows_file: RowsFile
    rows: int = 0


@dataclass
class StagedFiles:
    """The files of one writer: one for each folder, a new one when it is large or old enough. For one thread, which may
    wait for the disk. A file is opened once enough rows of its folder are held: many folders cost little."""

    place: Place
    writer: WriterId
    format: FileFormat
    roll_bytes: int
    """The size at which a file is closed before its interval ends."""
    roll_interval_ms: int | None
    """Likewise its age."""
    clock: Clock
    _held: dict[str, _Held] = field(default_factory=dict)
    """By folder."""
    _joined_bytes: int = 0
    """The memory of joined contents."""
    _loose_bytes: int = 0
    """The memory of all parts since the last join: one that is held may keep the others."""
    _open: dict[str, _OpenFile] = field(default_factory=dict)
    """By folder, in the order of their last writes."""
    _closed: list[tuple[str, WaitingFile]] = field(default_factory=list)
    """Each with its folder; its `path` is set at the cut."""
    _number: int = 0

    def write(self, parts: Iterable[EncodedPart]) -> None:
        """Take rows, and write them now or later."""
        now_ms = self.clock.monotonic_ms()
        group = min(GROUP_BYTES, self.roll_bytes)
        for part in parts:
            if self._is_old(part.folder, now_ms):
                self._close([part.folder])
            held = self._held.setdefault(part.folder, _Held(now_ms))
            held.contents.append(part.content)
            held.rows += part.rows
            held.size += part.size
            self._loose_bytes += part.size + self.format.part_bytes
            if held.size >= group:
                self._flush(part.folder)
        if self._loose_bytes > HELD_BYTES_MAX // 4:
            self._join()

    def _join(self) -> None:
        """Copy loose contents, which frees the batches they are slices of; then write the largest folders."""
        for held in self._held.values():
            if loose := held.contents[held.joined :]:
                held.contents[held.joined :] = [self.format.joined(loose)]
                held.joined += 1
                memory = held.size - held.joined_size + self.format.part_bytes
                held.joined_size = held.size
                held.memory += memory
                self._joined_bytes += memory
        self._loose_bytes = 0
        while self._joined_bytes > HELD_BYTES_MAX // 2:
            self._flush(max(self._held, key=lambda folder: self._held[folder].memory))

    def _is_old(self, folder: str, now_ms: int) -> bool:
        interval_ms = self.roll_interval_ms
        first = self._open.get(folder) or self._held.get(folder)
        return interval_ms is not None and first is not None and now_ms - first.since_ms >= interval_ms

    def _flush(self, folder: str) -> None:
        """Write the held rows of *folder*, as one group."""
        held = self._held.pop(folder)
        self._joined_bytes -= held.memory
        if not self._held:
            self._loose_bytes = 0
        file = self._open.pop(folder, None)
        if file is None:
            if len(self._open) >= OPEN_MAX:
                self._close([next(iter(self._open))])
            file = self._new(folder, held.since_ms)
        self._open[folder] = file
        file.rows_file.write(held.contents)
        file.rows += held.rows
        if file.file.size >= self.roll_bytes:
            self._close([folder])

    def _new(self, folder: str, since_ms: int) -> _OpenFile:
        self._number += 1
        file = self.place.new_file(self.writer, self._number, folder, self.format.suffix)
        return _OpenFile(since_ms, file, self.format.open(file))

    def _close(self, folders: Iterable[str]) -> None:
        """Write all rows of *folders*, and sync their files together, which is faster than one by one."""
        closing = []
        for folder in folders:
            if folder in self._held:
                self._flush(folder)
            file = self._open.pop(folder, None)
            if file is not None:  # else the flush has closed it
                file.rows_file.finish()
                closing.append((folder, file))
        if len(closing) == 1:
            closing[0][1].file.sync()
        elif closing:
            with ThreadPoolExecutor(SYNCED_AT_ONCE) as pool:
                list(pool.map(lambda closed: closed[1].file.sync(), closing))
        for folder, file in closing:
            file.file.close()
            self._closed.append((folder, file.file.waiting(file.rows)))

    def cut(self, checkpoint: int) -> tuple[StagedList, tuple[WaitingFile, ...]]:
        """End the interval; -> its files, and the list of them, all durable."""
        self._close(list(self._open))
        folders = list(self._held)
        for start in range(0, len(folders), OPEN_MAX):
            self._close(folders[start : start + OPEN_MAX])
        files = tuple(self._to_be_published(checkpoint))
        self._closed = []
        content, path = encode_staged(files), f"{self.writer}/{checkpoint}.files"
        self.place.stage_list(path, content)
        return StagedList(path=path, sha256=hashlib.sha256(content).digest()), files

    def _to_be_published(self, checkpoint: int) -> Iterable[WaitingFile]:
        suffix = self.format.suffix
        for number, (folder, file) in enumerate(self._closed, 1):
            name = self.writer.published_name(checkpoint, number, suffix)
            yield file if file.path else msgspec.structs.replace(file, path=f"{folder}/{name}" if folder else name)

    def abandon(self) -> None:
        """Close all files as they are."""
        for file in self._open.values():
            file.file.close()
        self._open.clear()


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

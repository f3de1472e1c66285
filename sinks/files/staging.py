"""The files of one writer that are not published yet: one for each folder, a new one when it is large or old enough.

Invariants: a file holds rows of one interval; when `cut` returns, the files of the interval and the list of them are
durable under names that nobody else uses. For one thread, which may wait for the disk.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from exactlyonce.checkpoint.clock import Clock
from exactlyonce.sinks.files.folders import FolderTree, sync_folder
from exactlyonce.sinks.files.format import FileFormat, Part, RowsFile
from exactlyonce.sinks.files.layout import SinkFolder, StagedFile, StagedList, WriterId, encode_staged

GROUP_BYTES = 16 << 20
"""Held back of one file, before they are written together."""
BUFFERED_BYTES_MAX = 64 << 20
"""Held back of all files."""
OPEN_MAX = 128
"""Files that are open at once: a sink with more folders than that gets more and smaller ones."""


@dataclass(frozen=True, kw_only=True)
class Rolling:
    """When a file is closed before its interval ends."""

    size: int
    interval_ms: int | None


class _HashedFile:
    """A file that is written from its beginning to its end, and knows the SHA-256 of that."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self.size = 0
        self.sha256 = hashlib.sha256()
        self.closed = False

    def write(self, content: Any) -> int:
        view = memoryview(content)
        rest = view
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        self.sha256.update(view)
        self.size += len(view)
        return len(view)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Nothing is held back here."""

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            os.close(self._descriptor)


@dataclass
class _OpenFile:
    name: str
    bytes: _HashedFile
    rows_file: RowsFile
    opened_ms: int
    rows: int = 0


@dataclass
class StagedFiles:
    """Of one writer."""

    folder: SinkFolder
    writer: WriterId
    format: FileFormat
    rolling: Rolling
    clock: Clock
    _open: dict[str, _OpenFile] = field(default_factory=dict)
    """By folder, that written to last at the end."""
    _closed: list[tuple[str, StagedFile]] = field(default_factory=list)
    """With the folder of each; where it is published is known when the interval is."""
    _number: int = 0

    @property
    def _place(self) -> Path:
        return self.folder.staged / str(self.writer)

    def write(self, parts: Iterable[Part]) -> None:
        """Write rows, each part in its folder."""
        for part in parts:
            file = self._file(part.folder)
            file.rows_file.write(part.content)
            file.rows += part.rows
            if file.rows_file.buffered >= min(GROUP_BYTES, self.rolling.size):
                file.rows_file.flush()
            if file.bytes.size >= self.rolling.size:
                self._close(part.folder)
        while sum(file.rows_file.buffered for file in self._open.values()) > BUFFERED_BYTES_MAX:
            max(self._open.values(), key=lambda file: file.rows_file.buffered).rows_file.flush()

    def _file(self, folder: str) -> _OpenFile:
        file = self._open.pop(folder, None)
        if file is not None and self._is_old(file):
            self._open[folder] = file
            self._close(folder)
            file = None
        if file is None:
            if len(self._open) >= OPEN_MAX:
                self._close(next(iter(self._open)))
            file = self._new()
        self._open[folder] = file
        return file

    def _is_old(self, file: _OpenFile) -> bool:
        interval_ms = self.rolling.interval_ms
        return interval_ms is not None and self.clock.monotonic_ms() - file.opened_ms >= interval_ms

    def _new(self) -> _OpenFile:
        if not self._number:
            FolderTree(self.folder.staged).make(self._place)
        self._number += 1
        name = f"{self._number}.{self.format.suffix}"
        hashed = _HashedFile(self._place / name)
        return _OpenFile(name, hashed, self.format.open(hashed), self.clock.monotonic_ms())

    def _close(self, folder: str) -> None:
        file = self._open.pop(folder)
        file.rows_file.finish()
        file.bytes.sync()
        file.bytes.close()
        staged = StagedFile(
            staged=f"{self.writer}/{file.name}",
            path="",
            rows=file.rows,
            size=file.bytes.size,
            sha256=file.bytes.sha256.digest(),
        )
        self._closed.append((folder, staged))

    def cut(self, checkpoint: int) -> tuple[StagedList, tuple[StagedFile, ...]]:
        """End the interval: its files, and the list of them, which is durable as they are."""
        for folder in list(self._open):
            self._close(folder)
        files = tuple(self._to_be_published(checkpoint))
        self._closed = []
        content = encode_staged(files)
        path = f"{self.writer}/{checkpoint}.files"
        listing = _HashedFile(self.folder.staged / path)
        listing.write(content)
        listing.sync()
        listing.close()
        sync_folder(self._place)
        return StagedList(path=path, sha256=listing.sha256.digest()), files

    def _to_be_published(self, checkpoint: int) -> Iterable[StagedFile]:
        suffix = self.format.suffix
        for number, (folder, file) in enumerate(self._closed, 1):
            name = self.writer.published_name(checkpoint, number, suffix)
            yield msgspec.structs.replace(file, path=f"{folder}/{name}" if folder else name)

    def abandon(self) -> None:
        """Let go of all files as they are."""
        for file in self._open.values():
            file.bytes.close()
        self._open.clear()

"""A folder of HDFS, or the keys below a prefix of S3, as the place of a source; its files are read in ranges.

Invariant: a stream asks for each byte once, in requests of `RANGE_BYTES`, of which one is on its way while the one
before is being read.
"""

from __future__ import annotations

import errno
import io
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, Protocol, cast

from exactlyonce.connectors.blocks.folder import FolderOfLargeFiles, StoredFile
from exactlyonce.connectors.files.places import FoundFile, is_hidden

RANGE_BYTES = 4 << 20
_URL = re.compile(r"(s3|hdfs)://[^/@]+(/[^/]+)+/*")


class VersionedFolder(FolderOfLargeFiles, Protocol):
    """A folder that also shows which version of one file is there."""

    def look(self, name: str) -> StoredFile | None:
        """One file; None: it is not there."""


def is_remote(path: str) -> bool:
    """Whether *path* is the URL of a place.

    >>> is_remote("s3://lake/orders"), is_remote("/data/orders"), is_remote("s3://lake")
    (True, False, False)
    """
    return _URL.fullmatch(path) is not None


class RemotePlace:
    """The `Place` at a URL of S3 or HDFS; of HDFS without the folders below it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        from exactlyonce.connectors.blocks.storage import folder_of  # with all that writes blocks: a local one has none

        root, _, inner = self.url.rpartition("/")
        self._folder = cast("VersionedFolder", folder_of(root, inner, "The source"))

    def files(self) -> Iterator[FoundFile]:
        for stored in self._folder.files():
            if not any(map(is_hidden, stored.name.split("/"))) and not stored.name.endswith("/"):
                yield _found(stored)

    def look(self, name: str) -> FoundFile | None:
        stored = self._folder.look(name)
        return None if stored is None else _found(stored)

    def open(self, file: FoundFile) -> BinaryIO:
        return cast("BinaryIO", io.BufferedReader(RangeStream(self._folder, file), RANGE_BYTES))


def _found(stored: StoredFile) -> FoundFile:
    version = f"{stored.size}-{stored.tag or stored.written_at_ms}".replace(" ", "")
    return FoundFile(stored.name, stored.size, version, stored.written_at_ms)


class RangeStream(io.RawIOBase):
    """The bytes of *file*; the next range is asked for in a thread."""

    def __init__(self, folder: FolderOfLargeFiles, file: FoundFile) -> None:
        super().__init__()
        self._folder, self._file = folder, file
        self._at = 0
        self._thread = ThreadPoolExecutor(1, "ranges")
        self._ahead: tuple[int, int, Future[bytes | None]] | None = None
        """The begin and the length of the range that is on its way."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        length = min(len(buffer), self._file.size - self._at)
        if length <= 0:
            return 0
        if self._ahead is not None and self._ahead[:2] == (self._at, length):
            content = self._ahead[2].result()
        else:
            content = self._folder.get_range(self._file.name, self._at, length)
        if content is None:
            raise FileNotFoundError(errno.ENOENT, "it is gone", self._file.name)
        buffer[: len(content)] = content
        self._at += len(content)
        self._ask_ahead(min(len(buffer), self._file.size - self._at))
        return len(content)

    def _ask_ahead(self, length: int) -> None:
        self._ahead = None
        if length > 0:
            asked = self._thread.submit(self._folder.get_range, self._file.name, self._at, length)
            self._ahead = self._at, length, asked

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        super().close()

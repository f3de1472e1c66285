"""The bytes of staged files, at locations: a path that all units see, or the URL of a file in HDFS or S3.

Invariants: a file is created once, by the attempt in its name; one in HDFS or S3 appears whole, when it is finished,
from a temporary file of this machine; a read gives the wanted bytes, or says that they are not there. A storage that is
away is asked again for `AWAY_TIMEOUT_S`, then `StorageUnavailable`.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from exactlyonce.checkpoint.records.storage_url import is_url, parts_of, storage_url
from exactlyonce.connectors.filestore.store import AWAY_TIMEOUT_S, FileStore, Retries, store_at
from exactlyonce.pipeline.errors import ConfigError

STAGING = "The staging folder"
BUFFER_BYTES = 1 << 20
END_BYTES = 1 << 16
"""The end of a file in HDFS or S3 is read at once: it has the directory, and often the entries."""
FOLDERS_KEPT = 4


def staging_at(staging: str | os.PathLike[str]) -> str:
    """*staging* in its one spelling: an absolute path, or a URL of HDFS or S3. ConfigError if it is neither.

    >>> staging_at("/shared/eo/"), staging_at("file:///shared/eo"), staging_at("S3://shop//staging/")
    ('/shared/eo', '/shared/eo', 's3://shop/staging')
    """
    text = os.fspath(staging)
    if not is_url(text):
        return str(Path(text).absolute())
    url = storage_url(text, "--staging")
    scheme, _, path = parts_of(url)
    return f"/{path}" if scheme == "file" else url


@lru_cache(FOLDERS_KEPT)
def folder_at(url: str) -> FileStore:
    """The folder *url* in HDFS or S3, whose connection all units of this process share."""
    base, _, inner = url.rpartition("/")
    return store_at(base, inner, STAGING)


def created(location: str) -> WritableFile:
    """A new file; OSError, or our errors of a storage."""
    return _StoredNewFile(location) if is_url(location) else _LocalNewFile(location)


def opened(location: str, size: int) -> ReadableFile:
    """The file at *location*, which has *size* bytes. OSError unless it is there, and whole."""
    return _StoredReadFile(location, size) if is_url(location) else _LocalReadFile(location, size)


def put(url: str, content: bytes) -> None:
    """Write a small file at *url* in HDFS or S3."""
    folder, name = _place(url)
    Retries(AWAY_TIMEOUT_S)(lambda: folder.put(name, content, _aside(name)))


def _place(url: str) -> tuple[FileStore, str]:
    folder, _, name = url.rpartition("/")
    return folder_at(folder), name


def _aside(name: str) -> str:
    """A temporary name with the beginning of *name*, by which its command removes it."""
    return f"{name}.aside-{secrets.token_hex(8)}"


class _LocalNewFile:
    def __init__(self, path: str) -> None:
        file = open(path, "xb", BUFFER_BYTES)  # noqa: SIM115 - it stays open
        self.write, self.finish = file.write, file.close


class _StoredNewFile:
    def __init__(self, url: str) -> None:
        self._folder, self._name = _place(url)
        self._spool: Any = tempfile.TemporaryFile(buffering=BUFFER_BYTES)  # noqa: SIM115 - it stays open

    def write(self, data: bytes | bytearray) -> None:
        with _spooling():
            self._spool.write(data)

    def finish(self) -> None:
        with _spooling():
            self._spool.flush()
        with self._spool:
            Retries(AWAY_TIMEOUT_S)(lambda: self._folder.put(self._name, self._spool, _aside(self._name)))


@contextmanager
def _spooling() -> Iterator[None]:
    """Explain an error of this machine's disk."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"A staged file cannot be kept in {tempfile.gettempdir()} of this machine: {error.strerror}. It is written "
            f"there before it goes to the staging folder: make room, or let TMPDIR name another folder, on every "
            f"executor."
        ) from None


class _LocalReadFile:
    def __init__(self, path: str, size: int) -> None:
        self._file = open(path, "rb")  # noqa: SIM115 - it stays open
        self.close = self._file.close
        if (found := self._file.seek(0, os.SEEK_END)) != size:
            self.close()
            raise OSError(f"it has {found} bytes instead of {size}")

    def read(self, offset: int, length: int) -> bytes:
        self._file.seek(offset)
        return self._file.read(length)


class _StoredReadFile:
    def __init__(self, url: str, size: int) -> None:
        self._folder, self._name = _place(url)
        self._end_at = max(0, size - END_BYTES)
        self._end = self._range(self._end_at, size - self._end_at + 1)
        if self._end_at + len(self._end) != size:
            raise OSError(f"it does not have the {size} bytes that were written")

    def read(self, offset: int, length: int) -> bytes:
        if offset >= self._end_at:
            return self._end[offset - self._end_at : offset - self._end_at + length]
        return self._range(offset, length) if length else b""

    def _range(self, offset: int, length: int) -> bytes:
        data = Retries(AWAY_TIMEOUT_S)(lambda: self._folder.get_range(self._name, offset, length))
        if data is None:
            raise FileNotFoundError(2, os.strerror(2))
        return data

    def close(self) -> None:
        self._end = b""


WritableFile = _LocalNewFile | _StoredNewFile
ReadableFile = _LocalReadFile | _StoredReadFile

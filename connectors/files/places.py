"""The folder of a source, by a seam: what files there are, which version, and their bytes.

Invariant: a version that is found again has the same bytes. No call writes anything.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, NamedTuple, Protocol

from exactlyonce.pipeline.errors import ConfigError, StorageUnavailable


class FoundFile(NamedTuple):
    """A file, as a listing shows it."""

    name: str
    """Its path below the folder, with slashes."""
    size: int
    version: str
    """Changes with its bytes; without spaces. It begins with the size and a "-"."""
    time_ms: int
    """When it was written."""


class Place(Protocol):
    """A folder, which calls may wait for. They raise `ConfigError`, or `StorageUnavailable` if a retry may help."""

    @property
    def url(self) -> str:
        """Its name for people and checkpoints, without secrets; it has a colon."""

    def files(self) -> Iterator[FoundFile]:
        """Every file below it whose path has no part that begins with a dot or an underscore."""

    def look(self, name: str) -> FoundFile | None:
        """One file; None: it is not there."""

    def open(self, file: FoundFile) -> BinaryIO:
        """Its bytes, from the first on; it can be sought in. FileNotFoundError if it is not there any more."""


def is_hidden(part: str) -> bool:
    """Whether a file or folder named *part* is left out: it may not be whole yet.

    >>> is_hidden("_temporary"), is_hidden("orders.csv")
    (True, False)
    """
    return part.startswith((".", "_"))


class LocalPlace:
    """A folder of this machine, or of one that is mounted."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.url = f"file:{path}"

    def files(self) -> Iterator[FoundFile]:
        with self._explained():
            if not os.path.isdir(self._path):
                raise ConfigError(f"Folder {self._path} does not exist. Create it, or correct the path of the source.")
            yield from self._below("")

    def _below(self, folder: str) -> Iterator[FoundFile]:
        with os.scandir(os.path.join(self._path, folder)) as entries:
            for entry in entries:
                name = f"{folder}/{entry.name}" if folder else entry.name
                if is_hidden(entry.name):
                    continue
                try:
                    if entry.is_dir():
                        yield from self._below(name)
                    else:
                        yield _found(name, entry.stat())
                except FileNotFoundError:  # removed since it was listed
                    continue

    def look(self, name: str) -> FoundFile | None:
        with self._explained():
            try:
                return _found(name, os.stat(os.path.join(self._path, name)))
            except FileNotFoundError:
                return None

    def open(self, file: FoundFile) -> BinaryIO:
        return open(os.path.join(self._path, file.name), "rb")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except PermissionError as error:
            raise ConfigError(f"{error.filename} cannot be read: this user has no right to. Give it one.") from error
        except OSError as error:
            raise StorageUnavailable(f"{self._path} cannot be read: {error}.") from error


def _found(name: str, status: os.stat_result) -> FoundFile:
    return FoundFile(name, status.st_size, f"{status.st_size}-{status.st_mtime_ns}", status.st_mtime_ns // 1_000_000)

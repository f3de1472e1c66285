"""Files in a local folder, or in a mounted one that several machines share.

Invariant: a file gets its name by a rename, after its bytes are durable, and the name is durable when `put` returns. An
existing file of the name has the same bytes: an earlier attempt of the same process put it, and lost its answer.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from exactlyonce.connectors.blocks.folder import STORAGE, StoredFile
from exactlyonce.pipeline.errors import ConfigError, StorageUnavailable

_REFUSED = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR, errno.EISDIR),
    *(errno.ENAMETOOLONG, errno.ELOOP),
}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_PROBE = "probe"


class LocalFolder:
    """The `Folder` *inner*, created below *root*, which exists unless *makes_root*. Errors begin with *what*."""

    def __init__(self, root: Path, inner: str, what: str = STORAGE, *, makes_root: bool = False) -> None:
        self._root, self._makes_root = root, makes_root
        self._path = root / inner
        self.url = f"file://{self._path}"
        self._what, self._named = what, f"{what} {self.url}"

    def check(self) -> None:
        if not (self._makes_root or self._root.is_dir()):
            raise ConfigError(f"{self._what} file://{self._root} does not exist: create the folder, or mount it.")
        with self._explained():
            missing = [folder for folder in (self._root, *self._root.parents) if not folder.exists()]
            below = len(self._path.relative_to(self._root).parts)
            for folder in reversed([self._path, *self._path.parents][: below + len(missing)]):
                folder.mkdir(exist_ok=True)
                _sync(folder.parent)
            probe = self._path / f"{_PROBE}-{os.getpid()}-{os.urandom(4).hex()}"
            try:
                _write(probe, b"probe")
            finally:
                with suppress(FileNotFoundError):
                    probe.unlink()

    def put(self, name: str, content: bytes, aside: str) -> None:
        self._put(name, content, aside)

    def put_file(self, name: str, file: BinaryIO, aside: str) -> None:
        file.seek(0)
        self._put(name, file, aside)

    def _put(self, name: str, content: bytes | BinaryIO, aside: str) -> None:
        temporary = self._path / aside
        with self._explained():
            try:
                _write(temporary, content)
                os.rename(temporary, self._path / name)
            except OSError:
                with suppress(OSError):  # else it is an orphan
                    temporary.unlink()
                raise
            _sync(self._path)

    def get(self, name: str) -> bytes | None:
        with self._explained(reading=name):
            try:
                return (self._path / name).read_bytes()
            except FileNotFoundError:
                self._require_mounted()
                return None

    def get_range(self, name: str, offset: int, length: int) -> bytes | None:
        with self._explained(reading=name):
            try:
                with open(self._path / name, "rb") as file:
                    file.seek(offset)
                    return file.read(length)
            except FileNotFoundError:
                self._require_mounted()
                return None

    def files(self) -> Iterator[StoredFile]:
        with self._explained():
            try:
                entries = list(os.scandir(self._path))
            except FileNotFoundError:
                self._require_mounted()
                return
            for entry in entries:
                with suppress(FileNotFoundError):
                    stat = entry.stat(follow_symlinks=False)
                    yield StoredFile(entry.name, stat.st_size, stat.st_mtime_ns // 1_000_000)

    def remove(self, names: Iterable[str]) -> None:
        with self._explained():
            self._require_mounted()
            for name in names:
                with suppress(FileNotFoundError):
                    (self._path / name).unlink()

    def remove_folder(self) -> bool:
        removed = False
        with self._explained(), suppress(FileNotFoundError):
            for folder in (self._path, *self._path.parents[: len(self._path.relative_to(self._root).parts) - 1]):
                try:
                    folder.rmdir()
                    removed = True
                except OSError as error:
                    if error.errno != errno.ENOTEMPTY:
                        raise
        return removed

    def _require_mounted(self) -> None:
        """Raise unless the storage is there: with it away, no file is lost."""
        if not self._root.is_dir():
            raise StorageUnavailable(f"{self._what} file://{self._root} does not exist: is it mounted?")

    @contextmanager
    def _explained(self, *, reading: str = "") -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if reading and error.errno in _REFUSED:
                raise ConfigError(
                    f"{self._named}/{reading} cannot be read: {error.strerror}. It must be a file that user "
                    f"{os.geteuid()} may read."
                ) from error
            if error.errno in _REFUSED:
                raise ConfigError(
                    f"{self._named} refuses: {error.strerror}. Give user {os.geteuid()} the right to write there, or "
                    f"name another folder."
                ) from error
            if error.errno in _FULL:
                raise StorageUnavailable(f"{self._named} is full: make room there.") from error
            raise StorageUnavailable(
                f"{self._named} does not answer: {error.strerror or type(error).__name__}."
            ) from error


def _write(path: Path, content: bytes | BinaryIO) -> None:
    """Write a new file durably."""
    with open(path, "xb") as file:
        if isinstance(content, bytes):
            file.write(content)
        else:
            shutil.copyfileobj(content, file)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Make the names in it durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

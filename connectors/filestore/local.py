"""Files in a folder of this machine, or in a mounted one that several machines share.

Invariant: a file gets its name by a rename that replaces nothing, after its bytes are durable; the name is durable when
the call returns. The store's own folder is created by `check` alone: a missing one may be a disk that is not mounted.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from exactlyonce.connectors.filestore.store import STORAGE, NewFile, RenamingStore, Retries, StoredFile, is_hidden
from exactlyonce.pipeline.errors import ConfigError, StorageUnavailable

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_NOT_SUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NO_RIGHT = {errno.EACCES, errno.EPERM}
_NOT_A_FOLDER = {errno.EEXIST, errno.ENOTDIR, errno.EISDIR}
_NEVER = {errno.ENAMETOOLONG, errno.ELOOP, errno.EMLINK, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
"""Other errors that another attempt would meet again."""
_UNREADABLE = {*_NO_RIGHT, *_NOT_A_FOLDER, errno.ENAMETOOLONG, errno.ELOOP}


class LocalStore(RenamingStore):
    """The `FileStore` *inner*, created below *root*, which exists unless *makes_root*. Errors begin with *what*."""

    _at_once = 1

    def __init__(self, root: Path, inner: str, what: str = STORAGE, *, makes_root: bool = False) -> None:
        self._root, self._path, self._makes_root = root, root / inner, makes_root
        self.url = f"file://{self._path}"
        self._what, self._named = what, f"{what} {self.url}"
        self._durable: set[Path] = set()
        """Folders whose names are durable: a name becomes so once, on its first use."""

    def check(self, folder: str = "") -> None:
        if not (self._makes_root or self._root.is_dir()):
            raise ConfigError(f"{self._what} file://{self._root} does not exist: create the folder, or mount it.")
        with self._explained(starting=True):
            there = next(around for around in (self._root, *self._root.parents) if around.exists())
            self._make(self._path / folder, there)
            probe = self._path / folder / f"probe-{os.getpid()}-{secrets.token_hex(4)}"
            try:
                _put(probe, b"probe", self._path / folder / f"aside-{secrets.token_hex(8)}")
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(probe)

    def _make(self, folder: Path, top: Path) -> None:
        """Create *folder*, and all between *top*, which must exist, and it; then all their names are durable."""
        if folder == top or (folder in self._durable and folder.is_dir()):
            return
        self._make(folder.parent, top)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)
        self._durable.add(folder)

    def make(self, folder: str) -> None:
        with self._explained():
            self._make(self._path / folder, self._path)

    def put(self, name: str, content: bytes | BinaryIO, aside: str) -> bool:
        temporary, final = self._path / aside, self._path / name
        with self._explained():
            for path in (final, temporary):
                self._make(path.parent, self._path)
            return _put(final, content, temporary)

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

    def look(self, name: str) -> StoredFile | None:
        with self._explained(reading=name):
            try:
                return _stored(name, os.stat(self._path / name))
            except (FileNotFoundError, NotADirectoryError):
                return None

    def open(self, file: StoredFile) -> BinaryIO:
        return open(self._path / file.name, "rb")

    def files(self) -> Iterator[StoredFile]:
        with self._explained():
            try:
                entries = list(os.scandir(self._path))
            except FileNotFoundError:
                self._require_mounted()
                return
            for entry in entries:
                with suppress(FileNotFoundError):
                    yield _stored(entry.name, entry.stat(follow_symlinks=False))

    def visible(self) -> Iterator[StoredFile]:
        if not self._path.is_dir():
            raise ConfigError(f"{self._named} does not exist: create the folder, or mount it.")
        with self._explained(reading="."):
            yield from self._below("")

    def _below(self, folder: str) -> Iterator[StoredFile]:
        with os.scandir(self._path / folder) as entries:
            for entry in entries:
                name = f"{folder}/{entry.name}" if folder else entry.name
                if is_hidden(entry.name):
                    continue
                try:
                    if entry.is_dir():
                        yield from self._below(name)
                    else:
                        yield _stored(name, entry.stat())
                except FileNotFoundError:  # removed since it was listed
                    continue

    def names_in(self, folder: str) -> list[str]:
        with self._explained():
            try:
                return os.listdir(self._path / folder)
            except FileNotFoundError:
                return []

    def remove(self, names: Iterable[str]) -> None:
        with self._explained():
            self._require_mounted()
            for name in names:
                with suppress(FileNotFoundError):
                    os.unlink(self._path / name)

    def remove_all(self, folder: str) -> None:
        """A file that is added meanwhile stays, with the folder."""
        self.remove([f"{folder}/{name}" for name in self.names_in(folder)])
        with self._explained():
            _remove_empty(self._path / folder)

    def remove_folder(self) -> bool:
        depth = len(self._path.relative_to(self._root).parts)
        with self._explained():
            removed = [_remove_empty(folder) for folder in (self._path, *self._path.parents)[:depth]]
        return any(removed)

    # --- a disk that may not be mounted

    def _require_mounted(self) -> None:
        """Raise unless the storage is there: with it away, no file is lost."""
        if not self._root.is_dir():
            raise StorageUnavailable(f"{self._what} file://{self._root} does not exist: is it mounted?")

    def require_there(self, folder: str) -> None:
        if not (self._path / folder).is_dir():
            raise StorageUnavailable(f"{self._named}/{folder} is not there: is its disk mounted?")

    def settle(self, folder: str) -> None:
        self.make(folder)
        with self._explained():
            _sync_folder(self._path / folder)

    def doubts(self) -> tuple[str, str]:
        path, problem = self._path, ""
        if not path.is_dir():
            if os.path.lexists(path) or not path.parent.is_dir():
                problem = f"{path} is not a folder, and cannot be made one: correct the path."
        elif not os.access(path, os.W_OK | os.X_OK):
            problem = f"{path} is not writable for this user: let its owner allow it, or run as another one."
        return problem, ""

    # --- files that wait to be published

    def create(self, at: str, staged: str, path: str, retries: Retries) -> NewFile:
        file = self._path / at / staged
        with self._explained():
            self._make(file.parent, self._path)
            return _LocalNewFile(self, staged, os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))

    def rename_new(self, old: str, new: str) -> bool:
        with self._explained():
            try:
                rename_new(self._path / old, self._path / new)
            except FileExistsError:
                return False
            except FileNotFoundError:
                if os.path.lexists(self._path / old):
                    raise  # the new name's folder is gone
                return False
        return True

    # --- errors

    @contextmanager
    def _explained(self, *, reading: str = "", starting: bool = False) -> Iterator[None]:
        """Raise `OSError`s as ours. *starting*: some are permanent then that a later retry may overcome."""
        try:
            yield
        except OSError as error:
            raise self._explanation(error, reading, starting=starting) from error

    def _explanation(self, error: OSError, reading: str, *, starting: bool) -> ConfigError | StorageUnavailable:
        code, path, user = error.errno, error.filename2 or error.filename or self._path, os.geteuid()
        if reading and code in _UNREADABLE:
            return ConfigError(
                f"{self._named}/{reading} cannot be read: {error.strerror}. It must be a file that user {user} may "
                f"read."
            )
        if code in _FULL:
            return StorageUnavailable(f"{self._named} is full: make room there.")
        if code in _NO_RIGHT:
            existing = next((folder for folder in (self._path, *self._path.parents) if folder.exists()), self._path)
            return ConfigError(
                f"{self._named}: there is no right to write {path}. Give user {user} the right to write in {existing}."
            )
        if code in _NOT_A_FOLDER:
            return ConfigError(
                f"{self._named}: {path} cannot be made, for a file is where a folder is needed, or the other way: move "
                f"it away."
            )
        if code == errno.ENOENT:
            if starting and error.filename and Path(error.filename).parent.is_dir():
                return ConfigError(
                    f"{self._named}: {error.filename} cannot be made, for the file system there does not let programs "
                    f"create folders: correct the path."
                )
            missing = error.filename if error.filename and not os.path.lexists(error.filename) else path
            return StorageUnavailable(
                f"{self._named}: {missing} is not there (any more): is its disk mounted, or does another program clean "
                f"it?"
            )
        if code == errno.EXDEV:
            return ConfigError(
                f"{self._named}: {path} is on another file system than {self._path}: all of the folder has to be on "
                f"one."
            )
        if code == errno.EROFS:
            kind = ConfigError if starting else StorageUnavailable
            return kind(f"{self._named} is read-only: mount it so that it can be written, or correct the path.")
        if code in _NEVER:
            return ConfigError(f"{self._named} refuses {path}: {error.strerror}. Name another folder.")
        return StorageUnavailable(f"{self._named} does not answer: {error.strerror or error}.")


class _LocalNewFile(NewFile):
    def __init__(self, store: LocalStore, staged: str, descriptor: int) -> None:
        super().__init__(staged)
        self._store, self._descriptor = store, descriptor

    def _put(self, part: bytes | memoryview) -> None:
        rest = memoryview(part)
        with self._store._explained():
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]

    def sync(self) -> None:
        with self._store._explained():
            os.fsync(self._descriptor)

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._descriptor)


def _stored(name: str, status: os.stat_result) -> StoredFile:
    return StoredFile(name, status.st_size, status.st_mtime_ns // 1_000_000, str(status.st_mtime_ns))


def _put(path: Path, content: bytes | BinaryIO, temporary: Path) -> bool:
    """Create *path* with *content*, durable and whole; False if it exists, which is durable then too."""
    created = False
    try:
        _write(temporary, content)
        with suppress(FileExistsError):
            rename_new(temporary, path)
            created = True
    finally:
        if not created:
            with suppress(OSError):  # else it is an orphan
                os.unlink(temporary)
    _sync_folder(path.parent)
    return created


def _write(path: Path, content: bytes | BinaryIO) -> None:
    """Write a new file durably."""
    with open(path, "xb") as file:
        if isinstance(content, bytes):
            file.write(content)
        else:
            content.seek(0)
            shutil.copyfileobj(content, file)
        file.flush()
        os.fsync(file.fileno())


def _remove_empty(folder: Path) -> bool:
    """Remove *folder* unless files are in it; False if they are, or it is gone."""
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
            raise
        return False
    return True


# --- names ------------------------------------------------------------------------------------------------------------


def rename_new(old: Path, new: Path) -> None:
    """Rename *old* to *new*, atomically if the file system can; FileExistsError if *new* exists."""
    if not _renameat2(old, new):
        link_new(old, new)


def link_new(old: Path, new: Path) -> None:
    """As `rename_new`, in two steps: in between, or after a crash, the file has both names."""
    try:
        os.link(old, new)
    except OSError as error:
        if error.errno != errno.EPERM:
            raise
        why = "it can neither rename without replacing nor link"
        raise OSError(errno.ENOTSUP, why, str(old), None, str(new)) from error
    os.unlink(old)


def _renameat2(old: Path, new: Path) -> bool:
    """Rename by renameat2; False if the system, the library or the file system lacks it."""
    function = getattr(_LIBC, "renameat2", None)
    if function is None:
        return False
    sys.audit("os.rename", str(old), str(new), -1, -1)  # as os.rename does
    if function(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), _RENAME_NOREPLACE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NOT_SUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(old), None, str(new))


_LIBC = ctypes.CDLL(None, use_errno=True)


# --- files that others write: a lake's library ------------------------------------------------------------------------


def local_path(address: str) -> Path | None:
    """The path that *address* names; None if it is no path.

    >>> str(local_path("/lake/a#b")), str(local_path("file:///lake")), local_path("s3://lake")
    ('/lake/a#b', '/lake', None)
    """
    if address.startswith("/"):
        return Path(address)
    parts = urlsplit(address)
    return Path(parts.path) if parts.scheme == "file" else None


def sync(files: Sequence[Path], top: Path) -> None:
    """Make *files* durable, and the names of their folders as far up as *top*, or as a folder that has *top* in it."""
    folders = set[Path]()
    for file in files:
        _sync(file, os.O_RDONLY)
        shared = os.path.commonpath([file, top])
        folders |= {folder for folder in file.parents if folder.is_relative_to(shared)}
    for folder in sorted(folders):
        _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    """Make the names in *folder* durable."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""The file system calls of a file sink: files that are created once, and folders that are durable.

Invariant: no call replaces an existing file.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from exactlyonce.pipeline.errors import StoreError, StoreUnavailable

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_NOT_SUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NO_RIGHT = {errno.EACCES, errno.EPERM}
_NEVER = {
    *(errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EXDEV, errno.ELOOP),
    *(errno.EMLINK, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS),
}
"""Errors that another attempt would meet again."""

# --- names ------------------------------------------------------------------------------------------------------------


def rename_new(old: Path, new: Path) -> None:
    """Rename *old* to *new*, atomically if the file system can; FileExistsError if *new* exists."""
    if not _renameat2(old, new):
        link_new(old, new)


def link_new(old: Path, new: Path) -> None:
    """As `rename_new`, in two steps: in between, or after a crash, the file has both names."""
    os.link(old, new)
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


def write_new(path: Path, content: bytes, temporary: Path) -> bool:
    """Create *path* with *content*, durable and whole; False if it exists, which is durable then too.

    The file is written next to *temporary*, on the same file system.
    """
    temporary = temporary.with_name(f"{temporary.name}-{secrets.token_hex(8)}")
    created = False
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            rename_new(temporary, path)
            created = True
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
    sync_folder(path.parent)
    return created


# --- folders ----------------------------------------------------------------------------------------------------------


def sync_folder(folder: Path) -> None:
    """Make the names in *folder* durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FolderTree:
    """Folders below *top*, which must exist. Each is made durable once, on its first use."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self._durable: set[Path] = set()

    def make(self, folder: Path) -> None:
        """Create *folder*, and all between *top* and it, unless they exist; then all their names are durable."""
        if folder == self.top or (folder in self._durable and folder.is_dir()):
            return
        self.make(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)
        self._durable.add(folder)


def names_in(folder: Path) -> list[str]:
    """The names in *folder*; none if it is missing."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def remove(folder: Path) -> None:
    """Remove a folder of files; a file that is added meanwhile stays, with the folder."""
    for name in names_in(folder):
        with suppress(FileNotFoundError):
            os.unlink(folder / name)
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
            raise


# --- errors -----------------------------------------------------------------------------------------------------------


def explanation(error: OSError, target: Path) -> str:
    """A sentence about *error* below *target*: what happened, and what to do."""
    place = error.filename2 or error.filename or target
    code = error.errno
    if code in _FULL:
        return f"The disk of {target} is full, or its quota is used up: make room there."
    if code in _NO_RIGHT:
        existing = next((folder for folder in (target, *target.parents) if folder.exists()), target)
        return f"There is no right to write {place}: give user {os.geteuid()} the right to write in {existing}."
    if code == errno.EROFS:
        return f"The file system of {target} is read-only: mount it so that it can be written, or correct the path."
    if code == errno.ENOENT:
        missing = error.filename if error.filename and not os.path.lexists(error.filename) else place
        return f"{missing} is not there (any more): is the disk of {target} mounted, or does another program clean it?"
    if code in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
        return f"{place} cannot be made, for a file is where a folder is needed, or the other way: move it away."
    if code == errno.EXDEV:
        return f"{place} is on another file system than {target}: all of the folder has to be on one."
    if code == errno.ENAMETOOLONG:
        return f"{place}: File name too long: write to a folder with a shorter path."
    return f"{place}: {error.strerror or error}. Look at the disk of {target}, and in the system's log."


@contextmanager
def explained(target: Path, *, starting: bool = False) -> Iterator[None]:
    """Raise `OSError`s as `StoreError` or `StoreUnavailable`. *starting*: at the start of a run a read-only disk is an
    error, too."""
    try:
        yield
    except OSError as error:
        never = _NEVER | _NO_RIGHT | ({errno.EROFS} if starting else set())
        kind = StoreError if error.errno in never else StoreUnavailable
        raise kind(explanation(error, target)) from error


@contextmanager
def making() -> Iterator[None]:
    """Create folders within. `StoreError` if one cannot be created in an existing folder, as in /proc."""
    try:
        yield
    except FileNotFoundError as error:
        if not Path(error.filename).parent.is_dir():
            raise
        raise StoreError(
            f"{error.filename} cannot be made: the file system there does not let programs create folders. Correct the "
            f"path of the sink."
        ) from error

"""The `Place` in a folder of this machine, or a mounted one: files are published by rename.

<target>/.exactlyonce/<pipeline>.<sink>/
    staged/<writer>/<number>.<suffix>   files that wait
    temporary/                          files of the ledger that are being written
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from exactlyonce.pipeline.errors import StoreError, StoreUnavailable
from exactlyonce.sinks.files import folders
from exactlyonce.sinks.files.layout import HIDDEN, STAGED, TEMPORARY, WaitingFile, WriterId
from exactlyonce.sinks.files.place import WaitingFileGone, removed_from, taken

_READ_SIZE = 1 << 20


class LocalPlace:
    writes_to = "disk"

    def __init__(self, target: str, inner: str) -> None:
        """*inner* is the hidden folder, below *target*."""
        self.target, self.root = target, f"{target}/{inner}"
        self.cleaned_by = removed_from(target)
        self.suspicion = f"is the disk of {target} mounted? Another folder is in its place."
        self._target, self._root = Path(target), Path(target, inner)
        self._tree = folders.FolderTree(self._target)

    def explained(self, *, starting: bool = False) -> AbstractContextManager[None]:
        return folders.explained(self._target, starting=starting)

    def explanation(self, failure: BaseException) -> str | None:
        return folders.explanation(failure, self._target) if isinstance(failure, OSError) else None

    def give_up(self) -> None:
        """The system waits, not this place."""

    def check(self) -> None:
        target = self._target
        if not target.parent.is_dir():
            raise StoreError(
                f"{target} cannot be made: {target.parent} is missing, or is not a folder. Make it, or correct the "
                f"path of the sink."
            )
        if os.path.lexists(target) and not target.is_dir():
            raise StoreError(f"{target} is not a folder: move it away, or correct the path of the sink.")
        with folders.making():
            target.mkdir(exist_ok=True)
            folders.sync_folder(target.parent)
            for folder in (TEMPORARY, STAGED):
                self.make(folder)
        probe = target / f"{HIDDEN}-{secrets.token_hex(8)}"
        try:
            folders.write_new(probe, b"", self._root / TEMPORARY / "0-probe")
        finally:
            with suppress(FileNotFoundError):
                os.unlink(probe)

    def require_there(self) -> None:
        if not self._root.is_dir():
            raise StoreUnavailable(
                f"{self.root} is not there: is the disk of {self.target} mounted? The ledger and the files that wait "
                f"are in it."
            )

    def problem(self) -> str:
        target = self._target
        if not target.is_dir():
            if os.path.lexists(target) or not target.parent.is_dir():
                return f"{target} is not a folder, and cannot be made one: correct the path of the sink."
        elif not os.access(target, os.W_OK | os.X_OK):
            return f"{target} is not writable for this user: let its owner allow it, or run as another one."
        return ""

    def risk(self) -> str:
        return ""

    # --- the hidden folder

    def make(self, folder: str) -> None:
        self._tree.make(self._root / folder)

    def settle(self, folder: str) -> None:
        self.make(folder)
        folders.sync_folder(self._root / folder)

    def names_in(self, folder: str) -> list[str]:
        return folders.names_in(self._root / folder)

    def read(self, path: str) -> bytes | None:
        try:
            return (self._root / path).read_bytes()
        except FileNotFoundError:
            return None

    def written_at_ms(self, path: str) -> int | None:
        try:
            return os.stat(self._root / path).st_mtime_ns // 1_000_000
        except FileNotFoundError:
            return None

    def write_new(self, path: str, content: bytes, temporary: str) -> bool:
        self._tree.make((self._root / path).parent)
        return folders.write_new(self._root / path, content, self._root / TEMPORARY / temporary)

    def remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._root / path)

    def remove_folder(self, folder: str) -> None:
        folders.remove(self._root / folder)

    # --- staged files

    def begin(self, writer: WriterId) -> None:
        self.make(f"{STAGED}/{writer}")

    def new_file(self, writer: WriterId, number: int, folder: str, suffix: str) -> HashedFile:
        name = f"{writer}/{number}.{suffix}"
        return HashedFile(self._root / STAGED / name, name)

    def stage_list(self, path: str, content: bytes) -> None:
        listing = HashedFile(self._root / STAGED / path, path)
        listing.write(content)
        listing.sync()
        listing.close()
        folders.sync_folder((self._root / STAGED / path).parent)

    def drop_staged(self, writers: Sequence[str]) -> None:
        for writer in writers:
            self.remove_folder(f"{STAGED}/{writer}")

    # --- published files

    def waiting(self, files: Iterable[WaitingFile]) -> list[WaitingFile]:
        return [file for file in files if self._waits(file)]

    def _waits(self, file: WaitingFile) -> bool:
        """Look at the old name first: another process may rename it between two looks."""
        staged = self._staged(file)
        try:
            size = os.lstat(staged).st_size
        except FileNotFoundError:
            self._require_published(file)
            return False
        if os.path.lexists(self._final(file)):
            self._require_published(file)
            with suppress(FileNotFoundError):
                os.unlink(staged)  # `link_new` died before its second step
            return False
        if size != file.size:
            raise StoreError(
                f"{staged} has {size:,} bytes, and {file.size:,} were written: another program, or the disk, has "
                f"changed it."
            )
        return True

    def publish(self, files: Sequence[WaitingFile], waiting: Iterable[WaitingFile]) -> None:
        for file in files:
            self._tree.make(self._final(file).parent)
        for file in waiting:
            self._rename(file)
        for folder in {self._final(file).parent for file in files}:
            folders.sync_folder(folder)

    def _rename(self, file: WaitingFile) -> None:
        staged = self._staged(file)
        try:
            folders.rename_new(staged, self._final(file))
        except FileExistsError:
            self._require_published(file)
        except FileNotFoundError:
            if os.path.lexists(staged):
                raise  # the new name's folder is gone
            self._require_published(file)

    def _require_published(self, file: WaitingFile) -> None:
        """Raise `WaitingFileGone` if it is not published, `StoreError` if another file has its name."""
        final = self._final(file)
        try:
            same = os.lstat(final).st_size == file.size and _sha256(final) == file.sha256
        except FileNotFoundError:
            raise WaitingFileGone(self._staged(file)) from None
        if not same:
            raise taken(final)

    def _staged(self, file: WaitingFile) -> Path:
        return self._root / STAGED / file.staged

    def _final(self, file: WaitingFile) -> Path:
        return self._target / file.path


class HashedFile:
    """A file that is written sequentially, and its SHA-256."""

    def __init__(self, path: Path, name: str) -> None:
        """*name* is that below the staged files."""
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._name = name
        self.size = 0
        self._sha256 = hashlib.sha256()
        self.closed = False

    def write(self, content: Any) -> int:
        view = memoryview(content)
        rest = view
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        self._sha256.update(view)
        self.size += len(view)
        return len(view)

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Nothing is buffered."""

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            os.close(self._descriptor)

    def waiting(self, rows: int) -> WaitingFile:
        return WaitingFile(staged=self._name, path="", rows=rows, size=self.size, sha256=self._sha256.digest())


def _sha256(path: Path) -> bytes:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while part := file.read(_READ_SIZE):
            digest.update(part)
    return digest.digest()

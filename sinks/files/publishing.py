"""Publishing: staged files are renamed to the names under which readers find them.

Invariants: an existing name is never replaced, and its file counts as published only if size and SHA-256 are those of
the staged file; when `publish` returns, all names are durable. A repeated publication does what is left, wherever
another process is or has died.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from exactlyonce.pipeline.errors import StoreError
from exactlyonce.sinks.files import folders
from exactlyonce.sinks.files.layout import SinkFolder, StagedList, WaitingFile, decode_staged

_READ_SIZE = 1 << 20


class WaitingFileGone(Exception):
    """The staged file in the argument is neither there nor where it is to be published."""


class Publisher:
    """The publisher of one sink in one target."""

    def __init__(self, folder: SinkFolder) -> None:
        self._folder = folder
        self._tree = folders.FolderTree(folder.target)

    def listed(self, body: StagedList) -> tuple[WaitingFile, ...]:
        """The files of a committable."""
        path = self._folder.staged / body.path
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise WaitingFileGone(path) from None
        if hashlib.sha256(content).digest() != body.sha256:
            raise StoreError(f"{path} is not what was written there: another program, or the disk, has changed it.")
        return decode_staged(content)

    def forget(self, body: StagedList) -> None:
        """Remove the list of files that are published."""
        with suppress(FileNotFoundError):
            os.unlink(self._folder.staged / body.path)

    def waiting(self, files: Iterable[WaitingFile]) -> list[WaitingFile]:
        """The files still to be published. Raises if one cannot be; publishes none."""
        return [file for file in files if self._waits(file)]

    def _waits(self, file: WaitingFile) -> bool:
        """Look at the old name first: another process may rename it between two looks."""
        staged = self._folder.staged / file.staged
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

    def publish_all(self, body: StagedList, files: Sequence[WaitingFile]) -> None:
        """Publish the *files* of *body*, without the ledger."""
        self.publish(files, self.waiting(files))
        self.forget(body)

    def publish(self, files: Sequence[WaitingFile], waiting: Iterable[WaitingFile]) -> None:
        """Rename the *waiting* ones of *files*; then all are durable, whoever renamed them."""
        for file in files:
            self._tree.make(self._final(file).parent)
        for file in waiting:
            self._rename(file)
        for folder in {self._final(file).parent for file in files}:
            folders.sync_folder(folder)

    def _rename(self, file: WaitingFile) -> None:
        staged = self._folder.staged / file.staged
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
            raise WaitingFileGone(self._folder.staged / file.staged) from None
        if not same:
            raise StoreError(
                f"{final} exists, and is not the file that is to be published there: another program has created or "
                f"changed it. Nothing was overwritten: move it away, and run again."
            )

    def _final(self, file: WaitingFile) -> Path:
        return self._folder.target / file.path


def _sha256(path: Path) -> bytes:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while part := file.read(_READ_SIZE):
            digest.update(part)
    return digest.digest()

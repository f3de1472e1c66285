"""The committer of a file sink: it publishes staged files, and then writes their ledger entry.

Invariants: files are published by rename, never onto a name that exists; all files of a committable are checked before
the first is renamed, so a refusal changes nothing; the entry is written once all files are durable in their places.
Names are the committable's: a retry, also by a zombie, publishes the same names. A zombie has only decided
committables, for they reach a committer in a durable manifest.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.pipeline.errors import StoreError, StoreUnavailable
from exactlyonce.sinks.committer import CommitsBySubtask, SetAside, StoreView
from exactlyonce.sinks.files import folders
from exactlyonce.sinks.files.layout import (
    HIDDEN,
    KIND,
    LedgerFile,
    PublishedFile,
    SinkFolder,
    WaitingFile,
    WriterId,
    decode_body,
)
from exactlyonce.sinks.files.ledger import FileLedger
from exactlyonce.sinks.files.publishing import Publisher, WaitingFileGone
from exactlyonce.sinks.files.staging import remove_older
from exactlyonce.sinks.ledger import LedgerEntry


class FilesCommitter(CommitsBySubtask):
    """The committer of one sink. With *ledger_first*, a crash loses unpublished files, and nothing comes twice."""

    kind = KIND

    def __init__(self, folder: SinkFolder, *, ledger_first: bool = False) -> None:
        self._folder = folder
        self._ledger_first = ledger_first
        self._ledger = FileLedger(folder)
        self._publisher = Publisher(folder)

    @property
    def ledger(self) -> str:
        """See `Committer.ledger`: the folder also holds staged files."""
        return f"the folder {self._folder.root}"

    def check(self) -> None:
        """See `Committer`: make the folder if its parent exists, and write and rename a file in it."""
        target = self._folder.target
        with folders.explained(target, starting=True):
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
                for folder in (self._folder.temporary, self._folder.staged):
                    folders.FolderTree(target).make(folder)
            probe = target / f"{HIDDEN}-{secrets.token_hex(8)}"
            try:
                folders.write_new(probe, b"", self._folder.temporary / "0-probe")
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(probe)

    def fence(self, incarnation: int, origin: str) -> Mapping[int, int]:
        """See `Committer`. Removes nothing: the newest decided checkpoint may wait in old folders."""
        with folders.explained(self._folder.target):
            return self._ledger.fence(incarnation, origin)

    def commit_one(self, committable: StoreCommittable, incarnation: int, origin: str) -> bool:
        with folders.explained(self._folder.target):
            self._require_there()
            entry = LedgerEntry.of(self._folder.pipeline, self._folder.sink, committable, incarnation, origin)
            if not self._ledger.is_due(entry):
                return False
            try:
                return self._publish(committable, entry)
            except WaitingFileGone as gone:
                if not self._ledger.is_due(entry):
                    return False  # another process has published it, and readers may have moved its files
                raise StoreError(
                    f"{gone} was set aside for checkpoint {committable.checkpoint}, and is neither there nor where it "
                    f"is to be published: another program has removed it. Put it back if there is a copy, and keep "
                    f"clean-up programs out of {self._folder.target / HIDDEN}."
                ) from None

    def _require_there(self) -> None:
        if not self._folder.root.is_dir():
            raise StoreUnavailable(
                f"{self._folder.root} is not there: is the disk of {self._folder.target} mounted? The ledger and the "
                f"files that wait are in it."
            )

    def _publish(self, committable: StoreCommittable, entry: LedgerEntry) -> bool:
        body = decode_body(committable.body) if committable.body else None
        files = self._publisher.listed(body) if body is not None else ()
        waiting = self._publisher.waiting(files)
        written = _ledger_file(entry, committable.records, files)
        if self._ledger_first and not self._ledger.write(entry, written):
            return False
        self._publisher.publish(files, waiting)
        is_new = self._ledger_first or self._ledger.write(entry, written)
        if body is not None:
            self._publisher.forget(body)
        return is_new

    def clean(self, incarnation: int, attempt: int) -> None:
        """See `Committer`.

        No manifest will name what is removed: before the writers of an attempt are made, everything decided is
        committed, and nothing undecided is carried into a later attempt. A zombie removes only what is older than
        itself, which was committed before it began.
        """
        with folders.explained(self._folder.target):
            remove_older(self._folder, incarnation, attempt)
            for name in folders.names_in(self._folder.temporary):
                number = name.partition("-")[0]
                if number.isdecimal() and int(number) < incarnation:  # else the file is another program's
                    with suppress(FileNotFoundError):
                        os.unlink(self._folder.temporary / name)

    def look(self) -> StoreView | None:
        target, ledger = self._folder.target, self._ledger.read()
        with folders.explained(target):
            waiting = tuple(self._waiting())
        problem = ""
        if not target.is_dir():
            if os.path.lexists(target) or not target.parent.is_dir():
                problem = f"{target} is not a folder, and cannot be made one: correct the path of the sink."
        elif not os.access(target, os.W_OK | os.X_OK):
            problem = f"{target} is not writable for this user: let its owner allow it, or run as another one."
        return StoreView.of(ledger, waiting=waiting, problem=problem)

    def _waiting(self) -> Iterator[SetAside]:
        """The staged intervals, by the lists of their files."""
        for name in sorted(folders.names_in(self._folder.staged)):
            writer = WriterId.parsed(name)
            if writer is None:
                continue
            for listing in sorted(folders.names_in(self._folder.staged / name)):
                number, _, suffix = listing.rpartition(".")
                if suffix != "files":
                    continue
                with suppress(FileNotFoundError):  # published since
                    since_ms = os.stat(self._folder.staged / name / listing).st_mtime_ns // 1_000_000
                    yield SetAside(
                        name=f"{name}/{listing}", subtask=writer.subtask, incarnation=writer.incarnation,
                        attempt=writer.attempt, since_ms=since_ms,
                        checkpoint=int(number) if number.isdecimal() else None,
                    )  # fmt: skip

    def close(self) -> None:
        """There is no connection."""


def _ledger_file(entry: LedgerEntry, rows: int, files: Iterable[WaitingFile]) -> LedgerFile:
    published = [
        PublishedFile(path=file.path, rows=file.rows, size=file.size, sha256=file.sha256.hex()) for file in files
    ]
    return LedgerFile(
        pipeline=entry.pipeline, sink=entry.sink, subtask=entry.subtask, checkpoint=entry.checkpoint,
        incarnation=entry.incarnation, rows=rows, files=tuple(published),
    )  # fmt: skip

"""The committer of a file sink: staged files to their places, and the entry of the ledger behind them.

Invariants: files are published by rename, never onto a name that exists; all of a committable are looked at before the
first is renamed, so that what is refused changes nothing; the entry is written once all of its files are durable where
they belong. Names are the committable's, so whoever publishes it again, after a crash or as a zombie, publishes the
same names; and a zombie has only what was decided, for a committable reaches a committer in a durable manifest.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.pipeline.errors import StoreError, StoreUnavailable
from exactlyonce.sinks.committer import CommitsBySubtask, SetAside, StoreView
from exactlyonce.sinks.files import folders
from exactlyonce.sinks.files.layout import (
    HIDDEN,
    KIND,
    Entry,
    PublishedFile,
    SinkFolder,
    WaitingFile,
    WriterId,
    decode_body,
)
from exactlyonce.sinks.files.ledger import FileLedger
from exactlyonce.sinks.files.publishing import Publisher, WaitingFileGone
from exactlyonce.sinks.files.staging import remove_older
from exactlyonce.sinks.write_ahead.store import LedgerEntry


class FilesCommitter(CommitsBySubtask):
    """Of one sink. With *ledger_first*, a crash loses what is not published yet, and nothing comes twice."""

    kind = KIND

    def __init__(self, folder: SinkFolder, *, ledger_first: bool = False) -> None:
        self._folder = folder
        self._ledger_first = ledger_first
        self._ledger = FileLedger(folder)
        self._publisher = Publisher(folder)

    @property
    def ledger(self) -> str:
        """See `Committer.ledger`: beside the ledger lies what the sink has staged for this topic."""
        return f"the folder {self._folder.root}"

    def check(self) -> None:
        """Make the folder if what it lies in exists; `StoreError` unless files can be written and renamed in it."""
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
                for each in (self._folder.temporary, self._folder.staged):
                    folders.FolderTree(target).make(each)
            probe = target / f"{HIDDEN}-{secrets.token_hex(8)}"
            try:
                folders.write_new(probe, b"", self._folder.temporary / "0-probe")
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(probe)

    def fence(self, incarnation: int, origin: str) -> Mapping[int, int]:
        """See `Committer.fence`. It removes nothing: the newest decided checkpoint may be waiting in old folders."""
        with folders.explained(self._folder.target):
            return self._ledger.fence(incarnation, origin)

    def commit_one(self, committable: StoreCommittable, incarnation: int, origin: str) -> bool:
        """See `CommitsBySubtask`."""
        with folders.explained(self._folder.target):
            self._require_there()
            due = LedgerEntry.of(self._folder.pipeline, self._folder.sink, committable, incarnation, origin)
            if not self._ledger.is_due(due):
                return False
            try:
                return self._publish(committable, incarnation, origin)
            except WaitingFileGone as gone:
                if not self._ledger.is_due(due):
                    return False  # another process has published it meanwhile, and readers may have moved its files
                raise StoreError(
                    f"{gone} was set aside for checkpoint {committable.checkpoint}, and is neither there nor where it "
                    f"is to be published: another program has removed it. Put it back if there is a copy, and keep "
                    f"programs that clean out of {self._folder.target / HIDDEN}."
                ) from None

    def _require_there(self) -> None:
        if not self._folder.root.is_dir():
            raise StoreUnavailable(
                f"{self._folder.root} is not there: is the disk of {self._folder.target} mounted? The ledger and the "
                f"files that wait are in it."
            )

    def _publish(self, committable: StoreCommittable, incarnation: int, origin: str) -> bool:
        body = decode_body(committable.body) if committable.body else None
        files = self._publisher.listed(body) if body is not None else ()
        waiting = self._publisher.waiting(files)
        entry = self._entry(committable, incarnation, files)
        if self._ledger_first and not self._ledger.write(origin, entry):
            return False
        self._publisher.publish(files, waiting)
        written = self._ledger_first or self._ledger.write(origin, entry)
        if body is not None:
            self._publisher.forget(body)
        return written

    def _entry(self, committable: StoreCommittable, incarnation: int, files: tuple[WaitingFile, ...]) -> Entry:
        return Entry(
            pipeline=self._folder.pipeline,
            sink=self._folder.sink,
            subtask=committable.subtask,
            checkpoint=committable.checkpoint,
            incarnation=incarnation,
            rows=committable.records,
            files=tuple(
                PublishedFile(path=each.path, rows=each.rows, size=each.size, sha256=each.sha256.hex())
                for each in files
            ),
        )

    def clean(self, incarnation: int, attempt: int) -> None:
        """See `Committer.clean`.

        Nobody will ask for what is removed: the writers of an attempt are made after all that was decided before is
        committed, and what was not decided by then is never carried into a later attempt. A zombie that calls this
        removes what is older than itself: that was committed before it began.
        """
        with folders.explained(self._folder.target):
            remove_older(self._folder, incarnation, attempt)
            for name in folders.names_in(self._folder.temporary):
                number = name.partition("-")[0]
                if number.isdecimal() and int(number) < incarnation:  # else it is another program's
                    with suppress(FileNotFoundError):
                        os.unlink(self._folder.temporary / name)

    def look(self) -> StoreView | None:
        """See `Inspectable`."""
        target, ledger = self._folder.target, self._ledger.view()
        with folders.explained(target):
            waiting = tuple(self._waiting())
        problem = ""
        if not target.is_dir():
            if os.path.lexists(target) or not target.parent.is_dir():
                problem = f"{target} is not a folder, and cannot be made one: correct the path of the sink."
        elif not os.access(target, os.W_OK | os.X_OK):
            problem = f"{target} is not writable for this user: let its owner allow it, or run as another one."
        return replace(ledger, waiting=waiting, problem=problem)

    def _waiting(self) -> Iterator[SetAside]:
        """The lists of files of intervals; what no interval has ended yet is not among them."""
        for name in sorted(folders.names_in(self._folder.staged)):
            writer = WriterId.parsed(name)
            if writer is None:
                continue
            lists = [each for each in folders.names_in(self._folder.staged / name) if each.endswith(".files")]
            for each in sorted(lists):
                number = each.removesuffix(".files")
                with suppress(FileNotFoundError):  # it is published meanwhile
                    since_ms = os.stat(self._folder.staged / name / each).st_mtime_ns // 1_000_000
                    yield SetAside(
                        name=f"{name}/{each}", subtask=writer.subtask, incarnation=writer.incarnation,
                        attempt=writer.attempt, since_ms=since_ms,
                        checkpoint=int(number) if number.isdecimal() else None,
                    )  # fmt: skip

    def close(self) -> None:
        """Nothing is held."""

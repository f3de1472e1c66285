"""The committer of a file sink: it publishes staged files, and then writes their ledger entry.

Invariants: a file is published by one step, never onto a name that exists; all files of a committable are checked
before the first is published, so a refusal changes nothing; the entry is written once all files are durable in their
places. Names are the committable's: a retry, also by a zombie, publishes the same names. A zombie has only decided
committables, for they reach a committer in a durable manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.connectors.filestore.store import WaitingFile, WaitingFileGone
from exactlyonce.pipeline.errors import StoreError
from exactlyonce.sinks.committer import CommitsBySubtask, SetAside, StoreView
from exactlyonce.sinks.files.layout import (
    KIND,
    STAGED,
    TEMPORARY,
    LedgerFile,
    PublishedFile,
    WriterId,
    decode_body,
)
from exactlyonce.sinks.files.ledger import FileLedger
from exactlyonce.sinks.files.place import Place
from exactlyonce.sinks.files.staging import drop_older
from exactlyonce.sinks.ledger import LedgerEntry


class FilesCommitter(CommitsBySubtask):
    """The committer of one sink."""

    kind = KIND

    def __init__(self, place: Place, pipeline: str, sink: str) -> None:
        self._place, self._pipeline, self._sink = place, pipeline, sink
        self._ledger = FileLedger(place, pipeline, sink)

    @property
    def ledger(self) -> str:
        """See `Committer.ledger`: the folder also holds staged files."""
        return f"the folder {self._place.root}"

    def check(self) -> None:
        """See `Committer`: make the folder if its parent exists, and write and rename a file in it."""
        with self._place.explained():
            self._place.check()

    def fence(self, incarnation: int, origin: str) -> Mapping[int, int]:
        """See `Committer`. Removes nothing: the newest decided checkpoint may wait in old folders."""
        with self._place.explained():
            return self._ledger.fence(incarnation, origin)

    def commit_one(self, committable: StoreCommittable, incarnation: int, origin: str) -> bool:
        with self._place.explained():
            self._place.require_there()
            entry = LedgerEntry.of(self._pipeline, self._sink, committable, incarnation, origin)
            if not self._ledger.is_due(entry):
                return False
            try:
                return self._publish(committable, entry)
            except WaitingFileGone as gone:
                if not self._ledger.is_due(entry):
                    return False  # another process has published it, and readers may have moved its files
                raise StoreError(
                    f"{gone} was set aside for checkpoint {committable.checkpoint}, and is neither there nor where it "
                    f"is to be published: {self._place.store.removers} {self._place.target}."
                ) from None

    def _publish(self, committable: StoreCommittable, entry: LedgerEntry) -> bool:
        body = decode_body(committable.body) if committable.body else None
        files = self._place.listed(body) if body is not None else ()
        waiting = self._place.waiting(files)
        self._place.publish(files, waiting)
        is_new = self._ledger.write(entry, _ledger_file(entry, committable.records, files))
        if body is not None:
            self._place.forget(body)
        return is_new

    def clean(self, incarnation: int, attempt: int) -> None:
        """See `Committer`.

        No manifest will name what is removed: before the writers of an attempt are made, everything decided is
        committed, and nothing undecided is carried into a later attempt. A zombie removes only what is older than
        itself, which was committed before it began.
        """
        with self._place.explained():
            drop_older(self._place, incarnation, attempt)
            for name in self._place.names_in(TEMPORARY):
                number = name.partition("-")[0]
                if number.isdecimal() and int(number) < incarnation:  # else the file is another program's
                    self._place.remove(f"{TEMPORARY}/{name}")

    def look(self) -> StoreView | None:
        with self._place.explained():
            ledger, waiting = self._ledger.read(), tuple(self._waiting())
            problem, risk = self._place.store.doubts()
            return StoreView.of(ledger, waiting=waiting, problem=problem, risk=risk)

    def _waiting(self) -> Iterator[SetAside]:
        """The staged intervals, by the lists of their files."""
        for name in sorted(self._place.names_in(STAGED)):
            writer = WriterId.parsed(name)
            if writer is None:
                continue
            for listing in sorted(self._place.names_in(f"{STAGED}/{name}")):
                number, _, suffix = listing.rpartition(".")
                if suffix != "files":
                    continue
                since_ms = self._place.written_at_ms(f"{STAGED}/{name}/{listing}")
                if since_ms is not None:  # else published since
                    yield SetAside(
                        name=f"{name}/{listing}", subtask=writer.subtask, incarnation=writer.incarnation,
                        attempt=writer.attempt, since_ms=since_ms,
                        checkpoint=int(number) if number.isdecimal() else None,
                    )  # fmt: skip

    def close(self) -> None:
        """There is no connection that would have to be closed."""


def _ledger_file(entry: LedgerEntry, rows: int, files: Iterable[WaitingFile]) -> LedgerFile:
    published = [
        PublishedFile(path=file.path, rows=file.rows, size=file.size, sha256=file.sha256.hex()) for file in files
    ]
    return LedgerFile(
        pipeline=entry.pipeline, sink=entry.sink, subtask=entry.subtask, checkpoint=entry.checkpoint,
        incarnation=entry.incarnation, rows=rows, files=tuple(published),
    )  # fmt: skip

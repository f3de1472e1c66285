"""The committer of a file sink: it publishes staged files, and then writes their entry of the ledger.

Invariants: a file is published by one step, never onto a name that exists; all files of a committable are checked
before the first is published, so a refusal changes nothing; the entry is written once all files are durable in their
places. Names are the committable's: a retry, also by a zombie, publishes the same names. A zombie has only decided
committables, for they reach a committer in a durable manifest.

The ledger has one file for each entry, the highest of which is never removed. A subtask's checkpoint is the highest
that has an entry, so it only grows whoever writes; an entry is whole and durable once it has its name; a reader makes
an entry durable before it acts on it, for the writer may have died. Neither a file system nor an object store locks
anybody out: a zombie that has not seen the fence can still write, but only entries that were decided, and those are the
same. An entry is removed only after a higher one is durable: if a zombie writes it again, the checkpoint stays the
same, and none of its files wait.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.connectors.filestore.store import WaitingFile, WaitingFileGone
from exactlyonce.pipeline.errors import StoreError, StoreUnavailable
from exactlyonce.sinks.committer import CommitsBySubtask, SetAside, StoreView
from exactlyonce.sinks.files.layout import (
    FENCE,
    KIND,
    ORIGIN,
    STAGED,
    TEMPORARY,
    LedgerFile,
    PublishedFile,
    WriterId,
    decode_body,
    encode_entry,
    entry_path,
    ledger_folder,
    shard_folder,
)
from exactlyonce.sinks.files.place import Place
from exactlyonce.sinks.files.writer import drop_older
from exactlyonce.sinks.ledger import LedgerEntry, SinkLedger

SHARDS_KEPT = 10
"""Folders of a thousand checkpoints whose entries are kept for readers."""

_NUMBER = re.compile(r"\d+\Z")
_ENTRY = re.compile(r"(\d+)\.json\Z")


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


class FileLedger:
    """The ledger of one sink in one target."""

    def __init__(self, place: Place, pipeline: str, sink: str) -> None:
        self._place, self._pipeline, self._sink = place, pipeline, sink

    def fence(self, incarnation: int, origin: str) -> Mapping[int, int]:
        """See `Committer.fence`. An older incarnation begins no commit from now on."""
        place = self._place
        place.write_new(ORIGIN, origin.encode(), f"{incarnation}-origin")
        self._writer().fenced(self._pipeline, self._sink, incarnation, origin)
        place.write_new(f"{FENCE}/{incarnation}", b"", f"{incarnation}-fence")
        for older in self._incarnations():
            if older < incarnation:
                place.remove(f"{FENCE}/{older}")
        return self.read().fenced(self._pipeline, self._sink, incarnation, origin).checkpoints

    def read(self) -> SinkLedger:
        """The ledger, without any change."""
        writer = self._writer()
        if not writer.origin:
            return writer
        subtasks = sorted(map(int, filter(_NUMBER.match, self._place.names_in(ledger_folder(writer.origin)))))
        checkpoints = {subtask: self._checkpoint(writer.origin, subtask) for subtask in subtasks}
        return msgspec.structs.replace(writer, checkpoints=checkpoints)

    def _writer(self) -> SinkLedger:
        """The ledger without checkpoints."""
        origin = self._place.read(ORIGIN) or b""
        return SinkLedger(incarnation=max(self._incarnations(), default=0), origin=origin.decode())

    def _incarnations(self) -> list[int]:
        return [int(name) for name in self._place.names_in(FENCE) if _NUMBER.match(name)]

    def _checkpoint(self, origin: str, subtask: int) -> int:
        """The highest that has an entry; 0: there is none."""
        shards = f"{ledger_folder(origin)}/{subtask}"
        for shard in sorted(filter(_NUMBER.match, self._place.names_in(shards)), key=int, reverse=True):
            matches = map(_ENTRY.match, self._place.names_in(f"{shards}/{shard}"))
            if checkpoints := [int(match[1]) for match in matches if match]:
                return max(checkpoints)
        return 0

    def is_due(self, entry: LedgerEntry) -> bool:
        """See `LedgerEntry.is_due`; if it is not, the entry is durable. `StoreUnavailable` if this is not the folder
        that *entry*'s incarnation has fenced."""
        writer = self._writer()
        if writer.origin == entry.origin and writer.incarnation < entry.incarnation:
            raise StoreUnavailable(
                f"{self._place.root} lacks the mark of incarnation {entry.incarnation}, and is of one before: is its "
                f"disk mounted? Another folder is in its place, or it was put back from a backup."
            )
        checkpoint = self._checkpoint(entry.origin, entry.subtask)
        if entry.is_due(checkpoint=checkpoint, incarnation=writer.incarnation, origin=writer.origin):
            return True
        self._place.settle(shard_folder(entry.origin, entry.subtask, checkpoint))
        return False

    def write(self, entry: LedgerEntry, content: LedgerFile) -> bool:
        """Write *entry*, and remove old ones; False if it is there already."""
        path = entry_path(entry.origin, entry.subtask, entry.checkpoint)
        temporary = f"{entry.incarnation}-{entry.subtask}-{entry.checkpoint}"
        is_new = self._place.write_new(path, encode_entry(content), temporary)
        self._prune(shard_folder(entry.origin, entry.subtask, entry.checkpoint))
        return is_new

    def _prune(self, newest: str) -> None:
        """Remove the oldest thousand, if it lies far enough before *newest*, which has a durable entry."""
        shards, _, name = newest.rpartition("/")
        oldest = min(filter(_NUMBER.match, self._place.names_in(shards)), key=int, default=name)
        if int(oldest) <= int(name) - SHARDS_KEPT:
            self._place.remove_folder(f"{shards}/{oldest}")

"""The ledger of a file sink: one file for each entry, the highest of which is never removed.

Invariants: a subtask's checkpoint is the highest that has an entry, so it only grows whoever writes; an entry is whole
and durable once it has its name; a reader makes an entry durable before it acts on it, for the writer may have died.
Neither a file system nor an object store locks anybody out: a zombie that has not seen the fence can still write, but
only entries that were decided, and those are the same. An entry is removed only after a higher one is durable: if a
zombie writes it again, the checkpoint stays the same, and none of its files wait.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from exactlyonce.pipeline.errors import StoreUnavailable
from exactlyonce.sinks.files.layout import (
    FENCE,
    ORIGIN,
    LedgerFile,
    encode_entry,
    entry_path,
    ledger_folder,
    shard_folder,
)
from exactlyonce.sinks.files.place import Place
from exactlyonce.sinks.ledger import LedgerEntry, SinkLedger

SHARDS_KEPT = 10
"""Folders of a thousand checkpoints whose entries are kept for readers."""

_NUMBER = re.compile(r"\d+\Z")
_ENTRY = re.compile(r"(\d+)\.json\Z")


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

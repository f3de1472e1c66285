"""The ledger of a file sink: one file for each entry, the highest of which is never removed.

Invariants: a subtask's checkpoint is the highest that has an entry, so it only grows whoever writes; an entry is whole
and durable once it has its name; a reader makes an entry durable before it acts on it, for the writer may have died. A
plain file system locks nobody out: a zombie that has not seen the fence can still write, but only entries that were
decided, and those are the same. An entry is removed only after a higher one is durable: if a zombie writes it again,
the checkpoint stays the same, and none of its files wait.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from exactlyonce.pipeline.errors import StoreUnavailable
from exactlyonce.sinks.files import folders
from exactlyonce.sinks.files.layout import LedgerFile, SinkFolder, encode_entry
from exactlyonce.sinks.ledger import LedgerEntry, SinkLedger

SHARDS_KEPT = 10
"""Folders of a thousand checkpoints whose entries are kept for readers."""

_NUMBER = re.compile(r"\d+\Z")
_ENTRY = re.compile(r"(\d+)\.json\Z")


class FileLedger:
    """The ledger of one sink in one target."""

    def __init__(self, folder: SinkFolder) -> None:
        self._folder = folder
        self._tree = folders.FolderTree(folder.target)

    def fence(self, incarnation: int, origin: str) -> Mapping[int, int]:
        """See `Committer.fence`. An older incarnation begins no commit from now on."""
        folder = self._folder
        for path in (folder.temporary, folder.staged, folder.ledger(origin), folder.fence):
            self._tree.make(path)
        folders.write_new(folder.origin, origin.encode(), folder.temporary / f"{incarnation}-origin")
        self._writer().fenced(folder.pipeline, folder.sink, incarnation, origin)
        (folder.fence / str(incarnation)).touch()
        folders.sync_folder(folder.fence)
        for older in self._incarnations():
            if older < incarnation:
                with suppress(FileNotFoundError):
                    os.unlink(folder.fence / str(older))
        return self.read().fenced(folder.pipeline, folder.sink, incarnation, origin).checkpoints

    def read(self) -> SinkLedger:
        """The ledger, without any change."""
        writer = self._writer()
        if not writer.origin:
            return writer
        subtasks = sorted(map(int, filter(_NUMBER.match, folders.names_in(self._folder.ledger(writer.origin)))))
        checkpoints = {subtask: self._checkpoint(writer.origin, subtask) for subtask in subtasks}
        return msgspec.structs.replace(writer, checkpoints=checkpoints)

    def _writer(self) -> SinkLedger:
        """The ledger without checkpoints."""
        try:
            origin = self._folder.origin.read_text()
        except FileNotFoundError:
            origin = ""
        return SinkLedger(incarnation=max(self._incarnations(), default=0), origin=origin)

    def _incarnations(self) -> list[int]:
        return [int(name) for name in folders.names_in(self._folder.fence) if _NUMBER.match(name)]

    def _checkpoint(self, origin: str, subtask: int) -> int:
        """The highest that has an entry; 0: there is none."""
        shards = self._folder.ledger(origin) / str(subtask)
        for shard in sorted(filter(_NUMBER.match, folders.names_in(shards)), key=int, reverse=True):
            matches = map(_ENTRY.match, folders.names_in(shards / shard))
            if checkpoints := [int(match[1]) for match in matches if match]:
                return max(checkpoints)
        return 0

    def is_due(self, entry: LedgerEntry) -> bool:
        """See `LedgerEntry.is_due`; if it is not, the entry is durable. `StoreUnavailable` if this is not the folder
        that *entry*'s incarnation has fenced."""
        writer = self._writer()
        if writer.origin == entry.origin and writer.incarnation < entry.incarnation:
            raise StoreUnavailable(
                f"{self._folder.root} lacks the mark of incarnation {entry.incarnation}, and is of one "
                f"before: is the disk of {self._folder.target} mounted? Another folder is in its place."
            )
        checkpoint = self._checkpoint(entry.origin, entry.subtask)
        if entry.is_due(checkpoint=checkpoint, incarnation=writer.incarnation, origin=writer.origin):
            return True
        folder = self._folder.entry(entry.origin, entry.subtask, checkpoint).parent
        self._tree.make(folder)
        folders.sync_folder(folder)
        return False

    def write(self, entry: LedgerEntry, content: LedgerFile) -> bool:
        """Write *entry*, and remove old ones; False if it is there already."""
        path = self._folder.entry(entry.origin, entry.subtask, entry.checkpoint)
        self._tree.make(path.parent)
        temporary = self._folder.temporary / f"{entry.incarnation}-{entry.subtask}-{entry.checkpoint}"
        is_new = folders.write_new(path, encode_entry(content), temporary)
        self._prune(path.parent)
        return is_new

    def _prune(self, newest: Path) -> None:
        """Remove the oldest thousand, if it lies far enough before *newest*, which has a durable entry."""
        numbers = filter(_NUMBER.match, folders.names_in(newest.parent))
        oldest = min(numbers, key=int, default=newest.name)
        if int(oldest) <= int(newest.name) - SHARDS_KEPT:
            folders.remove(newest.parent / oldest)

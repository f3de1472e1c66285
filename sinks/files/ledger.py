"""The ledger of a file sink: names in folders, the highest of which is never taken away.

Invariants: the position of a subtask is the highest checkpoint that has an entry, so it only grows whoever writes; an
entry is whole and durable from the moment it has its name; what is found there is made durable before anything
follows from it, for who wrote it may have died before. A plain file system locks nobody out: an older coordinator that
does not see the fence yet can still write, but only the entries that were decided, and those are the same. An entry
goes only behind a higher one that is durable, so that nothing follows from it any more: if such a coordinator makes it
once more, the position is what it was, and none of its files are waiting.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from exactlyonce.pipeline.errors import StoreUnavailable
from exactlyonce.sinks.committer import StoreView
from exactlyonce.sinks.files import folders
from exactlyonce.sinks.files.layout import Entry, SinkFolder, encode_entry
from exactlyonce.sinks.write_ahead.store import LedgerEntry, require_writer

SHARDS_KEPT = 10
"""Folders of a thousand checkpoints, up to that of the newest, whose entries stay: for readers."""

_NUMBER = re.compile(r"\d+\Z")
_ENTRY = re.compile(r"(\d+)\.json\Z")


class FileLedger:
    """Of one sink in one target."""

    def __init__(self, folder: SinkFolder) -> None:
        self._folder = folder
        self._tree = folders.FolderTree(folder.target)

    def fence(self, incarnation: int, origin: str) -> Mapping[int, int]:
        """Let no older incarnation begin a commit; -> by subtask, its position. See `Committer.fence`."""
        folder = self._folder
        for each in (folder.temporary, folder.staged, folder.ledger(origin), folder.fence):
            self._tree.make(each)
        folders.write_new(folder.origin, origin.encode(), folder.temporary / f"{incarnation}-origin")
        self._require_writer(incarnation, origin)
        (folder.fence / str(incarnation)).touch()
        folders.sync_folder(folder.fence)
        for older in self._incarnations():
            if older < incarnation:
                with suppress(FileNotFoundError):
                    os.unlink(folder.fence / str(older))
        self._require_writer(incarnation, origin)
        names = filter(_NUMBER.match, folders.names_in(folder.ledger(origin)))
        return {subtask: self.position(origin, subtask) for subtask in sorted(map(int, names))}

    def _require_writer(self, incarnation: int, origin: str) -> None:
        folder, (begun_for, newest) = self._folder, self._writer()
        require_writer(folder.pipeline, folder.sink, incarnation, origin, newest=newest, begun_for=begun_for)

    def _writer(self) -> tuple[str, int]:
        """The checkpoint topic that it was begun for, "" for none, and the newest incarnation that has fenced."""
        try:
            begun_for = self._folder.origin.read_text()
        except FileNotFoundError:
            begun_for = ""
        return begun_for, max(self._incarnations(), default=0)

    def view(self) -> StoreView:
        """What is there, for whoever only looks."""
        begun_for, newest = self._writer()
        names = filter(_NUMBER.match, folders.names_in(self._folder.ledger(begun_for))) if begun_for else ()
        positions = {subtask: self.position(begun_for, subtask) for subtask in sorted(map(int, names))}
        return StoreView(incarnation=newest, origin=begun_for, ledger=positions)

    def _incarnations(self) -> list[int]:
        return [int(name) for name in folders.names_in(self._folder.fence) if _NUMBER.match(name)]

    def position(self, origin: str, subtask: int) -> int:
        """The highest checkpoint that has an entry; 0: there is none."""
        shards = self._folder.ledger(origin) / str(subtask)
        for shard in sorted(filter(_NUMBER.match, folders.names_in(shards)), key=int, reverse=True):
            matches = map(_ENTRY.match, folders.names_in(shards / shard))
            if found := [int(match[1]) for match in matches if match]:
                return max(found)
        return 0

    def is_due(self, entry: LedgerEntry) -> bool:
        """See `LedgerEntry.is_due`. Whoever finds that it is not finds that durable. `StoreUnavailable` where this is
        not the folder that was fenced: the incarnation that writes has left its name there."""
        begun_for, newest = self._writer()
        if begun_for == entry.origin and newest < entry.incarnation:
            raise StoreUnavailable(
                f"{self._folder.root} has not what incarnation {entry.incarnation} has written there, but is of one "
                f"before: is the disk of {self._folder.target} mounted? Another folder is in its place."
            )
        position = self.position(entry.origin, entry.subtask)
        if entry.is_due(checkpoint=position, incarnation=newest, origin=begun_for):
            return True
        folder = self._folder.entry(entry.origin, entry.subtask, position).parent
        self._tree.make(folder)
        folders.sync_folder(folder)
        return False

    def write(self, origin: str, entry: Entry) -> bool:
        """Write *entry*; False if there is one for its subtask and checkpoint. Old ones go then."""
        path = self._folder.entry(origin, entry.subtask, entry.checkpoint)
        self._tree.make(path.parent)
        temporary = self._folder.temporary / f"{entry.incarnation}-{entry.subtask}-{entry.checkpoint}"
        written = folders.write_new(path, encode_entry(entry), temporary)
        self._prune(path.parent)
        return written

    def _prune(self, newest: Path) -> None:
        """Remove the oldest thousand, if it lies far enough before *newest*, which has an entry that is durable."""
        numbers = filter(_NUMBER.match, folders.names_in(newest.parent))
        oldest = min(numbers, key=int, default=newest.name)
        if int(oldest) <= int(newest.name) - SHARDS_KEPT:
            folders.remove(newest.parent / oldest)

"""The ledger of a file sink: names that come to be once, in folders, and are never taken away.

Invariants: the position of a subtask is the highest checkpoint that has an entry, so it only grows whoever writes; an
entry is whole and durable from the moment it has its name; what is found there is made durable before anything
follows from it, for who wrote it may have died before. A plain file system locks nobody out: an older coordinator that
does not see the fence yet can still write, but only the entries that were decided, and those are the same.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress

from exactlyonce.checkpoint.commits.of_stores import ForeignLedger
from exactlyonce.pipeline.errors import Fenced
from exactlyonce.sinks.files import folders
from exactlyonce.sinks.files.layout import Entry, SinkFolder, encode_entry

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
        if not folders.write_new(folder.origin, origin.encode(), folder.temporary / f"{incarnation}-origin"):
            self.require_origin(origin)  # first, for incarnations of another topic are counted from 1 again
        self.require_not_fenced(incarnation)
        (folder.fence / str(incarnation)).touch()
        folders.sync_folder(folder.fence)
        for older in self._incarnations():
            if older < incarnation:
                with suppress(FileNotFoundError):
                    os.unlink(folder.fence / str(older))
        self.require_not_fenced(incarnation)
        names = filter(_NUMBER.match, folders.names_in(folder.ledger(origin)))
        return {subtask: self.position(origin, subtask) for subtask in sorted(map(int, names))}

    def require_origin(self, origin: str) -> None:
        """Raise `ForeignLedger` unless the ledger was begun for the checkpoint topic of that id."""
        try:
            found = self._folder.origin.read_text()
        except FileNotFoundError:
            found = ""
        if found != origin:
            raise ForeignLedger(found)

    def _incarnations(self) -> list[int]:
        return [int(name) for name in folders.names_in(self._folder.fence) if _NUMBER.match(name)]

    def require_not_fenced(self, incarnation: int) -> None:
        """Raise `Fenced` if a newer incarnation has raised the fence."""
        newest = max(self._incarnations(), default=0)
        if newest > incarnation:
            raise Fenced(
                f"Incarnation {newest} of pipeline {self._folder.pipeline!r} writes to {self._folder.target}; this is "
                f"incarnation {incarnation}, which has ended. Nothing is lost."
            )

    def position(self, origin: str, subtask: int) -> int:
        """The highest checkpoint that has an entry; 0: there is none."""
        shards = self._folder.ledger(origin) / str(subtask)
        for shard in sorted(filter(_NUMBER.match, folders.names_in(shards)), key=int, reverse=True):
            matches = map(_ENTRY.match, folders.names_in(shards / shard))
            if found := [int(match[1]) for match in matches if match]:
                return max(found)
        return 0

    def has(self, origin: str, subtask: int, checkpoint: int) -> bool:
        """Whether the position is *checkpoint*, or behind it; that is durable then."""
        position = self.position(origin, subtask)
        if position < checkpoint:
            return False
        folder = self._folder.entry(origin, subtask, position).parent
        self._tree.make(folder)
        folders.sync_folder(folder)
        return True

    def write(self, origin: str, entry: Entry) -> bool:
        """Write *entry*; False if there is one for its subtask and checkpoint."""
        path = self._folder.entry(origin, entry.subtask, entry.checkpoint)
        self._tree.make(path.parent)
        temporary = self._folder.temporary / f"{entry.incarnation}-{entry.subtask}-{entry.checkpoint}"
        return folders.write_new(path, encode_entry(entry), temporary)

"""The splits of a folder's files: each file, or part of a large one, has a number for good.

Invariants: a file that was found is never read in another version; one that has ended may be removed; new files get
numbers above all others, in the order of their names; no number is used again, whatever is forgotten.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.filestore.store import FileStore, StoredFile
from exactlyonce.pipeline.errors import ConfigError, Halt

NO_FILE = ""
"""The identity of a split without records: it keeps the highest number where the file that had it is forgotten."""
SPLITS_MAX = 10_000
"""Every checkpoint names every file that is in the folder."""


class FileSplit(NamedTuple):
    """The identity of a split: a part of one version of a file, from *begin* to *end* in bytes or row groups."""

    version: str
    begin: int
    end: int
    name: str

    @property
    def file_size(self) -> int:
        """The bytes of the whole file."""
        return int(self.version.partition("-")[0])

    def __str__(self) -> str:
        return f"{self.version} {self.begin}-{self.end} {self.name}"

    @classmethod
    def parse(cls, identity: str) -> FileSplit:
        """The split of an identity.

        >>> FileSplit.parse("70-1 0-70 2026/all orders.csv").name
        '2026/all orders.csv'
        """
        version, part, name = identity.split(" ", 2)
        begin, end = part.split("-")
        return cls(version, int(begin), int(end), name)


Parts = Callable[[StoredFile], Iterable[tuple[int, int]]]
"""The parts of a file that are read one by one: (begin, end) of each, adjacent."""


class FileFinder:
    """The `SplitFinder` of the files of *store* that match *pattern*; without *interval_s* it looks once."""

    def __init__(
        self,
        source: str,
        store: FileStore,
        url: str,
        place: str,
        pattern: str,
        parts: Parts,
        interval_s: float | None,
        *,
        forgets_removed: bool = False,
    ) -> None:
        """*url*: for people; *place*: as in its positions. *forgets_removed*: files that have ended and are gone may
        be left out of checkpoints."""
        self._source, self._store, self._url, self._place = source, store, url, place
        self._pattern, self._parts = pattern, parts
        self._interval_s, self._forgets_removed = interval_s, forgets_removed
        self._looked_s: float | None = None
        self._forgotten = dict[int, SourceOffset]()
        """The known splits whose file was gone at some look: another may have its name now."""

    def find(self, known: Sequence[SourceOffset]) -> list[SourceOffset]:
        if not self._is_due():
            return []
        files = {file.name: file for file in self._store.visible() if fnmatchcase(file.name, self._pattern)}
        number = max((position.partition for position in known), default=-1) + 1
        self._forgotten = {split.partition: split for split in known if split.partition in self._forgotten}
        known = [position for position in known if position.partition not in self._forgotten]
        there = self._checked(known, files)
        read = {split.name for split in there.values()}
        new = [files[name] for name in sorted(files.keys() - read)]
        identities = [str(split) for file in new for split in self._splits(file)]
        removed = dict[int, SourceOffset]()
        if self._forgets_removed:
            removed = {split.partition: split for split in known if split.ended and split.partition not in there}
            if not identities and (highest := removed.get(number - 1)) is not None:
                if highest.topic_id == NO_FILE:
                    del removed[number - 1]
                else:  # its number stays, and its name may come back
                    identities = [NO_FILE]
            self._forgotten |= removed
        if (count := len(known) - len(removed) + len(identities)) > SPLITS_MAX:
            raise ConfigError(
                f"Source {self._source!r}: {self._url} has had {count:,} files, or parts of them, "
                f"and a checkpoint has room for {SPLITS_MAX:,}. Write larger files; or remove those that were "
                f"read, and set forget_removed=True."
            )
        starts = (
            SourceOffset(self._source, self._place, identity, number, 0)
            for number, identity in enumerate(identities, number)
        )
        return [*self._forgotten.values(), *starts]

    def _is_due(self) -> bool:
        now_s = time.monotonic()
        if self._looked_s is not None and (self._interval_s is None or now_s - self._looked_s < self._interval_s):
            return False
        self._looked_s = now_s
        return True

    def _checked(self, known: Sequence[SourceOffset], files: dict[str, StoredFile]) -> dict[int, FileSplit]:
        """The splits of *known* that are there, none of which has changed; the others have ended."""
        there = {}
        for position in known:
            if position.topic_id == NO_FILE:
                continue
            split = FileSplit.parse(position.topic_id)
            file = files.get(split.name)
            if file is not None and file.version != split.version:
                raise changed(position, split)
            if file is None and not position.ended:
                raise gone(position, split)
            if file is not None:
                there[position.partition] = split
        return there

    def _splits(self, file: StoredFile) -> Iterator[FileSplit]:
        try:
            file.name.encode()
        except UnicodeEncodeError:
            raise ConfigError(
                f"Source {self._source!r}: the name of file {file.name!r} in {self._url} is not in UTF-8, so no "
                f"checkpoint can name it. Rename it."
            ) from None
        for begin, end in self._parts(file):
            yield FileSplit(file.version, begin, end, file.name)

    def close(self) -> None:
        """Nothing is connected."""


def changed(position: SourceOffset, split: FileSplit) -> Halt:
    return _halt(
        position,
        f"File {split.name!r} of {position.topic} was changed after source {position.source!r} had found it: a part of "
        f"it may have been read in the old version, and would be doubled or lost.",
        "restore it as it was; write files under a name that begins with a dot or an underscore, and rename them once "
        "they are whole",
    )


def gone(position: SourceOffset, split: FileSplit) -> Halt:
    return _halt(
        position,
        f"File {split.name!r} of {position.topic} is gone, and source {position.source!r} had read only "
        f"{position.offset} records of it.",
        "restore it with its time of modification; remove files only after a checkpoint has them as ended, which "
        "`exactlyonce checkpoints` shows",
    )


def _halt(position: SourceOffset, what: str, choices: str) -> Halt:
    return Halt(
        f"{what}\n  Choices: {choices}; or `exactlyonce reset` and recompute from what is there.",
        operator=position.source,
        topic=position.topic,
        partition=position.partition,
        offset=position.offset,
    )

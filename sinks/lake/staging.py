"""The names of what waits beside a table, and the sweep of what no commit will need.

    <folder>/<incarnation>-<attempt>-<subtask>-<token>.<interval>.<suffix>          an interval's list of its files
    <folder>/<incarnation>-<attempt>-<subtask>-<token>.<interval>.<number>.<suffix>  a part of the interval

The folder is one sink's. A part of suffix `begun` names data files, which lie elsewhere, and is durable before the
first of them is written; other parts are files of rows themselves.

Invariants: a committed interval has nothing in the folder once its checkpoint is finalized, for its commit is asked
for again until all of it is removed: parts first, then the list. So whatever an older attempt has left there was never
committed, and its data files are in no snapshot of the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from exactlyonce.sinks.files.layout import WriterId
from exactlyonce.sinks.files.staging import is_older

BEGUN = "begun"


def encode_begun(paths: Sequence[str]) -> bytes:
    """The content of a part of suffix `begun`: the data files that may be there."""
    return msgspec.json.encode(paths)


def decode_begun(content: bytes) -> list[str]:
    """The data files; none if a crash has cut *content* short: none of them was written then."""
    try:
        return msgspec.json.decode(content, type=list[str])
    except msgspec.DecodeError:
        return []


class StagedNames:
    """The names in the folder of one writer's intervals."""

    def __init__(self, folder: str, writer: WriterId) -> None:
        self._before = f"{folder}/{writer}"
        self._interval = 1
        self.parts = 0
        """Those of this interval."""

    def part(self, suffix: str) -> str:
        """The next part of this interval."""
        self.parts += 1
        return f"{self._before}.{self._interval}.{self.parts}.{suffix}"

    def end(self, suffix: str) -> tuple[str, int]:
        """End the interval; -> its list, and the number of its parts."""
        parts, self.parts, self._interval = self.parts, 0, self._interval + 1
        return f"{self._before}.{self._interval - 1}.{suffix}", parts


def parts_of(listing: str, parts: int, suffix: str) -> Iterator[str]:
    """The parts of the interval with this list."""
    stem = listing.rpartition(".")[0]
    return (f"{stem}.{number}.{suffix}" for number in range(1, parts + 1))


def left_over(names: Iterable[str], incarnation: int, attempt: int) -> Iterator[str]:
    """Those of *names*, in the folder, whose writers are of an older attempt; others are not ours.

    >>> list(left_over(["1-1-0-ab.1.json", "2-1-0-cd.1.json", "2-2-0-ef.1.json", "other"], 2, 2))
    ['1-1-0-ab.1.json', '2-1-0-cd.1.json']
    """
    for name in names:
        writer = WriterId.parsed(name.partition(".")[0])
        if writer is not None and is_older(writer, incarnation, attempt):
            yield name

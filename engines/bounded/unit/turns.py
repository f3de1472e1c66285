"""The readers of a unit's partitions, of which so many at most are open between two reads.

Invariants: whoever finds room stays open until its range is finished, and makes room then; all others are opened for a
read and closed after it, which costs them what was fetched ahead, and never a record: they go on where they stood.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors.source import SplitReader

OPEN_READERS_MAX = 64
"""Each is a client, with threads and some seven descriptors of its own."""


class ReaderInTurn:
    """A `SplitReader` of a range from *start* on; *open* makes one that begins anywhere in it.

    *staying* are those of the unit that stay open.
    """

    def __init__(
        self, start: SourceOffset, open: Callable[[SourceOffset], SplitReader], staying: set[ReaderInTurn]
    ) -> None:
        self._position, self._open, self._staying = start, open, staying
        self._reader: SplitReader | None = None

    def read(self, records_max: int) -> list[Any]:
        """The next records; none: the range is finished."""
        self._reader = self._reader or self._open(self._position)
        records = self._reader.read(records_max)
        if records and (self in self._staying or len(self._staying) < OPEN_READERS_MAX):
            self._staying.add(self)
        else:
            self.close()
        return records

    def position(self) -> SourceOffset:
        """Where it stands."""
        return self._position if self._reader is None else self._reader.position()

    def close(self) -> None:
        """Leave; may be called more than once."""
        self._staying.discard(self)
        if self._reader is not None:
            self._position = self._reader.position()
            self._reader.close()
            self._reader = None

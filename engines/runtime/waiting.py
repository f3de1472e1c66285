"""Records that wait for their time in memory, and are not in a table yet.

Most are due before the next barrier. There, their operator writes those that are left into its table: `settle`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection
from itertools import chain
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=tuple[Any, ...])

UNWRITTEN_MAX = 40_000
"""The most records that are in memory alone, and not in the table, but for those of a batch: a barrier waits until they
are written."""
_BUCKET_BITS = 8


def bucket_end(time: int) -> int:
    """The last ms of the bucket of *time*, which has about a quarter of a second.

    >>> bucket_end(0), bucket_end(255), bucket_end(256), bucket_end(-1)
    (255, 255, 511, -1)
    """
    return time | (1 << _BUCKET_BITS) - 1


class Waiting(Generic[T]):
    """Entries that begin with their time, in ms."""

    def __init__(self) -> None:
        self._buckets: dict[int, list[T]] = {}
        """By the end of the bucket; in order of arrival."""
        self._ends: list[int] = []
        """Ascending."""
        self._count = 0

    @property
    def too_many(self) -> bool:
        """Whether they are to be written before the next barrier."""
        return self._count > UNWRITTEN_MAX

    @property
    def last(self) -> list[int]:
        """The latest time, if there is any."""
        return [max(entry[0] for entry in self._buckets[end]) for end in self._ends[-1:]]

    def add(self, entries: Collection[T]) -> None:
        buckets, rest = self._buckets, (1 << _BUCKET_BITS) - 1
        for entry in entries:
            end = entry[0] | rest
            if end in buckets:
                buckets[end].append(entry)
            else:
                buckets[end] = [entry]
                insort(self._ends, end)
        self._count += len(entries)

    def ends(self, limit: int) -> list[int]:
        """The ends of the buckets that may have entries up to *limit*, each at most that."""
        return [min(end, limit) for end in self._ends[: bisect_right(self._ends, bucket_end(limit))]]

    def take(self, end: int) -> list[T]:
        """Take out the entries up to *end* of its bucket, in order of arrival."""
        bucket = bucket_end(end)
        entries = self._buckets.get(bucket, [])
        due = entries if end == bucket else [entry for entry in entries if entry[0] <= end]
        self._count -= len(due)
        if len(due) < len(entries):
            self._buckets[bucket] = [entry for entry in entries if entry[0] > end]
        elif entries:
            del self._buckets[bucket], self._ends[bisect_left(self._ends, bucket)]
        return due

    def take_all(self) -> list[T]:
        """Take out all entries; those of a bucket are in order of arrival."""
        entries = list(chain.from_iterable(self._buckets.values()))
        self._buckets, self._ends, self._count = {}, [], 0
        return entries

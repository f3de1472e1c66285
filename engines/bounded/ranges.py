"""The ranges that bounded work reads: exact ones of every partition, a large one in parts that follow each other.

Invariant: ranges name every partition of every source, empty ones as well, so that what comes out of them is a whole
Sn; the parts of a range are adjacent, in order, and together all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec


class Reading(msgspec.Struct, frozen=True):
    """Offsets [start, end) of one partition, as a source reads it."""

    source: str
    topic: str
    partition: int
    start: int
    end: int

    @property
    def length(self) -> int:
        """How many offsets; records at most, for some offsets are control markers or were never committed."""
        return self.end - self.start


def readings(
    topics: Mapping[str, str], starts: Mapping[str, Mapping[int, int]], ends: Mapping[str, Mapping[int, int]]
) -> tuple[Reading, ...]:
    """Every partition from where it stands to its end; both by source and partition, *topics* by source.

    A partition that already stands behind its end, or has none, is read no further.
    """
    return tuple(
        Reading(source, topics[source], partition, start, max(start, ends.get(source, {}).get(partition, start)))
        for source, offsets in sorted(starts.items())
        for partition, start in sorted(offsets.items())
    )


def parts(ranges: Sequence[Reading], records_max: int) -> Iterator[tuple[Reading, ...]]:
    """*ranges* in as many parts as it takes to have at most about *records_max* offsets in each.

    Every partition advances by the same share of its range, so that their records' times stay together.

    >>> [[(each.start, each.end) for each in part] for part in parts([Reading("s", "t", 0, 10, 15)], 2)]
    [[(10, 11)], [(11, 13)], [(13, 15)]]
    """
    count = max(1, -(-sum(each.length for each in ranges) // records_max))
    for number in range(count):
        yield tuple(
            msgspec.structs.replace(
                each,
                start=each.start + each.length * number // count,
                end=each.start + each.length * (number + 1) // count,
            )
            for each in ranges
        )

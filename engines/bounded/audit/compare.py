"""The comparison of what should be in a transaction with what readers see of it, record by record. Pure.

Invariants: equal sequences give no finding; every expected record that is not seen, and every seen one that is not
expected, is in exactly one finding; a record that is seen as often as expected, but elsewhere, is reordered, and as few
of those are named as explain the rest. Records that are equal to the last byte cannot be told apart, nor are they.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import NamedTuple

Headers = tuple[tuple[str, bytes | None], ...]
Origin = tuple[str, int, int]
"""Topic, partition and offset of an input record."""
GAP_PAIRS_MAX = 4_000_000
"""Where more pairs than this lie between two records that match, equal ones among them are not aligned any further."""

MISSING, DOUBLED, CHANGED, REORDERED, FOREIGN = KINDS = ("missing", "doubled", "changed", "reordered", "foreign")


class PlainRecord(NamedTuple):
    """What a reader gets, but for its place, and for its time where no function gives that."""

    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    timestamp_ms: int | None = None
    """None: not compared, for the sink's outputs have the time when they were written."""


class Expected(NamedTuple):
    """A record that the input gives."""

    record: PlainRecord
    origin: Origin | None


class Seen(NamedTuple):
    """A record that readers see."""

    record: PlainRecord
    offset: int


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    kind: str
    partition: int | None
    """None: of a missing record that the client would have distributed at random."""
    offset: int | None
    """Of the record that is seen; of a missing one, of what is seen before it, if anything is."""
    origin: Origin | None
    """The input record that it stems from; None for a foreign one."""
    expected: PlainRecord | None
    seen: PlainRecord | None


def compare(expected: Sequence[Expected], seen: Sequence[Seen], partition: int) -> list[Finding]:
    """What is wrong in one partition."""
    wanted, found = [each.record for each in expected], [each.record for each in seen]
    if wanted == found:
        return []
    anchors = list(_aligned(wanted, found))
    matched, shown = {i for i, _ in anchors}, {j for _, j in anchors}
    missing = [i for i in range(len(wanted)) if i not in matched]
    surplus = [j for j in range(len(found)) if j not in shown]
    finder = _Finder(expected, [(partition, each) for each in seen], anchors, partition)
    return finder.findings(missing, surplus)


def compare_dealt_out(expected: Sequence[Expected], seen: Mapping[int, Sequence[Seen]]) -> list[Finding]:
    """What is wrong with records that the client distributes at random to the partitions of *seen*.

    Within a partition their order counts, except that of records that occur more than once.
    """
    places: defaultdict[PlainRecord, deque[int]] = defaultdict(deque)
    for i, wanted in enumerate(expected):
        places[wanted.record].append(i)
    unique = {record for record, found in places.items() if len(found) == 1}
    flat: list[tuple[int, Seen]] = []
    missing, surplus = set(range(len(expected))), set[int]()
    for partition, lane in sorted(seen.items()):
        pairs, apart = [], []
        for each in lane:
            flat.append((partition, each))
            if not places[each.record]:
                surplus.add(len(flat) - 1)
            elif each.record in unique:
                pairs.append((places[each.record].popleft(), len(flat) - 1))
            else:
                apart.append((places[each.record].popleft(), len(flat) - 1))
        in_order = _increasing(pairs)
        missing.difference_update(i for i, _ in [*in_order, *apart])
        surplus.update({j for _, j in pairs} - {j for _, j in in_order})
    return _Finder(expected, flat, [], None).findings(missing, surplus)


class _Finder:
    """Makes findings of what is left when the anchors are taken out. Places are those of *expected* and *seen*."""

    def __init__(
        self,
        expected: Sequence[Expected],
        seen: Sequence[tuple[int, Seen]],
        anchors: Sequence[tuple[int, int]],
        partition: int | None,
    ) -> None:
        self._expected, self._seen, self._anchors, self._partition = expected, seen, anchors, partition

    def findings(self, missing: Iterable[int], surplus: Iterable[int]) -> list[Finding]:
        """Pair what is left: moved, then changed; the rest by itself."""
        missing, surplus = sorted(missing), sorted(surplus)
        found = [self._made(REORDERED, i, j) for i, j in self._pairs(missing, surplus, _whole)]
        origins: dict[PlainRecord, int] = {each.record: i for i, each in enumerate(self._expected)}
        for j in [j for j in surplus if self._seen[j][1].record in origins]:
            surplus.remove(j)
            found.append(self._made(DOUBLED, origins[self._seen[j][1].record], j))
        for same in (self._gap_and_key, self._gap):
            found += [self._made(CHANGED, i, j) for i, j in self._pairs(missing, surplus, same)]
        found += [self._made(MISSING, i, None) for i in missing]
        found += [self._made(FOREIGN, None, j) for j in surplus]
        return sorted(found, key=lambda each: (each.partition or 0, each.offset or 0, each.kind))

    def _pairs(
        self, missing: list[int], surplus: list[int], same: Callable[[PlainRecord, int], object]
    ) -> list[tuple[int, int]]:
        """Take out of both lists, in order, what agrees in *same* of a record and its gap."""
        waiting: defaultdict[object, deque[int]] = defaultdict(deque)
        for i in missing:
            waiting[same(self._expected[i].record, self._gap_of(i, 0))].append(i)
        pairs = []
        for j in surplus:
            queue = waiting[same(self._seen[j][1].record, self._gap_of(j, 1))]
            if queue:
                pairs.append((queue.popleft(), j))
        taken, given = {i for i, _ in pairs}, {j for _, j in pairs}
        missing[:] = [i for i in missing if i not in taken]
        surplus[:] = [j for j in surplus if j not in given]
        return pairs

    def _gap_of(self, place: int, side: int) -> int:
        """Between which anchors a place lies."""
        return bisect_left(self._anchors, place, key=lambda anchor: anchor[side])

    @staticmethod
    def _gap_and_key(record: PlainRecord, gap: int) -> object:
        return gap, record.key

    @staticmethod
    def _gap(record: PlainRecord, gap: int) -> object:
        return gap

    def _made(self, kind: str, i: int | None, j: int | None) -> Finding:
        expected = None if i is None else self._expected[i]
        partition, seen = (self._partition, None) if j is None else self._seen[j]
        offset = self._offset_before(i) if seen is None else seen.offset
        origin, wanted = (None, None) if expected is None else (expected.origin, expected.record)
        return Finding(kind, partition, offset, origin, wanted, None if seen is None else seen.record)

    def _offset_before(self, i: int | None) -> int | None:
        """Of the last record that matches, before place *i* of those expected."""
        gap = 0 if i is None else self._gap_of(i, 0)
        return self._seen[self._anchors[gap - 1][1]][1].offset if gap else None


def _whole(record: PlainRecord, gap: int) -> object:
    return record


def _aligned(wanted: Sequence[PlainRecord], found: Sequence[PlainRecord]) -> Iterator[tuple[int, int]]:
    """Places of equal records that come in the same order on both sides: many, if not provably the most."""
    first, (end_i, end_j) = 0, (len(wanted), len(found))
    while first < min(end_i, end_j) and wanted[first] == found[first]:
        yield first, first
        first += 1
    while min(end_i, end_j) > first and wanted[end_i - 1] == found[end_j - 1]:
        end_i, end_j = end_i - 1, end_j - 1
    last_i = last_j = first
    for i, j in [*_increasing(_unique_in_both(wanted, found, first, end_i, end_j)), (end_i, end_j)]:
        yield from _in_gap(wanted, found, (last_i, i), (last_j, j))
        if i < end_i:
            yield i, j
        last_i, last_j = i + 1, j + 1
    yield from zip(range(end_i, len(wanted)), range(end_j, len(found)), strict=True)


def _unique_in_both(
    wanted: Sequence[PlainRecord], found: Sequence[PlainRecord], first: int, end_i: int, end_j: int
) -> list[tuple[int, int]]:
    """(place, place) of the records that occur once on either side, by the first."""
    once = [
        {record for record, count in Counter(side).items() if count == 1}
        for side in (wanted[first:end_i], found[first:end_j])
    ]
    places = {found[j]: j for j in range(first, end_j)}
    return [(i, places[wanted[i]]) for i in range(first, end_i) if wanted[i] in once[0] and wanted[i] in once[1]]


def _increasing(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """A longest part of *pairs* that grows on both sides.

    >>> _increasing([(0, 1), (1, 0), (2, 2)])
    [(1, 0), (2, 2)]
    """
    ordered = sorted(pairs)
    tails: list[int] = []  # the least second number that a chain of each length can end with
    ends: list[int] = []
    before: list[int | None] = []
    for place, (_, j) in enumerate(ordered):
        at = bisect_left(tails, j)
        before.append(ends[at - 1] if at else None)
        if at == len(tails):
            tails.append(j)
            ends.append(place)
        else:
            tails[at], ends[at] = j, place
    chain, at_place = [], ends[-1] if ends else None
    while at_place is not None:
        chain.append(ordered[at_place])
        at_place = before[at_place]
    return chain[::-1]


def _in_gap(
    wanted: Sequence[PlainRecord], found: Sequence[PlainRecord], range_i: tuple[int, int], range_j: tuple[int, int]
) -> Iterator[tuple[int, int]]:
    """Equal records between two anchors, where it is not too much work."""
    (i, end_i), (j, end_j) = range_i, range_j
    if i >= end_i or j >= end_j or (end_i - i) * (end_j - j) > GAP_PAIRS_MAX:
        return
    matcher = SequenceMatcher(None, wanted[i:end_i], found[j:end_j], autojunk=False)
    for block in matcher.get_matching_blocks():
        yield from ((i + block.a + k, j + block.b + k) for k in range(block.size))

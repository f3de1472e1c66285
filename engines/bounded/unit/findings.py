"""The comparison of expected records with the records that readers see, one by one. Pure.

Invariants: equal sequences give no finding; every expected record that is not seen, and every seen one that is not
expected, is in exactly one finding; a record seen as often as expected, but elsewhere, is reordered, and the fewest
such records are named. Records that are equal to the last byte are not told apart.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import NamedTuple

Headers = tuple[tuple[str, bytes | None], ...]
Likeness = Callable[["PlainRecord", int], object]
"""A function of a record and its gap between anchors."""
Origin = tuple[str, int, int]
"""Topic, partition and offset of an input record."""
GAP_PAIRS_MAX = 4_000_000
"""With more pairs between two matching records, equal records among them are not aligned."""

SHOWN_BYTES_MAX = 200

MISSING, DOUBLED, CHANGED, REORDERED, FOREIGN = KINDS = ("missing", "doubled", "changed", "reordered", "foreign")


class PlainRecord(NamedTuple):
    """The compared part of a record."""

    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    timestamp_ms: int | None = None
    """None: not compared, because the sink's outputs have the time of their writing."""

    def __str__(self) -> str:
        """Key, value, headers and time, for people; long bytes are cut."""
        headers = f" headers {[*self.headers]!r}" if self.headers else ""
        time = "" if self.timestamp_ms is None else f" timestamp {self.timestamp_ms}"
        return f"key {_shown(self.key)} value {_shown(self.value)}{headers}{time}"


def _shown(data: bytes | None) -> str:
    text = repr(data)
    return text if data is None or len(text) <= SHOWN_BYTES_MAX else f"{text[:SHOWN_BYTES_MAX]}..."


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
    kind: str
    partition: int | None
    """None for a missing record that the client distributes at random."""
    offset: int | None
    """The offset of the seen record; for a missing one, that of the record seen before it, if any."""
    origin: Origin | None
    """The input record; None for a foreign one."""
    expected: PlainRecord | None
    seen: PlainRecord | None


def compare(expected: Sequence[Expected], seen: Sequence[Seen], partition: int) -> list[Finding]:
    """The findings in one partition."""
    left, right = [record for record, _ in expected], [record for record, _ in seen]
    if left == right:
        return []
    anchors = list(_aligned(left, right))
    matched_left, matched_right = {i for i, _ in anchors}, {j for _, j in anchors}
    missing = [i for i in range(len(left)) if i not in matched_left]
    surplus = [j for j in range(len(right)) if j not in matched_right]
    finder = _Finder(expected, [(partition, record) for record in seen], anchors, partition)
    return finder.findings(missing, surplus)


def compare_at_random(expected: Sequence[Expected], seen: Mapping[int, Sequence[Seen]]) -> list[Finding]:
    """The findings among records that the client distributes at random to the partitions of *seen*.

    Within a partition their order counts, except that of records that occur more than once.
    """
    places: defaultdict[PlainRecord, deque[int]] = defaultdict(deque)
    for i, (record, _) in enumerate(expected):
        places[record].append(i)
    unique = {record for record, indexes in places.items() if len(indexes) == 1}
    flat: list[tuple[int, Seen]] = []
    missing, surplus = set(range(len(expected))), set[int]()
    for partition, lane in sorted(seen.items()):
        pairs: list[tuple[int, int]] = []
        repeated: list[tuple[int, int]] = []
        for record_seen in lane:
            record = record_seen.record
            flat.append((partition, record_seen))
            if not places[record]:
                surplus.add(len(flat) - 1)
            else:
                (pairs if record in unique else repeated).append((places[record].popleft(), len(flat) - 1))
        in_order = _increasing(pairs)
        missing.difference_update(i for i, _ in [*in_order, *repeated])
        surplus.update({j for _, j in pairs} - {j for _, j in in_order})
    return _Finder(expected, flat, [], None).findings(missing, surplus)


class _Finder:
    """Makes findings of the records beside the anchors. Places are those of *expected* and *seen*."""

    def __init__(
        self,
        expected: Sequence[Expected],
        seen: Sequence[tuple[int, Seen]],
        anchors: Sequence[tuple[int, int]],
        partition: int | None,
    ) -> None:
        self._expected, self._seen, self._anchors, self._partition = expected, seen, anchors, partition

    def findings(self, missing: Iterable[int], surplus: Iterable[int]) -> list[Finding]:
        """Pair reordered records, then doubled and changed ones; the rest is missing or foreign."""
        missing, surplus = sorted(missing), sorted(surplus)
        findings = [
            self._finding(REORDERED, i, j) for i, j in self._pairs(missing, surplus, lambda record, gap: record)
        ]
        origins: dict[PlainRecord, int] = {record: i for i, (record, _) in enumerate(self._expected)}
        for j in [j for j in surplus if self._seen[j][1].record in origins]:
            surplus.remove(j)
            findings.append(self._finding(DOUBLED, origins[self._seen[j][1].record], j))
        likenesses: list[Likeness] = [lambda record, gap: (gap, record.key), lambda record, gap: gap]
        for likeness in likenesses:
            findings += [self._finding(CHANGED, i, j) for i, j in self._pairs(missing, surplus, likeness)]
        findings += [self._finding(MISSING, i, None) for i in missing]
        findings += [self._finding(FOREIGN, None, j) for j in surplus]
        return sorted(findings, key=lambda finding: (finding.partition or 0, finding.offset or 0, finding.kind))

    def _pairs(self, missing: list[int], surplus: list[int], likeness: Likeness) -> list[tuple[int, int]]:
        """Take out of both lists, in order, the records that agree in *likeness*."""
        waiting: defaultdict[object, deque[int]] = defaultdict(deque)
        for i in missing:
            waiting[likeness(self._expected[i].record, self._gap_of(i, 0))].append(i)
        pairs = []
        for j in surplus:
            queue = waiting[likeness(self._seen[j][1].record, self._gap_of(j, 1))]
            if queue:
                pairs.append((queue.popleft(), j))
        paired_missing, paired_surplus = {i for i, _ in pairs}, {j for _, j in pairs}
        missing[:] = [i for i in missing if i not in paired_missing]
        surplus[:] = [j for j in surplus if j not in paired_surplus]
        return pairs

    def _gap_of(self, place: int, side: int) -> int:
        """The number of the gap between anchors in which *place* lies."""
        return bisect_left(self._anchors, place, key=lambda anchor: anchor[side])

    def _finding(self, kind: str, i: int | None, j: int | None) -> Finding:
        expected = None if i is None else self._expected[i]
        partition, seen = (self._partition, None) if j is None else self._seen[j]
        offset = self._offset_before(i) if seen is None else seen.offset
        record, origin = (None, None) if expected is None else (expected.record, expected.origin)
        return Finding(kind, partition, offset, origin, record, None if seen is None else seen.record)

    def _offset_before(self, i: int | None) -> int | None:
        """The offset of the last matching record before place *i* of the expected ones."""
        gap = 0 if i is None else self._gap_of(i, 0)
        return self._seen[self._anchors[gap - 1][1]][1].offset if gap else None


def _aligned(left: Sequence[PlainRecord], right: Sequence[PlainRecord]) -> Iterator[tuple[int, int]]:
    """Places of equal records in the same order on both sides: many, if not provably the most."""
    first, (end_i, end_j) = 0, (len(left), len(right))
    while first < min(end_i, end_j) and left[first] == right[first]:
        yield first, first
        first += 1
    while min(end_i, end_j) > first and left[end_i - 1] == right[end_j - 1]:
        end_i, end_j = end_i - 1, end_j - 1
    last_i = last_j = first
    for i, j in [*_increasing(_unique_in_both(left, right, first, end_i, end_j)), (end_i, end_j)]:
        yield from _in_gap(left, right, (last_i, i), (last_j, j))
        if i < end_i:
            yield i, j
        last_i, last_j = i + 1, j + 1
    yield from zip(range(end_i, len(left)), range(end_j, len(right)), strict=True)


def _unique_in_both(
    left: Sequence[PlainRecord], right: Sequence[PlainRecord], first: int, end_i: int, end_j: int
) -> list[tuple[int, int]]:
    """The places on both sides of records that occur once on each, by the left one."""
    once = [
        {record for record, count in Counter(side).items() if count == 1}
        for side in (left[first:end_i], right[first:end_j])
    ]
    places = {right[j]: j for j in range(first, end_j)}
    return [(i, places[left[i]]) for i in range(first, end_i) if left[i] in once[0] and left[i] in once[1]]


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
    left: Sequence[PlainRecord], right: Sequence[PlainRecord], range_i: tuple[int, int], range_j: tuple[int, int]
) -> Iterator[tuple[int, int]]:
    """Equal records between two anchors, unless these are too far apart."""
    (i, end_i), (j, end_j) = range_i, range_j
    if i >= end_i or j >= end_j or (end_i - i) * (end_j - j) > GAP_PAIRS_MAX:
        return
    matcher = SequenceMatcher(None, left[i:end_i], right[j:end_j], autojunk=False)
    for block in matcher.get_matching_blocks():
        yield from ((i + block.a + k, j + block.b + k) for k in range(block.size))

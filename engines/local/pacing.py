"""Reading in step (Flink: watermark alignment): splits, and sources whose records meet, go on together in event time.

What is far ahead of the rest would only wait as state for the watermark. So a subtask takes the records of the split
that is furthest behind first. A split whose records have not come yet is waited for by those that are more than
`max_drift` ahead of it, and by no one where it is at its end, idle, or has given nothing for `WAIT_MAX_S`. Sources that
reach one operator with event time wait for each other likewise: exactly within a worker, and by what the coordinator
passes on between workers. None of it decides what is late, or any result; what waits in a source is no state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from exactlyonce.engines.runtime.source_decoder import SourceTimes
from exactlyonce.pipeline.event_time import END_OF_TIME, NO_FLOOR, NO_WATERMARK

WAIT_MAX_S = 5.0
"""The time without any record for which a split, or a source, is waited for."""
_TURNS = 16
"""A batch is divided in about so many turns."""


@dataclass
class Group:
    """The sources of one worker whose records meet."""

    members: list[SourcePacing] = field(default_factory=list)
    _elsewhere_ms: int = END_OF_TIME
    _advance_ms: int = 0
    """How far that was from the value before it."""
    _heard_s: float = 0.0

    def hear(self, elsewhere_ms: int, now_s: float) -> None:
        """The lowest watermark of the sources of other workers that are waited for has become *elsewhere_ms*, another
        one than before; `END_OF_TIME`: there are none. One that stays is not told again, for a worker that is there
        but does not go on is waited for no longer than one that is silent: for `WAIT_MAX_S`."""
        known = NO_WATERMARK < self._elsewhere_ms < END_OF_TIME
        self._advance_ms = max(0, elsewhere_ms - self._elsewhere_ms) if known else 0
        self._elsewhere_ms, self._heard_s = elsewhere_ms, now_s

    def elsewhere_ms(self, now_s: float) -> int:
        """The estimated lowest watermark of other workers: the last report plus twice its last advance."""
        if now_s >= self._heard_s + WAIT_MAX_S:
            return END_OF_TIME
        return min(self._elsewhere_ms + 2 * self._advance_ms, END_OF_TIME)

    @property
    def lowest_ms(self) -> int:
        """The lowest watermark of those of this worker that others wait for; `END_OF_TIME`: there are none."""
        return min((member.reached for member in self.members if member.holds_back_sources), default=END_OF_TIME)


class _Lowest(NamedTuple):
    """The lowest watermark of a group, the worker that has it, and the lowest of the other workers."""

    ms: int = END_OF_TIME
    worker: int = -1
    of_others_ms: int = END_OF_TIME

    def elsewhere_ms(self, worker: int) -> int:
        return self.of_others_ms if worker == self.worker else self.ms


_NONE = (END_OF_TIME, -1)


class LowestWatermarks:
    """The lowest watermark of each group by worker, as the coordinator knows it; `END_OF_TIME`: nobody waits for it."""

    def __init__(self) -> None:
        self._by_group: dict[str, dict[int, int]] = {}
        self._lowest: dict[str, _Lowest] = {}
        """What the workers were told."""

    def report(self, worker: int, lowest_ms: Mapping[str, int], workers: Collection[int]) -> dict[int, dict[str, int]]:
        """Take what *worker* reports, by group. Returns what changes by it for each other one of *workers*: the lowest
        of all but itself, of these groups alone."""
        changes: dict[int, dict[str, int]] = {}
        for group in {*lowest_ms, *(group for group, known in self._by_group.items() if worker in known)}:
            known = self._by_group.setdefault(group, {})
            if (watermark := lowest_ms.get(group, END_OF_TIME)) == known.get(worker, END_OF_TIME):
                continue
            known[worker] = watermark
            before = self._lowest.get(group, _Lowest())
            (ms, first), (of_others_ms, _), *_ = [*sorted((ms, one) for one, ms in known.items()), _NONE, _NONE]
            lowest = self._lowest[group] = _Lowest(ms, first, of_others_ms)
            if lowest == before:
                continue
            for other in workers:
                if other != worker and (elsewhere_ms := lowest.elsewhere_ms(other)) != before.elsewhere_ms(other):
                    changes.setdefault(other, {})[group] = elsewhere_ms
        return changes


@dataclass
class SourcePacing:
    """Says how many records a subtask takes of each split of a source, and whether it takes any now."""

    times: SourceTimes
    max_drift_ms: int | None
    """None: waits for nobody."""
    now_s: Callable[[], float]
    group: Group = field(default_factory=Group)
    """Has it as a member."""

    def __post_init__(self) -> None:
        self._gave_s = self.now_s()
        """The last time when it gave a record, or was at its end."""
        self._has_more, self._has_kept = True, False
        self._missing_splits = set[int]()
        """The splits without a fetched record that are waited for."""
        self._fetched_splits = set[int]()
        """The splits with one."""
        self._missing_since_s: dict[int, float] = {}
        """The splits of which no fetched record is left, and since when."""
        self._ms_a_record: dict[int, float] = {}
        """The event time between two records, by split."""
        self._given: list[tuple[int, int, int]] = []
        """Split, records and floor before of the last batch."""

    # --- for other sources ----------------------------------------------------------------------------------------

    def rests(self) -> None:
        """It reads nothing here: nobody waits for it."""
        self._has_more = self._has_kept = False
        self._missing_splits = set()

    @property
    def holds_back_sources(self) -> bool:
        """Whether others may wait for it: records are known or may be on their way."""
        return (self._has_more or bool(self._missing_splits)) and self.now_s() < self._gave_s + WAIT_MAX_S

    @property
    def reached(self) -> int:
        """How far it is in event time: as its furthest split behind of those that have more records, whether or not the
        watermark waits for others, which may be empty."""
        splits = self._fetched_splits | self._missing_splits
        return max(self.times.watermark, min(map(self.times.floor_of, splits))) if splits else self.times.reached

    @property
    def waits_for_sources(self) -> bool:
        """Whether it is too far ahead of other sources to take records."""
        drift_ms, own_ms = self.max_drift_ms, self.reached
        return drift_ms is not None and (
            own_ms > self.group.elsewhere_ms(self.now_s()) + drift_ms
            or any(
                own_ms > other.reached + (0 if other._has_more else drift_ms)
                for other in self.group.members
                if other is not self and other.holds_back_sources
            )
        )

    def took(self, records: int, asked: int) -> None:
        """It has taken *records* of *asked*."""
        self._has_more = self._has_kept or records == asked
        if records or not self._missing_splits:
            self._gave_s = self.now_s()

    # --- its splits -----------------------------------------------------------------------------------------------

    def divide(self, fetched: Mapping[int, int], missing: Collection[int], records_max: int) -> list[tuple[int, int]]:
        """See `connectors.source.Divide`: the split that is furthest behind gives first."""
        self._learn()
        limit, floor_of = self._limit(missing), self.times.floor_of
        ahead = [(floor_of(split), split) for split in fetched]
        heapify(ahead)
        turn = max(1, records_max // _TURNS) if len(fetched) > 1 else records_max
        left, counts = records_max, dict[int, int]()
        while left and ahead and ahead[0][0] <= limit:
            time, split = ahead[0]
            taken = counts.get(split, 0)
            count = min(turn, left, fetched[split] - taken)
            counts[split], left = taken + count, left - count
            if time == NO_FLOOR or counts[split] == fetched[split]:
                heappop(ahead)
            elif (ms_a_record := self._ms_a_record.get(split)) is None:
                break  # the next batch knows how far it has come
            else:
                heapreplace(ahead, (time + int(ms_a_record * count), split))
        self._fetched_splits = {*fetched}
        self._given = [(split, count, floor_of(split)) for split, count in counts.items()]
        kept = (split for split in fetched if fetched[split] > counts.get(split, 0))
        self._has_kept = any(floor_of(split) <= limit for split in kept)
        return [*counts.items()]

    def _learn(self) -> None:
        """How dense the records of the last batch were."""
        for split, count, before in self._given:
            if before != NO_FLOOR:
                self._ms_a_record[split] = (self.times.floor_of(split) - before) / count
        self._given = []

    def _limit(self, missing: Collection[int]) -> int:
        """The floor above which a split waits for the *missing* ones."""
        now_s, since_s = self.now_s(), self._missing_since_s
        self._missing_since_s = {
            split: since_s.get(split, now_s) for split in missing if split not in self.times.resting
        }
        awaited = {split for split, since in self._missing_since_s.items() if now_s < since + WAIT_MAX_S}
        self._missing_splits = awaited
        if self.max_drift_ms is None or not awaited:
            return END_OF_TIME
        return min(map(self.times.floor_of, awaited)) + self.max_drift_ms

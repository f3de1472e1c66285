"""The event times of one source in one subtask: the floor of each split, late records, and the watermark.

The floor of a split is the greatest time before its next record, minus the disorder and 1 ms: a record is late if it is
older than that time by more than the disorder, so one of the same millisecond is not. Invariants: a floor never falls,
also over restarts, for `floor + 1` lies beside Sn; a record is late if its time is not above the floor before it,
whatever the batches are; the watermark is not above the floor of any later record. See docs/event-time.md.

A split that has had no record for a while is idle, and holds back nothing. Its floor follows the watermark. While all
are idle, the watermark follows the clock from the last record on. No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from exactlyonce.checkpoint.records.manifest import LATE_BELOW_LATEST, SourceOffset
from exactlyonce.engines.runtime.signals import Watermark
from exactlyonce.pipeline.durations import shown_duration
from exactlyonce.pipeline.errors import require_whole
from exactlyonce.pipeline.event_time import END_OF_TIME, NO_FLOOR, NO_WATERMARK
from exactlyonce.pipeline.moments import LATEST_MS, NoTime, ms_of, shown_time
from exactlyonce.pipeline.source import EventTime

Runs = Sequence[tuple[int, int]]
"""(split, count) of consecutive records."""
PAUSE_S = 1.0
"""The time without a look at idle splits after which the process may have been stopped, and its clients with it."""
_BLOCK_RECORDS = 100
"""The records whose times are looked at together: few, so that most blocks span less than the disorder."""


class SourceTimes:
    """The times of a source's records; *before* are the starts of its splits, those of other subtasks too."""

    def __init__(
        self, event_time: EventTime[Any], before: Iterable[SourceOffset] = (), rules: int = LATE_BELOW_LATEST
    ) -> None:
        """*rules* are those of the interval that is read; see `Manifest.rules`."""
        self._time = event_time.function
        self._idle_ms, self._ahead_ms = event_time.idle_ms, event_time.ahead_ms
        self._below_ms = int(rules >= LATE_BELOW_LATEST)
        """How far a floor lies below the number beside Sn."""
        self._behind_ms = event_time.disorder_ms + self._below_ms
        """How far a floor lies behind the greatest time."""
        self.floors = {
            start.partition: start.floor if start.floor == NO_FLOOR else start.floor - self._below_ms
            for start in before
        }
        self._lowest = min(self.floors.values(), default=NO_FLOOR)
        """The floor of a split that no checkpoint knows."""
        self.watermark = NO_WATERMARK
        """The last one."""
        self._told = Watermark(NO_WATERMARK)
        self._splits: list[int] = []
        """All that the subtask reads."""
        self._quiet_since_s: dict[int, float] = {}
        """The time since which each quiet split has had no record."""
        self._looked_s = 0.0
        """The time of the last look which splits are idle."""
        self._resting = set[int]()
        """The splits that hold back nothing: idle ones, and those that have ended."""
        self._raised: dict[int, int] = {}
        """The floors of splits that were idle, for the order log."""

    # --- records --------------------------------------------------------------------------------------------------

    def times(self, records: Sequence[Any], timestamps: Iterable[int]) -> list[int]:
        """The time of each of *records*; *timestamps* are those of their messages.

        Raises `NoTime` if one has no usable time, or what the user's function raises.
        """
        given = list(map(self._time, records))
        require_whole(given, len(records))
        if set(map(type, given)) != {int} or min(given) < 0 or max(given) > LATEST_MS:
            given = list(map(ms_of, given))
        ahead_ms = self._ahead_ms
        if given and ahead_ms is not None:
            stamps = list(timestamps)
            if max(given) > min(stamps) + ahead_ms:
                for time, stamp in zip(given, stamps, strict=True):
                    if stamp >= 0 and time > stamp + ahead_ms:
                        raise _ahead(time, stamp, ahead_ms)
        return given

    def late(self, times: Sequence[int], runs: Runs) -> list[int] | None:
        """The floors of a batch with these *times*; see `Batch.floors`. The floors of its splits rise."""
        floors: list[int] | None = None
        behind_ms, start = self._behind_ms, 0
        for split, count in runs:
            floor, end = self._wake(split), start + count
            for begin in range(start, end, _BLOCK_RECORDS):
                block = times[begin : min(begin + _BLOCK_RECORDS, end)]
                after = max(floor, max(block) - behind_ms)
                if min(block) <= after:
                    late = _late(block, floor, behind_ms)
                    if floors is None and any(each != NO_FLOOR for each in late):
                        floors = [NO_FLOOR] * len(times)
                    if floors is not None:
                        floors[begin : begin + len(block)] = late
                floor = after
            self.floors[split] = floor
            start = end
        return floors

    def _wake(self, split: int) -> int:
        """The floor of *split*, which is no longer idle."""
        self._quiet_since_s.pop(split, None)
        floor = self.floors[split] = self.floor_of(split)
        if split in self._resting:
            self._resting.remove(split)
            self._raised[split] = floor
        return floor

    def floor_of(self, split: int) -> int:
        floor = self.floors.get(split, self._lowest)
        return max(floor, self.watermark) if split in self._resting else floor

    def found(self, split: int) -> None:
        """*split* is read from now on. It begins at the watermark, so that this does not fall."""
        self.floors.setdefault(split, max(self._lowest, self.watermark))
        if split not in self._splits:
            self._splits.append(split)

    def take_raised(self) -> dict[int, int]:
        """The floors that idle splits had as they went on, since the last call."""
        raised, self._raised = self._raised, {}
        return raised

    def noted(self, position: SourceOffset) -> SourceOffset:
        """*position* with the floor of its split."""
        floor = self.floor_of(position.partition)
        return msgspec.structs.replace(position, floor=floor if floor == NO_FLOOR else floor + self._below_ms)

    # --- the watermark --------------------------------------------------------------------------------------------

    def unsure(self, quiet: Collection[int], now_s: float) -> Collection[int]:
        """Those of *quiet* whose servers must confirm before `rest` that they have no record: the splits that would
        become idle; after a pause of the process every one, for its client may not know yet what came meanwhile."""
        if self._idle_ms is None:
            return ()
        if now_s - self._looked_s > PAUSE_S:
            return quiet
        return self._silent(now_s).intersection(quiet) - self._resting

    def _silent(self, now_s: float) -> set[int]:
        """The splits that have been quiet for long enough to be idle."""
        idle_ms = self._idle_ms
        if idle_ms is None:
            return set()
        return {split for split, quiet_s in self._quiet_since_s.items() if 1000 * (now_s - quiet_s) >= idle_ms}

    def rest(
        self, positions: Sequence[SourceOffset], quiet: Collection[int], now_s: float, *, behind: bool,
        asked_s: float = 0.0,
    ) -> None:  # fmt: skip
        """Look which splits are idle at *now_s*. *positions* are those of all splits that the subtask reads; *quiet*
        splits have no record now. *behind*: since the last call, records waited all the time, or nothing was read: then
        no time counts, for what is there may not be known. The servers took *asked_s* from *now_s* on to confirm, which
        is no pause of the process, unless it is longer than they may take."""
        since_s, self._looked_s = self._quiet_since_s, now_s + min(asked_s, PAUSE_S)
        self._splits = [position.partition for position in positions]
        ended = {position.partition for position in positions if position.ended}
        for split in self._resting - ended - set(quiet):
            self._wake(split)
        self._quiet_since_s = {
            split: now_s if behind and split not in self._resting else since_s.get(split, now_s)
            for split in (*quiet, *ended)
        }
        self._resting |= ended | self._silent(now_s)

    def advanced(self, now_s: float) -> Watermark | None:
        """The watermark at *now_s*, if it is another one than the last."""
        splits = self._splits
        floors = [self.floors.get(split, self._lowest) for split in splits if split not in self._resting]
        idle = not floors
        if not idle:
            watermark = min(floors)
        else:
            watermark = max((self.floors.get(split, self._lowest) for split in splits), default=NO_WATERMARK)
            if watermark != NO_WATERMARK and self._idle_ms is not None:
                silent_ms = 1000 * (now_s - max(self._quiet_since_s.get(split, now_s) for split in splits))
                watermark += int(silent_ms) if silent_ms >= self._idle_ms else 0
        self.watermark = max(self.watermark, watermark)
        told = Watermark(self.watermark, idle)
        if told == self._told:
            return None
        self._told = told
        return told

    @property
    def slowest(self) -> int | None:
        """The split that holds the watermark back; None: none does."""
        active = [split for split in self._splits if split not in self._resting]
        return min(active, key=lambda split: self.floors.get(split, self._lowest), default=None)

    # --- along an order log ---------------------------------------------------------------------------------------

    def follow(self, watermark: Watermark, *, may_end: bool) -> bool:
        """Take the *watermark* that an earlier run had here; False if that is not what its records give. It may be
        higher if splits were idle or had ended, as they can with *may_end*, and at the end of a drained source."""
        floors = [self.floors.get(split, self._lowest) for split in self._splits]
        derived = max(self.watermark, min(floors, default=NO_WATERMARK))
        if watermark.value < END_OF_TIME:
            self.watermark = max(self.watermark, watermark.value)
        may_be_higher = may_end or watermark.idle or self._idle_ms is not None or watermark.value == END_OF_TIME
        return watermark.value >= derived if may_be_higher else watermark.value == derived

    def follow_floor(self, split: int, floor: int) -> None:
        """The next record of *split* had *floor* at least in an earlier run: it was idle before it."""
        self.floors[split] = max(self.floor_of(split), floor)


def _late(times: Sequence[int], floor: int, behind_ms: int) -> list[int]:
    """The floor of each late one of *times*, `NO_FLOOR` of the others; *floor* is that of the first.

    >>> _late([10, 7, 12, 9, 11], NO_FLOOR, 2) == [NO_FLOOR, 8, NO_FLOOR, 10, NO_FLOOR]
    True
    """
    greatest = accumulate(times, max, initial=floor + behind_ms)
    floors = (time - behind_ms for time in greatest)
    return [floor if time <= floor else NO_FLOOR for time, floor in zip(times, floors, strict=False)]


def _ahead(time: int, stamp: int, ahead_ms: int) -> NoTime:
    return NoTime(
        f"its time {shown_time(time)} is {shown_duration(time - stamp)} after the timestamp of its message, and "
        f"ahead= allows {shown_duration(ahead_ms)}: it would make all records after it late"
    )

"""Operators that hold records until no earlier one can come: `in_order`, and `deduplicate`.

Invariants: in order of time, the results are a function of the inputs: whether a record is held depends on its time and
floor alone, and held records are given once, by (time, key group, key, topic, partition, offset). What has expired
leaves no state, and no word about it in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import itemgetter
from typing import Any

from exactlyonce.engines.runtime.batch import Batch
from exactlyonce.engines.runtime.batch_codec import Coordinates, coordinates_of
from exactlyonce.engines.runtime.operators import chunks
from exactlyonce.engines.runtime.timed import Due, TimedOperator, TimedParts, slices
from exactlyonce.pipeline.ordering import Deduplicate, InOrder
from exactlyonce.pipeline.timed import Timed

Held = tuple[str, int, int, Any]
"""The topic, partition and offset of a record, and the record."""
held_turn = itemgetter(0, 1, 2)
"""By topic, partition and offset."""
Released = tuple[int, list[Held]]
"""A slot that is over, and the records to give."""


def hold(operator: TimedOperator[Any], batch: Batch, add: Callable[[Any, Held], Any]) -> None:
    """Keep the records of *batch* in the slots of their times, each by *add* to what is kept there of its key."""
    assert batch.times is not None
    assert batch.keys is not None
    held = list(zip(*coordinates_of(batch.origins), batch.records, strict=True))
    for chunk in chunks(len(held)):
        operator.table.update(add, batch.times[chunk], batch.keys[chunk], held[chunk])
        operator.activity.breathe()


@dataclass(slots=True)
class Sorter(TimedOperator[Released]):
    """`in_order`: an entry is a list of held records."""

    @classmethod
    def made(cls, parts: TimedParts) -> Sorter:
        return cls(*parts.shared)

    def __call__(self, batch: Batch) -> None:
        entered_s = self.activity.enter(self.id)
        self._take(self.in_time(batch))
        self.activity.leave(self.id, entered_s, len(batch.records))

    def _take(self, batch: Batch) -> None:
        hold(self, batch, self._with)

    def _due(self) -> Iterator[Due[Released]]:
        table = self.table
        slots = table.slots(self.watermark)
        if self.drains:  # what was given before is remembered in the next run
            while slots and not any(map(self._holds, table.groups(slots[-1]), repeat(slots[-1]))):
                slots.pop()
        for slot in slots:
            groups = table.groups(slot)
            for group in groups:
                keys, entries = table.read(slot, group)
                for some in slices(len(keys)):
                    held = self._over(slot, keys[some], entries[some])
                    yield Due(slot, len(held), (slot, held))
            table.drop(slot, groups)
        if slots:
            self._end(slots[-1])

    def _end(self, slot: int) -> None:
        """*slot* was the last of a firing."""

    def _give(self, results: Sequence[Released]) -> None:
        held = list(chain.from_iterable(held for _, held in results))
        times = list(chain.from_iterable(repeat(slot, len(held)) for slot, held in results))
        origins = [Coordinates(topic, partition, offset) for topic, partition, offset, _ in held]
        self.push(Batch([record for *_, record in held], origins, times=times))

    @staticmethod
    def _with(entry: list[Held] | None, held: Held) -> Any:
        if entry is None:
            return [held]
        entry.append(held)
        return entry

    def _holds(self, group: int, slot: int) -> bool:
        """Whether there are held records."""
        return True

    def _over(self, slot: int, keys: Sequence[bytes], entries: Sequence[Any]) -> list[Held]:
        """The records to give of a slot and key group that is over."""
        return [held for entry in entries for held in sorted(entry, key=held_turn)]


@dataclass(slots=True)
class Deduplicator(Sorter):
    """`deduplicate`: an entry is (time of a record that was given, or None; held records)."""

    spec: Deduplicate = field(kw_only=True)
    _given: dict[bytes, int] = field(default_factory=dict, init=False)
    """The time of the last record that this firing has given, by key. The table has it at the end of the firing."""

    @classmethod
    def made(cls, parts: TimedParts) -> Deduplicator:
        spec = parts.node.timed
        assert isinstance(spec, Deduplicate)
        class_ = cls if spec.order == "time" else ArrivalDeduplicator
        return class_(*parts.shared, spec=spec)

    @staticmethod
    def _with(entry: Any, held: Held) -> Any:
        if entry is None:
            return (None, [held])
        entry[1].append(held)
        return entry

    def _holds(self, group: int, slot: int) -> bool:
        return any(entry[1] for entry in self.table.read(slot, group)[1])

    def _over(self, slot: int, keys: Sequence[bytes], entries: Sequence[Any]) -> list[Held]:
        given: list[Held] = []
        for key, (_, held) in zip(keys, entries, strict=True):
            if held and not self._remembered(slot, key):
                given.append(min(held, key=held_turn))
                self._given[key] = slot
        return given

    def _end(self, slot: int) -> None:
        kept = [(end, key, time) for key, time in self._given.items() if (end := self.spec.slot(time)) > slot]
        self._given.clear()
        if kept:
            self.table.update(_remembering, *zip(*kept, strict=True))

    def _remembered(self, slot: int, key: bytes) -> bool:
        """Whether a record of *key* was given less than the time before *slot*."""
        if (given := self._given.get(key)) is not None:
            return slot - given < self.spec.within_ms
        entries = (self.table.get(end, key) for end in self.table.slots_of(key) if end >= slot)
        times = (entry[0] for entry in entries if entry is not None)
        return any(time is not None and slot - time < self.spec.within_ms for time in times)


def _remembering(entry: Any, time: int) -> Any:
    return (time, [] if entry is None else entry[1])


@dataclass(slots=True)
class ArrivalDeduplicator(Deduplicator):
    """`deduplicate` in order of arrival: an entry is the time of a record that was given."""

    def _take(self, batch: Batch) -> None:
        assert batch.times is not None
        assert batch.keys is not None
        within, table = self.spec.within_ms, self.table
        kept: list[bool] = []
        times: dict[bytes, list[int]] = {}
        for key, time in zip(batch.keys, batch.times, strict=True):
            if (before := times.get(key)) is None:
                entries = (table.get(end, key) for end in table.slots_of(key))
                before = times[key] = [entry for entry in entries if entry is not None]
            first = all(abs(time - other) >= within for other in before)
            kept.append(first)
            if first:
                before.append(time)
        given = batch.where(kept)
        assert given.times is not None
        assert given.keys is not None
        table.update(_latest, list(map(self.spec.slot, given.times)), given.keys, given.times)
        if given.records:
            self.push(given.unkeyed(given.records))

    def _holds(self, group: int, slot: int) -> bool:
        return False

    def _over(self, slot: int, keys: Sequence[bytes], entries: Sequence[Any]) -> list[Held]:
        return []


def _latest(entry: int | None, time: int) -> int:
    return time


OPERATORS: dict[type[Timed], type[Sorter]] = {InOrder: Sorter, Deduplicate: Deduplicator}

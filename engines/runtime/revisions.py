"""Windows with results before their end, and after it for late records.

Invariant: each result has the records that count up to its slot, whatever batches they came in and however the
watermark moved. So the number of a window's results, and each of them, are a function of the topics, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import compress
from typing import Any, cast

from exactlyonce.engines.runtime.batch import Batch
from exactlyonce.engines.runtime.timed_operators import Due, nothing_at
from exactlyonce.engines.runtime.window_operators import WindowOperator, WindowResults
from exactlyonce.pipeline.timed import Timed
from exactlyonce.pipeline.windows import Revised

Part = tuple[bytes, int, Any, tuple[int, Any] | None]
"""(key, last millisecond of a window, what is new in it, its result before that as a number and an accumulator)."""


@dataclass(slots=True)
class RevisedWindows(WindowOperator[Revised]):
    """A slot is the last millisecond before a result; see `Revised.slot` and `kept_state`.

    New records wait in the slot of the result that has them first. The last result of a window is kept in the slot in
    which its lateness ends.
    """

    def _accept(self, batch: Batch, *, right: bool) -> tuple[Batch, list[int]]:
        """*batch* without the records that no window takes, and the time since which each that is left counts."""
        assert batch.times is not None
        if not batch.times or self.are_in_time(batch, min(batch.times)):
            return batch, batch.times
        lateness, floors = self.window.lateness_ms, self.floors(batch)
        kept = [
            lasts[-1] + lateness > floor for lasts, floor in zip(self.window.lasts(batch.times), floors, strict=True)
        ]
        since = [max(time, floor + 1) for time, floor in zip(batch.times, floors, strict=True)]
        return self.without_late(batch, kept, right=right), list(compress(since, kept))

    def _add(self, batch: Batch, slots: list[int], given: Sequence[Any]) -> None:
        assert batch.keys is not None
        assert batch.times is not None
        window, lateness, add = self.window, self.window.lateness_ms, self._added
        places: list[int] = []
        into: list[int] = []
        parts: list[tuple[int, Any]] = []
        for place, (lasts, since) in enumerate(zip(window.lasts(batch.times), slots, strict=True)):
            for last in lasts:
                if since <= last + lateness:
                    places.append(place)
                    into.append(window.slot(last, since))
                    parts.append((last, given[place]))

        def added(entry: Any, part: tuple[int, Any]) -> Any:
            last, record = part
            if entry is None:
                return None, {last: add(None, record)}
            entry[1][last] = add(entry[1].get(last), record)
            return entry

        keys, origins = batch.keys, batch.origins
        self._update(added, into, [keys[place] for place in places], parts, lambda at: origins[places[at]])

    def _due(self) -> Iterator[Due[WindowResults]]:
        table, lateness = self.table, self.window.lateness_ms
        slots = table.slots(self.watermark)
        known = set(slots)
        while slots:
            slot = heappop(slots)
            for group in table.groups(slot):
                keys, entries = table.read(slot, group)
                parts: list[Part] = [
                    (key, last, part, given if last + lateness == slot else None)
                    for key, (given, new) in zip(keys, entries, strict=True)
                    for last, part in sorted(new.items())
                ]
                for some in self._steps(len(parts)):
                    results, ends = self._revised(slot, group, parts[some])
                    for end in ends.difference(known):
                        known.add(end)
                        heappush(slots, end)
                    of_next = parts[some.stop][0] if some.stop < len(parts) else b""
                    whole = results.keys[-1] != of_next
                    yield Due(slot, len(results.keys), results, len(results.keys), group, results.keys, whole)
                table.drop(slot, (group,))
            yield nothing_at(slot, 0)

    def _revised(self, slot: int, group: int, parts: Sequence[Part]) -> tuple[WindowResults, set[int]]:
        """The results of *parts*, which are kept for later ones; the slots up to the watermark that these are in."""
        table, window, clone = self.table, self.window, self.clone or _same
        revisions: list[int] = []
        states: list[Any] = []
        kept: list[tuple[int, bytes, tuple[int, Any]]] = []
        for key, last, part, given in parts:
            end = last + window.lateness_ms
            entry = table.get(end, key) if end > slot else None
            before = given if entry is None else cast("tuple[int, Any] | None", entry[0])
            count, state = before or (0, part)
            if before is not None:
                (state,) = self._merge([key], [clone(state)], [clone(part)], window.start(last), last)
            revisions.append(count)
            states.append(clone(state))
            if end > slot:
                kept.append((end, key, (count + 1, state)))
        ends = [end for end, *_ in kept]
        table.update(_given, ends, [key for _, key, _ in kept], [given for *_, given in kept])
        lasts = [last for _, last, *_ in parts]
        start = {last: window.start(last) for last in set(lasts)}.__getitem__
        results = WindowResults(group, slot, map(start, lasts), [key for key, *_ in parts], states, lasts, revisions)
        return results, {end for end in ends if end <= self.watermark}


def _same(state: Any) -> Any:
    return state


def _given(entry: Any, given: tuple[int, Any]) -> Any:
    return given, {} if entry is None else entry[1]


OPERATORS: dict[type[Timed], type[WindowOperator[Any]]] = {Revised: RevisedWindows}

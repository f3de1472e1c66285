"""The way of a record from produced to seen, in stages: where the time beyond the checkpoint interval went.

A checkpoint's oldest record waits longest. Its wait beyond the interval is the sum of these stages, from what the job
reports of each checkpoint (`--verbose`) and from what feeder and observer saw:

* fed: until the feeder knew that the broker has it;
* fetched: the time from then until the checkpoint before was triggered, which it came too late for;
* triggered late: the time between both triggers, less the interval;
* processed: from the trigger to the last acknowledgement, less the snapshot;
* flushed: the snapshot, the sink's flush in it;
* decided: from the last acknowledgement to the decision in the checkpoint topic;
* committed: from there to the answer to the last commit;
* read: from there until the observer had the first of its records;
* drained: from there until it had the last.

The first and the last stage are the feeder's and the observer's own time, which share the machine: they are told, and
not counted. A record is visible once a reader that has kept up gets it: when the first of its checkpoint are seen.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import NamedTuple

from figures import Figure
from job import Event, Failed

Batch = tuple[int, list[tuple[int, int]]]
"""Microseconds since 1970: when the observer saw it, and when its records were produced, oldest first, with their
numbers."""


class Deliveries:
    """How long records took to the broker, by one of each turn of the feeder."""

    def __init__(self, delivered: Sequence[tuple[int, float]]) -> None:
        """*delivered*: microseconds since 1970 when it was produced, and milliseconds."""
        by_time = sorted(map(tuple, delivered))
        self._produced_us = [produced_us for produced_us, _ in by_time]
        self._took_ms = [took_ms for _, took_ms in by_time]

    def took_ms(self, produced_us: int) -> float:
        """By the next one that was timed."""
        return self._took_ms[min(bisect.bisect_left(self._produced_us, produced_us), len(self._took_ms) - 1)]


class Stages(NamedTuple):
    """Milliseconds of one checkpoint; their sum is what its oldest record waited beyond the interval."""

    fed: float
    fetched: float
    triggered_late: float
    processed: float
    flushed: float
    decided: float
    committed: float
    read: float
    drained: float

    @property
    def counted(self) -> float:
        """Without the feeder's and the observer's own time."""
        return sum(self) - self.fed - self.drained


@dataclass
class _Seen:
    """The records of one checkpoint; milliseconds since 1970."""

    first: float
    """When the first of them were seen."""
    last: float
    produced: list[tuple[int, int]]
    """When they were produced; see `Batch`."""


def stages(events: list[Event], batches: list[Batch], deliveries: Deliveries, interval_ms: float) -> Iterator[Stages]:
    """The stages of each checkpoint with records."""
    complete = _complete(events)
    for number, seen in _seen({number: time["decided"] for number, time in complete.items()}, batches).items():
        if before := complete.get(number - 1):
            oldest_us, _ = min(seen.produced)
            time, fed = complete[number], deliveries.took_ms(oldest_us)
            yield Stages(
                fed=fed,
                fetched=before["triggered"] - oldest_us / 1000 - fed,
                triggered_late=time["triggered"] - before["triggered"] - interval_ms,
                processed=time["acknowledged"] - time["triggered"] - time["flushed"],
                flushed=time["flushed"],
                decided=time["decided"] - time["acknowledged"],
                committed=time["visible"] - time["decided"],
                read=seen.first - time["visible"],
                drained=seen.last - seen.first,
            )


def waits_ms(events: list[Event], batches: list[Batch], deliveries: Deliveries) -> Counter[float]:
    """How many records were visible how many milliseconds after the broker had them."""
    waits = Counter[float]()
    for seen in _seen({number: time["decided"] for number, time in _complete(events).items()}, batches).values():
        for produced_us, count in seen.produced:
            waits[round(seen.first - produced_us / 1000 - deliveries.took_ms(produced_us), 1)] += count
    return waits


def shared_by(waits: Counter[float], percent: int) -> float:
    """The wait of *percent* of the records, at most."""
    left = waits.total() * percent / 100
    for wait_ms in sorted(waits):
        left -= waits[wait_ms]
        if left <= 0:
            return wait_ms
    raise Failed("no record was seen after the warm-up")


def _complete(events: list[Event]) -> dict[int, dict[str, float]]:
    """The times of each checkpoint, by step."""
    times: dict[int, dict[str, float]] = defaultdict(dict)
    for event in events:
        if event["event"] == "checkpoint":
            times[event["checkpoint"]]["flushed"] = event["sync_ms"] + event["async_ms"]
        elif event.get("step") in ("triggered", "acknowledged", "decided"):
            times[event["checkpoint"]][event["step"]] = event["at_ms"]
        elif event.get("step") == "requests until finalized":
            times[event["checkpoint"]]["visible"] = event["at_ms"] - event["duration_ms"]
    return {number: time for number, time in times.items() if time.keys() >= {"triggered", "visible", "flushed"}}


def _seen(decided: dict[int, float], batches: list[Batch]) -> dict[int, _Seen]:
    """By checkpoint: the last one decided before a batch was seen is the one that made it visible."""
    numbers, at_ms = list(decided), list(decided.values())
    found: dict[int, _Seen] = {}
    for seen_us, produced in batches:
        position = bisect.bisect(at_ms, seen_us / 1000) - 1
        if position >= 0:
            now_ms = seen_us / 1000
            seen = found.setdefault(numbers[position], _Seen(now_ms, now_ms, []))
            seen.last = now_ms
            seen.produced += produced
    return found


def figures(budget: list[Stages]) -> Iterator[Figure]:
    """The 99th percentile of each stage over all checkpoints, and of the sum of those that count."""
    slowest = sorted(budget, key=lambda each: each.counted)[-max(1, len(budget) // 20) :]
    columns = dict(zip(Stages._fields, zip(*budget, strict=True), strict=True))
    of_slowest = dict(zip(Stages._fields, zip(*slowest, strict=True), strict=True))
    columns["counted"], of_slowest["counted"] = (tuple(each.counted for each in some) for some in (budget, slowest))
    for stage, times_ms in columns.items():
        detail = f"p50 {median(times_ms):.0f} ms; {mean(of_slowest[stage]):.0f} ms in the slowest 5 % of checkpoints"
        p99 = sorted(times_ms)[len(times_ms) * 99 // 100]
        yield Figure(f"visibility of a checkpoint's oldest record, {stage.replace('_', ' ')}", p99, "ms", detail)

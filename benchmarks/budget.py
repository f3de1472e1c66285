"""The way of a record from produced to seen, in stages: where the time beyond the checkpoint interval went.

A checkpoint's oldest record waits longest. Its wait beyond the interval is the sum of these stages, from what the job
reports of each checkpoint (`--verbose`) and from what the observer saw:

* fetched: its age when the checkpoint before was triggered, which it came too late for: it was on its way into the
  broker, out of it, or to the barrier;
* triggered late: the time between both triggers, less the interval;
* processed: from the trigger to the last acknowledgement, less the snapshot;
* flushed: the snapshot, the sink's flush in it;
* decided: from the last acknowledgement to the decision in the checkpoint topic;
* committed: from there to the answer to the last commit;
* read: from there until the observer had the last of its records.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import mean, median
from typing import NamedTuple

from figures import Figure
from job import Event

Batch = Sequence[int]
"""Microseconds since 1970: when the observer saw it, and when its oldest record was produced."""


class Stages(NamedTuple):
    """Milliseconds of one checkpoint; their sum is what its oldest record waited beyond the interval."""

    fetched: float
    triggered_late: float
    processed: float
    flushed: float
    decided: float
    committed: float
    read: float


class _Seen(NamedTuple):
    """Milliseconds since 1970."""

    last: float
    """When the last record of a checkpoint was seen."""
    oldest: float
    """When its oldest record was produced."""


def stages(events: list[Event], batches: list[Batch], interval_ms: float) -> Iterator[Stages]:
    """The stages of each checkpoint with records."""
    times: dict[int, dict[str, float]] = defaultdict(dict)
    for event in events:
        if event["event"] == "checkpoint":
            times[event["checkpoint"]]["flushed"] = event["sync_ms"] + event["async_ms"]
        elif event.get("step") in ("triggered", "acknowledged", "decided"):
            times[event["checkpoint"]][event["step"]] = event["at_ms"]
        elif event.get("step") == "requests until finalized":
            times[event["checkpoint"]]["visible"] = event["at_ms"] - event["duration_ms"]
    complete = {number: time for number, time in times.items() if time.keys() >= {"triggered", "visible", "flushed"}}
    for number, seen in _seen({number: time["decided"] for number, time in complete.items()}, batches).items():
        if before := complete.get(number - 1):
            time = complete[number]
            yield Stages(
                fetched=before["triggered"] - seen.oldest,
                triggered_late=time["triggered"] - before["triggered"] - interval_ms,
                processed=time["acknowledged"] - time["triggered"] - time["flushed"],
                flushed=time["flushed"],
                decided=time["decided"] - time["acknowledged"],
                committed=time["visible"] - time["decided"],
                read=seen.last - time["visible"],
            )


def _seen(decided: dict[int, float], batches: list[Batch]) -> dict[int, _Seen]:
    """By checkpoint: the last one decided before a batch was seen is the one that made it visible."""
    numbers, at_ms = list(decided), list(decided.values())
    found: dict[int, _Seen] = {}
    for seen_us, oldest_us in batches:
        position = bisect.bisect(at_ms, seen_us / 1000) - 1
        if position >= 0:
            number = numbers[position]
            oldest = min(oldest_us / 1000, found[number].oldest if number in found else math.inf)
            found[number] = _Seen(seen_us / 1000, oldest)
    return found


def figures(budget: list[Stages]) -> Iterator[Figure]:
    """The 99th percentile of each stage over all checkpoints, and of their sum."""
    slowest = sorted(budget, key=sum)[-max(1, len(budget) // 20) :]
    columns = dict(zip(Stages._fields, zip(*budget, strict=True), strict=True))
    of_slowest = dict(zip(Stages._fields, zip(*slowest, strict=True), strict=True))
    columns["all"], of_slowest["all"] = tuple(map(sum, budget)), tuple(map(sum, slowest))
    for stage, times_ms in columns.items():
        detail = f"p50 {median(times_ms):.0f} ms; {mean(of_slowest[stage]):.0f} ms in the slowest 5 % of checkpoints"
        p99 = sorted(times_ms)[len(times_ms) * 99 // 100]
        yield Figure(f"visibility of a checkpoint's oldest record, {stage.replace('_', ' ')}", p99, "ms", detail)

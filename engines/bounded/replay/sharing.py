"""The shares of a sink subtask's recomputed outputs: which committable held which, and where they go. Pure.

Invariants: a committable gets its share of the outputs by the broker's counts, in the order of the checkpoints that
flushed them; a record goes where the writer's partitioner put it, with the manifest's partition count; one that was
distributed at random goes wherever the counts leave room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from exactlyonce.checkpoint.records.committable import Committable, shares
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.connectors.kafka.partitioning import Partitioner
from exactlyonce.engines.bounded.unit.staging import OutputBatch
from exactlyonce.pipeline.errors import require

Origin = tuple[str, int, int]


class RecomputedOutput(NamedTuple):
    """One recomputed output."""

    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]] | None
    origin: Origin | None
    timestamp_ms: int | None = None
    """None: the client's own time."""


def flat(batches: Iterable[OutputBatch]) -> Iterator[RecomputedOutput]:
    """The outputs one by one."""
    for batch in batches:
        nothing: list[None] = [None] * len(batch.values)
        yield from map(
            RecomputedOutput,
            batch.keys or nothing,
            batch.values,
            batch.headers or nothing,
            batch.origins or nothing,
            batch.timestamps or nothing,
        )


def share_of(
    manifest: Manifest, committable: Committable, outputs: Iterable[RecomputedOutput]
) -> Iterator[RecomputedOutput]:
    """Those of *outputs*, all of its sink subtask, that *committable* holds."""
    share = shares(manifest.committables)[committable.transactional_id]
    return islice(outputs, share.start, share.stop)


def topic_of(manifest: Manifest, sink: str) -> tuple[str, int]:
    """The topic that a sink writes to, and how many partitions it had."""
    return next((topic, partitions) for each, topic, partitions in manifest.sinks if each == sink)


def mismatch(whole: Committable, lost: Committable, topic: str, places: Iterable[int | None]) -> str:
    """Why outputs with these places cannot be what *lost* was of *whole*; empty if they can be."""
    everywhere = Counter(places)
    at_random = everywhere.pop(None, 0)
    found = {partition: count for partition, count in everywhere.items() if partition is not None}
    counts = {partition: whole.counts.get((topic, partition), 0) for partition in found}
    wrong = {p: count for p, count in found.items() if count > counts[p]}
    room = sum(whole.counts.values()) - sum(found.values())
    if wrong or at_random != room:
        shown = ", ".join(f"{topic}[{p}] {count} instead of {counts[p]}" for p, count in sorted(wrong.items()))
        total = sum(found.values()) + at_random
        return (
            f"the replay gives other counts ({shown or f'{total} records instead of {whole.records}'}): the pipeline "
            f"does not do what it did then, because its code has changed, or it depends on time, chance or its "
            f"surroundings."
        )
    if at_random and lost.counts != whole.counts:
        return (
            f"{at_random} of the records have no key, so that the client distributed them at random, and only some "
            f"partitions have lost theirs: which records those were cannot be known."
        )
    return ""


def placed(
    lost: Committable, topic: str, outputs: Iterable[RecomputedOutput], places: list[int | None]
) -> Iterator[tuple[int, RecomputedOutput]]:
    """Each output that goes to a partition of *lost*, with its partition; `mismatch` has found nothing wrong."""
    room = Counter({partition: count for (_, partition), count in lost.counts.items()})
    room.subtract(place for place in places if place is not None and (topic, place) in lost.counts)
    free = iter(sorted((+room).elements()))
    for place, output in zip(places, outputs, strict=True):
        partition = next(free, None) if place is None else place
        require(partition is not None, "there is room for every record that goes anywhere")
        assert partition is not None
        if (topic, partition) in lost.counts:
            yield partition, output


def places_of(outputs: Iterable[RecomputedOutput], partition_of: Partitioner, partitions: int) -> list[int | None]:
    """Where the writer's partitioner puts each output; None: anywhere."""
    return [partition_of(output.key, partitions) for output in outputs]

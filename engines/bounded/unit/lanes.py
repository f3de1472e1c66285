"""The staged outputs of a lane, as a replay or a comparison reads them.

A lane is an output partition where `Manifest.outputs_by_partition` has the sink; else the output of a subtask.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from exactlyonce.connectors.confluent import NOW
from exactlyonce.connectors.kafka.partitioning import Partitioner
from exactlyonce.engines.bounded.unit.staging import OutputBatch, OutputFile, read_lane
from exactlyonce.sinks.kafka.sink import Outputs

Origin = tuple[str, int, int]
"""Topic, partition and offset of an input record."""


class RecomputedOutput(NamedTuple):
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]] | None
    origin: Origin | None
    timestamp_ms: int | None = None
    """None: the client's own time."""
    partition: int | None = None
    """The partition that the sink's ``partition=`` gives; None: the client chooses it."""

    def place(self, partition_of: Partitioner, partitions: int) -> int | None:
        """Its partition in a topic with so many; None: any."""
        return partition_of(self.key, partitions) if self.partition is None else self.partition

    def alone(self, partition: int) -> Outputs:
        """To be written into *partition*."""
        return Outputs(
            [self.value], [self.key], [self.headers or []], [self.timestamp_ms or NOW], partitions=[partition]
        )


def flat(batches: Iterable[OutputBatch]) -> Iterator[RecomputedOutput]:
    """The outputs one by one."""
    for batch in batches:
        none: list[None] = [None] * len(batch.values)
        yield from map(
            RecomputedOutput,
            batch.keys or none,
            batch.values,
            batch.headers or none,
            batch.origins or none,
            batch.timestamps or none,
            batch.partitions or none,
        )


def batches_of(
    outputs: Iterable[OutputFile], lane: int, *, by_partition: bool, origins: bool = True
) -> Iterator[OutputBatch]:
    """The outputs of a lane, in order. One that is a partition has its number in `OutputBatch.partitions`."""
    if not by_partition:
        return read_lane([output for output in outputs if output.subtask == lane], 0, origins=origins)
    return (
        msgspec.structs.replace(batch, partitions=[lane] * len(batch.values))
        for batch in read_lane(outputs, lane, origins=origins)
    )


def count_of(outputs: Iterable[OutputFile], lane: int, *, by_partition: bool) -> int:
    """The number of outputs in a lane."""
    if not by_partition:
        return sum(output.records for output in outputs if output.subtask == lane)
    return sum(output.counts.get(lane, 0) for output in outputs)

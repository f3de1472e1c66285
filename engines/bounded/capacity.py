"""The subtasks that a checkpoint has room for: its manifest is one record, and names what each of them wrote.

Invariant: what is refused here is refused before anything is read; the manifest's own limit is asserted all the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from exactlyonce.checkpoint.records.manifest import MANIFEST_SIZE_MAX
from exactlyonce.engines.plan import plan
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.graph import LogicalGraph

Counted = tuple[str, str, int]
"""(id of a source or a sink, topic, partitions) by now."""
REFERENCE_BYTES = 110
"""Of a reference to a block, with a key of usual length."""
COMMITTABLE_BYTES = 150
WRITTEN_BYTES = 8
"""Of a committable for each partition, beside the topic's name."""
STAGED_BYTES = 600
"""Of what a sink has set aside, with the blocks that it names, and of its place in the ledger."""
OFFSET_BYTES = 90
"""Of an Sn, beside the names, with the offsets of skipped records."""


def subtasks_max(graph: LogicalGraph, sources: Iterable[Counted], sinks: Iterable[Counted]) -> int:
    """The most subtasks of *graph* that its state can be spread over, and that a manifest has room for."""
    widest = graph.max_parallelism if graph.shuffles else MANIFEST_SIZE_MAX
    tasks = plan(graph, min(2, widest)).tasks  # at 1 there are fewer, for nothing is shuffled
    fixed = sum(partitions * (OFFSET_BYTES + len(source) + len(topic)) for source, topic, partitions in sources)
    each = REFERENCE_BYTES * (len(tasks) + len(graph.stateful))
    for sink, topic, partitions in sinks:
        each += COMMITTABLE_BYTES + len(sink) + partitions * (WRITTEN_BYTES + len(topic))
    each += STAGED_BYTES * sum(not node.sink.transactional for node in graph.sinks if node.sink is not None)
    return min(widest, max(1, (MANIFEST_SIZE_MAX * 9 // 10 - fixed) // each))


def require_room(parallelism: int, most: int) -> None:
    """Raise `ConfigError` if *parallelism* is above *most*, which is `subtasks_max`."""
    if parallelism > most:
        raise ConfigError(
            f"Parallelism {parallelism} is more than a checkpoint of this pipeline has room for: its manifest is one "
            f"record and names what each subtask has written to each output partition. Use --parallelism {most} at "
            f"most, or output topics with fewer partitions."
        )

"""The subtasks that a checkpoint has room for: its manifest is one record, and names what each of them wrote.

Invariant: what is refused here is refused before anything is read; the manifest's own limit is asserted all the same.
"""

from __future__ import annotations

from exactlyonce.checkpoint.records.manifest import MANIFEST_SIZE_MAX, Manifest
from exactlyonce.engines.plan import Plan
from exactlyonce.pipeline.errors import ConfigError

REFERENCE_BYTES = 110
"""Of a reference to a block, with a key of usual length."""
COMMITTABLE_BYTES = 150
WRITTEN_BYTES = 8
"""Of a committable for each partition, beside the topic's name."""
STAGED_BYTES = 600
"""Of what a sink has set aside, with the blocks that it names, and of its place in the ledger."""
OFFSET_BYTES = 90
"""Of an Sn, beside the names, with the offsets of skipped records."""


def require_room(plan: Plan, manifest: Manifest) -> None:
    """Raise `ConfigError` if a manifest after *manifest* would be too large at the plan's parallelism."""
    fixed = sum(OFFSET_BYTES + len(each.source) + len(each.topic) for each in manifest.offsets)
    each = REFERENCE_BYTES * (len(plan.tasks) + len(plan.graph.stateful))
    for sink, topic, partitions in manifest.sinks:
        each += COMMITTABLE_BYTES + len(sink) + partitions * (WRITTEN_BYTES + len(topic))
    each += STAGED_BYTES * sum(not node.sink.transactional for node in plan.graph.sinks if node.sink is not None)
    most = (MANIFEST_SIZE_MAX * 9 // 10 - fixed) // each
    if plan.parallelism > most:
        raise ConfigError(
            f"Parallelism {plan.parallelism} is more than a checkpoint of this pipeline has room for: its manifest is "
            f"one record and names what each subtask has written to each output partition. Use --parallelism {most} "
            f"at most, or output topics with fewer partitions."
        )

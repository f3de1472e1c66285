"""The blocks that a planned checkpoint stands on, as its acknowledgements and its manifest name them.

Invariant: whatever a restore or a replay reads of the checkpoint is among them, so that nothing of it is dropped while
it is retained. What a manifest of an older incarnation stands on is read from its indexes (`FindReferences`). Pure.
"""

from __future__ import annotations

from exactlyonce.checkpoint.coordinator import OperatorAck, PendingCheckpoint
from exactlyonce.checkpoint.records.manifest import BlockRef, Manifest, OperatorSnapshot


def operators_of(plan: PendingCheckpoint) -> tuple[OperatorSnapshot, ...]:
    """Per operator, the index blocks of its subtasks in order."""
    found: dict[str, dict[int, OperatorAck]] = {}
    for (_, subtask), ack in plan.acks.items():
        for each in ack.operators:
            found.setdefault(each.operator, {})[subtask] = each
    return tuple(
        OperatorSnapshot(
            operator, len(acks), sum(a.state_bytes for a in acks.values()), tuple(acks[i].index for i in sorted(acks))
        )
        for operator, acks in sorted(found.items())
    )


def references_of(plan: PendingCheckpoint, manifest: Manifest) -> set[BlockRef]:
    """All blocks that *manifest*, made from *plan*, stands on: indexes, what they list, order logs."""
    refs = {ref for ack in plan.acks.values() for each in ack.operators for ref in (*each.index, *each.blocks)}
    return refs | {ref for log in manifest.order_logs for ref in log.blocks}

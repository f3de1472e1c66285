"""The blocks that a checkpoint needs: those that its manifest names, and those that its indexes list.

Invariant: they include every block that a restore, a replay or a commit reads, so that none is dropped while the
checkpoint is retained. The acknowledgements of a planned checkpoint have what its indexes list; the indexes of an older
incarnation's are read (`FindReferences`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from exactlyonce.checkpoint.records.manifest import BlockRef, Manifest, OperatorSnapshot, StoredBlock
from exactlyonce.checkpoint.records.storage_url import TOPIC
from exactlyonce.checkpoint.requests import Write

if TYPE_CHECKING:
    from exactlyonce.checkpoint.events import OperatorAck, PendingCheckpoint


def indexes_of(manifest: Manifest) -> Iterator[BlockRef]:
    """The index blocks of the state of *manifest*."""
    return (ref for operator in manifest.operators for parts in operator.index for ref in parts)


def named_by(manifest: Manifest) -> Iterator[BlockRef]:
    """Every block that *manifest* names itself: indexes, order logs, in-flight records, staged output."""
    yield from indexes_of(manifest)
    for order_log in manifest.order_logs:
        yield from order_log.blocks
    for channel_log in manifest.channel_logs:
        yield from channel_log.blocks
    for staged in manifest.staged:
        yield from staged.blocks


def tombstones(blocks: Iterable[StoredBlock]) -> tuple[Write, ...]:
    """The writes that remove those of *blocks* in the checkpoint topic."""
    return tuple(Write(ref.partition, ref.key, None) for storage, ref in blocks if storage == TOPIC)


def operators_of(plan: PendingCheckpoint) -> tuple[OperatorSnapshot, ...]:
    """Per operator, the index blocks of its subtasks in order."""
    by_operator: dict[str, dict[int, OperatorAck]] = {}
    for (_, subtask), ack in plan.acks.items():
        for operator in ack.operators:
            by_operator.setdefault(operator.operator, {})[subtask] = operator
    return tuple(
        OperatorSnapshot(
            name, len(acks), sum(a.state_bytes for a in acks.values()), tuple(acks[i].index for i in sorted(acks))
        )
        for name, acks in sorted(by_operator.items())
    )


def listed_by(plan: PendingCheckpoint) -> Iterator[BlockRef]:
    """The blocks that *plan* needs and its indexes list: state, in-flight records, staged output."""
    for ack in plan.acks.values():
        for operator in ack.operators:
            yield from operator.blocks
        yield from ack.on_their_way
    for staged in plan.staged:
        yield from staged.blocks


def references_of(plan: PendingCheckpoint, manifest: Manifest) -> Iterator[BlockRef]:
    """All blocks that *manifest*, made from *plan*, needs; some may come twice."""
    yield from named_by(manifest)
    yield from listed_by(plan)

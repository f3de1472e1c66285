"""The blocks that a checkpoint stands on: what its manifest names, and what its indexes list.

Invariant: whatever a restore, a replay or a commit reads of it is among them, so that nothing of it is dropped while it
is retained. The acknowledgements of a planned checkpoint say what its indexes list; the indexes of an older
incarnation's are read (`FindReferences`). Pure.
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
    """The blocks that list what the state of *manifest* consists of."""
    return (ref for operator in manifest.operators for parts in operator.index for ref in parts)


def named_by(manifest: Manifest) -> Iterator[BlockRef]:
    """Every block that *manifest* names itself: indexes, order logs, records on their way, what sinks have
    set aside."""
    yield from indexes_of(manifest)
    for log in manifest.order_logs:
        yield from log.blocks
    for each in manifest.channel_logs:
        yield from each.blocks
    for staged in manifest.staged:
        yield from staged.blocks


def stands_on(manifest: Manifest, listed: Iterable[BlockRef]) -> set[BlockRef]:
    """Every block that *manifest* stands on; *listed* are those that its indexes list."""
    return {*named_by(manifest), *listed}


def tombstones(blocks: Iterable[StoredBlock]) -> tuple[Write, ...]:
    """The writes by which those of *blocks* go that lie in the checkpoint topic."""
    return tuple(Write(ref.partition, ref.key, None) for storage, ref in blocks if storage == TOPIC)


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


def listed_by(plan: PendingCheckpoint) -> Iterator[BlockRef]:
    """The blocks of state, of what was on its way where the manifest does not name them, and of what sinks have set
    aside, that the checkpoint of *plan* stands on."""
    for ack in plan.acks.values():
        for operator in ack.operators:
            yield from operator.blocks
        yield from ack.on_their_way
    for staged in plan.staged:
        yield from staged.blocks


def references_of(plan: PendingCheckpoint, manifest: Manifest) -> Iterator[BlockRef]:
    """All blocks that *manifest*, made from *plan*, stands on; some may come twice."""
    yield from named_by(manifest)
    yield from listed_by(plan)

"""Splits: a partition that several units read, where there are fewer partitions than units of a stage.

Invariant: the splits of a subtask, one after the other, give what one unit gives: the same records and outputs, in the
same order, for the same receivers. So a split is no part of a checkpoint, and a replay reads the partition in one unit.

That holds where a record's outputs depend on this record alone: a task without state and without event time, whose
subtask takes one partition in one order. Outputs that go to partitions in turn depend on those before; a split that had
any says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby, pairwise

import msgspec

from exactlyonce.checkpoint.events import Ack
from exactlyonce.checkpoint.records.manifest import OrderLog
from exactlyonce.engines.bounded.unit.messages import Reading, Receipt, Unit, tries_before
from exactlyonce.engines.plan import Plan, Task, rejoins
from exactlyonce.engines.runtime.source_decoder import NAMED_MAX, Skipped
from exactlyonce.pipeline.graph import LogicalGraph, Node
from exactlyonce.sinks.kafka.sink import gives_keys, gives_partitions

SPLIT_OFFSETS_MIN = 100_000
"""A split with fewer offsets takes little longer than a unit's beginning and end."""


def splittable_tasks(plan: Plan) -> set[str]:
    """The tasks whose partitions several units may read, by name."""
    return {task.name for task in plan.tasks if task.sources and _is_splittable(plan, task)}


def _is_splittable(plan: Plan, task: Task) -> bool:
    if plan.into(task) or rejoins(task, plan.shuffles) or any(node.stateful for node in task.nodes):
        return False
    if any(node.source is not None and node.source.event_time is not None for node in task.sources):
        return False
    return all(_places_by_record(plan.graph, node) for node in task.sinks)


def _places_by_record(graph: LogicalGraph, node: Node) -> bool:
    """Whether sink *node* is published by the driver, and may choose the partition of an output by the output alone."""
    sink = node.sink
    if sink is None or not sink.transactional:
        return False
    return gives_partitions(sink) or gives_keys(sink, graph.type_of(node.inputs[0]))


def split(unit: Unit, parallelism: int, offsets: int) -> Iterator[Unit]:
    """The splits of *unit*, adjacent and in order; the unit itself if there is but one.

    *offsets* are those of all subtasks of the task, which get *parallelism* units according to their share.
    """
    if len(unit.readings) == 1 and not unit.readings[0].to_end:
        reading = unit.readings[0]
        count = min(parallelism * reading.length // max(1, offsets), reading.length // SPLIT_OFFSETS_MIN)
        if count > 1:
            for number, part in enumerate(_parts(reading, count)):
                yield msgspec.structs.replace(unit, readings=(part,), split=number)
            return
    yield unit


def _parts(reading: Reading, count: int) -> Iterator[Reading]:
    bounds = [reading.start + reading.length * number // count for number in range(count + 1)]
    for start, end in pairwise(bounds):
        yield msgspec.structs.replace(reading, start=start, end=end)


def merged(receipts: Iterable[Receipt]) -> Iterator[Receipt]:
    """One receipt for each subtask. *receipts* of one subtask are adjacent, in the order of its splits."""
    for _, parts in groupby(receipts, lambda receipt: (receipt.ack.task, receipt.ack.subtask)):
        yield _merged(list(parts))


def _merged(parts: Sequence[Receipt]) -> Receipt:
    if len(parts) == 1:
        return parts[0]
    skipped: dict[int, Skipped] = {}
    for partition in chain.from_iterable(part.skipped for part in parts):
        known = skipped.setdefault(partition.partition, Skipped(partition.source, partition.topic, partition.partition))
        known.add(partition)
    return Receipt(
        ack=_ack([part.ack for part in parts]),
        sent=tuple(file for part in parts for file in part.sent),
        outputs=tuple(file for part in parts for file in part.outputs),
        records=sum(part.records for part in parts),
        skipped=tuple(skipped.values()),
        began_ms=min(part.began_ms for part in parts),
        ended_ms=max(part.ended_ms for part in parts),
        label=max((part.label for part in parts), key=tries_before),
        notes=tuple(note for part in parts for note in part.notes),
    )


def _ack(acks: Sequence[Ack]) -> Ack:
    """The acknowledgement of a subtask: its order log is that of its splits, its offset that of the last of them.

    The first split counts the records skipped before it, too; the others their own alone.
    """
    offsets = [ack.offsets[0] for ack in acks]
    position = msgspec.structs.replace(
        offsets[-1],
        skipped=sum(offset.skipped for offset in offsets),
        skipped_at=tuple(chain.from_iterable(offset.skipped_at for offset in offsets))[-NAMED_MAX:],
    )
    logs = [ack.order_log for ack in acks if ack.order_log is not None]
    blocks = tuple(block for log in logs for block in log.blocks)
    return Ack(
        task=acks[0].task,
        subtask=acks[0].subtask,
        checkpoint=acks[0].checkpoint,
        offsets=(position,),
        order_log=OrderLog(acks[0].task, acks[0].subtask, blocks) if logs else None,
        written=tuple(block for ack in acks for block in ack.written),
    )

"""The stages of a plan, as units: the receipts of one stage are the work of the next.

Invariants: a stage runs once its whole input is written; a unit's files count only by its receipt; every subtask of
every task runs, even without input, because it answers for its share of the state and of Sn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from exactlyonce.engines.bounded.submit import Submit
from exactlyonce.engines.bounded.unit.messages import Reading, Receipt, Unit
from exactlyonce.engines.bounded.unit.staging import ChannelFile
from exactlyonce.engines.plan import Plan, Task
from exactlyonce.pipeline.errors import ConfigError, require
from exactlyonce.pipeline.graph import LogicalGraph

Logs = Mapping[tuple[str, int], tuple[bytes, ...]]
"""Order logs to follow, by task and subtask; one without input has none."""
Left = Mapping[tuple[str, int], dict[str, int]]
"""Records in flight at the end, by task and subtask, and channel."""

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Receipt)


def refuse_loops(graph: LogicalGraph) -> None:
    """Raise ConfigError for a pipeline with loops: in a cycle no stage comes first."""
    if graph.loops:
        raise ConfigError(
            f"Records go round loop {graph.loops[0].id!r}, and bounded work runs the stages of a pipeline one after "
            f"the other: in a cycle none comes first. The local engine has loops: use `exactlyonce run`, for a bounded "
            f"run with --until latest."
        )


def stages(plan: Plan) -> list[list[Task]]:
    """The tasks in groups that can run at the same time, sources first."""
    owner = {node.id: task.name for task in plan.tasks for node in task.nodes}
    depth: dict[str, int] = {}
    for task in plan.tasks:  # upstream tasks first
        depth[task.name] = 1 + max((depth[owner[edge.producer]] for edge in plan.into(task)), default=-1)
    return [[task for task in plan.tasks if depth[task.name] == level] for level in sorted(set(depth.values()))]


def compute(
    plan: Plan,
    common: Unit,
    ranges: Sequence[Reading],
    submit: Submit,
    logs: Logs | None = None,
    left: Left | None = None,
) -> list[Receipt]:
    """Run the whole plan over *ranges*; return the receipts, stage by stage. *common* has the fields of every unit.

    With *logs*, inputs are taken along them, without the records that are *left*; otherwise by time.
    """
    receipts: list[Receipt] = []
    for tasks in stages(plan):
        names = ", ".join(task.name for task in tasks)
        description = f"{common.base.pipeline}: checkpoint {common.checkpoint}, stage {names}"
        sent = [file for receipt in receipts for file in receipt.channels]
        units = [
            unit for task in tasks for unit in _units(plan, task, common, sent, ranges=ranges, logs=logs, left=left)
        ]
        answers = submit(description, [_encode(unit) for unit in units])
        stage_receipts = [_decoder.decode(answer) for answer in answers]
        done = [(receipt.ack.task, receipt.ack.subtask) for receipt in stage_receipts]
        require(done == [(unit.task, unit.subtask) for unit in units], "every unit has its receipt")
        receipts += stage_receipts
    return receipts


def _units(
    plan: Plan,
    task: Task,
    common: Unit,
    sent: Iterable[ChannelFile],
    *,
    ranges: Sequence[Reading],
    logs: Logs | None,
    left: Left | None,
) -> Iterator[Unit]:
    sources = {node.id for node in task.sources}
    edges = {edge.name for edge in plan.into(task)}
    arrived, reads = defaultdict[int, list[ChannelFile]](list), defaultdict[int, list[Reading]](list)
    for file in sent:
        if file.edge in edges:
            arrived[file.receiver].append(file)
    for reading in ranges:
        if reading.source in sources:
            reads[reading.partition % plan.parallelism].append(reading)
    for subtask in range(plan.parallelism):
        yield msgspec.structs.replace(
            common,
            task=task.name,
            subtask=subtask,
            parallelism=plan.parallelism,
            readings=tuple(reads[subtask]),
            channels=tuple(arrived[subtask]),
            order=None if logs is None else logs.get((task.name, subtask), ()),
            left={} if left is None else left.get((task.name, subtask), {}),
        )

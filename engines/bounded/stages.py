"""The stages of a plan: units made of it, and of one stage's receipts the next stage's work.

Invariants: a stage is run once all that it reads is written; what a unit sent counts only by the receipt that came
back; every subtask of every task runs, also one without input, for it answers for its share of the state and of Sn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from exactlyonce.engines.bounded.ranges import Reading
from exactlyonce.engines.bounded.submit import Submit
from exactlyonce.engines.bounded.unit.messages import Receipt, Unit
from exactlyonce.engines.bounded.unit.staging import ChannelFile
from exactlyonce.engines.plan import Plan, Task
from exactlyonce.pipeline.errors import ConfigError, require
from exactlyonce.pipeline.graph import LogicalGraph

Logs = Mapping[tuple[str, int], tuple[bytes, ...]]
"""Order logs to follow, by task and subtask; one whose partition had nothing has none."""
Left = Mapping[tuple[str, int], dict[str, int]]
"""Records that were on their way at the end, by task and subtask, and channel."""

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Receipt)


def refuse_loops(graph: LogicalGraph) -> None:
    """Raise ConfigError where records go round: in a cycle no stage comes first."""
    if graph.loops:
        raise ConfigError(
            f"Records go round loop {graph.loops[0].id!r}, and bounded work runs the stages of a pipeline one after "
            f"the other: in a cycle none comes first. The local engine has loops: use `exactlyonce run`, for a bounded "
            f"run with --until latest."
        )


def stages(plan: Plan) -> list[list[Task]]:
    """Tasks that can run at the same time, those nearest to the sources first."""
    owner = {node.id: task.name for task in plan.tasks for node in task.nodes}
    depth: dict[str, int] = {}
    for task in plan.tasks:  # upstream tasks first
        depth[task.name] = 1 + max((depth[owner[edge.producer]] for edge in plan.into(task)), default=-1)
    return [[task for task in plan.tasks if depth[task.name] == each] for each in sorted(set(depth.values()))]


def compute(
    plan: Plan,
    common: Unit,
    ranges: Sequence[Reading],
    submit: Submit,
    logs: Logs | None = None,
    left: Left | None = None,
) -> list[Receipt]:
    """Run the whole plan over *ranges*: every unit is *common* but for what it is to do. The receipts, stage by stage.

    With *logs*, inputs are taken along them, but for what is *left*; otherwise by time.
    """
    receipts: list[Receipt] = []
    for number, tasks in enumerate(stages(plan)):
        sent = [file for receipt in receipts for file in receipt.channels]
        units = [
            unit for task in tasks for unit in _units(plan, task, common, sent, ranges=ranges, logs=logs, left=left)
        ]
        answers = [_decoder.decode(each) for each in submit(f"stage {number + 1}", [_encode(each) for each in units])]
        done = [(each.ack.task, each.ack.subtask) for each in answers]
        require(done == [(each.task, each.subtask) for each in units], "every unit has its receipt")
        receipts += answers
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
    arrived = [file for file in sent if file.edge in edges]
    for subtask in range(plan.parallelism):
        yield msgspec.structs.replace(
            common,
            task=task.name,
            subtask=subtask,
            parallelism=plan.parallelism,
            readings=tuple(
                each for each in ranges if each.source in sources and each.partition % plan.parallelism == subtask
            ),
            channels=tuple(file for file in arrived if file.receiver == subtask),
            order=None if logs is None else logs.get((task.name, subtask), ()),
            left={} if left is None else left.get((task.name, subtask), {}),
        )

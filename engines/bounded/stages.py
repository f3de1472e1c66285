"""The stages of a plan, as units: the receipts of one stage are the work of the next.

Invariants: a stage runs once its whole input is written; a unit's files count only by its receipt; every subtask of
every task runs, even without input, because it answers for its share of the state and of Sn. A stage is one staged
file, and a unit is its place there: nobody reads the plan of all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from exactlyonce.engines.bounded.submit import Submit
from exactlyonce.engines.bounded.unit.messages import STAGE, Reading, Receipt, Stage, Unit, UnitPlace
from exactlyonce.engines.bounded.unit.staging import OutputFile, stage_messages
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
    common: Stage,
    client: Mapping[str, str],
    ranges: Sequence[Reading],
    submit: Submit,
    logs: Logs | None = None,
    left: Left | None = None,
) -> list[Receipt]:
    """Run the whole plan over *ranges*; return the receipts, stage by stage. *common* has the fields of every stage.

    *client* are the client's settings. With *logs*, inputs are taken along them, without the records that are *left*;
    otherwise by time.
    """
    receipts: list[Receipt] = []
    for number, tasks in enumerate(stages(plan)):
        names = ", ".join(task.name for task in tasks)
        description = f"{common.base.pipeline}: checkpoint {common.checkpoint}, stage {names}"
        edges = {edge.name for task in tasks for edge in plan.into(task)}
        sent = tuple(file for receipt in receipts for file in receipt.sent if file.edge in edges)
        units = [unit for task in tasks for unit in _units(plan, task, ranges=ranges, logs=logs, left=left)]
        stage = msgspec.structs.replace(common, sent=sent)
        file = stage_messages(f"{common.files}stage-{number}", [stage, *units])
        work = [_encode(UnitPlace({**client}, file, receiver)) for receiver, _ in enumerate(units, STAGE + 1)]
        stage_receipts = [_decoder.decode(answer) for answer in submit(description, work)]
        done = [(receipt.ack.task, receipt.ack.subtask) for receipt in stage_receipts]
        require(done == [(unit.task, unit.subtask) for unit in units], "every unit has its receipt")
        receipts += stage_receipts
    return receipts


def outputs_by_sink(receipts: Iterable[Receipt]) -> dict[str, list[OutputFile]]:
    """The staged outputs of each sink that has any, in the order of its subtasks."""
    files: dict[str, list[OutputFile]] = {}
    for file in sorted((file for receipt in receipts for file in receipt.outputs), key=lambda file: file.subtask):
        files.setdefault(file.sink, []).append(file)
    return files


def _units(
    plan: Plan, task: Task, *, ranges: Sequence[Reading], logs: Logs | None, left: Left | None
) -> Iterator[Unit]:
    sources = {node.id for node in task.sources}
    reads = defaultdict[int, list[Reading]](list)
    for reading in ranges:
        if reading.source in sources:
            reads[reading.partition % plan.parallelism].append(reading)
    for subtask in range(plan.parallelism):
        yield Unit(
            task=task.name,
            subtask=subtask,
            readings=tuple(reads[subtask]),
            order=None if logs is None else logs.get((task.name, subtask), ()),
            left={} if left is None else left.get((task.name, subtask), {}),
        )

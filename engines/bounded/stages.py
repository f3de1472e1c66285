"""The stages of a plan, as units: the receipts of one stage are the work of the next.

Invariants: a stage runs once its whole input is written; a unit's files count only by its receipt; every subtask of
every task runs, even without input, because it answers for its share of the state and of Sn. A stage is one staged
file, and a unit is its place there: nobody reads the plan of all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from typing import NamedTuple

import msgspec

from exactlyonce.engines.bounded.submit import Submit
from exactlyonce.engines.bounded.unit.messages import STAGE, Reading, Receipt, Stage, Unit, UnitPlace
from exactlyonce.engines.bounded.unit.staging import OutputFile, StagedFile, stage_messages
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


class Computation(NamedTuple):
    """A plan over ranges of its inputs."""

    plan: Plan
    common: Stage
    """The fields of every stage."""
    ranges: Sequence[Reading]
    logs: Logs | None = None
    """Inputs are taken along these; None: by time."""
    left: Left | None = None
    """Records that are sent, and not taken."""


def compute(
    plan: Plan,
    common: Stage,
    client: Mapping[str, str],
    ranges: Sequence[Reading],
    submit: Submit,
    logs: Logs | None = None,
    left: Left | None = None,
) -> list[Receipt]:
    """Run the whole plan over *ranges*; return the receipts, stage by stage. See `Computation`.

    *client* are the client's settings.
    """
    (receipts,) = compute_together([Computation(plan, common, ranges, logs, left)], client, submit)
    return receipts


def compute_together(
    computations: Sequence[Computation], client: Mapping[str, str], submit: Submit
) -> list[list[Receipt]]:
    """The receipts of each of *computations*, which are of one graph: their units of a stage run together.

    Plans of several parallelisms may have different numbers of stages.
    """
    receipts: list[list[Receipt]] = [[] for _ in computations]
    plans = (stages(computation.plan) for computation in computations)
    for number, levels in enumerate(zip_longest(*plans, fillvalue=[])):
        staged = [
            _staged(computation, tasks, number, own)
            for computation, tasks, own in zip(computations, levels, receipts, strict=True)
        ]
        work = [
            _encode(UnitPlace({**client}, file, receiver))
            for file, units in staged
            for receiver, _ in enumerate(units, STAGE + 1)
        ]
        names = ", ".join(dict.fromkeys(task.name for tasks in levels for task in tasks))
        answers = iter(submit(f"{_described(computations)}, stage {names}", work))
        for (_, units), own in zip(staged, receipts, strict=True):
            done = [_decoder.decode(answer) for answer in islice(answers, len(units))]
            acknowledged = [(receipt.ack.task, receipt.ack.subtask) for receipt in done]
            require(acknowledged == [(unit.task, unit.subtask) for unit in units], "every unit has its receipt")
            own += done
    return receipts


def _described(computations: Sequence[Computation]) -> str:
    """The pipeline and the checkpoints that are computed."""
    first, last = computations[0].common, computations[-1].common
    if first is last:
        return f"{first.base.pipeline}: checkpoint {first.checkpoint}"
    return f"{first.base.pipeline}: checkpoints {first.checkpoint} to {last.checkpoint}"


def _staged(
    computation: Computation, tasks: Sequence[Task], number: int, before: Iterable[Receipt]
) -> tuple[StagedFile, list[Unit]]:
    """Stage a stage and its units. *before* has the receipts of the earlier stages."""
    plan, common, ranges, logs, left = computation
    edges = {edge.name for task in tasks for edge in plan.into(task)}
    sent = tuple(file for receipt in before for file in receipt.sent if file.edge in edges)
    units = [unit for task in tasks for unit in _units(plan, task, ranges=ranges, logs=logs, left=left)]
    stage = msgspec.structs.replace(common, sent=sent)
    return stage_messages(f"{common.files}stage-{number}", [stage, *units]), units


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

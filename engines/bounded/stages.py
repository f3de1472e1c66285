"""The stages of a plan, as units: the receipts of one stage are the work of the next.

Invariants: a stage runs once its whole input is written; a unit's files count only by its receipt; every subtask of
every task runs, even without input, because it answers for its share of the state and of Sn. A subtask that runs as
several units (`splits`) has one receipt. A stage is one staged file, and a unit is its place there: nobody reads the
plan of all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from typing import NamedTuple

import msgspec

from exactlyonce.engines.bounded.splits import merged, split
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


def refuse_unbounded(graph: LogicalGraph) -> None:
    """Raise ConfigError for a pipeline with loops, or that goes by the clock, where no order log has the time."""
    refuse_loops(graph)
    clocked = [node.id for node in graph.timed if node.timed is not None and node.timed.has_clock]
    if clocked:
        raise ConfigError(
            f"Operator {clocked[0]!r} goes by the clock, and a backfill, a catch-up or a diff has none: no run has "
            f"noted when it took which record. The local engine has a clock: use `exactlyonce run`, for a bounded run "
            f"with --until latest. Its checkpoints can be replayed and audited."
        )


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
    splittable: set[str] | None = None
    """The tasks whose partitions several units may read; emptied where the outputs turn out not to permit it."""


def compute(
    plan: Plan,
    common: Stage,
    client: Mapping[str, str],
    ranges: Sequence[Reading],
    submit: Submit,
    logs: Logs | None = None,
    left: Left | None = None,
    splittable: set[str] | None = None,
) -> list[Receipt]:
    """Run the whole plan over *ranges*; return the receipts, stage by stage. See `Computation`.

    *client* are the client's settings.
    """
    computation = Computation(plan, common, ranges, logs, left, splittable)
    (receipts,) = compute_together([computation], client, submit)
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
            _staged(computation, tasks, f"stage-{number}", own)
            for computation, tasks, own in zip(computations, levels, receipts, strict=True)
        ]
        done = _done(staged, f"{_described(computations)}, stage {_names(levels)}", client, submit)
        for place, (computation, tasks) in enumerate(zip(computations, levels, strict=True)):
            units = zip(staged[place].units, done[place], strict=True)
            if any(unit.split is not None and receipt.in_turn for unit, receipt in units):
                assert computation.splittable is not None
                computation.splittable.clear()
                staged[place] = _staged(computation, tasks, f"stage-{number}-whole", receipts[place])
                description = f"{_described(computations)}, stage {_names(levels)} without splits"
                (done[place],) = _done(staged[place : place + 1], description, client, submit)
            receipts[place] += merged(done[place])
    return receipts


def _done(
    staged: Sequence[_Staged], description: str, client: Mapping[str, str], submit: Submit
) -> list[list[Receipt]]:
    """The receipts of the units of each of *staged*, which run together."""
    work = [
        _encode(UnitPlace({**client}, stage.file, receiver))
        for stage in staged
        for receiver, _ in enumerate(stage.units, STAGE + 1)
    ]
    answers = iter(submit(description, work))
    receipts = []
    for stage in staged:
        done = [_decoder.decode(answer) for answer in islice(answers, len(stage.units))]
        acknowledged = [(receipt.ack.task, receipt.ack.subtask) for receipt in done]
        require(acknowledged == [(unit.task, unit.subtask) for unit in stage.units], "every unit has its receipt")
        receipts.append(done)
    return receipts


def _names(levels: Iterable[Iterable[Task]]) -> str:
    return ", ".join(dict.fromkeys(task.name for tasks in levels for task in tasks))


def _described(computations: Sequence[Computation]) -> str:
    """The pipeline and the checkpoints that are computed."""
    first, last = computations[0].common, computations[-1].common
    if first is last:
        return f"{first.spec.manifest.pipeline}: checkpoint {first.checkpoint}"
    return f"{first.spec.manifest.pipeline}: checkpoints {first.checkpoint} to {last.checkpoint}"


class _Staged(NamedTuple):
    """A stage with its units, in a file."""

    file: StagedFile
    units: list[Unit]


def _staged(computation: Computation, tasks: Sequence[Task], name: str, before: Iterable[Receipt]) -> _Staged:
    """Stage a stage and its units as *name*. *before* has the receipts of the earlier stages."""
    plan, common = computation.plan, computation.common
    edges = {edge.name for task in tasks for edge in plan.into(task)}
    sent = tuple(file for receipt in before for file in receipt.sent if file.edge in edges)
    units = [unit for task in tasks for unit in _units(computation, task)]
    stage = msgspec.structs.replace(common, sent=sent)
    return _Staged(stage_messages(f"{common.files}{name}", [stage, *units]), units)


def outputs_by_sink(receipts: Iterable[Receipt]) -> dict[str, list[OutputFile]]:
    """The staged outputs of each sink that has any, in the order of its subtasks."""
    files: dict[str, list[OutputFile]] = {}
    for file in sorted((file for receipt in receipts for file in receipt.outputs), key=lambda file: file.subtask):
        files.setdefault(file.sink, []).append(file)
    return files


def _units(computation: Computation, task: Task) -> Iterator[Unit]:
    """The units of *task*, by subtask."""
    logs, left, parallelism = computation.logs, computation.left, computation.plan.parallelism
    sources = {node.id for node in task.sources}
    reads = defaultdict[int, list[Reading]](list)
    for reading in computation.ranges:
        if reading.source in sources:
            reads[reading.partition % parallelism].append(reading)
    offsets = sum(reading.length for readings in reads.values() for reading in readings)
    for subtask in range(parallelism):
        unit = Unit(
            task=task.name,
            subtask=subtask,
            readings=tuple(reads[subtask]),
            order=None if logs is None else logs.get((task.name, subtask), ()),
            left={} if left is None else left.get((task.name, subtask), {}),
        )
        if task.name in (computation.splittable or ()):
            yield from split(unit, parallelism, offsets)
        else:
            yield unit

"""The stages of a plan, as units: the receipts of one stage are the work of the next.

Invariants: a stage runs once its whole input is written; a unit's files count only by its receipt; every subtask of
every task runs, even without input, because it answers for its share of the state and of Sn. A subtask that runs as
several units has one receipt. A stage is one staged file, and a unit is its place there: nobody reads the plan of all.

`Submit` is the seam to the runner of units: it takes the encoded work of one stage, and answers for each, in order. All
work ran to its end in at least one attempt, which gives the answer; an error that no retry would fix comes back as an
answer, so that nobody repeats it, and is raised here.

Where there are fewer partitions than units of a stage, several units read splits of a partition. One after the other
they give what one unit gives: the same records and outputs, in the same order, for the same receivers. So a split is no
part of a checkpoint, and a replay reads the partition in one unit. That holds where a record's outputs depend on this
record alone: a task without state and without event time, whose subtask takes one partition in one order. Outputs that
go to partitions in turn depend on those before; a split that had any says so.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from itertools import chain, groupby, islice, pairwise, zip_longest
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from exactlyonce.checkpoint.events import Ack
from exactlyonce.checkpoint.records.manifest import Manifest, OrderLog
from exactlyonce.engines.bounded.unit.assembly import run_unit
from exactlyonce.engines.bounded.unit.comparison import compare_lane
from exactlyonce.engines.bounded.unit.kept import KEPT
from exactlyonce.engines.bounded.unit.lane_audit import audit_lane
from exactlyonce.engines.bounded.unit.messages import (
    LANE,
    PARTITION,
    UNIT,
    Reading,
    Receipt,
    Stage,
    Unit,
    UnitFailure,
    WorkPlace,
    tries_before,
)
from exactlyonce.engines.bounded.unit.outgoing import publish
from exactlyonce.engines.bounded.unit.staging import OutputFile, StagedFile, StagedRange, stage_messages
from exactlyonce.engines.bounded.unit.visible_lanes import read_partition
from exactlyonce.engines.plan import Plan, Task, rejoins
from exactlyonce.engines.runtime.faults import users_traceback
from exactlyonce.engines.runtime.source_decoder import NAMED_MAX, Skipped
from exactlyonce.pipeline.errors import (
    ConfigError,
    ExactlyOnceError,
    UsersTraceback,
    class_name,
    is_fatal,
    made_from,
    require,
)
from exactlyonce.pipeline.graph import LogicalGraph, Node
from exactlyonce.sinks.kafka.sink import gives_keys, gives_partitions

Submit = Callable[[str, Sequence[bytes]], list[bytes]]
"""(description of the stage, encoded work) -> encoded answers in the same order; raises what ended the stage.

A description names pipeline, checkpoint and stage: "orders: checkpoint 12, stage totals".
"""
UnitsDone = Callable[[str, int, int], None]
"""(description of the stage, units done, units): told at its beginning, as units end, and at its end."""


class WorkListener(Protocol):
    """The listener to bounded work."""

    def note(self, text: str) -> None:
        """Show what a person should know."""

    def began(self, manifest: Manifest, offsets: int) -> None:
        """Work over so many offsets of input begins: from *manifest*, or recomputing up to it."""


class PartListener(WorkListener, Protocol):
    """The listener to bounded work in parts that are no checkpoints."""

    def passed(self, offsets: int) -> None:
        """So many more offsets are done."""


class Executors(NamedTuple):
    """The place where units run."""

    submit: Submit
    staging: str | Path
    """A folder for files between stages, which all units and this process see, or a URL of HDFS or S3."""
    cores: Callable[[], int]
    """The number of units that run at the same time."""


_KINDS: dict[str, Callable[[bytes, str], bytes]] = {
    UNIT: run_unit,
    "publication": publish,
    "comparison": compare_lane,
    PARTITION: read_partition,
    LANE: audit_lane,
}
TRIES = 4
"""The tries of a unit in this process, as many as Spark gives a task by default."""
_inline_number = itertools.count(1)


class _Tagged(msgspec.Struct):
    type: str


_tag_decoder = msgspec.msgpack.Decoder(_Tagged)
_failure_decoder = msgspec.msgpack.Decoder(UnitFailure)


def perform(work: bytes, attempt_label: str) -> bytes:
    """Do *work*; return the encoded answer, which is a `UnitFailure` where another attempt would fail as well."""
    try:
        return _KINDS[_tag_decoder.decode(work).type](work, attempt_label)
    except ExactlyOnceError as error:
        if not is_fatal(error):
            raise
        return _encode(failure_of(error))


def failure_of(error: ExactlyOnceError) -> UnitFailure:
    """*error* for another process."""
    return UnitFailure(class_name(error), str(error), {**error.facts}, users_traceback(error))


def error_of(failure: UnitFailure) -> ExactlyOnceError:
    """The error of another process, with the traceback of the user's exception as its cause."""
    error = made_from(failure.error, failure.text, failure.facts)
    error.__cause__ = UsersTraceback(failure.users_traceback) if failure.users_traceback else None
    return error


def in_process(stage: str, work: Sequence[bytes]) -> list[bytes]:
    """A `Submit` that runs everything here, one after the other."""
    with closing(KEPT):  # units of a stage share it, and the process may live on
        return in_process_keeping(stage, work)


def in_process_keeping(stage: str, work: Sequence[bytes]) -> list[bytes]:
    """The same for much small work: its caller closes `KEPT` at the end."""
    return settled(map(_persistently, work))


def _persistently(work: bytes) -> bytes:
    """The answer to *work*, which is tried again while another attempt may succeed."""
    number = next(_inline_number)
    for failed in range(TRIES - 1):
        with suppress(ExactlyOnceError):
            return perform(work, f"inline-{number}-{failed}")
    return perform(work, f"inline-{number}-{TRIES - 1}")


def settled(answers: Iterable[bytes]) -> list[bytes]:
    """*answers*; the first failure among them is raised."""
    receipts = []
    for answer in answers:
        try:
            failure = _failure_decoder.decode(answer)
        except msgspec.ValidationError:
            receipts.append(answer)
        else:
            raise error_of(failure)
    return receipts


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
    work = [_encode(WorkPlace(UNIT, {**client}, (stage.common, place))) for stage in staged for place in stage.places]
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
    """A stage with its units, as messages in a file."""

    common: StagedRange
    places: list[StagedRange]
    """Those of the units."""
    units: list[Unit]


def _staged(computation: Computation, tasks: Sequence[Task], name: str, before: Iterable[Receipt]) -> _Staged:
    """Stage a stage and its units as *name*. *before* has the receipts of the earlier stages."""
    plan, common = computation.plan, computation.common
    edges = {edge.name for task in tasks for edge in plan.into(task)}
    sent = tuple(file for receipt in before for file in receipt.sent if file.edge in edges)
    units = [unit for task in tasks for unit in _units(computation, task)]
    slots = [b"".join([file.file.slot(subtask) for file in sent]) for subtask in range(plan.parallelism)]
    units = [msgspec.structs.replace(unit, slots=slots[unit.subtask]) for unit in units]
    without_bounds = (msgspec.structs.replace(file, file=StagedFile(file.file.location, b"")) for file in sent)
    stage = msgspec.structs.replace(common, sent=tuple(without_bounds))
    of_stage, *places = stage_messages(f"{common.files}{name}", [stage, *units])
    return _Staged(of_stage, places, units)


def outputs_by_sink(receipts: Iterable[Receipt]) -> dict[str, list[OutputFile]]:
    """The staged outputs of each sink that has any, in the order of its subtasks."""
    return by_sink(file for receipt in receipts for file in receipt.outputs)


def by_sink(outputs: Iterable[OutputFile]) -> dict[str, list[OutputFile]]:
    """*outputs* by sink, in the order of its subtasks; those of a subtask stay in theirs."""
    files: dict[str, list[OutputFile]] = {}
    for file in sorted(outputs, key=lambda file: file.subtask):
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

    *offsets* are of all subtasks of the task, which get *parallelism* units according to their share.
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
    """The acknowledgement of a subtask: its order log is made of its splits', its offset is the last split's.

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

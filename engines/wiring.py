"""The wiring of operators and their state, from nodes of the graph: what all engines make alike."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from exactlyonce.checkpoint.block_storage import Blocks
from exactlyonce.checkpoint.records.manifest import Manifest, OperatorSnapshot
from exactlyonce.engines import operators as ops
from exactlyonce.engines.activity import Activity
from exactlyonce.engines.blocks import restore_table, whole_or_halt
from exactlyonce.pipeline.context import Context
from exactlyonce.pipeline.errors import USERS_ERRORS, ExactlyOnceError, GraphError, InvariantViolation, text_of
from exactlyonce.pipeline.exactness import in_utc
from exactlyonce.pipeline.graph import Kind, LogicalGraph, Node
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.state.backend import StateBackend, Table
from exactlyonce.state.key_groups import group_range

STATEFUL = (Kind.STATEFUL_MAP, Kind.STATEFUL_FLAT_MAP, Kind.REDUCE)


@dataclass
class Made:
    """An operator, the user's function that it calls, as it was made here, and its table if it has one."""

    operator: Any
    functions: list[Any] = field(default_factory=list)
    tables: list[Table[Any]] = field(default_factory=list)


class OpenFailed(ExactlyOnceError):
    """What an operator needs could not be opened. The job restarts, for it may be there later; nothing is lost."""


def _open(node: Node, function: Any, context: Context) -> None:
    try:
        function.open(context)
    except ExactlyOnceError:
        raise
    except USERS_ERRORS as error:
        raise OpenFailed(
            f"open() of operator {node.id!r} raised {type(error).__name__}: {text_of(error)}{ops.place_of(error)}."
        ) from error


def make_operator(
    node: Node, context: Context, table: Callable[[Node], Table[Any]], activity: Activity | None = None
) -> Made:
    """The operator of any *node* but a sink; *table* restores state. The user's function is made and opened here.

    *activity* is told what is done here, and by the operator later on.
    """
    if node.kind in (Kind.SOURCE, Kind.UNION, Kind.FEEDBACK):
        return Made(ops.Pass(node.id))
    activity = activity or Activity()
    activity.phase(f"the making of operator {node.id!r}")
    function = node.make()
    if hasattr(function, "open"):
        activity.phase(f"open() of operator {node.id!r}")
        _open(node, function, context)
    if node.kind in STATEFUL:
        activity.phase(f"restoring the state of operator {node.id!r}")
        keyed = table(node)
        flat, reduces = node.kind is Kind.STATEFUL_FLAT_MAP, node.kind is Kind.REDUCE
        made: ops.BatchOperator = ops.Stateful(node.id, function, keyed, flat, reduces, _sides(node))
        tables = [keyed]
    else:
        made, tables = _stateless(node, function), []
    made.activity = activity
    return Made(made, [function], tables)


def _stateless(node: Node, function: Callable[..., Any]) -> ops.BatchOperator:
    match node.kind:
        case Kind.MAP:
            return ops.Map(node.id, function)
        case Kind.PEEK:
            return ops.Peek(node.id, function)
        case Kind.FILTER:
            return ops.Filter(node.id, function)
        case Kind.FLAT_MAP:
            return ops.FlatMap(node.id, function)
        case Kind.KEY_BY:
            apart = node.partitioned or node.type is UNKNOWN
            return ops.KeyBy(node.id, function, None if apart else in_utc(node.type))
        case Kind.PROCESS:
            return ops.Process(node.id, function, _sides(node))
    raise InvariantViolation(f"no operator for {node.kind}")


def _sides(node: Node) -> dict[str, list[ops.Push]]:
    return {name: [] for name in node.outputs}


def declared(node: Node, graph: LogicalGraph) -> ops.Declared | None:
    """What sink *node* is told of its records, and by which operator; None: nothing, or a source has decoded them."""
    type_, producer = graph.type_of(node.inputs[0]), graph.node(node.inputs[0].node)
    while producer.kind in (Kind.FILTER, Kind.PEEK):
        producer = graph.node(producer.inputs[0].node)
    return None if type_ is UNKNOWN or producer.kind is Kind.SOURCE else ops.Declared(producer.id, type_)


def close_functions(functions: Iterable[Any]) -> None:
    """What the user's operators opened is closed."""
    for function in functions:
        if hasattr(function, "close"):
            function.close()


def table_of(
    node: Node,
    graph: LogicalGraph,
    parallelism: int,
    subtask: int,
    manifest: Manifest,
    reader: Blocks,
    touched: Collection[int] | None = None,
    *,
    drops_fields: bool,
    backend: StateBackend,
) -> Table[Any]:
    """The table of *node* in *subtask*, with what *manifest* has of it; *drops_fields*: see `VersionedState`.

    With *touched*, only the state of these key groups is read; that of the subtask's others is carried over.
    """
    by_partition = any(graph.node(read.node).partitioned for read in node.inputs)
    groups = range(graph.max_parallelism) if by_partition else group_range(subtask, parallelism, graph.max_parallelism)
    snapshot = next((each for each in manifest.operators if each.operator == node.id), None)
    if by_partition and snapshot is not None:
        if snapshot.parallelism != parallelism:
            raise GraphError(
                f"Operator {node.id!r} is keyed by the source's partitions (key_by(..., partitioned=True)), so its "
                f"state cannot be distributed anew: run it with parallelism {snapshot.parallelism}, as before."
            )
        snapshot = OperatorSnapshot(node.id, 1, snapshot.state_bytes, (snapshot.index[subtask],))
    with whole_or_halt(manifest):
        return restore_table(
            node, groups, graph.max_parallelism, manifest.checkpoint, snapshot, reader, touched,
            drops_fields=drops_fields, backend=backend,
        )  # fmt: skip

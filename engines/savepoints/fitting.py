"""A savepoint against a pipeline: what of it fits, by ids of operators, sources and loops, and as they are mapped.

Invariant: whatever does not fit is an error that names it; nothing is left behind that nobody has given up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from exactlyonce.checkpoint.block_storage import Blocks
from exactlyonce.checkpoint.records.encoding import DamagedRecord
from exactlyonce.checkpoint.records.manifest import Manifest, SourceOffset
from exactlyonce.engines.blocks import Storages
from exactlyonce.engines.options import Restoration
from exactlyonce.engines.runtime import in_flight
from exactlyonce.engines.savepoints.contents import Saved, SavedLoop, SavedOperator
from exactlyonce.engines.savepoints.kept_state import KeptEntry, KeptState
from exactlyonce.engines.surroundings.preflight import Inputs
from exactlyonce.pipeline.errors import ConfigError, GraphError
from exactlyonce.pipeline.graph import LogicalGraph, Node
from exactlyonce.state.errors import DamagedState
from exactlyonce.state.state_type import StateType


@dataclass(frozen=True)
class Surroundings:
    """Where the savepoint is restored."""

    graph: LogicalGraph
    inputs: Inputs
    cluster_id: str
    parallelism: int
    storages: Storages
    storage: str
    """Where the states are written; see `Manifest.storage`."""
    note: Callable[[str], None]
    drops_fields: bool = False
    """Whether fields of states that their types do not have are given up."""


def fitting(
    saved: Saved, graph: LogicalGraph, asked: Restoration, *, drops_fields: bool = False
) -> dict[str, SavedOperator]:
    """By operator of *graph*, its state in the savepoint; those without begin empty.

    Raises GraphError for a mapping that names nothing or makes two into one, and for state that no operator takes and
    nobody gives up; `StateIncompatible`, which names operator and field, for state that the operator cannot read, and
    for state by keys that it has no longer, unless it is given up.
    """
    _require_mapped(saved, graph, asked.mapping)
    now = {node.id: node for node in graph.stateful}
    found = {asked.mapping.get(each.operator, each.operator): each for each in saved.operators}
    dropped = sorted(each.operator for new, each in found.items() if new not in now)
    _require_given_up(
        dropped, asked, f"has state of {', '.join(map(repr, dropped))}, and the pipeline no such operator"
    )
    types = {new: state_type_of(now[new], drops_fields=drops_fields) for new in found if new in now}
    if not asked.allow_dropped:
        for new, state_type in types.items():
            state_type.require_keys(found[new].keys, "; or leave its state behind by --allow-dropped-state")
    found = {new: found[new] for new, state_type in types.items() if state_type.has_keys(found[new].keys)}
    for new, operator in found.items():
        if operator.schema is not None:
            state_type = types[new]
            state_type.require_readable(operator.schema, operator.version)
            for version in sorted({file.version for file in operator.files}):
                state_type.require_migrations(version, operator.version)
    return found


def state_type_of(node: Node, *, drops_fields: bool) -> StateType[Any]:
    """The type of the states of *node*."""
    return StateType(node.id, replace(node.kept, drops_fields=drops_fields))


def judge_dropped(
    state_type: StateType[Any],
    written: Any,
    version: int,
    entries: Callable[[], Iterable[KeptEntry]],
    note: Callable[[str], None],
) -> None:
    """Look at all *entries*, states of schema *written* and of *version*, if they have fields that are dropped. Raises
    `StateIncompatible` where some do not have their defaults and nobody gives them up; else notes what goes."""
    paths = state_type.dropped(written, version)
    if not paths:
        return
    kept, keys, other = set[str](), 0, 0
    for entry in entries():
        keys += 1
        if entry.version == version and (found := state_type.changed(entry.state, written)):
            kept.update(found)
            other += 1
    if other and not state_type.drops_fields:
        raise state_type.would_drop(kept, f"{other:,} of {keys:,} keys")
    what = f"{other:,} of {keys:,} keys had other values there" if other else f"{keys:,} keys have their defaults there"
    note(
        f"the state of operator {state_type.operator!r} has fields that {state_type.name} does not have; they go with "
        f"the next checkpoint: {', '.join(paths)}; {what}"
    )


def loops_fitting(saved: Saved, graph: LogicalGraph, asked: Restoration) -> dict[str, SavedLoop]:
    """By loop of *graph*, what goes round it in the savepoint. Raises GraphError for records that no loop takes and
    nobody gives up."""
    now = {node.id for node in graph.loops}
    found = {asked.mapping.get(each.loop, each.loop): each for each in saved.loops}
    dropped = {each.loop: each.records for new, each in found.items() if new not in now}
    rounds = ", ".join(f"{records} records that go round loop {loop!r}" for loop, records in sorted(dropped.items()))
    _require_given_up(dropped, asked, f"has {rounds}, and the pipeline no such loop")
    return {new: each for new, each in found.items() if new in now}


def require_readable(
    graph: LogicalGraph,
    newest: Manifest,
    blocks: Blocks,
    note: Callable[[str], None] = lambda text: None,
    *,
    drops_fields: bool = False,
) -> None:
    """Raise `StateIncompatible` where an operator of *graph* cannot read its state of *newest*, which the pipeline goes
    on from, and `GraphError` where records that were on their way have no place in *graph*: so that no run that goes
    well is fenced for one that cannot. *note* is told of fields that are dropped."""
    now = {node.id: node for node in graph.stateful}
    for snapshot in newest.operators:
        with suppress(DamagedRecord, DamagedState):  # recovery says what can be done about it
            kept = KeptState(newest, snapshot, blocks)
            head = kept.head()
            if head is not None and head.operator in now:
                state_type = state_type_of(now[head.operator], drops_fields=drops_fields)
                state_type.require_keys(head.keys)
                state_type.require_readable(head.schema, head.version)
                judge_dropped(state_type, head.schema, head.version, kept.entries, note)
    if graph.fingerprint() != newest.fingerprint:
        with suppress(DamagedRecord, DamagedState):
            for subtask in range(newest.parallelism):
                in_flight.restored(newest, graph, subtask, newest.parallelism, blocks)


def _require_given_up(dropped: Collection[str], asked: Restoration, has: str) -> None:
    """GraphError where something is *dropped* though nobody has said that it may be; the savepoint *has* it."""
    if dropped and not asked.allow_dropped:
        raise GraphError(
            f"The savepoint {has}. Give it its old id; or say what it is called now by --map {min(dropped)}=NEW; or "
            f"leave it behind by --allow-dropped-state."
        )


def _require_mapped(saved: Saved, graph: LogicalGraph, mapping: Mapping[str, str]) -> None:
    """GraphError unless *mapping* leads from what the savepoint has to what the pipeline has, and makes nothing one.

    Of loops it knows those in which something went round: a loop that was empty may have another id as well.
    """
    loops = {node.id for node in graph.loops}
    kinds = [
        ("operator with state", {each.operator for each in saved.operators}, {node.id for node in graph.stateful}),
        ("source", {each.source for each in saved.offsets}, {node.id for node in graph.sources}),
        ("loop", {each.loop for each in saved.loops}, loops),
    ]
    for old, new in mapping.items():
        kind, now = next(((kind, now) for kind, there, now in kinds if old in there), ("", set[str]()))
        if not kind and new in loops:
            continue
        if not kind:
            known = ", ".join(sorted(set[str]().union(*(there for _, there, _ in kinds))))
            raise GraphError(f"--map {old}={new}: the savepoint has no state and no source of {old!r}. It has {known}.")
        if new not in now:
            raise GraphError(f"--map {old}={new}: the pipeline has no {kind} {new!r}.")
    for _, there, _ in kinds:
        _require_apart(there, mapping)


def _require_apart(ids: Collection[str], mapping: Mapping[str, str]) -> None:
    """GraphError where two of *ids* would become one."""
    olds: dict[str, str] = {}
    for old in sorted(ids):
        new = mapping.get(old, old)
        if new in olds:
            raise GraphError(
                f"{olds[new]!r} and {old!r} of the savepoint would both become {new!r}, which can go on from one of "
                f"them alone. Leave that --map out, or name another id in it."
            )
        olds[new] = old


def refuse_by_partition(operators: Iterable[str], around: Surroundings) -> None:
    """Raise GraphError for state of *operators* that the partitions of a source distribute: which subtask has read a
    key's partition is not kept with its state."""
    if around.parallelism == 1:
        return
    for operator in sorted(operators):
        if any(around.graph.node(read.node).partitioned for read in around.graph.node(operator).inputs):
            raise GraphError(
                f"Operator {operator!r} is keyed by the source's partitions (key_by(..., partitioned=True)): no "
                f"savepoint says which of {around.parallelism} subtasks reads the partition of a key, so that its "
                f"state could meet none of its records. Begin with --parallelism 1, or without partitioned=True."
            )


def offsets_now(saved: Saved, around: Surroundings, asked: Restoration) -> tuple[SourceOffset, ...]:
    """Where each source goes on: where the savepoint has it, and a new one at its start.

    In another cluster topics are found by their names, for their ids are others there.
    """
    elsewhere = saved.cluster_id != around.cluster_id
    kept: list[SourceOffset] = []
    dropped = set()
    for each in saved.offsets:
        source = asked.mapping.get(each.source, each.source)
        readable = around.inputs.sources.get(source)
        if readable is None:
            dropped.add(each.source)
            continue
        if readable.topic != each.topic:
            raise ConfigError(
                f"The savepoint has read source {source!r} from topic {each.topic!r}, and now it reads "
                f"{readable.topic!r}: offsets of one mean nothing in the other. Give the source its old topic, or a "
                f"new id, by which it begins at its start, and add --allow-dropped-state."
            )
        topic_id = around.inputs.described[each.topic].topic_id
        there = msgspec.structs.replace(each, topic_id=topic_id, leader_epoch=-1) if elsewhere else each
        kept.append(msgspec.structs.replace(there, source=source))
    _require_given_up(
        dropped, asked, f"has read source {', '.join(map(repr, sorted(dropped)))}, which the pipeline does not have"
    )
    if elsewhere and kept:
        around.note(
            f"the savepoint was taken in another cluster, {saved.cluster_id}: topics are found by their names, and "
            f"offsets are taken over as they are. They mean the same records only where the topics were mirrored with "
            f"their offsets."
        )
    known = {each.source for each in kept}
    return (*kept, *(each for each in around.inputs.start_offsets() if each.source not in known))

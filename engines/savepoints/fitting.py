"""The check of a savepoint against a pipeline, by ids of operators, sources and loops, mapped or not.

Invariant: everything that does not fit is an error that names it; nothing is dropped unless the user allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from exactlyonce.checkpoint.block_storage import Blocks
from exactlyonce.checkpoint.records.encoding import DamagedRecord
from exactlyonce.checkpoint.records.manifest import Manifest, SourceOffset, TopicSplit
from exactlyonce.connectors.source import Readable
from exactlyonce.engines.blocks import Storages
from exactlyonce.engines.external_checks.preflight import Inputs
from exactlyonce.engines.options import Restoration
from exactlyonce.engines.runtime import in_flight
from exactlyonce.engines.runtime.assembler import key_places
from exactlyonce.engines.savepoints.contents import Saved, SavedLoop, SavedOperator
from exactlyonce.engines.savepoints.kept_state import KeptEntry, KeptState, SavedTimes
from exactlyonce.pipeline.errors import ConfigError, GraphError
from exactlyonce.pipeline.event_time import NO_WATERMARK
from exactlyonce.pipeline.graph import LogicalGraph, Node
from exactlyonce.state.backend import require_meaning
from exactlyonce.state.errors import DamagedState, StateIncompatible
from exactlyonce.state.key_groups import group_range
from exactlyonce.state.slots import GroupTimes
from exactlyonce.state.state_type import StateType


@dataclass(frozen=True)
class RestoreTarget:
    """The place in which a savepoint is restored."""

    graph: LogicalGraph
    inputs: Inputs
    cluster_id: str
    parallelism: int
    storages: Storages
    storage: str
    """The storage of the new states; see `Manifest.storage`."""
    note: Callable[[str], None]
    drops_fields: bool = False
    """Whether fields of states that their types lack may be dropped."""


def fitting(
    saved: Saved, graph: LogicalGraph, asked: Restoration, *, drops_fields: bool = False
) -> dict[str, SavedOperator]:
    """The state in the savepoint of each operator of *graph*; operators without state begin empty.

    Raises GraphError for a mapping that names nothing or merges two ids, and for state of no operator, unless it may be
    dropped; `StateIncompatible`, which names operator and field, for unreadable state, and for state by other keys.
    """
    _require_mapped(saved, graph, asked.mapping)
    now = {node.id: node for node in graph.stateful}
    old = {asked.mapping.get(operator.operator, operator.operator): operator for operator in saved.operators}
    dropped = sorted(operator.operator for new, operator in old.items() if new not in now)
    _require_given_up(
        dropped, asked, f"has state of {', '.join(map(repr, dropped))}, and the pipeline no such operator"
    )
    types = {new: state_type_of(now[new], drops_fields=drops_fields) for new in old if new in now}
    kept: dict[str, SavedOperator] = {}
    for new, state_type in types.items():
        try:
            state_type.require_keys(old[new].keys)
            if old[new].schema is not None:
                require_meaning(new, _meaning(old[new].times), now[new].meaning)
        except StateIncompatible:
            if not asked.allow_dropped:
                raise
        else:
            kept[new] = old[new]
    for new, operator in kept.items():
        if operator.times is not None:
            _require_one_time(operator, operator.times, saved, graph)
        if operator.schema is not None:
            state_type = types[new]
            state_type.require_readable(operator.schema, operator.version)
            for version in sorted({file.version for file in operator.files}):
                state_type.require_migrations(version, operator.version)
    return kept


def _meaning(times: SavedTimes | GroupTimes | None) -> str | None:
    return None if times is None else times.meaning


def _require_one_time(operator: SavedOperator, times: SavedTimes, saved: Saved, graph: LogicalGraph) -> None:
    """ConfigError where key groups have had different watermarks, and the pipeline has other groups. They also have
    them during a firing."""
    different = len({times.watermarks.get(group, NO_WATERMARK) for group in range(saved.max_parallelism)}) > 1
    if (different or times.begun) and saved.max_parallelism != graph.max_parallelism:
        raise ConfigError(
            f"Operator {operator.operator!r} was at different times in different key groups, as in an unaligned "
            f"checkpoint or while windows close, and max_parallelism {graph.max_parallelism} has other groups than "
            f"{saved.max_parallelism}: windows would be lost or come again. Keep max_parallelism "
            f"{saved.max_parallelism}; or take a savepoint while the pipeline runs and no window closes."
        )


def state_type_of(node: Node, *, drops_fields: bool) -> StateType[Any]:
    return StateType(node.id, replace(node.kept, drops_fields=drops_fields))


def judge_dropped(
    state_type: StateType[Any],
    written: Any,
    version: int,
    entries: Callable[[], Iterable[KeptEntry]],
    note: Callable[[str], None],
) -> None:
    """Note the fields that *entries*, states of schema *written* and of *version*, would lose.

    Raises `StateIncompatible` where such fields have other values than their defaults, unless they may be dropped.
    """
    paths = state_type.dropped(written, version)
    if not paths:
        return
    lost, keys, changed_keys = set[str](), 0, 0
    for entry in entries():
        keys += 1
        if entry.version == version and (changed := state_type.changed(entry.state, written)):
            lost.update(changed)
            changed_keys += 1
    share = f"{changed_keys:,} of {keys:,} keys"
    if changed_keys and not state_type.drops_fields:
        raise state_type.would_drop(lost, share)
    values = f"{share} had other values there" if changed_keys else f"{keys:,} keys have their defaults there"
    note(
        f"the state of operator {state_type.operator!r} has fields that {state_type.name} does not have; they go with "
        f"the next checkpoint: {', '.join(paths)}; {values}"
    )


def loops_fitting(saved: Saved, graph: LogicalGraph, asked: Restoration) -> dict[str, SavedLoop]:
    """The in-flight records of each loop of *graph*. GraphError for records of no loop, unless they may be dropped."""
    now = {node.id for node in graph.loops}
    old = {asked.mapping.get(loop.loop, loop.loop): loop for loop in saved.loops}
    dropped = {loop.loop: loop.records for new, loop in old.items() if new not in now}
    rounds = ", ".join(f"{records} records that go round loop {loop!r}" for loop, records in sorted(dropped.items()))
    _require_given_up(dropped, asked, f"has {rounds}, and the pipeline no such loop")
    return {new: loop for new, loop in old.items() if new in now}


def require_readable(
    graph: LogicalGraph,
    newest: Manifest,
    blocks: Blocks,
    note: Callable[[str], None] = lambda text: None,
    *,
    drops_fields: bool = False,
) -> None:
    """Raise before a running instance is fenced for one that cannot go on from *newest*.

    `StateIncompatible` where an operator of *graph* cannot read its state, `GraphError` where in-flight records have no
    place in *graph*. *note* is told of dropped fields.
    """
    now = {node.id: node for node in graph.stateful}
    for snapshot in newest.operators:
        with suppress(DamagedRecord, DamagedState):  # recovery reports these
            kept = KeptState(newest, snapshot, blocks)
            head = kept.head()
            if head is not None and head.operator in now:
                state_type = state_type_of(now[head.operator], drops_fields=drops_fields)
                state_type.require_keys(head.keys)
                require_meaning(head.operator, _meaning(head.times), now[head.operator].meaning)
                state_type.require_readable(head.schema, head.version)
                judge_dropped(state_type, head.schema, head.version, kept.entries, note)
    if graph.fingerprint() != newest.fingerprint:
        with suppress(DamagedRecord, DamagedState):
            _require_placed(graph, newest, blocks)
            for subtask in range(newest.parallelism):
                in_flight.restored(newest, graph, subtask, newest.parallelism, blocks)


def _require_placed(graph: LogicalGraph, newest: Manifest, blocks: Blocks) -> None:
    """GraphError where a changed partitioned= would part keys of several subtasks from their state in *newest*.

    State that key groups place is in the subtasks of these groups; state that partitions place, in any of them.
    """
    now = {node.id: [graph.node(read.node) for read in node.inputs] for node in graph.stateful}
    for snapshot in newest.operators if newest.parallelism > 1 else ():
        if snapshot.operator not in now:
            continue
        kept, parallelism, groups = KeptState(newest, snapshot, blocks), snapshot.parallelism, newest.max_parallelism
        by_group = all(
            set(present) <= {*group_range(subtask, parallelism, groups)} for subtask, present in kept.parts().items()
        )
        key_by = next((node for node in now[snapshot.operator] if node.partitioned), None)
        if key_by is None and not by_group:
            was, how = "with key_by(..., partitioned=...)", ""
        elif key_by is not None and by_group and _has_misplaced(graph, key_by, newest, kept, parallelism):
            was, how = "without partitioned=", " and --parallelism 1"
        else:
            continue
        raise GraphError(
            f"The state of operator {snapshot.operator!r} was made {was}, so {parallelism} subtasks have it otherwise "
            f"than the pipeline now finds it. Go back to that; or begin from a savepoint of it, with "
            f"--from-savepoint{how}."
        )


def _has_misplaced(graph: LogicalGraph, key_by: Node, newest: Manifest, kept: KeptState, parallelism: int) -> bool:
    """Whether a subtask has the state of a key that partitions place in another one."""
    for subtask in range(parallelism):
        places = key_places(graph, key_by, newest, parallelism, subtask)
        if places and any(places.misplaced([entry.key]) is not None for entry in kept.entries(subtask=subtask)):
            return True
    return False


def _require_given_up(dropped: Collection[str], asked: Restoration, has: str) -> None:
    """GraphError where something is *dropped* that may not be; the savepoint *has* it."""
    if dropped and not asked.allow_dropped:
        raise GraphError(
            f"The savepoint {has}. Give it its old id; or say what it is called now by --map {min(dropped)}=NEW; or "
            f"leave it behind by --allow-dropped-state."
        )


def _require_mapped(saved: Saved, graph: LogicalGraph, mapping: Mapping[str, str]) -> None:
    """GraphError unless *mapping* leads from ids of the savepoint to ids of the pipeline, and merges none.

    An empty loop is not in the savepoint, so any old id may be mapped to a loop.
    """
    loops = {node.id for node in graph.loops}
    operators = {operator.operator for operator in saved.operators}
    kinds = [
        ("operator with state", operators, {node.id for node in graph.stateful}),
        ("source", {offset.source for offset in saved.offsets}, {node.id for node in graph.sources}),
        ("loop", {loop.loop for loop in saved.loops}, loops),
    ]
    for old, new in mapping.items():
        kind, now = next(((kind, now) for kind, ids, now in kinds if old in ids), ("", set[str]()))
        if not kind and new in loops:
            continue
        if not kind:
            known = ", ".join(sorted(set[str]().union(*(ids for _, ids, _ in kinds))))
            raise GraphError(f"--map {old}={new}: the savepoint has no state and no source of {old!r}. It has {known}.")
        if new not in now:
            raise GraphError(f"--map {old}={new}: the pipeline has no {kind} {new!r}.")
    for _, ids, _ in kinds:
        olds: dict[str, str] = {}
        for old in sorted(ids):
            new = mapping.get(old, old)
            if new in olds:
                raise GraphError(
                    f"{olds[new]!r} and {old!r} of the savepoint would both become {new!r}, which can go on from one "
                    f"of them alone. Leave that --map out, or name another id in it."
                )
            olds[new] = old


def refuse_by_partition(operators: Iterable[str], around: RestoreTarget) -> None:
    """GraphError for state placed by a source's partitions: the subtask of a key's partition is not kept with it."""
    for operator in sorted(operators) if around.parallelism > 1 else ():
        if any(around.graph.node(read.node).partitioned for read in around.graph.node(operator).inputs):
            raise GraphError(
                f"Operator {operator!r} is keyed by the source's partitions (key_by(..., partitioned=True)): no "
                f"savepoint says which of {around.parallelism} subtasks reads the partition of a key, so that its "
                f"state could meet none of its records. Begin with --parallelism 1, or without partitioned=True."
            )


def offsets_now(saved: Saved, around: RestoreTarget, asked: Restoration) -> tuple[SourceOffset, ...]:
    """The offsets of the savepoint, and those of new sources at their start.

    In another cluster topics have other ids, and are found by their names.
    """
    elsewhere = saved.cluster_id != around.cluster_id
    kept: list[SourceOffset] = []
    dropped = set()
    for offset in saved.offsets:
        source = asked.mapping.get(offset.source, offset.source)
        readable: Readable | None = around.inputs.sources.get(source) or around.inputs.others.get(source)
        if readable is None:
            dropped.add(offset.source)
            continue
        if readable.place != offset.topic:
            what = "topic" if offset.in_topic else "place"
            raise ConfigError(
                f"The savepoint has read source {source!r} from {what} {offset.topic!r}, and now it reads "
                f"{readable.place!r}: offsets of one mean nothing in the other. Give the source its old {what}, or a "
                f"new id, by which it begins at its start, and add --allow-dropped-state."
            )
        changes: dict[str, Any] = {"source": source}
        if elsewhere and offset.in_topic:
            changes |= {"topic_id": around.inputs.described[offset.topic].topic_id, "leader_epoch": -1}
        elif elsewhere and (at := offset.in_cluster) is not None:
            id = around.inputs.topics.own.describe([at.topic])[at.topic].topic_id
            split = TopicSplit.parse(offset.topic_id)._replace(topic_id=id)
            changes |= {"topic_id": str(split), "leader_epoch": -1}
        kept.append(msgspec.structs.replace(offset, **changes))
    _require_given_up(
        dropped, asked, f"has read source {', '.join(map(repr, sorted(dropped)))}, which the pipeline does not have"
    )
    if elsewhere and kept:
        around.note(
            f"the savepoint was taken in another cluster, {saved.cluster_id}: topics are found by their names, and "
            f"offsets are taken over as they are. They mean the same records only where the topics were mirrored with "
            f"their offsets."
        )
    known = {offset.source for offset in kept}
    around.inputs.find_splits(kept)
    return (*kept, *around.inputs.start_offsets(known))

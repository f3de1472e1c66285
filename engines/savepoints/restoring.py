"""The restore of a savepoint: its states are written anew, by today's operators.

Invariants: misfits are found before anything is fenced or written; a living run is not fenced, and checkpoints taken
until the fence are judged after it; states keep their version, and migrate when they are read; nothing refers to the
savepoint afterwards. Manifests carry the origin on, so that the same command, repeated,
goes on instead of restoring again. Everything that does not fit, by ids of operators, sources and loops, mapped or not,
is an error that names it; nothing is dropped unless the user allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from typing import Any, TypeVar

import msgspec

from exactlyonce.checkpoint.block_storage import Blocks
from exactlyonce.checkpoint.records.encoding import DamagedRecord
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import (
    RESTORED,
    BlockRef,
    ChannelLog,
    Manifest,
    OperatorSnapshot,
    Output,
    Restored,
    SourceOffset,
    TopicSplit,
)
from exactlyonce.checkpoint.records.storage_url import storage_url
from exactlyonce.connectors.source import Readable
from exactlyonce.engines.blocks import Storages
from exactlyonce.engines.external_checks.preflight import Inputs
from exactlyonce.engines.options import Restoration
from exactlyonce.engines.runtime import in_flight
from exactlyonce.engines.runtime.assembler import key_places
from exactlyonce.engines.runtime.cut import Steps, SubtaskBlocks, WorkerBlocks, finish
from exactlyonce.engines.runtime.in_flight import InFlightFrame
from exactlyonce.engines.savepoints.contents import (
    KeptEntry,
    KeptState,
    Saved,
    SavedLoop,
    SavedOperator,
    SavedTimes,
    Savepoint,
    TopicSavepoint,
    frames_of_loop,
    origin_in_topic,
    require_same,
)
from exactlyonce.engines.savepoints.exported import ExportedSavepoint
from exactlyonce.engines.savepoints.retained import require_savepoint
from exactlyonce.pipeline.errors import ConfigError, GraphError, require
from exactlyonce.pipeline.event_time import NO_WATERMARK
from exactlyonce.pipeline.graph import LogicalGraph, Node
from exactlyonce.pipeline.keys import key_groups
from exactlyonce.state.backend import require_meaning
from exactlyonce.state.blocks import IMAGE, BlockEncoder, BlockHeader, EncodedBlock, encode_keys
from exactlyonce.state.chain import Chain, IndexHead, encode_index
from exactlyonce.state.errors import DamagedState, StateIncompatible
from exactlyonce.state.key_groups import group_range, subtask_of
from exactlyonce.state.slots import GroupTimes, TableTimes, unpacked_slot
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
            _require_same_groups(operator, now[new], saved, graph)
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


def _require_same_groups(operator: SavedOperator, node: Node, saved: Saved, graph: LogicalGraph) -> None:
    """ConfigError where a state has entries of several keys, which are of one key group no longer."""
    several = node.timed is not None and node.timed.of_several_keys and operator.schema is not None
    if several and saved.max_parallelism != graph.max_parallelism:
        raise ConfigError(
            f"Operator {operator.operator!r} keeps entries of several keys of a key group together, and "
            f"max_parallelism {graph.max_parallelism} has other groups than {saved.max_parallelism}. Keep "
            f"max_parallelism {saved.max_parallelism}: Pipeline(..., max_parallelism={saved.max_parallelism})."
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
    """The offsets of the savepoint, and of new sources their start.

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


SECTION_BYTES = 64 * 1024
DURABLE_TIMEOUT_S = 600.0
_encode = msgspec.msgpack.Encoder().encode
T = TypeVar("T")


def _sought(asked: Restoration, newest: Manifest | None) -> tuple[str, ExportedSavepoint | None]:
    """`Manifest.origin` of a restore of it, and the savepoint, if it was exported.

    ConfigError where there is none, `DamagedSavepoint`. An export from which *newest* was restored need not exist.
    """
    if asked.number is not None:
        return origin_in_topic(asked.number), None
    known, place = newest.origin if newest is not None else "", f" at {storage_url(asked.source)}"
    if known.endswith(place):
        return known, None
    exported = ExportedSavepoint.at(asked.source)
    if known.partition(" at ")[0] == exported.origin:  # it was restored from another place
        return known, exported
    return exported.origin + place, exported


def is_restored(asked: Restoration, newest: Manifest | None) -> bool:
    """Whether *newest* goes on from it already. ConfigError where there is no savepoint, `DamagedSavepoint`."""
    origin, _ = _sought(asked, newest)
    return newest is not None and newest.origin == origin


class Restoring:
    """A restore, found and checked; `write` does it."""

    def __init__(self, asked: Restoration, around: RestoreTarget, history: History | None) -> None:
        """Raises what stands in the way. *history* is the pipeline's, if it has a topic."""
        self._asked, self._around = asked, around
        newest = history.latest if history is not None else None
        self._next = _next(newest)
        self.origin, exported = _sought(asked, newest)
        self._savepoint: Savepoint
        self.manifest: Manifest | None = None
        """The savepoint as far as checks read it; None: it was restored before."""
        self._is_restored = newest is not None and newest.origin == self.origin
        if newest is not None and self._is_restored:
            around.note(f"the savepoint was restored before: the run goes on from checkpoint {newest.checkpoint}")
            return
        self._savepoint = self._savepoint_in(history or History(around.graph.pipeline_id), exported)
        saved = self._savepoint.saved
        self._operators = fitting(saved, around.graph, asked, drops_fields=around.drops_fields)
        for new, operator in self._operators.items():
            if operator.schema is not None:
                state_type = state_type_of(around.graph.node(new), drops_fields=around.drops_fields)
                states = partial(self._savepoint.entries, operator.operator)
                judge_dropped(state_type, operator.schema, operator.version, states, around.note)
        refuse_by_partition(self._operators, around)
        self._loops = loops_fitting(saved, around.graph, asked)
        for new, loop in self._loops.items():
            entries = self._savepoint.loop_entries(loop.loop)
            require_same(new, around.graph.node(new).type, entries, self._savepoint.name, loop.schema)
        self._offsets = offsets_now(saved, around, asked)
        self.manifest = _as_manifest(saved, around.graph.pipeline_id, self._offsets)
        around.inputs.check_continuity(self.manifest)

    def require_alone(self, history: History, now_ms: int) -> None:
        """ConfigError if a run lives, by *history*, which was read right before the fence.

        A run that has not recovered is taken over as usual: it has just begun, or died while it restored this.
        """
        living, newest = history.living(now_ms), history.latest
        if living is None or newest is None or newest.origin == self.origin:
            return
        if living.incarnation in (newest.incarnation, living.fenced_below):
            raise ConfigError(
                f"{history.pipeline} runs: process {living.process} on {living.host} goes on from checkpoint "
                f"{newest.checkpoint}. Nothing was changed: stop it, by `exactlyonce savepoint {history.pipeline} "
                f"--stop` say, and begin from that savepoint. If it has died, run this again in half a minute."
            )

    def judge(self, history: History) -> None:
        """ConfigError if *history*, read after the fence, forbids the restore.

        A checkpoint taken since the first look does, unless it is to be rewound.
        """
        newest = history.latest
        if newest is None or _next(newest) == self._next or newest.origin == self.origin:
            return
        try:
            savepoint = self._savepoint_in(history, None if self._is_restored else self._savepoint)
            if self._is_restored:
                raise ConfigError("It does not go on from the savepoint: run this again.")
        except ConfigError as error:
            taken = history.incarnations.get(newest.incarnation)
            who = f"Process {taken.process} on {taken.host}" if taken is not None else "Another instance"
            raise ConfigError(
                f"{who} has taken checkpoint {newest.checkpoint} while this run began. This run has taken over, so "
                f"that the other one ends; nothing is lost, and nothing was restored. {error}"
            ) from None
        self._savepoint, self._next = savepoint, _next(newest)

    def _savepoint_in(self, history: History, exported: Savepoint | None) -> Savepoint:
        """The savepoint, if *history* lets the pipeline begin from it."""
        newest, number = history.latest, self._asked.number
        if number is not None:
            manifest, latest = require_savepoint(history, number), max(history.manifests)
            if latest != number and not self._asked.rewind:
                raise ConfigError(
                    f"Savepoint {number} is not the newest checkpoint, that is {latest}: output since then is visible, "
                    f"and would be written again. Leave --from-savepoint out, to go on from checkpoint {latest}; or "
                    f"add --rewind, if that is what you want; or export the savepoint, and restore it under another "
                    f"name."
                )
            blocks = self._around.storages.of(manifest.storage)
            return TopicSavepoint(manifest, blocks, self._around.cluster_id)
        if newest is not None:
            raise ConfigError(
                f"{newest.pipeline} has checkpoints here, the newest is {newest.checkpoint}: an exported savepoint "
                f"begins a pipeline that has none. Leave --from-savepoint out, to go on; or `exactlyonce reset "
                f"{newest.pipeline}` first; or give the pipeline another name."
            )
        assert exported is not None, "it would have been restored before"
        return exported

    # --- writing --------------------------------------------------------------------------------------------------

    def write(self, checkpoint: int, incarnation: int, raise_if_fenced: Callable[[], None] = lambda: None) -> Restored:
        """Write all states as blocks of *checkpoint*; return their part of its manifest.

        *raise_if_fenced* is called with each entry and while blocks are written, and may raise.
        """
        require(checkpoint == self._next, "what is restored was judged after the fence")
        blocks = self._around.storages.of(self._around.storage).begin(incarnation, 0)
        schemas = {new: loop.schema for new, loop in self._loops.items() if loop.schema is not None}
        writing = _Writing(WorkerBlocks(blocks, schemas), checkpoint, raise_if_fenced)
        snapshots = tuple(self._write_operator(writing, new, saved) for new, saved in sorted(self._operators.items()))
        logs = self._write_loops(writing)
        self._around.note(f"restored from {self._savepoint.name}")
        return Restored(self._offsets, snapshots, self.origin, logs)

    def _write_loops(self, writing: _Writing) -> tuple[ChannelLog, ...]:
        """Write the in-flight records of the loops by subtask; all are in memory at once, as in the workers."""
        frames: dict[int, list[InFlightFrame]] = {}
        for new, loop in sorted(self._loops.items()):
            entries = _checked(self._savepoint.loop_entries(loop.loop), writing.raise_if_fenced)
            for subtask, frame in frames_of_loop(new, entries, self._around.parallelism):
                frames.setdefault(subtask, []).append(frame)
        logs = [writing.finish(writing.blocks(subtask).in_flight(own)) for subtask, own in sorted(frames.items())]
        return tuple(log for log, _ in logs if log is not None)

    def _write_operator(self, writing: _Writing, operator: str, saved: SavedOperator) -> OperatorSnapshot:
        groups, parallelism = self._around.graph.max_parallelism, self._around.parallelism
        indexes: dict[int, tuple[BlockRef, ...]] = {}
        size = 0
        entries = self._by_group(_checked(self._savepoint.entries(saved.operator), writing.raise_if_fenced))
        with_states = groupby(entries, lambda entry: subtask_of(entry.group, parallelism, groups))
        others = (
            (subtask, iter(())) for subtask in range(parallelism) if subtask not in indexes
        )  # is read after those
        for subtask, own in chain(with_states, others if saved.times is not None else ()):
            require(subtask not in indexes, "the states of a savepoint lie by key group")
            times = self._times(saved, group_range(subtask, parallelism, groups))
            blocks, headers = writing.blocks(subtask), list[BlockHeader]()
            images = _images(operator, writing.checkpoint, own, headers, times)
            refs = writing.finish(blocks.state(operator, images))
            states = Chain().extended(list(zip(refs, headers, strict=True)))
            head = IndexHead(
                operator, writing.checkpoint, groups, saved.schema, 0.0, saved.version, saved.keys,
                None if times is None else times.written(),
            )  # fmt: skip
            parts = encode_index(states, head)
            indexes[subtask] = tuple(writing.finish(blocks.durable(blocks.index(operator, parts))))
            size += states.size
        return OperatorSnapshot(operator, parallelism, size, tuple(indexes.get(n, ()) for n in range(parallelism)))

    def _times(self, saved: SavedOperator, groups: range) -> TableTimes | None:
        """The times of a timed table of *groups*: no state is put where a window has fired."""
        if saved.times is None:
            return None
        watermarks, begun = saved.times.watermarks, saved.times.begun
        if self._savepoint.saved.max_parallelism != self._around.graph.max_parallelism:
            watermarks = dict.fromkeys(groups, max(watermarks.values(), default=NO_WATERMARK))  # all are the same
        own = {group: watermarks[group] for group in groups if group in watermarks}
        own_begun = {group: begun[group] for group in groups if group in begun}
        return TableTimes(groups, watermarks=own, meaning=saved.times.meaning, begun=own_begun)

    def _by_group(self, entries: Iterator[KeptEntry]) -> Iterator[KeptEntry]:
        """All states by key group of today's pipeline."""
        max_parallelism = self._around.graph.max_parallelism
        if self._savepoint.saved.max_parallelism == max_parallelism:
            return entries
        old = list(entries)
        groups = key_groups([entry.key for entry in old], max_parallelism)
        return iter(sorted(entry._replace(group=group) for entry, group in zip(old, groups, strict=True)))


def _next(newest: Manifest | None) -> int:
    return newest.checkpoint + 1 if newest is not None else 0


class _Writing:
    """Writes blocks of *checkpoint* durably."""

    def __init__(self, blocks: WorkerBlocks, checkpoint: int, raise_if_fenced: Callable[[], None]) -> None:
        self._blocks, self.checkpoint, self.raise_if_fenced = blocks, checkpoint, raise_if_fenced

    def blocks(self, subtask: int) -> SubtaskBlocks:
        return SubtaskBlocks(self._blocks, self.checkpoint, RESTORED, subtask)

    def finish(self, steps: Steps[T]) -> T:
        """Take all *steps*. `BrokerUnavailable` if a block takes too long."""
        return finish(steps, lambda: self._blocks.attempt.wait(DURABLE_TIMEOUT_S, self.raise_if_fenced))


def _images(
    operator: str, checkpoint: int, entries: Iterable[KeptEntry], headers: list[BlockHeader], times: TableTimes | None
) -> Iterator[EncodedBlock]:
    """Blocks of one version each, because a state is read by its own version; their headers go to *headers*.

    Places are noted in *times*, if the table is timed.
    """
    encoders: dict[int, BlockEncoder] = {}
    for (group, version), own in groupby(entries, lambda entry: (entry.group, entry.version)):
        encoder = encoders.setdefault(version, BlockEncoder(operator, checkpoint, version))
        for section in _sections(own):
            states = _encode([msgspec.Raw(entry.state) for entry in section])
            places = [entry.place for entry in section]
            if times is not None:
                for slot in set(map(unpacked_slot, places)):
                    times.note(slot, group)
            keys = encode_keys(places, [], [entry.key for entry in section])
            if (block := encoder.add(group, IMAGE, keys, states, len(section))) is not None:
                headers.append(block.header)
                yield block
    for encoder in encoders.values():
        if (last := encoder.flush()) is not None:
            headers.append(last.header)
            yield last


def _checked(entries: Iterable[T], raise_if_fenced: Callable[[], None]) -> Iterator[T]:
    """*entries*, and *raise_if_fenced* is called before each."""
    for entry in entries:
        raise_if_fenced()
        yield entry


def _sections(entries: Iterable[KeptEntry]) -> Iterator[list[KeptEntry]]:
    section: list[KeptEntry] = []
    size = 0
    for entry in entries:
        if section and size + len(entry.key) + len(entry.state) > SECTION_BYTES:
            yield section
            section, size = [], 0
        section.append(entry)
        size += len(entry.key) + len(entry.state)
    if section:
        yield section


def _as_manifest(saved: Saved, pipeline: str, offsets: tuple[SourceOffset, ...]) -> Manifest:
    """The part of a manifest that the checks of inputs and outputs read."""
    return Manifest(
        pipeline=pipeline, checkpoint=saved.checkpoint, incarnation=0, attempt=0, kind=saved.kind, base=0, previous=0,
        triggered_at_ms=0, completed_at_ms=saved.completed_at_ms, fingerprint=saved.fingerprint,
        max_parallelism=saved.max_parallelism, parallelism=1, block_partitions=1, block_end_offsets=(),
        written_bytes=0, offsets=offsets, operators=(), order_logs=(), committables=(),
        sinks=tuple(Output(sink, topic, 0, partitioner=partitioner) for sink, topic, partitioner in saved.outputs),
    )  # fmt: skip

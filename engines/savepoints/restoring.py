"""A savepoint becomes the state that a pipeline goes on from: its states are written anew, by today's operators.

Invariants: whatever does not fit is found before anything is fenced or written, and named by operator and field; states
are written with the version that they have, and migrated when they are read; nothing of the savepoint is referred to
afterwards. It is restored once: while runs are told of it, the origin goes from manifest to manifest, so that the same
command, repeated, goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby

import msgspec

from exactlyonce.checkpoint.records.encoding import DamagedRecord
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import BlockRef, Manifest, OperatorSnapshot, Restored, SourceOffset
from exactlyonce.checkpoint.store.storage import AttemptBlocks, Blocks, Ticket
from exactlyonce.engines.blocks import BlockNames, Storages
from exactlyonce.engines.options import Restoration
from exactlyonce.engines.savepoints.contents import Saved, SavedOperator, Savepoint, TopicSavepoint, origin_in_topic
from exactlyonce.engines.savepoints.exported import ExportedSavepoint
from exactlyonce.engines.savepoints.kept_state import KeptEntry, KeptState
from exactlyonce.engines.savepoints.retained import require_savepoint
from exactlyonce.engines.surroundings.preflight import Inputs
from exactlyonce.pipeline.errors import ConfigError, GraphError, require
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.keys import key_groups
from exactlyonce.state.blocks import IMAGE, BlockEncoder, BlockHeader, EncodedBlock, encode_keys
from exactlyonce.state.chain import Chain
from exactlyonce.state.errors import DamagedState
from exactlyonce.state.index import IndexHead, encode_index
from exactlyonce.state.key_groups import subtask_of
from exactlyonce.state.state_type import StateType

SECTION_BYTES = 64 * 1024
PENDING_MAX = 64
DURABLE_TIMEOUT_S = 600.0
_encode = msgspec.msgpack.Encoder().encode


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


def _sought(asked: Restoration) -> tuple[str, ExportedSavepoint | None]:
    """`Manifest.origin` of what goes on from it, and the savepoint itself, if it was exported. ConfigError where there
    is none, `DamagedSavepoint`."""
    if asked.number is not None:
        return origin_in_topic(asked.number), None
    exported = ExportedSavepoint.at(asked.source)
    return exported.origin, exported


def is_restored(asked: Restoration, newest: Manifest | None) -> bool:
    """Whether *newest* goes on from it already: the same command, repeated, restores nothing. Raises ConfigError where
    there is none, `DamagedSavepoint`."""
    origin, _ = _sought(asked)
    return newest is not None and newest.origin == origin


class Restoring:
    """What is to be restored, found and checked; `write` does it."""

    def __init__(self, asked: Restoration, around: Surroundings, history: History | None) -> None:
        """Raises what stands in the way. *history* is that of the pipeline, if it has a topic."""
        self._asked, self._around = asked, around
        newest = history.latest if history is not None else None
        self._next = newest.checkpoint + 1 if newest is not None else 0
        self.origin, exported = _sought(asked)
        if newest is not None and newest.origin == self.origin:
            around.note(f"the savepoint was restored before: the run goes on from checkpoint {newest.checkpoint}")
            return
        self._savepoint: Savepoint
        if asked.number is not None:
            self._savepoint = self._in_topic(asked.number, history or History(around.graph.pipeline_id))
        elif exported is not None:
            self._savepoint = exported
            if newest is not None:
                raise ConfigError(
                    f"{newest.pipeline} has checkpoints here, the newest is {newest.checkpoint}: an exported savepoint "
                    f"begins a pipeline that has none. Leave --from-savepoint out, to go on; or `exactlyonce reset "
                    f"{newest.pipeline}` first; or give the pipeline another name."
                )
        saved = self._savepoint.saved
        self._operators = fitting(saved, around.graph, asked)
        refuse_by_partition(self._operators, around)
        self._offsets = offsets_now(saved, around, asked)
        around.inputs.check_continuity(_as_manifest(saved, around.graph.pipeline_id, self._offsets))

    def _in_topic(self, number: int, history: History) -> TopicSavepoint:
        found, newest = require_savepoint(history, number), max(history.manifests)
        if newest != number and not self._asked.rewind:
            raise ConfigError(
                f"Savepoint {number} is not the newest checkpoint, that is {newest}: output since then is visible, and "
                f"would be written again. Leave --from-savepoint out, to go on from checkpoint {newest}; or add "
                f"--rewind, if that is what you want; or export the savepoint, and restore it under another name."
            )
        blocks = self._around.storages.of(found.storage)
        return TopicSavepoint(found, blocks, self._around.cluster_id)

    # --- writing --------------------------------------------------------------------------------------------------

    def write(self, checkpoint: int, incarnation: int) -> Restored:
        """Write all states as blocks of *checkpoint*; what its manifest says of them."""
        if checkpoint != self._next:
            raise ConfigError(
                "Another instance of the pipeline has taken a checkpoint while this one began: it was checked against "
                "an older one. Nothing was changed: stop the other, and run this again."
            )
        blocks = self._around.storages.of(self._around.storage).begin(incarnation, 0)
        names = BlockNames(0)
        snapshots = tuple(
            self._written(blocks, names, new, saved, checkpoint) for new, saved in sorted(self._operators.items())
        )
        self._around.note(f"restored from {self._savepoint.name}")
        return Restored(self._offsets, snapshots, self.origin)

    def _written(
        self, blocks: AttemptBlocks, names: BlockNames, operator: str, saved: SavedOperator, checkpoint: int
    ) -> OperatorSnapshot:
        graph, parallelism = self._around.graph, self._around.parallelism
        putting = _Putting(blocks, names, operator, checkpoint)
        head = IndexHead(operator, checkpoint, graph.max_parallelism, saved.schema, 0.0, saved.version)
        indexes: list[tuple[BlockRef, ...]] = [()] * parallelism
        size = 0
        entries = self._by_group(saved.operator, graph.max_parallelism)
        for subtask, own in groupby(entries, lambda each: subtask_of(each.group, parallelism, graph.max_parallelism)):
            require(not indexes[subtask], "the states of a savepoint lie by key group")
            chain = Chain().extended(putting.state(own))
            indexes[subtask] = putting.index(encode_index(chain, head))
            size += chain.size
        return OperatorSnapshot(operator, parallelism, size, tuple(indexes))

    def _by_group(self, operator: str, max_parallelism: int) -> Iterator[KeptEntry]:
        """All states, key group by key group."""
        entries = self._savepoint.entries(operator)
        if self._savepoint.saved.max_parallelism == max_parallelism:
            return entries  # they lie so
        found = list(entries)
        groups = key_groups([each.key for each in found], max_parallelism)
        return iter(sorted((each._replace(group=group) for each, group in zip(found, groups, strict=True))))


class _Putting:
    """Puts the blocks of one operator."""

    def __init__(self, blocks: AttemptBlocks, names: BlockNames, operator: str, checkpoint: int) -> None:
        self._blocks, self._names, self._operator, self._checkpoint = blocks, names, operator, checkpoint

    def state(self, entries: Iterable[KeptEntry]) -> list[tuple[BlockRef, BlockHeader]]:
        """Put images of all key groups in *entries*; where they lie."""
        put = []
        for block in self._cut(entries):
            self._await_room()
            put.append((self._names.write(self._blocks, self._checkpoint, self._operator, block), block.header))
        self._blocks.wait(DURABLE_TIMEOUT_S)
        return [(_durable(ticket), header) for ticket, header in put]

    def index(self, parts: Iterable[bytes]) -> tuple[BlockRef, ...]:
        """Put the parts of an index."""
        put = [self._names.write_index(self._blocks, self._checkpoint, self._operator, part) for part in parts]
        self._blocks.wait(DURABLE_TIMEOUT_S)
        return tuple(map(_durable, put))

    def _await_room(self) -> None:
        while self._blocks.poll() > PENDING_MAX:
            self._blocks.poll(0.05)

    def _cut(self, entries: Iterable[KeptEntry]) -> Iterator[EncodedBlock]:
        """Blocks of one version each: states that were written by several are read by their own."""
        encoders: dict[int, BlockEncoder] = {}
        for (group, version), same in groupby(entries, lambda each: (each.group, each.version)):
            encoder = encoders.setdefault(version, BlockEncoder(self._operator, self._checkpoint, version))
            for some in _sections(same):
                states = _encode([msgspec.Raw(each.state) for each in some])
                keys = encode_keys([each.key for each in some], [])
                if (block := encoder.add(group, IMAGE, keys, states, len(some))) is not None:
                    yield block
        for encoder in encoders.values():
            if (last := encoder.flush()) is not None:
                yield last


def _durable(ticket: Ticket) -> BlockRef:
    assert ticket.ref is not None, "it was waited for"
    return ticket.ref


def _sections(entries: Iterable[KeptEntry]) -> Iterator[list[KeptEntry]]:
    some: list[KeptEntry] = []
    size = 0
    for entry in entries:
        if some and size + len(entry.key) + len(entry.state) > SECTION_BYTES:
            yield some
            some, size = [], 0
        some.append(entry)
        size += len(entry.key) + len(entry.state)
    if some:
        yield some


# --- what fits ------------------------------------------------------------------------------------------------------


def fitting(saved: Saved, graph: LogicalGraph, asked: Restoration) -> dict[str, SavedOperator]:
    """By operator of *graph*, its state in the savepoint; those without begin empty.

    Raises GraphError for a mapping that names nothing or makes two into one, and for state that no operator takes and
    nobody gives up; `StateIncompatible`, which names operator and field, for state that the operator cannot read.
    """
    there = {each.operator: each for each in saved.operators}
    sources = {each.source for each in saved.offsets}
    now = {node.id: node for node in graph.stateful}
    for old, new in asked.mapping.items():
        if old not in there and old not in sources:
            known = ", ".join(sorted({*there, *sources}))
            raise GraphError(f"--map {old}={new}: the savepoint has no state and no source of {old!r}. It has {known}.")
        if new not in (now if old in there else {node.id for node in graph.sources}):
            kind = "operator with state" if old in there else "source"
            raise GraphError(f"--map {old}={new}: the pipeline has no {kind} {new!r}.")
    for each in (there.keys(), sources):
        _require_apart(each, asked.mapping)
    found: dict[str, SavedOperator] = {}
    dropped = []
    for old, operator in there.items():
        new = asked.mapping.get(old, old)
        if new in now:
            found[new] = operator
        else:
            dropped.append(old)
    if dropped and not asked.allow_dropped:
        raise GraphError(
            f"The savepoint has state of {', '.join(map(repr, sorted(dropped)))}, and the pipeline no such operator. "
            f"Give it its old id; or say what it is called now by --map {sorted(dropped)[0]}=NEW; or leave the state "
            f"behind by --allow-dropped-state."
        )
    for new, operator in found.items():
        if operator.schema is not None:
            StateType(new, now[new].kept).require_readable(operator.schema, operator.version)
    return found


def require_readable(graph: LogicalGraph, newest: Manifest, blocks: Blocks) -> None:
    """Raise `StateIncompatible` where an operator of *graph* cannot read its state of *newest*, which the pipeline goes
    on from: so that no run that goes well is fenced for one that cannot."""
    now = {node.id: node for node in graph.stateful}
    for snapshot in newest.operators:
        head = None
        with suppress(DamagedRecord, DamagedState):  # recovery says what can be done about it
            head = KeptState(newest, snapshot, blocks).head()
        if head is not None and head.operator in now:
            StateType(head.operator, now[head.operator].kept).require_readable(head.schema, head.version)


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
    if dropped and not asked.allow_dropped:
        raise GraphError(
            f"The savepoint has read source {', '.join(map(repr, sorted(dropped)))}, which the pipeline does not have. "
            f"Give it its old id; or say what it is called now by --map {sorted(dropped)[0]}=NEW; or leave it behind "
            f"by --allow-dropped-state."
        )
    if elsewhere and kept:
        around.note(
            f"the savepoint was taken in another cluster, {saved.cluster_id}: topics are found by their names, and "
            f"offsets are taken over as they are. They mean the same records only where the topics were mirrored with "
            f"their offsets."
        )
    known = {each.source for each in kept}
    return (*kept, *(each for each in around.inputs.start_offsets() if each.source not in known))


def _as_manifest(saved: Saved, pipeline: str, offsets: tuple[SourceOffset, ...]) -> Manifest:
    """As much of a manifest as the check of the inputs looks at."""
    return Manifest(
        pipeline=pipeline, checkpoint=saved.checkpoint, incarnation=0, attempt=0, kind=saved.kind, base=0, previous=0,
        triggered_at_ms=0, completed_at_ms=saved.completed_at_ms, fingerprint=saved.fingerprint,
        max_parallelism=saved.max_parallelism, parallelism=1, block_partitions=1, block_end_offsets=(),
        written_bytes=0, offsets=offsets, operators=(), order_logs=(), committables=(), sinks=(),
    )  # fmt: skip

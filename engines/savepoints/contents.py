"""A savepoint, in the topic or exported: its description, the states of its operators, and the records of its loops.

Invariants: a savepoint is self-contained: it refers to no transaction, committable or other checkpoint, and its offsets
name topics, with their ids then. In-flight records are independent of the frames' graph; those of a loop and a subtask
keep their order, and stay together at any parallelism. State is read without the pipeline's code: the index describes
keys and states, so they are decoded without their types; missing blocks of a checkpoint that has expired meanwhile are
an error.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import reduce
from itertools import groupby, pairwise
from operator import attrgetter, or_
from typing import Any, NamedTuple, Protocol

import msgspec

from exactlyonce.checkpoint.block_storage import Blocks
from exactlyonce.checkpoint.records.manifest import BlockRef, Manifest, OperatorSnapshot, SourceOffset
from exactlyonce.engines.plan import LOOP_MARK
from exactlyonce.engines.runtime import in_flight
from exactlyonce.engines.runtime.batch import Batch, BatchCodec, Coordinates, coordinates_of, is_same, records_in
from exactlyonce.engines.runtime.in_flight import InFlightFrame, frames_of
from exactlyonce.pipeline.errors import ConfigError, GraphError
from exactlyonce.pipeline.keys import canonical_key, described_forms, key_group
from exactlyonce.pipeline.names import nearest
from exactlyonce.pipeline.records import wire_of
from exactlyonce.pipeline.shape import type_name
from exactlyonce.pipeline.versions import KEPT_BY_AVRO, is_by_avro
from exactlyonce.state.chain import Chain, Index, IndexHead, decode_index
from exactlyonce.state.key_groups import mask_of
from exactlyonce.state.slots import TableTimes, key_of, packed_slot, unpacked_slot
from exactlyonce.state.stored import StoredState

READ_BYTES = 32 << 20
"""The size of blocks read at once, because the state may be larger than memory."""
SHARES = 16
"""The shares of the key groups, sorted one after the other where several subtasks have state of one group."""


class KeptEntry(NamedTuple):
    group: int
    key: bytes
    """Canonical (`pipeline.keys`)."""
    state: bytes
    """In msgpack."""
    version: int
    slot: int | None = None
    """In a timed table, the slot of the state (`state.slots`)."""

    @property
    def place(self) -> bytes:
        """The key in the blocks."""
        return self.key if self.slot is None else packed_slot(self.slot) + self.key


def portions(
    entries: Iterable[KeptEntry], bytes_max: int, count_max: int | None = None, *, by_version: bool = False
) -> Iterator[list[KeptEntry]]:
    """*entries* in lists of about *bytes_max* bytes, or of *count_max*; *by_version*: in lists of one version each.

    In a checkpoint that is no savepoint, each state may have another version than the next.
    """
    open_lists: defaultdict[int, list[KeptEntry]] = defaultdict(list)
    sizes = Counter[int]()
    for entry in entries:
        version = entry.version if by_version else 0
        portion = open_lists[version]
        portion.append(entry)
        sizes[version] += len(entry.key) + len(entry.state)
        if sizes[version] >= bytes_max or len(portion) == count_max:
            yield portion
            del open_lists[version], sizes[version]
    yield from open_lists.values()


class SavedTimes(msgspec.Struct, frozen=True):
    """The times of a timed table."""

    meaning: str
    """See `GroupTimes.meaning`."""
    watermarks: dict[int, int]
    """The last one by key group; other groups had none."""
    begun: dict[int, tuple[int, bytes]] = {}
    """See `GroupTimes.begun`; by key group."""


class KeptState:
    """The state of one operator at the checkpoint of *manifest*."""

    def __init__(self, manifest: Manifest, snapshot: OperatorSnapshot, blocks: Blocks) -> None:
        self.operator = snapshot.operator
        self._manifest, self._snapshot, self._blocks = manifest, snapshot, blocks

    def head(self) -> IndexHead | None:
        """The description of all states in the index; None where there is no state."""
        return next((decode_index(body).head for parts in self._snapshot.index for body in self._bodies(parts)), None)

    def times(self) -> SavedTimes | None:
        """The times of a timed table. ConfigError where subtasks, which share key groups, had other ones."""
        watermarks: dict[int, int] = {}
        begun: dict[int, tuple[int, bytes]] = {}
        meaning: str | None = None
        for indexes in self.indexes().values():
            if (times := indexes[0].head.times) is None:
                continue
            meaning = times.meaning
            begun |= {group: (slot, key) for group, slot, key in times.begun}
            for group, watermark in zip(times.groups, times.watermarks, strict=True):
                if watermarks.setdefault(group, watermark) != watermark:
                    raise ConfigError(
                        f"Operator {self.operator!r} is keyed by the source's partitions, and its subtasks were at "
                        f"different times: in one table, some of its windows would be lost or come again. Only a run "
                        f"with parallelism {self._snapshot.parallelism}, as before, goes on with them."
                    )
        return None if meaning is None else SavedTimes(meaning, watermarks, begun)

    def keys(self) -> Any:
        """See `schema_of_keys`."""
        return schema_of_keys(index for own in self.indexes().values() for index in own)

    def parts(self) -> dict[int, list[int]]:
        """The key groups with state of each old subtask. State placed by a source's partitions overlaps in groups."""
        return {subtask: self._present(indexes) for subtask, indexes in self.indexes().items()}

    def entries(self, groups: Iterable[int] | None = None, *, subtask: int | None = None) -> Iterator[KeptEntry]:
        """The states, by key group: all, or of the key *groups* or of an old *subtask* alone."""
        key_groups = range(self._manifest.max_parallelism)
        wanted = set(key_groups if groups is None else groups)
        by_subtask = self.indexes(subtask)
        chosen = {number: sorted(wanted & {*self._present(indexes)}) for number, indexes in by_subtask.items()}
        if all(before[-1] < after[0] for before, after in pairwise(filter(None, chosen.values()))):
            for number, own in chosen.items():
                yield from self._of(by_subtask[number], own)
            return
        size = -(-len(key_groups) // SHARES)
        for start in range(0, len(key_groups), size):
            share = [
                entry
                for number, own in chosen.items()
                for entry in self._of(by_subtask[number], [group for group in own if start <= group < start + size])
            ]
            yield from sorted(share, key=attrgetter("group"))

    def indexes(self, only: int | None = None) -> dict[int, list[Index]]:
        """The parts of each old subtask's index."""
        return {
            subtask: [decode_index(body) for body in self._bodies(parts)]
            for subtask, parts in enumerate(self._snapshot.index)
            if parts and only in (None, subtask)
        }

    def _present(self, indexes: Iterable[Index]) -> list[int]:
        """The key groups with state in the chain of a subtask."""
        mask = 0
        for index in indexes:
            for block in index.blocks:
                mask |= block.groups
        return [group for group in range(self._manifest.max_parallelism) if mask >> group & 1]

    def _of(self, indexes: Sequence[Index], groups: list[int]) -> Iterator[KeptEntry]:
        if not groups:
            return
        stored, times = self.stored(indexes, groups), indexes[0].head.times
        while groups:
            portion = stored.together(groups, READ_BYTES)
            for group, raw_states in stored.reading_raw(portion):
                for key, raw in raw_states.states.items():
                    own, slot = (key, None) if times is None else (key_of(key), unpacked_slot(key))
                    yield KeptEntry(group, own, raw.msgpack, raw.version, slot)
            groups = groups[len(portion) :]

    def stored(self, indexes: Sequence[Index], groups: Sequence[int]) -> StoredState[Any]:
        """The state of *groups* in an old subtask's chain, of which *indexes* are all parts."""
        times = indexes[0].head.times
        return StoredState(
            operator=self.operator,
            type=Any,
            groups=groups,
            max_parallelism=self._manifest.max_parallelism,
            checkpoint=self._manifest.checkpoint,
            chain=Chain.of((block for index in indexes for block in index.blocks), mask_of(groups)),
            schema=indexes[0].head.schema,
            times=None if times is None else TableTimes.of([times], groups),
            fetch=lambda refs: ((ref, block.body) for ref, block in self._blocks.fetch(refs)),
        )

    def _bodies(self, parts: tuple[BlockRef, ...]) -> Iterator[bytes]:
        return (block.body for _, block in self._blocks.fetch(parts))

    def of_key(self, text: str) -> Iterator[KeptEntry]:
        """The states of `possible_keys` by *text*."""
        keys = possible_keys(text)
        groups = {key_group(key, self._manifest.max_parallelism) for key in keys}
        return (entry for entry in self.entries(groups) if entry.key in keys)


def schema_of_keys(indexes: Iterable[Index]) -> Any:
    """The schema of the keys in *indexes*, noted or derived from the forms of all keys; None: unknown."""
    indexes = [*indexes]
    if noted := next((index.head.keys for index in indexes if index.head.keys is not None), None):
        return noted
    forms = [block.key_forms for index in indexes for block in index.blocks]
    return described_forms(reduce(or_, forms)) if forms and all(forms) else None


def possible_keys(text: str) -> set[bytes]:
    """The canonical keys that *text* may mean: the word itself, and the JSON value that it spells.

    >>> sorted(possible_keys("7"))
    [b'\\x07', b'\\xa17']
    """
    try:
        keys = {canonical_key(text)}
    except UnicodeEncodeError:
        raise ConfigError("The key is no UTF-8, and no state has such a key. Write it as UTF-8.") from None
    # it is a word, or a value that is nobody's key
    with suppress(msgspec.DecodeError, TypeError, OverflowError, RecursionError):
        keys.add(canonical_key(msgspec.json.decode(text)))
    return keys


def kept_state(manifest: Manifest, operator: str, blocks: Blocks) -> KeptState:
    """The state of *operator*; ConfigError, with the existing ones, if the checkpoint has no such operator."""
    for snapshot in manifest.operators:
        if snapshot.operator == operator:
            return KeptState(manifest, snapshot, blocks)
    known = [snapshot.operator for snapshot in manifest.operators]
    near = nearest(operator, known)
    raise ConfigError(
        f"Checkpoint {manifest.checkpoint} has no state of an operator {operator!r}."
        f"{f' Did you mean {near}?' if near else ''} Its operators with state are: "
        f"{', '.join(known) or 'none: the pipeline keeps no state'}."
    )


def decoded(encoded: bytes, schema: Any = None) -> Any:
    """The value of msgpack *encoded*; with its *schema*, fields written by position get names.

    ConfigError for a dict whose keys are records.

    >>> decoded(b"\\x92\\x01\\x02", {"record": "Pair", "fields": [["a", "int"], ["b", "int"]], "array": True})
    {'a': 1, 'b': 2}
    """
    try:
        return named(msgspec.msgpack.decode(encoded), schema)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"A state has a dict whose keys are records, which the types of the pipeline alone can read ({error}). "
            f"Keys that are written by position (array_like=True), texts and tuples can be shown."
        ) from None


def named(value: Any, schema: Any) -> Any:
    """*value*, with the names of fields that were written by position."""
    if not isinstance(schema, dict):
        return value
    if is_by_avro(schema):
        raise ConfigError(f"The state {KEPT_BY_AVRO}")
    if "optional" in schema:
        return named(value, schema["optional"])
    if "union" in schema:
        members = [member for member in schema["union"] if member != "null"]
        return named(value, members[0]) if len(members) == 1 and value is not None else value
    if "fields" in schema and isinstance(value, list):
        fields = by_position(value, schema)
        return {name: named(field, type_) for field, (name, type_) in zip(fields, schema["fields"], strict=False)}
    if "fields" in schema and isinstance(value, dict):
        types = dict(schema["fields"])
        return {name: named(field, types.get(name)) for name, field in value.items()}
    if "dict" in schema and isinstance(value, dict):
        return {key: named(item, schema["dict"][1]) for key, item in value.items()}
    for sequence in ("list", "set"):
        if sequence in schema and isinstance(value, list):
            return [named(item, schema[sequence]) for item in value]
    if "tuple" in schema and isinstance(value, list):
        return [named(item, type_) for item, type_ in zip(value, schema["tuple"], strict=True)]
    return value


def by_position(value: Sequence[Any], schema: Any) -> Sequence[Any]:
    """The fields of a record that was written as a list, without its tag."""
    return value[1:] if "tag" in schema else value


FRAME_RECORDS = 500
_RAW = BatchCodec(msgspec.Raw)


class LoopEntry(NamedTuple):
    """A record in flight in a loop."""

    subtask: int
    record: bytes
    """In msgpack."""
    topic: str
    partition: int
    offset: int
    """The offset of the message from which it stems."""


class SavedFile(msgspec.Struct, frozen=True):
    """A file of an export, with states of one operator and one version, or records of one loop."""

    name: str
    size: int
    sha256: str
    entries: int
    version: int


class SavedOperator(msgspec.Struct, frozen=True):
    operator: str
    schema: Any = None
    """The schema of states of the newest version, as `VersionedState.schema` gives it; None: there are none."""
    version: int = 1
    """The newest version of its states."""
    keys: Any = None
    """The schema of the keys, if their type is noted."""
    key_forms: int = 0
    """The forms of the keys in an export (`pipeline.keys`); 0: unknown."""
    files: tuple[SavedFile, ...] = ()
    """The files of an export; empty in the topic."""
    times: SavedTimes | None = None
    """The times of a timed table."""


class SavedLoop(msgspec.Struct, frozen=True):
    """The in-flight records of one loop."""

    loop: str
    records: int
    schema: Any = None
    """The schema of the records (`pipeline.shape`); None: unknown."""
    files: tuple[SavedFile, ...] = ()
    """The files of an export; empty in the topic."""


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a savepoint."""

    pipeline: str
    checkpoint: int
    kind: str
    cluster_id: str
    completed_at_ms: int
    max_parallelism: int
    fingerprint: str
    offsets: tuple[SourceOffset, ...]
    operators: tuple[SavedOperator, ...]
    loops: tuple[SavedLoop, ...] = ()
    """The loops with in-flight records."""
    outputs: tuple[tuple[str, str, str], ...] = ()
    """(sink id, topic, partitioner) of each output in a topic, see `Output`; empty: not known."""


class Savepoint(Protocol):
    """A savepoint to be exported or restored."""

    @property
    def saved(self) -> Saved: ...

    @property
    def origin(self) -> str:
        """`Manifest.origin` of checkpoints restored from it; unique to this savepoint."""

    @property
    def name(self) -> str:
        """The name in messages to people."""

    def entries(self, operator: str) -> Iterator[KeptEntry]:
        """All states of *operator*. Raises an error that names a damaged block or file."""

    def loop_entries(self, loop: str) -> Iterator[LoopEntry]:
        """The in-flight records of *loop*, subtask by subtask, in order. Raises likewise."""


class TopicSavepoint:
    """A `Savepoint` that is a checkpoint of a pipeline in its own topic."""

    def __init__(self, manifest: Manifest, blocks: Blocks, cluster_id: str) -> None:
        """Raises ConfigError for an unaligned checkpoint."""
        loops, overtaken = records_by_loop(manifest, blocks)
        if overtaken:
            raise ConfigError(
                f"Checkpoint {manifest.checkpoint} of {manifest.pipeline} is unaligned: it holds {overtaken} records "
                f"that a barrier had overtaken. Neither an export nor --from-savepoint can take them along, and they "
                f"would be lost. Take a savepoint while the pipeline runs, which is aligned, or let it end cleanly. A "
                f"run without --from-savepoint goes on from this checkpoint as it is."
            )
        self._manifest, self._blocks = manifest, blocks
        schemas = schemas_of(manifest, blocks) if loops else {}
        states = [KeptState(manifest, snapshot, blocks) for snapshot in manifest.operators]
        self.saved = Saved(
            pipeline=manifest.pipeline,
            checkpoint=manifest.checkpoint,
            kind=manifest.kind,
            cluster_id=cluster_id,
            completed_at_ms=manifest.completed_at_ms,
            max_parallelism=manifest.max_parallelism,
            fingerprint=manifest.fingerprint,
            offsets=manifest.offsets,
            operators=tuple(
                SavedOperator(state.operator, head.schema, head.version, head.keys, times=state.times())
                if (head := state.head()) is not None
                else SavedOperator(state.operator)
                for state in states
            ),
            loops=tuple(SavedLoop(loop, records, schemas.get(loop)) for loop, records in sorted(loops.items())),
            outputs=tuple((output.sink, output.topic, output.partitioner) for output in manifest.sinks),
        )

    @property
    def origin(self) -> str:
        return origin_in_topic(self.saved.checkpoint)

    @property
    def name(self) -> str:
        kind = "savepoint" if self._manifest.is_savepoint else "checkpoint"
        return f"{kind} {self.saved.checkpoint} of {self.saved.pipeline}"

    def entries(self, operator: str) -> Iterator[KeptEntry]:
        return kept_state(self._manifest, operator, self._blocks).entries()

    def loop_entries(self, loop: str) -> Iterator[LoopEntry]:
        return entries_of(self._manifest, self._blocks, loop)


def origin_in_topic(checkpoint: int) -> str:
    """The origin of checkpoints restored from savepoint *checkpoint* of the same pipeline."""
    return f"savepoint {checkpoint}"


def records_by_loop(manifest: Manifest, blocks: Blocks) -> tuple[Counter[str], int]:
    """The number of records in flight in each loop at *manifest*, and of those that a barrier had overtaken."""
    by_loop, overtaken = Counter[str](), 0
    for _, frame in _frames(manifest, blocks):
        if frame.loop:
            by_loop[frame.loop] += records_in(frame.frame)
        else:
            overtaken += records_in(frame.frame)
    return by_loop, overtaken


def entries_of(manifest: Manifest, blocks: Blocks, loop: str) -> Iterator[LoopEntry]:
    """All records in flight in *loop*. Raises an error that names a damaged block."""
    for subtask, frame in _frames(manifest, blocks):
        if frame.loop == loop:
            batch = _RAW.decode(frame.frame)
            coordinates = coordinates_of(batch.origins)
            for record, topic, partition, offset in zip(batch.records, *coordinates, strict=True):
                yield LoopEntry(subtask, bytes(record), topic, partition, offset)


def _frames(manifest: Manifest, blocks: Blocks) -> Iterator[tuple[int, InFlightFrame]]:
    for log in sorted(manifest.channel_logs, key=lambda log: (log.subtask, log.task)):
        for frame in frames_of(log, blocks):
            yield log.subtask, frame


def frames_of_loop(loop: str, entries: Iterable[LoopEntry], parallelism: int) -> Iterator[tuple[int, InFlightFrame]]:
    """*entries* as (subtask, frame) of *parallelism* subtasks, which take these frames first."""
    for old, own in groupby(entries, lambda entry: entry.subtask):
        subtask, records = old % parallelism, list(own)
        for first in range(0, len(records), FRAME_RECORDS):
            chunk = records[first : first + FRAME_RECORDS]
            origins = [Coordinates(entry.topic, entry.partition, entry.offset) for entry in chunk]
            batch = Batch([msgspec.Raw(entry.record) for entry in chunk], origins, None)
            yield subtask, InFlightFrame(f"{LOOP_MARK}{loop}:{subtask}", _RAW.encode(batch))


def schemas_of(manifest: Manifest, blocks: Blocks) -> dict[str, Any]:
    """The known schemas of loop records at *manifest*, by loop."""
    return next((in_flight.loop_schemas(log, blocks) for log in manifest.channel_logs if log.records), {})


def require_same(loop: str, type_: Any, entries: Iterable[LoopEntry], savepoint: str, written: Any = None) -> None:
    """Raise `GraphError` unless *entries* can be read as *type_*, the loop's present type, without loss.

    *written* is their schema; without one, the values alone decide.
    """
    decode, encode = msgspec.msgpack.Decoder(wire_of(type_).type).decode, msgspec.msgpack.Encoder().encode
    misfit = in_flight.misfit(written, type_) if written is not None else ""
    for entry in entries:
        why = misfit or "it would not be what it was"
        try:
            again = decode(entry.record)
            if not misfit and (written is not None or is_same(entry.record, encode(again))):
                continue
        except msgspec.ValidationError as error:
            why = misfit or str(error)
        raise GraphError(
            f"The {savepoint} holds records that went round loop {loop!r}, written as another type than "
            f"{type_name(type_)}, which it has now: {why} (that of {entry.topic}[{entry.partition}] offset "
            f"{entry.offset}). Give the loop its old type; or run the pipeline as it was with --until latest, which "
            f"ends once nothing goes round, and take the savepoint then."
        )

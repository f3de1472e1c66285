"""A savepoint, in the topic or exported: its description, the states of its operators, and the records of its loops.

Invariants: a savepoint is self-contained: it refers to no transaction, committable or other checkpoint, and its offsets
name topics, with their ids then. In-flight records are independent of the frames' graph; those of a loop and a subtask
keep their order, and stay together at any parallelism.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import msgspec

from exactlyonce.checkpoint.block_storage import Blocks
from exactlyonce.checkpoint.records.manifest import Manifest, SourceOffset
from exactlyonce.engines.plan import LOOP_MARK
from exactlyonce.engines.runtime import in_flight
from exactlyonce.engines.runtime.batch import Batch
from exactlyonce.engines.runtime.batch_codec import BatchCodec, Coordinates, coordinates_of, is_same, records_in
from exactlyonce.engines.runtime.in_flight import InFlightFrame, frames_of
from exactlyonce.engines.savepoints.kept_state import KeptEntry, KeptState, SavedTimes, kept_state
from exactlyonce.pipeline.errors import ConfigError, GraphError
from exactlyonce.pipeline.shape import type_name
from exactlyonce.pipeline.wire import wire_of

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
    """The forms of the keys in an export (`pipeline.key_types`); 0: unknown."""
    files: tuple[SavedFile, ...] = ()
    """The files of an export; empty in the topic."""
    times: SavedTimes | None = None
    """Those of a timed table."""


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

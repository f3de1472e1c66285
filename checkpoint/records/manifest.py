"""The manifest and the other decisions: what a checkpoint is made of, as data.

A manifest is the one record whose durability makes a checkpoint complete. It holds references, never state, and stays
under `MANIFEST_SIZE_MAX` bytes. References name the bytes they stand for by SHA-256, so whoever reads a block knows
that it is the one that was written. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from exactlyonce.checkpoint.records.committable import Committable
from exactlyonce.checkpoint.records.storage_url import TOPIC

MANIFEST_SIZE_MAX = 256 * 1024
BLOCK_SIZE_MAX = 1024 * 1024
SAVEPOINT, RESTORED, SPARK_SINK = "savepoint", "restored", "spark"
LOSS_ACCEPTED = "loss accepted"
"""The fate of what the user goes on without."""


class BlockRef(msgspec.Struct, frozen=True):
    """Where one block lies in the checkpoint topic, and proof that it is the block that was written.

    Outside of the topic key and SHA-256 say where it is, and partition and offset are the same for all; see
    `connectors.blocks.names`.
    """

    partition: int
    offset: int
    key: str
    size: int
    """Bytes of the record's value."""
    sha256: bytes
    """Of the record's value."""


class StoredBlock(NamedTuple):
    """A block, and the storage that it lies in: a pipeline whose checkpoints were moved has blocks in several."""

    storage: str
    """See `Manifest.storage`."""
    ref: BlockRef


class StoreCommittable(msgspec.Struct, frozen=True, kw_only=True):
    """What a sink has set aside for a checkpoint: enough to commit it, from any process, to a store with a ledger."""

    sink: str
    subtask: int
    checkpoint: int
    """The checkpoint at whose barrier it was cut; the manifest that carries it may be a later one."""
    records: int
    kind: str
    """The form in which it was set aside, and so who can commit it: "rows" wait in blocks of the checkpoint topic."""
    description: str = ""
    """A digest of the sink's description: only a sink of the same one knows what was set aside, and for what."""
    previous: int = 0
    """The checkpoint that the store's ledger has for the subtask before this one; 0: none."""
    blocks: tuple[BlockRef, ...] = ()
    """Of the checkpoint topic, what the kind needs."""
    body: bytes = b""
    """What else the kind needs."""

    @property
    def writer(self) -> tuple[str, int]:
        """The sink subtask that wrote it: its committables come in the order of their checkpoints."""
        return self.sink, self.subtask

    @property
    def name(self) -> str:
        """What a fate refers to: no two of a pipeline that are decided have the same."""
        return f"{self.sink}:{self.subtask}:{self.checkpoint}"


class StagedAck(msgspec.Struct, frozen=True):
    """What a sink subtask has set aside for a store."""

    committable: StoreCommittable
    blocks: tuple[BlockRef, ...] = ()
    """All blocks that it stands on: those that it names, and those that these list."""


class SourceOffset(msgspec.Struct, frozen=True):
    """Sn of one partition: the offset of the first record after the barrier."""

    source: str
    topic: str
    topic_id: str
    partition: int
    offset: int
    leader_epoch: int = -1
    """In which the last record below the offset was written, if that was read; -1: unknown. It tells a log that was
    truncated and written again."""
    skipped: int = 0
    """How many records below the offset were read and skipped, because they do not decode."""
    skipped_at: tuple[int, ...] = ()
    """The offsets of the last few of these, in order."""


class RecordPlace(msgspec.Struct, frozen=True):
    """Where a record of an input lies."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}:{self.partition}:{self.offset}"


class OperatorSnapshot(msgspec.Struct, frozen=True):
    """The state of one stateful operator: an index block for each of its subtasks."""

    operator: str
    parallelism: int
    state_bytes: int
    """Bytes of all blocks that make up the state."""
    index: tuple[tuple[BlockRef, ...], ...]
    """By subtask: the index block, in more than one part where it is large; empty where a subtask has no state."""


class OrderLog(msgspec.Struct, frozen=True):
    """The order in which one subtask took its inputs' batches between the base and this checkpoint."""

    task: str
    subtask: int
    blocks: tuple[BlockRef, ...]


class ChannelLog(msgspec.Struct, frozen=True):
    """What was on its way to one subtask at the barrier, which had overtaken it: it is taken first after a restore.

    All of it is in these blocks, whatever the checkpoint's base is.
    """

    task: str
    subtask: int
    records: int
    blocks: tuple[BlockRef, ...]
    indexed: bool = False
    """Whether `blocks` are lists of the blocks that have it, which are many: so that a manifest stays small."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Checkpoint `checkpoint` of a pipeline: complete when this record is durable."""

    pipeline: str
    checkpoint: int
    incarnation: int
    attempt: int
    kind: str
    """"initial", "checkpoint", "final" (taken at a clean stop), "savepoint", "restored" (from one: it has no output,
    and its interval is none), or "spark" (of a sink of Spark)."""
    base: int
    """The completed checkpoint that increments in this one build upon."""
    previous: int
    """The completed checkpoint before this one; its interval begins there."""
    triggered_at_ms: int
    completed_at_ms: int
    fingerprint: str
    max_parallelism: int
    parallelism: int
    block_partitions: int
    """Partitions of the checkpoint topic, frozen here."""
    block_end_offsets: tuple[int, ...]
    """By partition of the checkpoint topic: no block before it can become an orphan once this is finalized, so that
    orphans are looked for from here. The ends when this was written; while other checkpoints may be in flight behind
    it, which may never complete, the ends when its base was."""
    written_bytes: int
    """Bytes of the blocks that this checkpoint wrote."""
    offsets: tuple[SourceOffset, ...]
    operators: tuple[OperatorSnapshot, ...]
    order_logs: tuple[OrderLog, ...]
    committables: tuple[Committable, ...]
    sinks: tuple[tuple[str, str, int], ...]
    """(sink id, topic, partition count): the partitioning that a replay must reproduce."""
    staged: tuple[StoreCommittable, ...] = ()
    """The committables of sinks whose stores keep a ledger; those of Kafka are in `committables`."""
    ledger: tuple[tuple[str, int, int], ...] = ()
    """(sink id, subtask, checkpoint): what the ledgers of the stores say once this is finalized. Subtasks that
    rescaling has taken away stay."""
    requests: tuple[str, ...] = ()
    """It is the savepoint that these have asked for."""
    channel_logs: tuple[ChannelLog, ...] = ()
    """None where the checkpoint is aligned, or nothing was on its way."""
    storage: str = TOPIC
    """Where the blocks are that this names: a URL that `storage_url` has made, or the topic."""
    origin: str = ""
    """The savepoint that this run was told to go on from, and does, here or before; empty: it was told of none."""
    skips: tuple[RecordPlace, ...] = ()
    """The records that its interval had to leave out, as the user had asked. Whoever computes it again does so too."""

    @property
    def is_savepoint(self) -> bool:
        """Whether it never expires, and stands on no block of another checkpoint."""
        return self.kind == SAVEPOINT

    @property
    def is_spark_sink(self) -> bool:
        """Whether a sink of Spark has taken it, and no pipeline."""
        return self.kind == SPARK_SINK

    @property
    def decided(self) -> set[str]:
        """The transactional ids and names of what has to have a fate before it is finalized."""
        return {c.transactional_id for c in self.committables if c.records} | {each.name for each in self.staged}

    @property
    def state_bytes(self) -> int:
        """How large the state of all operators is."""
        return sum(each.state_bytes for each in self.operators)

    @property
    def records_in_flight(self) -> int:
        """How many records that were read before Sn are in no state and no output yet."""
        return sum(each.records for each in self.channel_logs)

    @property
    def records_committed(self) -> int:
        """How many outputs it makes visible."""
        return sum(each.records for each in self.committables) + sum(each.records for each in self.staged)


class Restored(msgspec.Struct, frozen=True):
    """A savepoint whose states were written anew, as the manifest of what goes on from it says it."""

    offsets: tuple[SourceOffset, ...]
    operators: tuple[OperatorSnapshot, ...]
    origin: str
    """See `Manifest.origin`."""
    channel_logs: tuple[ChannelLog, ...] = ()
    """What went round its loops."""


class Finalized(msgspec.Struct, frozen=True):
    """Every committable of `checkpoint` is known to be committed, or its loss was accepted."""

    checkpoint: int
    incarnation: int
    at_ms: int
    fates: tuple[tuple[str, str], ...]
    """(transactional id or name, "committed" | "proven" | "repaired" | "loss accepted")."""


class Incarnation(msgspec.Struct, frozen=True, kw_only=True):
    """One life of a pipeline's coordinator."""

    incarnation: int
    host: str
    process: int
    started_at_ms: int
    heartbeat_ms: int
    fenced_below: int = 0
    """The transactional ids of incarnations below this were all fenced, in whatever state they were."""
    ended: bool = False
    """It has ended cleanly: by its last heartbeat, nobody runs the pipeline."""
    bounded: bool = False
    """It does bounded work, and looks for no requests."""
    cancelled: str = ""
    """The request by which it was cancelled; empty: it was not."""
    storage: str = TOPIC
    """Where it writes blocks, whether or not a manifest ever names one; see `Manifest.storage`."""
    condemned: bool = False
    """All that the pipeline has is to be deleted, as its user wants it when a run is cancelled: whoever comes next does
    so, before anything else."""
    machine: str = ""
    """Names the system whose process `process` is: two machines, or containers, may have one name. Empty: unknown."""


class Repair(msgspec.Struct, frozen=True):
    """The transaction that stands in for one that the broker aborted. Recovery follows the newest."""

    checkpoint: int
    number: int
    incarnation: int
    replaced: str
    """Transactional id of the committable that was lost."""
    committable: Committable


def skips_between(
    previous: Manifest | None, offsets: Iterable[SourceOffset], asked: Iterable[RecordPlace]
) -> tuple[RecordPlace, ...]:
    """Those of the records *asked* for that the interval from *previous* to *offsets* may have met: those that it read,
    and those that were read before, where some records of these were on their way.

    >>> ends = [SourceOffset("orders", "in", "id", 0, 5)]
    >>> [place.offset for place in skips_between(None, ends, [RecordPlace("in", 0, each) for each in (4, 5)])]
    [4]
    """
    begins = {} if previous is None else {(each.source, each.partition): each.offset for each in previous.offsets}
    carried = previous is not None and bool(previous.channel_logs)
    return tuple(
        place
        for place in asked
        if any(
            (each.topic, each.partition) == (place.topic, place.partition)
            and place.offset < each.offset
            and (carried or begins.get((each.source, each.partition), 0) <= place.offset)
            for each in offsets
        )
    )


def read_before(manifest: Manifest, places: Iterable[RecordPlace]) -> tuple[RecordPlace, ...]:
    """Those of *places* that no run meets which goes on from *manifest*: their records were read before it."""
    if manifest.channel_logs:  # some of what was read is on its way
        return ()
    ends: dict[tuple[str, int], list[int]] = {}
    for each in manifest.offsets:
        ends.setdefault((each.topic, each.partition), []).append(each.offset)
    return tuple(place for place in places if place.offset < min(ends.get((place.topic, place.partition), [0])))

"""The records of the checkpoint topic, as data: the manifest, what it names, and the other decisions.

A manifest is the one record whose durability makes a checkpoint complete. It holds references, never state, and stays
under `MANIFEST_SIZE_MAX` bytes. References name bytes by their SHA-256, so a reader knows that a block is the one that
was written.

A transactional id names exactly one attempt of one sink subtask of one pipeline, is parsed whole, and is not used again
before the checkpoint that used it is finalized. A committable names exactly one transaction: its producer id and epoch
were read before its first record was produced. The figures that explain how long a checkpoint took are written with its
mark, and no recovery needs them: older marks have none, and an unreadable one is as if it had none. A history keeps
them packed, for it may have thousands.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import msgspec

from exactlyonce.checkpoint.records.storage_url import TOPIC
from exactlyonce.pipeline.durations import shown_duration
from exactlyonce.pipeline.errors import ExactlyOnceError, RecordError
from exactlyonce.pipeline.event_time import NO_FLOOR

_ID = r"[A-Za-z0-9_-]+"
_ATTEMPT = rf"\d+(?:-{_ID})?"
_PATTERN = re.compile(rf"eo:({_ID}):({_ID}):(\d+):(\d+)\.({_ATTEMPT}):({_ID})\Z", re.ASCII)


class TransactionalId(msgspec.Struct, frozen=True):
    """`eo:<pipeline>:<sink>:<subtask>:<incarnation>.<attempt>:<slot>`."""

    pipeline: str
    sink: str
    subtask: int
    incarnation: int
    attempt: str
    """The number of the attempt; more may follow after a hyphen."""
    slot: str

    def __str__(self) -> str:
        return f"eo:{self.pipeline}:{self.sink}:{self.subtask}:{self.incarnation}.{self.attempt}:{self.slot}"

    @property
    def written_in(self) -> tuple[int, int]:
        """Incarnation and number of the attempt: a later one is greater."""
        return self.incarnation, int(self.attempt.split("-")[0])

    @classmethod
    def parse(cls, text: str) -> TransactionalId | None:
        """The id that *text* spells whole, or None: then it is not ours and must not be touched.

        >>> TransactionalId.parse("eo:totals:out:0:3.1:2").incarnation
        3
        >>> TransactionalId.parse("eo:totals:coordinator") is None
        True
        """
        match = _PATTERN.match(text)
        if match is None:
            return None
        pipeline, sink, subtask, incarnation, attempt, slot = match.groups()
        return cls(pipeline, sink, int(subtask), int(incarnation), attempt, slot)


def coordinator_id(pipeline: str) -> str:
    """The transactional id whose initialisation fences every older coordinator of *pipeline*."""
    return f"eo:{pipeline}:coordinator"


def erased_id(pipeline: str, incarnation: int) -> str:
    """The transactional id that marks everything of *pipeline* up to *incarnation* as deleted on purpose.

    The broker keeps it as long as the ids that tell a lost checkpoint topic from a new pipeline.
    """
    return f"eo:{pipeline}:erased:{incarnation}"


def erased_incarnation(pipeline: str, transactional_id: str) -> int:
    """The incarnation in an `erased_id`; 0 in any other id.

    >>> erased_incarnation("totals", "eo:totals:erased:7")
    7
    """
    number = transactional_id.removeprefix(f"eo:{pipeline}:erased:")
    return int(number) if number.isdecimal() else 0


def transaction_prefix(pipeline: str) -> str:
    """The prefix of all transactional ids of *pipeline*; for listing, then parse each whole."""
    return f"eo:{pipeline}:"


class Written(msgspec.Struct, frozen=True, gc=False):
    """The records that a transaction wrote to one partition, in the broker's own words."""

    topic: str
    partition: int
    first_offset: int
    count: int


class Precommit(msgspec.Struct, frozen=True, kw_only=True):
    """A transaction that a sink subtask has flushed for a checkpoint, as the sink knows it."""

    transactional_id: str
    producer_id: int
    epoch: int
    sink: str
    subtask: int
    checkpoint: int
    records: int
    open_ms: int
    """How long it had been open when it was acknowledged."""


class Committable(msgspec.Struct, frozen=True, kw_only=True):
    """Enough to commit, from any process, what a sink pre-committed for a checkpoint."""

    transactional_id: str
    producer_id: int
    epoch: int
    transaction_version: int
    cluster_id: str
    sink: str
    subtask: int
    checkpoint: int
    """The checkpoint at whose barrier it was flushed; the manifest that carries it may be a later one."""
    written: tuple[Written, ...]

    @property
    def writer(self) -> tuple[str, int]:
        """The sink subtask that wrote it: its transactions are ordered by their checkpoints."""
        return self.sink, self.subtask

    def within(self, other: Committable) -> Committable:
        """The part of it that is in the partitions of *other*."""
        places = {(written.topic, written.partition) for written in other.written}
        written = tuple(one for one in self.written if (one.topic, one.partition) in places)
        return msgspec.structs.replace(self, written=written)

    @property
    def records(self) -> int:
        """The number of its records."""
        return sum(written.count for written in self.written)

    @property
    def counts(self) -> dict[tuple[str, int], int]:
        """The number of its records by (topic, partition)."""
        return {(written.topic, written.partition): written.count for written in self.written}


def shares(committables: Iterable[Committable]) -> dict[str, range]:
    """The share of each committable in the output of its sink subtask over an interval, by transactional id.

    *committables* are all of the interval, also those carried from aborted checkpoints. The output of a sink subtask is
    their concatenation in the order of their checkpoints.

    >>> def made(checkpoint, count):
    ...     return Committable(
    ...         transactional_id=f"t{checkpoint}", producer_id=0, epoch=0, transaction_version=2, cluster_id="",
    ...         sink="out", subtask=0, checkpoint=checkpoint, written=(Written("a", 0, 0, count),),
    ...     )
    >>> shares([made(7, 3), made(6, 2)])
    {'t6': range(0, 2), 't7': range(2, 5)}
    """
    ranges: dict[str, range] = {}
    ends: dict[tuple[str, int], int] = {}
    for committable in sorted(committables, key=lambda committable: committable.checkpoint):
        start = ends.get(committable.writer, 0)
        ends[committable.writer] = start + committable.records
        ranges[committable.transactional_id] = range(start, ends[committable.writer])
    return ranges


MANIFEST_SIZE_MAX = 256 * 1024
BLOCK_SIZE_MAX = 1024 * 1024
INITIAL, SAVEPOINT, RESTORED, SPARK_SINK = "initial", "savepoint", "restored", "spark"
HISTORY, HISTORY_ENDED = "history", "history ended"
"""A backfill computed state alone, up to its end or not yet: the outputs are another application's."""
LATE_AT_FLOOR, LATE_BELOW_LATEST = 0, 1
"""What `Manifest.rules` may be: a record as old as the latest one less the disorder was late; it is in time."""
FAILURE_CHARACTERS_MAX = 2_000
"""Of the text of a failure; the rest is left out."""
COMMITTED, PROVEN, REPAIRED, LOSS_ACCEPTED = "committed", "proven", "repaired", "loss accepted"
"""The fates of committables: the broker or the store says so, and its markers are there; its records are visible; its
records were written again; the user has given it up."""


class BlockRef(msgspec.Struct, frozen=True, gc=False):
    """The place of a block in the checkpoint topic, and proof that it is the block that was written.

    In other storages key and SHA-256 are its place, and partition and offset the same for all; see
    `connectors.block_files`.
    """

    partition: int
    offset: int
    key: str
    size: int
    """Bytes of the record's value."""
    sha256: bytes
    """The SHA-256 of the record's value."""


class StoredBlock(NamedTuple):
    """A block and its storage: a pipeline whose checkpoints were moved has blocks in several."""

    storage: str
    """See `Manifest.storage`."""
    ref: BlockRef


class StoreCommittable(msgspec.Struct, frozen=True, kw_only=True):
    """Output staged for a checkpoint: enough to commit it, from any process, to a store with a ledger."""

    sink: str
    subtask: int
    checkpoint: int
    """The checkpoint at whose barrier it was cut; the manifest that carries it may be a later one."""
    records: int
    kind: str
    """The form in which it is staged, and so who can commit it: "rows" wait in blocks of the checkpoint topic."""
    description: str = ""
    """A digest of the sink's description: only a sink with the same one can commit it."""
    previous: int = 0
    """The checkpoint that the store's ledger has for the subtask before this one; 0: none."""
    blocks: tuple[BlockRef, ...] = ()
    body: bytes = b""
    """Data of the kind's own."""

    @property
    def writer(self) -> tuple[str, int]:
        """The sink subtask that wrote it: its committables come in the order of their checkpoints."""
        return self.sink, self.subtask

    @property
    def name(self) -> str:
        """The key of its fate, unique among the decided committables of a pipeline."""
        return f"{self.sink}:{self.subtask}:{self.checkpoint}"


class StagedAck(msgspec.Struct, frozen=True):
    """The output that a sink subtask has staged for a store."""

    committable: StoreCommittable
    blocks: tuple[BlockRef, ...] = ()
    """All blocks that it needs: those that it names, and those that these list."""


TOPICS = "topics:"
"""The beginning of the place of a source that reads all topics of a pattern."""


class TopicSplit(NamedTuple):
    """The identity of a split that is a partition of a topic, which is read from offset *first* on."""

    topic_id: str
    partition: int
    first: int
    topic: str

    def __str__(self) -> str:
        return " ".join(map(str, self))

    @classmethod
    def parse(cls, identity: str) -> TopicSplit:
        """The split of an identity.

        >>> TopicSplit.parse("AAAA 3 17 orders-eu").topic
        'orders-eu'
        """
        topic_id, partition, first, topic = identity.split(" ")
        return cls(topic_id, int(partition), int(first), topic)


class SourceOffset(msgspec.Struct, frozen=True):
    """Sn of one split, as a partition of a topic: the offset of the first record after the barrier.

    >>> SourceOffset("in", "orders", "id", 0, 7).in_topic, SourceOffset("in", "file:/data", "id", 0, 7).in_topic
    (True, False)
    """

    source: str
    topic: str
    """The topic, or the place of another source, which has a colon: no topic's name has one."""
    topic_id: str
    """The identity of the topic, or of the split of another source, as a file and its version."""
    partition: int
    """The number of the split, which no other split of the source ever has."""
    offset: int
    leader_epoch: int = -1
    """The epoch of the last record read below the offset; -1: unknown. It shows whether a log was truncated and
    written again."""
    skipped: int = 0
    """The number of records below the offset that were skipped, because they do not decode."""
    skipped_at: tuple[int, ...] = ()
    """The offsets of the last few of these, in order."""
    ended: bool = False
    """Whether it was read to its end; never of a topic."""
    cursor: str = ""
    """The text by which its source finds the next record, where the offset does not: the key of a table's last row."""
    floor: int = NO_FLOOR
    """The event time in ms below which its later records are late; see `engines.runtime.source_decoder`."""

    @property
    def identity(self) -> str:
        """The identity of the split, as its source has found it."""
        return self.topic_id

    @property
    def in_topic(self) -> bool:
        """Whether the split is a partition of a topic."""
        return ":" not in self.topic

    @property
    def in_cluster(self) -> SourceOffset | None:
        """The same as a position in a topic of the checkpoints' cluster; None: the split is no partition of one.

        >>> position = SourceOffset("in", "topics:orders-.*", "AAAA 3 17 orders-eu", 9, 20).in_cluster
        >>> position.topic, position.partition, position.offset
        ('orders-eu', 3, 20)
        """
        if self.in_topic:
            return self
        if not self.topic.startswith(TOPICS):
            return None
        split = TopicSplit.parse(self.topic_id)
        return msgspec.structs.replace(self, topic=split.topic, topic_id=split.topic_id, partition=split.partition)

    @property
    def mark(self) -> str:
        """A digest of the split's identity, by which `MarkedPlace` knows it.

        >>> SourceOffset("in", "file:/data", "id", 0, 7).mark
        'a56145270ce6'
        """
        return hashlib.sha256(self.topic_id.encode()).hexdigest()[:12]


class RecordPlace(msgspec.Struct, frozen=True):
    """The place of an input record."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}:{self.partition}:{self.offset}"


class MarkedPlace(RecordPlace, frozen=True):
    """The place of a record in a split that no checkpoint may have yet, so that another run numbers it anew."""

    mark: str
    """See `SourceOffset.mark`."""

    def __str__(self) -> str:
        return f"{super().__str__()}@{self.mark}"


class Output(NamedTuple):
    """The topic of one sink, as it was when a checkpoint was decided."""

    sink: str
    topic: str
    partitions: int
    """The partitioning that a replay must reproduce."""
    topic_id: str = ""
    """The identity of the topic; empty: a version before it was noted."""
    partitioner: str = ""
    """The partitioner of its records, as librdkafka names it; empty: likewise."""


class OperatorSnapshot(msgspec.Struct, frozen=True):
    """The state of one stateful operator: an index block for each of its subtasks."""

    operator: str
    parallelism: int
    state_bytes: int
    """Bytes of all blocks that make up the state."""
    index: tuple[tuple[BlockRef, ...], ...]
    """The index block of each subtask, in several parts if it is large; empty for a subtask without state."""


class OrderLog(msgspec.Struct, frozen=True):
    """The order in which one subtask took its inputs' batches between the base and this checkpoint."""

    task: str
    subtask: int
    blocks: tuple[BlockRef, ...]


class ChannelLog(msgspec.Struct, frozen=True):
    """The in-flight records of one subtask that the barrier had overtaken: they are taken first after a restore.

    All of them are in these blocks, whatever the checkpoint's base is.
    """

    task: str
    subtask: int
    records: int
    blocks: tuple[BlockRef, ...]
    indexed: bool = False
    """Whether `blocks` are lists of many blocks that have the records: so that a manifest stays small."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Checkpoint `checkpoint` of a pipeline: complete when this record is durable."""

    pipeline: str
    checkpoint: int
    incarnation: int
    attempt: int
    kind: str
    """"initial", "checkpoint", "final" (taken at a clean stop), "savepoint", "restored" (from a savepoint: it has no
    output and no interval), "spark" (of a sink of Spark), or one of `HISTORY` and `HISTORY_ENDED`."""
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
    """The offsets, by partition of the checkpoint topic, where the search for orphans begins: no earlier block can
    become one once this is finalized. They are the ends when this was written, or, while later checkpoints may be in
    flight, when its base was."""
    written_bytes: int
    """Bytes of the blocks that this checkpoint wrote."""
    offsets: tuple[SourceOffset, ...]
    operators: tuple[OperatorSnapshot, ...]
    order_logs: tuple[OrderLog, ...]
    committables: tuple[Committable, ...]
    sinks: tuple[Output, ...]
    """The sinks that write to topics, each with its topic."""
    staged: tuple[StoreCommittable, ...] = ()
    """The committables of sinks whose stores keep a ledger; those of Kafka are in `committables`."""
    ledger: tuple[tuple[str, int, int], ...] = ()
    """(sink id, subtask, checkpoint): the ledgers of the stores once this is finalized. Subtasks that rescaling has
    removed stay."""
    requests: tuple[str, ...] = ()
    """The requests that this savepoint serves."""
    channel_logs: tuple[ChannelLog, ...] = ()
    """Empty if the checkpoint is aligned, or there were no in-flight records."""
    storage: str = TOPIC
    """The storage of its blocks: a URL that `storage_url` has made, or the topic."""
    origin: str = ""
    """The savepoint that this run began from; empty: none."""
    skips: tuple[RecordPlace, ...] = ()
    """The records that its interval left out at the user's request; a replay leaves them out, too."""
    outputs_by_partition: tuple[tuple[str, int], ...] = ()
    """(sink id, partitions): the sinks whose outputs were distributed over so many partitions before they were written.

    A partition has the outputs of each subtask in turn, and is in one transaction, whose `subtask` is the publisher's
    number. Of other sinks the client has distributed each subtask's outputs."""
    rules: int = LATE_AT_FLOOR
    """The rule by which records of its interval were late, for a replay; the default is the rule of older versions."""

    @property
    def output_ids(self) -> dict[str, str]:
        """The identities of the output topics by name, as far as they are known; none before the first output."""
        return {output.topic: output.topic_id for output in self.sinks if output.topic_id and self.checkpoint}

    @property
    def offsets_by_source(self) -> dict[str, dict[int, int]]:
        """The offset at which the next work begins, by source and partition."""
        offsets: dict[str, dict[int, int]] = {}
        for position in self.offsets:
            offsets.setdefault(position.source, {})[position.partition] = position.offset
        return offsets

    @property
    def in_cluster(self) -> tuple[SourceOffset, ...]:
        """The positions in topics of the checkpoints' cluster."""
        return tuple(at for offset in self.offsets if (at := offset.in_cluster) is not None)

    def late_up_to(self, position: SourceOffset) -> int | None:
        """The event time in ms up to which later records at *position*, one of `offsets`, are late; None: none is."""
        below = int(self.rules >= LATE_BELOW_LATEST)
        return None if position.floor == NO_FLOOR else position.floor - below

    def positions_at(self, place: str) -> list[SourceOffset]:
        """The positions in the topic at *place*, also of patterns that it matches."""
        return [at for offset in self.offsets if (at := offset.in_cluster or offset).topic == place]

    def partitions_of(self, sink: str) -> int | None:
        """The partitions over which the outputs of *sink* were distributed, None if the client did; see above."""
        return dict(self.outputs_by_partition).get(sink)

    def partitioner_of(self, sink: str) -> str:
        """The partitioner of the outputs of *sink*, empty if an older version has written none."""
        return next((output.partitioner for output in self.sinks if output.sink == sink), "")

    def writes(self, sink: str, topic: str) -> bool:
        """Whether *sink* writes to *topic*."""
        return any((output.sink, output.topic) == (sink, topic) for output in self.sinks)

    @property
    def is_savepoint(self) -> bool:
        """Whether it never expires, and needs no block of another checkpoint."""
        return self.kind == SAVEPOINT

    @property
    def has_no_output(self) -> bool:
        """Whether all output up to it is another application's."""
        return self.kind in (INITIAL, RESTORED, HISTORY, HISTORY_ENDED)

    @property
    def is_spark_sink(self) -> bool:
        """Whether a sink of Spark has taken it, and no pipeline."""
        return self.kind == SPARK_SINK

    @property
    def decided(self) -> set[str]:
        """The transactional ids and names of the committables that need a fate before it is finalized."""
        return {c.transactional_id for c in self.committables if c.records} | {staged.name for staged in self.staged}

    @property
    def state_bytes(self) -> int:
        """The size of the state of all operators."""
        return sum(operator.state_bytes for operator in self.operators)

    @property
    def records_in_flight(self) -> int:
        """The number of records before Sn that are in no state and no output yet."""
        return sum(log.records for log in self.channel_logs)

    @property
    def records_committed(self) -> int:
        """The number of records that it makes visible."""
        return sum(one.records for one in self.committables) + sum(one.records for one in self.staged)


class Restored(msgspec.Struct, frozen=True):
    """A savepoint whose states were written anew."""

    offsets: tuple[SourceOffset, ...]
    operators: tuple[OperatorSnapshot, ...]
    origin: str
    """See `Manifest.origin`."""
    channel_logs: tuple[ChannelLog, ...] = ()
    """The in-flight records of its loops."""


class Finalized(msgspec.Struct, frozen=True):
    """Every committable of `checkpoint` is known to be committed, or its loss was accepted."""

    checkpoint: int
    incarnation: int
    at_ms: int
    """When that was known."""
    fates: tuple[tuple[str, str], ...]
    """(transactional id or name, `COMMITTED`, `PROVEN`, `REPAIRED` or `LOSS_ACCEPTED`)."""
    decided_at_ms: int = 0
    """When the manifest was durable; 0: not known."""
    stats: bytes = b""
    """The `CheckpointStats`, encoded; empty: not known."""


class Failure(NamedTuple):
    """Why an incarnation has failed: fields of its record."""

    exit_code: int
    failure: str
    skip: str = ""

    @classmethod
    def of(cls, error: ExactlyOnceError, redact: Callable[[str], str]) -> Failure:
        """The failure by *error*; *redact* removes secrets from a text.

        >>> facts = {"topic": "orders", "partition": 0, "offset": 42}
        >>> Failure.of(RecordError("It is no order.", **facts), str)
        Failure(exit_code=3, failure='It is no order.', skip='orders:0:42')
        """
        text, place = redact(str(error)), [error.facts.get(name) for name in ("topic", "partition", "offset")]
        skip = ":".join(map(str, place)) if isinstance(error, RecordError) and None not in place else ""
        if skip and (marked := re.search(rf"--skip ({re.escape(skip)}(?:@[0-9a-f]+)?)", text)):
            skip = marked[1]
        return cls(error.exit_code, text[:FAILURE_CHARACTERS_MAX], skip)


class Incarnation(msgspec.Struct, frozen=True, kw_only=True):
    """One life of a pipeline's coordinator."""

    incarnation: int
    host: str
    process: int
    started_at_ms: int
    heartbeat_ms: int
    fenced_below: int = 0
    """All transactional ids of incarnations below this are fenced."""
    ended: bool = False
    """It has ended cleanly: since its last heartbeat nobody runs the pipeline."""
    bounded: bool = False
    """It does bounded work, and looks for no requests."""
    cancelled: str = ""
    """The request that cancelled it; empty: it was not cancelled."""
    storage: str = TOPIC
    """The storage that it writes blocks to; see `Manifest.storage`."""
    condemned: bool = False
    """The user wants everything of the cancelled pipeline deleted: the next process does so before anything else."""
    machine: str = ""
    """The system that `process` runs on, since two machines or containers may have one name. Empty: unknown."""
    exit_code: int = 0
    """The code with which it ends, after a failure; 0: it has not failed."""
    failure: str = ""
    """Why it failed, for people and without secrets."""
    skip: str = ""
    """The record that the failure names, as `--skip` takes it; empty: it names none that can be left out."""

    @property
    def end(self) -> str:
        """How it has ended, after its name: the first line of the failure, if it has failed."""
        if not self.exit_code:
            return "has ended"
        return f"has failed with code {self.exit_code}: {self.failure.partition(chr(10))[0]}"


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
    """The records *asked* for that the interval from *previous* to *offsets* may have met.

    These are the ones that it read, and, if *previous* has in-flight records, also earlier ones.

    >>> ends = [SourceOffset("orders", "in", "id", 0, 5)]
    >>> [place.offset for place in skips_between(None, ends, [RecordPlace("in", 0, each) for each in (4, 5)])]
    [4]
    """
    begins = {} if previous is None else {(o.source, o.partition): o.offset for o in previous.offsets}
    carried = previous is not None and bool(previous.channel_logs)
    return tuple(
        place
        for place in asked
        if any(
            (end.topic, end.partition) == (place.topic, place.partition)
            and place.offset < end.offset
            and (carried or begins.get((end.source, end.partition), 0) <= place.offset)
            for end in offsets
        )
    )


def read_before(manifest: Manifest, places: Iterable[RecordPlace]) -> tuple[RecordPlace, ...]:
    """The *places* that a run from *manifest* never meets: their records were read before it."""
    if manifest.channel_logs:  # some records that were read are in flight
        return ()
    ends: dict[tuple[str, int], list[int]] = {}
    for position in manifest.offsets:
        ends.setdefault((position.topic, position.partition), []).append(position.offset)
    return tuple(place for place in places if place.offset < min(ends.get((place.topic, place.partition), [0])))


NOT_KNOWN = -1
STATS_SIZE_MAX = 256 * 1024
"""Larger ones are left out of a mark."""
ABORTED_MAX = 60
REASON_LENGTH_MAX = 400


class SubtaskStats(msgspec.Struct, frozen=True, kw_only=True):
    """One subtask's part of a checkpoint: its phases in order, in ms, each `NOT_KNOWN` if it was not timed."""

    task: str
    subtask: int
    waiting_ms: int = NOT_KNOWN
    """From the trigger until its first barrier came."""
    aligning_ms: int = NOT_KNOWN
    """Until the barrier had come on every input, or had overtaken."""
    snapshot_ms: int = NOT_KNOWN
    """Until its state was written."""
    capture_ms: int = NOT_KNOWN
    """Until the records that the barrier had overtaken, or that went round a loop, were captured and written."""
    flush_ms: int = NOT_KNOWN
    """Until its output was flushed or staged, and everything else durable: then it acknowledged."""
    state_bytes: int = 0
    written_bytes: int = 0
    """Bytes of the blocks that this checkpoint wrote."""
    records_in_flight: int = 0
    bytes_in_flight: int = 0

    @property
    def acknowledged_ms(self) -> int | None:
        """The time of its acknowledgement after the trigger; None: not known."""
        phases = (self.waiting_ms, self.aligning_ms, self.snapshot_ms, self.capture_ms, self.flush_ms)
        return None if NOT_KNOWN in phases else sum(phases)

    @property
    def figures(self) -> dict[str, str | int | None]:
        """All of it for a program or a page: None is not known."""
        figures = msgspec.structs.asdict(self) | {"acknowledged_ms": self.acknowledged_ms}
        return {name: None if value == NOT_KNOWN else value for name, value in figures.items()}


_WORDS = {
    "waiting_ms": "waiting for its barrier",
    "aligning_ms": "aligning barriers",
    "snapshot_ms": "writing its snapshot",
    "capture_ms": "capturing in-flight records",
    "flush_ms": "flushing its output",
}


def slowest(subtasks: Iterable[SubtaskStats]) -> str:
    """The subtask that acknowledged last, and its longest phase; empty: not known.

    >>> times = {"waiting_ms": 5, "aligning_ms": 900, "snapshot_ms": 20, "capture_ms": 0, "flush_ms": 7}
    >>> slowest([SubtaskStats(task="totals", subtask=3, **times), SubtaskStats(task="totals", subtask=4)])
    'totals[3] took 932 ms, 900 ms of it aligning barriers'
    """
    last = max(subtasks, key=lambda stats: stats.acknowledged_ms or 0, default=None)
    if last is None or last.acknowledged_ms is None:
        return ""
    took_ms, phase = max((getattr(last, name), phase) for name, phase in _WORDS.items())
    place = f"{last.task}[{last.subtask}]"
    return f"{place} took {shown_duration(last.acknowledged_ms)}, {shown_duration(took_ms)} of it {phase}"


def slowest_first(subtasks: Iterable[SubtaskStats]) -> list[SubtaskStats]:
    """*subtasks* in the order of their acknowledgements, the last one first; those that were not timed last."""
    return sorted(subtasks, key=lambda stats: -(stats.acknowledged_ms or 0))


class AbortedCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint that was aborted before this one was completed."""

    checkpoint: int
    before_ms: int
    """How long before this one it was triggered; negative: after it."""
    lasted_ms: int
    reason: str


class CheckpointStats(msgspec.Struct, frozen=True):
    checkpoint: int
    subtasks: tuple[SubtaskStats, ...] = ()
    aborted: tuple[AbortedCheckpoint, ...] = ()
    """Those since the last completed one, the last `ABORTED_MAX`."""


class TopicInfo(msgspec.Struct, frozen=True):
    """The checkpoint topic of a pipeline."""

    name: str
    topic_id: str
    partitions: int
    replicas: int

    def partition_of(self, key_group: int) -> int:
        """The partition for blocks of *key_group*: any but 0, which holds the decisions.

        >>> TopicInfo("totals.checkpoints", "", partitions=5, replicas=1).partition_of(7)
        4
        """
        return 1 + key_group % (self.partitions - 1)


def indexes_of(manifest: Manifest) -> Iterator[BlockRef]:
    """The index blocks of the state of *manifest*."""
    return (ref for operator in manifest.operators for parts in operator.index for ref in parts)


def named_by(manifest: Manifest) -> Iterator[BlockRef]:
    """Every block that *manifest* names itself: indexes, order logs, in-flight records, staged output."""
    yield from indexes_of(manifest)
    for order_log in manifest.order_logs:
        yield from order_log.blocks
    for channel_log in manifest.channel_logs:
        yield from channel_log.blocks
    for staged in manifest.staged:
        yield from staged.blocks

"""The visible records of one partition, attributed to the lanes of checkpoints: a unit of an audit.

Invariants: the header of a batch identifies its writer, its contents never do; a lane is kept as a digest, whatever its
size and the batches in which its records come; records are attributed to a claim only if the log holds all of it, also
after they were read.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import compress
from operator import not_
from typing import Any, NamedTuple, cast

import msgspec
from confluent_kafka import Message

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.errors import RangeGone
from exactlyonce.connectors.kafka.log import Log
from exactlyonce.connectors.kafka.partitioning import partitioner
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.connectors.kafka.visible import Scan, VisibleRecord, Writer, scan, visible_record, visible_runs
from exactlyonce.engines.bounded.unit.kept import KEPT
from exactlyonce.engines.bounded.unit.messages import WorkPlace
from exactlyonce.engines.bounded.unit.staging import StagedFiles
from exactlyonce.pipeline.dead_letters import compared
from exactlyonce.pipeline.errors import TopicError

DIGEST_BYTES = 16
_ARRAY_BYTES = ((16, 1), (1 << 16, 3), (1 << 32, 5))
"""(the items of an array in msgpack are fewer, the length of its head)."""
Headers = tuple[tuple[str, bytes | None], ...]


class Digest(msgspec.Struct, frozen=True, array_like=True):
    """The digest of a sequence of records."""

    contents: bytes
    """Of keys, values and headers."""
    times: bytes
    """Of timestamps; empty: they were not added."""


class RecordDigest:
    """Adds up the digest of records, column by column."""

    def __init__(self) -> None:
        self._keys, self._values, self._headers, self._times = (
            hashlib.blake2b(digest_size=DIGEST_BYTES) for _ in range(4)
        )
        self._is_timed = False

    def add(
        self,
        values: Sequence[bytes | None],
        keys: Sequence[bytes | None] | None,
        headers: Sequence[Headers] | None,
        times_ms: Sequence[int] | None,
    ) -> None:
        """Add the next records; no keys and no headers are the same as empty ones."""
        none = [None] * len(values)
        self._values.update(_items(values))
        self._keys.update(_items(none if keys is None else keys))
        self._headers.update(_items([()] * len(values) if headers is None else headers))
        if times_ms is not None:
            self._is_timed = True
            self._times.update(_items(times_ms))

    def digest(self) -> Digest:
        """The digest of all that was added."""
        contents = b"".join(column.digest() for column in (self._keys, self._values, self._headers))
        return Digest(contents, self._times.digest() if self._is_timed else b"")


NOTHING = RecordDigest().digest()
"""The digest of no records."""


def _items(column: Sequence[object]) -> bytes:
    """The items in msgpack, one after the other.

    >>> _items([1, b"two"]) + _items([None]) == _items([1, b"two", None])
    True
    """
    head = next(length for items, length in _ARRAY_BYTES if len(column) < items)
    return _encode(column)[head:]


FOREIGN_SHOWN = 100
"""Foreign records kept of a partition; more are counted."""
Place = tuple[str, int]
"""Topic and partition."""
SinkLane = tuple[int, str, int]
"""Checkpoint, sink, and lane: see `unit.staging`."""


class Claim(NamedTuple):
    """A transaction of a checkpoint in one partition."""

    checkpoint: int
    """The checkpoint whose manifest names it."""
    sink: str
    subtask: int
    place: Place
    producer_id: int
    epoch: int
    first_offset: int
    records: int
    given_up: bool
    """Whether its loss was accepted by the user."""
    by_partition: bool
    """Whether its lane is the partition, of which the checkpoint's outputs are all in this transaction."""

    @property
    def writer(self) -> Writer:
        return self.producer_id, self.epoch

    @property
    def owner(self) -> SinkLane:
        """The lane whose output it is."""
        return self.checkpoint, self.sink, self.place[1] if self.by_partition else self.subtask


class AuditedOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The common part of the partitions of an audit. It is staged, so it has no settings of the client."""

    pipeline: str
    known: frozenset[Writer]
    """The writers of all transactions that the decision log names."""
    timed: frozenset[str]
    """The sinks whose outputs have a time of their own in the log."""
    placed: frozenset[str]
    """The sinks that choose the partitions of their outputs."""
    partitioners: dict[tuple[int, str], str]
    """The partitioner of each output, by checkpoint and sink."""


class ClaimedPartition(msgspec.Struct, frozen=True):
    """A partition of which checkpoints claim records."""

    topic: str
    partition: int
    claims: tuple[Claim, ...]
    to_end: bool
    """Whether it is read to its end; else until all claims are met."""


class SeenLane(msgspec.Struct, frozen=True, kw_only=True):
    """The visible records of a lane in one partition."""

    owner: SinkLane
    partition: int
    digest: Digest
    """Of the records that are not at random."""
    at_random: int
    """The number of records that the client has distributed at random."""
    start: int
    end: int
    """The offsets among which all of them are."""
    writers: dict[Writer, int]
    """The number of records in the log of each transaction."""


class VisiblePartition(msgspec.Struct, frozen=True, kw_only=True):
    """The visible records of a partition."""

    topic: str
    partition: int
    unread: str = ""
    """The reason why its topic cannot be read, if so; then it has nothing else."""
    start: int = 0
    found: dict[Writer, int] = {}
    """The number of records in the log of each claimed transaction, visible or not."""
    behind: tuple[Writer, ...] = ()
    """The claimed transactions with records that readers cannot reach, because a transaction before them is open."""
    ends: dict[Writer, int] = {}
    """The offset after the last record of each transaction that is there as a whole."""
    lanes: tuple[SeenLane, ...] = ()
    """Those with a transaction that is there as a whole."""
    records: int = 0
    """The number of records in `lanes`."""
    timed_by_broker: bool = False
    """Whether a batch has the time of its append."""
    foreign: tuple[VisibleRecord, ...] = ()
    """The first records of no known writer."""
    foreign_more: int = 0


_encode = msgspec.msgpack.Encoder().encode
_place_decoder = msgspec.msgpack.Decoder(WorkPlace)
_output_decoder = msgspec.msgpack.Decoder(AuditedOutput)
_partition_decoder = msgspec.msgpack.Decoder(ClaimedPartition)
_value = cast("Any", Message.value)
_key = cast("Any", Message.key)
_headers = cast("Any", Message.headers)
_timestamp = cast("Any", Message.timestamp)


def read_partition(place: bytes, attempt_label: str) -> bytes:
    """Read the partition at an encoded `WorkPlace`; return the encoded `VisiblePartition`."""
    work = _place_decoder.decode(place)
    common, own = work.parts
    with closing(StagedFiles()) as files:
        output = _output_decoder.decode(files.message(common))
        claimed = _partition_decoder.decode(files.message(own))
    with KEPT.collector.collecting_rarely():
        return _encode(_visible(ClientConfig(work.client), output, claimed))


def _visible(client: ClientConfig, output: AuditedOutput, claimed: ClaimedPartition) -> VisiblePartition:
    """The partition; it is read again while the log loses records under the reader."""
    try:
        while (visible := _Reading(client, output, claimed).read()) is None:
            pass
    except TopicError as error:
        return VisiblePartition(topic=claimed.topic, partition=claimed.partition, unread=str(error))
    return visible


def readers_config(client: ClientConfig, pipeline: str) -> ClientConfig:
    """Readers ask for a group; the user may use the pipeline's."""
    return ClientConfig({"group.id": pipeline, **client.settings})


def lost_since(client: ClientConfig, pipeline: str, place: Place, start: int, counts: Mapping[Writer, int]) -> bool:
    """Whether the log of *place*, from *start* on, has fewer records of a writer than the *counts* of a scan before."""
    with closing(Log(client, group=pipeline)) as log:
        now = scan(log, *place, start, counts)
    return any(now.counts[writer] < count for writer, count in counts.items())


class _Lane:
    """A lane while it is read."""

    def __init__(self) -> None:
        self.digest = RecordDigest()
        self.at_random = 0


class _Reading:
    def __init__(self, client: ClientConfig, output: AuditedOutput, claimed: ClaimedPartition) -> None:
        self._client, self._output, self._claimed = client, output, claimed
        self._lanes: defaultdict[SinkLane, _Lane] = defaultdict(_Lane)
        self._read_of: Counter[Writer] = Counter()
        """The number of visible records of each writer."""
        self._foreign: list[VisibleRecord] = []
        self._foreign_more = self._records = 0

    def read(self) -> VisiblePartition | None:
        """The visible records; None if the log has lost some of them meanwhile."""
        topic, partition, claims = self._claimed.topic, self._claimed.partition, self._claimed.claims
        with closing(Topics(self._client)) as topics, closing(Log(self._client, group=self._output.pipeline)) as log:
            first = topics.start_offsets(topic, [partition])[partition]
            start = max(first, min(claim.first_offset for claim in claims))
            wanted = None if self._claimed.to_end else {claim.writer: claim.records for claim in claims}
            scanned = scan(log, topic, partition, start, wanted)
            stable_end = topics.end_offsets(topic, [partition], committed=True)[partition]
        end = min(stable_end, scanned.end)
        behind = tuple(claim.writer for claim in claims if self._stop(scanned, claim) > stable_end)
        whole = {
            claim.writer: claim
            for claim in claims
            if scanned.counts[claim.writer] == claim.records and claim.writer not in behind
        }
        for claim in whole.values():
            self._lanes[claim.owner]  # one without visible records, too, is there as a whole
        config = readers_config(self._client, self._output.pipeline)
        try:
            for writer, messages in visible_runs(config, topic, partition, start, end, scanned):
                self._take(writer, whole.get(writer), messages)
        except RangeGone:
            if not lost_since(self._client, self._output.pipeline, (topic, partition), start, scanned.counts):
                raise
            return None
        unseen = {writer: claim.records for writer, claim in whole.items() if self._read_of[writer] < claim.records}
        if unseen and lost_since(self._client, self._output.pipeline, (topic, partition), start, unseen):
            return None
        return VisiblePartition(
            topic=topic,
            partition=partition,
            start=start,
            found={claim.writer: scanned.counts[claim.writer] for claim in claims},
            behind=behind,
            ends={writer: scanned.extents[writer].stop for writer, claim in whole.items() if claim.records},
            lanes=tuple(self._seen(scanned, whole, end)),
            records=self._records,
            timed_by_broker=scanned.timed_by_broker,
            foreign=tuple(self._foreign),
            foreign_more=self._foreign_more,
        )

    @staticmethod
    def _stop(scanned: Scan, claim: Claim) -> int:
        """The offset after the last record of *claim* in the log."""
        extent = scanned.extents.get(claim.writer)
        return 0 if extent is None else extent.stop

    def _take(self, writer: Writer, claim: Claim | None, messages: Sequence[Message]) -> None:
        if claim is not None:
            self._records += len(messages)
            self._read_of[writer] += len(messages)
            self._attribute(claim, self._lanes[claim.owner], messages)
        elif writer not in self._output.known:
            kept = messages[: FOREIGN_SHOWN - len(self._foreign)]
            self._foreign += (visible_record(message, writer) for message in kept)
            self._foreign_more += len(messages) - len(kept)

    def _attribute(self, claim: Claim, lane: _Lane, messages: Sequence[Message]) -> None:
        keys = list(map(_key, messages))
        if may_be_at_random(claim, self._output):
            partition_of = partitioner(self._output.partitioners[claim.checkpoint, claim.sink])
            at_random = [partition_of(key, 1) is None for key in keys]
            if any(at_random):
                lane.at_random += sum(at_random)
                others = list(map(not_, at_random))
                messages, keys = list(compress(messages, others)), list(compress(keys, others))
        headers = list(map(_headers, messages))
        lane.digest.add(
            list(map(_value, messages)),
            keys,
            [compared(of_record or ()) for of_record in headers] if any(headers) else None,
            [time_ms for _, time_ms in map(_timestamp, messages)] if claim.sink in self._output.timed else None,
        )

    def _seen(self, scanned: Scan, whole: Mapping[Writer, Claim], end: int) -> Iterator[SeenLane]:
        for owner, lane in self._lanes.items():
            own = [writer for writer, claim in whole.items() if claim.owner == owner and claim.records]
            extents = [scanned.extents[writer] for writer in own]
            yield SeenLane(
                owner=owner,
                partition=self._claimed.partition,
                digest=lane.digest.digest(),
                at_random=lane.at_random,
                start=min((extent.start for extent in extents), default=0),
                end=min(end, max((extent.stop for extent in extents), default=0)),
                writers={writer: scanned.counts[writer] for writer in own},
            )


def may_be_at_random(claim: Claim, output: AuditedOutput) -> bool:
    """Whether the client distributes records of *claim* without a key at random."""
    return not claim.by_partition and claim.sink not in output.placed

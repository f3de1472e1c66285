"""`advance`: from one checkpoint to the next, by reading exact ranges; the one function of bounded work that publishes.

Invariants: units run first, then publications, then the decision, so that transactions are open only shortly; a
publication has whole output partitions, so there are no more transactions than partitions; without a receipt, an
attempt's transactions are aborted before the manifest and swept again after it, its blocks are tombstoned.

Transactional ids carry the leader's attempt, and the next checkpoint uses them again. The attempt grows only after a
retry, because a failed try may come back at any time. A sweep aborts the open transactions of older attempts.

Ranges name every partition of every source, even empty ones, so that they end in a whole Sn. An end is exclusive, and
never beyond the last stable offset; the parts of a range are adjacent, in order, and complete. A split of a source that
reads no topic is read to its end, which nobody knows before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType

import msgspec

from exactlyonce.checkpoint.events import Decided, PendingCheckpoint, Refuse
from exactlyonce.checkpoint.records.manifest import Manifest, SourceOffset
from exactlyonce.connectors.source import FindsSplits
from exactlyonce.engines.bounded.stages import Submit, compute, outputs_by_sink
from exactlyonce.engines.bounded.unit.messages import Publication, Published, Reading, Receipt, Stage, tries_before
from exactlyonce.engines.bounded.unit.ordering import OPEN_READERS_MAX
from exactlyonce.engines.bounded.unit.staging import stage_messages
from exactlyonce.engines.bounded.workplace import workplace
from exactlyonce.engines.external_checks.preflight import Inputs, Offsets
from exactlyonce.engines.options import RunOptions
from exactlyonce.engines.pipeline_connections import PipelineConnections
from exactlyonce.engines.plan import Plan, plan
from exactlyonce.engines.runtime.source_decoder import Skipped
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import BrokerUnavailable, ConfigError, ExactlyOnceError, RecordError, Undetermined
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.pipeline.loading import Loaded
from exactlyonce.pipeline.positions import LATEST_OFFSET, TO, Group, Position


def stop_offsets(to: Position, inputs: Inputs, starts: Offsets) -> dict[str, dict[int, int]]:
    """The ends at *to*, one of `TO`, by source and partition; *starts* are the offsets where the work stands."""
    patterns = inputs.patterns
    refused: Collection[str] = ()
    if isinstance(to, Group | Mapping):
        refused = inputs.others.keys()
    elif isinstance(to, datetime):
        refused = inputs.others.keys() - patterns
    if refused:
        raise ConfigError(
            f"Source {min(refused)!r} reads no one topic, so it has no offsets or times to go to, and is "
            f"read to its end. Leave out --to, or write --to latest."
        )
    places = {source.place for source in inputs.sources.values()}
    if isinstance(to, Mapping) and (unread := to.keys() - places):
        raise ConfigError(f"No source reads {min(unread)}, so it needs no end. Read are: {', '.join(sorted(places))}.")
    moment_ms = int(to.timestamp() * 1000) if isinstance(to, datetime) else None
    ends = {id: inputs.latest(starts[id].values(), moment_ms) for id in patterns}
    for id, source in inputs.sources.items():
        topics = inputs.topics.of(source)
        seen = topics.end_offsets(source.topic, committed=True)
        latest = {partition: end for partition, end in seen.items() if partition in starts[id]}
        match to:
            case Group(group):
                reached = topics.start_offsets(source.topic) | source.group_offsets(id, topics, group, TO.setting)
                ends[id] = _named(reached, source.place, starts[id], latest)
            case Mapping():
                ends[id] = _named(to.get(source.place, {}), source.place, starts[id], latest)
            case _:
                ends[id] = latest if moment_ms is None else topics.offsets_at(source.topic, moment_ms)
    return ends


def _named(
    named: Mapping[int, int], topic: str, starts: Mapping[int, SourceOffset], latest: Mapping[int, int]
) -> dict[int, int]:
    """The *named* ends of *topic*; ConfigError where they cannot be reached."""
    if named.keys() != latest.keys():
        wanted = ", ".join(map(str, sorted(latest)))
        raise ConfigError(f"Every partition of {topic} needs an end: {wanted}; -1 stands for the latest.")
    ends = {}
    for partition, offset in named.items():
        end = ends[partition] = latest[partition] if offset == LATEST_OFFSET else offset
        if end > latest[partition]:
            raise ConfigError(
                f"{topic}[{partition}] ends at offset {latest[partition]} for readers, and it is to be read up to "
                f"{end}: that lies beyond the end. Name {latest[partition]} at most, or -1."
            )
        if end < starts[partition].offset:
            raise ConfigError(
                f"{topic}[{partition}] is read up to offset {starts[partition].offset} already, which cannot be taken "
                f"back to {end}. Name {starts[partition].offset} or more."
            )
    return ends


def readings(
    starts: Offsets, ends: Mapping[str, Mapping[int, int]], others: Mapping[str, FindsSplits] = MappingProxyType({})
) -> tuple[Reading, ...]:
    """Every partition from its start to its end, by source and partition; the splits of *others* to theirs.

    A partition beyond its end, or without one, has an empty range.
    """

    def is_guessed(source: str, start: SourceOffset) -> bool:
        return source in others and start.in_cluster is None and not others[source].grows

    def end(source: str, start: SourceOffset) -> int:
        if source in others and start.in_cluster is None:
            return start.offset + others[source].left(start)
        return max(start.offset, ends.get(source, {}).get(start.partition, start.offset))

    return tuple(
        Reading(
            source, start.topic, start.topic_id, partition, start.offset, end(source, start),
            is_guessed(source, start),
        )
        for source, offsets in sorted(starts.items())
        for partition, start in sorted(offsets.items())
    )  # fmt: skip


def offsets_in(ranges: Iterable[Reading]) -> int:
    """The offsets of *ranges*; there may be fewer records."""
    return sum(reading.length for reading in ranges)


def rest(ranges: Sequence[Reading], part: Sequence[Reading], reached: Iterable[SourceOffset]) -> tuple[Reading, ...]:
    """What is left of *ranges* once *part*, a beginning of all, has *reached* these offsets.

    A split that has more records than was guessed may have twice as many.
    """
    positions = {(position.source, position.partition): position for position in reached}

    def left(reading: Reading, done: Reading) -> Reading:
        position, end = positions[reading.source, reading.partition], reading.end
        if done.to_end and done.length:
            end = position.offset if position.ended else max(end, 2 * position.offset)
        return msgspec.structs.replace(reading, start=position.offset if done.to_end else done.end, end=end)

    return tuple(map(left, ranges, part))


def first_part(ranges: Sequence[Reading], records_max: int, splits_max: int = OPEN_READERS_MAX) -> tuple[Reading, ...]:
    """The beginning of *ranges*, of at most about *records_max* offsets; never empty unless *ranges* are.

    Every partition advances by the same share of its range, so that the times of records stay together. Splits that are
    read to their end come one after the other: as many as make up the share, and *splits_max* at most.

    >>> [(reading.start, reading.end) for reading in first_part([Reading("s", "t", "id", 0, 10, 15)], 2)]
    [(10, 12)]
    """
    count = max(1, -(-offsets_in(ranges) // records_max))
    share = -(-sum(reading.length for reading in ranges if reading.to_end) // count)
    part = []
    for reading in ranges:
        length = -(-reading.length // count)
        if reading.to_end:
            length = min(reading.length, records_max) if share > 0 and splits_max > 0 else 0
            share, splits_max = share - length, splits_max - (length > 0)
        part.append(msgspec.structs.replace(reading, end=reading.start + length))
    return tuple(part)


PUBLISHER_RECORDS = 20_000
PUBLISHER_BYTES = 16 << 20
"""A publication with less output takes longer to begin than to write."""

_encode = msgspec.msgpack.Encoder().encode
_published_decoder = msgspec.msgpack.Decoder(Published)


@dataclass(frozen=True)
class Advanced:
    """A finalized checkpoint, and the work that it took."""

    manifest: Manifest
    receipts: Sequence[Receipt]
    publications: Sequence[Published]

    @property
    def records(self) -> int:
        """Messages read."""
        return sum(receipt.records for receipt in self.receipts)

    @property
    def skipped(self) -> list[Skipped]:
        """Messages that do not decode, by source and partition."""
        skipped = [partition for receipt in self.receipts for partition in receipt.skipped]
        return sorted(skipped, key=lambda partition: (partition.source, partition.partition))

    @property
    def records_out(self) -> int:
        """Outputs that became visible."""
        return self.manifest.records_committed

    @property
    def staged_bytes(self) -> int:
        """The size of all staged files."""
        return sum(receipt.staged_bytes for receipt in self.receipts)

    @property
    def publishing_ms(self) -> int:
        """The time of the longest publication."""
        return max((published.ended_ms - published.began_ms for published in self.publications), default=0)

    @property
    def elapsed_ms(self) -> int:
        """The time from the first unit's launch to the last publication's end."""
        work: list[Receipt | Published] = [*self.receipts, *self.publications]
        return max(done.ended_ms for done in work) - min(done.began_ms for done in work)


def advance(
    loaded: Loaded,
    options: RunOptions,
    connections: PipelineConnections,
    manifest: Manifest,
    *,
    ranges: Sequence[Reading],
    submit: Submit,
    staging: str | Path,
    submit_small: Submit | None = None,
    splittable: set[str] | None = None,
    to: Sequence[Reading] = (),
    without_output: bool = False,
) -> Advanced:
    """The next checkpoint after *manifest*, the newest one, over *ranges*, which begin where it ends.

    *connections* have recovered; *staging* is a folder that all units see, or a URL of HDFS or S3. *submit_small*, if
    given, runs publications of little output. *splittable* is that of a `Computation`. *to*: the ranges after which a
    clean end follows, where one does. *without_output*: only state is computed.
    Raises `BrokerUnavailable` if the checkpoint was not decided: it never happened.
    """
    clock, leader = SystemClock(), connections.leader
    physical = plan(loaded.pipeline.build(), options.parallelism)
    checkpoint, began_ms = manifest.checkpoint + 1, clock.monotonic_ms()
    with workplace(staging, f"{manifest.pipeline}-{checkpoint}") as files:
        base = msgspec.structs.replace(manifest, order_logs=(), committables=())
        common = Stage(
            spec=connections.task_spec(leader.attempt, base),
            fingerprint=physical.graph.fingerprint(),
            checkpoint=checkpoint,
            write_state=True,
            origins=False,
            files=files,
            without_output=without_output,
            by_partition=True,
        )
        client = options.client.as_text
        may_split = bool(splittable)
        receipts = compute(physical, common, client, ranges, submit, splittable=splittable)
        computed_again = may_split and not splittable
        hit("advance-computed")
        connections.drive(leader.upkeep())  # a fenced driver opens no transactions
        opened_ms = clock.monotonic_ms()
        try:
            work = _publications(common, client, physical, connections.transaction_timeout_ms, receipts)
            publish = submit_small if submit_small is not None and _publishes_little(receipts) else submit
            publications = _published(common, work, publish)
        except Exception:  # readers need not wait until the open transactions, which no record names, time out
            with suppress(ExactlyOnceError):
                _abort_all_but(connections)
            raise
    hit("advance-published")
    acks = [receipt.ack for receipt in receipts]
    offsets = [offset for ack in acks for offset in ack.offsets]
    precommits = [published.precommit for published in publications]
    open_ms = clock.monotonic_ms() - opened_ms
    pending = PendingCheckpoint.of(
        acks,
        precommits,
        base=manifest.checkpoint,
        triggered_ms=began_ms,
        attempt=leader.attempt,
        final=bool(to) and not any(reading.length for reading in rest(to, ranges, offsets)),
        ages_ms={precommit.transactional_id: open_ms for precommit in precommits},
        outputs_by_partition=tuple(sorted((id, common.spec.output_partitions[id]) for id in _topics(physical))),
    )
    if publications:
        _abort_all_but(connections, {precommit.transactional_id for precommit in precommits})
    units_failed = computed_again or any(tries_before(receipt.label) for receipt in receipts)
    if units_failed:
        connections.known_blocks.expect_own_orphans()
    publications_failed = any(tries_before(published.label) for published in publications)
    done = Advanced(_decide(connections, pending, receipts), receipts, publications)
    attempt = leader.attempt + (units_failed or publications_failed)
    connections.drive(leader.begin_attempt(attempt, killed=units_failed))
    return done


def _abort_all_but(connections: PipelineConnections, winners: Collection[str] = ()) -> None:
    """Abort the open transactions of the present attempt, except the *winners*'."""
    connections.drive(connections.leader.transactions.abort_all_but(winners))


def _topics(physical: Plan) -> dict[str, str]:
    """The topic by sink, of the sinks whose outputs are staged for publication."""
    sinks = {node.id: node.sink for node in physical.graph.sinks if node.sink is not None}
    return {id: sink.topic or "" for id, sink in sinks.items() if sink.transactional}


def _publishes_little(receipts: Sequence[Receipt]) -> bool:
    """Whether the staged outputs of all sinks are no more than one publication takes."""
    files = [file for receipt in receipts for file in receipt.outputs]
    records, size = sum(file.records for file in files), sum(file.file.size for file in files)
    return records <= PUBLISHER_RECORDS and size <= PUBLISHER_BYTES


def _publications(
    common: Stage, client: dict[str, str], physical: Plan, timeout_ms: int, receipts: Sequence[Receipt]
) -> Iterator[Publication]:
    """The publications of each sink, no more than there are subtasks: each has some whole partitions."""
    topics = _topics(physical)
    for sink, staged in sorted(outputs_by_sink(receipts).items()):
        partitions = sorted({partition for file in staged for partition in file.counts})
        (outputs,) = stage_messages(f"{common.files}publish-{sink}", [staged])
        records, size = sum(file.records for file in staged), sum(file.file.size for file in staged)
        worthwhile = max(-(-records // PUBLISHER_RECORDS), -(-size // PUBLISHER_BYTES))
        publishers = min(physical.parallelism, len(partitions), worthwhile)
        for publisher in range(publishers):
            yield Publication(
                client=client,
                pipeline=physical.graph.pipeline_id,
                sink=sink,
                publisher=publisher,
                partitions=tuple(partitions[publisher::publishers]),
                topic=topics[sink],
                checkpoint=common.checkpoint,
                incarnation=common.spec.incarnation,
                attempt=common.spec.attempt,
                transaction_timeout_ms=timeout_ms,
                outputs=outputs,
            )


def _published(common: Stage, publications: Iterable[Publication], submit: Submit) -> list[Published]:
    description = f"{common.spec.manifest.pipeline}: checkpoint {common.checkpoint}, publish"
    work = [_encode(publication) for publication in publications]
    answers = submit(description, work) if work else []
    return [_published_decoder.decode(answer) for answer in answers]


def _decide(connections: PipelineConnections, pending: PendingCheckpoint, receipts: Sequence[Receipt]) -> Manifest:
    """The manifest, once it is durable."""
    for ack in pending.acks.values():
        connections.leader.acknowledged(ack)
    try:
        verdict = connections.drive(connections.leader.decide(pending, (pending.base,)))
    except RecordError as error:  # too many dead letters, which no reader must wait for
        _abort_all_but(connections)
        notes = dict.fromkeys(note for receipt in receipts for note in receipt.notes)
        raise RecordError("\n".join([*notes, str(error)]), **error.facts) from None
    if isinstance(verdict, Refuse):
        _abort_all_but(connections)
        connections.drive(connections.leader.upkeep())  # a newer instance may have ended its transactions
        raise BrokerUnavailable(
            f"Checkpoint {pending.checkpoint} was not decided: {verdict.reason}. Nothing of it is visible, and nothing "
            f"is lost: run the command again."
        )
    if not isinstance(verdict, Decided):
        raise Undetermined(
            f"Whether checkpoint {pending.checkpoint} was decided cannot be known here. Nothing is lost: run the "
            f"command again, it reads what is true."
        )
    return verdict.manifest

"""`advance`: from one checkpoint to the next, by reading exact ranges; the one function of bounded work that publishes.

Invariants: units run first, then publications, then the decision, so that transactions are open only shortly; a
publication has whole output partitions, so there are no more transactions than partitions; without a receipt, an
attempt's transactions are aborted before the manifest and swept again after it, its blocks are tombstoned.

Transactional ids carry the leader's attempt, and the next checkpoint uses them again. The attempt grows only after a
retry, because a failed try may come back at any time. A sweep aborts the open transactions of older attempts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from exactlyonce.checkpoint.events import Decided, PendingCheckpoint, Refuse
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.engines.bounded.stages import compute, outputs_by_sink
from exactlyonce.engines.bounded.stop_offsets import rest
from exactlyonce.engines.bounded.submit import Submit
from exactlyonce.engines.bounded.unit.messages import Publication, Published, Reading, Receipt, Stage, tries_before
from exactlyonce.engines.bounded.unit.staging import stage_messages
from exactlyonce.engines.bounded.workplace import workplace
from exactlyonce.engines.options import RunOptions
from exactlyonce.engines.pipeline_connections import PipelineConnections
from exactlyonce.engines.plan import Plan, plan
from exactlyonce.engines.runtime.source_decoder import Skipped
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import BrokerUnavailable, ExactlyOnceError, RecordError, Undetermined
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.pipeline.loading import Loaded

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
    """Abort the open transactions of the present attempt, except those of *winners*."""
    connections.drive(connections.leader.transactions.abort_all_but(winners))


def _topics(physical: Plan) -> dict[str, str]:
    """The topic by sink, of the sinks whose outputs are staged for publication."""
    sinks = {node.id: node.sink for node in physical.graph.sinks if node.sink is not None}
    return {id: sink.topic or "" for id, sink in sinks.items() if sink.transactional}


def _publishes_little(receipts: Sequence[Receipt]) -> bool:
    """Whether the staged outputs of all sinks are no more than those of one publication."""
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
        outputs = stage_messages(f"{common.files}publish-{sink}", [staged])
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

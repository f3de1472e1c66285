"""`advance`: from one checkpoint to the next, by reading exact ranges; the one function of bounded work that publishes.

Invariants: units first, then publications, then the decision, so that transactions are open for as short as can be;
what the driver has no receipt of never counts: its transactions are aborted before the manifest, and swept again once
the checkpoint is finalized, its blocks are tombstoned; the decision is the local engine's own, by the same code.

Transactional ids carry the leader's attempt. The next checkpoint uses the same ids again, for a broker remembers each
for a week. Only after work was tried more than once does the attempt grow: a failed try may come back at any time, and
is swept then. A sweep aborts what older attempts have left open, so an id must not carry less than the attempt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from exactlyonce.checkpoint.commits.protocol import Refuse
from exactlyonce.checkpoint.decision import Decided
from exactlyonce.checkpoint.events import PendingCheckpoint
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.engines.bounded.ranges import Reading
from exactlyonce.engines.bounded.stages import compute
from exactlyonce.engines.bounded.submit import Submit, is_retry
from exactlyonce.engines.bounded.unit.messages import Publication, Published, Receipt, Unit
from exactlyonce.engines.bounded.workplace import workplace
from exactlyonce.engines.options import RunOptions
from exactlyonce.engines.pipeline_connections import PipelineConnections
from exactlyonce.engines.plan import Plan, plan
from exactlyonce.engines.runtime.source_decoder import Skipped
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import BrokerUnavailable, ExactlyOnceError, Undetermined
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.pipeline.loading import Loaded

_encode = msgspec.msgpack.Encoder().encode
_published_decoder = msgspec.msgpack.Decoder(Published)


@dataclass(frozen=True)
class Advanced:
    """A completed, finalized checkpoint, and what it took."""

    manifest: Manifest
    receipts: Sequence[Receipt]
    publications: Sequence[Published]

    @property
    def has_failed_publications(self) -> bool:
        """Whether some attempt to publish has no receipt: it may yet take the id that it was given."""
        return any(is_retry(each.label) for each in self.publications)

    @property
    def records(self) -> int:
        """Messages read."""
        return sum(each.records for each in self.receipts)

    @property
    def skipped(self) -> list[Skipped]:
        """Of those, skipped because they do not decode, by source and partition."""
        found = [skipped for each in self.receipts for skipped in each.skipped]
        return sorted(found, key=lambda skipped: (skipped.source, skipped.partition))

    @property
    def records_out(self) -> int:
        """Outputs that became visible."""
        return self.manifest.records_committed

    @property
    def elapsed_ms(self) -> int:
        """From the first unit's launch to the last publication's end."""
        spans = [(each.began_ms, each.ended_ms) for each in self.receipts]
        spans += [(each.began_ms, each.ended_ms) for each in self.publications]
        return max(ended for _, ended in spans) - min(began for began, _ in spans)


def advance(
    loaded: Loaded,
    options: RunOptions,
    connections: PipelineConnections,
    manifest: Manifest,
    *,
    ranges: Sequence[Reading],
    submit: Submit,
    staging: Path,
    final: bool = False,
) -> Advanced:
    """The next checkpoint after *manifest*, the newest one, over *ranges*, which begin where it ends.

    *connections* have recovered; *staging* is a folder that all who run units see. *final*: a clean end follows. Raises
    `BrokerUnavailable` if the checkpoint was not decided: it never happened.
    """
    clock, leader = SystemClock(), connections.leader
    physical = plan(loaded.pipeline.build(), options.parallelism)
    checkpoint, began_ms = manifest.checkpoint + 1, clock.monotonic_ms()
    with workplace(staging, f"{manifest.pipeline}-{checkpoint}") as folder:
        common = _common(loaded, options, connections, manifest, physical, folder)
        receipts = compute(physical, common, ranges, submit)
        hit("advance-computed")
        connections.drive(leader.upkeep())  # who was fenced meanwhile opens no transactions
        opened_ms = clock.monotonic_ms()
        with _aborted_if_broken_off(connections):
            publications = _publish(common, physical, connections.transaction_timeout_ms, receipts, submit)
    hit("advance-published")
    base = manifest.checkpoint
    decided = PendingCheckpoint(
        checkpoint=checkpoint, base=base, previous=base, final=final, triggered_ms=began_ms,
        attempt=leader.attempt,
    )  # fmt: skip
    decided.acks = {(each.ack.task, each.ack.subtask): each.ack for each in receipts}
    decided.order_logs = [each.ack.order_log for each in receipts if each.ack.order_log is not None]
    decided.staged = [staged for each in receipts for staged in each.ack.staged]
    decided.precommits = [each.precommit for each in publications]
    open_ms = clock.monotonic_ms() - opened_ms
    decided.ages_ms = {each.transactional_id: open_ms for each in decided.precommits}
    retried = any(is_retry(each.label) for each in receipts)
    _settle_failed_attempts(connections, publications, retried=retried)
    done = Advanced(_decide(connections, decided), receipts, publications)
    attempt = leader.attempt + (retried or done.has_failed_publications)
    connections.drive(leader.begin_attempt(attempt, killed=retried))
    return done


def _common(
    loaded: Loaded,
    options: RunOptions,
    connections: PipelineConnections,
    manifest: Manifest,
    physical: Plan,
    folder: Path,
) -> Unit:
    """What all units of this checkpoint have in common."""
    return Unit(
        reference=loaded.reference,
        fingerprint=physical.graph.fingerprint(),
        client={name: str(value) for name, value in options.client.settings.items()},
        task="",
        subtask=0,
        parallelism=physical.parallelism,
        checkpoint=manifest.checkpoint + 1,
        base=msgspec.structs.replace(manifest, order_logs=(), committables=()),
        incarnation=connections.leader.incarnation.incarnation,
        attempt=connections.leader.attempt,
        topic=connections.log.topic,
        topic_ids=connections.surroundings.inputs.topic_ids,
        readings=(),
        channels=(),
        order=None,
        write_state=True,
        origins=False,
        folder=str(folder),
        storage=options.checkpoint.storage,
        drops_fields=options.allow_dropped_fields,
        skips=options.skip,
        incremental=options.checkpoint.incremental,
    )


def _abort_all_but(connections: PipelineConnections, winners: Collection[str] = ()) -> None:
    """Abort what the present attempt has left open, except the transactions of *winners*."""
    connections.drive(connections.leader.transactions.abort_all_but(winners))


@contextmanager
def _aborted_if_broken_off(connections: PipelineConnections) -> Iterator[None]:
    """What is open when the publishing fails is named by no record, and need not hold readers up until it times out."""
    try:
        yield
    except Exception:
        with suppress(ExactlyOnceError):
            _abort_all_but(connections)
        raise


def _publish(
    common: Unit, physical: Plan, timeout_ms: int, receipts: Sequence[Receipt], submit: Submit
) -> list[Published]:
    """Publish what the receipts' units have staged, all sinks at once."""
    files = sorted((file for each in receipts for file in each.outputs), key=lambda file: (file.sink, file.subtask))
    topics = {node.id: node.sink.topic or "" for node in physical.graph.sinks if node.sink is not None}
    work = [
        Publication(
            client=common.client,
            pipeline=physical.graph.pipeline_id,
            sink=file.sink,
            subtask=file.subtask,
            topic=topics[file.sink],
            checkpoint=common.checkpoint,
            incarnation=common.incarnation,
            attempt=common.attempt,
            transaction_timeout_ms=timeout_ms,
            files=(file,),
        )
        for file in files
    ]
    answers = submit("publish", [_encode(each) for each in work]) if work else []
    return [_published_decoder.decode(each) for each in answers]


def _settle_failed_attempts(
    connections: PipelineConnections, publications: Sequence[Published], *, retried: bool
) -> None:
    """Failed attempts have no receipt: their transactions are aborted, their blocks go with this checkpoint."""
    if publications:
        _abort_all_but(connections, {each.precommit.transactional_id for each in publications})
    if retried:
        connections.known_blocks.expect_own_orphans()


def _decide(connections: PipelineConnections, decided: PendingCheckpoint) -> Manifest:
    """The manifest, once it is durable."""
    for ack in decided.acks.values():
        connections.leader.acknowledged(ack)
    verdict = connections.drive(connections.leader.decide(decided, (decided.base,)))
    if isinstance(verdict, Refuse):
        _abort_all_but(connections)
        raise BrokerUnavailable(
            f"Checkpoint {decided.checkpoint} was not decided: {verdict.reason}. Nothing of it is visible, and nothing "
            f"is lost: run the command again."
        )
    if not isinstance(verdict, Decided):
        raise Undetermined(
            f"Whether checkpoint {decided.checkpoint} was decided cannot be known here. Nothing is lost: run the "
            f"command again, it reads what is true."
        )
    return verdict.manifest

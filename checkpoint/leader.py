"""One incarnation of a coordinator, from its first request to its last. Pure procedures.

The local engine, bounded work, Spark's sink and the simulator run these lines, and answer the requests.
Invariants: a constructor fences nobody and asks nobody; nothing is decided before all older incarnations are fenced and
their decisions finished; no sink producer is made before `recover` or `begin_attempt` has returned; decisions come one
by one. For one thread at a time, except `acknowledged`, which hands over to `decide`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.clock import Clock
from exactlyonce.checkpoint.commits.kafka import Resolution, TransactionCommits
from exactlyonce.checkpoint.commits.stores import NOTED_INTERVAL_MS, StagedCommits
from exactlyonce.checkpoint.decision import Check, CommitProtocol, Dropped, Expire, finalize, finish, gravest, objection
from exactlyonce.checkpoint.decision_log import DecisionLog, fenced
from exactlyonce.checkpoint.events import (
    Ack,
    Decided,
    PendingCheckpoint,
    Refuse,
    Unresolved,
    Verdict,
)
from exactlyonce.checkpoint.kept_blocks import Retention
from exactlyonce.checkpoint.leader_config import LeaderConfig, RecordLimits
from exactlyonce.checkpoint.records.encoding import TooLarge, encode
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import (
    COMMITTED,
    HISTORY,
    HISTORY_ENDED,
    INITIAL,
    LATE_BELOW_LATEST,
    RESTORED,
    SAVEPOINT,
    CheckpointStats,
    Failure,
    Incarnation,
    Manifest,
    Precommit,
    Restored,
    SourceOffset,
    coordinator_id,
    erased_incarnation,
    skips_between,
    transaction_prefix,
)
from exactlyonce.checkpoint.requests import Outcome, Outputs, Procedure, R, concurrently, relayed
from exactlyonce.checkpoint.transactions.commit import incarnation_latest, settle
from exactlyonce.pipeline.errors import (
    BrokerUnavailable,
    Fenced,
    Halt,
    InvariantViolation,
    Outdated,
    StoreUnavailable,
    Unavailable,
    Undetermined,
)
from exactlyonce.pipeline.names import setting

UPKEEP_INTERVAL_S = 10.0
"""Between two calls of `upkeep`; `history.SILENCE_MS` is three times as long."""
WATCH_INTERVAL_MS = 60_000
HEARTBEAT_PAUSE_MS = 200
"""Before a refused heartbeat is tried again."""

UNTOLD = (Fenced, Undetermined, BrokerUnavailable, Unavailable, Outdated, InvariantViolation)
"""Errors that do not end a pipeline, or after which this incarnation may not act: `Leader.fail` is not for them."""


class Leader:
    """Leads the pipeline of *config*; see the module. *note* takes texts for people."""

    def __init__(
        self, config: LeaderConfig, log: DecisionLog, retention: Retention, clock: Clock, note: Callable[[str], None]
    ) -> None:
        self.config, self.log, self.retention = config, log, retention
        self.attempt = config.attempt
        self._clock, self._note = clock, note
        self._watched_ms = self._beaten_ms = clock.monotonic_ms()
        self._noted_ms = -NOTED_INTERVAL_MS
        self._arrived = deque[Ack]()
        """Acknowledgements from another thread that are not absorbed yet."""
        self._limits = RecordLimits(config)
        self._written_bytes = dict[int, int]()
        """The bytes of blocks by checkpoint, since the last decided one."""
        self.transactions = TransactionCommits(
            pipeline=config.pipeline,
            cluster_id=config.cluster_id,
            transaction_version=config.transaction_version,
            transaction_timeout_ms=config.transaction_timeout_ms,
            attempt=config.attempt,
        )
        self._stores = StagedCommits(
            clock=clock,
            sinks=config.staging,
            timeout_ms=config.store_timeout_ms,
            note=note,
            meanwhile=self._keep_alive,
            attempt=config.attempt,
        )
        self._protocols: tuple[CommitProtocol, ...] = (self.transactions, self._stores)
        """Transactions cannot wait, and come first."""

    @property
    def incarnation(self) -> Incarnation:
        return self.log.incarnation

    @property
    def manifest(self) -> Manifest:
        """The newest manifest; there is one once `recover` has returned."""
        newest = self.log.history.latest
        assert newest is not None
        return newest

    def run(self, procedure: Procedure[R]) -> Procedure[R]:
        """*procedure*, with its appends going to the log."""
        return self.log.recording(procedure)

    # --- beginning ----------------------------------------------------------------------------------------------

    def begin(self) -> Procedure[History]:
        """Fence every older incarnation, read their decisions, refuse damaged ones, and write the first record."""
        history = yield from self.open()
        listed = yield ask.ListTransactions(transaction_prefix(self.config.pipeline))
        newest = incarnation_latest(listed)
        erased = max((erased_incarnation(self.config.pipeline, known.transactional_id) for known in listed), default=0)
        if newest > erased and not history.incarnation_latest:
            yield from self._refuse_lost_topic(newest)
        yield ask.CreateOutputs(history.latest)
        config = self.config
        above = max(newest, erased)
        begun = yield from self.log.begin(
            config.host, config.process, above, machine=config.machine, bounded=config.bounded, storage=config.storage
        )
        self._begun(begun)
        yield ask.Reached("coordinator-opened")
        return self.log.history

    def _refuse_lost_topic(self, incarnation: int) -> Procedure[None]:
        """The log was empty, though transactions of *incarnation* are known: it was deleted, or has been begun since.

        A writer under such an id has begun before, so a log that is still empty was deleted.
        """
        now: History | None = yield from self.log.peek()
        if now is None or now.incarnation_latest:
            raise fenced(self.config.pipeline, 0, now.newest_incarnation if now else None)
        raise Halt(self.config.topic_lost(self.log.topic.name, incarnation))

    def resume(self, incarnation: int) -> None:
        """Continue *incarnation*, which another process has begun; after `open`."""
        self._begun(self.log.resume(incarnation))

    def _begun(self, incarnation: Incarnation) -> None:
        for protocol in self._protocols:
            protocol.begin(incarnation, self.config.fenced_below(incarnation), self.log.topic.topic_id)

    def open(self) -> Procedure[History]:
        """Fence every other process that writes decisions, read the decisions, and refuse damaged ones."""
        topic = self.log.topic
        yield from settle(
            coordinator_id(self.config.pipeline), [(topic.name, partition) for partition in range(topic.partitions)]
        )
        history = yield from self.log.open()
        history.halt_if_damaged()
        self.config.require_not_condemned(history)
        self.config.require_same_storage(history.latest)
        return history

    # --- recovery -----------------------------------------------------------------------------------------------

    def recover(self) -> Procedure[Manifest]:
        """Finish the decisions of older incarnations, abort the rest, and find where to start."""
        latest, unfinalized = self.log.history.latest, self.log.history.unfinalized
        yield from self._fence()
        restores = self.config.goes_on_from_savepoint(latest)
        if latest is None and not restores:
            yield from self._first_manifest()
        elif latest is not None and not restores:
            yield ask.CheckContinuity(latest)
        if unfinalized is not None:
            yield from self.finish(unfinalized, lambda _: self._claimed())
        if restores:
            yield from self._restored_manifest(latest)
        yield from self._clean()
        self._require((yield from self.log.heartbeat(fenced_below=self.incarnation.incarnation)))
        if unfinalized is None or restores:
            manifests, blocks = yield from self._claimed()
            if manifests or blocks:
                outcome = yield from self.log.append(manifests_dropped=manifests, blocks_dropped=blocks)
                self._require(outcome)
        yield ask.SetPosition(self.manifest)
        yield ask.Reached("coordinator-swept")
        return self.manifest

    def finish_decided(self) -> Procedure[dict[str, str]]:
        """Without a run: finish the decisions of older incarnations; returns the fate of each committable.

        Undecided transactions are left to the next run, unless readers have to get past them here. Nothing is noted as
        fenced, since not all older ids were.
        """
        yield from self._fence()
        unfinalized = self.log.history.unfinalized
        return {} if unfinalized is None else (yield from self.finish(unfinalized, lambda _: self._claimed()))

    def _fence(self) -> Procedure[None]:
        """Let no older incarnation commit undecided transactions, as far as that can be done before `finish`."""
        history = self.log.history
        for record, why in history.damaged.items():
            self._note(f"damaged in {self.log.topic.name}, but nothing newer is: {record}: {why}")
        unfinalized = history.unfinalized
        if self.config.staging and unfinalized is not None:
            for protocol in self._protocols:
                yield from protocol.hasten(unfinalized, history.repairs_of(unfinalized.checkpoint))
        for protocol in self._protocols:
            yield from protocol.fence(history.latest, history.latest_finalized)

    def _claimed(self) -> Procedure[Dropped]:
        return self.retention.recover(self.log.history, self.incarnation.incarnation)

    @property
    def _beginning(self) -> tuple[int, ...]:
        """The first offset of every partition of the checkpoint topic."""
        return (0,) * self.log.topic.partitions

    def _first_manifest(self) -> Procedure[None]:
        """Manifest 0: the resolved start and no state, durable before anything is read; it has nothing to commit."""
        start_offsets = yield ask.StartOffsets()
        first = self._unasked(0, start_offsets)
        self.retention.start_at(self._beginning)  # an interrupted restore of a savepoint may have left blocks
        manifest = self._manifest(
            first, (yield ask.KnownOutputs()), kind=HISTORY if self.config.without_output else INITIAL
        )
        self._require((yield from self.log.append(manifest)))
        finalized = finalize(manifest, {}, self.incarnation.incarnation, self._clock.now_ms())
        yield from self.run(finalized)

    def _unasked(self, checkpoint: int, offsets: tuple[SourceOffset, ...]) -> PendingCheckpoint:
        """A checkpoint that stands on no other, and that no subtask was asked for."""
        ack, now_ms = Ack("", 0, checkpoint, offsets), self._clock.monotonic_ms()
        return PendingCheckpoint.of([ack], base=checkpoint, triggered_ms=now_ms, attempt=self.attempt)

    def _restored_manifest(self, latest: Manifest | None) -> Procedure[None]:
        """Write the manifest that continues from a savepoint, after *latest*, the newest; it has nothing to commit.

        Its blocks lie after the ends that it notes, and so do blocks of an earlier try: both are searched.
        """
        number = latest.checkpoint + 1 if latest is not None else 0
        restored: Restored = yield ask.RestoreSavepoint(number, self.incarnation.incarnation)
        yield ask.Reached("savepoint-written")
        plan = self._unasked(number, restored.offsets)
        plan.previous = latest.checkpoint if latest is not None else 0
        self.retention.start_at(latest.block_end_offsets if latest is not None else self._beginning)
        manifest = self._manifest(plan, (yield ask.KnownOutputs()), kind=RESTORED)
        manifest = msgspec.structs.replace(
            manifest, operators=restored.operators, origin=restored.origin, channel_logs=restored.channel_logs
        )
        self._require((yield from self.log.append(manifest)))
        yield from self.run(finalize(manifest, {}, self.incarnation.incarnation, self._clock.now_ms()))

    def finish(self, manifest: Manifest, expire: Expire) -> Procedure[dict[str, str]]:
        """Finish *manifest*, which is decided and not finalized; returns the fate of each of its committables."""
        self._note(f"finishing checkpoint {manifest.checkpoint}, which was decided but not finalized")
        repairs = self.log.history.repairs_of(manifest.checkpoint)
        fates = yield from self.run(
            finish(
                manifest,
                repairs,
                self._protocols,
                self.incarnation.incarnation,
                self._clock.now_ms,
                expire,
                accept_loss=self.config.accept_loss == manifest.checkpoint,
            )
        )
        for name, fate in fates.items():
            if fate != COMMITTED:
                self._note(f"checkpoint {manifest.checkpoint}: output {name} {fate}")
        return fates

    def _clean(self) -> Procedure[None]:
        """All decisions are committed: fence older attempts, and drop what they left."""
        for protocol in self._protocols:
            yield from protocol.clean()
        self._watched_ms = self._clock.monotonic_ms()

    def _require(self, outcome: Outcome) -> None:
        """Raise unless an append was `DONE`."""
        if outcome is Outcome.UNKNOWN:
            raise Undetermined(
                f"Whether the broker wrote a record to {self.log.topic.name} is not known. This instance ends; nothing "
                f"is lost: run the pipeline again, it reads what is true."
            )
        if outcome is Outcome.NOT_WRITTEN:
            raise BrokerUnavailable(
                f"The broker took no record into {self.log.topic.name}: {self.log.refusal or 'it gave no reason'}. "
                f"Nothing is lost: run the pipeline again once the broker answers."
            )

    # --- attempts -----------------------------------------------------------------------------------------------

    def begin_attempt(self, attempt: int, *, killed: bool = True) -> Procedure[Manifest]:
        """Before the next attempt, with all workers dead: finish what was decided, abort what was not.

        *killed*: the workers were killed while they wrote.
        """
        yield from self._confirm_leading()
        self.attempt = attempt
        self._limits.late.begin_attempt()
        for protocol in self._protocols:
            protocol.begin_attempt(attempt)
        unfinished = self.log.history.unfinalized
        if unfinished is not None:
            yield from self.finish(unfinished, lambda manifest: self.retention.expire(manifest, ()))
        yield from self._clean()
        yield from self.retention.begin_attempt(self.manifest, self.incarnation.incarnation, attempt, late=killed)
        yield from self.look_at_inputs()
        return self.manifest

    def _confirm_leading(self) -> Procedure[None]:
        """Write a heartbeat, which only the newest incarnation can; a broker that refuses is asked again."""
        deadline_ms = self._clock.monotonic_ms() + self.log.append_timeout_ms
        while (outcome := (yield from self.log.heartbeat())) is Outcome.NOT_WRITTEN:
            if self._clock.monotonic_ms() >= deadline_ms:
                break
            yield ask.Pause(HEARTBEAT_PAUSE_MS)
        self._require(outcome)

    def look_at_inputs(self) -> Procedure[None]:
        """Raise Halt if an input was deleted or made anew; added partitions are read from here on."""
        yield ask.LookAtInputs(self.manifest)
        yield from self._look_elsewhere()
        yield ask.SetPosition(self.manifest)

    def _look_elsewhere(self) -> Procedure[None]:
        """`CheckRemoteInputs`. Another cluster that is away is waited for as long as a store, with heartbeats."""

        def attempt(_: int) -> Procedure[None]:
            try:
                yield ask.CheckRemoteInputs(self.manifest)
            except BrokerUnavailable as error:
                if self._clock.monotonic_ms() >= self._noted_ms + NOTED_INTERVAL_MS:
                    self._noted_ms = self._clock.monotonic_ms()
                    self._note(f"waiting for the cluster of a source: {error}")
                yield from self._keep_alive()
                raise

        timeout_ms = max(self.config.store_timeout_ms, self.log.append_timeout_ms)
        yield from ask.retrying(attempt, self._clock, self._clock.monotonic_ms() + timeout_ms)

    # --- decisions ----------------------------------------------------------------------------------------------

    def acknowledged(self, ack: Ack) -> None:
        """A subtask has acknowledged. From any thread, before `decide` is called for the checkpoint."""
        self._arrived.append(ack)

    def count_acknowledged(self) -> Procedure[None]:
        """Absorb the acknowledgements so far, and count the records that their sinks have flushed.

        Called as acknowledgements come, so that the decision need not wait for it. Transactions that cannot be counted
        yet are checked there.
        """
        outputs: Outputs = yield ask.KnownOutputs()
        precommits = self._absorb()
        for protocol in self._protocols:
            yield from protocol.acknowledged(precommits, outputs)

    def decide(self, plan: PendingCheckpoint, pinned: Iterable[int]) -> Procedure[Verdict]:
        """Check, then decide, then commit and finalize *plan*; *pinned* are the bases of checkpoints in flight.

        Raises Halt, before anything is decided, if the acknowledged records may be of another topic.
        """
        yield from self.count_acknowledged()
        if self.log.history.latest is not None:  # all that the manifest will name has been read
            yield from self._look_elsewhere()
        verdict = yield from self.run(self._decide(plan, pinned))
        if isinstance(verdict, Decided):
            yield ask.SetPosition(verdict.manifest)
            self._limits.late.decided(plan)
            self._written_bytes = {n: size for n, size in self._written_bytes.items() if n > plan.checkpoint}
            if not verdict.finalized:
                self._retain(plan, verdict.manifest)
        return verdict

    def _decide(self, plan: PendingCheckpoint, pinned: Iterable[int]) -> Procedure[Verdict]:
        if not all(protocol.is_prepared(plan) for protocol in self._protocols):
            problem = gravest((yield from concurrently(*map(objection, self._checks(plan)))))
            if isinstance(problem, Exception):
                raise problem
            if problem is not None:
                return problem
        for protocol in self._protocols:
            refusal = yield from protocol.prepare(plan)
            if refusal is not None:
                return refusal
        manifest: Manifest | Refuse | None = None
        while manifest is None:
            manifest = yield from self._produced(plan)
        if isinstance(manifest, Refuse):
            return manifest
        yield ask.Reached("coordinator-checked")
        if (yield from self.log.commit()) is not Outcome.DONE:
            return Unresolved(manifest.checkpoint)
        decided_at_ms = self._clock.now_ms()
        yield ask.Appended((manifest,))
        fates, unsettled = dict[str, str](), dict[str, str]()
        for protocol in self._protocols:
            committed = yield from protocol.commit(manifest)
            fates.update(committed.known)
            unsettled.update(committed.unsettled)
        decided = Decided(manifest, fates, unsettled, decided_at_ms, self._clock.now_ms())
        if decided.finalized:
            self._retain(plan, manifest)
            dropped = yield from self.retention.expire(manifest, pinned)
            at_ms, stats = decided.committed_at_ms, _stats(plan)
            yield from finalize(
                manifest, fates, manifest.incarnation, at_ms, *dropped, decided_at_ms=decided_at_ms, stats=stats
            )
        return decided

    def _produced(self, plan: PendingCheckpoint) -> Procedure[Manifest | Refuse | None]:
        """Produce the manifest into its transaction while the checks are under way; take it back if one refuses.

        None: the checks have found more partitions of an output than the manifest says, so another one is needed.
        """
        checks = [*(protocol.check(plan) for protocol in self._protocols), *self._checks(plan)]
        outputs: Outputs = yield ask.KnownOutputs()
        manifest = self._manifest(plan, outputs)
        try:
            producing = self.log.produce(manifest)
        except TooLarge as error:
            return Refuse(_no_room(manifest, error))
        produced, *objections = yield from concurrently(producing, *map(objection, checks))
        problem = gravest(objections)
        if not produced:
            why = f"the manifest of checkpoint {manifest.checkpoint} was not written: {self.log.refusal}"
            problem = problem or Refuse(why)
        elif problem is not None:
            yield from self.log.take_back(str(problem))
        elif (yield ask.KnownOutputs()) == outputs:
            return manifest
        else:
            yield from self.log.take_back("a topic of its sinks has more partitions")
        if isinstance(problem, Exception):
            raise problem
        return problem

    def _keep_alive(self) -> Procedure[None]:
        """Write a heartbeat if one is due, while waiting for a store."""
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._beaten_ms >= UPKEEP_INTERVAL_S * 1000:
            self._beaten_ms = now_ms
            yield from self.beat()

    def beat(self) -> Procedure[None]:
        """Write a heartbeat. After one with an unknown outcome this incarnation must end."""
        outcome = yield from self.log.heartbeat()
        if outcome is not Outcome.NOT_WRITTEN:
            self._require(outcome)

    def _retain(self, plan: PendingCheckpoint, manifest: Manifest) -> None:
        blocks = plan.references(manifest)
        self.retention.completed(manifest.checkpoint, blocks, keep=manifest.is_savepoint)

    def _checks(self, plan: PendingCheckpoint) -> tuple[Check, ...]:
        """The conditions that must hold once all have acknowledged *plan*, beside those of its sinks."""
        return self._check_topics(), self._check_blocks(plan), self._check_records(plan)

    def _check_topics(self) -> Procedure[None]:
        """Raise Halt if an input or output topic was replaced."""
        if self.log.history.latest is not None:
            yield ask.LookAtTopics(self.manifest)
            yield ask.SetPosition(self.manifest)

    def _check_blocks(self, plan: PendingCheckpoint) -> Procedure[Refuse | None]:
        """Refuse the checkpoint if a block of state, in-flight records or staged rows is missing."""
        refs = [*plan.listed()]
        refs += [ref for ack in plan.acks.values() if ack.channel_log is not None for ref in ack.channel_log.blocks]
        if refs and (dead := (yield from self.log.dead(refs))):
            return Refuse(f"block {dead[0].key} of checkpoint {plan.checkpoint} is gone from {self.log.topic.name}")
        return None

    def _check_records(self, plan: PendingCheckpoint) -> Procedure[None]:
        yield from ()
        self._limits.check(plan, self.log.history.manifests.get(plan.previous))

    def _absorb(self) -> list[Precommit]:
        """Take in the acknowledgements since the last time, and return their precommits."""
        precommits, sizes = list[Precommit](), self._written_bytes
        while self._arrived:
            ack = self._arrived.popleft()
            self.retention.written(ack.checkpoint, ack.written)
            sizes[ack.checkpoint] = sizes.get(ack.checkpoint, 0) + sum(ref.size for ref in ack.written)
            precommits += ack.precommits
        return precommits

    def _manifest(self, plan: PendingCheckpoint, outputs: Outputs, kind: str = "") -> Manifest:
        config, now_ms, sizes = self.config, self._clock.now_ms(), self._written_bytes
        offsets = sorted((o for ack in plan.acks.values() for o in ack.offsets), key=lambda o: (o.source, o.partition))
        manifest = Manifest(
            rules=LATE_BELOW_LATEST,
            pipeline=config.pipeline,
            checkpoint=plan.checkpoint,
            incarnation=self.incarnation.incarnation,
            attempt=self.attempt,
            kind=kind or self._kind(plan),
            base=plan.base,
            previous=plan.previous,
            triggered_at_ms=now_ms - (self._clock.monotonic_ms() - plan.triggered_ms),
            completed_at_ms=now_ms,
            fingerprint=config.fingerprint,
            max_parallelism=config.max_parallelism,
            parallelism=config.parallelism,
            block_partitions=self.log.topic.partitions,
            block_end_offsets=self.retention.ends_to_note(plan.checkpoint, plan.base, final=plan.final),
            written_bytes=sum(size for n, size in sizes.items() if n <= plan.checkpoint),
            offsets=tuple(offsets),
            operators=plan.operators,
            order_logs=tuple(plan.order_logs),
            committables=(),
            sinks=outputs,
            requests=plan.requests,
            origin=self.config.restores,
            storage=config.storage,
            channel_logs=tuple(log for _, ack in sorted(plan.acks.items()) if (log := ack.channel_log) is not None),
            skips=skips_between(self.log.history.manifests.get(plan.previous), offsets, config.skips),
            outputs_by_partition=plan.outputs_by_partition,
        )
        for protocol in self._protocols:
            manifest = protocol.with_committables(manifest, plan, self.log.history.latest)
        return config.filled(manifest)

    def forget_savepoint(self, checkpoint: int, pinned: Iterable[int]) -> Procedure[None]:
        """Drop *checkpoint*, if it is a savepoint: now, or later while it is pinned or the newest.

        Called between two decisions.
        """
        manifest = self.log.history.manifests.get(checkpoint)
        if manifest is None or not manifest.is_savepoint:
            return
        self.retention.release(checkpoint)
        if self.log.history.unfinalized is None:
            manifests, blocks = yield from self.retention.expire(self.manifest, pinned)
            if manifests or blocks:
                self._require((yield from self.log.append(manifests_dropped=manifests, blocks_dropped=blocks)))

    # --- upkeep, end --------------------------------------------------------------------------------------------

    def upkeep(self) -> Procedure[None]:
        """Every `UPKEEP_INTERVAL_S`: write a heartbeat; every `WATCH_INTERVAL_MS`: fence zombies that came back."""
        yield from self.beat()
        if self._clock.monotonic_ms() - self._watched_ms >= WATCH_INTERVAL_MS:
            for protocol in self._protocols:
                yield from protocol.watch()
            self._watched_ms = self._clock.monotonic_ms()

    def conclude(self, cancelled: str = "") -> Procedure[None]:
        """End this incarnation after a clean stop, or one by the request *cancelled*, once all output is visible.

        Only then may its checkpoints be condemned; a savepoint keeps all of them.
        """
        for protocol in self._protocols:
            yield from protocol.conclude(self.manifest.checkpoint)
        condemned = bool(cancelled) and self.config.deletes and not self.log.history.savepoints
        with suppress(Fenced):  # then a newer one's heartbeats say as much
            outcome = yield from self.log.heartbeat(ended=True, cancelled=cancelled, condemned=condemned)
            if cancelled:  # the command waits for this record; an end without it is clean, too
                self._require(outcome)

    def fail(self, failed: Failure, deadline_ms: int) -> Procedure[None]:
        """End this incarnation after a failure: note why, and abort its transactions that nothing has decided.

        All workers are dead, and no decision is under way. After an append with an unknown outcome, or once another
        instance leads, the first append raises: then nothing is aborted, for a decision may name any of it. Nothing
        more is asked after *deadline_ms*, and a store that is away is not waited for.
        """
        self.log.append_timeout_ms = max(0, deadline_ms - self._clock.monotonic_ms())
        self._require((yield from self.log.heartbeat(failed=failed)))
        yield from relayed(self._abort_undecided(), partial(self._asked_in_time, deadline_ms))
        self._require((yield from self.log.heartbeat(ended=True, failed=failed)))

    def _abort_undecided(self) -> Procedure[None]:
        unfinalized = self.log.history.unfinalized
        self.attempt += 1
        for protocol in self._protocols:
            protocol.begin_attempt(self.attempt)
        if unfinalized is not None:
            repairs = self.log.history.repairs_of(unfinalized.checkpoint)
            yield from self.transactions.sweep(Resolution(unfinalized, repairs, accept_loss=False).named)
            return
        self._stores.timeout_ms = 0
        with suppress(StoreUnavailable):  # the next run cleans then
            yield from self._clean()

    def _kind(self, plan: PendingCheckpoint) -> str:
        if self.config.without_output:
            return HISTORY_ENDED if plan.final else HISTORY
        return SAVEPOINT if plan.requests else "final" if plan.final else "checkpoint"

    def _asked_in_time(self, deadline_ms: int, request: ask.Request) -> Procedure[Any]:
        if self._clock.monotonic_ms() >= deadline_ms:
            raise BrokerUnavailable("The time to abort open transactions is over.")
        return (yield request)


def _stats(plan: PendingCheckpoint) -> bytes:
    """The figures of *plan* for its mark; empty if they are too large."""
    subtasks = tuple(ack.stats(plan.acked_ms.get(subtask)) for subtask, ack in sorted(plan.acks.items()))
    try:
        return encode(CheckpointStats(plan.checkpoint, subtasks, plan.aborted))
    except TooLarge:
        return b""


def _no_room(manifest: Manifest, why: TooLarge) -> str:
    """The reason for a refusal; a restart, which carries nothing over, may do better."""
    written = sum(len(committable.written) for committable in manifest.committables)
    return (
        f"checkpoint {manifest.checkpoint} names more than a manifest has room for: {why}. It has "
        f"{len(manifest.committables)} transactions in {written} output partitions, rows for {len(manifest.staged)} "
        f"commits to stores, the state of {sum(operator.parallelism for operator in manifest.operators)} subtasks, "
        f"{len(manifest.order_logs)} order logs and {len(manifest.offsets)} input partitions. If that happens again, "
        f"use a lower {setting('parallelism')} or {setting('tolerable_failed')}, or output topics with fewer partitions"
    )

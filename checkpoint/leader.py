"""One incarnation of a coordinator: what it does from its first request to its last. Pure procedures.

The local engine, bounded work, Spark's sink and the simulator run these lines; who drives them answers the requests.
Invariants: a constructor fences nobody and asks nobody; nothing is decided before everything older was fenced, and what
older incarnations decided is finished; no sink producer is made before `recover` or `begin_attempt` has returned; the
decisions come one by one. For one thread at a time, but `acknowledged`, which hands over what `decide` absorbs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from exactlyonce.checkpoint.clock import Clock
from exactlyonce.checkpoint.decision import (
    Decided,
    Decider,
    Dropped,
    Expire,
    Grounds,
    Precommit,
    Refuse,
    Unresolved,
    count,
    decide,
    finalize,
    finish,
    standing,
)
from exactlyonce.checkpoint.decision_log import DecisionLog, superseded
from exactlyonce.checkpoint.events import Ack, PendingCheckpoint
from exactlyonce.checkpoint.led import Led, Retention
from exactlyonce.checkpoint.records.committable import Committable, coordinator_id, transaction_prefix
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Incarnation, Manifest
from exactlyonce.checkpoint.references import operators_of, references_of
from exactlyonce.checkpoint.requests import (
    BlockEndOffsets,
    CheckContinuity,
    CreateOutputs,
    GoOnFrom,
    KnownOutputs,
    ListTransactions,
    Look,
    LookAtInputs,
    LookAtTopics,
    Outputs,
    Pause,
    Procedure,
    R,
    Reached,
    StartOffsets,
)
from exactlyonce.checkpoint.staged import StagedCommits, in_order, ledger_after, positions_of
from exactlyonce.checkpoint.transactions.broker_answers import Fate, Outcome
from exactlyonce.checkpoint.transactions.commit import commit, incarnation_latest, sweep
from exactlyonce.checkpoint.transactions.resolution import Resolution
from exactlyonce.checkpoint.transactions.settling import settle
from exactlyonce.pipeline.errors import BrokerUnavailable, Fenced, Halt, TopicError, Undetermined

UPKEEP_INTERVAL_S = 10.0
"""How often whoever leads calls `upkeep`; `history.SILENCE_MS` is three times as long."""
SWEEP_AGAIN_MS = 60_000
HEARTBEAT_PAUSE_MS = 200
"""Before one that the broker refused is tried again."""

Verdict = Decided | Refuse | Unresolved


@dataclass
class _Arrived:
    """Acknowledgements that were not absorbed yet, from another thread; and the bytes of blocks by checkpoint."""

    acknowledged: deque[Ack] = field(default_factory=deque)
    bytes: dict[int, int] = field(default_factory=dict)


class Leader:
    """Leads *led*; see the module. *note* is told what a person should know."""

    def __init__(
        self, led: Led, log: DecisionLog, retention: Retention, clock: Clock, note: Callable[[str], None]
    ) -> None:
        self.led, self.log, self.retention = led, log, retention
        self.attempt = led.attempt
        self._clock, self._note = clock, note
        self._fenced_below = (0, 0)
        self._last_committables: tuple[Committable, ...] = ()
        self._swept_ms = self._beaten_ms = clock.monotonic_ms()
        self._staged = StagedCommits(clock, led.store_timeout_ms, note, self._keep_alive)
        self._arrived = _Arrived()
        self._counted: dict[str, Committable] = {}
        """By transactional id, the precommits of this attempt that were counted as they arrived."""

    @property
    def incarnation(self) -> Incarnation:
        """The record of this incarnation."""
        return self.log.incarnation

    @property
    def manifest(self) -> Manifest:
        """The newest one; there is one once `recover` has returned."""
        newest = self.log.history.latest
        assert newest is not None
        return newest

    def run(self, procedure: Procedure[R]) -> Procedure[R]:
        """*procedure*, whose appends go to the log."""
        return self.log.recording(procedure)

    # --- beginning ----------------------------------------------------------------------------------------------

    def begin(self) -> Procedure[History]:
        """Fence every older incarnation, read what they decided, refuse what is damaged, and write the first record."""
        history = yield from self.open()
        newest = incarnation_latest(
            each
            for each in (yield ListTransactions(transaction_prefix(self.led.pipeline)))
            if each.transactional_id != coordinator_id(self.led.pipeline)
        )
        if newest and not history.incarnation_latest:
            yield from self._refuse_lost_topic(newest)
        yield CreateOutputs(history.latest)
        self._fenced_below = self.led.fenced_below((yield from self.log.begin(self.led.host, self.led.process, newest)))
        yield Reached("coordinator-opened")
        return self.log.history

    def _refuse_lost_topic(self, incarnation: int) -> Procedure[None]:
        """The log was empty, though transactions of *incarnation* are known: it was deleted, or has been begun since.

        Whoever writes under such an id has begun before, so that a log that is still empty now was deleted.
        """
        now: History | None = yield from self.log.peek()
        if now is None or now.incarnation_latest:
            raise Fenced(superseded(self.led.pipeline, 0, now.newest_incarnation if now else None))
        raise Halt(self.led.topic_lost(self.log.topic.name, incarnation))

    def resume(self, incarnation: int) -> None:
        """Go on with *incarnation*, which another process of it has begun, once this one has called `open`."""
        self._fenced_below = self.led.fenced_below(self.log.resume(incarnation))

    def open(self) -> Procedure[History]:
        """Fence every other process that writes decisions, and read what is decided; refuse what is damaged."""
        topic = self.log.topic
        yield from settle(
            coordinator_id(self.led.pipeline), [(topic.name, partition) for partition in range(topic.partitions)]
        )
        history = yield from self.log.open()
        history.halt_if_damaged()
        return history

    # --- recovery -----------------------------------------------------------------------------------------------

    def recover(self) -> Procedure[Manifest]:
        """Finish what older incarnations decided, abort what they did not, and find where to start."""
        history = self.log.history
        for what, why in history.damaged.items():
            self._note(f"damaged in {self.log.topic.name}, but nothing newer is: {what}: {why}")
        latest, unfinalized = history.latest, history.unfinalized
        finalized = latest if unfinalized is None else history.manifests.get(unfinalized.previous)
        number, origin = self.incarnation.incarnation, self.log.topic.topic_id
        if self.led.staging and unfinalized is not None:  # Kafka's transactions time out while a store is waited for
            repairs = history.repairs_of(unfinalized.checkpoint)
            yield from commit(Resolution(unfinalized, repairs, accept_loss=False).waiting)
        yield from self._staged.fence(self.led.staging, number, origin, latest, finalized)
        if latest is None:
            yield from self._first_manifest()
        else:
            yield CheckContinuity(latest)
        if unfinalized is not None:
            yield from self.finish(unfinalized, lambda _: self._claimed())
        yield from self.sweep()
        yield from self._staged.clean(self.led.staging, number, self.attempt)
        self._require((yield from self.log.heartbeat(fenced_below=self.incarnation.incarnation)))
        if unfinalized is None:
            manifests, blocks = yield from self._claimed()
            if manifests or blocks:
                outcome = yield from self.log.append(manifests_dropped=manifests, blocks_dropped=blocks)
                self._require(outcome)
        yield GoOnFrom(self.manifest)
        yield Reached("coordinator-swept")
        return self.manifest

    def _claimed(self) -> Procedure[Dropped]:
        return self.retention.recover(self.log.history, self.incarnation.incarnation)

    def _first_manifest(self) -> Procedure[None]:
        """Manifest 0: the resolved start and no state, durable before anything is read; it has nothing to commit."""
        start_offsets = yield StartOffsets()
        first = PendingCheckpoint(
            checkpoint=0, base=0, previous=0, final=False, triggered_ms=self._clock.monotonic_ms(),
            attempt=self.attempt, acks={("", 0): Ack("", 0, 0, start_offsets)},
        )  # fmt: skip
        self.retention.nothing_yet((yield BlockEndOffsets()))
        manifest = self._manifest(first, (), (yield KnownOutputs()), kind="initial")
        self._require((yield from self.log.append(manifest)))
        finalized = finalize(manifest, {}, self.incarnation.incarnation, self._clock.now_ms())
        yield from self.run(finalized)

    def finish(self, manifest: Manifest, expire: Expire) -> Procedure[dict[str, str]]:
        """Bring *manifest*, which is decided and not finalized, to its end; the fate of each of its committables."""
        self._note(f"finishing checkpoint {manifest.checkpoint}, which was decided but not finalized")
        repairs = self.log.history.repairs_of(manifest.checkpoint)
        accept = self.led.accept_loss == manifest.checkpoint
        fates = yield from self.run(
            finish(
                manifest,
                repairs,
                self._decider(),
                self._clock.now_ms(),
                expire,
                accept_loss=accept,
                commit_staged=lambda manifest: self._commit_staged(manifest, accept_loss=accept),
            )
        )
        for name, fate in fates.items():
            if fate != "committed":
                self._note(f"checkpoint {manifest.checkpoint}: transaction {name} {fate}")
        repairs = self.log.history.repairs_of(manifest.checkpoint)
        self._last_committables = standing(manifest, repairs, fates) or self._last_committables
        return fates

    def sweep(self, protected: Collection[str] = ()) -> Procedure[None]:
        """Abort and fence what older incarnations, and older attempts of this one, may have left open."""
        yield from self._sweep_below(self.attempt, protected)
        self._swept_ms = self._clock.monotonic_ms()
        if not protected:
            self._fenced_below = max(self._fenced_below, (self.incarnation.incarnation, self.attempt))

    def abort_all_but(self, winners: Collection[str]) -> Procedure[None]:
        """Abort what the present attempt has left open, except the transactions of *winners*, which come to decision.

        Bounded work may run twice: where a task was tried again, its first try has a transaction that nobody names.
        """
        yield from self._sweep_below(self.attempt + 1, winners)

    def sweep_for(self, incarnation: Incarnation) -> Procedure[None]:
        """`sweep` for *incarnation*, which may go on in another process; this one has only looked."""
        yield from self._sweep(incarnation, self.attempt, self.led.fenced_below(incarnation), ())

    def _sweep_below(self, attempt: int, protected: Collection[str]) -> Procedure[None]:
        yield from self._sweep(self.incarnation, attempt, self._fenced_below, protected)

    def _sweep(
        self, incarnation: Incarnation, attempt: int, fenced_below: tuple[int, int], protected: Collection[str]
    ) -> Procedure[None]:
        outputs: Outputs = yield KnownOutputs()
        yield from sweep(
            self.led.pipeline, incarnation.incarnation, attempt, protected=protected, fenced_below=fenced_below,
            outputs={(topic, partition) for _, topic, partitions in outputs for partition in range(partitions)},
        )  # fmt: skip

    def _require(self, outcome: Outcome) -> None:
        """Raise unless an append was `DONE`: its outcome is unknown, or the broker takes no records."""
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
        """Before the next attempt, all workers being dead: finish what was decided, abort what was not.

        *killed*: they were killed while they wrote.
        """
        yield from self._confirm_leading()
        self.attempt = attempt
        self._counted.clear()
        unfinished = self.log.history.unfinalized
        if unfinished is not None:
            yield from self.finish(unfinished, lambda manifest: self.retention.expire(manifest, ()))
        yield from self.sweep()
        yield from self._staged.clean(self.led.staging, self.incarnation.incarnation, attempt)
        yield from self.retention.begin_attempt(self.manifest, self.incarnation.incarnation, attempt, late=killed)
        yield from self.look_at_inputs()
        return self.manifest

    def _confirm_leading(self) -> Procedure[None]:
        """Return once a heartbeat is written, which only the newest can; a broker that refuses is asked again."""
        deadline_ms = self._clock.monotonic_ms() + self.log.append_timeout_ms
        while (outcome := (yield from self.log.heartbeat())) is Outcome.NOT_WRITTEN:
            if self._clock.monotonic_ms() >= deadline_ms:
                break
            yield Pause(HEARTBEAT_PAUSE_MS)
        self._require(outcome)

    def look_at_inputs(self) -> Procedure[None]:
        """Raise Halt if an input was deleted or made anew; partitions that were added are read from here on."""
        yield LookAtInputs(self.manifest)
        yield GoOnFrom(self.manifest)

    # --- decisions ----------------------------------------------------------------------------------------------

    def acknowledged(self, ack: Ack) -> None:
        """Blocks were written. From any thread, before `decide` is told of the checkpoint."""
        self._arrived.acknowledged.append(ack)

    def count_acknowledged(self) -> Procedure[None]:
        """Take in what has been acknowledged by now, and count what the sinks have flushed for it.

        To be called as acknowledgements come: the decision need not wait for it then. What cannot be counted now is
        checked there.
        """
        outputs: Outputs = yield KnownOutputs()
        arrived = self._absorb()
        with suppress(BrokerUnavailable, TopicError):
            self._counted.update((yield from count(arrived, outputs, self._decider())))

    def decide(self, plan: PendingCheckpoint, pinned: Iterable[int]) -> Procedure[Verdict]:
        """Run the decision procedure for *plan*; *pinned* are checkpoints that something in flight builds upon.

        Raises Halt, before anything is decided, if what was acknowledged may have been read from another topic.
        """
        yield from self.count_acknowledged()
        verdict = yield from self.run(
            decide(
                plan.precommits,
                plan.ages_ms,
                self._decider(),
                self.log,
                make_manifest=lambda committables, outputs: self._manifest(plan, committables, outputs),
                expire=lambda manifest: self._expire(plan, manifest, pinned),
                grounds=Grounds(self._counted, lambda: (self._check_topics(), self._check_blocks(plan))),
                commit_staged=self._commit_staged,
            )
        )
        if isinstance(verdict, Decided):
            yield from self._decided(plan, verdict)
        return verdict

    def _commit_staged(self, manifest: Manifest, *, accept_loss: bool = False) -> Procedure[dict[str, str]]:
        number, origin = self.incarnation.incarnation, self.log.topic.topic_id
        return (yield from self._staged.commit(manifest, number, origin, accept_loss=accept_loss))

    def _keep_alive(self) -> Procedure[None]:
        """While a store is waited for: a heartbeat, whenever one is due."""
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._beaten_ms >= UPKEEP_INTERVAL_S * 1000:
            self._beaten_ms = now_ms
            yield from self._beat()

    def _beat(self) -> Procedure[None]:
        """A heartbeat. One that the broker did not take is due again next time; after one whose outcome is unknown this
        incarnation must end."""
        outcome = yield from self.log.heartbeat()
        if outcome is not Outcome.NOT_WRITTEN:
            self._require(outcome)

    def _decided(self, plan: PendingCheckpoint, verdict: Decided) -> Procedure[None]:
        yield GoOnFrom(verdict.manifest)
        self._last_committables = verdict.manifest.committables or self._last_committables
        for each in verdict.manifest.committables:
            self._counted.pop(each.transactional_id, None)
        sizes = self._arrived.bytes
        for n in [each for each in sizes if each <= plan.checkpoint]:
            del sizes[n]
        if not verdict.finalized:
            self.retention.completed(verdict.manifest.checkpoint, references_of(plan, verdict.manifest))

    def _check_topics(self) -> Procedure[None]:
        """Raise Halt unless the topics that were read and written are those they were."""
        if self.log.history.latest is not None:
            yield LookAtTopics(self.manifest)
            yield GoOnFrom(self.manifest)

    def _check_blocks(self, plan: PendingCheckpoint) -> Procedure[Refuse | None]:
        """Refuse the checkpoint if a block that its manifest names is not there."""
        refs = {ref for ack in plan.acks.values() for each in ack.operators for ref in each.blocks}
        refs.update(*(each.blocks for each in plan.staged))
        if refs and (dead := (yield from self.log.dead(refs))):
            return Refuse(f"block {dead[0].key} of checkpoint {plan.checkpoint} is gone from {self.log.topic.name}")
        return None

    def _absorb(self) -> list[Precommit]:
        """Take in what was acknowledged; returns what the sinks have flushed for it."""
        written, precommits = self._arrived, list[Precommit]()
        while written.acknowledged:
            ack = written.acknowledged.popleft()
            self.retention.written(ack.checkpoint, ack.written)
            size = sum(ref.size for ref in ack.written)
            written.bytes[ack.checkpoint] = written.bytes.get(ack.checkpoint, 0) + size
            precommits += ack.precommits
        return precommits

    def _decider(self) -> Decider:
        led = self.led
        return Decider(
            pipeline=led.pipeline,
            incarnation=self.incarnation.incarnation,
            attempt=self.attempt,
            cluster_id=led.cluster_id,
            transaction_version=led.transaction_version,
            transaction_timeout_ms=led.transaction_timeout_ms,
            fenced_below=self._fenced_below,
        )

    def _manifest(
        self, plan: PendingCheckpoint, committables: tuple[Committable, ...], outputs: Outputs, kind: str = ""
    ) -> Manifest:
        led, now_ms, sizes = self.led, self._clock.now_ms(), self._arrived.bytes
        before = positions_of(self.log.history.latest)
        staged = in_order((each.committable for each in plan.staged), before, led.staging)
        offsets = sorted((o for ack in plan.acks.values() for o in ack.offsets), key=lambda o: (o.source, o.partition))
        manifest = Manifest(
            pipeline=led.pipeline,
            checkpoint=plan.checkpoint,
            incarnation=self.incarnation.incarnation,
            attempt=self.attempt,
            kind=kind or ("final" if plan.final else "checkpoint"),
            base=plan.base,
            previous=plan.previous,
            triggered_at_ms=now_ms - (self._clock.monotonic_ms() - plan.triggered_ms),
            completed_at_ms=now_ms,
            fingerprint=led.fingerprint,
            max_parallelism=led.max_parallelism,
            parallelism=led.parallelism,
            block_partitions=self.log.topic.partitions,
            block_end_offsets=self.retention.ends_to_note(plan.checkpoint, plan.base, final=plan.final),
            written_bytes=sum(size for n, size in sizes.items() if n <= plan.checkpoint),
            offsets=tuple(offsets),
            operators=operators_of(plan),
            order_logs=tuple(plan.order_logs),
            committables=committables,
            sinks=outputs,
            staged=staged,
            ledger=ledger_after(staged, before),
        )
        return led.filled(manifest)

    def _expire(self, plan: PendingCheckpoint, manifest: Manifest, pinned: Iterable[int]) -> Procedure[Dropped]:
        """*manifest* is durable: what nobody needs any more may go, in the transaction that finalizes it."""
        self.retention.completed(manifest.checkpoint, references_of(plan, manifest))
        return (yield from self.retention.expire(manifest, pinned))

    # --- upkeep, end --------------------------------------------------------------------------------------------

    def upkeep(self) -> Procedure[None]:
        """Every `UPKEEP_INTERVAL_S`: a heartbeat; now and then another sweep, for zombies that came back meanwhile."""
        yield from self._beat()
        if self._clock.monotonic_ms() - self._swept_ms >= SWEEP_AGAIN_MS:
            yield from self.sweep()

    def conclude(self) -> Procedure[None]:
        """After a clean stop: all that the last checkpoints committed is visible to readers, and this one is over.

        A zombie's open transaction would hold readers before it, so that older attempts are swept first. Records that
        retention has taken meanwhile hold nobody back, and were visible: their markers had been seen.
        """
        yield from self.sweep()
        for committable in self._last_committables:
            if committable.records and (yield Look(committable)) is Fate.ABORTED:
                raise Halt(
                    f"Checkpoint {self.manifest.checkpoint} is finalized, but the records of "
                    f"{committable.transactional_id} are not visible to readers. Run the pipeline again: it repairs "
                    f"them."
                )
        with suppress(Fenced):  # then a newer one's heartbeats say as much
            yield from self.log.heartbeat(ended=True)

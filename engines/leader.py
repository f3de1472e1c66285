"""The leader with a real broker: recovery, decisions, restarts, retention, upkeep.

All of it is called from one thread, the job's broker thread, except `start_message` and `added_for`, which only read,
and `acknowledged`, which hands over what `decide` takes up.
No sink producer is made before `recover` or `prepare_attempt` has fenced everything older.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec

from exactlyonce.checkpoint.coordinator import Ack, PendingCheckpoint
from exactlyonce.checkpoint.decision import (
    Decided,
    Dropped,
    Expire,
    Life,
    Refuse,
    Unresolved,
    decide,
    finalize,
    finish,
    standing,
)
from exactlyonce.checkpoint.decision_log import APPEND_TIMEOUT_MS, DecisionLog
from exactlyonce.checkpoint.orphans import KnownBlocks
from exactlyonce.checkpoint.records.committable import Committable, coordinator_id, transaction_prefix
from exactlyonce.checkpoint.records.manifest import Incarnation, Manifest, OperatorSnapshot, SourceOffset
from exactlyonce.checkpoint.records.topic_info import TopicInfo
from exactlyonce.checkpoint.references import operators_of, references_of
from exactlyonce.checkpoint.requests import BlockEndOffsets, Pause, Procedure, drive
from exactlyonce.checkpoint.store.topic import prepare_topic
from exactlyonce.checkpoint.transactions.broker_answers import Fate, Outcome, TransactionState
from exactlyonce.checkpoint.transactions.commit import incarnation_latest, sweep
from exactlyonce.checkpoint.transactions.settling import settle
from exactlyonce.connectors.kafka.group_offsets import GroupOffsets
from exactlyonce.connectors.kafka.log import Log
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.connectors.kafka.transactional_writer import LogRequests
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.bounded.replay.replay_repair import ReplayRepair, where_replayed
from exactlyonce.engines.bounded.submit import Submit
from exactlyonce.engines.options import RunOptions
from exactlyonce.engines.performer import Performer, no_replay
from exactlyonce.engines.plan import Plan, share_of
from exactlyonce.engines.preflight import (
    Inputs,
    Offsets,
    check_inputs,
    check_operators,
    check_outputs,
    refuse_new_places,
)
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import BrokerUnavailable, Fenced, Halt, Undetermined
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.pipeline.loading import Loaded, Reference, load_reference

UPKEEP_INTERVAL_S = 10.0
"""How often whoever leads calls `upkeep`; `history.SILENCE_MS` is three times as long."""
SWEEP_AGAIN_MS = 60_000
HEARTBEAT_PAUSE_MS = 200
"""Before one that the broker refused is tried again."""


class Decisions:
    """See the module. Making one checks topics and settings, fences older coordinators and reads what they decided."""

    def __init__(
        self,
        plan: Plan,
        options: RunOptions,
        note: Callable[[str], None],
        step: Callable[[str, int], None],
        reference: Reference,
        units: tuple[Submit, Path] | None = None,
    ) -> None:
        """*reference* is how the pipeline is imported; *units*: where a replay that is to run on Spark runs, and
        stages its files; None: on a Spark of its own."""
        self._plan, self._options, self._note = plan, options, note
        self._clock = SystemClock()
        self._transactions = Transactions(options.client, timeout_ms=APPEND_TIMEOUT_MS)
        self._output_log = Log(options.client, group=plan.graph.pipeline_id)
        self._topics = Topics(options.client)
        self._groups = GroupOffsets(options.client, plan.graph.pipeline_id)
        self._inputs = check_inputs(self._topics, plan.graph, bounded=options.until == "latest")
        self._timeout_ms = options.checkpoint.transaction_timeout_for(self._transactions.max_timeout_ms())
        self._cluster_id = self._transactions.cluster_id()
        self._version = self._transactions.transaction_version()
        self._outputs = check_outputs(self._topics, plan.graph)
        self._topic = prepare_topic(self._settings, plan.graph.pipeline_id, options.checkpoint_partitions)
        self._log = DecisionLog(plan.graph.pipeline_id, self._topic, self._clock)
        self._log_requests = LogRequests(options.client, self._topic)
        self._replays = ReplayRepair(
            Loaded(load_reference(reference), reference), options.client, self._transactions, self._timeout_ms,
            lambda: self._log.history, note, *where_replayed(options.repair, units),
        )  # fmt: skip
        self._performer = Performer(
            options.client, self._transactions, self._output_log, self._log_requests, self._timeout_ms, step,
            no_replay if options.repair == "halt" else self._replays,
        )  # fmt: skip
        partitions = [(self._topic.name, each) for each in range(self._topic.partitions)]
        self._drive(settle(coordinator_id(plan.graph.pipeline_id), partitions))
        history = self._drive(self._log.open())
        self._log_requests.freeze(self._log.topic)
        history.halt_if_damaged()
        self._late_blocks = history.newest_incarnation is not None and not history.newest_incarnation.ended
        """Whether the life before was killed, so that blocks of its workers may yet arrive."""
        newest = self._newest_of_the_ids()
        if newest and not history.incarnation_latest:
            raise Halt(
                f"The checkpoint topic {self._topic.name} is empty, but transactions of incarnation {newest} of this "
                f"pipeline are known to the broker: the topic was deleted. Beginning anew would write all output "
                f"again.\n"
                f"  Choices: restore the topic from a replica or backup and run again; or, if that is what you want, "
                f"`exactlyonce reset {plan.graph.pipeline_id}`."
            )
        self._outputs.create_missing(history.latest, note)
        self.life: Incarnation = self._drive(self._log.begin(socket.gethostname(), os.getpid(), newest))
        self._topic = self._log.topic
        self.attempt = 0
        self.manifest: Manifest
        self._offsets: Offsets
        self._added: Offsets = {}
        self._written_bytes: dict[int, int] = {}
        self._known_blocks = KnownBlocks(options.checkpoint)
        self._fenced_below = (self.life.fenced_below, 0)
        self._last_committables: tuple[Committable, ...] = ()
        self._swept_ms = self._clock.monotonic_ms()
        self._acknowledged: SimpleQueue[Ack] = SimpleQueue()

    def _newest_of_the_ids(self) -> int:
        pipeline = self._plan.graph.pipeline_id
        listed = self._transactions.list(transaction_prefix(pipeline))
        return incarnation_latest(each for each in listed if each.transactional_id != coordinator_id(pipeline))

    # --- recovery -----------------------------------------------------------------------------------------------

    def recover(self) -> Manifest:
        """Finish what older lives decided, abort what they did not, and find where to start."""
        hit("coordinator-opened")
        for what, why in self._log.history.damaged.items():
            self._note(f"damaged in {self._topic.name}, but nothing newer is: {what}: {why}")
        latest, unfinalized = self._log.history.latest, self._log.history.unfinalized
        if latest is None:
            self.manifest = self._first_manifest()
        else:
            self.manifest = latest
            check_operators(self._plan.graph, self.manifest)
            self._inputs.check_continuity(self.manifest)
        if unfinalized is not None:
            self._drive(self._finish(unfinalized, lambda _: self._claimed()))
        self._sweep(for_later_lives=True)
        if unfinalized is None:
            manifests, blocks = self._drive(self._claimed())
            if manifests or blocks:
                self._written(self._drive(self._log.append(manifests_dropped=manifests, blocks_dropped=blocks)))
        self._note_damage()
        self._go_on_from(self.manifest)
        hit("coordinator-swept")
        return self.manifest

    def _claimed(self) -> Procedure[Dropped]:
        return self._known_blocks.recover(self._log.history, self.life.incarnation, late=self._late_blocks)

    def _note_damage(self) -> None:
        """What is damaged among the blocks, and does not keep the pipeline from going on."""
        for checkpoint, why in self._known_blocks.unrestorable.items():
            self._note(f"checkpoint {checkpoint} is damaged and can be restored from no more: {why}")
        for place in self._known_blocks.unreadable:
            self._note(f"damaged: {place}; blocks that lie there cannot be removed")

    @property
    def _settings(self) -> dict[str, Any]:
        return self._options.client.confluent()

    def _life(self) -> Life:
        return Life(
            self._plan.graph.pipeline_id,
            self.life.incarnation,
            self.attempt,
            self._cluster_id,
            self._version,
            self._timeout_ms,
            self._fenced_below,
        )

    def _drive(self, procedure: Procedure[Any]) -> Any:
        return drive(self._log.recording(procedure), self._performer)

    def _first_manifest(self) -> Manifest:
        """Manifest 0: the resolved start and no state, durable before anything is read; it has nothing to commit."""
        manifest = self._manifest(0, 0, 0, "initial", 0, self._inputs.start_offsets(), (), (), self._drive(_ends()))
        self._written(self._drive(self._log.append(manifest)))
        self._drive(finalize(manifest, {}, self.life.incarnation, self._clock.now_ms()))
        return manifest

    def _finish(self, manifest: Manifest, expire: Expire) -> Procedure[dict[str, str]]:
        self._note(f"finishing checkpoint {manifest.checkpoint}, which was decided but not finalized")
        repairs = self._log.history.repairs_of(manifest.checkpoint)
        accept = self._options.accept_loss == manifest.checkpoint
        fates = yield from finish(manifest, repairs, self._life(), self._clock.now_ms(), expire, accept_loss=accept)
        self._replays.close()
        for name, fate in fates.items():
            if fate != "committed":
                self._note(f"checkpoint {manifest.checkpoint}: transaction {name} {fate}")
        repairs = self._log.history.repairs_of(manifest.checkpoint)
        self._last_committables = standing(manifest, repairs, fates) or self._last_committables
        return fates

    def _sweep(self, *, for_later_lives: bool) -> None:
        """Fence all older transactions. *for_later_lives*: note it in the log, so that these let the ids expire."""
        self._sweep_below(self.attempt)
        self._swept_ms = self._clock.monotonic_ms()
        self._fenced_below = (self.life.incarnation, self.attempt)
        if for_later_lives:
            self._written(self._drive(self._log.heartbeat(fenced_below=self.life.incarnation)))
            self.life = msgspec.structs.replace(self.life, fenced_below=self.life.incarnation)

    def _sweep_below(self, attempt: int, protected: Collection[str] = ()) -> None:
        """Abort and fence what older lives, and attempts of this one before *attempt*, may have left open."""
        procedure = sweep(
            self._plan.graph.pipeline_id, self.life.incarnation, attempt,
            protected=protected, fenced_below=self._fenced_below, outputs=self._outputs.partitions,
        )  # fmt: skip
        self._drive(procedure)

    def _written(self, outcome: Outcome) -> None:
        """Raise unless an append was `DONE`: what became of it is unknown, or the broker is as good as away."""
        if outcome is Outcome.UNKNOWN:
            raise Undetermined(
                f"Whether the broker wrote a record to {self._topic.name} is not known. This instance ends; nothing is "
                f"lost: run the pipeline again, it reads what is true."
            )
        if outcome is Outcome.NOT_WRITTEN:
            raise BrokerUnavailable(
                f"The broker took no record into {self._topic.name}: {self._log.refusal or 'it gave no reason'}. "
                f"Nothing is lost: run the pipeline again once the broker answers."
            )

    def _confirm_leading(self) -> None:
        """Return once a heartbeat is written, which only the newest life can; a broker that refuses is asked again."""
        deadline_ms = self._clock.monotonic_ms() + self._log.append_timeout_ms
        while (outcome := self._drive(self._log.heartbeat())) is Outcome.NOT_WRITTEN:
            if self._clock.monotonic_ms() >= deadline_ms:
                break
            self._performer(Pause(HEARTBEAT_PAUSE_MS))
        self._written(outcome)

    def prepare_attempt(self, attempt: int, unfinished: Manifest | None, *, killed: bool = True) -> Manifest:
        """Before the next attempt, all workers being dead: finish what was decided, abort what was not.

        *killed*: they were killed while they wrote.
        """
        self._confirm_leading()
        self.attempt = attempt
        if unfinished is not None:
            self._drive(self._finish(unfinished, self._known_blocks.expire))
        self._sweep(for_later_lives=False)
        self._drive(self._known_blocks.begin_attempt(self.manifest, self.life.incarnation, attempt, late=killed))
        self.look_at_inputs()
        return self.manifest

    def look_at_inputs(self) -> None:
        """Raise Halt if an input topic was deleted or made anew; partitions that were added are read from here on."""
        before = self._inputs.described
        self._inputs.look_again(self.manifest, APPEND_TIMEOUT_MS)
        for name, topic in self._inputs.described.items():
            if topic.partitions > before[name].partitions:
                self._note(f"topic {name} has {topic.partitions} partitions now: the new ones are read from offset 0")
        self._go_on_from(self.manifest)

    def _go_on_from(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._offsets, self._added = self._inputs.offsets_from(manifest), self._inputs.added_since(manifest)
        refuse_new_places(self._plan.graph, self._plan.parallelism, manifest, self._added)

    # --- what bounded work is told ------------------------------------------------------------------------------

    @property
    def inputs(self) -> Inputs:
        """The input topics, as they were when they were last looked at."""
        return self._inputs

    @property
    def offsets(self) -> Offsets:
        """Where to read on: Sn of the newest manifest; known once `recover` has returned."""
        return self._offsets

    @property
    def topic(self) -> TopicInfo:
        """The checkpoint topic."""
        return self._topic

    @property
    def cluster_id(self) -> str:
        """Of the cluster that all of it is about."""
        return self._cluster_id

    @property
    def transaction_timeout_ms(self) -> int:
        """Of the sinks' transactions."""
        return self._timeout_ms

    def abort_all_but(self, winners: Collection[str]) -> None:
        """Abort what the present attempt has left open, except the transactions of *winners*, which come to decision.

        Bounded work may run twice: where a task was tried again, its first try has a transaction that nobody names.
        """
        self._sweep_below(self.attempt + 1, winners)

    def expect_orphans(self) -> None:
        """Work of this attempt was tried more than once: with its checkpoint go the blocks that it does not name."""
        self._known_blocks.expect_own_orphans()

    # --- decisions ----------------------------------------------------------------------------------------------

    def describe(self, transactional_id: str) -> TransactionState | None:
        """The state of a freshly initialised transaction."""
        return self._transactions.describe([transactional_id])[transactional_id]

    def acknowledged(self, ack: Ack) -> None:
        """Blocks were written; called from the main thread, before the core hears of it."""
        self._acknowledged.put(ack)
        n = ack.checkpoint
        self._written_bytes[n] = self._written_bytes.get(n, 0) + sum(ref.size for ref in ack.written)

    def decide(self, plan: PendingCheckpoint, pinned: Iterable[int]) -> Decided | Refuse | Unresolved:
        """Run the decision procedure for *plan*; *pinned* are checkpoints that something in flight builds upon.

        Raises Halt, before anything is decided, if what was acknowledged may have been read from another topic.
        """
        while not self._acknowledged.empty():
            ack = self._acknowledged.get()
            self._known_blocks.ledger.written(ack.checkpoint, ack.written)
        dead = self._drive(
            self._log.dead({ref for ack in plan.acks.values() for each in ack.operators for ref in each.blocks})
        )
        if dead:
            return Refuse(f"block {dead[0].key} of checkpoint {plan.checkpoint} is gone from {self._topic.name}")
        try:
            self.look_at_inputs()
            self._outputs.look_again(self.manifest, APPEND_TIMEOUT_MS)
        except BrokerUnavailable as error:
            return Refuse(str(error))
        verdict: Decided | Refuse | Unresolved = self._drive(
            decide(
                plan.precommits,
                plan.ages_ms,
                self._life(),
                lambda committables, ends: self._planned(plan, committables, ends),
                lambda manifest: self._expire(plan, manifest, pinned),
            )
        )
        if isinstance(verdict, Refuse) and self._log.refusal:
            return Refuse(f"{verdict.reason}: {self._log.refusal}")
        if isinstance(verdict, Decided):
            self._go_on_from(verdict.manifest)
            self._last_committables = verdict.manifest.committables or self._last_committables
            if not verdict.finalized:
                self._known_blocks.ledger.completed(verdict.manifest.checkpoint, references_of(plan, verdict.manifest))
        return verdict

    def _planned(
        self, plan: PendingCheckpoint, committables: tuple[Committable, ...], ends: tuple[int, ...]
    ) -> Manifest:
        offsets = tuple(
            sorted((o for ack in plan.acks.values() for o in ack.offsets), key=lambda o: (o.source, o.partition))
        )
        written = sum(self._written_bytes.pop(n) for n in list(self._written_bytes) if n <= plan.checkpoint)
        kind = "final" if plan.final else "checkpoint"
        return self._manifest(
            plan.checkpoint, plan.base, plan.previous, kind, written, offsets, operators_of(plan), committables,
            self._known_blocks.ends_to_note(plan.checkpoint, plan.base, ends, final=plan.final),
            order_logs=tuple(plan.order_logs), age_ms=self._clock.monotonic_ms() - plan.triggered_ms,
        )  # fmt: skip

    def _manifest(
        self,
        checkpoint: int,
        base: int,
        previous: int,
        kind: str,
        written_bytes: int,
        offsets: tuple[SourceOffset, ...],
        operators: tuple[OperatorSnapshot, ...],
        committables: tuple[Committable, ...],
        block_end_offsets: tuple[int, ...],
        *,
        order_logs: tuple[Any, ...] = (),
        age_ms: int = 0,
    ) -> Manifest:
        graph, now_ms = self._plan.graph, self._clock.now_ms()
        return Manifest(
            graph.pipeline_id,
            checkpoint,
            self.life.incarnation,
            self.attempt,
            kind,
            base,
            previous,
            now_ms - age_ms,
            now_ms,
            graph.fingerprint(),
            graph.max_parallelism,
            self._plan.parallelism,
            self._topic.partitions,
            block_end_offsets,
            written_bytes,
            offsets,
            operators,
            order_logs,
            committables,
            self._outputs.counted,
        )

    def _expire(self, plan: PendingCheckpoint, manifest: Manifest, pinned: Iterable[int]) -> Procedure[Dropped]:
        """*manifest* is durable: what nobody needs any more may go, in the transaction that finalizes it."""
        self._known_blocks.ledger.completed(manifest.checkpoint, references_of(plan, manifest))
        return (yield from self._known_blocks.expire(manifest, pinned))

    # --- beside it ----------------------------------------------------------------------------------------------

    def publish_offsets(self) -> None:
        """Sn as group offsets, for tools that show lag. Nothing reads them back."""
        self._groups.publish(self.manifest.offsets)

    def upkeep(self) -> None:
        """Every `UPKEEP_INTERVAL_S`: a heartbeat; now and then another sweep, for zombies that came back meanwhile.

        A heartbeat that the broker did not take is due again next time; after one whose outcome is unknown this life
        must end.
        """
        outcome = self._drive(self._log.heartbeat())
        if outcome is not Outcome.NOT_WRITTEN:
            self._written(outcome)
        if self._clock.monotonic_ms() - self._swept_ms >= SWEEP_AGAIN_MS:
            self._sweep(for_later_lives=False)

    def conclude(self) -> None:
        """After a clean stop: all that the last checkpoints committed is visible to readers, and this life is over.

        A zombie's open transaction would hold readers before it, so that older attempts are swept first. Records that
        retention has taken meanwhile hold nobody back, and were visible: their markers had been seen.
        """
        self._sweep(for_later_lives=False)
        for committable in self._last_committables:
            if committable.records and self._output_log.fate(committable) is Fate.ABORTED:
                raise Halt(
                    f"Checkpoint {self.manifest.checkpoint} is finalized, but the records of "
                    f"{committable.transactional_id} are not visible to readers. Run the pipeline again: it repairs "
                    f"them."
                )
        with suppress(Fenced):  # then a newer life's heartbeats say as much
            self._drive(self._log.heartbeat(ended=True))

    def start_message(self, subtask: int, attempt: int, manifest: Manifest) -> dict[str, Any]:
        """The fields of `Start` for one worker."""
        return {
            "fingerprint": self._plan.graph.fingerprint(),
            "parallelism": self._plan.parallelism,
            "subtask": subtask,
            "incarnation": self.life.incarnation,
            "attempt": attempt,
            "client": dict(self._options.client.settings),
            "manifest": manifest,
            "offsets": self._offsets,
            "topic_ids": self._inputs.topic_ids,
            "targets": self._inputs.targets,
            "slots": self._options.checkpoint.slots,
            "transaction_timeout_ms": self._timeout_ms,
            "topic": self._topic,
        }

    def added_for(self, subtask: int) -> Offsets:
        """By source, where *subtask* begins to read those of its partitions that no completed checkpoint has."""
        added = {source: share_of(each, self._plan.parallelism, subtask) for source, each in self._added.items()}
        return {source: each for source, each in added.items() if each}

    def close(self) -> None:
        """Let go of all connections; nothing is ended by it."""
        self._replays.close()
        self._log.close()
        self._log_requests.close()
        self._transactions.close()
        self._output_log.close()
        self._topics.close()
        self._groups.close()


def _ends() -> Procedure[tuple[int, ...]]:
    ends: tuple[int, ...] = yield BlockEndOffsets()
    return ends

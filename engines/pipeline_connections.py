"""The connections of a pipeline's leader, which also look at its topics and stores, and restore its savepoint.

Making one connects to nothing and fences nobody; `recover` does. All of it is called from one thread, the job's broker
thread, except what only reads (`start_message`, `added_for`, the fields of `leader`), what has connections of its own
(`describe`, `close_producers`, `look_for_requests`, `close_mailbox`), and `leader.acknowledged`, which hands over what
`decide` absorbs. No sink producer is made before `recover` or `begin_attempt` has fenced everything older.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.decision import Decided
from exactlyonce.checkpoint.decision_log import APPEND_TIMEOUT_MS
from exactlyonce.checkpoint.events import Ack, PendingCheckpoint
from exactlyonce.checkpoint.leader import Verdict
from exactlyonce.checkpoint.leader_config import LeaderConfig
from exactlyonce.checkpoint.orphans import KnownBlocks, when_given_up
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Manifest, read_before
from exactlyonce.checkpoint.records.topic_info import TopicInfo
from exactlyonce.checkpoint.settings import DELETE
from exactlyonce.checkpoint.succession import AnotherLeads, Succession
from exactlyonce.checkpoint.transactions.broker_answers import TransactionState
from exactlyonce.checkpoint.transactions.last_look import last_look
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_topic
from exactlyonce.connectors.kafka.checkpoint_topic.mailbox import Asked, Mailbox
from exactlyonce.connectors.kafka.checkpoint_topic.topic import prepare_topic
from exactlyonce.connectors.kafka.group_offsets import GroupOffsets
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.connectors.trace import as_fields
from exactlyonce.engines.blocks import NewestBlocks, Storages, in_use, require_own_place
from exactlyonce.engines.bounded.replay.replay_repair import ReplayRepair, where_replayed
from exactlyonce.engines.bounded.submit import Submit
from exactlyonce.engines.connections import Connections
from exactlyonce.engines.erasing.erase import erase_condemned
from exactlyonce.engines.options import RunOptions
from exactlyonce.engines.performer import NO_REPLAY, beside
from exactlyonce.engines.plan import Plan, share_of
from exactlyonce.engines.processes import is_known_dead
from exactlyonce.engines.savepoints.fitting import Surroundings, require_readable
from exactlyonce.engines.savepoints.restoring import Restoring
from exactlyonce.engines.surroundings.pipeline_topics import PipelineTopics
from exactlyonce.engines.surroundings.preflight import Offsets
from exactlyonce.engines.surroundings.stores import PipelineStores, stages
from exactlyonce.engines.surroundings.stores_aside import StoresAside
from exactlyonce.pipeline.errors import ConfigError, TopicError, UserError
from exactlyonce.pipeline.loading import Loaded, Reference, load_reference


class PipelineConnections(Connections):
    """See the module. `leader` is known once `look` was called."""

    def __init__(
        self,
        plan: Plan,
        options: RunOptions,
        note: Callable[[str], None],
        step: Callable[..., None],
        reference: Reference,
        units: tuple[Submit, Path] | None = None,
        succession: Succession | None = None,
    ) -> None:
        """*reference* is how the pipeline is imported; *units*: where a replay that is to run on Spark runs, and
        stages its files; None: on a Spark of its own. *succession* says whether it waits for whoever leads; None: it
        does not."""
        super().__init__(options.client, plan.graph.pipeline_id, note, timeout_ms=APPEND_TIMEOUT_MS)
        self._plan, self._options, self._step = plan, options, step
        self._reference, self._units, self._succession = reference, units, succession
        self._producers = Transactions(options.client, timeout_ms=APPEND_TIMEOUT_MS, places=self.places)
        """For `describe`, which holds up no decision, and is held up by none."""
        self._groups = self.keep(GroupOffsets(options.client, self.pipeline))
        self.surroundings = PipelineTopics(
            self.topics, plan.graph, plan.parallelism, note, bounded=options.until == "latest"
        )
        self.known_blocks = KnownBlocks(options.checkpoint, staging=stages(plan.graph))
        self.transaction_timeout_ms = 0
        """Of the sinks' transactions; known once it has looked."""
        self._storages: Storages
        self._replays: ReplayRepair | None = None
        self._mailbox: Mailbox | None = None
        self._restoring: Restoring | None = None
        self._unanswered = ""
        """Why the last look for requests failed."""
        self._seen: History | None = None
        """The decisions at the first look; None: it has not looked."""

    # --- recovery -----------------------------------------------------------------------------------------------

    def recover(self) -> Manifest:
        """Check topics and settings, fence what is older, finish what it decided, and find where to start.

        Raises `AnotherLeads`, before anything is fenced or written, where that is to be waited for.
        """
        if self._seen is None:
            self.look()
        self._require_turn()
        self.begin()
        self._judge_restoring()
        manifest = self.drive(self.leader.recover())
        self._finished()
        for skip in read_before(manifest, self._options.skip):
            self.note(f"--skip {skip}: the run goes on behind that record, and has nothing to leave out")
        savepoints = self.leader.log.history.savepoints
        for checkpoint, why in self.known_blocks.unrestorable.items():
            if checkpoint not in savepoints:
                self.note(f"checkpoint {checkpoint} is damaged and can be restored from no more: {why}")
            elif savepoints[checkpoint].storage not in self.known_blocks.unreachable:
                ends = when_given_up(manifest.pipeline, checkpoint)
                self.note(f"savepoint {checkpoint} is damaged and can be restored from no more: {why} {ends}")
        for place in self.known_blocks.unreadable:
            self.note(f"damaged: {place}; blocks that lie there cannot be removed")
        for storage, why in self.known_blocks.unreachable.items():
            self.note(
                f"{storage}, where checkpoints of {manifest.pipeline} were kept once, cannot be looked at: {why} What "
                f"is left there stays: a later start looks again, and `exactlyonce reset` or an empty folder end it"
            )
        return manifest

    def look(self) -> None:
        """Look at everything that there is, delete what was condemned, and refuse what cannot work; nothing is fenced
        or written yet. `recover` begins with it, unless it was done."""
        options = self._options
        self.surroundings.look_at_inputs()
        self.surroundings.inputs.require_read(options.skip)
        self.transaction_timeout_ms = options.checkpoint.transaction_timeout_for(self.transactions.max_timeout_ms())
        self.surroundings.look_at_outputs()
        topic, history = self._prepared()
        if history.condemned:
            self.note("the run before was cancelled, and its checkpoints are deleted, as it was set to: begins anew")
            erase_condemned(options.client, topic, history, self.note)
            topic, history = self._prepared()
        self._seen = history
        self._replays = self.keep(
            ReplayRepair(
                Loaded(load_reference(self._reference), self._reference), options.client, self.transaction_timeout_ms,
                lambda: self.log.history, self.note, *where_replayed(options.repair, self._units),
            )
        )  # fmt: skip
        self.open_log(
            topic, transaction_timeout_ms=self.transaction_timeout_ms, step=self._step,
            replay=NO_REPLAY if options.repair == "halt" else self._replays, storage=options.checkpoint.storage,
        )  # fmt: skip
        self._storages = self.keep(Storages(options.client, topic, stays_connected=True))
        stores = PipelineStores(self._plan.graph, NewestBlocks(self._storages, lambda: self.log.history))
        self.answers += [self.surroundings, self.keep(StoresAside(stores, stores.close)), self._restored]
        stores.check()
        self._restoring = self._found_to_restore(history)
        config = self._config(stores)
        config.require_same_storage(history.latest)
        self._storages.of(options.checkpoint.storage).check(in_use=in_use(history, options.checkpoint.storage))
        require_own_place(self._storages, history, options.checkpoint.storage)
        if history.latest is not None and not config.goes_on_from_savepoint(history.latest):
            blocks, drops = self._storages.of(history.storage), options.allow_dropped_fields
            require_readable(self._plan.graph, history.latest, blocks, self.note, drops_fields=drops)
        self.lead(config, self.known_blocks)

    def _require_turn(self) -> None:
        """Whether to fence whoever leads: `AnotherLeads` while it is to be waited for, ConfigError where a savepoint is
        to be restored and a run goes on. Who would rather leave a run in peace takes a last look."""
        history = self._seen
        succession = self._succession
        if self._restoring is not None or (succession is not None and succession.standby):
            look = last_look(self.pipeline, self.log.peek_at_stable, self.clock)
            history = self.drive(look)
        assert history is not None, "it has looked"
        if succession is not None and succession.awaited(history, is_known_dead) is not None:
            raise AnotherLeads(f"Another run of {self.pipeline} leads, and is left alone for now.")
        if self._restoring is not None:
            self._restoring.require_alone(history, self.clock.now_ms())

    def _judge_restoring(self) -> None:
        """Behind the fence; where the savepoint cannot be restored any more this incarnation has ended."""
        if self._restoring is not None:
            try:
                self._restoring.judge(self.log.history)
            except ConfigError:
                self.drive(self.log.heartbeat(ended=True))
                raise

    def _prepared(self) -> tuple[TopicInfo, History]:
        """The checkpoint topic, which is created unless it exists, and the decisions in it."""
        config, pipeline = self.client.confluent(), self.pipeline
        prepare_topic(config, pipeline, self._options.checkpoint_partitions)
        try:
            return read_topic(config, pipeline)
        except TopicError:  # somebody was deleting what was condemned
            prepare_topic(config, pipeline, self._options.checkpoint_partitions)
            return read_topic(config, pipeline)

    def _found_to_restore(self, history: History) -> Restoring | None:
        """The savepoint that the run is to begin from: found, and checked against the pipeline."""
        asked, plan = self._options.restoration, self._plan
        if asked is None:
            return None
        around = Surroundings(
            graph=plan.graph,
            inputs=self.surroundings.inputs,
            cluster_id=self.transactions.cluster_id(),
            parallelism=plan.parallelism,
            storages=self._storages,
            storage=self._options.checkpoint.storage,
            note=self.note,
            drops_fields=self._options.allow_dropped_fields,
        )
        return Restoring(asked, around, history)

    def _config(self, stores: PipelineStores) -> LeaderConfig:
        graph = self._plan.graph
        return LeaderConfig(
            pipeline=self.pipeline,
            transaction_timeout_ms=self.transaction_timeout_ms,
            fingerprint=graph.fingerprint(),
            max_parallelism=graph.max_parallelism,
            parallelism=self._plan.parallelism,
            accept_loss=self._options.accept_loss,
            staging=stores.staging,
            store_timeout_ms=self._options.checkpoint.store_timeout_ms,
            storage=self._options.checkpoint.storage,
            deletes=self._options.checkpoint.retention == DELETE,
            bounded=self._units is not None,
            restores=self._restoring.origin if self._restoring is not None else "",
            skips=self._options.skip,
        )

    def _restored(self, request: ask.Request) -> Any:
        """The savepoint, written anew; or `NotImplemented` if *request* is about something else."""
        if not isinstance(request, ask.RestoreSavepoint):
            return NotImplemented
        assert self._restoring is not None, "one was found"
        return beside(self._beat, partial(self._restoring.write, request.checkpoint, request.incarnation))

    def _finished(self) -> None:
        """Remove what was staged for replays."""
        if self._replays is not None:
            self._replays.close()

    def begin_attempt(self, attempt: int, *, killed: bool = True) -> Manifest:
        """Before the next attempt, all workers being dead; see `Leader.begin_attempt`."""
        manifest = self.drive(self.leader.begin_attempt(attempt, killed=killed))
        self._finished()
        return manifest

    # --- decisions ----------------------------------------------------------------------------------------------

    def describe(self, transactional_id: str) -> TransactionState | None:
        """The state of a freshly initialised transaction. From one thread, whatever the others do."""
        return self._producers.describe([transactional_id])[transactional_id]

    def close_producers(self) -> None:
        """Nothing more will be described; from the thread that described."""
        self._producers.close()

    def acknowledged(self, ack: Ack) -> None:
        """See `Leader.acknowledged`; from the main thread, before the core hears of it."""
        self.leader.acknowledged(ack)

    def count_acknowledged(self) -> None:
        """See `Leader.count_acknowledged`."""
        self.drive(self.leader.count_acknowledged())

    def decide(self, plan: PendingCheckpoint, pinned: Iterable[int], acknowledged_s: float) -> Verdict:
        """Run the decision procedure for *plan*; see `Leader.decide`.

        *acknowledged_s* is when its turn came: by then the last subtask had acknowledged it.
        """
        verdict = self.drive(self.leader.decide(plan, pinned))
        if isinstance(verdict, Decided) and verdict.finalized:
            self._tell_requests(plan.checkpoint, acknowledged_s)
        return verdict

    def _tell_requests(self, checkpoint: int, acknowledged_s: float) -> None:
        """Report the requests that a decision took; without output, it is visible when it is decided."""
        finalized_s = time.monotonic()
        visible_s = max(self.performer.visible_s, acknowledged_s)
        for name, begin_s, end_s in (("visible", acknowledged_s, visible_s), ("finalized", visible_s, finalized_s)):
            sent = self.trace.between(begin_s, end_s)
            self._step(f"requests until {name}", checkpoint, **as_fields(sent, begin_s, end_s))

    # --- what people ask ----------------------------------------------------------------------------------------

    def look_for_requests(self) -> Asked | None:
        """What is asked of this incarnation at present. From one thread, whatever the others do."""
        self._mailbox = self._mailbox or Mailbox(self.client.confluent(), self.pipeline)
        try:
            asked, self._unanswered = self._mailbox.look(), ""
        except UserError as error:
            if not self._unanswered:
                self.note(f"requests cannot be looked for at present: {error}")
            self._unanswered = str(error)
            return None
        return asked if asked is not None and asked.incarnation == self.leader.incarnation.incarnation else None

    def close_mailbox(self) -> None:
        """Nothing more will be looked for; from the thread that looked."""
        if self._mailbox is not None:
            self._mailbox.close()

    def forget_savepoint(self, checkpoint: int, pinned: Iterable[int]) -> None:
        """See `Leader.forget_savepoint`."""
        self.drive(self.leader.forget_savepoint(checkpoint, pinned))

    # --- beside it ----------------------------------------------------------------------------------------------

    def publish_offsets(self) -> None:
        """Sn as group offsets, for tools that show lag. Nothing reads them back."""
        self._groups.publish(self.leader.manifest.offsets)

    @property
    def manifest(self) -> Manifest:
        """The newest one."""
        return self.leader.manifest

    def upkeep(self) -> None:
        """See `Leader.upkeep`."""
        self.drive(self.leader.upkeep())

    def conclude(self, cancelled: str = "") -> None:
        """See `Leader.conclude`."""
        self.drive(self.leader.conclude(cancelled))

    def start_message(self, subtask: int, attempt: int, manifest: Manifest) -> dict[str, Any]:
        """The fields of `Start` for one worker."""
        return {
            "parallelism": self._plan.parallelism,
            "subtask": subtask,
            "incarnation": self.leader.incarnation.incarnation,
            "attempt": attempt,
            "client": dict(self.client.settings),
            "manifest": manifest,
            "offsets": self.surroundings.offsets,
            "topic_ids": self.surroundings.inputs.topic_ids,
            "targets": self.surroundings.inputs.targets,
            "mode": self._options.checkpoint.mode,
            "unaligned": self._options.checkpoint.unaligned,
            "incremental": self._options.checkpoint.incremental,
            "state": self._options.state,
            "slots": self._options.checkpoint.slots,
            "transaction_timeout_ms": self.transaction_timeout_ms,
            "topic": self.log.topic,
            "storage": self._options.checkpoint.storage,
            "drops_fields": self._options.allow_dropped_fields,
            "skips": self._options.skip,
        }

    def added_for(self, subtask: int) -> Offsets:
        """By source, where *subtask* begins to read those of its partitions that no completed checkpoint has."""
        added = self.surroundings.added.items()
        shares = {source: share_of(each, self._plan.parallelism, subtask) for source, each in added}
        return {source: each for source, each in shares.items() if each}

"""The connections of a pipeline's leader, which also look at its topics and stores, and restore its savepoint.

Making one connects to nothing and fences nobody; `recover` does. One thread at a time may use it. No sink producer is
made before `recover`, or `Leader.begin_attempt`, has fenced everything older.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.decision_log import APPEND_TIMEOUT_MS
from exactlyonce.checkpoint.kept_blocks import BlockRetention, when_given_up
from exactlyonce.checkpoint.leader import UNTOLD
from exactlyonce.checkpoint.leader_config import LeaderConfig
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import (
    HISTORY,
    LATE_BELOW_LATEST,
    Committable,
    Failure,
    Finalized,
    Manifest,
    RecordPlace,
    TopicInfo,
    read_before,
)
from exactlyonce.checkpoint.settings import DELETE
from exactlyonce.checkpoint.succession import AnotherLeads, Succession, last_look
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import topic_with_history
from exactlyonce.connectors.kafka.checkpoint_topic.topic import prepared
from exactlyonce.connectors.kafka.group_offsets import GroupOffsets
from exactlyonce.connectors.kafka.partitioning import SETTING
from exactlyonce.connectors.kafka.visible import other_partitioner
from exactlyonce.engines.blocks import NewestBlocks, Storages, in_use, require_own_place
from exactlyonce.engines.connections import NO_REPLAY, Connections, with_heartbeat
from exactlyonce.engines.external_checks.preflight import PipelineTopics, check_services, require_variables
from exactlyonce.engines.external_checks.stores import BackgroundStores, PipelineStores, stages
from exactlyonce.engines.options import RunOptions
from exactlyonce.engines.pipeline_resources import erase_condemned
from exactlyonce.engines.plan import Plan, TaskSpec
from exactlyonce.engines.processes import is_known_dead
from exactlyonce.pipeline.errors import ConfigError, ExactlyOnceError, StoreUnavailable, TopicError
from exactlyonce.pipeline.event_time import NO_FLOOR
from exactlyonce.pipeline.loading import Loaded, Reference, load_reference

if TYPE_CHECKING:
    from exactlyonce.engines.bounded.replay_repair import ReplayRepair
    from exactlyonce.engines.bounded.stages import Submit
    from exactlyonce.engines.savepoints.restoring import Restoring


class PipelineConnections(Connections):
    """See the module. `leader` is known once `look` was called."""

    def __init__(
        self,
        plan: Plan,
        options: RunOptions,
        note: Callable[[str], None],
        step: Callable[[str, int], None],
        reference: Reference,
        units: tuple[Submit, str | Path] | None = None,
        succession: Succession | None = None,
        asks: Callable[[str], None] = lambda store: None,
        *,
        without_output: bool = False,
    ) -> None:
        """*step* hears of each durable record. *reference* is how the pipeline is imported. *units* run a replay on
        Spark, and have a folder for its files; None: on a Spark of its own. *succession* says whether to wait for
        another leader; None: no. *asks* hears of each store before it is asked for the first time.
        *without_output*: it goes on with history whose output is another application's."""
        super().__init__(options.client, plan.graph.pipeline_id, note, timeout_ms=APPEND_TIMEOUT_MS)
        self._plan, self._options, self._step = plan, options, step
        self._without_output = without_output
        self._reference, self._units, self._succession, self._asks = reference, units, succession, asks
        self.pipeline_topics = self.keep(
            PipelineTopics(
                self.topics, plan.graph, plan.parallelism, note, bounded=options.until == "latest",
                accepted=options.accept_new_output, partitioner=options.client.settings.get(SETTING),
            )
        )  # fmt: skip
        self.known_blocks = BlockRetention(options.checkpoint, staging=stages(plan.graph))
        self.transaction_timeout_ms = 0
        """The timeout of the sinks' transactions; known after `look`."""
        self._storages: Storages
        self._replays: ReplayRepair | None = None
        self.skips: tuple[RecordPlace, ...] = ()
        """The records to leave out; known after `recover`."""
        self._restoring: Restoring | None = None
        self._seen: History | None = None
        """The decisions at the first look; None before it."""

    def recover(self) -> Manifest:
        """Check topics and settings, fence older incarnations, finish what they decided, and find where to start.

        Raises `AnotherLeads`, before anything is fenced or written, to wait for another leader.
        """
        if self._seen is None:
            self.look()
        self._require_turn()
        self.begin()
        with self.failing():
            manifest = self._recovered()
        if manifest.rules < LATE_BELOW_LATEST and any(offset.floor != NO_FLOOR for offset in manifest.offsets):
            self.note(
                f"checkpoint {manifest.checkpoint} was taken by a version for which a record was late if its time was "
                f"that of the latest one of its partition, less disorder=. From here on only an older one is. What "
                f"has left windows and timers stays as it is"
            )
        self._note_other_writers()
        for skip in read_before(manifest, self.skips):
            self.note(f"--skip {skip}: the run goes on after that record, so there is nothing to leave out")
        savepoints = self.leader.log.history.savepoints
        for checkpoint, why in self.known_blocks.unrestorable.items():
            if checkpoint not in savepoints:
                self.note(f"checkpoint {checkpoint} is damaged and can no longer be restored: {why}")
            elif savepoints[checkpoint].storage not in self.known_blocks.unreachable:
                ends = when_given_up(manifest.pipeline, checkpoint)
                self.note(f"savepoint {checkpoint} is damaged and can no longer be restored: {why} {ends}")
        for place in self.known_blocks.unreadable:
            self.note(f"damaged: {place}; blocks there cannot be removed")
        for storage, why in self.known_blocks.unreachable.items():
            self.note(
                f"{storage}, a former storage of {manifest.pipeline}'s checkpoints, cannot be read: {why} Blocks left "
                f"there stay. Each start tries to remove them; `exactlyonce reset` or an empty folder ends that"
            )
        return manifest

    def _recovered(self) -> Manifest:
        if self._restoring is not None:
            self._restoring.judge(self.log.history)
        manifest = self.drive(self.leader.recover())
        # recovery has found the splits
        self.skips = tuple(self.pipeline_topics.inputs.settled(manifest, self._options.skip, self.note))
        self.leader.config = replace(self.leader.config, skips=self.skips)
        return manifest

    @contextmanager
    def failing(self) -> Iterator[None]:
        """An error within it ends this incarnation, which says so in the log: the next one need not wait to be sure.

        Not so where a store is away: another incarnation begins at once.
        """
        try:
            yield
        except ExactlyOnceError as error:
            if not isinstance(error, (*UNTOLD, StoreUnavailable)):
                deadline_ms = self.clock.monotonic_ms() + self._options.checkpoint.stop_timeout_ms
                with suppress(ExactlyOnceError):
                    self.drive(self.leader.fail(Failure.of(error, self.client.redact), deadline_ms))
            raise

    def _note_other_writers(self) -> None:
        """Note each output that begins in a topic whose keys another partitioner has put into their partitions."""
        outputs = self.pipeline_topics.outputs
        for id in sorted(outputs.begun):
            topic, chosen = outputs.described[outputs.sinks[id].topic], outputs.partitioners[id]
            if other := other_partitioner(self.topics, topic, chosen):
                self.note(
                    f"sink {id}: the keys of topic {topic.name} lie in partitions by {other}, and this pipeline writes "
                    f'by {chosen}, so a key goes on in another partition: give the sink partitioner="{other}" before '
                    f"its first run, if its order matters across both"
                )

    def look(self) -> None:
        """Look at topics, stores and decisions, delete condemned checkpoints, and refuse what cannot work. Nothing is
        fenced or written yet. `recover` begins with it, unless it was done."""
        options = self._options
        require_variables(self._plan.graph)
        self.pipeline_topics.look_at_inputs()
        self.pipeline_topics.inputs.require_read(options.skip)
        self.transaction_timeout_ms = options.checkpoint.transaction_timeout_for(self.transactions.max_timeout_ms())
        self.pipeline_topics.look_at_outputs()
        topic, history = self._prepared()
        if history.condemned:
            self.note("the last run was cancelled, and its checkpoints are deleted as configured: this run begins anew")
            erase_condemned(options.client, topic, history, self.note)
            topic, history = self._prepared()
        self._seen = history
        self.open_log(
            topic, transaction_timeout_ms=self.transaction_timeout_ms, step=self._step,
            replay=NO_REPLAY if options.repair == "halt" else self._replay, storage=options.checkpoint.storage,
        )  # fmt: skip
        self._storages = self.keep(Storages(options.client, topic, stays_connected=True))
        newest = NewestBlocks(self._storages, lambda: self.log.history)
        stores = PipelineStores(self._plan.graph, newest, options.client, self.note)
        self.answers += [self.pipeline_topics, self.keep(BackgroundStores(stores)), self._answer_own]
        stores.check(self._asks)
        check_services(self._plan.graph)
        self._restoring = self._savepoint_to_restore(history)
        config = self._config(stores)
        if history.latest is not None and not config.goes_on_from_savepoint(history.latest):
            self._refuse_within_history(history.latest)
        config.require_same_storage(history.latest)
        self._storages.of(options.checkpoint.storage).check(in_use=in_use(history, options.checkpoint.storage))
        require_own_place(self._storages, history, options.checkpoint.storage)
        if history.latest is not None and not config.goes_on_from_savepoint(history.latest):
            blocks, drops = self._storages.of(history.storage), options.allow_dropped_fields
            from exactlyonce.engines.savepoints.restoring import require_readable

            require_readable(self._plan.graph, history.latest, blocks, self.note, drops_fields=drops)
        self.lead(config, self.known_blocks)

    def _refuse_within_history(self, latest: Manifest) -> None:
        """Raise ConfigError where *latest* is within a history whose output is another application's."""
        if latest.kind == HISTORY and not self._without_output:
            raise ConfigError(
                f"{self.pipeline}: checkpoint {latest.checkpoint} is within a history that is computed without output, "
                f"up to another application's offsets. What follows has its output, too: repeat `exactlyonce backfill` "
                f"with --no-output and its --to, which goes on there. Or `exactlyonce reset {self.pipeline}`, and "
                f"begin anew."
            )

    def _require_turn(self) -> None:
        """Raise `AnotherLeads` while this run is to wait for another leader, and ConfigError where a savepoint is to be
        restored while a run goes on. Both take a last look at the log first."""
        history = self._seen
        succession = self._succession
        if self._restoring is not None or (succession is not None and succession.standby):
            history = self.drive(last_look(self.pipeline, self.log.peek_at_stable, self.clock))
        assert history is not None, "it has looked"
        if succession is not None and succession.awaited(history, is_known_dead) is not None:
            raise AnotherLeads(f"Another run of {self.pipeline} leads, and is left alone for now.")
        if self._restoring is not None:
            self._restoring.require_alone(history, self.clock.now_ms())

    def _prepared(self) -> tuple[TopicInfo, History]:
        """The checkpoint topic, created unless it exists, and its decisions."""
        prepared(self.topics, self.pipeline, self._options.checkpoint_partitions)
        try:
            return topic_with_history(self.topics, self.pipeline)
        except TopicError:  # another process was deleting condemned checkpoints
            prepared(self.topics, self.pipeline, self._options.checkpoint_partitions)
            return topic_with_history(self.topics, self.pipeline)

    def _savepoint_to_restore(self, history: History) -> Restoring | None:
        """The savepoint that the run begins from, checked against the pipeline."""
        asked, plan = self._options.restoration, self._plan
        if asked is None:
            return None
        from exactlyonce.engines.savepoints.restoring import RestoreTarget, Restoring

        around = RestoreTarget(
            graph=plan.graph,
            inputs=self.pipeline_topics.inputs,
            cluster_id=self.transactions.cluster_id(),
            parallelism=plan.parallelism,
            storages=self._storages,
            storage=self._options.checkpoint.storage,
            note=self.note,
            drops_fields=self._options.allow_dropped_fields,
        )
        restoring = Restoring(asked, around, history)
        self.pipeline_topics.restored = restoring.manifest
        return restoring

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
            dead_letter_limits=graph.dead_letter_limits,
            max_late=self._options.max_late,
            without_output=self._without_output,
        )

    def _answer_own(self, request: ask.Request) -> Any:
        match request:
            case ask.RestoreSavepoint(checkpoint, incarnation):
                assert self._restoring is not None, "a savepoint was found"
                return with_heartbeat(self._beat, partial(self._restoring.write, checkpoint, incarnation))
            case ask.Appended(records) if any(isinstance(record, Finalized) for record in records):
                if self._replays is not None:
                    self._replays.close()  # nothing of the checkpoint is replayed any more
        return NotImplemented

    def _replay(self, manifest: Manifest, lost: Committable, name: str) -> Committable | str:
        if self._replays is None:
            from exactlyonce.engines.bounded.replay_repair import ReplayRepair, where_replayed

            self._replays = self.keep(
                ReplayRepair(
                    Loaded(load_reference(self._reference), self._reference), self.client, self.transaction_timeout_ms,
                    lambda: self.log.history, self.note, *where_replayed(self._options.repair, self._units),
                )
            )  # fmt: skip
        return self._replays(manifest, lost, name)

    def task_spec(self, attempt: int, manifest: Manifest) -> TaskSpec:
        """The tasks that *attempt* begins from *manifest*."""
        options, outputs = self._options, self.pipeline_topics.outputs
        return TaskSpec(
            reference=self._reference,
            parallelism=self._plan.parallelism,
            incarnation=self.leader.incarnation.incarnation,
            attempt=attempt,
            manifest=manifest,
            topic=self.log.topic,
            storage=options.checkpoint.storage,
            drops_fields=options.allow_dropped_fields,
            skips=self.skips,
            incremental=options.checkpoint.incremental,
            output_partitions=outputs.partitions,
            partitioners=outputs.partitioners,
        )

    def publish_offsets(self) -> None:
        """Publish Sn as group offsets in the cluster of each source, for tools that show lag. Nothing reads them
        back."""
        for group in self._groups:
            group.publish(self.leader.manifest.offsets)

    @cached_property
    def _groups(self) -> list[GroupOffsets]:
        """One for each cluster."""
        inputs = self.pipeline_topics.inputs
        reads_own = inputs.patterns or inputs.read(elsewhere=False)
        own = [GroupOffsets(self.client, self.pipeline, self.note)] if reads_own else []
        others = (
            GroupOffsets(topics.config, self.pipeline, self.note, {source.place: source.topic for source in here})
            for topics, here in inputs.topics.by_cluster(inputs.read(elsewhere=True))
        )
        return [self.keep(group) for group in (*own, *others)]

"""The driver of a Spark job as coordinator of a sink, before the tasks of a job and after them.

A sink is a pipeline without inputs and state: every decided job is a checkpoint in `<sinkId>.checkpoints`. Invariants:
no task begins before older jobs are finished or aborted; a job is decided once, by the newest incarnation, if all its
transactions and blocks are whole; staged rows are committed after the decision, stay as long as it, and are cleaned
once no decision can name them; a decided job is never aborted, whatever Spark asks for; skipped rows are those that
were decided, or Spark stops.

An incarnation is one driver. Spark calls it in two processes, one that plans and one that commits, and may replace
either when idle: the planning one begins the incarnation, the other takes it up.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.decision import Dropped, keep_all
from exactlyonce.checkpoint.decision_log import DecisionLog, fenced, superseded
from exactlyonce.checkpoint.events import Ack, Decided, PendingCheckpoint, Refuse
from exactlyonce.checkpoint.kept_blocks import BlockRetention, Retention
from exactlyonce.checkpoint.leader import Leader
from exactlyonce.checkpoint.leader_config import LeaderConfig
from exactlyonce.checkpoint.records.encoding import encode_in_parts
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import SPARK_SINK, BlockRef, Incarnation, Manifest, Output
from exactlyonce.checkpoint.records.storage_url import TOPIC
from exactlyonce.checkpoint.requests import Procedure, Request
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.connectors.kafka.checkpoint_topic.topic import prepare_topic
from exactlyonce.connectors.kafka.partitioning import DEFAULT, SETTING
from exactlyonce.connectors.kafka.topics import Topic
from exactlyonce.connectors.kafka.visible import other_partitioner
from exactlyonce.engines.blocks import block_storage
from exactlyonce.engines.connections import Connections
from exactlyonce.engines.external_checks.preflight import MADE_ANEW, output_gone
from exactlyonce.engines.external_checks.stores import Stores
from exactlyonce.engines.spark.sink.options import SinkOptions
from exactlyonce.engines.spark.sink.position import Position, SparkJob, Tally, rows_decided
from exactlyonce.engines.spark.sink.task import SINK, Assignment, Flushed
from exactlyonce.pipeline.errors import (
    ConfigError,
    Fenced,
    Halt,
    InvariantViolation,
    StoreUnavailable,
    Undetermined,
    require,
)
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.sinks.writer import SinkFailed

TOPIC_PARTITIONS, TOPIC_PARTITIONS_OF_ROWS = 2, 5
"""The partitions of a checkpoint topic: the minimum, and with rows for a store."""
ATTEMPT = 1
"""The driver's attempt; tasks' transactions have a lower one, so the driver sweeps them all."""
MANIFESTS_RETAINED = 3
NO_REPLAY = "a Spark job is not ours to run again."
HEARTBEAT_FRESH_MS = 60_000
"""A fenced driver takes the sink back only if its successor has been silent for so long."""

R = TypeVar("R")


def output_of(topic: Topic, partitioner: str = "") -> Output:
    return Output(SINK, topic.name, topic.partitions, topic.topic_id, partitioner)


@dataclass(frozen=True, kw_only=True)
class SinkConfig(LeaderConfig):
    """A sink: without inputs and state, its transactions below the driver's own attempt."""

    attempt: int = ATTEMPT
    outputs: Callable[[Iterable[str]], tuple[Output, ...]]
    """Gives the outputs of a manifest whose rows are in these topics."""

    def fenced_below(self, incarnation: Incarnation) -> tuple[int, int]:
        """Skip ids whose transaction is complete: its end from outside, or by the broker, raised the epoch, so its
        producer is fenced."""
        return incarnation.incarnation + 1, 0

    def filled(self, manifest: Manifest) -> Manifest:
        """The manifest with its tasks, as many as have written, and the topics that their rows name."""
        tasks = len(manifest.committables) + len(manifest.staged)
        topics = sorted({part.topic for committable in manifest.committables for part in committable.written})
        filled = msgspec.structs.replace(
            manifest,
            kind=SPARK_SINK,
            max_parallelism=tasks,
            parallelism=tasks,
            sinks=self.outputs(topics),
        )
        try:
            encode_in_parts(filled)
        except InvariantViolation as error:
            places = sum(len(committable.written) for committable in manifest.committables)
            whereto = "a store" if manifest.staged else f"{places} partitions in all"
            raise ConfigError(
                f"{tasks} tasks have written to {whereto}, too many for one decision ({error}) Write with fewer tasks: "
                f"df.coalesce(n)."
            ) from None
        return filled

    def topic_lost(self, topic: str, incarnation: int) -> str:
        """The error for a lost topic, in Spark's words."""
        return (
            f"The topic {topic} is empty, but transactions of incarnation {incarnation} of sink {self.pipeline!r} are "
            f"known to the broker: the topic was deleted, and with it what the sink has written.\n"
            f"  Choices: restore the topic from a replica or backup; or `exactlyonce reset {self.pipeline}`, after "
            f"which a batch that Spark writes again is in the output twice."
        )


class ManifestRetention(Retention):
    """Keeps the newest manifests; a sink that writes to Kafka has no blocks."""

    def __init__(self, log: DecisionLog) -> None:
        self._log = log

    def expire(self, manifest: Manifest, pinned: Iterable[int]) -> Procedure[Dropped]:
        """Drop old manifests."""
        old = self._log.history.retained[:-MANIFESTS_RETAINED]
        yield from ()
        return tuple(manifest.checkpoint for manifest in old), ()


class JobRetention(BlockRetention):
    """Keeps the newest manifests and the rows for a store that they name; all other blocks are dropped."""

    def __init__(self) -> None:
        super().__init__(CheckpointSettings(num_retained=MANIFESTS_RETAINED), staging=True)

        self._dropped: Dropped = (), ()
        """Manifests and blocks that may go with the next decision."""
        self._known_to: list[int] = []
        """The expected offset of the next block by partition, unless an unknown attempt writes."""
        self._cleaning: Sequence[Request] = ()
        """Requests to stores after the next decision."""

    def clean_after_decision(self, requests: Sequence[Request]) -> None:
        """Ask *requests* after the next decision, to clean rows staged by failed attempts of its tasks.

        They come before it is finalized: until then a later job fences this process, so that its rows stay."""
        self._cleaning = requests

    def take_up(self, history: History, incarnation: int, job: int, named: Iterable[BlockRef]) -> Procedure[None]:
        """Look for blocks of *incarnation*, begun by another process; tasks have staged *named* for decision *job*."""
        self.completed(job, named)
        self._dropped = yield from self.recover(history, incarnation)
        self._known_to = list(self._begun_at)
        self.expect_own_orphans()

    def follow(self, named: Iterable[BlockRef]) -> bool:
        """Whether *named*, the blocks of the next job, lie right after all known ones.

        Then blocks before them need not be looked at again. A gap has blocks of an attempt that Spark gave up, which
        may have gone on; blocks after *named* show in a later job, or lie beyond the noted ends."""
        begun_at, known_to = list(self._begun_at), self._known_to
        for partition, offset in sorted((ref.partition, ref.offset) for ref in named):
            if not known_to or offset != known_to[partition]:
                return False
            known_to[partition] = begun_at[partition] = offset + 1
        self._begun_at = tuple(begun_at)
        return True

    def expire(self, manifest: Manifest, pinned: Iterable[int] = ()) -> Procedure[Dropped]:
        """Drop old manifests and their rows, and leftovers of failed attempts."""
        cleaning, self._cleaning = self._cleaning, ()
        with suppress(StoreUnavailable):  # a later job cleans then
            for request in cleaning:
                _ = yield request
        looks = self._search_again
        manifests, blocks = yield from super().expire(manifest, pinned)
        before, self._dropped = self._dropped, ((), ())
        dropped = (*before[1], *blocks)
        if looks:
            self._known_to = list(self._begun_at)
        for partition, tombstones in Counter(block.ref.partition for block in dropped).items():
            self._known_to[partition] += tombstones + 1  # and the marker of their transaction
        return (*before[0], *manifests), dropped


def driver_name() -> str:
    """The name of this driver in all its Python processes, from the random folder that Spark gives each driver."""
    drivers = re.findall(r"blockmgr-([0-9a-f]+)", os.environ.get("SPARK_LOCAL_DIRS", "")) or [uuid.uuid4().hex]
    return f"{socket.gethostname()} (Spark driver {drivers[0]})"


class SinkDriver:
    """One process of the driver. An error ends it; its successor reads the decisions anew."""

    def __init__(self, options: SinkOptions, driver: str) -> None:
        self.options, self.driver = options, driver
        self._connections = Connections(options.client(), options.sink_id, self._note)
        self._connections.answers.append(self._answer_own)
        self._topics: dict[str, Topic] = {}
        """By name, as described since the present job began, because topics grow."""
        self._stores: Stores | None = None
        self._config: SinkConfig | None = None
        self._leader: Leader | None = None
        """The leader once it has begun or was taken up."""
        self._looked: History | None = None
        """The decisions, where the leader has only looked."""
        self._attempt = ATTEMPT
        self._assignment: Assignment | None = None
        self._settled = 0
        """The attempt of the last job that was committed here."""

    def _new_leader(self, **changes: Any) -> Leader:
        """A leader that has fenced nobody yet."""
        connections, transactions = self._connections, self._connections.transactions
        partitions = TOPIC_PARTITIONS if self.options.target is None else TOPIC_PARTITIONS_OF_ROWS
        topic = prepare_topic(connections.client, self.options.sink_id, partitions)
        if self._stores is None:
            blocks = connections.keep(block_storage(connections.client, topic, TOPIC, stays_connected=True))
            target, sink_id = self.options.target, self.options.sink_id
            sinks = [] if target is None else [(sink_id, target.sink, target.type)]
            self._stores = connections.keep(Stores(sink_id, sinks, blocks, connections.client))
            connections.answers.append(self._stores)
        self._config = self._config or SinkConfig(
            pipeline=self.options.sink_id,
            host=self.driver,
            fingerprint=SPARK_SINK,
            transaction_timeout_ms=self.options.timeout_within(transactions.max_timeout_ms()),
            max_parallelism=0,
            parallelism=0,
            accept_loss=self.options.accept_loss,
            staging=self._stores.staging,
            store_timeout_ms=self.options.store_timeout_ms,
            outputs=self._outputs,
        )
        config = replace(self._config, **changes)
        log = connections.open_log(topic, transaction_timeout_ms=config.transaction_timeout_ms, replay=NO_REPLAY)
        # even a sink that delivers at least once may have older, exact decisions that name rows
        retention = ManifestRetention(log) if self.options.target is None else JobRetention()
        return connections.lead(config, retention)

    def _note(self, text: str) -> None:
        if self.options.target is not None:
            print(f"exactlyonce, sink {self.options.sink_id}: {text}", file=sys.stderr, flush=True)

    # --- before a job ---------------------------------------------------------------------------------------------

    def assign(self) -> Assignment:
        """Finish or abort earlier jobs, and assign the tasks of the next one."""
        self._topics.clear()
        if self.options.topic:
            self._described(self.options.topic)
        is_new = self._leader is None
        leader = self._leader or self._new_leader()
        assert self._stores is not None
        if is_new:
            self._stores.check()
        history = self._connections.drive(leader.log.peek())
        if history is not None:
            self._require_same_outputs(history)
        newest = history.newest_incarnation if history else None
        begins = history is None or newest is None or newest.host != self.driver or history.unfinalized is not None
        # another process may have fenced another ledger, or none, or it may yet decide rows that would be cleaned
        if begins or (leader.config.staging and (is_new or self._is_undecided(history))):
            leader = self._begin(history or self._connections.drive(leader.log.peek_at_stable()))
            history, newest = leader.log.history, leader.incarnation
            self._attempt = ATTEMPT
        elif newest is not None:
            self._attempt += 1
            self._clean(leader, newest.incarnation, self._attempt)
        assert history is not None
        assert newest is not None
        position, partitioner = Position.of(history.latest), self._partitioner(history.latest)
        self._looked = history
        self._connections.drive(leader.transactions.sweep_for(newest, leader.config.fenced_below(newest)))
        self._looked = None
        hit("coordinator-swept")
        timeout_ms, topic = leader.config.transaction_timeout_ms, leader.log.topic
        self._assignment = Assignment(
            newest.incarnation, _next(history), position, timeout_ms, self._attempt, topic, partitioner
        )
        if history.latest is None:
            self._note_other_writers(partitioner)
        return self._assignment

    def _partitioner(self, newest: Manifest | None) -> str:
        """The partitioner of the sink, which stays; ConfigError where the options have another one."""
        chosen = self.options.partitioner
        known = "" if newest is None else newest.partitioner_of(SINK)
        if known and chosen not in (None, known) and self.options.target is None:
            raise ConfigError(
                f"Sink {self.options.sink_id!r} has put keys into partitions by {known}, and is to do so by {chosen} "
                f"now: a key would go on in another partition, and readers would see its rows out of order.\n"
                f'  Choices: .option("{SETTING}", "{known}"), or none, to go on as before; or, if readers bear that '
                f"order, a sinkId of its own, which begins a new output."
            )
        return known or chosen or DEFAULT

    def _outputs(self, topics: Iterable[str]) -> tuple[Output, ...]:
        """The outputs of a decision whose rows are in *topics*; one without rows repeats those before it."""
        latest = self._connections.log.history.latest
        written = [output_of(self._described(topic), self._partitioner(latest)) for topic in topics]
        return tuple(written) if written or latest is None else latest.sinks

    def _note_other_writers(self, partitioner: str) -> None:
        """Note that the sink begins in a topic whose keys another partitioner has put into their partitions."""
        name = self.options.topic
        if not name or "key" not in self.options.columns:
            return
        topics = self._connections.topics
        if other := other_partitioner(topics, topics.describe([name])[name], partitioner):
            print(
                f"exactlyonce, sink {self.options.sink_id}: the keys of topic {name} lie in partitions by {other}, and "
                f"this sink writes by {partitioner}, so a key goes on in another partition: begin with "
                f'.option("{SETTING}", "{other}") under another sinkId, if its order matters across both',
                file=sys.stderr,
                flush=True,
            )

    def _is_undecided(self, history: History | None) -> bool:
        """Whether the job of the last assignment was not decided, or another process has assigned since.

        A process that commits goes on when its query is stopped, and Spark does not tell."""
        last, newest = self._assignment, history.newest_incarnation if history is not None else None
        if last is None or history is None or newest is None:
            return False
        return last.incarnation != newest.incarnation or last.checkpoint == _next(history)

    def _begin(self, seen: History) -> Leader:
        """Fence every older driver, and finish its decisions."""
        Position.of(seen.latest)  # raises where a pipeline has that name
        self._refuse_fenced(seen)
        leader = self._leader = self._new_leader()
        self._connections.begin()
        with self._sparks_choices():
            self._connections.drive(leader.recover())
        return leader

    def _refuse_fenced(self, history: History) -> None:
        """Raise `Fenced` if this driver was paused and replaced: it must not take the sink from its successor."""
        newest, last = history.newest_incarnation, self._assignment
        ours = [begun.incarnation for begun in history.incarnations.values() if begun.host == self.driver]
        ours += [last.incarnation] if last is not None else []  # the log keeps only the last ones
        if not ours or newest is None or newest.host == self.driver:
            return
        quiet_ms = self._connections.clock.now_ms() - newest.heartbeat_ms
        if quiet_ms < HEARTBEAT_FRESH_MS:
            raise Fenced(
                f"{superseded(self.options.sink_id, max(ours), newest)} It was heard of {quiet_ms // 1000} s ago: "
                f"if it has ended, start this query again in a minute."
            )

    def _finish_decided(self, leader: Leader) -> None:
        manifest = leader.log.history.unfinalized
        if manifest is not None:
            with self._sparks_choices():
                self._connections.drive(leader.finish(manifest, keep_all))

    @contextmanager
    def _sparks_choices(self) -> Iterator[None]:
        """A halt in the block that names a command's choices names Spark's option, too."""
        try:
            yield
        except Halt as error:
            for option, name in (("accept-loss", "acceptLoss"), ("accept-new-output", "acceptNewOutput")):
                if (accepted := re.search(rf"--{option} ([^\s`]+?)(?=[,`])", str(error))) is not None:
                    by = f'.option("{name}", "{accepted[1]}")'
                    raise Halt(f"{error}\n  This is a sink of Spark, which accepts that by {by}.") from None
            raise

    # --- after a job ----------------------------------------------------------------------------------------------

    def commit(self, job: SparkJob, flushed: Sequence[Flushed]) -> None:
        """Decide *job*, unless it is decided, and commit it.

        Raises `SinkFailed` if it was not decided, and `Halt` if it was decided with other rows.
        """
        incarnation = flushed[0].incarnation
        assigned = all((task.incarnation, task.job) == (incarnation, job) for task in flushed)
        require(assigned, "A job has one assignment")
        self._topics.clear()
        leader = self._take_up(incarnation, flushed)
        history = leader.log.history
        position, tally = Position.of(history.latest), sum((task.tally for task in flushed), start=Tally())
        position.refuse(job, self.options)
        written = [task for task in flushed if task.wrote]
        if position.holds(job):
            position.refuse_other_rows(job, tally, rows_decided(history.retained, position), self.options)
            if job.run:  # the decision notes the place of the function's next write
                self._decide(leader, job, position, (), tally)
        elif tally.rows and not written:
            raise SinkFailed(
                f"sink {self.options.sink_id!r}: {job} was decided when its tasks began, and is not any more: the "
                f"sink's topic was changed meanwhile. Nothing of it was written now. Start it again."
            )
        elif written or job.query:
            self._refuse_mixed(leader, job, position, written)
            names = {precommit.transactional_id for task in written for precommit in task.ack.precommits}
            self._connections.drive(leader.transactions.sweep(names))
            if isinstance(leader.retention, JobRetention) and any(task.tried_before for task in flushed):
                origin, attempt = leader.log.topic.topic_id, flushed[0].attempt + 1
                leader.retention.clean_after_decision(
                    [
                        request
                        for sink in leader.config.staging
                        for request in (
                            ask.FenceStore(sink, incarnation, origin),  # another process has fenced
                            ask.CleanStore(sink, incarnation, attempt),
                        )
                    ]
                )
            self._decide(leader, job, position, written, tally)
        self._connections.drive(leader.transactions.sweep())
        self._settled = flushed[0].attempt

    def _refuse_mixed(self, leader: Leader, job: SparkJob, position: Position, written: Sequence[Flushed]) -> None:
        """Raise unless staged rows are for the next decision, and a `foreachBatch` function writes to one store only.

        A successor could not finish another store."""
        staged = any(task.ack.staged for task in written)
        if staged and written[0].ack.checkpoint != _next(leader.log.history):
            raise SinkFailed(
                f"sink {self.options.sink_id!r}: another job was decided while this one wrote, and its rows would "
                f"count as written. Nothing of this one is. One job at a time may write to a sink: start it again, or "
                f"give it a sinkId of its own."
            )
        before = leader.log.history.latest
        if before is None or not job.run or (job.run, job.batch + 1) != (position.run, position.batch_next):
            return
        digests = {committable.description for committable in before.staged}
        if (digests - {sink.digest for sink in leader.config.staging.values()}) or (staged and before.committables):
            raise ConfigError(
                f"Sink {self.options.sink_id!r}: a function of foreachBatch writes to two targets under one sinkId: "
                f"give each of them its own. Nothing of {job} was written to the second."
            )

    def _clean(self, leader: Leader, incarnation: int, attempt: int) -> None:
        """Clean rows staged in stores by assignments before *attempt*: decided ones are committed, others unnamed."""
        assert self._stores is not None
        for sink in leader.config.staging:
            with suppress(StoreUnavailable):  # a later job cleans then
                self._stores(ask.CleanStore(sink, incarnation, attempt))

    def abort(self) -> None:
        """Finish a failed job that was decided, else abort it. Another driver's job is left alone.

        A store that is away is not waited for again: the next start of the query does so.
        """
        seen = self._leader or self._new_leader()
        newest = self._connections.drive(seen.log.peek_at_stable()).newest_incarnation
        if newest is None or newest.host != self.driver:
            return
        self._leader = None  # the next job looks at the leftovers
        leader = self._new_leader(store_timeout_ms=0)
        opened = self._connections.open()
        if opened.newest_incarnation is None or opened.newest_incarnation.host != self.driver:
            return
        leader.resume(opened.newest_incarnation.incarnation)
        with suppress(StoreUnavailable):
            self._finish_decided(leader)
            self._connections.drive(leader.transactions.sweep())

    def _take_up(self, incarnation: int, flushed: Sequence[Flushed]) -> Leader:
        """The leader of the tasks' incarnation, which knows its decisions, and all blocks beside *flushed*'s."""
        leader, checkpoint = self._leader, flushed[0].ack.checkpoint
        blocks = [block for task in flushed for block in task.ack.written]
        is_ours = leader is not None and leader.log.has_begun and leader.incarnation.incarnation == incarnation
        if leader is not None and is_ours and _next(leader.log.history) == checkpoint:
            is_smooth = flushed[0].attempt == self._settled + 1 and not any(task.tried_before for task in flushed)
            if isinstance(leader.retention, JobRetention) and not (leader.retention.follow(blocks) and is_smooth):
                leader.retention.expect_own_orphans()
            return leader
        self._refuse_superseded(leader or self._new_leader(), incarnation)
        leader = self._leader = self._new_leader()
        self._connections.open()
        leader.resume(incarnation)
        self._finish_decided(leader)
        if isinstance(leader.retention, JobRetention):
            history = leader.log.history
            self._connections.drive(leader.retention.take_up(history, incarnation, _next(history), blocks))
        return leader

    def _refuse_superseded(self, leader: Leader, incarnation: int) -> None:
        """Raise `Fenced`, before anything is fenced, if this driver was replaced."""
        newest = self._connections.drive(leader.log.peek_at_stable()).newest_incarnation
        if newest is not None and newest.incarnation != incarnation:
            raise fenced(self.options.sink_id, incarnation, newest)

    def _decide(
        self, leader: Leader, job: SparkJob, position: Position, written: Sequence[Flushed], tally: Tally
    ) -> None:
        """Decide *job*, even if nothing was written: a batch without rows, or one that was written before."""
        now_ms = self._connections.clock.now_ms()
        opened = [(precommit, task.opened_ms) for task in written for precommit in task.ack.precommits]
        ages_ms = {precommit.transactional_id: max(precommit.open_ms, now_ms - began) for precommit, began in opened}
        checkpoint, previous = _next(leader.log.history), max(0, leader.log.history.checkpoint_latest)
        ack = Ack(
            SINK, 0, checkpoint, position.after(job, tally, checkpoint).offsets(),
            staged=tuple(staged for task in written for staged in task.ack.staged),
            written=tuple(block for task in written for block in task.ack.written),
        )  # fmt: skip
        leader.acknowledged(ack)
        began_ms = self._connections.clock.monotonic_ms() - max(ages_ms.values(), default=0)
        precommits = [precommit for precommit, _ in opened]
        plan = PendingCheckpoint.of(
            [ack], precommits, base=previous, triggered_ms=began_ms, attempt=ATTEMPT, ages_ms=ages_ms
        )
        with self._sparks_choices():
            verdict = self._connections.drive(leader.decide(plan, ()))
        if isinstance(verdict, Refuse):
            self._refuse_superseded(leader, leader.incarnation.incarnation)
            raise SinkFailed(
                f"sink {self.options.sink_id!r}: the job was not decided, and nothing of it is visible: "
                f"{verdict.reason}. Start it again: it is written anew. From its first row to the end of all tasks a "
                f"job has {leader.config.transaction_timeout_ms // 1000} s: as the option transactionTimeout says, or "
                f"else the broker's transaction.max.timeout.ms, but 15 minutes at most."
            )
        if not isinstance(verdict, Decided):
            raise Undetermined(
                f"Whether the job of sink {self.options.sink_id!r} is decided is not known here. Start it again: what "
                f"is true is read then."
            )
        if not verdict.finalized:
            self._finish_decided(leader)

    # --- both -----------------------------------------------------------------------------------------------------

    def _described(self, topic: str) -> Topic:
        if topic not in self._topics:
            self._topics |= self._connections.topics.describe([topic])
        return self._topics[topic]

    def _require_same_outputs(self, history: History) -> None:
        """Halt if a topic that the retained jobs have written to was created again since, unless that is accepted."""
        written: dict[str, tuple[str, Manifest]] = {}
        for manifest in history.retained:
            written |= {name: (topic_id, manifest) for name, topic_id in manifest.output_ids.items()}
        for name, (before, manifest) in written.items():
            if name != self.options.accept_new_output and self._described(name).topic_id != before:
                with self._sparks_choices():
                    raise output_gone(manifest, name, MADE_ANEW)

    def _answer_own(self, request: ask.Request) -> Any:
        """The answer of a sink, which has no inputs; or `NotImplemented` if *request* is about something else."""
        match request:
            case ask.KnownOutputs():
                history = self._looked or self._connections.log.history
                topics = {output.topic for manifest in history.retained for output in manifest.sinks}
                wanted = sorted(topics | {self.options.topic} - {""})
                return tuple(output_of(self._described(topic)) for topic in wanted)
            case (
                ask.CreateOutputs() | ask.LookAtInputs() | ask.CheckRemoteInputs() | ask.LookAtTopics()
                | ask.SetPosition() | ask.CheckContinuity()
            ):  # fmt: skip
                return None  # Spark's concern
            case ask.StartOffsets():
                return ()
        return NotImplemented

    def close(self) -> None:
        """Close all connections; nothing ends by it."""
        self._connections.close()


_drivers: dict[tuple[Any, ...], SinkDriver] = {}


def with_driver(options: SinkOptions, use: Callable[[SinkDriver], R]) -> R:
    """*use* the driver that this process keeps for *options*; an error drops it."""
    key = (
        options.sink_id, options.topic, options.accept_loss, options.accept_new_output,
        options.transaction_timeout_ms, options.target, options.store_timeout_ms,
        *sorted(options.client_settings.items()),
    )  # fmt: skip
    driver = _drivers.pop(key, None) or SinkDriver(options, driver_name())
    driver.options = options
    try:
        result = use(driver)
    except BaseException:
        driver.close()
        raise
    _drivers[key] = driver
    return result


def _next(history: History) -> int:
    return max(0, history.checkpoint_latest) + 1

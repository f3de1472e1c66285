"""The driver of a Spark job as coordinator of a sink: what it does before the tasks of a job, and after them.

A sink is to the protocol what a pipeline is, without inputs and state: its topic is `<sinkId>.checkpoints`, every
decided job is a checkpoint of it, and the same procedures check, decide, commit, repair and sweep. The commands
`exactlyonce checkpoints` and `exactlyonce reset` know it by its sinkId.

Invariants: no task begins before what older jobs decided is finished and what they did not decide is aborted; a job is
decided once, by the newest incarnation, and only if every transaction of it holds what its task wrote, and every block
of it is there; what is set aside for a store is committed behind the decision, and cleaned once no decision can name
it; a decided job is never aborted, whatever Spark asks for; rows that are skipped, because their job is decided, are
those that were written then, or Spark does not get to go on.

An incarnation is one driver. Spark calls it in two processes, one that plans and one that commits, both of which it may
replace whenever they are idle: the one that plans begins the incarnation, the other takes it up.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.commits.protocol import Refuse
from exactlyonce.checkpoint.decision import Decided, keep_all
from exactlyonce.checkpoint.decision_log import fenced, superseded
from exactlyonce.checkpoint.events import Ack, PendingCheckpoint
from exactlyonce.checkpoint.leader import Leader
from exactlyonce.checkpoint.records.committable import Precommit
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import SPARK_SINK
from exactlyonce.checkpoint.records.storage_url import TOPIC
from exactlyonce.connectors.kafka.checkpoint_topic.topic import prepare_topic
from exactlyonce.engines.blocks import block_storage
from exactlyonce.engines.connections import Connections
from exactlyonce.engines.spark.sink.leader_config import ATTEMPT, JobsKept, NewestKept, SinkConfig
from exactlyonce.engines.spark.sink.messages import Assignment, Flushed
from exactlyonce.engines.spark.sink.options import SinkOptions
from exactlyonce.engines.spark.sink.position import Job, Position, rows_decided
from exactlyonce.engines.spark.sink.tally import Tally
from exactlyonce.engines.spark.sink.task import SINK
from exactlyonce.engines.surroundings.stores import Stores
from exactlyonce.pipeline.errors import ConfigError, Fenced, Halt, StoreUnavailable, Undetermined, require
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.sinks.writer import SinkFailed

TOPIC_PARTITIONS, TOPIC_PARTITIONS_OF_ROWS = 2, 5
"""Of a checkpoint topic: the fewest that there may be, and where rows for a store wait in it."""
NO_REPLAY = "a Spark job is not ours to run again."
HEARTBEAT_FRESH_MS = 60_000
"""A driver that was fenced takes the sink back only when its successor has not been heard of for so long."""

R = TypeVar("R")


def driver_name() -> str:
    """This driver, the same in all its Python processes: by the folder that Spark names at random for each driver."""
    drivers = re.findall(r"blockmgr-([0-9a-f]+)", os.environ.get("SPARK_LOCAL_DIRS", "")) or [uuid.uuid4().hex]
    return f"{socket.gethostname()} (Spark driver {drivers[0]})"


class SinkDriver:
    """One process of the driver. An error ends it: whoever goes on makes a new one, which reads what is true.

    Making one connects to nothing.
    """

    def __init__(self, options: SinkOptions, driver: str) -> None:
        self.options, self.driver = options, driver
        self._connections = Connections(options.client(), options.sink_id, self._note)
        self._connections.answers.append(self._surroundings)
        self._partitions: dict[str, int] = {}
        """By topic, as counted since the present job was begun: topics grow."""
        self._stores: Stores | None = None
        self._config: SinkConfig | None = None
        self._leader: Leader | None = None
        """Once it has begun or was taken up; else who looks begins with a new one."""
        self._looked: History | None = None
        """The decisions, where the leader has only looked."""
        self._attempt = ATTEMPT
        """Of the newest assignment."""
        self._given: Assignment | None = None
        """The newest assignment."""
        self._settled = 0
        """The attempt of the last job that was committed here."""

    def _new_leader(self, **changes: Any) -> Leader:
        """One that has fenced nobody yet."""
        connections, transactions = self._connections, self._connections.transactions
        partitions = TOPIC_PARTITIONS if self.options.target is None else TOPIC_PARTITIONS_OF_ROWS
        topic = prepare_topic(connections.client.confluent(), self.options.sink_id, partitions)
        if self._stores is None:
            blocks = connections.keep(block_storage(connections.client, topic, TOPIC, stays_connected=True))
            self._stores = connections.keep(Stores(self.options.sink_id, _sinks(self.options), blocks))
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
            count_partitions=self._count_partitions,
        )
        config = replace(self._config, **changes)
        log = connections.open_log(topic, transaction_timeout_ms=config.transaction_timeout_ms, replay=NO_REPLAY)
        # also where it delivers at least once: older decisions, exact ones, may name rows
        retention = NewestKept(log) if self.options.target is None else JobsKept()
        return connections.lead(config, retention)

    def _note(self, text: str) -> None:
        """Say what is waited for, where Spark keeps what its Python processes say."""
        if self.options.target is not None:
            print(f"exactlyonce, sink {self.options.sink_id}: {text}", file=sys.stderr, flush=True)

    # --- before a job ---------------------------------------------------------------------------------------------

    def assign(self) -> Assignment:
        """Finish and abort what earlier jobs have left, and say how the tasks of the next one are to write."""
        self._partitions.clear()
        if self.options.topic:
            self._count_partitions(self.options.topic)
        is_new = self._leader is None
        leader = self._leader or self._new_leader()
        assert self._stores is not None
        if is_new:
            self._stores.check()
        history = self._connections.drive(leader.log.peek())
        newest = history.newest_incarnation if history else None
        begins = history is None or newest is None or newest.host != self.driver or history.unfinalized is not None
        # Another process may have fenced another ledger, or none; or it may yet decide what is about to be cleaned.
        if begins or (leader.config.staging and (is_new or self._is_undecided(history))):
            leader = self._begin(history or self._connections.drive(leader.log.peek_at_stable()))
            history, newest = leader.log.history, leader.incarnation
            self._attempt = ATTEMPT
        elif newest is not None:
            self._attempt += 1
            self._clean(leader, newest.incarnation, self._attempt)
        assert history is not None
        assert newest is not None
        position = Position.of(history.latest)
        self._looked = history
        self._connections.drive(leader.transactions.sweep_for(newest, leader.config.fenced_below(newest)))
        self._looked = None
        hit("coordinator-swept")
        timeout_ms, topic = leader.config.transaction_timeout_ms, leader.log.topic
        given = Assignment(newest.incarnation, _next(history), position, timeout_ms, self._attempt, topic)
        self._given = given
        return given

    def _is_undecided(self, history: History | None) -> bool:
        """Whether the job of the last assignment here was not decided, or whose turn it is was said elsewhere since.

        Spark says nothing of a query that is stopped while it commits: the process that does so goes on."""
        given, newest = self._given, history.newest_incarnation if history is not None else None
        if given is None or history is None or newest is None:
            return False
        return given.incarnation != newest.incarnation or given.checkpoint == _next(history)

    def _begin(self, seen: History) -> Leader:
        """Fence every older driver, and finish what it decided."""
        Position.of(seen.latest)  # raises where a pipeline has that name
        self._refuse_fenced(seen)
        leader = self._leader = self._new_leader()
        self._connections.begin()
        with self._sparks_choices():
            self._connections.drive(leader.recover())
        return leader

    def _refuse_fenced(self, history: History) -> None:
        """A driver that was paused and has been replaced meanwhile must not take the sink from its successor."""
        newest = history.newest_incarnation
        ours = [each.incarnation for each in history.incarnations.values() if each.host == self.driver]
        ours += [self._given.incarnation] if self._given is not None else []  # the log forgets all but the last ones
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
        """While something decided is committed: a halt whose choices are a command's names Spark's option, too."""
        try:
            yield
        except Halt as error:
            if (accepting := re.search(r"--accept-loss (\d+)", str(error))) is None:
                raise
            raise Halt(
                f'{error}\n  This is a sink of Spark, which accepts that by .option("acceptLoss", "{accepting[1]}").'
            ) from None

    # --- after a job ----------------------------------------------------------------------------------------------

    def commit(self, job: Job, flushed: Sequence[Flushed]) -> None:
        """Decide *job*, unless that has been done, and commit it.

        Raises `SinkFailed` if it was not decided, and `Halt` if it was decided with other rows.
        """
        incarnation = flushed[0].incarnation
        require(all((each.incarnation, each.job) == (incarnation, job) for each in flushed), "A job has one assignment")
        self._partitions.clear()
        leader = self._take_up(incarnation, flushed)
        history = leader.log.history
        position, tally = Position.of(history.latest), sum((each.tally for each in flushed), start=Tally())
        position.refuse(job, self.options)
        written = [each for each in flushed if each.has_output]
        if position.holds(job):
            position.refuse_other_rows(job, tally, rows_decided(history.retained, position), self.options)
            if job.run:  # which of its function's writes comes next is to be known
                self._decide(leader, job, position, (), tally)
        elif tally.rows and not written:
            raise SinkFailed(
                f"sink {self.options.sink_id!r}: {job} was decided when its tasks began, and is not any more: the "
                f"sink's topic was changed meanwhile. Nothing of it was written now. Start it again."
            )
        elif written or job.query:
            self._refuse_mixed(leader, job, position, written)
            self._connections.drive(leader.transactions.sweep({p.transactional_id for p in _precommits(written)}))
            if isinstance(leader.retention, JobsKept) and any(each.tried_before for each in flushed):
                leader.retention.clean_behind(_cleaning(leader, incarnation, flushed[0].attempt + 1))
            self._decide(leader, job, position, written, tally)
        self._connections.drive(leader.transactions.sweep())
        self._settled = flushed[0].attempt

    def _refuse_mixed(self, leader: Leader, job: Job, position: Position, written: Sequence[Flushed]) -> None:
        """Raise unless what is set aside is cut for the next decision, and all that a function of `foreachBatch` writes
        to this sink is for one store: another one could not be finished by whoever goes on."""
        staged = [each.staged for each in written if each.staged is not None]
        if staged and written[0].checkpoint != _next(leader.log.history):
            raise SinkFailed(
                f"sink {self.options.sink_id!r}: another job was decided while this one wrote, and its rows would "
                f"count as written. Nothing of this one is. One job at a time may write to a sink: start it again, or "
                f"give it a sinkId of its own."
            )
        before = leader.log.history.latest
        if before is None or not job.run or (job.run, job.batch + 1) != (position.run, position.batch_next):
            return
        digests = {each.description for each in before.staged}
        if (digests - {sink.digest for sink in leader.config.staging.values()}) or (staged and before.committables):
            raise ConfigError(
                f"Sink {self.options.sink_id!r}: a function of foreachBatch writes to two targets under one sinkId: "
                f"give each of them its own. Nothing of {job} was written to the second."
            )

    def _clean(self, leader: Leader, incarnation: int, attempt: int) -> None:
        """What the tasks of older assignments than *attempt* have set aside outside of the checkpoint topic goes: what
        was decided of it is committed, and the rest is named by nobody any more."""
        assert self._stores is not None
        for sink in leader.config.staging:
            with suppress(StoreUnavailable):  # it goes behind a later job then
                self._stores(ask.CleanStore(sink, incarnation, attempt))

    def abort(self) -> None:
        """The job has failed, perhaps after it was decided: then finish it, else abort it. Another driver's is left.

        A store that is away is not waited for again: the next start of the query does.
        """
        seen = self._leader or self._new_leader()
        newest = self._connections.drive(seen.log.peek_at_stable()).newest_incarnation
        if newest is None or newest.host != self.driver:
            return
        self._leader = None  # whoever goes on looks at what is left
        leader = self._new_leader(store_timeout_ms=0)
        opened = self._connections.open()
        if opened.newest_incarnation is None or opened.newest_incarnation.host != self.driver:
            return
        leader.resume(opened.newest_incarnation.incarnation)
        with suppress(StoreUnavailable):
            self._finish_decided(leader)
            self._connections.drive(leader.transactions.sweep())

    def _take_up(self, incarnation: int, flushed: Sequence[Flushed]) -> Leader:
        """Go on with the incarnation that the tasks have written in, knowing all that it has decided, and all that lies
        in the checkpoint topic beside what *flushed* names."""
        leader, checkpoint = self._leader, flushed[0].checkpoint
        blocks = [block for each in flushed for block in each.blocks]
        is_ours = leader is not None and leader.log.has_begun and leader.incarnation.incarnation == incarnation
        if leader is not None and is_ours and _next(leader.log.history) == checkpoint:
            is_smooth = flushed[0].attempt == self._settled + 1 and not any(each.tried_before for each in flushed)
            if isinstance(leader.retention, JobsKept) and not (leader.retention.follow(blocks) and is_smooth):
                leader.retention.expect_own_orphans()
            return leader
        self._refuse_superseded(leader or self._new_leader(), incarnation)
        leader = self._leader = self._new_leader()
        self._connections.open()
        leader.resume(incarnation)
        self._finish_decided(leader)
        if isinstance(leader.retention, JobsKept):
            history = leader.log.history
            self._connections.drive(leader.retention.take_up(history, incarnation, _next(history), blocks))
        return leader

    def _refuse_superseded(self, leader: Leader, incarnation: int) -> None:
        """Look before anything is fenced: a driver that was replaced leaves its successor in peace."""
        newest = self._connections.drive(leader.log.peek_at_stable()).newest_incarnation
        if newest is not None and newest.incarnation != incarnation:
            raise fenced(self.options.sink_id, incarnation, newest)

    def _decide(self, leader: Leader, job: Job, position: Position, written: Sequence[Flushed], tally: Tally) -> None:
        """Also where nothing was written: a batch without rows, or one that was written before."""
        precommits, now_ms = _precommits(written), self._connections.clock.now_ms()
        staged = [each.staged for each in written if each.staged is not None]
        checkpoint, previous = _next(leader.log.history), max(0, leader.log.history.checkpoint_latest)
        ages_ms = {
            each.precommit.transactional_id: max(each.precommit.open_ms, now_ms - each.opened_ms)
            for each in written
            if each.precommit is not None
        }
        offsets = position.after(job, tally, checkpoint).offsets()
        blocks = tuple(block for each in written for block in each.blocks)
        ack = Ack(SINK, 0, checkpoint, offsets, staged=tuple(staged), written=blocks)
        leader.acknowledged(ack)
        plan = PendingCheckpoint(
            checkpoint=checkpoint,
            base=previous,
            previous=previous,
            final=False,
            triggered_ms=self._connections.clock.monotonic_ms() - max(ages_ms.values(), default=0),
            attempt=ATTEMPT,
            acks={(SINK, 0): ack},
            precommits=precommits,
            staged=staged,
            ages_ms=ages_ms,
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

    def _count_partitions(self, topic: str) -> int:
        if topic not in self._partitions:
            self._partitions[topic] = self._connections.topics.describe([topic])[topic].partitions
        return self._partitions[topic]

    def _surroundings(self, request: ask.Request) -> Any:
        """The answer of a sink, which has no inputs; or `NotImplemented` if *request* is about something else."""
        match request:
            case ask.KnownOutputs():
                history = self._looked or self._connections.log.history
                topics = {topic for manifest in history.retained for _, topic, _ in manifest.sinks}
                wanted = sorted(topics | {self.options.topic} - {""})
                return tuple((SINK, each, self._count_partitions(each)) for each in wanted)
            case ask.CreateOutputs() | ask.LookAtInputs() | ask.LookAtTopics() | ask.GoOnFrom() | ask.CheckContinuity():
                return None  # Spark's to see to
            case ask.StartOffsets():
                return ()
        return NotImplemented

    def close(self) -> None:
        """Let go of all connections; nothing is ended by it."""
        self._connections.close()


_drivers: dict[tuple[Any, ...], SinkDriver] = {}


def with_driver(options: SinkOptions, use: Callable[[SinkDriver], R]) -> R:
    """*use* the driver that this process keeps for *options*; after an error it is gone."""
    told = (
        options.sink_id, options.topic, options.accept_loss, options.transaction_timeout_ms, options.target,
        options.store_timeout_ms,
    )  # fmt: skip
    key = (*told, *sorted(options.client_settings.items()))
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


def _cleaning(leader: Leader, incarnation: int, attempt: int) -> list[ask.Request]:
    """As `SinkDriver._clean`, where another process has fenced."""
    origin = leader.log.topic.topic_id
    return [
        request
        for sink in leader.config.staging
        for request in (ask.FenceStore(sink, incarnation, origin), ask.CleanStore(sink, incarnation, attempt))
    ]


def _precommits(flushed: Sequence[Flushed]) -> list[Precommit]:
    return [each.precommit for each in flushed if each.precommit is not None]


def _sinks(options: SinkOptions) -> list[tuple[str, Any, Any]]:
    """The one that writes to a store, by the sinkId, with its description and its records' type, if there is one."""
    target = options.target
    return [] if target is None else [(options.sink_id, target.sink, target.type)]

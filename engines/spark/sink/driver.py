"""The driver of a Spark job as coordinator of a sink: what it does before the tasks of a job, and after them.

A sink is to the protocol what a pipeline is, without inputs and state: its topic is `<sinkId>.checkpoints`, every
decided job is a checkpoint of it, and the same procedures check, decide, commit, repair and sweep. The commands
`exactlyonce checkpoints` and `exactlyonce reset` know it by its sinkId.

Invariants: no task begins before what older jobs decided is finished and what they did not decide is aborted; a job is
decided once, by the newest incarnation, and only if every transaction of it holds what its task wrote; a decided job is
never aborted, whatever Spark asks for; rows that are skipped, because their job is decided, are those that were written
then, or Spark does not get to go on.

An incarnation is one driver. Spark calls it in two processes, one that plans and one that commits, both of which it may
replace whenever they are idle: the one that plans begins the incarnation, the other takes it up.
"""

from __future__ import annotations

import os
import re
import socket
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.commits.protocol import Refuse
from exactlyonce.checkpoint.decision import Decided, Dropped, keep_all
from exactlyonce.checkpoint.decision_log import DecisionLog, superseded
from exactlyonce.checkpoint.events import Ack, PendingCheckpoint
from exactlyonce.checkpoint.leader import Leader
from exactlyonce.checkpoint.led import Led
from exactlyonce.checkpoint.records.committable import Committable, Precommit
from exactlyonce.checkpoint.records.encoding import encode
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import BlockRef, Incarnation, Manifest
from exactlyonce.checkpoint.requests import Procedure, drive
from exactlyonce.checkpoint.store.topic import prepare_topic
from exactlyonce.connectors.kafka.log import Log
from exactlyonce.connectors.kafka.log_requests import LogRequests
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.performer import Performer
from exactlyonce.engines.spark.sink.options import SinkOptions
from exactlyonce.engines.spark.sink.position import KIND, Job, Position, rows_decided
from exactlyonce.engines.spark.sink.tally import Tally
from exactlyonce.engines.spark.sink.task import SINK, Assignment, Flushed
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import ConfigError, Fenced, Halt, InvariantViolation, Undetermined, require
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.sinks.writer import SinkFailed

TOPIC_PARTITIONS = 2
"""The fewest that a checkpoint topic may have: a sink has no blocks."""
ATTEMPT = 1
"""Of the driver; that of the tasks' transactions is below, so that all of them are its to sweep."""
MANIFESTS_RETAINED = 3
HEARTBEAT_FRESH_MS = 60_000
"""A driver that was fenced takes the sink back only when its successor has not been heard of for so long."""

R = TypeVar("R")


def driver_name() -> str:
    """This driver, the same in all its Python processes: by the folder that Spark names at random for each driver."""
    drivers = re.findall(r"blockmgr-([0-9a-f]+)", os.environ.get("SPARK_LOCAL_DIRS", "")) or [uuid.uuid4().hex]
    return f"{socket.gethostname()} (Spark driver {drivers[0]})"


def no_replay(manifest: Manifest, lost: Committable, transactional_id: str) -> str:
    """The answer of a sink when a lost transaction cannot be copied."""
    return "a Spark job is not ours to run again."


@dataclass(frozen=True, kw_only=True)
class LedSink(Led):
    """A sink: without inputs and state, its transactions below the driver's own attempt."""

    attempt: int = ATTEMPT
    count_partitions: Callable[[str], int]

    def fenced_below(self, incarnation: Incarnation) -> tuple[int, int]:
        """An id whose transaction is complete is skipped: it was ended from outside or by the broker, both of which
        raise its epoch, so that its producer is fenced."""
        return incarnation.incarnation + 1, 0

    def filled(self, manifest: Manifest) -> Manifest:
        """Its tasks are as many as have written, to whatever topics the rows name."""
        topics = sorted({written.topic for each in manifest.committables for written in each.written})
        filled = msgspec.structs.replace(
            manifest,
            kind=KIND,
            max_parallelism=len(manifest.committables),
            parallelism=len(manifest.committables),
            block_end_offsets=(),
            sinks=tuple((SINK, each, self.count_partitions(each)) for each in topics),
        )
        _refuse_too_large(filled)
        return filled

    def topic_lost(self, topic: str, incarnation: int) -> str:
        """As of a pipeline, in Spark's words."""
        return (
            f"The topic {topic} is empty, but transactions of incarnation {incarnation} of sink {self.pipeline!r} are "
            f"known to the broker: the topic was deleted, and with it what the sink has written.\n"
            f"  Choices: restore the topic from a replica or backup; or `exactlyonce reset {self.pipeline}`, after "
            f"which a batch that Spark writes again is in the output twice."
        )


class NewestKept:
    """Keeps the newest manifests; a sink has no blocks."""

    def __init__(self, log: DecisionLog) -> None:
        self._log = log

    def recover(self, history: History, incarnation: int) -> Procedure[Dropped]:
        """Nothing: what is old goes with the next decision."""
        return (yield from keep_all(history.retained[-1]))

    def begin_attempt(self, newest: Manifest, incarnation: int, attempt: int, *, late: bool) -> Procedure[None]:
        """Nobody writes blocks."""
        yield from ()

    def nothing_yet(self, ends: tuple[int, ...]) -> None:
        """Nobody looks for blocks."""

    def ends_to_note(self, checkpoint: int, base: int, *, final: bool) -> tuple[int, ...]:
        """Nobody looks for blocks."""
        return ()

    def written(self, checkpoint: int, blocks: Iterable[BlockRef]) -> None:
        """Nobody writes blocks."""

    def completed(self, checkpoint: int, blocks: Iterable[BlockRef]) -> None:
        """It stands on none."""

    def expire(self, manifest: Manifest, pinned: Iterable[int]) -> Procedure[Dropped]:
        """Old manifests."""
        dropped: Dropped = tuple(each.checkpoint for each in self._log.history.retained[:-MANIFESTS_RETAINED]), ()
        yield from ()
        return dropped


class SinkDriver:
    """One process of the driver. An error ends it: whoever goes on makes a new one, which reads what is true.

    Making one connects to nothing.
    """

    def __init__(self, options: SinkOptions, driver: str) -> None:
        self.options, self.driver = options, driver
        self._clock, config = SystemClock(), options.client()
        self._settings = config.confluent()
        self._transactions, self._topics = Transactions(config), Topics(config)
        self._output_log = Log(config, group=options.sink_id)
        self._partitions: dict[str, int] = {}
        """By topic, as counted since the present job was begun: topics grow."""
        self._log_requests: LogRequests | None = None
        self._led: LedSink | None = None
        self._leader: Leader | None = None
        """Once it has begun or was taken up; else who looks begins with a new one."""

    def _new_leader(self) -> Leader:
        """One that has fenced nobody yet."""
        self._close_log()
        topic = prepare_topic(self._settings, self.options.sink_id, TOPIC_PARTITIONS)
        led = self._led = self._led or LedSink(
            pipeline=self.options.sink_id,
            host=self.driver,
            process=os.getpid(),
            cluster_id=self._transactions.cluster_id(),
            transaction_version=self._transactions.transaction_version(),
            transaction_timeout_ms=self.options.timeout_within(self._transactions.max_timeout_ms()),
            fingerprint=KIND,
            max_parallelism=0,
            parallelism=0,
            accept_loss=self.options.accept_loss,
            count_partitions=self._count_partitions,
        )
        self._log_requests = LogRequests(self.options.client(), topic)
        self._performer = Performer(
            config=self.options.client(),
            transactions=self._transactions,
            output_log=self._output_log,
            log=self._log_requests,
            transaction_timeout_ms=led.transaction_timeout_ms,
            step=_ignore,
            replay=no_replay,
        )
        log = DecisionLog(self.options.sink_id, topic, self._clock)
        return Leader(led, log, NewestKept(log), self._clock, lambda text: None)

    # --- before a job ---------------------------------------------------------------------------------------------

    def assign(self) -> Assignment:
        """Finish and abort what earlier jobs have left, and say how the tasks of the next one are to write."""
        self._partitions.clear()
        if self.options.topic:
            self._count_partitions(self.options.topic)
        leader = self._leader or self._new_leader()
        history = self._drive(leader, leader.log.peek())
        newest = history.newest_incarnation if history else None
        if history is None or newest is None or newest.host != self.driver or history.unfinalized:
            leader = self._begin(history)
            history, newest = leader.log.history, leader.incarnation
        position = Position.of(history.latest)
        self._drive(leader, leader.transactions.sweep_for(newest, leader.led.fenced_below(newest)), history)
        hit("coordinator-swept")
        return Assignment(newest.incarnation, _next(history), position, leader.led.transaction_timeout_ms)

    def _begin(self, seen: History | None) -> Leader:
        """Fence every older driver, and finish what it decided."""
        if seen is not None:
            Position.of(seen.latest)  # raises where a pipeline has that name
            self._refuse_fenced(seen)
        leader = self._leader = self._new_leader()
        self._drive(leader, leader.begin())
        self._finish_decided(leader)
        return leader

    def _refuse_fenced(self, history: History) -> None:
        """A driver that was paused and has been replaced meanwhile must not take the sink from its successor."""
        newest = history.newest_incarnation
        ours = [each.incarnation for each in history.incarnations.values() if each.host == self.driver]
        if not ours or newest is None or newest.host == self.driver:
            return
        quiet_ms = self._clock.now_ms() - newest.heartbeat_ms
        if quiet_ms < HEARTBEAT_FRESH_MS:
            raise Fenced(
                f"{superseded(self.options.sink_id, max(ours), newest)} It was heard of {quiet_ms // 1000} s ago: "
                f"if it has ended, start this query again in a minute."
            )

    def _finish_decided(self, leader: Leader) -> None:
        manifest = leader.log.history.unfinalized
        if manifest is None:
            return
        try:
            self._drive(leader, leader.finish(manifest, keep_all))
        except Halt as error:
            raise Halt(
                f'{error}\n  This is a sink of Spark, which does (3) by .option("acceptLoss", "{manifest.checkpoint}").'
            ) from None

    # --- after a job ----------------------------------------------------------------------------------------------

    def commit(self, job: Job, flushed: Sequence[Flushed]) -> None:
        """Decide *job*, unless that has been done, and commit it.

        Raises `SinkFailed` if it was not decided, and `Halt` if it was decided with other rows.
        """
        incarnation = flushed[0].incarnation
        require(all((each.incarnation, each.job) == (incarnation, job) for each in flushed), "A job has one assignment")
        self._partitions.clear()
        leader = self._take_up(incarnation, flushed[0].checkpoint)
        history = leader.log.history
        position, tally = Position.of(history.latest), sum((each.tally for each in flushed), start=Tally())
        position.refuse(job, self.options)
        written = [each for each in flushed if each.precommit is not None]
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
            self._drive(leader, leader.transactions.sweep({p.transactional_id for p in _precommits(written)}))
            self._decide(leader, job, position, written, tally)
        self._drive(leader, leader.transactions.sweep())

    def abort(self) -> None:
        """The job has failed, perhaps after it was decided: then finish it, else abort it. Another driver's is left."""
        seen = self._leader or self._new_leader()
        history = self._drive(seen, seen.log.peek())
        newest = history.newest_incarnation if history else None
        if history is not None and (newest is None or newest.host != self.driver):
            return
        leader = self._leader = self._new_leader()
        opened = self._drive(leader, leader.open())
        if opened.newest_incarnation is None or opened.newest_incarnation.host != self.driver:
            return
        leader.resume(opened.newest_incarnation.incarnation)
        self._finish_decided(leader)
        self._drive(leader, leader.transactions.sweep())

    def _take_up(self, incarnation: int, checkpoint: int) -> Leader:
        """Go on with the incarnation that the tasks have written in, knowing all that it has decided: *checkpoint* is
        next."""
        leader = self._leader
        is_ours = leader is not None and leader.log.has_begun and leader.incarnation.incarnation == incarnation
        if leader is not None and is_ours and _next(leader.log.history) == checkpoint:
            return leader
        self._refuse_superseded(leader or self._new_leader(), incarnation)
        leader = self._leader = self._new_leader()
        self._drive(leader, leader.open())
        leader.resume(incarnation)
        self._finish_decided(leader)
        return leader

    def _refuse_superseded(self, leader: Leader, incarnation: int) -> None:
        """Look before anything is fenced: a driver that was replaced leaves its successor in peace."""
        history = self._drive(leader, leader.log.peek())
        newest = history.newest_incarnation if history else None
        if newest is not None and newest.incarnation != incarnation:
            raise Fenced(superseded(self.options.sink_id, incarnation, newest))

    def _decide(self, leader: Leader, job: Job, position: Position, written: Sequence[Flushed], tally: Tally) -> None:
        """Also where nothing was written: a batch without rows, or one that was written before."""
        precommits, now_ms = _precommits(written), self._clock.now_ms()
        checkpoint = _next(leader.log.history)
        ages_ms = {
            p.transactional_id: max(p.open_ms, now_ms - each.opened_ms)
            for each, p in zip(written, precommits, strict=True)
        }
        plan = PendingCheckpoint(
            checkpoint=checkpoint,
            base=checkpoint,
            previous=max(0, leader.log.history.checkpoint_latest),
            final=False,
            triggered_ms=self._clock.monotonic_ms() - max(ages_ms.values(), default=0),
            attempt=ATTEMPT,
            acks={(SINK, 0): Ack(SINK, 0, checkpoint, position.after(job, tally, checkpoint).offsets())},
            precommits=precommits,
            ages_ms=ages_ms,
        )
        verdict = self._drive(leader, leader.decide(plan, ()))
        if isinstance(verdict, Refuse):
            self._refuse_superseded(leader, leader.incarnation.incarnation)
            raise SinkFailed(
                f"sink {self.options.sink_id!r}: the job was not decided, and nothing of it is visible: "
                f"{verdict.reason}. Start it again: it is written anew. From its first row to the end of all tasks a "
                f"job has {leader.led.transaction_timeout_ms // 1000} s: as the option transactionTimeout says, or "
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
            self._partitions[topic] = self._topics.describe([topic])[topic].partitions
        return self._partitions[topic]

    def _drive(self, leader: Leader, procedure: Procedure[R], seen: History | None = None) -> R:
        """*seen*: the history, where *leader* has only looked."""

        def answer(request: ask.Request) -> Any:
            match request:
                case ask.KnownOutputs():
                    history = seen or leader.log.history
                    topics = {topic for manifest in history.retained for _, topic, _ in manifest.sinks}
                    wanted = sorted(topics | {self.options.topic} - {""})
                    return tuple((SINK, each, self._count_partitions(each)) for each in wanted)
                case ask.CreateOutputs() | ask.LookAtInputs() | ask.LookAtTopics() | ask.GoOnFrom():
                    return None  # Spark's to see to
                case ask.Together(requests):
                    return self._performer.together(requests, answer)
            return self._performer(request)

        return drive(procedure, answer)

    def _close_log(self) -> None:
        if self._log_requests is not None:
            self._performer.close()
            self._log_requests.close()

    def close(self) -> None:
        """Let go of all connections; nothing is ended by it."""
        self._close_log()
        self._transactions.close()
        self._output_log.close()
        self._topics.close()


_drivers: dict[tuple[Any, ...], SinkDriver] = {}


def with_driver(options: SinkOptions, use: Callable[[SinkDriver], R]) -> R:
    """*use* the driver that this process keeps for *options*; after an error it is gone."""
    told = (options.sink_id, options.topic, options.accept_loss, options.transaction_timeout_ms)
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


def _ignore(step: str, checkpoint: int) -> None:
    """Nobody watches the steps of a sink."""


def _next(history: History) -> int:
    return max(0, history.checkpoint_latest) + 1


def _precommits(flushed: Sequence[Flushed]) -> list[Precommit]:
    return [each.precommit for each in flushed if each.precommit is not None]


def _refuse_too_large(manifest: Manifest) -> None:
    try:
        encode(manifest)
    except InvariantViolation as error:
        places = sum(len(each.written) for each in manifest.committables)
        raise ConfigError(
            f"{manifest.parallelism} tasks have written to {places} partitions in all, too many for one decision "
            f"({error}) Write with fewer tasks: df.coalesce(n)."
        ) from None

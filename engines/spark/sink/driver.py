"""The driver of a Spark job as coordinator of a sink: what it does before the tasks of a job, and after them.

A sink is to the protocol what a pipeline is, without inputs and state: its topic is `<sinkId>.checkpoints`, every
decided job is a checkpoint of it, and the same procedures check, decide, commit, repair and sweep. The commands
`exactlyonce checkpoints` and `exactlyonce reset` know it by its sinkId.

Invariants: no task begins before what older jobs decided is finished and what they did not decide is aborted; a job is
decided once, by the newest life, and only if every transaction of it holds what its task wrote; a decided job is never
aborted, whatever Spark asks for; rows that are skipped, because their job is decided, are those that were written
then, or Spark does not get to go on.

A life is one driver. Spark calls it in two processes, one that plans and one that commits, both of which it may replace
whenever they are idle: the one that plans begins the life, the other takes it up.
"""

from __future__ import annotations

import os
import re
import socket
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from exactlyonce.checkpoint.decision import Decided, Dropped, Life, Precommit, Refuse, decide, finish
from exactlyonce.checkpoint.decision_log import DecisionLog, superseded
from exactlyonce.checkpoint.records.committable import Committable, coordinator_id, transaction_prefix
from exactlyonce.checkpoint.records.encoding import encode
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Incarnation, Manifest, SourceOffset
from exactlyonce.checkpoint.requests import Procedure, drive
from exactlyonce.checkpoint.store.topic import prepare_topic
from exactlyonce.checkpoint.transactions.commit import incarnation_latest, sweep
from exactlyonce.checkpoint.transactions.settling import settle
from exactlyonce.connectors.kafka.log import Log
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.connectors.kafka.transactional_writer import LogRequests
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.performer import Performer
from exactlyonce.engines.spark.sink.options import SinkOptions
from exactlyonce.engines.spark.sink.position import KIND, Job, Position, rows_decided
from exactlyonce.engines.spark.sink.tally import Tally
from exactlyonce.engines.spark.sink.task import SINK, Assignment, Flushed
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import ConfigError, Fenced, Halt, InvariantViolation, Undetermined, require
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.sinks.kafka.writer import SinkFailed

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


class SinkDriver:
    """One process of the driver. An error ends it: whoever goes on makes a new one, which reads what is true."""

    def __init__(self, options: SinkOptions, driver: str) -> None:
        self.options, self.driver = options, driver
        self._clock, config = SystemClock(), options.client()
        self._settings = config.confluent()
        self._transactions, self._topics = Transactions(config), Topics(config)
        self._output_log = Log(config, group=options.sink_id)
        self._life_of_cluster = (self._transactions.cluster_id(), self._transactions.transaction_version())
        self._timeout_ms = options.timeout_within(self._transactions.max_timeout_ms())
        self._partitions: dict[str, int] = {}
        """By topic, as counted since the present job was begun: topics grow."""
        self._log, self._is_open = self._new_log(), False
        self._life: Incarnation | None = None

    def _new_log(self) -> DecisionLog:
        topic = prepare_topic(self._settings, self.options.sink_id, TOPIC_PARTITIONS)
        self._log_requests = LogRequests(self.options.client(), topic)
        self._performer = Performer(
            self.options.client(), self._transactions, self._output_log, self._log_requests, self._timeout_ms,
            _ignore, no_replay,
        )  # fmt: skip
        return DecisionLog(self.options.sink_id, topic, self._clock)

    # --- before a job ---------------------------------------------------------------------------------------------

    def assign(self) -> Assignment:
        """Finish and abort what earlier jobs have left, and say how the tasks of the next one are to write."""
        self._partitions.clear()
        if self.options.topic:
            self._count_partitions(self.options.topic)
        history = self._drive(self._log.look())
        life = history.newest_incarnation if history else None
        if history is None or life is None or life.host != self.driver or history.unfinalized:
            history = self._begin_life(history)
            life = history.newest_incarnation
        assert life is not None
        position = Position.of(history.latest)
        self._sweep(life.incarnation, history)
        hit("coordinator-swept")
        return Assignment(life.incarnation, _next(history), position, self._timeout_ms)

    def _begin_life(self, seen: History | None) -> History:
        """Fence every older driver, and finish what it decided."""
        if seen is not None:
            Position.of(seen.latest)  # a pipeline of that name is left in peace
            self._refuse_fenced(seen)
        history = self._open()
        newest = incarnation_latest(self._transactions.list(transaction_prefix(self.options.sink_id)))
        if newest and not history.incarnation_latest:
            raise Halt(
                f"The topic {self._log.topic.name} is empty, but transactions of life {newest} of sink "
                f"{self.options.sink_id!r} are known to the broker: the topic was deleted, and with it what the sink "
                f"has written.\n  Choices: restore the topic from a replica or backup; or `exactlyonce reset "
                f"{self.options.sink_id}`, after which a batch that Spark writes again is in the output twice."
            )
        self._life = self._drive(self._log.begin(self.driver, os.getpid(), newest))
        hit("coordinator-opened")
        self._finish_decided()
        return self._log.history

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

    def _open(self) -> History:
        """Fence every other process that writes decisions of the sink, and read what is decided."""
        if self._is_open:
            self._log.close()
            self._log_requests.close()
            self._log, self._life = self._new_log(), None
        partitions = [(self._log.topic.name, each) for each in range(self._log.topic.partitions)]
        drive(settle(coordinator_id(self.options.sink_id), partitions), self._performer)
        self._is_open = True
        history = self._drive(self._log.open())
        history.halt_if_damaged()
        return history

    def _finish_decided(self) -> None:
        manifest = self._log.history.unfinalized
        if manifest is None:
            return
        repairs = self._log.history.repairs_of(manifest.checkpoint)
        accepted = self.options.accept_loss == manifest.checkpoint
        try:
            self._drive(finish(manifest, repairs, self._protocol_life(), self._clock.now_ms(), accept_loss=accepted))
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
        self._take_up(incarnation, flushed[0].checkpoint)
        history = self._log.history
        position, tally = Position.of(history.latest), sum((each.tally for each in flushed), start=Tally())
        position.refuse(job, self.options)
        written = [each for each in flushed if each.precommit is not None]
        if position.holds(job):
            position.refuse_other_rows(job, tally, rows_decided(history.retained, position), self.options)
            if job.run:  # which of its function's writes comes next is to be known
                self._decide(job, position, (), tally)
        elif tally.rows and not written:
            raise SinkFailed(
                f"sink {self.options.sink_id!r}: {job} was decided when its tasks began, and is not any more: the "
                f"sink's topic was changed meanwhile. Nothing of it was written now. Start it again."
            )
        elif written or job.query:
            self._sweep(incarnation, history, {p.transactional_id for p in _precommits(written)})
            self._decide(job, position, written, tally)
        self._sweep(incarnation, self._log.history)

    def abort(self) -> None:
        """The job has failed, perhaps after it was decided: then finish it, else abort it. Another driver's is left."""
        history = self._drive(self._log.look())
        life = history.newest_incarnation if history else None
        if history is not None and (life is None or life.host != self.driver):
            return
        opened = self._open()
        if opened.newest_incarnation is None or opened.newest_incarnation.host != self.driver:
            return
        self._life = self._log.resume(opened.newest_incarnation.incarnation)
        self._finish_decided()
        self._sweep(self._life.incarnation, self._log.history)

    def _take_up(self, incarnation: int, checkpoint: int) -> None:
        """Go on with the life that the tasks have written in, knowing all that it has decided: *checkpoint* is next."""
        is_ours = self._life is not None and self._life.incarnation == incarnation
        if is_ours and _next(self._log.history) == checkpoint:
            return
        self._refuse_superseded(incarnation)
        self._open()
        self._life = self._log.resume(incarnation)
        self._finish_decided()

    def _refuse_superseded(self, incarnation: int) -> None:
        """Look before anything is fenced: a driver that was replaced leaves its successor in peace."""
        history = self._drive(self._log.look())
        newest = history.newest_incarnation if history else None
        if newest is not None and newest.incarnation != incarnation:
            raise Fenced(superseded(self.options.sink_id, incarnation, newest))

    def _decide(self, job: Job, position: Position, written: Sequence[Flushed], tally: Tally) -> None:
        """Also where nothing was written: a batch without rows, or one that was written before."""
        precommits, now_ms = _precommits(written), self._clock.now_ms()
        ages_ms = {
            p.transactional_id: max(p.open_ms, now_ms - each.opened_ms)
            for each, p in zip(written, precommits, strict=True)
        }
        life, began_ms = self._protocol_life(), now_ms - max(ages_ms.values(), default=0)
        offsets = position.after(job, tally, _next(self._log.history)).offsets()
        verdict = self._drive(
            decide(
                precommits,
                ages_ms,
                life,
                lambda committables, ends: self._manifest(offsets, began_ms, committables),
                lambda manifest: self._expired(),
            )
        )
        if isinstance(verdict, Refuse):
            self._refuse_superseded(life.incarnation)
            reason = " ".join(filter(None, (verdict.reason, self._log.refusal)))
            raise SinkFailed(
                f"sink {self.options.sink_id!r}: the job was not decided, and nothing of it is visible: {reason}. "
                f"Start it again: it is written anew. From its first row to the end of all tasks a job has "
                f"{self._timeout_ms // 1000} s: as the option transactionTimeout says, or else the broker's "
                f"transaction.max.timeout.ms, but 15 minutes at most."
            )
        if not isinstance(verdict, Decided):
            raise Undetermined(
                f"Whether the job of sink {self.options.sink_id!r} is decided is not known here. Start it again: what "
                f"is true is read then."
            )
        if not verdict.finalized:
            self._finish_decided()

    def _manifest(
        self, offsets: tuple[SourceOffset, ...], began_ms: int, committables: tuple[Committable, ...]
    ) -> Manifest:
        history, topic = self._log.history, self._log.topic
        assert self._life is not None
        topics = sorted({written.topic for each in committables for written in each.written})
        manifest = Manifest(
            pipeline=self.options.sink_id,
            checkpoint=_next(history),
            incarnation=self._life.incarnation,
            attempt=ATTEMPT,
            kind=KIND,
            base=_next(history),
            previous=max(0, history.checkpoint_latest),
            triggered_at_ms=began_ms,
            completed_at_ms=self._clock.now_ms(),
            fingerprint=KIND,
            max_parallelism=len(committables),
            parallelism=len(committables),
            block_partitions=topic.partitions,
            block_end_offsets=(),
            written_bytes=0,
            offsets=offsets,
            operators=(),
            order_logs=(),
            committables=committables,
            sinks=tuple((SINK, each, self._count_partitions(each)) for each in topics),
        )
        _refuse_too_large(manifest)
        return manifest

    def _expired(self) -> Procedure[Dropped]:
        """Old manifests; a sink has no blocks."""
        return tuple(each.checkpoint for each in self._log.history.retained[:-MANIFESTS_RETAINED]), ()
        yield  # never: it makes this a procedure

    # --- both -----------------------------------------------------------------------------------------------------

    def _sweep(self, incarnation: int, history: History, protected: Iterable[str] = ()) -> None:
        """Abort what no decision names and no task of *protected* has flushed.

        An id whose transaction is complete is skipped: it was ended from outside or by the broker, both of which
        raise its epoch, so that its producer is fenced.
        """
        topics = {topic for manifest in history.retained for _, topic, _ in manifest.sinks}
        topics |= {self.options.topic} - {""}
        outputs = {(topic, each) for topic in topics for each in range(self._count_partitions(topic))}
        below = (incarnation + 1, 0)
        procedure = sweep(
            self.options.sink_id, incarnation, ATTEMPT,
            protected=set(protected), fenced_below=below, outputs=outputs,
        )  # fmt: skip
        self._drive(procedure)

    def _count_partitions(self, topic: str) -> int:
        if topic not in self._partitions:
            self._partitions[topic] = self._topics.describe([topic])[topic].partitions
        return self._partitions[topic]

    def _protocol_life(self) -> Life:
        assert self._life is not None
        cluster_id, version = self._life_of_cluster
        return Life(
            self.options.sink_id,
            self._life.incarnation,
            ATTEMPT,
            cluster_id,
            version,
            self._timeout_ms,
            (self._life.incarnation + 1, 0),
        )

    def _drive(self, procedure: Procedure[R]) -> R:
        return drive(self._log.recording(procedure), self._performer)

    def close(self) -> None:
        """Let go of all connections; nothing is ended by it."""
        self._log.close()
        self._log_requests.close()
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

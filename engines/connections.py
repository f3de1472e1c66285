"""The connections of one leader: its clients, its decision log, and the answers to its procedures' requests.

Every leader is opened here: of a run, of bounded work, of a Spark sink, of a command. Invariants: making one connects
to nothing, and `lead` fences nobody; only `lead` fills in the process and cluster of a leader. An EndTxn with an
unknown answer is repeated unchanged; a broker that is away is a pause, not a failure. One thread at a time uses them,
and each client: requests that go out together are sequential within a client.

A command that acts as a leader is a `short_incarnation`: it fences, begins, does one thing, and ends. Only the leader's
procedures act; a store without a description is asked nothing; no checkpoint expires, for only a run knows how many are
kept. A last look right before the fence spares a run that has begun meanwhile (but see `last_look`).
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import msgspec

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.block_storage import BlockStorage
from exactlyonce.checkpoint.commits.stores import StagingSink
from exactlyonce.checkpoint.decision_log import APPEND_TIMEOUT_MS, DecisionLog
from exactlyonce.checkpoint.kept_blocks import BlockRetention, Retention
from exactlyonce.checkpoint.leader import UPKEEP_INTERVAL_S, Leader
from exactlyonce.checkpoint.leader_config import LeaderConfig
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Committable, Finalized, Manifest, Repair, TopicInfo, TransactionalId
from exactlyonce.checkpoint.records.storage_url import TOPIC
from exactlyonce.checkpoint.requests import EndAnswer, Fate, Procedure, R, drive
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.checkpoint.succession import last_look
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_topic
from exactlyonce.connectors.kafka.checkpoint_topic.log_requests import LogRequests
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.kafka_protocol import Places
from exactlyonce.connectors.kafka.log import HELD, Log
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.connectors.trace import Trace
from exactlyonce.engines.blocks import Removals, block_storage, references_or_why
from exactlyonce.engines.external_checks.stores import PipelineStores
from exactlyonce.engines.processes import living, this_process
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import BrokerUnavailable, ConfigError, ExactlyOnceError, StorageUnavailable
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.retries import OF_BROKER, retried
from exactlyonce.sinks.kafka.copying import copy_transaction

TIMEOUT_MS = 30_000
"""The time that a question about transactions waits for a broker that is away."""
_AFTER_APPEND = {
    Manifest: ("decided", "coordinator-decided"),
    Finalized: ("finalized", "coordinator-finalized"),
    Repair: ("repair recorded", "repair-recorded"),
}

Replay = Callable[[Manifest, Committable, str], Committable | str]
"""(manifest, its lost committable, new transactional id) -> the new committable, or why there is none. It asks the
leader nothing."""
NO_REPLAY = "the run was told to halt instead (--repair halt)."
NO_REPLAY_HERE = "this command computes nothing again: run the pipeline, which replays the interval."
STORE_TIMEOUT_MS = 60_000
"""How long a command waits for a store that does not answer."""
ALL_RETAINED = CheckpointSettings(num_retained=2**31)
NOTED_INTERVAL_S = 30.0


def with_heartbeat(
    beat: Callable[[], None], work: Callable[[Callable[[], None]], R], interval_s: float | None = None
) -> R:
    """Do *work*, which may take long, while another thread repeats *beat*. *work* must not ask the leader.

    *interval_s* lies between two beats; None: the interval of the leader's upkeep.

    An error of *beat* is raised at the end, or by the function that *work* is given and should call often.
    """
    ended = threading.Event()
    raised: list[Exception] = []

    def look() -> None:
        if raised:
            raise raised[0]

    def go_on() -> None:
        while not ended.wait(UPKEEP_INTERVAL_S if interval_s is None else interval_s):
            try:
                beat()
            except Exception as error:
                raised.append(error)
                return

    thread = threading.Thread(target=go_on, name="heartbeat", daemon=True)
    thread.start()
    try:
        return work(look)
    finally:
        ended.set()
        thread.join()
        look()


class _Lane(enum.Enum):
    """A client and the thread that uses it."""

    TRANSACTIONS = "transactions"
    LOG = "log"
    LOOKS = "looks"
    BLOCKS = "blocks"
    TOPICS = "topics"


_LANES: dict[type, _Lane] = {
    ask.InitTransactions: _Lane.LOG,
    ask.ProduceBatches: _Lane.LOG,
    ask.EndTransaction: _Lane.LOG,
    ask.LookOnce: _Lane.LOOKS,
    ask.FirstOffsets: _Lane.BLOCKS,
    ask.LookAtTopics: _Lane.TOPICS,
    ask.SetPosition: _Lane.TOPICS,
}
"""All others ask about the sinks' transactions, are never asked together with another, or ask nobody."""


@dataclass
class Performer:
    """Answers the requests of `checkpoint.requests`."""

    config: ClientConfig
    transactions: Transactions
    output_log: Log
    log: LogRequests
    transaction_timeout_ms: int
    step: Callable[[str, int], None] = lambda step, checkpoint: None
    """Hears of durable records."""
    replay: Replay | str = NO_REPLAY
    """A string says why nothing is replayed."""
    note: Callable[[str], None] = lambda text: None
    """Gets notes on waits."""
    storage: str = TOPIC
    """The storage of new blocks."""
    beat: Callable[[], None] = lambda: None
    """Called now and then while lost output is written again."""

    def __post_init__(self) -> None:
        self._removals = Removals(self._blocks, self.note)
        self._noted_s = float("-inf")
        self.visible_s = 0.0
        """The monotonic time when the last decision with output became visible, or the last one without was made."""
        self._lanes = ThreadPoolExecutor(len(_Lane), "lane")

    def close(self) -> None:
        """End the threads; the clients stay with their owners."""
        self._removals.close()
        self._lanes.shutdown()

    def _blocks(self, storage: str) -> BlockStorage:
        """A storage for one question; the caller closes it."""
        return block_storage(self.config, self.log.topic, storage)

    def __call__(self, request: ask.Request) -> Any:
        match request:
            case ask.DescribeTransactions(ids):
                return self.transactions.describe(ids)
            case ask.DescribeProducers(partitions):
                try:
                    return self.transactions.producers(partitions)
                except BrokerUnavailable as error:
                    self._waits(error)
                    raise
            case ask.ListTransactions(prefix):
                return self.transactions.list(prefix)
            case ask.EndTransactions(endings, commit):
                return self._end(endings, commit)
            case ask.RewriteMarkers(name, producer_id, partitions, commit, epoch):
                with suppress(BrokerUnavailable):  # the partitions, which are asked next, show whether it was done
                    self.transactions.rewrite_markers(ask.Ending(name, producer_id, epoch), partitions, commit=commit)
                return None
            case ask.Reached(place):
                return hit(place)
            case ask.Appended(records):
                return self._appended(records)
            case ask.Together(requests):
                return self.together(requests, self)
            case ask.ScanBlocks(start_offsets, storage):
                return self._looked(storage, lambda blocks: blocks.since(start_offsets))
            case ask.FindReferences(manifest, needed):
                return self._looked(manifest.storage, lambda blocks: references_or_why(manifest, blocks), needed=needed)
            case ask.RemoveBlocks(blocks):
                return self._removals.add(blocks)
            case ask.Look(committable):
                return self._fate(committable)
            case ask.CopyTransaction(committable, name):
                copied = with_heartbeat(self.beat, lambda _: self._copied(committable, name))
                hit("repair-copied")
                return copied
            case ask.ReplayTransaction(manifest, lost, name):
                replay = self.replay
                if isinstance(replay, str):
                    return replay
                replayed = with_heartbeat(self.beat, lambda _: replay(manifest, lost, name))
                hit("repair-replayed")
                return replayed
        return self.log(request)

    def _fate(self, committable: Committable) -> Fate:
        """The fate of *committable* for readers. The error of a look that gives up names who holds them back."""
        try:
            return self.output_log.fate(committable)
        except BrokerUnavailable as error:
            if HELD not in str(error):
                raise
            holders = ""
            with suppress(ExactlyOnceError):
                holders = self._holders(committable)
            raise BrokerUnavailable(f"{error}{holders}") from None

    def _holders(self, committable: Committable) -> str:
        """Sentences about the transactions of others that are open before the records of *committable*."""
        first = {(written.topic, written.partition): written.first_offset for written in committable.written}
        holders = {
            producer.producer_id
            for producer in self.transactions.producers(first)
            if producer.transaction_start_offset is not None
            and producer.transaction_start_offset < first[producer.topic, producer.partition]
        }
        return "".join(f" {_holder(self.transactions.named(id), id)}" for id in sorted(holders))

    def _copied(self, lost: Committable, name: str) -> Committable | str:
        """Uses a client of its own, for heartbeats go on meanwhile."""
        with closing(Transactions(self.config)) as transactions:
            return copy_transaction(self.config, transactions, self.output_log, lost, name, self.transaction_timeout_ms)

    def together(
        self, requests: tuple[ask.Request, ...], perform: Callable[[ask.Request], Any]
    ) -> tuple[ask.Answer, ...]:
        """The answers of *perform*. Each lane has a thread: the first lane this one, the others their own."""
        lanes: dict[_Lane, list[int]] = {}
        for number, request in enumerate(requests):
            lanes.setdefault(_LANES.get(type(request), _Lane.TRANSACTIONS), []).append(number)

        def answers(numbers: list[int]) -> list[ask.Answer]:
            return [ask.answered(requests[number], perform) for number in numbers]

        first, *others = lanes.values()
        futures = [self._lanes.submit(answers, numbers) for numbers in others]
        by_number = dict(zip(first, answers(first), strict=True))
        for numbers, future in zip(others, futures, strict=True):
            by_number.update(zip(numbers, future.result(), strict=True))
        return tuple(by_number[number] for number in range(len(requests)))

    def _looked(self, storage: str, look: Callable[[BlockStorage], Any], *, needed: bool = False) -> Any:
        """The result of *look* at *storage*. A storage that the pipeline has left is not waited for, unless *needed*,
        for it may be gone: a string says why it cannot be read."""
        if needed or storage in (self.storage, TOPIC):
            with closing(self._blocks(storage)) as blocks:
                return self._persistently(lambda: look(blocks))
        try:
            with closing(self._blocks(storage)) as blocks:
                return look(blocks)
        except (StorageUnavailable, ConfigError) as error:
            return str(error)

    def _persistently(self, asked: Callable[[], Any]) -> Any:
        """The answer of *asked*, repeated while the broker is away, for as long as an append."""

        def attempt() -> Any:
            try:
                return asked()
            except BrokerUnavailable as error:
                self._waits(error)
                raise

        deadline_s = time.monotonic() + APPEND_TIMEOUT_MS / 1000
        return retried(attempt, BrokerUnavailable, OF_BROKER, deadline_s, clock=time.monotonic, sleep=self.log.sleep)

    def _end(self, endings: tuple[ask.Ending, ...], commit: bool) -> Sequence[EndAnswer]:
        try:
            answers = self.transactions.end_all(endings, commit=commit)
        except BrokerUnavailable as error:
            self._waits(error)
            return [EndAnswer.BUSY] * len(endings)
        if commit and endings:
            self.visible_s = time.monotonic()
            hit("coordinator-committed")
        return answers

    def _waits(self, error: BrokerUnavailable) -> None:
        """Note a wait now and then: a decision is committed, however long that takes."""
        if time.monotonic() >= self._noted_s + NOTED_INTERVAL_S:
            self._noted_s = time.monotonic()
            what = "the checkpoint storage" if isinstance(error, StorageUnavailable) else "a broker"
            self.note(f"waiting for {what}: {error}")

    def _appended(self, records: tuple[Manifest | Finalized | Repair, ...]) -> None:
        for record in records:
            name, failpoint = _AFTER_APPEND[type(record)]
            if isinstance(record, Manifest):
                self.visible_s = time.monotonic()
            self.step(name, record.checkpoint)
            hit(failpoint)


def _holder(name: str | None, producer_id: int) -> str:
    """A sentence about the transaction of *name* that holds readers back, with the remedy.

    >>> _holder("eo:orders:out:0:1.0:0", 7)
    'It is eo:orders:out:0:1.0:0 of pipeline orders: run that, or `exactlyonce transactions abort orders`.'
    """
    known = TransactionalId.parse(name or "")
    if known is not None:
        do = f"run that, or `exactlyonce transactions abort {known.pipeline}`"
        return f"It is {name} of pipeline {known.pipeline}: {do}."
    if name is not None:
        return f"It is {name}, none of exactlyonce's: let the program with that transactional id end it."
    return f"Its producer id is {producer_id}, and `kafka-transactions.sh find-hanging` shows more."


class Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)


class Connections:
    """See the module. `open_log` comes first, then `lead` where there is a leader."""

    log: DecisionLog
    log_requests: LogRequests
    performer: Performer
    leader: Leader

    def __init__(
        self,
        client: ClientConfig,
        pipeline: str,
        note: Callable[[str], None] = lambda text: None,
        *,
        timeout_ms: int = TIMEOUT_MS,
    ) -> None:
        """*note* gets notes for a person."""
        self.client, self.pipeline, self.note = client, pipeline, note
        self.clock = SystemClock()
        self.trace = Trace()
        self.places = Places()
        """The brokers of the sinks' transactions."""
        self.answers: list[Callable[[ask.Request], Any]] = []
        """Asked in this order, before the performer. Each returns `NotImplemented` for requests of others."""
        self._opened = ExitStack()
        self._open_log = ExitStack()
        self.transactions = self.keep(
            Transactions(client, timeout_ms=timeout_ms, observe=self.trace.client(), places=self.places)
        )
        self.output_log = self.keep(Log(client, group=pipeline))
        self.topics = self.keep(Topics(client, observe=self.trace.client()))

    def keep(self, resource: C) -> C:
        """*resource*, which `close` closes."""
        return self._opened.enter_context(closing(resource))

    def open_log(
        self,
        topic: TopicInfo,
        *,
        transaction_timeout_ms: int = 0,
        replay: Replay | str = NO_REPLAY,
        step: Callable[[str, int], None] = lambda step, checkpoint: None,
        storage: str = TOPIC,
    ) -> DecisionLog:
        """Open a decision log in *topic*, in place of the last one, that has fenced nobody; see `Performer`."""
        self._open_log.close()
        self.log = DecisionLog(self.pipeline, topic, self.clock)
        self.log_requests = LogRequests(self.client, topic, observed=self.trace.client)
        self.performer = Performer(
            config=self.client, transactions=self.transactions, output_log=self.output_log, log=self.log_requests,
            transaction_timeout_ms=transaction_timeout_ms, step=step, replay=replay, note=self.note, storage=storage,
            beat=self._beat,
        )  # fmt: skip
        for opened in (self.log_requests, self.performer):
            self._open_log.enter_context(closing(opened))
        return self.log

    def lead(self, config: LeaderConfig, retention: Retention) -> Leader:
        """A leader over the open log that has fenced nobody."""
        host, process, machine = this_process()
        filled = replace(
            config, host=config.host or host, process=process, machine=machine,
            cluster_id=self.transactions.cluster_id(), transaction_version=self.transactions.transaction_version(),
        )  # fmt: skip
        self.leader = Leader(filled, self.log, retention, self.clock, self.note)
        return self.leader

    def begin(self) -> History:
        """Begin an incarnation: see `Leader.begin`."""
        return self._frozen(self.leader.begin())

    def open(self) -> History:
        """Fence every other writer of decisions: see `Leader.open`."""
        return self._frozen(self.leader.open())

    def _frozen(self, opening: Procedure[R]) -> R:
        """The result of *opening*. From then on the log has the partitions of its first manifest."""
        result = self.drive(opening)
        self.log_requests.freeze(self.log.topic)
        return result

    def _beat(self) -> None:
        self.drive(self.leader.beat())

    def drive(self, procedure: Procedure[R]) -> R:
        return drive(procedure, self._ask)

    def _ask(self, request: ask.Request) -> Any:
        self.trace.next_round()
        return self._answer(request)

    def _answer(self, request: ask.Request) -> Any:
        if isinstance(request, ask.Together):
            return self.performer.together(request.requests, self._answer)
        for answers in self.answers:
            if (answer := answers(request)) is not NotImplemented:
                return answer
        return self.performer(request)

    def close(self) -> None:
        """Close all connections; this ends no incarnation."""
        with self._opened:
            self._open_log.close()


@contextmanager
def short_incarnation(
    config: ClientConfig,
    seen: History,
    graph: LogicalGraph | None,
    note: Callable[[str], None],
    *,
    take_over: bool = False,
    require: Callable[[History], None] = lambda history: None,
) -> Iterator[Connections]:
    """The connections of a leader that has begun. It ends after the block, unless that raises.

    ConfigError right before the fence if an incarnation has begun since *seen*, or one lives, unless *take_over*.
    *require* gets the decisions of that moment, and may raise another objection.
    """
    with connected(config, seen.pipeline, graph, note) as connections:
        log = connections.log
        now = connections.drive(last_look(seen.pipeline, log.peek_at_stable, connections.clock))
        require_unchanged(seen, now, take_over=take_over)
        require(now)
        connections.begin()
        yield connections
        connections.drive(log.heartbeat(ended=True))


def require_unchanged(seen: History, now: History, *, take_over: bool) -> None:
    """ConfigError if an incarnation has begun since *seen*, or the newest one lives, unless *take_over*."""
    newest, alive = now.newest_incarnation, living(now, SystemClock().now_ms())
    if now.incarnation_latest != seen.incarnation_latest:
        who = f" (process {newest.process} on {newest.host})" if newest is not None else ""
        raise ConfigError(
            f"A new instance of {now.pipeline}{who} has begun since this command has looked. Nothing was changed, and "
            f"it was not fenced. Run this again."
        )
    if alive is not None and not take_over:
        raise ConfigError(
            f"{now.pipeline} runs: process {alive.process} on {alive.host} goes on. Nothing was changed. Run this "
            f"again."
        )


@contextmanager
def connected(
    config: ClientConfig, pipeline: str, graph: LogicalGraph | None, note: Callable[[str], None]
) -> Iterator[Connections]:
    """The connections of a leader that has not begun."""
    with closing(Connections(config, pipeline, note)) as connections:
        topic, history = read_topic(config, pipeline)
        storage = history.storage
        timeout_ms = connections.transactions.max_timeout_ms()
        log = connections.open_log(topic, transaction_timeout_ms=timeout_ms, replay=NO_REPLAY_HERE, storage=storage)
        staging: Mapping[str, StagingSink] = {}
        if graph is not None:
            blocks = connections.keep(block_storage(config, topic, storage))
            stores = connections.keep(PipelineStores(graph, blocks, config, note))
            stores.check()
            staging = stores.staging
            connections.answers.append(stores)

        def outputs(request: ask.Request) -> Any:
            match request:
                case ask.CreateOutputs():
                    return None  # decided output was written to existing topics
                case ask.KnownOutputs():
                    return log.history.latest.sinks if log.history.latest is not None else ()
            return NotImplemented

        connections.answers.append(outputs)
        leader_config = LeaderConfig(
            pipeline=pipeline, transaction_timeout_ms=timeout_ms, fingerprint="", max_parallelism=1, parallelism=1,
            bounded=True, staging=staging, store_timeout_ms=STORE_TIMEOUT_MS, storage=storage,
        )  # fmt: skip
        settings = msgspec.structs.replace(ALL_RETAINED, storage=storage)
        connections.lead(leader_config, BlockRetention(settings, staging=bool(staging)))
        yield connections

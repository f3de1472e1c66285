"""One incarnation of a simulated coordinator: the host of the shipped job, and the answers to its leader.

It has neither processes nor threads: a turn of the job is one step, and so is each request of a lane. It can be paused
or killed between any two requests. Savepoints and repairs of lost transactions are for subclasses.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from exactlyonce.checkpoint import events, requests
from exactlyonce.checkpoint.block_storage import DamagedBlock, Scanned
from exactlyonce.checkpoint.coordinator import Coordinator
from exactlyonce.checkpoint.decision_log import DECISIONS
from exactlyonce.checkpoint.kept_blocks import BlockRetention
from exactlyonce.checkpoint.leader import Leader
from exactlyonce.checkpoint.leader_config import LeaderConfig
from exactlyonce.checkpoint.records.encoding import Block, decode
from exactlyonce.checkpoint.records.manifest import BlockRef, ChannelLog, Committable, Manifest, indexes_of, named_by
from exactlyonce.checkpoint.requests import Answered, EndAnswer, Fate, Producer, WriteAnswer
from exactlyonce.checkpoint.settings import DELETE as DELETES
from exactlyonce.checkpoint.settings import ExponentialDelay
from exactlyonce.connectors.kafka.checkpoint_topic.log_requests import WRITE_ANSWERS
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.topics import Topic, Topics
from exactlyonce.connectors.kafka.transactions import ANSWERS
from exactlyonce.engines.external_checks.preflight import Offsets, PipelineTopics
from exactlyonce.engines.external_checks.stores import PipelineStores, stages
from exactlyonce.engines.local.job import Failed, Heard, Job, Lost, Then
from exactlyonce.engines.local.reporting import EventReporter, Report
from exactlyonce.engines.options import RunOptions
from exactlyonce.engines.runtime.in_flight import listed_in
from exactlyonce.pipeline.errors import (
    BrokerUnavailable,
    EndedAtOnce,
    EndedEarly,
    ExactlyOnceError,
    Fenced,
    InvariantViolation,
    StoppedShort,
    TopicError,
    require,
)
from exactlyonce.sinks.write_ahead.writer import INDEXED
from exactlyonce.sinks.write_ahead.writer import decode_index as list_of_rows
from exactlyonce.state.chain import decode_index
from exactlyonce.testing.broker.interface import Error, Isolation, NoAnswer, Record
from exactlyonce.testing.simulation.clients import Awaited, FetchedBlocks, Steps

if TYPE_CHECKING:
    from exactlyonce.testing.simulation.world import Process, SimulatedWorld

TIMEOUT_MAX_MS = 20_000
"""Limits of the broker: everything goes faster here."""


class StoreAnswers:
    """Answers as a process does, by the shipped `PipelineStores`."""

    def __init__(self, coordinator: SimulatedCoordinator) -> None:
        self.coordinator, self.world = coordinator, coordinator.world
        self._blocks = FetchedBlocks()
        self._stores = PipelineStores(self.world.graph, self._blocks)
        self.staging = self._stores.staging

    def __call__(self, request: requests.FenceStore | requests.CleanStore | requests.CommitStaged) -> Steps:
        """The answer. Blocks are read anew for each request; before a commit the process may end or sleep."""
        self._blocks.found.clear()
        while True:
            try:
                return self._stores(request)
            except Awaited as wanted:
                refs = wanted.refs
            yield from self._blocks.get(self.world, refs)
            self.coordinator.step_name = "store-committing"
            self.world.faults.before_request(self.coordinator)
            self.world.faults.before_commit(self.coordinator)
            yield None


LOOK_PAUSE_MS = 20
LOOK_TIMEOUT_MS = 30_000
"""The broker has ended whatever was open and not lost by then."""
LANE_PAUSE_MS = 3
READERS_HELD = "are held by an open transaction"
"""In the error of a look at records that gave up."""


class SimulatedJob(Job):
    """The shipped job, whose notes go to the world."""

    def __init__(self, coordinator: SimulatedCoordinator) -> None:
        self.coordinator, self.world = coordinator, coordinator.world
        options = RunOptions(
            ClientConfig({"bootstrap.servers": "simulated:9092"}),
            self.world.settings,
            parallelism=coordinator.plan.parallelism,
            until="latest",
            drain=self.world.drains,
        )
        report = Report(self.world.graph.pipeline_id, [EventReporter(self._told)], str)
        super().__init__(coordinator.plan, options, ExponentialDelay(20, 200), coordinator, report)

    def _told(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "note":
            self.world.note(f"{self.coordinator}: {event['text']}")


class SimulatedCoordinator:
    """The `Host` of its job."""

    def __init__(self, world: SimulatedWorld) -> None:
        self.world, self.clock = world, world.clock
        self.alive, self.paused_until_ms = True, 0
        self.plan = world.plan
        self.stores = self._store_answers()
        self.log = world.decision_log(world.deadline_ms() - world.clock.monotonic_ms())
        self.leader = self._leader()
        self._log_answers = LogAnswers(world)
        self.topics = PipelineTopics(
            cast(Topics, SimulatedTopics(world)), world.graph, self.plan.parallelism, world.note,
            bounded=False,
        )  # fmt: skip
        self.workers: list[Process] = []
        self.step_name = "open"
        self.carries = False
        """Whether the checkpoint that is being decided carries output of aborted ones."""
        self._inbox: deque[Callable[[], None]] = deque()
        self._procedures: deque[tuple[requests.Procedure[Any], Then, Failed]] = deque()
        """Those that wait for their turn."""
        self._looks: deque[Steps] = deque()
        """The looks at producers that wait for theirs."""
        self.job = self._job()
        world.spawn(self, self._main())
        world.spawn(self, self._broker())

    def _store_answers(self) -> StoreAnswers:
        return StoreAnswers(self)

    def _leader(self) -> Leader:
        known_blocks = BlockRetention(self.world.settings, staging=stages(self.world.graph))
        return Leader(self.leader_config(), self.log, known_blocks, self.clock, self._note)

    def _job(self) -> Job:
        return SimulatedJob(self)

    def leader_config(self) -> LeaderConfig:
        """The settings of the shipped leader."""
        world = self.world
        return LeaderConfig(
            pipeline=world.graph.pipeline_id, host="host", process=1, cluster_id="cluster", transaction_version=2,
            transaction_timeout_ms=world.transaction_timeout_ms, fingerprint=world.fingerprint,
            max_parallelism=world.graph.max_parallelism, parallelism=self.plan.parallelism,
            staging=self.stores.staging, store_timeout_ms=world.store_timeout_ms, storage=world.settings.storage,
            deletes=world.settings.retention == DELETES,
        )  # fmt: skip

    def _note(self, text: str) -> None:
        self.world.note(f"{self}: {text}")

    def monotonic_s(self) -> float:
        return self.clock.monotonic_ms() / 1000

    @property
    def core(self) -> Coordinator:
        return self.job.core

    # --- threads ------------------------------------------------------------------------------------------------

    def _main(self) -> Steps:
        self.job.begin()
        while self.job.outcome is None:
            now_ms = self.clock.monotonic_ms()
            self.job.turn()
            yield None if self._inbox else now_ms + LANE_PAUSE_MS
        error = self.job.outcome.error
        clean = isinstance(error, (EndedEarly, StoppedShort)) and self.job.outcome.manifest is not None
        self.world.ended(self, events.End(self.job.outcome.manifest, None if clean else error))

    def _broker(self) -> Steps:
        while True:
            if self._procedures:
                procedure, *then = self._procedures.popleft()
                yield from self._called(self._run(procedure), *then)
            else:
                yield self.clock.monotonic_ms() + LANE_PAUSE_MS

    def _producers(self) -> Steps:
        while self._looks:
            yield self.clock.monotonic_ms() + LANE_PAUSE_MS
            yield from self._looks[0]
            self._looks.popleft()

    def _called(self, steps: Steps, then: Then, failed: Failed) -> Steps:
        try:
            answer = yield from steps
        except ExactlyOnceError as error:
            self._inbox.append(partial(failed, error))
        else:
            self._inbox.append(partial(then, answer))

    # --- for the job --------------------------------------------------------------------------------------------

    def open(self, then: Callable[[Leader], None], failed: Failed) -> None:
        self.lead(self._recovered(), then, failed)

    def _recovered(self) -> requests.Procedure[Leader]:
        self.topics.look_at_inputs()
        self.topics.look_at_outputs()
        yield from self._begun()
        yield from self.leader.recover()
        return self.leader

    def _begun(self) -> requests.Procedure[None]:
        yield from self.leader.begin()

    def lead(self, procedure: requests.Procedure[Any], then: Then, failed: Failed) -> None:
        self._procedures.append((procedure, then, failed))

    def decide(self, plan: events.PendingCheckpoint, pinned: Iterable[int], then: Then, failed: Failed) -> None:
        self.lead(self.leader.decide(plan, pinned), then, failed)

    def publish_offsets(self, failed: Failed) -> None:
        """Nobody looks at them."""
        self.lead(_nothing(), lambda _: None, failed)

    def describe(self, transactional_id: str, then: Then, failed: Failed) -> None:
        """It is asked again until it is answered."""
        self._looks.append(self._called(self._described(transactional_id), then, failed))
        if len(self._looks) == 1:
            self.world.spawn(self, self._producers())

    def _described(self, transactional_id: str) -> Steps:
        states = yield from self.world.until_answered("describe_transactions", [transactional_id])
        return states[transactional_id]

    def look_at_mailbox(self, then: Then, failed: Failed) -> None:
        """Nobody asks."""
        then(None)

    @property
    def added(self) -> Offsets:
        return self.topics.added

    def arrived(self) -> Iterator[Callable[[], None]]:
        if self._inbox:
            yield self._inbox.popleft()

    def post(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)

    def hurry(self, why: EndedAtOnce) -> None:
        """Nothing is waited for here."""

    def start_workers(self, attempt: int, manifest: Manifest, heard: Heard, lost: Lost) -> None:
        self._heard, self._lost = heard, lost
        self.workers = self.world.start_workers(self, self.number, attempt, manifest, self.topics.offsets)

    def kill_workers(self) -> bool:
        for worker in self.workers:
            worker.kill()
        self.workers = []
        return True

    def finish_workers(self, heard: Callable[[object], None]) -> None:
        self.kill_workers()

    # --- what workers say ---------------------------------------------------------------------------------------

    def hear(self, worker: Process, message: object) -> None:
        """A message from *worker*; from one of another attempt it is not read."""
        self._inbox.append(lambda: self._heard(worker, message) if worker in self.workers else None)

    def lose(self, worker: Process, reason: str) -> None:
        """The end of *worker*'s control channel."""
        self._inbox.append(lambda: self._lost(reason) if worker in self.workers else None)

    # --- recovery -----------------------------------------------------------------------------------------------

    def _references(self, manifest: Manifest) -> Generator[int | None, None, set[BlockRef]]:
        listed: list[BlockRef] = []
        for ref in indexes_of(manifest):
            listed += [each.ref for each in decode_index((yield from self.block(ref))).blocks]
        for ref in (ref for each in manifest.staged if each.body == INDEXED for ref in each.blocks):
            listed += list_of_rows((yield from self.block(ref)))
        for log in manifest.channel_logs:
            listed += yield from self.blocks_of(log)
        return {*named_by(manifest), *listed}

    def blocks_of(self, log: ChannelLog) -> Generator[int | None, None, list[BlockRef]]:
        found: list[BlockRef] = []
        for ref in log.blocks:
            found += listed_in((yield from self.block(ref))) if log.indexed else [ref]
        return found

    def block(self, ref: BlockRef) -> Steps:
        if (outside := self.world.outside) is not None:
            with suppress(DamagedBlock):
                return (yield from outside.until_answered(partial(outside.block, ref))).body
            require(not self.world.is_newest(self), f"block {ref.key} is there, as the manifest says")
            raise Fenced("The checkpoints of a zombie have gone.")
        answer = yield from self.world.until_answered(
            "fetch", self.world.topic.name, ref.partition, ref.offset, Isolation.READ_UNCOMMITTED
        )
        for found in answer.records[:1]:
            if (found.offset, found.key) == (ref.offset, ref.key):
                return decode(found.value, Block).body
        require(not self.world.is_newest(self), f"block {ref.key} is where the manifest says")
        raise Fenced("The checkpoints of a zombie have gone.")

    # --- requests -----------------------------------------------------------------------------------------------

    def _run(self, procedure: requests.Procedure[Any]) -> Steps:
        return requests.relayed(procedure, self._asked)

    def _asked(self, request: requests.Request) -> Steps:
        self.step_name = type(request).__name__
        if isinstance(request, requests.Reached) and request.place.startswith("store-"):
            self.step_name = request.place
        self.world.faults.before_request(self)
        yield None
        return (yield from self._answer(request))

    def _answer(self, request: requests.Request) -> Steps:
        match request:
            case requests.DescribeTransactions(ids):
                return (yield from self._retrying("describe_transactions", ids))
            case requests.DescribeProducers(partitions):
                return (yield from self._retrying("describe_producers", partitions))
            case requests.ListTransactions(prefix):
                return (yield from self._retrying("list_transactions", prefix))
            case requests.EndTransactions(endings, commit):
                return (yield from self._ended(endings, commit))
            case requests.RewriteMarkers():
                return (yield from self._rewritten(request))
            case requests.Together(several):
                return (yield from self._answer_all(several))
            case requests.Appended() | requests.Reached():
                pass
            case requests.ScanBlocks(start_offsets, storage):
                if storage and self.world.outside is not None:
                    return (yield from self.world.outside.scanned(start_offsets))
                return (yield from scanned(self.world, start_offsets))
            case requests.RemoveBlocks(blocks):
                assert self.world.outside is not None, "blocks lie outside of the topic"
                self.world.outside.let_go(self, [each.ref for each in blocks])
            case requests.FindReferences(manifest):
                if self.world.faults.unread(request):
                    assert self.world.outside is not None
                    self.world.outside.not_known[self.log.incarnation.incarnation].add(manifest.checkpoint)
                    self.world.seen["references not known"] += 1
                    return "it is away"
                return frozenset((yield from self._references(manifest)))
            case requests.Look(committable):
                return (yield from self._looked(committable))
            case requests.FenceStore() | requests.CleanStore() | requests.CommitStaged():
                return (yield from self.stores(request))
            case requests.Pause(duration_ms):
                yield self.world.clock.monotonic_ms() + duration_ms
            case _:
                answer = self.topics(request)
                return (yield from self._log_answers(request)) if answer is NotImplemented else answer
        return None

    def _answer_all(self, several: tuple[requests.Request, ...]) -> Steps:
        answers: dict[int, requests.Answer] = {}
        for number in self.world.faults.shuffled(range(len(several))):
            try:
                answers[number] = requests.Answer((yield from self._asked(several[number])))
            except ExactlyOnceError as error:
                answers[number] = requests.Answer(error=error)
        return tuple(answers[number] for number in range(len(several)))

    def _retrying(self, operation: str, *arguments: Any) -> Steps:
        deadline_ms = self.world.deadline_ms()
        while True:
            try:
                return self.world.ask(operation, *arguments)
            except NoAnswer:
                if self.world.clock.monotonic_ms() >= deadline_ms:
                    raise BrokerUnavailable(f"{operation} was not answered") from None
                yield self.world.clock.monotonic_ms() + 10

    def _ended(self, endings: tuple[requests.Ending, ...], commit: bool) -> Steps:
        answers = []
        for each in endings:
            try:
                error = self.world.ask("end_txn", each.transactional_id, each.producer_id, each.epoch, commit)
                answers.append(ANSWERS[error])
                self.world.faults.after_end()
            except NoAnswer:
                answers.append(EndAnswer.BUSY)
            yield None
        return answers

    def _rewritten(self, request: requests.RewriteMarkers) -> Steps:
        """A transaction without records at the id's epoch; broken off at whatever stands in the way."""
        name, producer_id, epoch, commit = request.transactional_id, request.producer_id, request.epoch, request.commit
        try:
            for topic, partition in request.partitions:
                self.world.faults.before_request(self)
                yield None
                error = self.world.ask("add_to_transaction", name, producer_id, epoch, topic, partition)
                if error is not Error.NONE:
                    return
            self.world.faults.before_request(self)
            yield None
            self.world.ask("end_txn", name, producer_id, epoch, commit)
            self.world.seen["markers rewritten"] += 1
        except NoAnswer:
            pass

    def _looked(self, committable: Committable) -> Steps:
        """The view of readers at the first record, once the last stable offset has passed it."""
        self.world.seen["look"] += 1
        first, ours = committable.written[0], (committable.producer_id, committable.epoch)
        deadline_ms = self.world.clock.monotonic_ms() + LOOK_TIMEOUT_MS
        while True:
            place = (first.topic, first.partition, first.first_offset)
            visible = yield from self.world.until_answered("fetch", *place, Isolation.READ_COMMITTED)
            if visible.last_stable_offset > first.first_offset:
                break
            if self.world.clock.monotonic_ms() > deadline_ms:
                raise BrokerUnavailable(f"readers of {first.topic}-{first.partition} {READERS_HELD}")
            yield self.world.clock.monotonic_ms() + LOOK_PAUSE_MS
        everything = yield from self.world.until_answered("fetch", *place, Isolation.READ_UNCOMMITTED)
        for fate, records in ((Fate.COMMITTED, visible.records[:1]), (Fate.ABORTED, everything.records[:1])):
            if [(each.offset, (each.producer_id, each.epoch)) for each in records] == [(first.first_offset, ours)]:
                return fate
        return Fate.ABORTED if self.world.is_cleaned(place) else Fate.GONE

    @property
    def number(self) -> int:
        return self.log.incarnation.incarnation if self.log.has_begun else 0

    def __str__(self) -> str:
        return f"incarnation {self.number}.{self.leader.attempt}"


def _nothing() -> requests.Procedure[None]:
    yield from ()


class LogAnswers:
    def __init__(self, world: SimulatedWorld) -> None:
        self.world = world
        self._known_end = 0

    def __call__(self, request: requests.Request) -> Steps:
        """The answer; `BrokerUnavailable` if the request or the answer was lost."""
        try:
            return (yield from self._answer(request))
        except NoAnswer:
            raise BrokerUnavailable(f"{type(request).__name__} was not answered") from None

    def _answer(self, request: requests.Request) -> Steps:
        ask_once = self.world.ask
        match request:
            case requests.InitTransactions():
                answer = ask_once("init_transactions", request.transactional_id, TIMEOUT_MAX_MS)
                return _answered(answer.error, Producer(answer.producer_id, answer.epoch))
            case requests.ProduceBatches():
                return (yield from self._produced(request))
            case requests.EndTransaction():
                producer_id, epoch = request.producer
                error = ask_once("end_txn", request.transactional_id, producer_id, epoch, request.commit)
                self.world.faults.after_end()
                return _answered(error, Producer(producer_id, epoch + 1))
            case requests.LookOnce(producer, offsets):
                return {partition: self._shown(producer, partition, offset) for partition, offset in offsets}
            case requests.LogEnds():
                log = ask_once("fetch", self.world.topic.name, DECISIONS, self._known_end)
                self._known_end = log.high_watermark
                return requests.Ends(log.last_stable_offset, log.high_watermark)
            case requests.ReadLog(end):
                log = ask_once("fetch", self.world.topic.name, DECISIONS, 0, Isolation.READ_COMMITTED)
                found = [each for each in log.records if each.offset < end]
                return requests.LogRead(
                    log.log_start_offset,
                    tuple(requests.DecisionRecord(each.key.encode(), *(each.value or (None, None))) for each in found),
                )
            case requests.FirstOffsets():
                there = ask_once("topic_id", self.world.topic.name) is not None
                return (0,) * self.world.topic.partitions if there else None
        raise InvariantViolation(f"no answer to {request}")

    def _produced(self, request: requests.ProduceBatches) -> Steps:
        """The batches go out together, so that one whose answer is lost leaves the others written."""
        answers: dict[int, Answered] = {}
        producer = (request.transactional_id, *request.producer)
        for batch in request.batches:
            records = [
                (write.key, None if write.value is None else (write.value, dict(write.headers)["sha256"]))
                for write in batch.writes
            ]
            answer = self.world.ask(
                "produce", *producer, self.world.topic.name, batch.partition, records, sequence=batch.sequence
            )
            answers[batch.partition] = _answered(answer.error, first_offset=answer.first_offset)
            yield None
        return answers

    def _shown(self, producer: Producer, partition: int, offset: int) -> Fate | None:
        log = self.world.ask("fetch", self.world.topic.name, partition, offset, Isolation.READ_COMMITTED)
        if log.last_stable_offset <= offset:
            return None
        found = [(each.offset, each.producer_id, each.epoch) for each in log.records[:1]]
        return Fate.COMMITTED if found == [(offset, *producer)] else Fate.ABORTED


def _answered(error: Error, producer: Producer | None = None, first_offset: int = -1) -> Answered:
    if error is Error.CONCURRENT_TRANSACTIONS:
        return Answered(WriteAnswer.BUSY, error.name)
    answer = WRITE_ANSWERS[error]
    return Answered(answer, error.name, producer if answer is WriteAnswer.DONE else None, first_offset)


def scanned(world: SimulatedWorld, start_offsets: tuple[int, ...]) -> Generator[int | None, None, Scanned]:
    """Blocks are read uncommitted, tombstones committed."""
    found: dict[str, BlockRef] = {}
    ends = [0]
    for partition in range(1, world.topic.partitions):
        place = (world.topic.name, partition, start_offsets[partition])
        settled = yield from world.until_answered("fetch", *place, Isolation.READ_COMMITTED)
        everything = yield from world.until_answered("fetch", *place, Isolation.READ_UNCOMMITTED)
        known = settled.last_stable_offset
        open_ = [each for each in everything.records if each.offset >= known and each.value is not None]
        for each in [*(record for record in settled.records if record.offset < known), *open_]:
            found.pop(each.key, None)
            if each.value is not None:
                found[each.key] = _reference(partition, each)
        ends.append(everything.high_watermark)
    return Scanned(tuple(found.values()), tuple(ends))


def _reference(partition: int, record: Record) -> BlockRef:
    digest = hashlib.sha256(record.value).digest()
    return BlockRef(partition, record.offset, record.key, len(record.value), digest)


class SimulatedTopics:
    def __init__(self, world: SimulatedWorld) -> None:
        self.world = world

    def describe(self, names: Iterable[str]) -> dict[str, Topic]:
        found = {name: self._described(name) for name in names}
        if missing := sorted(name for name, topic in found.items() if topic is None):
            raise TopicError(f"There is no topic {', '.join(missing)}.")
        return {name: topic for name, topic in found.items() if topic is not None}

    def seen_by_each(self, names: Iterable[str], timeout_ms: int | None = None) -> dict[str, tuple[Topic | None, ...]]:
        return {name: (self._described(name),) for name in names}

    def start_offsets(self, name: str) -> dict[int, int]:
        return dict.fromkeys(range(self.world.partitions_of(name)), 0)

    def end_offsets(self, name: str, *, committed: bool) -> dict[int, int]:
        return {partition: self.world.end_of(name, partition) for partition in self.start_offsets(name)}

    def epoch_ends(self, name: str, epochs: Mapping[int, int]) -> dict[int, int]:
        return {}

    def _described(self, name: str) -> Topic | None:
        topic_id = self._id(name)
        if topic_id is None:
            return None
        return Topic(name, topic_id, self.world.partitions_of(name))

    def _id(self, name: str) -> str | None:
        """Asked twice: most often only one request is lost."""
        for _ in range(2):
            try:
                found: str | None = self.world.ask("topic_id", name)
                return found
            except NoAnswer:
                continue
        raise BrokerUnavailable(f"Nobody tells what topic {name} is.")

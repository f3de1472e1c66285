"""The model's answers to a simulated coordinator, which may be paused or killed between any two requests."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Mapping
from typing import TYPE_CHECKING

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.block_storage import Scanned
from exactlyonce.checkpoint.decision_log import DECISIONS
from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.checkpoint.requests import Answered, Fate, Producer, WriteAnswer
from exactlyonce.connectors.kafka.checkpoint_topic.log_requests import WRITE_ANSWERS
from exactlyonce.connectors.kafka.topics import Topic
from exactlyonce.pipeline.errors import BrokerUnavailable, InvariantViolation, TopicError
from exactlyonce.testing.broker.interface import Error, Isolation, NoAnswer, Record
from exactlyonce.testing.simulation.clients import Steps

if TYPE_CHECKING:
    from exactlyonce.testing.simulation.world import SimulatedWorld

TIMEOUT_MAX_MS = 20_000
"""Limits of the broker: everything goes faster here."""


class LogAnswers:
    def __init__(self, world: SimulatedWorld) -> None:
        self.world = world
        self._known_end = 0

    def __call__(self, request: ask.Request) -> Steps:
        """The answer; `BrokerUnavailable` if the request or the answer was lost."""
        try:
            return (yield from self._answer(request))
        except NoAnswer:
            raise BrokerUnavailable(f"{type(request).__name__} was not answered") from None

    def _answer(self, request: ask.Request) -> Steps:
        ask_once = self.world.ask
        match request:
            case ask.InitTransactions():
                answer = ask_once("init_transactions", request.transactional_id, TIMEOUT_MAX_MS)
                return _answered(answer.error, Producer(answer.producer_id, answer.epoch))
            case ask.ProduceBatches():
                return (yield from self._produced(request))
            case ask.EndTransaction():
                producer_id, epoch = request.producer
                error = ask_once("end_txn", request.transactional_id, producer_id, epoch, request.commit)
                self.world.faults.after_end()
                return _answered(error, Producer(producer_id, epoch + 1))
            case ask.LookOnce(producer, offsets):
                return {partition: self._shown(producer, partition, offset) for partition, offset in offsets}
            case ask.LogEnds():
                log = ask_once("fetch", self.world.topic.name, DECISIONS, self._known_end)
                self._known_end = log.high_watermark
                return ask.Ends(log.last_stable_offset, log.high_watermark)
            case ask.ReadLog(end):
                log = ask_once("fetch", self.world.topic.name, DECISIONS, 0, Isolation.READ_COMMITTED)
                found = [each for each in log.records if each.offset < end]
                return ask.LogRead(
                    log.log_start_offset,
                    tuple(ask.DecisionRecord(each.key.encode(), *(each.value or (None, None))) for each in found),
                )
            case ask.FirstOffsets():
                there = ask_once("topic_id", self.world.topic.name) is not None
                return (0,) * self.world.topic.partitions if there else None
        raise InvariantViolation(f"no answer to {request}")

    def _produced(self, request: ask.ProduceBatches) -> Steps:
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

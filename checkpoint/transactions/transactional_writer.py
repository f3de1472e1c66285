"""Transactions of one transactional id, written request by request: the decision log's writer.

Invariants: every transaction has an epoch of its own, raised by the end of the previous one, so that a late request of
an older transaction (a second EndTxn, a batch) is refused and ends nothing. Only EndTxn raises it, and the id is
initialised once, in `open`, so that a fenced writer cannot come back. A request without an answer is repeated as it
was: the broker takes a batch by its sequence once, and answers the same end alike. `NOT_WRITTEN`: the commit was never
asked for; `DONE`: it was confirmed; `UNKNOWN` is everything between, and ends the writer. No transaction begins before
the abort of the previous one is confirmed, and has its markers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.clock import Clock
from exactlyonce.checkpoint.requests import (
    Answered,
    DecisionBatch,
    Outcome,
    Procedure,
    Producer,
    Request,
    Write,
    WriteAnswer,
    retrying,
)
from exactlyonce.checkpoint.transactions.commit import held_by
from exactlyonce.pipeline.errors import (
    BrokerRefused,
    BrokerUnavailable,
    ExactlyOnceError,
    Fenced,
    Halt,
    TopicError,
    require,
)

OPEN_TIMEOUT_MS = 60_000
ABORT_TIMEOUT_MS = 8_000
MARKERS_TIMEOUT_MS = 10_000
MARKERS_PAUSE_MS = 5
DECISION_TIMEOUT_MS = 180_000
"""Of a transaction: longer than any write is tried, else the broker aborts it meanwhile."""
EPOCH_LAST = 32_766
"""The end of a transaction under this epoch gives the id another producer id, so that lost markers could never be
written again. So nothing is written under it, and an empty transaction is ended."""
BATCH_BYTES_MAX = 1 << 20
RECORD_BYTES_MAX = 64
"""The largest overhead of a record, or of one header, besides its key and its value."""


@dataclass(frozen=True)
class _Obstacle:
    """Why records were not produced; *anew*: another transaction may do better."""

    text: str
    anew: bool


class TransactionalWriter:
    """Writes to *topic* as *transactional_id*, from `open` until a newer writer of that id is opened.

    A transaction is `produce`, then `commit` or `take_back`; `write` is all of it.
    """

    def __init__(self, transactional_id: str, topic: str, clock: Clock) -> None:
        self.transactional_id, self.topic = transactional_id, topic
        self.refusal = ""
        """Why the last write was not written."""
        self._clock = clock
        self._ended: ExactlyOnceError | None = None
        self._producer = Producer(-1, -1)
        self._begun = False
        """Whether a transaction may be open that must be ended before the next one begins."""
        self._produced = False
        """Whether the open transaction is complete."""
        self._offsets: dict[int, int] = {}
        """The offset of its first record, by partition."""
        self._sent: set[int] = set()
        """Partitions where the open transaction may have records."""

    @property
    def producer(self) -> Producer:
        return self._producer

    @property
    def look(self) -> ask.LookOnce:
        """The first records of the present transaction: they show whether readers see it, once it has ended."""
        return ask.LookOnce(self._producer, tuple(sorted(self._offsets.items())))

    def open(self) -> Procedure[None]:
        """Fence every older writer, and abort its open transaction."""
        answered = yield from self._asked(
            lambda wait_ms: ask.InitTransactions(
                transactional_id=self.transactional_id, transaction_timeout_ms=DECISION_TIMEOUT_MS, wait_ms=wait_ms
            ),
            f"Fencing older writers of {self.topic}",
            self._clock.monotonic_ms() + OPEN_TIMEOUT_MS,
        )
        self._goes_on_as(answered)

    def write(self, writes: Sequence[Write], timeout_ms: int) -> Procedure[Outcome]:
        """Write all of *writes*, or none. Raises the error that ended the writer, as `Fenced`."""
        deadline_ms = self._clock.monotonic_ms() + timeout_ms
        if not (yield from self.produce(writes, deadline_ms)):
            return Outcome.NOT_WRITTEN
        return (yield from self.commit(deadline_ms))

    def end(self, reason: ExactlyOnceError) -> None:
        """Write nothing more: later calls raise *reason*.

        An open transaction is left to the next writer's `open`: after `UNKNOWN` it may be committed.
        """
        self._ended = reason

    # --- the steps of a transaction

    def produce(self, writes: Sequence[Write], deadline_ms: int) -> Procedure[bool]:
        """Begin a transaction with all of *writes*; False: it failed, and none of them is ever seen."""
        while True:
            if self._ended is not None:
                raise self._ended
            require(not self._produced, "One transaction at a time")
            if (self._begun or self._producer.epoch >= EPOCH_LAST) and not (yield from self._abort(deadline_ms)):
                return False
            obstacle = yield from self._produce(writes, deadline_ms)
            if obstacle is None:
                self._produced = True
                return True
            self.refusal = obstacle.text
            aborted = yield from self._abort(self._clock.monotonic_ms() + ABORT_TIMEOUT_MS)
            if not (aborted and obstacle.anew and self._clock.monotonic_ms() < deadline_ms):
                return False

    def commit(self, deadline_ms: int) -> Procedure[Outcome]:
        """Ask for the commit, and repeat it while there is no answer: only success proves anything."""
        require(self._produced, "Only what was produced is committed")
        try:
            answered = yield from self._end_transaction(commit=True, deadline_ms=deadline_ms)
        except BrokerUnavailable as error:
            self.end(
                BrokerUnavailable(
                    f"The broker did not say whether it wrote a decision to {self.topic}: {error} This incarnation "
                    f"ends; the next one reads what is true."
                )
            )
            return Outcome.UNKNOWN
        self._goes_on_as(answered)
        return Outcome.DONE

    def take_back(self, why: str) -> Procedure[None]:
        """Abort the produced records; if the broker does not confirm it, again before the next transaction."""
        require(self._produced, "Only what was produced is taken back")
        self.refusal = why
        yield from self._abort(self._clock.monotonic_ms() + ABORT_TIMEOUT_MS)

    def _produce(self, writes: Sequence[Write], deadline_ms: int) -> Procedure[_Obstacle | None]:
        """Send every batch to its partition, batches of one partition one after the other."""
        self._begun, self._offsets = True, {}
        waiting = _batches(writes)
        while waiting:
            first = [batches[0] for batches in waiting.values()]
            try:
                obstacle = yield from self._send(first, deadline_ms)
            except BrokerUnavailable as error:
                return _Obstacle(str(error), anew=False)
            if obstacle is not None:
                return obstacle
            waiting = {partition: batches[1:] for partition, batches in waiting.items() if batches[1:]}
        return None

    def _send(self, batches: Sequence[DecisionBatch], deadline_ms: int) -> Procedure[_Obstacle | None]:
        """Send one batch to each partition, and retry those that were not taken; stop at a permanent failure."""
        missing, timestamp_ms = tuple(batches), self._clock.now_ms()
        self._sent.update(batch.partition for batch in batches)

        def attempt(wait_ms: int) -> Procedure[_Obstacle | None]:
            nonlocal missing
            answers: dict[int, Answered] = yield ask.ProduceBatches(
                transactional_id=self.transactional_id, producer=self._producer, batches=missing,
                timestamp_ms=timestamp_ms, wait_ms=wait_ms,
            )  # fmt: skip
            for answered in answers.values():
                self._raise_if_over(answered)
                if answered.answer in (WriteAnswer.ABORTABLE, WriteAnswer.REFUSED):
                    return _Obstacle(answered.text, anew=answered.answer is WriteAnswer.ABORTABLE)
            for partition, answered in answers.items():
                if answered.answer is WriteAnswer.DONE:
                    self._offsets.setdefault(partition, answered.first_offset)
            missing = tuple(batch for batch in missing if answers[batch.partition].answer is WriteAnswer.BUSY)
            if missing:
                raise _busy(f"Writing to {self.topic}", answers[missing[0].partition])
            return None

        return (yield from retrying(attempt, self._clock, deadline_ms))

    def _abort(self, deadline_ms: int) -> Procedure[bool]:
        """Abort the open transaction; False if the broker did not confirm it: then the abort is asked for again.

        The commit was not asked for, so its records can never be seen.
        """
        self._produced = False
        try:
            answered = yield from self._end_transaction(commit=False, deadline_ms=deadline_ms)
        except BrokerUnavailable as error:
            self.refusal = f"{self.refusal} {error}"
            return False
        yield from self._await_abort()
        self._goes_on_as(answered)
        return True

    def _await_abort(self) -> Procedure[None]:
        """Wait until the abort has its markers.

        If a broker has lost them (see `commit.settle`), the commit of the next transaction would commit this one, too:
        then this writer must end.
        """
        places = tuple((self.topic, partition) for partition in sorted(self._sent))
        deadline_ms = self._clock.monotonic_ms() + MARKERS_TIMEOUT_MS
        while places:
            try:
                if not held_by(self._producer.producer_id, (yield ask.DescribeProducers(places))):
                    break
            except BrokerUnavailable as error:
                self.refusal = f"{self.refusal} {error}"
            except TopicError:  # the records are gone with the topic
                break
            if self._clock.monotonic_ms() > deadline_ms:
                lost = BrokerUnavailable(
                    f"The broker has aborted a transaction in {self.topic}, and does not show the marker that says so. "
                    f"This incarnation ends; the next one sees to it first."
                )
                self.end(lost)
                raise lost
            yield ask.Pause(MARKERS_PAUSE_MS)

    def _end_transaction(self, *, commit: bool, deadline_ms: int) -> Procedure[Answered]:
        return (
            yield from self._asked(
                lambda wait_ms: ask.EndTransaction(
                    transactional_id=self.transactional_id, producer=self._producer, commit=commit, wait_ms=wait_ms
                ),
                f"Ending a transaction in {self.topic}",
                deadline_ms,
            )
        )

    def _goes_on_as(self, answered: Answered) -> None:
        """Write the next transaction under the epoch that the end of this one has raised."""
        assert answered.producer is not None
        self._producer, self._begun, self._produced = answered.producer, False, False
        self._sent.clear()

    def _raise_if_over(self, answered: Answered) -> None:
        error: ExactlyOnceError
        if answered.answer is WriteAnswer.FENCED:
            error = Fenced(f"A newer writer of {self.topic} took over ({answered.text}).")
        elif answered.answer in (WriteAnswer.TOPIC_DELETED, WriteAnswer.TOPIC_MADE_ANEW):
            error = Halt(
                f"The checkpoint topic {self.topic} was {answered.answer.value} while the pipeline ran, and with it "
                f"what was decided.\n"
                f"  Choices: restore it from a replica or backup and run again; or `exactlyonce reset "
                f"{self.topic.removesuffix('.checkpoints')}` and recompute the output from the input into new output "
                f"topics."
            )
        else:
            return
        self.end(error)
        raise error

    def _asked(self, request: Callable[[int], Request], doing: str, deadline_ms: int) -> Procedure[Answered]:
        """The `DONE` to a request that is repeated while it is `BUSY`; `BrokerUnavailable` when the time is over."""

        def attempt(wait_ms: int) -> Procedure[Answered]:
            answered: Answered = yield request(wait_ms)
            if answered.answer is WriteAnswer.BUSY:
                raise _busy(doing, answered)
            return answered

        answered = yield from retrying(attempt, self._clock, deadline_ms)
        self._raise_if_over(answered)
        if answered.answer is not WriteAnswer.DONE:
            raise BrokerRefused(f"{doing} failed: {answered.text}")
        return answered


def _busy(doing: str, answered: Answered) -> BrokerUnavailable:
    return BrokerUnavailable(
        f"{doing} failed: {answered.text}. The brokers answer, so this may pass: try again, or see their logs."
    )


def _batches(writes: Sequence[Write]) -> dict[int, list[DecisionBatch]]:
    """The batches of each partition, in order; the first record's sequence is 0, since the epoch is fresh."""
    by_partition: defaultdict[int, list[Write]] = defaultdict(list)
    for write in writes:
        by_partition[write.partition].append(write)
    return {partition: list(_split(partition, some)) for partition, some in by_partition.items()}


def _split(partition: int, writes: Sequence[Write]) -> Iterator[DecisionBatch]:
    first, size = 0, 0
    for number, write in enumerate(writes):
        added = _size_max(write)
        if number > first and size + added > BATCH_BYTES_MAX:
            yield DecisionBatch(partition, first, tuple(writes[first:number]))
            first, size = number, 0
        size += added
    yield DecisionBatch(partition, first, tuple(writes[first:]))


def _size_max(write: Write) -> int:
    headers = sum(len(name) + len(value) + RECORD_BYTES_MAX for name, value in write.headers)
    return len(write.key.encode()) + len(write.value or b"") + headers + RECORD_BYTES_MAX

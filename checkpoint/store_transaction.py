"""Transactions of one producer, one at a time, each with an outcome that is certain or called unknown.

`NOT_WRITTEN` only where the commit was never asked for; `DONE` only where it was confirmed; everything between is
`UNKNOWN`, and ends the writer: it neither repeats nor aborts what may be written. Initialising fences every older
writer of the id, and happens once. No transaction is ever ended by closing a client.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException, Message

from exactlyonce.checkpoint import store_client
from exactlyonce.checkpoint.transaction import Outcome
from exactlyonce.pipeline.errors import BrokerUnavailable, ExactlyOnceError

INIT_TIMEOUT_S = 60.0
TRANSACTION_TIMEOUT_MS = 180_000
"""Longer than any write is tried for: else the broker aborts behind the writer's back."""
ABORT_TIMEOUT_S = 8.0


class Write(NamedTuple):
    """A record to be written; a value of None is a tombstone."""

    partition: int
    key: str
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()


class TransactionalWriter:
    """Writes to *topic* as *transactional_id*, from `open` until a newer writer of that id is opened."""

    def __init__(self, config: Mapping[str, Any], topic: str, transactional_id: str) -> None:
        self.topic = topic
        self.refusal = ""
        """Why the last write was not written."""
        self._config = config
        self._ended: ExactlyOnceError | None = None
        self._producer = store_client.producer(
            config,
            transactional_id=transactional_id,
            transaction_timeout_ms=TRANSACTION_TIMEOUT_MS,
            message_timeout_ms=TRANSACTION_TIMEOUT_MS,
            queue_buffering_max_messages=1_000_000,
        )

    def open(self) -> None:
        """Fence every older writer, and abort what it had open."""
        with store_client.explained(self._config, f"fencing older writers of {self.topic}"):
            store_client.connect(self._producer, self.topic)
            _resumed(self._producer.init_transactions, time.monotonic() + INIT_TIMEOUT_S)

    def write(self, writes: Sequence[Write], timeout_s: float) -> Outcome:
        """Write all of *writes*, or none. Raises what ended the writer: `Fenced`, or what else is beyond repair."""
        deadline = time.monotonic() + timeout_s
        outcome = self._attempt(writes, deadline)
        if outcome is Outcome.NOT_WRITTEN and self._ended is None and time.monotonic() < deadline:
            outcome = self._attempt(writes, deadline)  # the abort has mended what a lost record had left behind
        return outcome

    def end(self, reason: ExactlyOnceError) -> None:
        """Write nothing more: whoever tries meets *reason*.

        An open transaction stays open for the next writer's `open` to end: after `UNKNOWN` it may be committed.
        """
        self._ended = reason

    def _attempt(self, writes: Sequence[Write], deadline: float) -> Outcome:
        if self._ended is not None:
            raise self._ended
        lost: list[KafkaError] = []
        try:
            self._producer.begin_transaction()
            self._send(writes, lost)
            while len(self._producer) and not lost and time.monotonic() < deadline:
                self._producer.poll(0.1)
        except KafkaException as error:
            return self._abort(error.args[0])
        if lost or len(self._producer):
            return self._abort(lost[0] if lost else KafkaError(KafkaError._TIMED_OUT, "no answer in time"))
        return self._commit(deadline)

    def _send(self, writes: Sequence[Write], lost: list[KafkaError]) -> None:
        def delivered(error: KafkaError | None, _: Message) -> None:
            if error is not None:
                lost.append(error)

        for partition, key, value, headers in writes:
            self._producer.produce(self.topic, value, key, partition, on_delivery=delivered, headers=list(headers))

    def _abort(self, error: KafkaError) -> Outcome:
        """Take back what was begun. The commit was not asked for: nothing of it can ever be seen."""
        self.refusal = f"{error.str()} ({error.name()})"
        self._end_if_fatal(error)
        try:
            _resumed(self._producer.abort_transaction, time.monotonic() + ABORT_TIMEOUT_S)
        except KafkaException as failure:
            self._end_if_fatal(failure.args[0])
            self.end(
                BrokerUnavailable(
                    f"The broker is away: a transaction in {self.topic} could neither be written nor aborted "
                    f"({self.refusal}). Nothing was decided. Run it again once the broker answers."
                )
            )
        return Outcome.NOT_WRITTEN

    def _commit(self, deadline: float) -> Outcome:
        """Ask for the commit. From here on only its success proves anything."""
        try:
            _resumed(self._producer.commit_transaction, deadline)
        except KafkaException as error:
            self._end_if_fatal(error.args[0])
            self.end(
                BrokerUnavailable(
                    f"The broker did not say whether it wrote a decision to {self.topic}: {error.args[0].str()}. "
                    f"This life ends; the next one reads what is true."
                )
            )
            return Outcome.UNKNOWN
        return Outcome.DONE

    def _end_if_fatal(self, error: KafkaError) -> None:
        if error.fatal():
            reason = store_client.explanation(self._config, f"writing decisions to {self.topic}", error)
            self.end(reason)
            raise reason


def _resumed(call: Callable[[float], None], deadline: float) -> None:
    """Make *call*, which takes a timeout and can be resumed, until it succeeds, fails for good or time is up."""
    while True:
        try:
            call(max(0.1, min(5.0, deadline - time.monotonic())))
            return
        except KafkaException as error:
            if not error.args[0].retriable() or time.monotonic() > deadline:
                raise

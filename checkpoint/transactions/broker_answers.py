"""The broker's answers about transactions, as data, and their meaning for a committable.

`connectors.kafka.transactions` asks a broker; the in-memory broker gives the same answers.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec


class EndAnswer(enum.Enum):
    COMPLETED = "completed"
    """0: it is, or it had been, ended as asked."""
    BUSY = "busy"
    """Markers are being written, or the transaction coordinator moves: retry."""
    REFUSED = "refused"
    """INVALID_TXN_STATE: it was ended the other way. To a commit with records: the broker aborted them."""
    UNKNOWN = "unknown"
    """Fenced, unknown id or unknown producer: the records themselves must be looked at."""


class Fate(enum.Enum):
    """The verdict that a transaction's first record shows once the last stable offset has passed it."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    GONE = "gone"


class Outcome(enum.Enum):
    """The end of a transaction of the decision log."""

    DONE = "done"
    NOT_WRITTEN = "not written"
    UNKNOWN = "unknown"


class Producer(NamedTuple):
    """The identity that the broker knows the writer of a transactional id by, in one transaction."""

    producer_id: int
    epoch: int


class WriteAnswer(enum.Enum):
    """A broker's answer to the writer of a transactional id: to its initialisation, a batch, the end it asked for."""

    DONE = "done"
    """It is, or had been, done as asked."""
    BUSY = "busy"
    """Not now, or by another broker: retry."""
    FENCED = "fenced"
    """The id has moved on: a newer writer has it, or the broker ended the transaction."""
    ABORTABLE = "abortable"
    """This transaction has failed; a new one may succeed."""
    REFUSED = "refused"
    """Any transaction would fail: the record is wrong, or the right to write it is missing."""
    TOPIC_DELETED = "deleted"
    TOPIC_MADE_ANEW = "deleted and created again"
    """Since this writer first asked for the topic."""


class Answered(NamedTuple):
    answer: WriteAnswer
    text: str = ""
    """The broker's own words, unless it is `DONE`."""
    producer: Producer | None = None
    """The producer of the next transaction, after an initialisation or an end that is `DONE`."""
    first_offset: int = -1
    """The first offset of a batch that is `DONE`."""


class TransactionState(msgspec.Struct, frozen=True):
    """A transactional id as DescribeTransactions shows it. No proof of what happened in the past."""

    transactional_id: str
    state: str
    producer_id: int
    epoch: int
    timeout_ms: int
    start_time_ms: int
    partitions: tuple[tuple[str, int], ...]


class ListedTransaction(msgspec.Struct, frozen=True):
    """A transactional id as ListTransactions shows it."""

    transactional_id: str
    producer_id: int
    state: str


class ProducerState(msgspec.Struct, frozen=True):
    """A producer active on a partition, as DescribeProducers shows it."""

    topic: str
    partition: int
    producer_id: int
    epoch: int
    last_sequence: int
    last_timestamp_ms: int
    transaction_start_offset: int | None

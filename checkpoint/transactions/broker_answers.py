"""The broker's answers about transactions, as data; and what each means for a committable.

`connectors.kafka.transactions` asks, and the in-memory broker answers alike. The protocol knows only these words.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec


class EndAnswer(enum.Enum):
    """What EndTxn answered."""

    COMPLETED = "completed"
    """0: it is, or it had been, ended as asked."""
    BUSY = "busy"
    """Markers are being written, or the transaction coordinator moves: ask the same again."""
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
    """The end of a transaction of the decision log, as far as it is known."""

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
    """Not now, or by another broker: ask the same again."""
    FENCED = "fenced"
    """The id has moved on: a newer writer has it, or the broker ended the transaction."""
    ABORTABLE = "abortable"
    """This transaction is spoilt: a new one may do better."""
    REFUSED = "refused"
    """No transaction will do better: the record itself, or the right to write it."""
    TOPIC_DELETED = "deleted"
    TOPIC_MADE_ANEW = "deleted and created again"
    """Since this writer first asked for it."""


class Answered(NamedTuple):
    """A `WriteAnswer` with what comes with it."""

    answer: WriteAnswer
    text: str = ""
    """The broker's own words, unless it is `DONE`."""
    producer: Producer | None = None
    """Of the next transaction: after an initialisation or an end that is `DONE`."""
    first_offset: int = -1
    """Of a batch that is `DONE`."""


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

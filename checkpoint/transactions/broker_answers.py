"""The broker's answers about transactions, as data; and what each means for a committable.

`connectors.kafka.transactions` asks, and the in-memory broker answers alike. The protocol knows only these words.
"""

from __future__ import annotations

import enum

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
    """What a transaction's first record shows once the last stable offset has passed it."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    GONE = "gone"


class Outcome(enum.Enum):
    """What became of a transaction of the decision log."""

    DONE = "done"
    NOT_WRITTEN = "not written"
    UNKNOWN = "unknown"


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

"""The transaction coordinator of the in-memory broker: the state of every transactional id.

Invariants: an id changes its state only along `PREVIOUS`; the epoch of a producer id only grows, and every end of a
transaction and every initialisation raises it, or gives a new producer id when it is exhausted; a `Prepare` state
settles the outcome, before any marker is written. Answers and their precedence are those of Kafka 4.3 with transaction
version 2.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from exactlyonce.checkpoint.clock import Clock
from exactlyonce.checkpoint.requests import ListedTransaction, TransactionState
from exactlyonce.pipeline.errors import InvariantViolation
from exactlyonce.testing.broker.interface import Error, Initialized

EPOCH_LAST = 32_766
"""The highest epoch that a producer gets; 32767 is left for the marker that ends its transaction."""

NO_PRODUCER_ID = -1


class State(enum.Enum):
    """The states of a transactional id, named as in DescribeTransactions."""

    EMPTY = "Empty"
    ONGOING = "Ongoing"
    PREPARE_COMMIT = "PrepareCommit"
    COMPLETE_COMMIT = "CompleteCommit"
    PREPARE_ABORT = "PrepareAbort"
    COMPLETE_ABORT = "CompleteAbort"
    DEAD = "Dead"


_AT_REST = frozenset({State.EMPTY, State.COMPLETE_COMMIT, State.COMPLETE_ABORT})
_PREPARED = frozenset({State.PREPARE_COMMIT, State.PREPARE_ABORT})

PREVIOUS: dict[State, frozenset[State]] = {
    State.EMPTY: _AT_REST,
    State.ONGOING: _AT_REST | {State.ONGOING},
    State.PREPARE_COMMIT: frozenset({State.ONGOING}),
    State.PREPARE_ABORT: _AT_REST | {State.ONGOING},
    State.COMPLETE_COMMIT: frozenset({State.PREPARE_COMMIT}),
    State.COMPLETE_ABORT: frozenset({State.PREPARE_ABORT}),
    State.DEAD: _AT_REST,
}
"""The states from which each state may be entered."""


@dataclass(slots=True)
class TransactionEntry:
    """A transactional id and its current or last transaction."""

    transactional_id: str
    producer_id: int
    timeout_ms: int
    changed_at_ms: int
    """Monotonic time, as `started_at_ms`."""
    epoch: int = -1
    producer_id_previous: int = NO_PRODUCER_ID
    """The producer id before the last change of state, which differs if its epochs ran out just then."""
    producer_id_next: int = NO_PRODUCER_ID
    """The producer id to use once the markers are written, because the epochs of this one ran out."""
    state: State = State.EMPTY
    partitions: dict[tuple[str, int], None] = field(default_factory=dict)
    """The transaction's partitions; once it is prepared, those that still await a marker."""
    partitions_logged: tuple[tuple[str, int], ...] = ()
    """All partitions of a prepared transaction: a coordinator that loads it after a crash begins again with them."""
    started_at_ms: int = 0
    start_time_ms: int = -1
    """Wall clock time."""

    def enter(self, state: State, now_ms: int) -> None:
        """Change the state along `PREVIOUS`; any other change is a defect."""
        if self.state not in PREVIOUS[state]:
            raise InvariantViolation(f"{self.transactional_id} goes from {self.state} to {state}")
        self.state = state
        self.producer_id_previous = self.producer_id
        self.changed_at_ms = now_ms

    @property
    def exhausted(self) -> bool:
        return self.epoch >= EPOCH_LAST

    def described(self) -> TransactionState:
        """The answer to DescribeTransactions."""
        return TransactionState(
            self.transactional_id,
            self.state.value,
            self.producer_id,
            self.epoch,
            self.timeout_ms,
            self.start_time_ms,
            tuple(sorted(self.partitions)),
        )


class TransactionCoordinator:
    """All transactional ids. *prepared* is called with a transaction that awaits its markers, and the time."""

    def __init__(self, clock: Clock, timeout_max_ms: int, prepared: Callable[[TransactionEntry, int], None]) -> None:
        self.transactions: dict[str, TransactionEntry] = {}
        self.open: dict[str, TransactionEntry] = {}
        """The entries that are `ONGOING`."""
        self._clock = clock
        self._timeout_max_ms = timeout_max_ms
        self._prepared = prepared
        self._producer_ids = 0

    def new_producer_id(self) -> int:
        """A producer id that was never used."""
        self._producer_ids += 1
        return self._producer_ids - 1

    def initialize(self, transactional_id: str, timeout_ms: int, now_ms: int) -> Initialized:
        """Give a new epoch; if a transaction is open, abort it and ask for a retry."""
        if not 0 < timeout_ms <= self._timeout_max_ms:
            return Initialized(Error.INVALID_TRANSACTION_TIMEOUT)
        transaction = self.transactions.get(transactional_id)
        if transaction is None:
            transaction = TransactionEntry(transactional_id, self.new_producer_id(), timeout_ms, now_ms)
            self.transactions[transactional_id] = transaction
        if transaction.state in _PREPARED:
            return Initialized(Error.CONCURRENT_TRANSACTIONS)
        if transaction.state is State.ONGOING:
            self.prepare(transaction, State.PREPARE_ABORT, now_ms)
            return Initialized(Error.CONCURRENT_TRANSACTIONS)
        transaction.enter(State.EMPTY, now_ms)
        if transaction.exhausted:
            transaction.producer_id, transaction.epoch = self.new_producer_id(), 0
        else:
            transaction.epoch += 1
        transaction.timeout_ms, transaction.start_time_ms = timeout_ms, -1
        return Initialized(Error.NONE, transaction.producer_id, transaction.epoch)

    def add_partition(
        self, transactional_id: str, producer_id: int, epoch: int, partition: tuple[str, int], now_ms: int
    ) -> Error:
        """Add *partition* to the transaction, which begins with its first one."""
        transaction = self.transactions.get(transactional_id)
        if transaction is None:
            return Error.INVALID_PRODUCER_ID_MAPPING
        if transaction.state in _PREPARED:
            return Error.CONCURRENT_TRANSACTIONS
        if transaction.producer_id != producer_id:
            return Error.INVALID_PRODUCER_ID_MAPPING
        if transaction.epoch != epoch:
            return Error.INVALID_PRODUCER_EPOCH
        if transaction.state is not State.ONGOING:
            transaction.enter(State.ONGOING, now_ms)
            self.open[transactional_id] = transaction
            transaction.started_at_ms, transaction.start_time_ms = now_ms, self._clock.now_ms()
        if partition not in transaction.partitions:
            transaction.enter(State.ONGOING, now_ms)
            transaction.partitions[partition] = None
        return Error.NONE

    def verify(self, transactional_id: str, producer_id: int, epoch: int, partition: tuple[str, int]) -> Error:
        """Tell a leader that gets a producer's first batch whether the transaction has the partition."""
        transaction = self.transactions.get(transactional_id)
        if transaction is None or transaction.producer_id != producer_id:
            return Error.INVALID_PRODUCER_ID_MAPPING
        if transaction.epoch != epoch:
            return Error.INVALID_PRODUCER_EPOCH
        return Error.NONE if partition in transaction.partitions else Error.INVALID_TXN_STATE

    def end(self, transactional_id: str, producer_id: int, epoch: int, commit: bool, now_ms: int) -> Error:
        """EndTxn of version 5. A repeated request gets the same answer; any other one about the past is refused."""
        transaction = self.transactions.get(transactional_id)
        if transaction is None:
            return Error.INVALID_PRODUCER_ID_MAPPING
        state = transaction.state
        if state in _PREPARED:
            return Error.CONCURRENT_TRANSACTIONS
        past_rotation = (
            transaction.producer_id_previous == producer_id and epoch == EPOCH_LAST and transaction.epoch == 0
        )
        if transaction.producer_id != producer_id and not past_rotation:
            return Error.INVALID_PRODUCER_ID_MAPPING
        complete = state in (State.COMPLETE_COMMIT, State.COMPLETE_ABORT)
        again = complete and (transaction.epoch == epoch + 1 or past_rotation)
        if transaction.epoch != epoch and not again:
            return Error.PRODUCER_FENCED
        if again:
            return Error.NONE if commit == (state is State.COMPLETE_COMMIT) else Error.INVALID_TXN_STATE
        if commit and state is not State.ONGOING:
            return Error.INVALID_TXN_STATE
        self.prepare(transaction, State.PREPARE_COMMIT if commit else State.PREPARE_ABORT, now_ms)
        return Error.NONE

    def prepare(self, transaction: TransactionEntry, state: State, now_ms: int) -> None:
        """Settle the outcome: only markers are missing from here on."""
        if transaction.state is not State.ONGOING:
            transaction.start_time_ms = self._clock.now_ms()
        transaction.enter(state, now_ms)
        self.open.pop(transaction.transactional_id, None)
        transaction.producer_id_next = self.new_producer_id() if transaction.exhausted else NO_PRODUCER_ID
        transaction.epoch += 1
        transaction.partitions_logged = tuple(transaction.partitions)
        self._prepared(transaction, now_ms)

    def reload(self, now_ms: int) -> None:
        """Restart from the log: every prepared transaction awaits all of its markers again."""
        for transaction in self.transactions.values():
            if transaction.state in _PREPARED:
                transaction.partitions = dict.fromkeys(transaction.partitions_logged)
                self._prepared(transaction, now_ms)

    def complete(self, transaction: TransactionEntry, now_ms: int) -> None:
        """Complete a transaction whose markers are written."""
        committed = transaction.state is State.PREPARE_COMMIT
        transaction.enter(State.COMPLETE_COMMIT if committed else State.COMPLETE_ABORT, now_ms)
        transaction.partitions.clear()
        if transaction.producer_id_next != NO_PRODUCER_ID:
            transaction.producer_id, transaction.epoch = transaction.producer_id_next, 0
            transaction.producer_id_next = NO_PRODUCER_ID

    def timed_out(self, at_ms: int) -> list[TransactionEntry]:
        """The open transactions that have timed out at *at_ms*, the oldest first."""
        late = {name for name, t in self.open.items() if t.started_at_ms + t.timeout_ms < at_ms}
        known = [t for name, t in self.transactions.items() if name in late] if late else []
        return sorted(known, key=lambda t: t.started_at_ms)

    def expire(self, unchanged_since_ms: int) -> None:
        """Forget the ids at rest that have not been used since."""
        for transaction in list(self.transactions.values()):
            if transaction.state in _AT_REST and transaction.changed_at_ms <= unchanged_since_ms:
                transaction.enter(State.DEAD, transaction.changed_at_ms)
                del self.transactions[transaction.transactional_id]

    def listed(self, prefix: str) -> list[ListedTransaction]:
        """The answer to ListTransactions, sorted by id."""
        return [
            ListedTransaction(name, transaction.producer_id, transaction.state.value)
            for name, transaction in sorted(self.transactions.items())
            if name.startswith(prefix)
        ]

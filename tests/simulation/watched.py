"""The broker of a simulation, which shows its oracle every request that it carries out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from exactlyonce.checkpoint.decision_log import DECISIONS
from exactlyonce.checkpoint.records.manifest import TransactionalId
from exactlyonce.testing.broker.interface import Error, Initialized, Produced
from exactlyonce.testing.broker.model import BrokerModel, _Marker
from exactlyonce.testing.broker.transaction_coordinator import State

if TYPE_CHECKING:
    from oracle import Oracle

TOPIC = "p.checkpoints"


class Broken(AssertionError):
    trace: tuple[str, ...] = ()
    """The events before it."""


class Asserted(Broken):
    """The shipped code has ended itself by an error that no fault explains: it, not the oracle, has noticed."""


def demand(condition: object, what: str) -> None:
    if not condition:
        raise Broken(what)


class WatchedBroker(BrokerModel):
    oracle: Oracle
    cleaned: set[tuple[str, int, int]]
    """Topic, partition and offset of the records that `clean_aborted` has removed."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.cleaned = set()
        self._decided = False

    def _write(self, marker: _Marker) -> None:
        super()._write(marker)
        self._decided |= marker.partition == (TOPIC, DECISIONS)

    def _catch_up(self) -> int:
        now_ms = super()._catch_up()
        if self._decided:
            self._decided = False
            self.oracle.decided_more()
        return now_ms

    def compact(self, topic: str, *, drop_tombstones: bool = False, known: float = 1.0, cleaned: float = 1.0) -> None:
        self._catch_up()
        self.oracle.read_blocks()
        super().compact(topic, drop_tombstones=drop_tombstones, known=known, cleaned=cleaned)

    def clean_aborted(self, topics: list[str]) -> bool:
        """Remove the records of aborted transactions, as cleaning may; their markers stay. Whether there were any."""
        self._catch_up()
        before = len(self.cleaned)
        for topic in topics:
            for partition, log in enumerate(self._topics[topic].logs):
                self.cleaned |= {(topic, partition, offset) for offset in log._aborted}
                log._keep([record for record in log._records if record.offset not in log._aborted])
        return len(self.cleaned) > before

    def init_transactions(self, transactional_id: str | None, timeout_ms: int = 60_000) -> Initialized:
        answer = super().init_transactions(transactional_id, timeout_ms)
        self.oracle.initialized(transactional_id)
        return answer

    def produce(self, transactional_id: str | None, *place: Any, **options: Any) -> Produced:
        answer = super().produce(transactional_id, *place, **options)
        if transactional_id is None and answer.error is Error.NONE and place[2] == TOPIC:
            self.oracle.blocks_written([key for key, _ in place[-1]])
        if transactional_id is not None and answer.error is Error.NONE and transactional_id in self.oracle.fenced:
            state = self.describe_transactions([transactional_id])[transactional_id]
            aborting = state is not None and state.state == "PrepareAbort"  # late records go with the others
            demand(aborting, f"{transactional_id} writes though it was swept")
        return answer

    def end_txn(self, transactional_id: str, producer_id: int, epoch: int, commit: bool) -> Error:
        self._catch_up()
        self.oracle.before_end(transactional_id, producer_id, epoch, commit)
        return super().end_txn(transactional_id, producer_id, epoch, commit)

    def log_of(self, topic: str, partition: int) -> Any:
        """The log itself, whether or not the broker is up."""
        log = self._log(topic, partition)
        assert log is not None
        return log

    def is_committed(self, topic: str, partition: int, offset: int) -> bool:
        """Whether the record's transaction is, also where an older open one still hides it from readers."""
        log = self.log_of(topic, partition)
        return offset not in log._aborted and not any(offset in offsets for offsets in log._open.values())

    def overdue(self, timeout_ms: int) -> list[str]:
        """The sinks' transactions that have been open for longer than that, and for one check of the broker more."""
        self._catch_up()
        latest_ms = self._clock.monotonic_ms() - self.settings.timeout_check_interval_ms
        return [
            name
            for name, each in self._coordinator.open.items()
            if max(each.started_at_ms + timeout_ms, self._started_ms) < latest_ms
            and TransactionalId.parse(name)
            and name.startswith("eo:p:")
        ]

    def has_forgotten(self) -> bool:
        known = {each.producer_id for each in self._coordinator.transactions.values()}
        return any(log._open.keys() - known for topic in self._topics.values() for log in topic.logs)

    def has_hanging(self) -> bool:
        """Whether a partition shows a transaction as open though it has ended and no marker is on its way."""
        known = self._coordinator.transactions.values()
        awaited = {(each.producer_id, p) for each in known if each.state is State.ONGOING for p in each.partitions}
        awaited |= {(each.producer_id, each.partition) for each in self._markers if each.partition is not None}
        return any(
            (producer_id, (name, index)) not in awaited
            for name, topic in self._topics.items()
            for index, log in enumerate(topic.logs)
            for producer_id in log._open
        )

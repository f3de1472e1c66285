"""The transactions that hold read_committed readers back: their places and their owners."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from threading import Event

from exactlyonce.checkpoint.commits.kafka import TIME_LEFT_MARGIN_MS
from exactlyonce.checkpoint.records.manifest import TransactionalId, coordinator_id
from exactlyonce.checkpoint.requests import ProducerState, TransactionState, TxnState
from exactlyonce.checkpoint.transactions.commit import MARKERS_LOST_AFTER_MS
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.pipeline.durations import shown_duration
from exactlyonce.pipeline.sizes import counted
from exactlyonce.views.doctor.findings import NOTE, PROBLEM, Findings, Subject


@dataclass
class _Held:
    """The partitions that one producer holds back."""

    producer: ProducerState
    """Its state in the first of them."""
    places: list[tuple[str, int, int, int]] = field(default_factory=list)
    """(topic, partition, start offset of the transaction, number of invisible offsets)"""

    @property
    def shown(self) -> str:
        topics: defaultdict[str, list[str]] = defaultdict(list)
        for topic, partition, _, _ in self.places:
            topics[topic].append(str(partition))
        where = " ".join(f"{topic}[{','.join(some)}]" for topic, some in topics.items())
        hidden = sum(count for *_, count in self.places)
        return f"Readers of {where} are held back: they do not get to see {counted(hidden, 'offset')}"


@dataclass(frozen=True)
class _Owner:
    """The owner of a transaction."""

    name: str | None
    """The transactional id; None: unknown to the brokers, or hidden from us."""
    state: TransactionState | None

    def open_ms(self, producer: ProducerState, now_ms: int) -> int:
        """How long the transaction has been open, or at least silent."""
        began_ms = (
            self.state.start_time_ms if self.state and self.state.start_time_ms > 0 else producer.last_timestamp_ms
        )
        return max(0, now_ms - began_ms)

    def left(self, now_ms: int) -> str:
        """When the broker ends it, as text."""
        if self.state is None or self.state.start_time_ms <= 0:
            return ""
        left_ms = max(0, self.state.start_time_ms + self.state.timeout_ms - now_ms)
        return f"; the broker aborts it in {shown_duration(left_ms)}"


@dataclass
class ReadersCheck:
    """Other transactions that are open for less than *older_than_ms* are no problem."""

    subject: Subject
    topics: Topics
    transactions: Transactions
    findings: Findings
    older_than_ms: int

    def run(self) -> None:
        held: dict[int, _Held] = {}
        for topic in self.subject.topics:
            with self.findings.checking(f"readers of {topic}"):
                self._look(topic, held)
        for places in held.values():
            with self.findings.checking(f"whose producer {places.producer.producer_id} is"):
                self._report(places, self._owner(places.producer))

    def _look(self, topic: str, held: dict[int, _Held]) -> None:
        ends = self.topics.end_offsets(topic, committed=False)  # first: later records are not held back
        stable = self.topics.end_offsets(topic, committed=True)
        behind = {partition: end - stable[partition] for partition, end in ends.items() if end > stable[partition]}
        if not behind:
            return
        standing: dict[int, ProducerState] = {}
        for producer in self.transactions.producers((topic, partition) for partition in behind):
            if producer.transaction_start_offset is not None:
                first = standing.get(producer.partition)
                if first is None or (first.transaction_start_offset or 0) > producer.transaction_start_offset:
                    standing[producer.partition] = producer
        for partition, producer in sorted(standing.items()):
            places = held.setdefault(producer.producer_id, _Held(producer)).places
            places.append((topic, partition, producer.transaction_start_offset or 0, behind[partition]))

    def _owner(self, producer: ProducerState) -> _Owner:
        name = self.transactions.named(producer.producer_id)
        return _Owner(name, self.transactions.describe([name])[name] if name is not None else None)

    def _report(self, held: _Held, owner: _Owner) -> None:
        lost = owner.state is not None and owner.state.state in TxnState.CLOSED
        if lost and not self._still_open(held):
            return
        name = TransactionalId.parse(owner.name or "")
        if owner.name == coordinator_id(self.subject.name):
            self._own_decision(held, owner)
        elif name is not None and name.pipeline == self.subject.name:
            self._own(held, owner, lost=lost)
        else:
            self._foreign(held, owner, name, lost=lost)

    def _still_open(self, held: _Held) -> bool:
        """Whether the partitions still show it as open after the time that markers take."""
        Event().wait(MARKERS_LOST_AFTER_MS / 1000)
        now = self.transactions.producers((topic, partition) for topic, partition, *_ in held.places)
        start_offset = held.producer.transaction_start_offset
        return any(
            producer.producer_id == held.producer.producer_id and producer.transaction_start_offset == start_offset
            for producer in now
        )

    def _own_decision(self, held: _Held, owner: _Owner) -> None:
        runs = self.subject.sign_of_life
        self.findings.add(
            "readers", held.shown, level=NOTE if runs else PROBLEM,
            whose=f"{owner.name}, the coordinator of this pipeline, open for {self._open(held, owner)}",
            do="nothing: it is writing a decision" if runs else "run the pipeline: it ends it first of all",
        )  # fmt: skip

    def _own(self, held: _Held, owner: _Owner, *, lost: bool) -> None:
        subject, now_ms = self.subject, self.subject.now_ms
        waits = next((output for output in subject.waiting or () if output.name == owner.name), None)
        decided = waits is not None and waits.is_decided
        left_ms = waits.left_ms(now_ms) if waits is not None else None
        verdict = f"decided in checkpoint {waits.decided_in}" if waits and decided else "decided by no checkpoint"
        if subject.waiting is None:
            verdict = "which was not looked for among the decisions"
        whose = f"{owner.name} of this pipeline, {verdict}, open for {self._open(held, owner)}{owner.left(now_ms)}"
        if lost:
            self.findings.add(
                "readers", f"{held.shown}, though the broker has ended the transaction: it has lost its markers",
                whose=whose, do="run the pipeline: it writes them again (KAFKA-20734)",
            )  # fmt: skip
        elif subject.sign_of_life and (left_ms is None or left_ms > TIME_LEFT_MARGIN_MS):
            self.findings.add(
                "readers", held.shown, whose=whose, level=NOTE, do="nothing: the pipeline runs, and ends it"
            )
        elif subject.waiting is None:
            self.findings.add("readers", held.shown, whose=whose, do="run the pipeline: it commits or aborts it")
        else:
            verb = "commit" if decided else "abort"
            self.findings.add(
                "readers", held.shown, whose=whose, do=f"run the pipeline, or {verb} it",
                run=[f"exactlyonce transactions {verb} {subject.named}"],
            )  # fmt: skip

    def _foreign(self, held: _Held, owner: _Owner, name: TransactionalId | None, *, lost: bool) -> None:
        producer, subject = held.producer, self.subject
        hangs = lost or owner.name is None
        if name is not None:
            whose = f"{owner.name} of another pipeline, {name.pipeline}"
            do = f"look at {name.pipeline}; if it does not run, run it, or abort what it has left"
            run = [f"exactlyonce doctor {name.pipeline}", f"exactlyonce transactions abort {name.pipeline}"]
        elif owner.name is not None:
            whose = f"{owner.name}, none of exactlyonce's (producer id {producer.producer_id}, epoch {producer.epoch})"
            do, run = "let the program whose transactional id that is end it, or wait until the broker does", []
        else:
            whose = (
                f"somebody else's: producer id {producer.producer_id}, epoch {producer.epoch}, whose transactional id "
                f"has expired, or may not be seen by us"
            )
            do, run = "find out who writes there; if nobody does any more, abort it", []
        if lost:
            do = "the broker has ended it, and lost its markers (KAFKA-20734): write them"
        recent = not lost and owner.open_ms(producer, subject.now_ms) < self.older_than_ms
        whose += f", open for {self._open(held, owner)}{owner.left(subject.now_ms)}"
        self.findings.add(
            "readers", held.shown, whose=whose, do=do, level=NOTE if recent else PROBLEM,
            run=self._by_hand(held) if hangs else run,
        )  # fmt: skip

    def _open(self, held: _Held, owner: _Owner) -> str:
        return shown_duration(owner.open_ms(held.producer, self.subject.now_ms))

    def _by_hand(self, held: _Held) -> list[str]:
        """Commands that write a marker for each partition; only for an id that cannot be ended any more."""
        return [
            f"kafka-transactions --bootstrap-server {self.subject.config.bootstrap_servers} abort --topic {topic} "
            f"--partition {partition} --start-offset {start_offset}"
            for topic, partition, start_offset, _ in held.places
        ]

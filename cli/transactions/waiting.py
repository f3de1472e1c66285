"""Output that waits: transactions that are open, and what sinks have set aside, as people and machines see it.

Invariant: what is not known is shown as unknown, and never as a number or a verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from exactlyonce.cli import text

TRANSACTION = "transaction"
"""The kind of what waits in Kafka; the others are those of `StoreCommittable`."""
COLUMNS = ("transaction", "state", ">open for", ">left", "decided")
_LABEL_WIDTH = 14
_INDENT = "    "


@dataclass(frozen=True)
class InPartition:
    """Records of a transaction in one partition."""

    topic: str
    partition: int
    first_offset: int | None = None
    count: int | None = None


@dataclass(frozen=True, kw_only=True)
class WaitingOutput:
    """One transaction, or one committable of a store."""

    name: str
    """The transactional id; of what is in a store, its name there, or sink, subtask and checkpoint."""
    kind: str
    state: str
    sink: str
    subtask: int
    incarnation: int | None = None
    attempt: str | None = None
    checkpoint: int | None = None
    """At whose barrier it was cut, where that is known."""
    decided_in: int | None = None
    """The checkpoint whose manifest, or repair, names it; None: nobody has decided."""
    records: int | None = None
    started_at_ms: int | None = None
    timeout_ms: int | None = None
    producer_id: int | None = None
    epoch: int | None = None
    places: tuple[InPartition, ...] = ()
    where: str = ""
    """What waits where, of what is not in Kafka."""
    next: str = ""
    """What becomes of it."""
    holds: bool = True
    """Whether it holds readers back, or locks in a store, while it waits: only that can be aborted."""

    @property
    def is_decided(self) -> bool:
        """Whether it has to be committed."""
        return self.decided_in is not None

    def open_ms(self, now_ms: int) -> int | None:
        """For how long it has waited."""
        return None if self.started_at_ms is None else max(0, now_ms - self.started_at_ms)

    def left_ms(self, now_ms: int) -> int | None:
        """Until the broker aborts it; None: nobody does, or it has ended."""
        if self.started_at_ms is None or self.timeout_ms is None or self.state != "Ongoing":
            return None
        return max(0, self.started_at_ms + self.timeout_ms - now_ms)

    def as_json(self, now_ms: int) -> dict[str, Any]:
        """For machines."""
        return {
            "name": self.name, "kind": self.kind, "state": self.state, "sink": self.sink, "subtask": self.subtask,
            "transactional_id": self.name if self.kind == TRANSACTION else None,
            "producer_id": self.producer_id, "epoch": self.epoch,
            "incarnation": self.incarnation, "attempt": self.attempt,
            "started_at_ms": self.started_at_ms, "timeout_ms": self.timeout_ms,
            "open_ms": self.open_ms(now_ms), "left_ms": self.left_ms(now_ms),
            "partitions": [[each.topic, each.partition] for each in self.places],
            "written": [vars(each) for each in self.places],
            "checkpoint": self.checkpoint, "records": self.records, "decided_in": self.decided_in,
            "where": self.where or None,
        }  # fmt: skip

    def row(self, now_ms: int) -> text.Row:
        """Its cells under `COLUMNS`."""
        times = (self.open_ms(now_ms), self.left_ms(now_ms))
        shown = ("" if each is None else text.duration(each) for each in times)
        return (self.name, self.state, *shown, self._decided())

    def _decided(self) -> str:
        return "no" if self.decided_in is None else f"in checkpoint {self.decided_in}"

    def summary(self) -> str:
        """What stands below its row."""
        parts = [] if self.kind == TRANSACTION else [f"sink {self.sink}, subtask {self.subtask}"]
        parts.append(self._partitions() or self.where)
        if self.producer_id is not None:
            parts.append(f"producer {self.producer_id} epoch {self.epoch}")
        if self.checkpoint is not None:
            parts.append(f"cut at checkpoint {self.checkpoint}")
        if self.records is not None:
            parts.append(text.counted(self.records, "record"))
        return "; ".join(filter(None, parts))

    def _partitions(self) -> str:
        topics: dict[str, list[str]] = {}
        for each in self.places:
            topics.setdefault(each.topic, []).append(str(each.partition))
        return " ".join(f"{topic}[{','.join(some)}]" for topic, some in sorted(topics.items()))

    def in_full(self, now_ms: int, width: int) -> Iterator[str]:
        """All that is known of it, with labels."""
        yield self.name
        for label, content in self._labelled(now_ms):
            yield from text.labelled(label, content, _LABEL_WIDTH, width)

    def _labelled(self, now_ms: int) -> Iterator[tuple[str, str]]:
        yield "kind", self.kind
        yield "state", self.state
        yield "decided", self._decided()
        yield "sink", f"{self.sink}, subtask {self.subtask}"
        if self.incarnation is not None:
            yield "written by", f"incarnation {self.incarnation}, attempt {self.attempt}"
        if self.checkpoint is not None:
            yield "cut at", f"the barrier of checkpoint {self.checkpoint}"
        if self.records is not None:
            yield "records", f"{self.records:,}"
        if self.producer_id is not None:
            yield "producer", f"id {self.producer_id}, epoch {self.epoch}"
        yield from self._times(now_ms)
        for number, each in enumerate(self.places):
            count = "" if each.count is None else f", {text.counted(each.count, 'record')}"
            offset = "" if each.first_offset is None else f" offset {each.first_offset} and on{count}"
            yield "" if number else "partitions", f"{each.topic}[{each.partition}]{offset}"
        if self.where:
            yield "where", self.where
        if self.next:
            yield "next", self.next

    def _times(self, now_ms: int) -> Iterator[tuple[str, str]]:
        if self.started_at_ms is not None:
            yield "since", f"{text.moment(self.started_at_ms)}, for {text.duration(self.open_ms(now_ms) or 0)}"
        if (left_ms := self.left_ms(now_ms)) is not None:
            yield "left", f"{text.duration(left_ms)}, then the broker aborts it"


def as_table(waiting: Sequence[WaitingOutput], now_ms: int, width: int) -> Iterator[str]:
    """A row for each, and below it where it is."""
    header, *rows = text.table(COLUMNS, [each.row(now_ms) for each in waiting])
    yield header
    for each, row in zip(waiting, rows, strict=True):
        yield row
        if summary := each.summary():
            yield from text.labelled("", summary, 0, width, _INDENT)

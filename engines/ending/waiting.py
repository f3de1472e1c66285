"""Output that waits for its end: open transactions and what stores have set aside, with the decision on each.

Invariants: nothing is changed; what is not known is None, and never a number or a verdict. The newest checkpoint, while
it is not finalized, has all its transactions here, also those that the broker has aborted meanwhile: their output is
missing until it is repaired.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from exactlyonce.checkpoint.records.committable import Committable, TransactionalId, transaction_prefix
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Manifest, StoreCommittable
from exactlyonce.checkpoint.transactions.broker_answers import ListedTransaction, TransactionState
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.surroundings.stores import PipelineStores
from exactlyonce.pipeline.errors import ConfigError, StoreError, StoreUnavailable
from exactlyonce.sinks.committer import SetAside, StoreView

TRANSACTION = "transaction"
"""The kind of what waits in Kafka; the others are those of `StoreCommittable`."""
OPEN = ("Ongoing", "PrepareCommit", "PrepareAbort", "PrepareEpochFence")
BY_NAME = "its store is known by the module alone: give module:pipeline"
"""Why a store is not asked where a pipeline is named without its module."""
DROPPED = "if the pipeline runs, it is of the checkpoint in flight; else the next run drops it, and computes it again"


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
    """The transactional id; in a store its name there, or sink, subtask and checkpoint."""
    kind: str
    """`TRANSACTION`, or the `StoreCommittable.kind`."""
    state: str
    """A transaction's state as the broker names it, or "gone"; in a store "waits", "applied" or "unknown"."""
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
    """Since 1970."""
    timeout_ms: int | None = None
    """After so long the broker aborts it."""
    producer_id: int | None = None
    epoch: int | None = None
    places: tuple[InPartition, ...] = ()
    where: str = ""
    """A description of the place, unless that is Kafka."""
    next: str = ""
    """A sentence on what becomes of it."""
    holds: bool = True
    """Whether it holds readers back, or locks in a store, while it waits: only that can be aborted."""

    @property
    def is_decided(self) -> bool:
        """Whether it has to be committed."""
        return self.decided_in is not None

    def open_ms(self, now_ms: int) -> int | None:
        """How long it has waited."""
        return None if self.started_at_ms is None else max(0, now_ms - self.started_at_ms)

    def left_ms(self, now_ms: int) -> int | None:
        """How long until the broker aborts it; None: nobody does, or it has ended."""
        if self.started_at_ms is None or self.timeout_ms is None or self.state != "Ongoing":
            return None
        return max(0, self.started_at_ms + self.timeout_ms - now_ms)


def open_ids(transactions: Transactions, pipeline: str) -> list[ListedTransaction]:
    """The ids of its sinks that hold readers back."""
    found = transactions.list(transaction_prefix(pipeline))
    return [each for each in found if each.state in OPEN and TransactionalId.parse(each.transactional_id)]


def find_transactions(
    transactions: Transactions, listed: Sequence[ListedTransaction], history: History | None
) -> list[WaitingOutput]:
    """The transactions of *listed*, and those that are decided in *history* and not finalized."""
    decided = _decided(history) if history is not None else {}
    unfinalized = unfinalized_committables(history) if history is not None else {}
    names = sorted({*(each.transactional_id for each in listed), *unfinalized})
    found = []
    for name, state in transactions.describe(names).items():
        known = decided.get((name, state.producer_id, state.epoch)) if state is not None else None
        if known is None and name in unfinalized and history is not None and history.unfinalized is not None:
            # Such an id is not used again before the checkpoint is finalized, and its epoch may have been raised by the
            # commit whose markers are missing.
            known = history.unfinalized.checkpoint, unfinalized[name]
        if state is not None or known is not None:
            found.append(_waiting(name, state, known))
    return found


def unfinalized_committables(history: History) -> dict[str, Committable]:
    """The committables of the checkpoint that is decided and not finalized, with its repairs, by transactional id."""
    manifest = history.unfinalized
    named = _committables(history, manifest) if manifest is not None else ()
    return {each.transactional_id: each for each in named if each.records}


def with_offsets(transactions: Transactions, waiting: WaitingOutput) -> WaitingOutput:
    """*waiting* with what the brokers have of it in each partition, where no decision says it."""
    if waiting.is_decided or not waiting.places:
        return waiting
    producers = transactions.producers((each.topic, each.partition) for each in waiting.places)
    places = tuple(
        InPartition(each.topic, each.partition, each.transaction_start_offset, each.last_sequence + 1)
        for each in producers
        if each.producer_id == waiting.producer_id and each.transaction_start_offset is not None
    )
    records = sum(each.count or 0 for each in places)
    return dataclasses.replace(waiting, places=places, records=records) if places else waiting


def _waiting(name: str, state: TransactionState | None, known: tuple[int, Committable] | None) -> WaitingOutput:
    parsed = TransactionalId.parse(name)
    assert parsed is not None  # it was listed so, or is a committable's
    checkpoint, committable = known or (None, None)
    return WaitingOutput(
        name=name, kind=TRANSACTION, state=state.state if state else "gone", sink=parsed.sink, subtask=parsed.subtask,
        incarnation=parsed.incarnation, attempt=parsed.attempt,
        checkpoint=committable.checkpoint if committable else None, decided_in=checkpoint,
        records=committable.records if committable else None,
        started_at_ms=state.start_time_ms if state and state.start_time_ms > 0 else None,
        timeout_ms=state.timeout_ms if state else None,
        producer_id=state.producer_id if state else None, epoch=state.epoch if state else None,
        places=_places(state, committable), next=_next(state, checkpoint),
    )  # fmt: skip


def _places(state: TransactionState | None, committable: Committable | None) -> tuple[InPartition, ...]:
    if committable is not None:
        return tuple(
            InPartition(each.topic, each.partition, each.first_offset, each.count) for each in committable.written
        )
    return tuple(InPartition(topic, partition) for topic, partition in state.partitions) if state else ()


def _next(state: TransactionState | None, checkpoint: int | None) -> str:
    shown = state.state if state else "gone"
    if checkpoint is None:
        return "the next run aborts it, and computes again what it holds; `transactions abort` does so at once"
    if shown in ("PrepareCommit", "CompleteCommit"):
        return "it is committed; the next run, or `transactions commit`, makes sure of it and finalizes the checkpoint"
    if shown in ("Ongoing", "Empty"):
        return "the next run commits it; `transactions commit` does so at once"
    return (
        "the broker has ended it before it was committed, or its id has expired: the next run, or `transactions "
        "commit`, looks at its records, and repairs what is lost"
    )


def _decided(history: History) -> Mapping[tuple[str, int, int], tuple[int, Committable]]:
    """The checkpoint of each transaction that a decision names, by id, producer id and epoch."""
    return {
        (each.transactional_id, each.producer_id, each.epoch): (manifest.checkpoint, each)
        for manifest in history.retained
        for each in _committables(history, manifest)
    }


def _committables(history: History, manifest: Manifest) -> Iterable[Committable]:
    """The committables of *manifest*, and what repairs have put in their place."""
    return [*manifest.committables, *(each.committable for each in history.repairs_of(manifest.checkpoint))]


@dataclass
class StagedOutput:
    """The output that waits for the stores of a pipeline, and what they show."""

    waiting: list[WaitingOutput] = field(default_factory=list)
    views: dict[str, StoreView] = field(default_factory=dict)
    """The answers of the stores, by sink."""
    kinds: dict[str, str] = field(default_factory=dict)
    """The `StoreCommittable.kind` that a sink sets aside, by sink."""
    holding: set[str] = field(default_factory=set)
    """The sinks whose stores hold something, as locks, for what waits there."""
    unasked: dict[str, str] = field(default_factory=dict)
    """Why a store was not asked, or did not answer, or why what waits for it is not known whole, by sink."""
    failed: set[str] = field(default_factory=set)
    """The sinks of `unasked` whose stores were asked, and refused or did not answer."""

    def look_at(self, stores: PipelineStores) -> None:
        """Ask every store of the pipeline."""
        self.kinds.update(stores.kinds)
        self.holding.update(stores.holding)
        for sink in stores.names:
            try:
                view = stores.look(sink)
            except (StoreUnavailable, StoreError, ConfigError) as error:
                self.unasked[sink] = str(error)
                self.failed.add(sink)
                continue
            if view is None:
                self.unasked[sink] = "a store of this kind cannot be looked at without being changed"
            else:
                self.views[sink] = view

    def undecided(self, sink: str, history: History) -> Iterator[WaitingOutput]:
        """Output that waits in a store, and that no decision names."""
        staged = history.unfinalized.staged if history.unfinalized else ()
        decided = [committable for committable in staged if committable.sink == sink]
        # A sink that is not exactly once sets nothing aside for a decision.
        for waits in self.views[sink].waiting if sink in self.kinds else ():
            if not any(names(committable, waits) for committable in decided):
                yield WaitingOutput(
                    name=waits.name, kind=self.kinds[sink], state="waits", sink=sink, subtask=waits.subtask,
                    incarnation=waits.incarnation, attempt=str(waits.attempt), checkpoint=waits.checkpoint,
                    started_at_ms=waits.since_ms, where="set aside in the store", next=DROPPED,
                    holds=sink in self.holding,
                )  # fmt: skip


def names(committable: StoreCommittable, waits: SetAside) -> bool:
    """Whether *committable* is about what *waits* in its store."""
    return committable.subtask == waits.subtask and waits.name.encode() in committable.body

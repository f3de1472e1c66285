"""Pending output, in Kafka's open transactions and set aside for stores: found, aborted, committed by hand.

Finding changes nothing; what is not known is None. All transactions of a checkpoint that is decided and not finalized
are found, even those that the broker has aborted: their output is missing until it is repaired.

An abort ends nothing that a manifest or a repair names. The coordinator is fenced first, and the decisions are read
after that, so that no decision can come in between. Output of an incarnation that the fence may have missed is left.

A commit is a short incarnation of a coordinator that finishes the newest checkpoint; a mere EndTxn would not do. A
living coordinator may record a repair for a transaction that the broker has aborted. A late marker would then make
visible what the repair replaced. So the decision log is taken over first; see docs/design/commit.md. It is
refused while a coordinator shows signs of life, unless it is taken over, and if one has begun meanwhile. Only
`Leader.finish_decided` ends anything. Nothing is changed if nothing is left to finish, or if the store of a decided
sink is not known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from threading import Event
from typing import Any, NamedTuple

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import (
    BlockRef,
    Committable,
    Manifest,
    StoreCommittable,
    TransactionalId,
    coordinator_id,
    transaction_prefix,
)
from exactlyonce.checkpoint.records.storage_url import described
from exactlyonce.checkpoint.requests import ListedTransaction, TransactionState, TxnState
from exactlyonce.checkpoint.succession import last_look
from exactlyonce.checkpoint.transactions.commit import incarnation_latest, settle, sweep
from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.connections import Connections, short_incarnation
from exactlyonce.engines.external_checks.stores import PipelineStores
from exactlyonce.engines.pipeline_resources import PipelineResources
from exactlyonce.pipeline.errors import BrokerUnavailable, ConfigError, Halt, StoreError, StoreUnavailable, TopicError
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.sizes import counted
from exactlyonce.sinks.committer import SetAside, StoreView

WAITS, APPLIED, UNKNOWN, GONE = "waits", "applied", "unknown", "gone"
"""The states of output in a store: set aside, committed, not asked; and of a transaction that the broker forgot."""
TRANSACTION = "transaction"
"""The kind of output in Kafka; `StoreCommittable` has the other kinds."""
BY_NAME = "its store is known by the module alone: give module:pipeline"
"""Why a store is not asked if a pipeline is named without its module."""
_AGAIN = "the next run commits it, as often as it takes; `transactions commit MODULE:PIPELINE` does so at once"
DROPPED = "if the pipeline runs, it is of the checkpoint in flight; else the next run drops it, and computes it again"


@dataclass(frozen=True)
class InPartition:
    """Records of a transaction in one partition."""

    topic: str
    partition: int
    first_offset: int | None = None
    count: int | None = None
    hidden: int | None = None
    """The offsets up to the end of the partition that read_committed readers do not get to see yet; None: not asked."""


@dataclass(frozen=True, kw_only=True)
class WaitingOutput:
    """One transaction, or one committable of a store."""

    name: str
    """The transactional id, or the name in a store, or sink, subtask and checkpoint."""
    kind: str
    """`TRANSACTION`, or the `StoreCommittable.kind`."""
    state: str
    """A transaction's state as the broker names it (`TxnState`), or `GONE`; in a store `WAITS`, `APPLIED` or
    `UNKNOWN`."""
    sink: str
    subtask: int
    incarnation: int | None = None
    attempt: str | None = None
    checkpoint: int | None = None
    """The checkpoint that it belongs to, if known."""
    decided_in: int | None = None
    """The checkpoint whose manifest or repair names it; None: undecided."""
    records: int | None = None
    started_at_ms: int | None = None
    """Since 1970."""
    timeout_ms: int | None = None
    """The transaction's timeout."""
    producer_id: int | None = None
    epoch: int | None = None
    places: tuple[InPartition, ...] = ()
    where: str = ""
    """The place, unless that is Kafka."""
    next: str = ""
    """A sentence on what happens next."""

    @property
    def is_decided(self) -> bool:
        """Whether it must be committed."""
        return self.decided_in is not None

    def open_ms(self, now_ms: int) -> int | None:
        """The time since its start."""
        return None if self.started_at_ms is None else max(0, now_ms - self.started_at_ms)

    def left_ms(self, now_ms: int) -> int | None:
        """The time until the broker aborts it; None: it does not, or has ended."""
        if self.started_at_ms is None or self.timeout_ms is None or self.state != TxnState.ONGOING:
            return None
        return max(0, self.started_at_ms + self.timeout_ms - now_ms)

    def figures(self, now_ms: int) -> dict[str, Any]:
        """All of it for a program or a page; None is not known."""
        return {
            "name": self.name, "kind": self.kind, "state": self.state, "sink": self.sink, "subtask": self.subtask,
            "transactional_id": self.name if self.kind == TRANSACTION else None,
            "producer_id": self.producer_id, "epoch": self.epoch,
            "incarnation": self.incarnation, "attempt": self.attempt,
            "started_at_ms": self.started_at_ms, "timeout_ms": self.timeout_ms,
            "open_ms": self.open_ms(now_ms), "left_ms": self.left_ms(now_ms),
            "partitions": [[place.topic, place.partition] for place in self.places],
            "written": [vars(place) for place in self.places],
            "checkpoint": self.checkpoint, "records": self.records, "decided_in": self.decided_in,
            "where": self.where or None,
        }  # fmt: skip


def open_ids(transactions: Transactions, pipeline: str) -> list[ListedTransaction]:
    """The open transactions of its sinks, which hold readers back."""
    listed = (listed for listed in transactions.list(transaction_prefix(pipeline)) if listed.state in TxnState.OPEN)
    return [transaction for transaction in listed if TransactionalId.parse(transaction.transactional_id)]


def find_transactions(
    transactions: Transactions, listed: Sequence[ListedTransaction], history: History | None
) -> list[WaitingOutput]:
    """The transactions of *listed*, and those that are decided in *history* and not finalized."""
    unfinalized = unfinalized_committables(history) if history is not None else {}
    names = sorted({*(transaction.transactional_id for transaction in listed), *unfinalized})
    decided = _decided(history) if history is not None and names else {}
    outputs = []
    for name, state in transactions.describe(names).items():
        known = decided.get((name, state.producer_id, state.epoch)) if state is not None else None
        if known is None and name in unfinalized and history is not None and history.unfinalized is not None:
            # Such an id is not used again before the checkpoint is finalized. The commit whose markers are missing may
            # have raised its epoch.
            known = history.unfinalized.checkpoint, unfinalized[name]
        if state is not None or known is not None:
            outputs.append(_waiting(name, state, known))
    return outputs


def unfinalized_committables(history: History) -> dict[str, Committable]:
    """The committables and repairs of the checkpoint that is decided and not finalized, by transactional id."""
    manifest = history.unfinalized
    named = _committables(history, manifest) if manifest is not None else ()
    return {committable.transactional_id: committable for committable in named if committable.records}


def with_hidden(topics: Topics, outputs: Iterable[WaitingOutput]) -> list[WaitingOutput]:
    """*outputs* with the number of offsets that each of their partitions hides from readers."""
    known, hidden = list(outputs), dict[tuple[str, int], int]()
    for topic in sorted({place.topic for output in known for place in output.places}):
        with suppress(TopicError):  # it was deleted
            offsets = topics.log_offsets(topic)
            for partition, end in offsets.end.items():
                hidden[topic, partition] = max(0, end - offsets.stable[partition])
    return [
        dataclasses.replace(
            output,
            places=tuple(
                dataclasses.replace(place, hidden=hidden.get((place.topic, place.partition))) for place in output.places
            ),
        )
        for output in known
    ]


class WaitingLook:
    """Looks at the waiting output of *pipeline* repeatedly, as the brokers and its decisions show it.

    No store is asked: of those it has the output that is decided and not finalized.
    """

    def __init__(self, config: ClientConfig, pipeline: str, timeout_ms: int) -> None:
        self._pipeline = pipeline
        self._topics = Topics(config, timeout_ms=timeout_ms)
        self._transactions = Transactions(config, timeout_ms=timeout_ms)

    def look(self, history: History) -> list[WaitingOutput]:
        """What waits, with *history*: no transaction whose commit is complete. The first look connects."""
        outputs = find_transactions(self._transactions, open_ids(self._transactions, self._pipeline), history)
        found = [output for output in outputs if output.state != TxnState.COMPLETE_COMMIT]
        return [*with_hidden(self._topics, found), *StagedOutput().decided(history, lambda _: None)]

    def close(self) -> None:
        self._topics.close()
        self._transactions.close()


def with_offsets(transactions: Transactions, waiting: WaitingOutput) -> WaitingOutput:
    """*waiting*, if undecided, with its offsets and counts in each partition as the brokers have them."""
    if waiting.is_decided or not waiting.places:
        return waiting
    hidden = {(place.topic, place.partition): place.hidden for place in waiting.places}
    producers = transactions.producers(hidden)
    places = tuple(
        InPartition(
            topic=state.topic,
            partition=state.partition,
            first_offset=state.transaction_start_offset,
            count=state.last_sequence + 1,
            hidden=hidden.get((state.topic, state.partition)),
        )
        for state in producers
        if state.producer_id == waiting.producer_id and state.transaction_start_offset is not None
    )
    records = sum(place.count or 0 for place in places)
    return dataclasses.replace(waiting, places=places, records=records) if places else waiting


def _waiting(name: str, state: TransactionState | None, known: tuple[int, Committable] | None) -> WaitingOutput:
    parsed = TransactionalId.parse(name)
    assert parsed is not None  # `open_ids` and committables have no others
    checkpoint, committable = known or (None, None)
    return WaitingOutput(
        name=name, kind=TRANSACTION, state=state.state if state else GONE, sink=parsed.sink, subtask=parsed.subtask,
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
        written = committable.written
        return tuple(InPartition(part.topic, part.partition, part.first_offset, part.count) for part in written)
    return tuple(InPartition(topic, partition) for topic, partition in state.partitions) if state else ()


def _next(state: TransactionState | None, checkpoint: int | None) -> str:
    shown = state.state if state else GONE
    if checkpoint is None:
        return "the next run aborts it, and computes again what it holds; `transactions abort` does so at once"
    if shown in (TxnState.PREPARE_COMMIT, TxnState.COMPLETE_COMMIT):
        return "it is committed; the next run, or `transactions commit`, makes sure of it and finalizes the checkpoint"
    if shown in (TxnState.ONGOING, TxnState.EMPTY):
        return "the next run commits it; `transactions commit` does so at once"
    return (
        "the broker has ended it before it was committed, or its id has expired: the next run, or `transactions "
        "commit`, looks at its records, and repairs what is lost"
    )


def _decided(history: History) -> Mapping[tuple[str, int, int], tuple[int, Committable]]:
    """The checkpoint and committable of each decided transaction, by id, producer id and epoch."""
    return {
        (committable.transactional_id, committable.producer_id, committable.epoch): (manifest.checkpoint, committable)
        for manifest in history.retained
        for committable in _committables(history, manifest)
    }


def _committables(history: History, manifest: Manifest) -> Iterable[Committable]:
    """The committables of *manifest* and of its repairs."""
    return [*manifest.committables, *(repair.committable for repair in history.repairs_of(manifest.checkpoint))]


@dataclass
class StagedOutput:
    """The output that waits in the stores of a pipeline."""

    waiting: list[WaitingOutput] = field(default_factory=list)
    views: dict[str, StoreView] = field(default_factory=dict)
    """The answers of the stores, by sink."""
    kinds: dict[str, str] = field(default_factory=dict)
    """The `StoreCommittable.kind` that each sink sets aside."""
    unasked: dict[str, str] = field(default_factory=dict)
    """The reasons why stores were not asked, did not answer, or show only a part, by sink."""
    failed: set[str] = field(default_factory=set)
    """The sinks of `unasked` whose stores refused or did not answer."""

    def look_at(self, stores: PipelineStores) -> None:
        self.kinds.update(stores.kinds)
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

    def decided(
        self, history: History, written_at_ms: Callable[[Sequence[BlockRef]], int | None]
    ) -> Iterator[WaitingOutput]:
        """The output for stores of the checkpoint that is decided and not finalized; *written_at_ms* dates blocks."""
        manifest = history.unfinalized
        if manifest is None:
            return
        for staged in manifest.staged:
            view = self.views.get(staged.sink)
            listed = next((waits for waits in view.waiting if names(staged, waits)), None) if view else None
            state, where = _progress(staged, view, listed, described(history.storage))
            staged_at_ms = listed.since_ms if listed else written_at_ms(staged.blocks)
            yield WaitingOutput(
                name=listed.name if listed else staged.name, kind=staged.kind, state=state, sink=staged.sink,
                subtask=staged.subtask, checkpoint=staged.checkpoint, records=staged.records,
                decided_in=manifest.checkpoint, where=where, next=_AGAIN,
                incarnation=listed.incarnation if listed else None, attempt=str(listed.attempt) if listed else None,
                started_at_ms=staged_at_ms or manifest.triggered_at_ms,
            )  # fmt: skip

    def undecided(self, sink: str, history: History) -> Iterator[WaitingOutput]:
        """The undecided output that waits in the store of *sink*."""
        staged = history.unfinalized.staged if history.unfinalized else ()
        decided = [committable for committable in staged if committable.sink == sink]
        # A sink that is not exactly once sets nothing aside.
        for waits in self.views[sink].waiting if sink in self.kinds else ():
            if not any(names(committable, waits) for committable in decided):
                yield WaitingOutput(
                    name=waits.name, kind=self.kinds[sink], state=WAITS, sink=sink, subtask=waits.subtask,
                    incarnation=waits.incarnation, attempt=str(waits.attempt), checkpoint=waits.checkpoint,
                    started_at_ms=waits.since_ms, where="set aside in the store", next=DROPPED,
                )  # fmt: skip


def names(committable: StoreCommittable, waits: SetAside) -> bool:
    """Whether *committable* is the output that *waits* in its store."""
    return committable.subtask == waits.subtask and waits.name.encode() in committable.body


def _progress(staged: StoreCommittable, view: StoreView | None, listed: SetAside | None, place: str) -> tuple[str, str]:
    """The progress of a commit, and its evidence; blocks are kept in *place*."""
    blocks = f"{counted(len(staged.blocks), 'block')} of {place}" if staged.blocks else ""
    if view is None:
        return UNKNOWN, blocks or "the store was not asked"
    has = view.ledger.get(staged.subtask, 0)
    ledger = f"the ledger has checkpoint {has}" if has else "the ledger has nothing of the subtask"
    if has >= staged.checkpoint:
        return APPLIED, f"{ledger}: it is in the store"
    where = blocks or ("set aside in the store" if listed else "not listed by the store any more")
    return WAITS, f"{where}; {ledger}"


SETTLED_TIMEOUT_MS = 30_000
SETTLED_POLL_S = 0.05


def require_undecided(waiting: Sequence[WaitingOutput], names: Collection[str]) -> None:
    """Raise `ConfigError` unless all of *names* wait, undecided, and hold somebody back."""
    by_name = {output.name: output for output in waiting}
    for name in names:
        output = by_name.get(name)
        if output is None:
            raise ConfigError(f"{name} does not wait. Nothing was aborted. `transactions list` shows what waits.")
        if output.is_decided:
            raise ConfigError(
                f"Checkpoint {output.decided_in} has decided {name}: it must become visible, for its input is not read "
                f"again. Nothing was aborted. Run the pipeline, or `transactions commit`."
            )
        if output.kind != TRANSACTION:
            raise ConfigError(
                f"{name} holds nobody back: it waits in blocks or files that the next run drops. Nothing was aborted."
            )


def abort_undecided(
    config: ClientConfig, resources: PipelineResources, names: Collection[str] = ()
) -> tuple[list[WaitingOutput], list[WaitingOutput]]:
    """Fence the coordinator, then abort its undecided output, or only *names* if any are given.

    Returns the aborted output, and the output that is left.

    `Halt` where the decisions cannot be read. Only incarnations in *resources* are aborted, for the fence came after
    all of them. One that has begun since is not fenced if it is seen right before the fence. Nothing is aborted if the
    log shows it after the fence. If it begins later still, its transactions are not touched.
    """
    newest = _newest(resources)
    topic = find_topic(config, resources.pipeline)
    with closing(Connections(config, resources.pipeline)) as connections:
        log, transactions = connections.open_log(topic), connections.transactions
        partitions = [(topic.name, partition) for partition in range(topic.partitions)]
        _require_no_newer(
            connections.drive(last_look(resources.pipeline, log.peek_at_stable, connections.clock)), newest
        )
        connections.drive(settle(coordinator_id(resources.pipeline), partitions))
        history = _settled(connections)
        _require_no_newer(history, newest)
        ids = open_ids(transactions, resources.pipeline)
        listed = [transaction for transaction in ids if incarnation_latest([transaction]) <= newest]
        outputs = find_transactions(transactions, listed, history)
        require_undecided(outputs, names)
        protected = {output.name for output in outputs if output.is_decided} | unfinalized_committables(history).keys()
        if names:
            every = {listed.transactional_id for listed in transactions.list(transaction_prefix(resources.pipeline))}
            protected |= every - set(names)
        procedure = sweep(
            resources.pipeline, newest + 1, 0, protected=protected, fenced_below=(newest + 1, 0),
            outputs={(place.topic, place.partition) for output in outputs for place in output.places},
        )  # fmt: skip
        connections.drive(procedure)
    aborted = [output for output in outputs if not output.is_decided and (not names or output.name in names)]
    left = [output for output in outputs if output not in aborted]
    return aborted, left


def _require_no_newer(history: History, newest: int) -> None:
    if history.incarnation_latest > newest:
        raise ConfigError(
            f"A new instance of {history.pipeline} has begun meanwhile. Nothing was aborted: it does that itself. If "
            f"it does not run any more, run this again."
        )


def _newest(resources: PipelineResources) -> int:
    """The newest known incarnation; Halt if the decisions are not known."""
    if resources.topic is None:
        raise Halt(
            f"The topic of {resources.pipeline}'s decisions is gone, so it is not known which of its transactions are "
            f"decided. Restore it, or forget the pipeline by `exactlyonce reset {resources.pipeline}`, which aborts "
            f"all."
        )
    if resources.history is None:
        raise Halt(resources.unreadable)
    return max(resources.history.incarnation_latest, incarnation_latest(resources.transactions))


def _settled(connections: Connections) -> History:
    """The decisions, once the log can be read to its end."""
    log, clock = connections.log, connections.clock
    until_ms = clock.monotonic_ms() + SETTLED_TIMEOUT_MS
    while (history := connections.drive(log.peek())) is None:
        if clock.monotonic_ms() > until_ms:
            raise BrokerUnavailable(
                f"{log.topic.name} cannot be read to its end: somebody has a transaction open in it. Nothing was "
                f"aborted. Run this again in a minute."
            )
        Event().wait(SETTLED_POLL_S)
    history.halt_if_damaged()
    return history


def require_decided(waiting: Collection[WaitingOutput], names: Collection[str]) -> None:
    """Raise `ConfigError` unless all of *names* are decided and not known to be finalized."""
    decided = {output.name: output.is_decided for output in waiting}
    for name in names:
        if name not in decided:
            raise ConfigError(f"{name} does not wait. Nothing was committed. `transactions list` shows what waits.")
        if not decided[name]:
            raise ConfigError(
                f"No checkpoint has decided {name}: its input is read again, so that its records would come twice. "
                f"Nothing was committed. Run the pipeline, or `transactions abort`, which ends it."
            )


def unfinished(resources: PipelineResources, graph: LogicalGraph | None) -> Manifest | None:
    """The checkpoint to finish, if there is one; raises if that cannot be done here. Nothing is changed."""
    if resources.topic is None or resources.history is None:
        raise Halt(
            resources.unreadable or f"There is no topic of {resources.pipeline}'s decisions: nothing is decided."
        )
    if resources.is_sink:
        raise ConfigError(
            f"{resources.pipeline} is a sink of Spark: start its query again, which commits first what is decided."
        )
    resources.history.halt_if_damaged()
    manifest = resources.history.unfinalized
    if manifest is not None and manifest.staged and graph is None:
        sinks = ", ".join(sorted({staged.sink for staged in manifest.staged}))
        raise ConfigError(
            f"Checkpoint {manifest.checkpoint} is decided for Kafka and the stores of {sinks} together, and these are "
            f"known by the pipeline's module alone. Name the pipeline as module:pipeline, or run it."
        )
    return manifest


class FinishedCheckpoint(NamedTuple):
    checkpoint: int | None
    """None: nothing was left to finish after the fence."""
    fates: dict[str, str]
    """The fate of each committable, by name."""


def finish(
    config: ClientConfig,
    resources: PipelineResources,
    graph: LogicalGraph | None,
    note: Callable[[str], None],
    *,
    take_over: bool,
) -> FinishedCheckpoint:
    """Finish the decided checkpoint. ConfigError, and nothing is changed, if that was done since *resources* were
    found, or another coordinator does it; *take_over*: one that lived then is fenced."""
    assert resources.history is not None, "see `unfinished`"
    short = short_incarnation(config, resources.history, graph, note, take_over=take_over, require=_require_unfinalized)
    with short as connections:
        manifest = connections.log.history.unfinalized
        checkpoint = manifest.checkpoint if manifest is not None else None
        return FinishedCheckpoint(checkpoint, connections.drive(connections.leader.finish_decided()))


def _require_unfinalized(history: History) -> None:
    if history.unfinalized is None:
        raise ConfigError(
            f"Checkpoint {history.checkpoint_latest} of {history.pipeline} was finalized meanwhile: nothing that is "
            f"decided waits any more. Nothing was changed."
        )

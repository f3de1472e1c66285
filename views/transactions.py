"""The output of a pipeline that waits: its open transactions, and what is set aside for stores.

Invariants: brokers and stores are only looked at; a store that could not be asked is named, and what it would have told
is left open. A store is known by the pipeline's module alone: a name says which sinks there are, and not where they
write.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from typing import NamedTuple

from exactlyonce.checkpoint.records.encoding import BlockKey
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import BlockRef, StoreCommittable
from exactlyonce.checkpoint.records.storage_url import described
from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.blocks import Storages
from exactlyonce.engines.ending.waiting import (
    BY_NAME,
    DROPPED,
    StagedOutput,
    WaitingOutput,
    find_transactions,
    names,
    open_ids,
)
from exactlyonce.engines.surroundings.stores import PipelineStores
from exactlyonce.engines.traces import Traces
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.sizes import counted, shown_bytes
from exactlyonce.sinks.committer import SetAside, StoreView
from exactlyonce.views.unclaimed_blocks import BlockSurvey, survey

_AGAIN = "the next run commits it, as often as it takes; `transactions commit MODULE:PIPELINE` does so at once"


class WaitingView(NamedTuple):
    """All that waits, and what is not known."""

    waiting: list[WaitingOutput]
    unasked: dict[str, str]
    """Why a store was not asked, or may not have shown all, by sink."""


def waiting_output(config: ClientConfig, traces: Traces, graph: LogicalGraph | None) -> WaitingView:
    """All output of the pipeline that waits; *graph*, if its module was given, says where its stores are."""
    with closing(Transactions(config)) as transactions:
        found = find_transactions(transactions, open_ids(transactions, traces.pipeline), traces.history)
    staged = find_staged(config, traces, graph)
    refusing = {sink: view.problem for sink, view in staged.views.items() if view.problem}
    return WaitingView([*found, *staged.waiting], {**staged.unasked, **refusing})


def find_staged(config: ClientConfig, traces: Traces, graph: LogicalGraph | None) -> StagedOutput:
    """The part of it that waits for stores, and what these show."""
    found, history = StagedOutput(), traces.history
    if history is None or history.latest is None:
        return found
    with closing(Storages(config, find_topic(config.confluent(), traces.pipeline))) as storages:
        if graph is not None:
            with closing(PipelineStores(graph, storages.of(history.storage))) as stores:
                found.look_at(stores)
        for sink in traces.stores():
            if sink not in found.views:
                found.unasked.setdefault(sink, BY_NAME)
        sinks = {*traces.stores(), *found.views}
        if not sinks:
            return found
        seen = survey(storages, history, deep=False)
        found.waiting += _decided(history, found.views, seen)
        for sink in sorted(found.views):
            found.waiting += found.undecided(sink, history)
        found.waiting += _rows(seen, sinks)
        for sink in sinks if seen.damaged else ():
            why = f"which of its rows nobody decided is not known: {'; '.join(seen.damaged.values())}"
            found.unasked.setdefault(sink, why)
    return found


def _decided(history: History, views: Mapping[str, StoreView], seen: BlockSurvey) -> Iterator[WaitingOutput]:
    """The output for stores of the checkpoint that is decided and not finalized."""
    manifest = history.unfinalized
    if manifest is None:
        return
    for each in manifest.staged:
        view = views.get(each.sink)
        listed = next((waits for waits in view.waiting if names(each, waits)), None) if view else None
        state, where = _progress(each, view, listed, described(history.storage))
        yield WaitingOutput(
            name=listed.name if listed else each.name, kind=each.kind, state=state, sink=each.sink,
            subtask=each.subtask, checkpoint=each.checkpoint, records=each.records,
            decided_in=manifest.checkpoint, where=where, next=_AGAIN,
            incarnation=listed.incarnation if listed else None, attempt=str(listed.attempt) if listed else None,
            started_at_ms=_staged_at_ms(each, listed, seen) or manifest.triggered_at_ms,
        )  # fmt: skip


def _staged_at_ms(each: StoreCommittable, listed: SetAside | None, seen: BlockSurvey) -> int | None:
    """When *each* was set aside, as its store or the storage of its blocks says."""
    return listed.since_ms if listed else seen.written_at_ms(each.blocks)


def _progress(each: StoreCommittable, view: StoreView | None, listed: SetAside | None, place: str) -> tuple[str, str]:
    """How far the commit has come, and by what that is known; *place* is where blocks are kept."""
    blocks = f"{counted(len(each.blocks), 'block')} of {place}" if each.blocks else ""
    if view is None:
        return "unknown", blocks or "the store was not asked"
    has = view.ledger.get(each.subtask, 0)
    ledger = f"the ledger has checkpoint {has}" if has else "the ledger has nothing of the subtask"
    if has >= each.checkpoint:
        return "applied", f"{ledger}: it is in the store"
    where = blocks or ("set aside in the store" if listed else "not listed by the store any more")
    return "waits", f"{where}; {ledger}"


def _rows(seen: BlockSurvey, sinks: Collection[str]) -> Iterator[WaitingOutput]:
    """Rows in blocks that no decision names, by sink subtask, checkpoint and storage."""
    groups: defaultdict[tuple[str, int, int, int, str], list[BlockRef]] = defaultdict(list)
    for storage, ref in seen.unclaimed:
        key = BlockKey.parse(ref.key)
        if key is not None and key.operator in sinks:
            groups[key.operator, key.key_group, key.checkpoint, key.incarnation, storage].append(ref)
    for (sink, subtask, checkpoint, incarnation, storage), refs in sorted(groups.items()):
        size = shown_bytes(sum(ref.size for ref in refs))
        attempts = {key.attempt for ref in refs if (key := BlockKey.parse(ref.key))}
        yield WaitingOutput(
            name=f"{sink}:{subtask}:{checkpoint}", kind="rows", state="waits", sink=sink, subtask=subtask,
            incarnation=incarnation, attempt=", ".join(map(str, sorted(attempts))), checkpoint=checkpoint,
            where=f"{counted(len(refs), 'block')} of {described(storage)}, {size}",
            started_at_ms=seen.written_at_ms(refs), next=DROPPED, holds=False,
        )  # fmt: skip

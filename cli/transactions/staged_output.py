"""Output that waits for stores: what the newest checkpoint has decided, what nobody has, and what the ledgers say.

Invariants: stores are only looked at; a store that could not be asked is named, and what it would have told is left
open. A store is known by the pipeline's module alone: a name says which sinks there are, and not where they write.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field

from exactlyonce.checkpoint.records.encoding import BlockKey
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import BlockRef, StoreCommittable
from exactlyonce.checkpoint.records.storage_url import described
from exactlyonce.cli import text
from exactlyonce.cli.traces import Traces
from exactlyonce.cli.transactions.waiting import WaitingOutput
from exactlyonce.cli.unclaimed_blocks import BlockSurvey, survey
from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.blocks import Storages
from exactlyonce.engines.surroundings.stores import PipelineStores
from exactlyonce.pipeline.errors import ConfigError, StoreError, StoreUnavailable
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.sizes import shown_bytes
from exactlyonce.sinks.committer import SetAside, StoreView

BY_NAME = "its store is known by the module alone: give module:pipeline"
"""Why a store is not asked where a pipeline is named without its module."""
_AGAIN = "the next run commits it, as often as it takes; `transactions commit MODULE:PIPELINE` does so at once"
_DROPPED = "if the pipeline runs, it is of the checkpoint in flight; else the next run drops it, and computes it again"


@dataclass
class StagedOutput:
    """What was found."""

    waiting: list[WaitingOutput] = field(default_factory=list)
    views: dict[str, StoreView] = field(default_factory=dict)
    """By sink, what its store showed."""
    kinds: dict[str, str] = field(default_factory=dict)
    """By sink that stages, what it sets aside."""
    holding: set[str] = field(default_factory=set)
    """The sinks whose stores hold something for what waits there."""
    unasked: dict[str, str] = field(default_factory=dict)
    """By sink, why its store was not asked, or did not answer, or why not all is known of what waits for it."""
    failed: set[str] = field(default_factory=set)
    """Those of `unasked` whose stores were asked, and refused or did not answer."""


def look_at_stores(stores: PipelineStores, found: StagedOutput) -> None:
    """Ask every store of the pipeline."""
    found.kinds.update(stores.kinds)
    found.holding.update(stores.holding)
    for sink in stores.names:
        try:
            view = stores.look(sink)
        except (StoreUnavailable, StoreError, ConfigError) as error:
            found.unasked[sink] = str(error)
            found.failed.add(sink)
            continue
        if view is None:
            found.unasked[sink] = "a store of this kind cannot be looked at without being changed"
        else:
            found.views[sink] = view


def find_staged(config: ClientConfig, traces: Traces, graph: LogicalGraph | None) -> StagedOutput:
    """All of the pipeline of *traces*; *graph*, if its module was given, says where the stores are."""
    found, history = StagedOutput(), traces.history
    if history is None or history.latest is None:
        return found
    with closing(Storages(config, find_topic(config.confluent(), traces.pipeline))) as storages:
        if graph is not None:
            with closing(PipelineStores(graph, storages.of(history.storage))) as stores:
                look_at_stores(stores, found)
        for sink in traces.stores():
            if sink not in found.views:
                found.unasked.setdefault(sink, BY_NAME)
        sinks = {*traces.stores(), *found.views}
        if not sinks:
            return found
        seen = survey(storages, history, deep=False)
        found.waiting += _decided(history, found.views, seen)
        for sink in sorted(found.views):
            found.waiting += undecided(sink, found, history)
        found.waiting += _rows(seen, sinks)
        for sink in sinks if seen.damaged else ():
            why = f"which of its rows nobody decided is not known: {'; '.join(seen.damaged.values())}"
            found.unasked.setdefault(sink, why)
    return found


def _decided(history: History, views: Mapping[str, StoreView], seen: BlockSurvey) -> Iterator[WaitingOutput]:
    """What the checkpoint that is decided, and not finalized, has for stores."""
    manifest = history.unfinalized
    if manifest is None:
        return
    for each in manifest.staged:
        view = views.get(each.sink)
        listed = next((waits for waits in view.waiting if _names(each, waits)), None) if view else None
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


def _names(committable: StoreCommittable, waits: SetAside) -> bool:
    return committable.subtask == waits.subtask and waits.name.encode() in committable.body


def _progress(each: StoreCommittable, view: StoreView | None, listed: SetAside | None, place: str) -> tuple[str, str]:
    """How far the commit has come, and by what that is known; *place* is where blocks are kept."""
    blocks = f"{text.counted(len(each.blocks), 'block')} of {place}" if each.blocks else ""
    if view is None:
        return "unknown", blocks or "the store was not asked"
    has = view.ledger.get(each.subtask, 0)
    ledger = f"the ledger has checkpoint {has}" if has else "the ledger has nothing of the subtask"
    if has >= each.checkpoint:
        return "applied", f"{ledger}: it is in the store"
    where = blocks or ("set aside in the store" if listed else "not listed by the store any more")
    return "waits", f"{where}; {ledger}"


def undecided(sink: str, staged: StagedOutput, history: History) -> Iterator[WaitingOutput]:
    """What waits in a store, and no decision names."""
    decided = [each for each in (history.unfinalized.staged if history.unfinalized else ()) if each.sink == sink]
    # A sink that is not exactly once sets nothing aside for a decision.
    for waits in staged.views[sink].waiting if sink in staged.kinds else ():
        if not any(_names(each, waits) for each in decided):
            yield WaitingOutput(
                name=waits.name, kind=staged.kinds[sink], state="waits", sink=sink, subtask=waits.subtask,
                incarnation=waits.incarnation, attempt=str(waits.attempt), checkpoint=waits.checkpoint,
                started_at_ms=waits.since_ms, where="set aside in the store", next=_DROPPED,
                holds=sink in staged.holding,
            )  # fmt: skip


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
            where=f"{text.counted(len(refs), 'block')} of {described(storage)}, {size}",
            started_at_ms=seen.written_at_ms(refs), next=_DROPPED, holds=False,
        )  # fmt: skip

"""The waiting output of a pipeline: its open transactions, and rows staged for stores.

Invariants: brokers and stores are only looked at; a store that could not be asked is named. Only the pipeline's module
knows its stores: its name tells the sinks, and not where they write.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import closing
from typing import NamedTuple

from exactlyonce.checkpoint.records.encoding import BlockKey
from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.checkpoint.records.storage_url import described
from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.blocks import Storages
from exactlyonce.engines.external_checks.stores import PipelineStores
from exactlyonce.engines.pending_output import (
    BY_NAME,
    DROPPED,
    WAITS,
    StagedOutput,
    WaitingOutput,
    find_transactions,
    open_ids,
    with_hidden,
)
from exactlyonce.engines.pipeline_resources import PipelineResources
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.sizes import counted, shown_bytes
from exactlyonce.sinks.write_ahead.writer import KIND
from exactlyonce.views.checkpoints import BlockSurvey, survey


class WaitingView(NamedTuple):
    waiting: list[WaitingOutput]
    unasked: dict[str, str]
    """Why a store was not asked, or may not have shown all, by sink."""


def waiting_output(config: ClientConfig, resources: PipelineResources, graph: LogicalGraph | None) -> WaitingView:
    """All waiting output of the pipeline; *graph*, if its module was given, tells where its stores are."""
    with closing(Transactions(config)) as transactions, closing(Topics(config)) as topics:
        listed = open_ids(transactions, resources.pipeline)
        open_output = with_hidden(topics, find_transactions(transactions, listed, resources.history))
    staged = find_staged(config, resources, graph)
    refusing = {sink: view.problem for sink, view in staged.views.items() if view.problem}
    return WaitingView([*open_output, *staged.waiting], {**staged.unasked, **refusing})


def find_staged(config: ClientConfig, resources: PipelineResources, graph: LogicalGraph | None) -> StagedOutput:
    """The output that waits for stores, and the views of these stores."""
    output, history = StagedOutput(), resources.history
    if history is None or history.latest is None:
        return output
    with closing(Storages(config, find_topic(config, resources.pipeline))) as storages:
        if graph is not None:
            with closing(PipelineStores(graph, storages.of(history.storage), config)) as stores:
                output.look_at(stores)
        for sink in resources.stores():
            if sink not in output.views:
                output.unasked.setdefault(sink, BY_NAME)
        sinks = {*resources.stores(), *output.views}
        if not sinks:
            return output
        blocks = survey(storages, history, deep=False)
        output.waiting += output.decided(history, blocks.written_at_ms)
        for sink in sorted(output.views):
            output.waiting += output.undecided(sink, history)
        output.waiting += _rows(blocks, sinks)
        for sink in sinks if blocks.damaged else ():
            why = f"which of its rows nobody decided is not known: {'; '.join(blocks.damaged.values())}"
            output.unasked.setdefault(sink, why)
    return output


def _rows(blocks: BlockSurvey, sinks: Collection[str]) -> Iterator[WaitingOutput]:
    """Rows in blocks that no decision names, by sink subtask, checkpoint and storage."""
    groups: defaultdict[tuple[str, int, int, int, str], list[BlockRef]] = defaultdict(list)
    for storage, ref in blocks.unclaimed:
        key = BlockKey.parse(ref.key)
        if key is not None and key.operator in sinks:
            groups[key.operator, key.key_group, key.checkpoint, key.incarnation, storage].append(ref)
    for (sink, subtask, checkpoint, incarnation, storage), refs in sorted(groups.items()):
        size = shown_bytes(sum(ref.size for ref in refs))
        attempts = {key.attempt for ref in refs if (key := BlockKey.parse(ref.key))}
        yield WaitingOutput(
            name=f"{sink}:{subtask}:{checkpoint}", kind=KIND, state=WAITS, sink=sink, subtask=subtask,
            incarnation=incarnation, attempt=", ".join(map(str, sorted(attempts))), checkpoint=checkpoint,
            where=f"{counted(len(refs), 'block')} of {described(storage)}, {size}",
            started_at_ms=blocks.written_at_ms(refs), next=DROPPED,
        )  # fmt: skip

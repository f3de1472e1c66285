"""The stores that a pipeline writes to beside Kafka, as its leader asks for them.

Invariants: nothing is committed but what the ledger in the store takes; the rows that a committable names are read from
the checkpoint topic, in the order in which they were set aside, and are the bytes that were written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.records.manifest import BlockRef, StoreCommittable
from exactlyonce.checkpoint.store.blocks import Blocks
from exactlyonce.pipeline.errors import Halt
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.sinks.write_ahead.store import LedgerEntry, Store
from exactlyonce.sinks.write_ahead.writer import INDEXED, KIND, decode_index


@runtime_checkable
class Stored(Protocol):
    """The description of a sink whose output a checkpoint commits to a store."""

    def store(self, type_: Any) -> Store:
        """A connection for rows of this type, not open yet."""


class PipelineStores:
    """Of the pipeline of *graph*; *blocks* reads what was set aside. Making one asks nothing. For one thread."""

    def __init__(self, graph: LogicalGraph, blocks: Blocks) -> None:
        self._pipeline, self._blocks = graph.pipeline_id, blocks
        self._stores: dict[str, Store] = {}
        for node in graph.sinks:
            sink = node.sink
            if isinstance(sink, Stored):
                self._stores[node.id] = sink.store(graph.type_of(node.inputs[0]))

    @property
    def sinks(self) -> tuple[str, ...]:
        """Those whose output is committed to a store."""
        return tuple(self._stores)

    def check(self) -> None:
        """Before anything is fenced: StoreError where a store cannot take what its sink writes, StoreUnavailable where
        it is away."""
        for store in self._stores.values():
            store.check()

    def __call__(self, request: ask.Request) -> Any:
        """The answer, or `NotImplemented` if *request* is about something else."""
        match request:
            case ask.FenceStore(sink, incarnation, origin):
                return self._stores[sink].fence(self._pipeline, sink, incarnation, origin)
            case ask.CommitStaged(committable, incarnation):
                hit("store-committing")
                return self._commit(committable, incarnation)
        return NotImplemented

    def _commit(self, committable: StoreCommittable, incarnation: int) -> bool:
        store = self._stores.get(committable.sink)
        if store is None or committable.kind != KIND:
            raise Halt(
                f"Checkpoint {committable.checkpoint} was decided with {committable.records} records of sink "
                f"{committable.sink!r}, set aside as {committable.kind!r}, and the pipeline has no such sink any more. "
                f"Run it once as it was, until that checkpoint is finalized; then change it."
            )
        entry = LedgerEntry(
            pipeline=self._pipeline,
            sink=committable.sink,
            subtask=committable.subtask,
            checkpoint=committable.checkpoint,
            previous=committable.previous,
            incarnation=incarnation,
        )
        return store.apply(self._chunks(committable), entry)

    def _chunks(self, committable: StoreCommittable) -> Iterator[bytes]:
        """The rows of *committable*. All are of one partition, which is read in the order of its offsets."""
        refs = list(committable.blocks)
        if committable.body == INDEXED:
            refs = [ref for body in self._bodies(refs) for ref in decode_index(body)]
        return self._bodies(refs)

    def _bodies(self, refs: list[BlockRef]) -> Iterator[bytes]:
        return (block.body for _, block in self._blocks.fetch(refs))

    def close(self) -> None:
        """Let go of all connections."""
        for store in self._stores.values():
            store.close()

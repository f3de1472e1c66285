"""The stores that a pipeline writes to beside Kafka, as its leader asks for them."""

from __future__ import annotations

from typing import Any

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.checkpoint.store.blocks import Blocks
from exactlyonce.pipeline.errors import Halt, StoreError, StoreUnavailable
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.sinks.committer import Committer, CommitterContext, Committing


def stages(graph: LogicalGraph) -> bool:
    """Whether any sink of *graph* sets something aside for a store."""
    return any(isinstance(node.sink, Committing) and node.sink.stages for node in graph.sinks)


class PipelineStores:
    """Of the pipeline of *graph*; *blocks* reads what was set aside. Making one asks nothing. For one thread."""

    def __init__(self, graph: LogicalGraph, blocks: Blocks) -> None:
        self._committers: dict[str, Committer] = {}
        self._writing: dict[str, Committer] = {}
        """Of sinks whose writers write to the store themselves: they are only checked."""
        for node in graph.sinks:
            sink = node.sink
            if isinstance(sink, Committing):
                type_ = graph.type_of(node.inputs[0])
                context = CommitterContext(pipeline=graph.pipeline_id, sink=node.id, type=type_, blocks=blocks)
                committer = sink.open_committer(context)
                if sink.stages:
                    self._committers[node.id] = committer
                else:
                    self._writing[node.id] = committer

    @property
    def sinks(self) -> tuple[str, ...]:
        """Those whose output is committed to a store."""
        return tuple(self._committers)

    def check(self) -> None:
        """Before anything is fenced: StoreError where a store cannot take what its sink writes, StoreUnavailable where
        it is away; each names the sink."""
        for sink, each in (*self._committers.items(), *self._writing.items()):
            try:
                each.check()
            except StoreError as error:
                raise StoreError(f"Sink {sink!r}: {error}") from error
            except StoreUnavailable as error:
                raise StoreUnavailable(f"Sink {sink!r}: {error}") from error

    def __call__(self, request: ask.Request) -> Any:
        """The answer, or `NotImplemented` if *request* is about something else."""
        match request:
            case ask.FenceStore(sink, incarnation, origin):
                return dict(self._committers[sink].fence(incarnation, origin))
            case ask.CleanStore(sink, incarnation, attempt):
                return self._committers[sink].clean(incarnation, attempt)
            case ask.CommitStaged(committable, incarnation, origin):
                hit("store-committing")
                return self._committer(committable).commit(committable, incarnation, origin)
        return NotImplemented

    def _committer(self, committable: StoreCommittable) -> Committer:
        found = self._committers.get(committable.sink)
        if found is None or found.kind != committable.kind:
            raise Halt(
                f"Checkpoint {committable.checkpoint} was decided with {committable.records} records of sink "
                f"{committable.sink!r}, set aside as {committable.kind!r}, and the pipeline has no such sink any more, "
                f"or one with another delivery. "
                f"Run it once as it was, until that checkpoint is finalized; then change it."
            )
        return found

    def close(self) -> None:
        """Let go of all connections."""
        for each in (*self._committers.values(), *self._writing.values()):
            each.close()

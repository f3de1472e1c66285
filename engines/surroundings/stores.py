"""The stores that a pipeline writes to beside Kafka, as its leader asks for them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.block_storage import Blocks
from exactlyonce.checkpoint.commits.of_stores import StagingSink
from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.pipeline import schema
from exactlyonce.pipeline.errors import Halt, StoreError, StoreUnavailable
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.sink import Sink, naming
from exactlyonce.sinks.committer import (
    CommitsBySubtask,
    Committer,
    CommitterContext,
    Committing,
    Inspectable,
    RollsBack,
    StoreView,
)
from exactlyonce.sinks.files.layout import KIND as FILES
from exactlyonce.sinks.prepared.committer import KIND as PREPARED
from exactlyonce.sinks.write_ahead.writer import KIND as ROWS


def stages(graph: LogicalGraph) -> bool:
    """Whether any sink of *graph* sets something aside for a store."""
    return any(isinstance(node.sink, Committing) and node.sink.stages for node in graph.sinks)


def _digest(sink: Sink[Any], type_: Any) -> str:
    """Of the description of *sink* for records of a type: what it sets aside means something to the same one alone."""
    described = msgspec.json.encode([sink.describe(type_), schema.describe(type_)], order="deterministic")
    return hashlib.sha256(described).hexdigest()


class Stores:
    """Of sinks, each with its id and the type of its records; *blocks* reads what was set aside. Making one asks
    nothing. For one thread."""

    def __init__(self, pipeline: str, sinks: Iterable[tuple[str, Sink[Any], Any]], blocks: Blocks) -> None:
        self._committers: dict[str, Committer] = {}
        self._writing: dict[str, Committer] = {}
        """Of sinks whose writers write to the store themselves: they are only checked."""
        self.staging: dict[str, StagingSink] = {}
        """The sinks whose output is committed to a store."""
        self._unchecked: set[str] = set()
        """Sinks whose store was away when it was to be checked."""
        for name, sink, type_ in sinks:
            if isinstance(sink, Committing):
                context = CommitterContext(pipeline=pipeline, sink=name, type=type_, blocks=blocks)
                committer = sink.open_committer(context)
                if sink.stages:
                    self._committers[name] = committer
                    at_once = not isinstance(committer, CommitsBySubtask)
                    self.staging[name] = StagingSink(_digest(sink, type_), committer.ledger, at_once)
                else:
                    self._writing[name] = committer

    def check(self) -> None:
        """Before anything is fenced: StoreError, which names the sink, where a store cannot take what that writes.

        A store that is away is checked as soon as it is there: what it has to commit is waited for anyhow.
        """
        for sink, each in (*self._committers.items(), *self._writing.items()):
            try:
                _check(sink, each)
            except StoreUnavailable:
                if sink in self._writing:
                    raise
                self._unchecked.add(sink)

    def _fence(self, sink: str, incarnation: int, origin: str) -> dict[int, int]:
        committer = self._committers[sink]
        if sink in self._unchecked:
            _check(sink, committer)
            self._unchecked.remove(sink)
        return dict(committer.fence(incarnation, origin))

    def __call__(self, request: ask.Request) -> Any:
        """The answer, or `NotImplemented` if *request* is about something else."""
        match request:
            case ask.FenceStore(sink, incarnation, origin):
                return self._fence(sink, incarnation, origin)
            case ask.CleanStore(sink, incarnation, attempt):
                return self._committers[sink].clean(incarnation, attempt)
            case ask.CommitStaged(committables, incarnation, origin):
                hit("store-committing")
                for committable in committables:
                    self._require_its_own(committable)
                return self._committers[committables[0].sink].commit(committables, incarnation, origin)
        return NotImplemented

    # --- beside a run

    @property
    def kinds(self) -> dict[str, str]:
        """By sink that stages, the `StoreCommittable.kind` that it sets aside."""
        return {sink: each.kind for sink, each in self._committers.items()}

    @property
    def holding(self) -> set[str]:
        """The sinks whose stores hold something, as locks, for what waits there."""
        return {sink for sink, each in self._committers.items() if isinstance(each, RollsBack)}

    def look(self, sink: str) -> StoreView | None:
        """What the store of a sink shows; None: it shows nothing without being changed. `StoreUnavailable`: away."""
        committer = self._committers.get(sink) or self._writing[sink]
        return committer.look() if isinstance(committer, Inspectable) else None

    @property
    def names(self) -> list[str]:
        """The sinks whose stores can be asked."""
        return sorted((*self._committers, *self._writing))

    def roll_back(self, sink: str, names: Collection[str], incarnation: int, origin: str) -> list[str]:
        """See `RollsBack`; nothing where what waits holds nothing."""
        committer = self._committers.get(sink)
        return committer.roll_back(names, incarnation, origin) if isinstance(committer, RollsBack) else []

    def _require_its_own(self, committable: StoreCommittable) -> None:
        """Raise unless the sink of *committable*, as it is now, has set it aside."""
        committer = self._committers.get(committable.sink)
        if committer is None:
            raise Halt(
                f"Checkpoint {committable.checkpoint} was decided with {committable.records} records of sink "
                f"{committable.sink!r}, and the pipeline has no such sink any more, or one with another delivery. "
                f"Run it once as it was, until that checkpoint is finalized; then change it."
            )
        if committable.records and committable.kind != committer.kind:
            raise StoreError(_of_another_kind(committable.kind, committer.kind))
        if committable.records and committable.description != self.staging[committable.sink].digest:
            raise StoreError(
                "they were set aside for another description of the sink: its target, mode, key, format, or the type "
                "of its records was changed since. Run the pipeline once as it was; then change it."
            )

    def close(self) -> None:
        """Let go of all connections."""
        for each in (*self._committers.values(), *self._writing.values()):
            each.close()


class PipelineStores(Stores):
    """Of the pipeline of *graph*."""

    def __init__(self, graph: LogicalGraph, blocks: Blocks) -> None:
        sinks = ((node.id, node.sink, graph.type_of(node.inputs[0])) for node in graph.sinks if node.sink is not None)
        super().__init__(graph.pipeline_id, sinks, blocks)


_SINKS_BY_KIND = {
    ROWS: "a write-ahead sink",
    PREPARED: "a sink that prepares transactions (commit='prepared', or 'xa')",
    FILES: "FileSink",
}
"""By kind of committable, the sinks of exactlyonce that set it aside."""


def _of_another_kind(kind: str, expected: str) -> str:
    whose = _SINKS_BY_KIND.get(kind)
    if whose is None:
        whose = "a sink that this exactlyonce does not bring: of another package, or a newer version: install that"
    return (
        f"they are of the kind {kind!r}, set aside by {whose}, and the sink of that name is now one of the kind "
        f"{expected!r}. Run the pipeline once as it was; then change it."
    )


def _check(sink: str, committer: Committer) -> None:
    with naming(sink):
        committer.check()

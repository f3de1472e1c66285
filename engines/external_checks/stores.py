"""The stores that a pipeline writes to beside Kafka, as its leader asks for them.

Invariant: in the background, one request is under way at a time. A repeated request gets its answer; a dropped one ends
before the next one begins.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import msgspec

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.block_storage import Blocks
from exactlyonce.checkpoint.commits.stores import StagingSink, UnderWay
from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.pipeline import shape
from exactlyonce.pipeline.dead_letters import DeadLetterTarget
from exactlyonce.pipeline.errors import Halt, StoreError, StoreUnavailable
from exactlyonce.pipeline.failpoints import hit
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.sink import Sink, naming
from exactlyonce.sinks.committer import (
    CommitsBySubtask,
    Committer,
    CommitterContext,
    Committing,
    Hindered,
    Inspectable,
    StoreView,
)

PREPARED = "prepared"
"""The kind of rows that wait in transactions of a database, which sinks of older versions prepared."""
LOOK_INTERVAL_S = 1.0
"""An answer that takes longer is reported as under way."""


def stages(graph: LogicalGraph) -> bool:
    """Whether any sink of *graph* stages output for a store."""
    return any(isinstance(node.sink, Committing) and node.sink.stages for node in graph.sinks)


def _digest(sink: Sink[Any], type_: Any) -> str:
    """A digest of the description of *sink*: only a sink of the same description can read its staged output."""
    described = msgspec.json.encode([sink.describe(type_), shape.describe(type_)], order="deterministic")
    return hashlib.sha256(described).hexdigest()


class Stores:
    """The stores of *sinks*, each an id, a description and the type of its records. For one thread.

    *blocks* reads staged output; see `CommitterContext` for *client*; *letters* has the targets of the sinks' dead
    letters. Making one asks nothing.
    """

    def __init__(
        self,
        pipeline: str,
        sinks: Iterable[tuple[str, Sink[Any], Any]],
        blocks: Blocks,
        client: ClientConfig | None = None,
        letters: Mapping[str, DeadLetterTarget] | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._committers: dict[str, Committer] = {}
        self._writing: dict[str, Committer] = {}
        """The committers of sinks whose writers write to the store themselves: these are only checked."""
        self.staging: dict[str, StagingSink] = {}
        """The sinks whose output is committed to a store."""
        self._unchecked: set[str] = set()
        """The sinks whose store was away at the check."""
        for name, sink, type_ in sinks:
            if isinstance(sink, Committing):
                target = (letters or {}).get(name)
                context = CommitterContext(
                    pipeline=pipeline, sink=name, type=type_, blocks=blocks, client=client,
                    letters=(target.sink().topic if target else None) or "",
                    letter_limits=target.limits if target else None, note=note,
                )  # fmt: skip
                committer = sink.open_committer(context)
                if sink.stages:
                    self._committers[name] = committer
                    at_once = not isinstance(committer, CommitsBySubtask)
                    self.staging[name] = StagingSink(_digest(sink, type_), committer.ledger, at_once)
                else:
                    self._writing[name] = committer

    def check(self, asks: Callable[[str], None] = lambda store: None) -> None:
        """StoreError, which names the sink, where a store cannot take its output; called before anything is fenced.

        A store that is away is checked once it is back. *asks* is told which one is asked.
        """
        for sink, committer in (*self._committers.items(), *self._writing.items()):
            asks(f"the store of sink {sink!r}")
            try:
                with naming(sink):
                    committer.check()
            except StoreUnavailable:
                if sink in self._writing:
                    raise
                self._unchecked.add(sink)

    def __call__(self, request: ask.Request) -> Any:
        """The answer, or `NotImplemented` if *request* is about something else."""
        match request:
            case ask.FenceStore(sink, incarnation, origin):
                if sink in self._unchecked:
                    with naming(sink):
                        self._committers[sink].check()
                    self._unchecked.remove(sink)
                return dict(self._committers[sink].fence(incarnation, origin))
            case ask.CleanStore(sink, incarnation, attempt):
                return self._committers[sink].clean(incarnation, attempt)
            case ask.CommitStaged(committables, incarnation, origin):
                hit("store-committing")
                for committable in committables:
                    self._require_its_own(committable)
                return self._committers[committables[0].sink].commit(committables, incarnation, origin)
        return NotImplemented

    def failure(self, request: ask.Request) -> str:
        """See `Hindered`; empty if the committer does not say it. For any thread."""
        committer = (
            self._committers.get(request.committables[0].sink) if isinstance(request, ask.CommitStaged) else None
        )
        return committer.failure if isinstance(committer, Hindered) else ""

    # --- beside a run

    @property
    def kinds(self) -> dict[str, str]:
        """The `StoreCommittable.kind` of each sink that stages."""
        return {sink: committer.kind for sink, committer in self._committers.items()}

    def look(self, sink: str) -> StoreView | None:
        """The view of a sink's store; None if it shows nothing unless it is changed. `StoreUnavailable`: away."""
        committer = self._committers.get(sink) or self._writing[sink]
        return committer.look() if isinstance(committer, Inspectable) else None

    @property
    def names(self) -> list[str]:
        """The sinks whose stores can be asked."""
        return sorted((*self._committers, *self._writing))

    def _require_its_own(self, committable: StoreCommittable) -> None:
        """Raise unless the sink of *committable*, as it is now, has staged it."""
        committer = self._committers.get(committable.sink)
        if committer is None:
            raise Halt(
                f"Checkpoint {committable.checkpoint} was decided with {committable.records} records of sink "
                f"{committable.sink!r}, and the pipeline has no such sink any more, or one with another delivery. "
                f"Run it once as it was, until that checkpoint is finalized; then change it."
            )
        if committable.records and committable.kind == PREPARED:
            raise StoreError(
                f"they wait in the transaction {committable.body.decode()}, prepared in the store by a sink with "
                f"commit='prepared' or 'xa', which this exactlyonce does not have any more. Run the pipeline once as "
                f"it was, by the exactlyonce that prepared it; or commit that transaction by hand, and then accept "
                f"the loss, which is none"
            )
        if committable.records and committable.kind != committer.kind:
            raise StoreError(
                f"they are of the kind {committable.kind!r}, and the sink of that name is now one of the kind "
                f"{committer.kind!r}: it was another sink, or one of a package, or a version, that is not installed. "
                f"Run the pipeline once as it was; then change it."
            )
        if committable.records and committable.description != self.staging[committable.sink].digest:
            raise StoreError(
                "they were set aside for another description of the sink: its target, mode, key, format, or the type "
                "of its records was changed since. Run the pipeline once as it was; then change it."
            )

    def close(self) -> None:
        for committer in (*self._committers.values(), *self._writing.values()):
            committer.close()


class PipelineStores(Stores):
    def __init__(
        self,
        graph: LogicalGraph,
        blocks: Blocks,
        client: ClientConfig | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        sinks = ((node.id, node.sink, graph.type_of(node.inputs[0])) for node in graph.sinks if node.sink is not None)
        letters = {node.id: node.dead_letters for node in graph.sinks if node.dead_letters is not None}
        super().__init__(graph.pipeline_id, sinks, blocks, client, letters, note)


class BackgroundStores:
    """Asks *stores* on a thread of its own, so that a leader can send heartbeats meanwhile."""

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._thread = ThreadPoolExecutor(1, "stores")
        self._under_way: tuple[ask.Request, Future[Any], float] | None = None

    def __call__(self, request: ask.Request) -> Any:
        """The answer, or `UnderWay`; `NotImplemented` if *request* is about something else."""
        if not isinstance(request, ask.FenceStore | ask.CleanStore | ask.CommitStaged):
            return NotImplemented
        if self._under_way is None or self._under_way[0] != request:
            self._under_way = request, self._thread.submit(self._stores, request), time.monotonic()
        _, future, began_s = self._under_way
        if wait([future], LOOK_INTERVAL_S).not_done:
            return UnderWay(round((time.monotonic() - began_s) * 1000), self._stores.failure(request))
        self._under_way = None
        return future.result()

    def close(self) -> None:
        """Wait for the request under way, then close the connections."""
        try:
            self._thread.submit(self._stores.close).result()
        finally:
            self._thread.shutdown()

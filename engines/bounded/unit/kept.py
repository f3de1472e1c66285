"""What a process keeps from one unit to the next: making it anew takes longer than the work of a small unit.

Invariants: a unit has the kept storage to itself; it passes the storage on only if it has come to its end, when all of
its blocks are durable, so that no failure of one unit reaches another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import NamedTuple

from exactlyonce.checkpoint.block_storage import BlockStorage
from exactlyonce.checkpoint.records.manifest import TopicInfo
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.blocks import StorageBeside, block_storage
from exactlyonce.engines.bounded.unit.messages import Stage, StagedState
from exactlyonce.engines.bounded.unit.staging import StagedRange
from exactlyonce.engines.processes import UnitCollector


class _Kept(NamedTuple):
    client: dict[str, str]
    topic: TopicInfo
    url: str
    state: StagedState | None
    storage: BlockStorage


class KeptByProcess:
    """The storage of blocks, with its connections, the stage, and Python's collector, of all units of a process."""

    def __init__(self) -> None:
        self.collector = UnitCollector()
        self._lock = Lock()
        self._kept: _Kept | None = None
        self._stage: tuple[StagedRange, Stage] | None = None

    def stage(self, place: StagedRange, read: Callable[[], Stage]) -> Stage:
        """The stage at *place*, which *read* reads unless the unit before has."""
        kept = self._stage
        if kept is None or kept[0] != place:
            kept = self._stage = place, read()
        return kept[1]

    @contextmanager
    def storage(
        self, client: Mapping[str, str], topic: TopicInfo, url: str, state: StagedState | None = None
    ) -> Iterator[BlockStorage]:
        """The block storage *url* of *topic* for one unit: the unit before's if it is the same, else a new one.

        With *state*, later blocks are there, and new ones are written there. After an error in the block it is closed.
        """
        kept = self._exchange(None)
        if kept is None or (kept.client, kept.topic, kept.url, kept.state) != (client, topic, url, state):
            if kept is not None:
                kept.storage.close()
            storage = block_storage(ClientConfig(client), topic, url, stays_connected=True, keeps_producer=True)
            if state is not None:
                storage = StorageBeside.at(state.files, storage, state.checkpoint)
            kept = _Kept({**client}, topic, url, state, storage)
        try:
            yield kept.storage
        except BaseException:
            kept.storage.close()
            raise
        if (other := self._exchange(kept)) is not None:  # of a unit on another thread
            other.storage.close()

    def close(self) -> None:
        """Keep nothing any more."""
        self._stage = None
        if (kept := self._exchange(None)) is not None:
            kept.storage.close()
        self.collector.unfreeze()

    def _exchange(self, new: _Kept | None) -> _Kept | None:
        with self._lock:
            old, self._kept = self._kept, new
        return old


KEPT = KeptByProcess()
"""What this process keeps."""

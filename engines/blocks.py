"""The storages of a pipeline's blocks, the blocks that a checkpoint refers to, the removal of dropped ones; and the
backend of its state.

Invariant: only blocks dropped by a durable transaction of the decision log are removed, however late. A storage that is
away holds up neither the leader nor another storage. The next start finds leftovers of a crash, and drops them again.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby

from exactlyonce.checkpoint.block_storage import (
    AttemptBlocks,
    Blocks,
    BlockStorage,
    DamagedBlock,
    Scanned,
    UnreadableBlock,
)
from exactlyonce.checkpoint.records.encoding import Block, BlockKey
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import BlockRef, Manifest, StoredBlock, TopicInfo, indexes_of, named_by
from exactlyonce.checkpoint.records.storage_url import TOPIC, described, setting_of
from exactlyonce.connectors.block_files import file_storage, staged_storage
from exactlyonce.connectors.kafka.checkpoint_topic.blocks import TopicStorage
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.options import ROCKSDB, StateSettings
from exactlyonce.engines.runtime.in_flight import blocks_of
from exactlyonce.pipeline.errors import BrokerUnavailable, ConfigError, ExactlyOnceError
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.sinks.write_ahead.writer import INDEXED
from exactlyonce.sinks.write_ahead.writer import decode_index as list_of_rows
from exactlyonce.state.backend import StateBackend
from exactlyonce.state.chain import decode_index
from exactlyonce.state.errors import DamagedState
from exactlyonce.state.hash_map import HashMapBackend
from exactlyonce.state.rocksdb.backend import RocksDBBackend


def block_storage(
    client: ClientConfig,
    topic: TopicInfo,
    storage: str,
    *,
    stays_connected: bool = False,
    keeps_producer: bool = False,
) -> BlockStorage:
    """The block storage that manifests name *storage*, of the pipeline of *topic*. Nothing is connected yet.

    *stays_connected* is for frequent reads, *keeps_producer* for many attempts in turn: see `TopicStorage`.
    """
    if storage:
        return file_storage(storage, topic)
    return TopicStorage(client, topic, stays_connected=stays_connected, keeps_producer=keeps_producer)


def staged_blocks(files: str) -> BlockStorage:
    """The storage of blocks among staged files, at locations that begin with *files*."""
    return staged_storage(files)


@dataclass(frozen=True)
class StorageBeside:
    """The blocks of work that goes on beside a pipeline from its *checkpoint*: its own, and those of the pipeline, of
    which none is written or dropped."""

    own: BlockStorage
    pipeline: BlockStorage
    checkpoint: int
    """Later blocks are the work's own."""

    @staticmethod
    def at(files: str, pipeline: BlockStorage, checkpoint: int) -> StorageBeside:
        """Its own blocks are staged files at locations that begin with *files*."""
        return StorageBeside(staged_blocks(files), pipeline, checkpoint)

    def fetch(self, refs: Iterable[BlockRef]) -> Iterator[tuple[BlockRef, Block]]:
        for is_own, some in groupby(dict.fromkeys(refs), self._is_own):
            yield from (self.own if is_own else self.pipeline).fetch(list(some))

    def _is_own(self, ref: BlockRef) -> bool:
        key = BlockKey.parse(ref.key)
        return key is not None and key.checkpoint > self.checkpoint

    def check(self, *, in_use: bool = False) -> None:
        self.own.check(in_use=in_use)

    def begin(self, incarnation: int, attempt: int) -> AttemptBlocks:
        return self.own.begin(incarnation, attempt)

    def since(self, ends: Iterable[int]) -> Scanned:
        return self.own.since(ends)

    def dropped(self, refs: Iterable[BlockRef]) -> None:
        self.own.dropped(refs)

    def erase(self) -> None:
        self.own.erase()

    def close(self) -> None:
        self.own.close()
        self.pipeline.close()


class Storages:
    """The storages of one pipeline, by the URL in its manifests: one, unless its checkpoints were moved.

    Each connects when it is asked. One thread at a time may use it.
    """

    def __init__(self, client: ClientConfig, topic: TopicInfo, *, stays_connected: bool = False) -> None:
        self._client, self._topic, self._stays_connected = client, topic, stays_connected
        self._open: dict[str, BlockStorage] = {}

    def of(self, storage: str) -> BlockStorage:
        if storage not in self._open:
            self._open[storage] = block_storage(
                self._client, self._topic, storage, stays_connected=self._stays_connected
            )
        return self._open[storage]

    def close(self) -> None:
        for storage in self._open.values():
            storage.close()


def in_use(history: History, storage: str) -> bool:
    manifests = (manifest for manifest in history.retained if manifest.storage == storage)
    return any(True for manifest in manifests for _ in named_by(manifest))


def require_own_place(storages: Storages, history: History, storage: str) -> None:
    """ConfigError if *storage*, the new place of checkpoints, is an old one under another name, or a copy of it.

    A link, a second mount or another name of a server would lose no block; a user who moves means another place.
    """
    if storage in (TOPIC, history.storage):
        return
    manifests = (manifest for manifest in history.retained if manifest.storage != storage)
    old = {ref.key: manifest.storage for manifest in manifests for ref in named_by(manifest)}
    shared = next((ref.key for ref in storages.of(storage).since(()).blocks if ref.key in old), None) if old else None
    if shared is not None:
        raise ConfigError(
            f"{storage} has block {shared}, which a checkpoint in {described(old[shared])} stands on: it is the same "
            f"place by another name, or a copy of it. Nothing was changed.\n"
            f"  Keep the old name: --checkpoint-storage {setting_of(old[shared])}; or move to another place, the topic "
            f"or an empty folder, and from there to this one, once no checkpoint is kept by the old name any more: "
            f"delete the savepoints that are (`exactlyonce savepoints list {history.pipeline}`)."
        )


@dataclass(frozen=True)
class NewestBlocks:
    """Reads the blocks of the newest manifest, the only one whose output is committed."""

    storages: Storages
    history: Callable[[], History]

    def fetch(self, refs: Iterable[BlockRef]) -> Iterable[tuple[BlockRef, Block]]:
        return self.storages.of(self.history().storage).fetch(refs)


def references(manifest: Manifest, reader: Blocks) -> set[BlockRef]:
    """Every block that *manifest* refers to, directly or by an index.

    Raises `DamagedBlock` or `DamagedState` for a damaged index. A damaged index of staged rows counts as empty: no
    state is restored from it, and the commit of the rows finds it before any block may go.
    """
    bodies = (body for _, body in _bodies(reader, list(indexes_of(manifest))))
    listed = {block.ref for body in bodies for block in decode_index(body).blocks}
    for log in manifest.channel_logs:
        listed.update(blocks_of(log, reader))
    indexes = [ref for staged in manifest.staged if staged.body == INDEXED for ref in staged.blocks]
    with suppress(DamagedBlock):
        for _, body in _bodies(reader, indexes):
            listed.update(list_of_rows(body))
    return {*named_by(manifest), *listed}


def references_or_why(manifest: Manifest, reader: Blocks) -> frozenset[BlockRef] | str:
    """`references`; or why they cannot be known, and nothing can be restored from *manifest*."""
    try:
        return frozenset(references(manifest, reader))
    except (DamagedBlock, DamagedState) as error:
        return str(error)


def damaged_among(refs: Iterable[BlockRef], reader: Blocks) -> dict[BlockRef, str]:
    """Read all *refs*. Returns those that are damaged, gone or refused, with the reason."""
    damaged, left = dict[BlockRef, str](), set(refs)
    while left:
        try:
            for ref, _ in reader.fetch([*left]):
                left.discard(ref)
        except (DamagedBlock, UnreadableBlock) as error:
            damaged[error.ref] = str(error)
            left.discard(error.ref)
    return damaged


def _bodies(reader: Blocks, refs: list[BlockRef]) -> Iterator[tuple[BlockRef, bytes]]:
    return ((ref, block.body) for ref, block in reader.fetch(refs))


CLOSE_TIMEOUT_S = 10.0
"""The time that a clean end waits for removals."""
PAUSE_S = 1.0
NOTED_INTERVAL_S = 60.0


class Removals:
    """The removals of one leader. The thread begins with the first one."""

    def __init__(self, storages: Callable[[str], BlockStorage], note: Callable[[str], None]) -> None:
        """*storages* opens the storage of a URL."""
        self._storages, self._note = storages, note
        self._open: dict[str, BlockStorage] = {}
        self._queue: queue.SimpleQueue[tuple[StoredBlock, ...]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._noted_s = float("-inf")

    def add(self, blocks: Iterable[StoredBlock]) -> None:
        """Remove *blocks* in the background."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="removals", daemon=True)
            self._thread.start()
        self._queue.put(tuple(blocks))

    def close(self) -> None:
        """Remove all added blocks, as far as their storages answer in time."""
        self._closing.set()
        if self._thread is not None:
            self._queue.put(())
            self._thread.join(CLOSE_TIMEOUT_S)

    def _work(self) -> None:
        left: dict[str, list[BlockRef]] = {}
        while not self._closing.is_set() or not self._queue.empty():
            with suppress(queue.Empty):
                for storage, ref in self._queue.get(timeout=PAUSE_S if left else None):
                    left.setdefault(storage, []).append(ref)
            left = {storage: refs for storage, refs in left.items() if not self._removed(storage, refs)}
        for opened in self._open.values():
            opened.close()

    def _removed(self, storage: str, blocks: list[BlockRef]) -> bool:
        """Whether *blocks* are done: they are gone, or a retry would not help."""
        try:
            if storage not in self._open:
                self._open[storage] = self._storages(storage)
            self._open[storage].dropped(blocks)
        except BrokerUnavailable as error:
            self._say(f"{len(blocks)} blocks that nobody needs could not be removed yet: {error}")
            return False
        except ExactlyOnceError as error:
            self._say(f"{len(blocks)} blocks that nobody needs stay where they are: {error}")
        return True

    def _say(self, text: str) -> None:
        if time.monotonic() >= self._noted_s + NOTED_INTERVAL_S:
            self._noted_s = time.monotonic()
            self._note(text)


def in_memory() -> StateBackend:
    """The backend of one unit of bounded work."""
    return HashMapBackend()


def state_backend(settings: StateSettings, graph: LogicalGraph, subtask: int, parallelism: int) -> StateBackend:
    """The backend of worker *subtask*. Deletes local files of operators that *graph* does not have."""
    if settings.backend != ROCKSDB:
        return in_memory()
    worker = f"{subtask}-of-{parallelism}" if parallelism > 1 else ""
    backend = RocksDBBackend(settings.path / graph.pipeline_id, settings.memory_bytes, worker)
    backend.delete_others([node.id for node in graph.nodes])
    return backend

"""The `BlockStorage` that keeps blocks as files.

Invariants: a block has the digest of its reference, or is damaged; a file is removed only by `dropped`, after a durable
decision. Files have no order: `since` lists all of them, and its ends are zeros.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

from exactlyonce.checkpoint.block_storage import DamagedBlock, Scanned, UnreadableBlock, verified_value
from exactlyonce.checkpoint.records.encoding import Block
from exactlyonce.checkpoint.records.manifest import BlockRef, TopicInfo
from exactlyonce.connectors.blocks.names import name_of, reference
from exactlyonce.connectors.blocks.writer import FileBlocks
from exactlyonce.connectors.filestore.store import AWAY_TIMEOUT_S, CHECKPOINT_STORAGE, FileStore, Retries
from exactlyonce.connectors.filestore.urls import store_at
from exactlyonce.pipeline.errors import ConfigError, StorageUnavailable

READERS = 8
READ_AHEAD = 16
"""Blocks read ahead, each of 1 MB at most."""
_TOPIC_SUFFIX = ".checkpoints"


class FileStorage:
    """Nothing is connected yet."""

    def __init__(self, store: FileStore, away_timeout_s: float = AWAY_TIMEOUT_S) -> None:
        self._store, self._retries = store, Retries(away_timeout_s)
        self._readers: ThreadPoolExecutor | None = None

    def check(self, *, in_use: bool = False) -> None:
        """Put a file and remove it."""
        if in_use:
            self._require_files()
        self._store.check()

    def _require_files(self) -> None:
        """Raise if all files are missing: then the storage is not mounted, and its files are not lost."""
        if all(reference(file.name, file.size) is None for file in self._store.files()):
            raise StorageUnavailable(
                f"{self._store.url} is empty or missing, though checkpoints have files there: is it mounted, and the "
                f"right one? Nothing is written there. If the files are lost, restore them from a backup."
            )

    def begin(self, incarnation: int, attempt: int) -> FileBlocks:
        self._retries(self._store.check)
        return FileBlocks(self._store, incarnation, attempt)

    def fetch(self, refs: Iterable[BlockRef]) -> Iterator[tuple[BlockRef, Block]]:
        """The blocks in the order of *refs*, several read at once."""
        left = iter(dict.fromkeys(refs))
        ahead: deque[tuple[BlockRef, Future[bytes | None]]] = deque()
        try:
            while True:
                for ref in islice(left, READ_AHEAD - len(ahead)):
                    ahead.append((ref, self._pool().submit(self._got, ref)))
                if not ahead:
                    return
                ref, coming = ahead.popleft()
                named = f"Block {ref.key} in {self._store.url}"
                try:
                    value = coming.result()
                except ConfigError as error:
                    raise UnreadableBlock(f"{named} cannot be read: {error}", ref) from error
                if value is None:
                    self._require_files()
                    raise DamagedBlock(f"{named} is gone.", ref)
                yield ref, verified_value(ref, value, named)
        finally:
            for _, coming in ahead:
                coming.cancel()

    def _got(self, ref: BlockRef) -> bytes | None:
        name = name_of(ref)
        return None if name is None else self._retries(lambda: self._store.get(name))

    def _pool(self) -> ThreadPoolExecutor:
        if self._readers is None:
            self._readers = ThreadPoolExecutor(READERS, "block-readers")
        return self._readers

    def since(self, ends: Iterable[int]) -> Scanned:
        """All blocks."""
        listed = self._retries(lambda: list(self._store.files()))
        files = [(ref, file) for file in listed if (ref := reference(file.name, file.size)) is not None]
        written_at_ms = {ref.key: file.written_at_ms for ref, file in files}
        return Scanned(tuple(ref for ref, _ in files), tuple(0 for _ in ends), written_at_ms=written_at_ms)

    def dropped(self, refs: Iterable[BlockRef]) -> None:
        self._store.remove(name for ref in refs if (name := name_of(ref)) is not None)

    def erase(self) -> None:
        self._store.remove([file.name for file in self._store.files()])
        self._store.remove_folder()

    def close(self) -> None:
        if self._readers is not None:
            self._readers.shutdown(wait=False, cancel_futures=True)
            self._readers = None


def file_storage(url: str, topic: TopicInfo) -> FileStorage:
    """The storage below *url*, from `storage_url`, of the pipeline with the checkpoint topic *topic*."""
    topic_id = topic.topic_id.replace("/", "_").replace("+", "-")  # as Kafka's tools write it: without slashes
    inner = f"{topic.name.removesuffix(_TOPIC_SUFFIX)}/{topic_id}"
    return FileStorage(store_at(url, inner, CHECKPOINT_STORAGE))

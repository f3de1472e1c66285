"""The `BlockStorage` that keeps blocks as files.

Invariants: a block is what its reference's digest says, or damaged; nothing is removed before `dropped` says that a
durable decision lets it go. Files know no order: `since` lists all of them, and its ends are zeros.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from threading import Event
from typing import TypeVar

from exactlyonce.checkpoint.block_storage import DamagedBlock, Scanned, UnreadableBlock, verified_value
from exactlyonce.checkpoint.records.encoding import Block
from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.checkpoint.records.storage_url import parts_of
from exactlyonce.checkpoint.records.topic_info import TopicInfo
from exactlyonce.connectors.blocks.folder import CHECKPOINT_STORAGE, STORAGE, Folder
from exactlyonce.connectors.blocks.hdfs import HdfsFolder
from exactlyonce.connectors.blocks.local import LocalFolder
from exactlyonce.connectors.blocks.names import name_of, reference
from exactlyonce.connectors.blocks.s3 import S3Folder
from exactlyonce.connectors.blocks.writer import FileBlocks
from exactlyonce.pipeline.errors import ConfigError, InvariantViolation, StorageUnavailable

R = TypeVar("R")

READERS = 8
READ_AHEAD = 16
"""Blocks that are read before they are asked for, each 1 MB at most."""
AWAY_TIMEOUT_S = 30.0
"""How long a storage that is away is asked again: a server that restarts, or refuses one request of a thousand."""
_PAUSE_S = 0.25
_TOPIC_SUFFIX = ".checkpoints"


class FileStorage:
    """See the module. Nothing is connected yet."""

    def __init__(self, folder: Folder, away_timeout_s: float = AWAY_TIMEOUT_S) -> None:
        self._folder, self._away_timeout_s = folder, away_timeout_s
        self._readers: ThreadPoolExecutor | None = None

    def check(self, *, in_use: bool = False) -> None:
        """By a file, which is put and removed."""
        if in_use:
            self._require_files()
        self._folder.check()

    def _require_files(self) -> None:
        """What is missing with all others is away, and not lost: where a disk is not mounted there is an empty folder,
        or none, or what tries whether it can be written to."""
        if all(reference(each.name, each.size) is None for each in self._folder.files()):
            raise StorageUnavailable(
                f"{self._folder.url} is empty or missing, though checkpoints have files there: is it mounted, and the "
                f"right one? Nothing is made there. If the files are lost, restore them from a backup."
            )

    def begin(self, incarnation: int, attempt: int) -> FileBlocks:
        """Puts files that begin with *incarnation* and *attempt*."""
        self._persistently(self._folder.check)
        return FileBlocks(self._folder, incarnation, attempt)

    def fetch(self, refs: Iterable[BlockRef]) -> Iterator[tuple[BlockRef, Block]]:
        """In the order of *refs*, several at once."""
        left = iter(dict.fromkeys(refs))
        ahead: deque[tuple[BlockRef, Future[bytes | None]]] = deque()
        try:
            while True:
                for ref in islice(left, READ_AHEAD - len(ahead)):
                    ahead.append((ref, self._pool().submit(self._got, ref)))
                if not ahead:
                    return
                ref, coming = ahead.popleft()
                named = f"Block {ref.key} in {self._folder.url}"
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
        return None if name is None else self._persistently(lambda: self._folder.get(name))

    def _pool(self) -> ThreadPoolExecutor:
        if self._readers is None:
            self._readers = ThreadPoolExecutor(READERS, "block-readers")
        return self._readers

    def since(self, ends: Iterable[int]) -> Scanned:
        """All that there are."""
        listed = self._persistently(lambda: list(self._folder.files()))
        found = [(ref, each) for each in listed if (ref := reference(each.name, each.size)) is not None]
        written_at_ms = {ref.key: each.written_at_ms for ref, each in found}
        return Scanned(tuple(ref for ref, _ in found), tuple(0 for _ in ends), written_at_ms=written_at_ms)

    def dropped(self, refs: Iterable[BlockRef]) -> None:
        """Remove them."""
        self._folder.remove(name for ref in refs if (name := name_of(ref)) is not None)

    def erase(self) -> None:
        """Remove all files, and the folder."""
        self._folder.remove([each.name for each in self._folder.files()])
        self._folder.remove_folder()

    def close(self) -> None:
        """End the threads; what they have begun to read is nobody's."""
        if self._readers is not None:
            self._readers.shutdown(wait=False, cancel_futures=True)
            self._readers = None

    def _persistently(self, asked: Callable[[], R]) -> R:
        return persistently(asked, self._away_timeout_s)


def persistently(asked: Callable[[], R], away_timeout_s: float) -> R:
    """The answer of *asked*; `StorageUnavailable` once the storage is away for *away_timeout_s*."""
    deadline = time.monotonic() + away_timeout_s
    while True:
        try:
            return asked()
        except StorageUnavailable:
            if time.monotonic() > deadline:
                raise
        Event().wait(_PAUSE_S)


def file_storage(url: str, topic: TopicInfo) -> FileStorage:
    """The storage of the pipeline whose decisions are in *topic*, below *url*, as `storage_url` has made it."""
    topic_id = topic.topic_id.replace("/", "_").replace("+", "-")  # as Kafka's tools write it: without slashes
    inner = f"{topic.name.removesuffix(_TOPIC_SUFFIX)}/{topic_id}"
    return FileStorage(folder_of(url, inner, CHECKPOINT_STORAGE))


def folder_of(url: str, inner: str, what: str = STORAGE) -> Folder:
    """The folder *inner* below *url*, as `storage_url` has made it; its errors begin with *what* it is for."""
    scheme, host, path = parts_of(url)
    match scheme:
        case "file":
            return LocalFolder(Path("/", path), inner, what)
        case "s3":
            return S3Folder(host, f"{path}/{inner}" if path else inner, what)
        case "hdfs":
            return HdfsFolder(host, path, inner, what)
    raise InvariantViolation(f"no storage for {url}")

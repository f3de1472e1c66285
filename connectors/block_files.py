"""Blocks as files of a `FileStore`: the `BlockStorage` of a folder, of HDFS and of S3. The decisions stay in the topic.

Files lie below `<url>/<pipeline>/<id of the checkpoint topic>`: two clusters, or a pipeline before and after a reset,
share none. Those of work beside a pipeline lie among its staged files, under names with a prefix of its own. In the
engines `blocks.py` alone may import this.

Invariants: one process writes a name, once, since the nonce is its own, and with one content, whose digest is part of
the name. So a listing alone gives the references, and no late write of another process can change a referenced file. A
block has the digest of its reference, or is damaged; a file is removed only by `dropped`, after a durable decision.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from exactlyonce.checkpoint.block_storage import (
    DamagedBlock,
    KeysWritten,
    Scanned,
    Ticket,
    UnreadableBlock,
    verified_value,
)
from exactlyonce.checkpoint.records.encoding import Block, BlockKey, encode
from exactlyonce.checkpoint.records.manifest import BlockRef, TopicInfo
from exactlyonce.checkpoint.records.storage_url import is_url
from exactlyonce.connectors.filestore.store import (
    AWAY_TIMEOUT_S,
    CHECKPOINT_STORAGE,
    STAGING,
    FileStore,
    Retries,
    StoredFile,
    store_at,
)
from exactlyonce.pipeline.errors import ConfigError, StorageUnavailable, require
from exactlyonce.pipeline.retries import OF_STORE

PARTITION, OFFSET = 1, 0
"""The place in every file's reference, which nobody uses: files have no places in the topic."""
THREADS = 4
"""A put takes some 50 ms to S3, 5 ms to a disk: so many at once keep up with an encoding worker."""
PENDING_MAX = 1_024
"""The most pending blocks, of 1 MB each at most; a subtask stops far below."""
PUT_TIMEOUT_S = 600.0
"""The time after which a block that is not durable fails its worker."""
SLOW_S = 10.0
"""The time after which a put is reported: some storages do not answer at all."""
READERS = 8
READ_AHEAD = 16
"""Blocks read ahead, each of 1 MB at most."""
_POLL_S = 0.05
_TOPIC_SUFFIX = ".checkpoints"
_NUMBER = r"(0|[1-9][0-9]{0,17})"
_NAME = re.compile(
    rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}\.([A-Za-z0-9_-]+)\.{_NUMBER}\.{_NUMBER}\.([a-z0-9]+)\.([0-9a-f]{{64}})\Z"
)


def file_name(key: BlockKey, sha256: bytes) -> str:
    """`<incarnation>.<attempt>.<checkpoint>.<operator>.<key group>.<part>.<nonce>.<SHA-256>`."""
    return (
        f"{key.incarnation}.{key.attempt}.{key.checkpoint}.{key.operator}.{key.key_group}.{key.part}.{key.nonce}"
        f".{sha256.hex()}"
    )


def name_of(ref: BlockRef) -> str | None:
    """The name of the file of *ref*; None if its key is not one of ours."""
    key = BlockKey.parse(ref.key)
    return None if key is None else file_name(key, ref.sha256)


def aside(key: BlockKey, sha256: bytes) -> str:
    """A temporary name for the file of a block. A file that stays there is an orphan like any other, by its key."""
    return file_name(msgspec.structs.replace(key, nonce=f"{key.nonce}{secrets.token_hex(4)}"), sha256)


def reference(name: str, size: int) -> BlockRef | None:
    """The reference to the file *name* of so many bytes; None: it is not one of ours."""
    match = _NAME.match(name)
    if match is None:
        return None
    incarnation, attempt, checkpoint, operator, group, part, nonce, digest = match.groups()
    key = BlockKey(int(incarnation), int(checkpoint), operator, int(group), int(part), int(attempt), nonce)
    return BlockRef(PARTITION, OFFSET, str(key), size, bytes.fromhex(digest))


@dataclass
class _Put:
    ticket: Ticket
    key: BlockKey
    value: bytes
    ref: BlockRef
    since_s: float = field(default_factory=time.monotonic)
    durable: bool = False
    failure: str = ""


class FileBlocks:
    """The `AttemptBlocks` of one attempt of one process: files are put in the background.

    `write` and `poll` never block: threads put each file, and retry while the storage is away or full; a ticket has its
    reference only once its file is durable. A thread ends when no file waits, so there is nothing to close. Threads are
    daemons: a killed process leaves orphans.
    """

    def __init__(self, store: FileStore, incarnation: int, attempt: int, nonce: str = "", *, prefix: str = "") -> None:
        """*nonce* is unique to this process; empty: a random one. *prefix*: see `FileStorage`."""
        self.incarnation, self.attempt = incarnation, attempt
        self._store, self._nonce, self._prefix = store, nonce or secrets.token_hex(6), prefix
        self._keys = KeysWritten()
        self._unresolved: deque[_Put] = deque()
        self._lock = threading.Lock()
        """Guards the next two."""
        self._waiting: deque[_Put] = deque()
        self._threads = 0
        self._done = threading.Semaphore(0)
        self._obstacle = ""
        self._given_up = threading.Event()

    @property
    def pending(self) -> int:
        """The number of blocks that are not resolved yet."""
        return len(self._unresolved)

    @property
    def waiting(self) -> str:
        """See `AttemptBlocks`."""
        if not self._unresolved:
            return ""
        took_s = time.monotonic() - self._unresolved[0].since_s
        if not self._obstacle and took_s > SLOW_S:
            return f"waiting for the checkpoint storage {self._store.url}: a block is not written after {took_s:.0f} s"
        return self._obstacle and f"waiting for the checkpoint storage: {self._obstacle}"

    def write(self, block: Block, key_group: int, part: int = 0) -> Ticket:
        """Hand *block* to the threads, once for every (operator, checkpoint, key group, part)."""
        key = BlockKey(self.incarnation, block.checkpoint, block.operator, key_group, part, self.attempt, self._nonce)
        value = encode(block)
        if self.pending >= PENDING_MAX:
            raise StorageUnavailable(f"{self.pending} blocks wait for {self._store.url}; there is no room for more.")
        self._keys.add(key)
        ticket = Ticket(str(key), value)
        put = _Put(ticket, key, value, ticket.at(PARTITION, OFFSET))
        self._unresolved.append(put)
        self._hand_over(put)
        return ticket

    def _hand_over(self, put: _Put) -> None:
        with self._lock:
            self._waiting.append(put)
            if self._threads == THREADS:
                return
            self._threads += 1
        threading.Thread(target=self._work, name="blocks", daemon=True).start()

    def poll(self, timeout_s: float = 0.0) -> int:
        """Resolve tickets; the number still pending."""
        if self._unresolved and timeout_s > 0:
            self._done.acquire(timeout=timeout_s)
        left: deque[_Put] = deque()
        for put in self._unresolved:
            if put.failure:
                put.ticket.failed(put.failure)
            elif put.durable:
                put.ticket.written(PARTITION, OFFSET)
            else:
                left.append(put)
        self._unresolved = left
        return self.pending

    def wait(self, timeout_s: float, look: Callable[[], None] = lambda: None, *, left: int = 0) -> None:
        """See `AttemptBlocks`; `StorageUnavailable` if it takes too long."""
        deadline = time.monotonic() + timeout_s
        try:
            while self.pending > left and self.poll(_POLL_S) > left:
                look()
                if time.monotonic() > deadline:
                    raise StorageUnavailable(
                        f"{self.pending} blocks were not written to {self._store.url} within {timeout_s:.0f} s. "
                        f"{self._obstacle}".rstrip()
                    )
        except BaseException:
            self._given_up.set()
            raise

    # --- in the threads

    def _work(self) -> None:
        while (put := self._next()) is not None:
            try:
                for pause_s in self._put(put):
                    if self._given_up.wait(pause_s):
                        put.failure = self._obstacle
                        break
            except Exception as error:
                put.failure = f"{type(error).__name__}: {error}"
            self._done.release()

    def _next(self) -> _Put | None:
        """The next block to put; None: this thread ends."""
        with self._lock:
            if self._waiting and not self._given_up.is_set():
                return self._waiting.popleft()
            self._threads -= 1
            return None

    def _put(self, put: _Put) -> Iterator[float]:
        """Retry until it is durable or has failed; yields the pauses, in seconds."""
        name, pauses = name_of(put.ref), iter(OF_STORE)
        require(name is not None, f"{put.ref.key} is a well-formed key")
        while True:
            try:
                temporary = aside(put.key, put.ref.sha256)
                self._store.put(f"{self._prefix}{name}", put.value, f"{self._prefix}{temporary}")
            except ConfigError as error:
                put.failure = str(error)
                return
            except StorageUnavailable as error:
                self._obstacle = str(error)
                if time.monotonic() - put.since_s > PUT_TIMEOUT_S:
                    put.failure = str(error)
                    return
                yield next(pauses) / 1000
            else:
                self._obstacle = ""
                put.durable = True
                return


class FileStorage:
    """The `BlockStorage`. Nothing is connected yet. Files have no order: `since` lists all of them, and its ends are
    zeros."""

    def __init__(self, store: FileStore, away_timeout_s: float = AWAY_TIMEOUT_S, *, prefix: str = "") -> None:
        """*prefix*: all names begin with it, in a folder that others use, too; then it is known that files can be put
        there."""
        self._store, self._retries, self._prefix = store, Retries(away_timeout_s), prefix
        self._readers: ThreadPoolExecutor | None = None

    def check(self, *, in_use: bool = False) -> None:
        """Put a file and remove it."""
        if in_use:
            self._require_files()
        self._store.check()

    def _require_files(self) -> None:
        """Raise if all files are missing: then the storage is not mounted, and its files are not lost."""
        if next(self._files(), None) is None:
            raise StorageUnavailable(
                f"{self._store.url} is empty or missing, though checkpoints have files there: is it mounted, and the "
                f"right one? Nothing is written there. If the files are lost, restore them from a backup."
            )

    def _files(self) -> Iterator[tuple[BlockRef, StoredFile]]:
        for file in self._store.files():
            if file.name.startswith(self._prefix):
                ref = reference(file.name.removeprefix(self._prefix), file.size)
                if ref is not None:
                    yield ref, file

    def begin(self, incarnation: int, attempt: int) -> FileBlocks:
        if not self._prefix:
            self._retries(self._store.check)
        return FileBlocks(self._store, incarnation, attempt, prefix=self._prefix)

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
        return None if name is None else self._retries(lambda: self._store.get(f"{self._prefix}{name}"))

    def _pool(self) -> ThreadPoolExecutor:
        if self._readers is None:
            self._readers = ThreadPoolExecutor(READERS, "block-readers")
        return self._readers

    def since(self, ends: Iterable[int]) -> Scanned:
        """All blocks."""
        files = self._retries(lambda: list(self._files()))
        written_at_ms = {ref.key: file.written_at_ms for ref, file in files}
        return Scanned(tuple(ref for ref, _ in files), tuple(0 for _ in ends), written_at_ms=written_at_ms)

    def dropped(self, refs: Iterable[BlockRef]) -> None:
        self._store.remove(f"{self._prefix}{name}" for ref in refs if (name := name_of(ref)) is not None)

    def erase(self) -> None:
        if self._prefix:
            self._store.remove([file.name for _, file in self._files()])
            return
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


def staged_storage(files: str) -> FileStorage:
    """The storage of staged blocks, at locations that begin with *files*: a path, or a URL of HDFS or S3."""
    folder, _, prefix = files.rpartition("/")
    base, _, inner = (folder if is_url(folder) else f"file://{folder}").rpartition("/")
    return FileStorage(store_at(base, inner, STAGING), prefix=prefix)

"""Putting blocks as files in the background.

Invariants: `write` and `poll` never block: threads put each file, and retry while the storage is away or full; a ticket
has its reference only once its file is durable. A thread ends when no file waits, so there is nothing to close. Threads
are daemons: a killed process leaves orphans.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from exactlyonce.checkpoint.block_storage import KeysWritten, Ticket
from exactlyonce.checkpoint.records.encoding import Block, BlockKey, encode
from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.connectors.blocks.names import OFFSET, PARTITION, aside, name_of
from exactlyonce.connectors.filestore.store import FileStore
from exactlyonce.pipeline.errors import ConfigError, StorageUnavailable, require

THREADS = 4
"""A put takes some 50 ms to S3, 5 ms to a disk: so many at once keep up with an encoding worker."""
PENDING_MAX = 1_024
"""The most pending blocks, of 1 MB each at most; a subtask stops far below."""
PUT_TIMEOUT_S = 600.0
"""The time after which a block that is not durable fails its worker."""
SLOW_S = 10.0
"""The time after which a put is reported: some storages do not answer at all."""
_PAUSE_FIRST_S, _PAUSE_LONGEST_S = 0.05, 2.0
_POLL_S = 0.05


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
    """The `AttemptBlocks` of one attempt of one process."""

    def __init__(self, store: FileStore, incarnation: int, attempt: int, nonce: str = "") -> None:
        """*nonce* is unique to this process; empty: a random one."""
        self.incarnation, self.attempt = incarnation, attempt
        self._store, self._nonce = store, nonce or secrets.token_hex(6)
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
        name, pause_s = name_of(put.ref), _PAUSE_FIRST_S
        require(name is not None, f"{put.ref.key} is a well-formed key")
        while True:
            try:
                self._store.put(str(name), put.value, aside(put.key, put.ref.sha256))
            except ConfigError as error:
                put.failure = str(error)
                return
            except StorageUnavailable as error:
                self._obstacle = str(error)
                if time.monotonic() - put.since_s > PUT_TIMEOUT_S:
                    put.failure = str(error)
                    return
                yield pause_s
                pause_s = min(2 * pause_s, _PAUSE_LONGEST_S)
            else:
                self._obstacle = ""
                put.durable = True
                return

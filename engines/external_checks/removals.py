"""The removal of blocks outside of the checkpoint topic, once their drop is decided and durable.

Invariant: only blocks dropped by a durable transaction of the decision log are removed, however late. A storage that is
away holds up neither the leader nor another storage. The next start finds leftovers of a crash, and drops them again.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from exactlyonce.checkpoint.block_storage import BlockStorage
from exactlyonce.checkpoint.records.manifest import BlockRef, StoredBlock
from exactlyonce.pipeline.errors import BrokerUnavailable, ExactlyOnceError

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

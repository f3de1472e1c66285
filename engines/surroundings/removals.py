"""The removal of blocks that lie outside of the checkpoint topic, once their drop is decided and durable.

Invariant: only what a durable transaction of the decision log has dropped is removed, however late, and nobody waits
for it: a thread asks again while the storage is away. What a crash, or an end before it is back, leaves is found in the
listing at the next start, and dropped again.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing

from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.checkpoint.store.storage import BlockStorage
from exactlyonce.pipeline.errors import BrokerUnavailable, ExactlyOnceError

CLOSE_TIMEOUT_S = 10.0
"""How long a clean end waits for what is not removed yet."""
PAUSE_S = 1.0
NOTED_INTERVAL_S = 60.0


class Removals:
    """Of one leader. The thread begins with the first removal."""

    def __init__(self, storage: Callable[[], BlockStorage], note: Callable[[str], None]) -> None:
        self._storage, self._note = storage, note
        self._queue: queue.SimpleQueue[tuple[BlockRef, ...] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._noted_s = float("-inf")

    def add(self, blocks: Iterable[BlockRef]) -> None:
        """They may go."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="removals", daemon=True)
            self._thread.start()
        self._queue.put(tuple(blocks))

    def close(self) -> None:
        """Remove what was added, as far as the storage answers in time."""
        self._closing.set()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(CLOSE_TIMEOUT_S)

    def _work(self) -> None:
        with closing(self._storage()) as storage:
            while (blocks := self._queue.get()) is not None:
                while not self._removed(storage, blocks):
                    if self._closing.wait(PAUSE_S):
                        return

    def _removed(self, storage: BlockStorage, blocks: tuple[BlockRef, ...]) -> bool:
        """Whether it is over with *blocks*: they are gone, or asking again would not help."""
        try:
            storage.dropped(blocks)
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

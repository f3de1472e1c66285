"""An apply that stands still in the middle of its rows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from exactlyonce.sinks.ledger import LedgerEntry
from exactlyonce.sinks.write_ahead.store import Store
from exactlyonce.testing.cluster import LIMIT_S


class Held:
    """Chunks of which the second comes only when the test says so: an apply in the middle of its rows."""

    def __init__(self, chunks: list[bytes]) -> None:
        self._chunks = chunks
        self.reached, self.goes_on = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        yield self._chunks[0]
        self.reached.set()
        assert self.goes_on.wait(LIMIT_S)
        yield from self._chunks[1:]


class Applying:
    """An apply beside the test, which has stopped in the middle of its rows."""

    def __init__(self, store: Store, waiting: list[bytes], entry: LedgerEntry) -> None:
        self.chunks = Held(waiting)
        self._pool = ThreadPoolExecutor(1)
        self._applied = self._pool.submit(store.apply, self.chunks, entry)
        assert self.chunks.reached.wait(LIMIT_S)

    def ended(self) -> Any:
        """Let it go on; -> what it returned or raised."""
        self.chunks.goes_on.set()
        with self._pool:
            return self._applied.exception() or self._applied.result()

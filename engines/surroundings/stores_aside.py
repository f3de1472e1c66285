"""Stores that are asked on a thread of their own, so that whoever leads can show meanwhile that it lives.

Invariant: one request is under way at a time, and whoever asks the same again gets its answer; a request that nobody
asks for any more is ended before the next one, and before the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.commits.of_stores import UnderWay

LOOK_INTERVAL_S = 1.0
"""How long an answer is waited for before whoever asks is told that it is under way."""


class StoresAside:
    """Asks *stores*, which is for one thread at a time; *close* lets go of its connections, and may be called once."""

    def __init__(self, stores: Callable[[ask.Request], Any], close: Callable[[], None]) -> None:
        self._stores, self._close = stores, close
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
            return UnderWay(round((time.monotonic() - began_s) * 1000))
        self._under_way = None
        return future.result()

    def close(self) -> None:
        """Wait for what is under way, and let go of the connections."""
        try:
            self._thread.submit(self._close).result()
        finally:
            self._thread.shutdown()

"""An apply that stands still in the middle of its rows."""

from __future__ import annotations

import threading
from collections.abc import Iterator

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

"""An apply that stands still in the middle of its rows, and a wait for what others see of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

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


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.15)  # InnoDB shows new locks only to those who have not looked for 0.1 s

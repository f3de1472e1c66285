"""Forked processes of a test, which may be killed.

A fork must not use its parent's connections, so it opens its own. It ends by `_exit` and never collects its parent's
garbage: it closes nothing of its parent's, and waits for no thread that a fork does not have.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import warnings
from collections.abc import Callable

from exactlyonce.testing.cluster import LIMIT_S


class Forked:
    """A process that runs *action* with a function that tells the parent that it is in the middle."""

    def __init__(self, action: Callable[[Callable[[], None]], object]) -> None:
        self._readable, writable = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about threads of the parent, which the child lacks
            self.pid = os.fork()
        if self.pid == 0:
            self._be_child(action, writable)
        os.close(writable)

    def _be_child(self, action: Callable[[Callable[[], None]], object], writable: int) -> None:
        gc.freeze()
        try:
            try:
                outcome = str(action(lambda: _tell(writable, "in the middle")))
            except BaseException as error:
                outcome = f"{type(error).__name__}: {error}"
            _tell(writable, outcome)
        finally:
            os._exit(0)

    def next_line(self) -> str:
        """The next line: that it is in the middle, or what the action returned or raised."""
        line = b""
        while not line.endswith(b"\n"):
            waiting = select.poll()  # select() knows only the first 1,024 descriptors of a process
            waiting.register(self._readable, select.POLLIN)
            if not waiting.poll(1000 * LIMIT_S):
                raise TimeoutError(f"A process of the test has not ended within {LIMIT_S} s.")
            got = os.read(self._readable, 1)
            if not got:
                raise RuntimeError("A process of the test has died.")
            line += got
        return line.decode().rstrip("\n")

    def end(self) -> None:
        """Kill it by SIGKILL and wait for its end."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._readable)


def stand_still() -> None:
    """Wait until this process is killed."""
    while True:
        signal.pause()


def _tell(writable: int, text: str) -> None:
    os.write(writable, " ".join(text.split()).encode() + b"\n")

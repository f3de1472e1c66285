"""The clock of the machine. Outside tests, this is where time comes from."""

from __future__ import annotations

import os
import threading
import time

NS_PER_MS = 1_000_000


class SystemClock:
    """A `Clock` that tells the machine's time."""

    def now_ms(self) -> int:
        return time.time_ns() // NS_PER_MS

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // NS_PER_MS

    def processing_s(self) -> float:
        return _THREAD.clock.now_s()


class ProcessingClock:
    """The monotonic time of the thread that makes it, without its waits for a processor; for that thread only.

    A busy machine or a cgroup's quota is then no cost of a record. A system without Linux's schedstat does not tell
    these waits: they count there.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)

    def now_s(self) -> float:
        # A wait between the two reads may not move the time on: the monotonic time is read first.
        now_ns = time.monotonic_ns()
        self._now_s = max(self._now_s, (now_ns - self._waited_ns()) / 1e9)
        return self._now_s

    def _waited_ns(self) -> int:
        """See Linux's Documentation/scheduler/sched-stats.rst: the second field."""
        if self._file < 0:
            return 0
        return int(os.pread(self._file, 64, 0).split()[1])


class _Thread(threading.local):
    """What each thread has of its own."""

    def __init__(self) -> None:
        self.clock = ProcessingClock()


_THREAD = _Thread()

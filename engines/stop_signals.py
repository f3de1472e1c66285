"""The signals by which people and supervisors ask a command to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def handling_stop_signals(handler: Callable[..., Any]) -> Iterator[None]:
    """SIGINT and SIGTERM call *handler*, where this is the main thread; a program that goes on afterwards has its own
    handlers again."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.signal(each, handler) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, own in before.items():
            signal.signal(each, own)

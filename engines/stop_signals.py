"""The signals by which people and supervisors ask a command to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def handling_stop_signals(handler: Callable[..., Any]) -> Iterator[None]:
    """Have SIGINT and SIGTERM call *handler*, on the main thread only. The handlers before are set again at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own)

"""Asking a storage that is away again, for a while: a server that begins anew, or refuses one request of a thousand."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event
from typing import TypeVar

from exactlyonce.pipeline.errors import StorageUnavailable

R = TypeVar("R")

AWAY_TIMEOUT_S = 30.0
"""For so long; what follows from it, whoever asked decides."""
_PAUSE_S = 0.25


def persistently(asked: Callable[[], R], away_timeout_s: float) -> R:
    """What *asked* gives; `StorageUnavailable` once the storage is away for *away_timeout_s*."""
    deadline = time.monotonic() + away_timeout_s
    while True:
        try:
            return asked()
        except StorageUnavailable:
            if time.monotonic() > deadline:
                raise
        Event().wait(_PAUSE_S)

"""Waiting for something that comes, on a machine of any speed."""

from __future__ import annotations

import time
from collections.abc import Callable

from exactlyonce.testing.cluster import LIMIT_S


def nothing() -> None: ...


def succeeds(work: Callable[[], object], unless: type[Exception]) -> bool:
    try:
        work()
    except unless:
        return False
    return True


def until(
    condition: Callable[[], object],
    meanwhile: Callable[[], object] = nothing,
    told: Callable[[], object] = nothing,
    pause_s: float = 0.01,
) -> None:
    """Do *meanwhile* again and again; if *condition* never holds, what is *told* is the failure."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, told()
        meanwhile()
        time.sleep(pause_s)

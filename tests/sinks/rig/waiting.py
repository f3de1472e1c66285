"""Waits for a state, and for an interval that a writer flushes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.sinks.writer import FlushedInterval
from exactlyonce.testing.cluster import LIMIT_S


def until(condition: Callable[[], object], pause_s: float = 0.01) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "what the test waits for did not happen"
        time.sleep(pause_s)


def flushed(writer: Any, checkpoint: int) -> FlushedInterval:
    """The interval that *checkpoint* ends, once *writer* has flushed it."""
    deadline = time.monotonic() + LIMIT_S
    while (found := writer.take_flushed(checkpoint)) is None:
        assert time.monotonic() < deadline, f"checkpoint {checkpoint} was not flushed"
        writer.poll(0.05)
    interval: FlushedInterval = found
    return interval


def staged(writer: Any, checkpoint: int) -> StoreCommittable:
    """The committable of that interval, which has one."""
    found = flushed(writer, checkpoint).staged
    assert found is not None
    return found.committable

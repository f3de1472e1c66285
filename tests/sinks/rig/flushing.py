"""Waits for an interval that a writer flushes."""

from __future__ import annotations

import time
from typing import Any

from exactlyonce.checkpoint.records.manifest import StoreCommittable
from exactlyonce.sinks.writer import FlushedInterval
from exactlyonce.testing.cluster import LIMIT_S


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

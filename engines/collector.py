"""Python's garbage collector, run seldom while records are processed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (8_000, 3, 1)
"""As many new objects between two full collections as Python's own (700, 10, 10), with fewer collections: reference
counts free most objects of a batch first. Higher ones, or a `gc.freeze` at each checkpoint, would pile up cycles."""


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Collect rarely, and skip the objects that exist now: modules, restored state."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()

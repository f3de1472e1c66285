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


class UnitCollector:
    """The collector of a process that runs one unit after the other.

    A full collection looks at all modules, which takes longer than a small unit. So modules are frozen at the first
    unit, once a process; each later one collects only the objects made since, which other units have left.
    """

    def __init__(self) -> None:
        self._frozen = False

    @contextmanager
    def collecting_rarely(self) -> Iterator[None]:
        """Collect what earlier units have left, then rarely; the objects of the first unit's beginning stay frozen."""
        before = gc.get_threshold()
        gc.collect()
        if not self._frozen:
            gc.freeze()
            self._frozen = True
        gc.set_threshold(*THRESHOLDS)
        try:
            yield
        finally:
            gc.set_threshold(*before)

    def unfreeze(self) -> None:
        """Give all objects back to Python's own collections."""
        if self._frozen:
            gc.unfreeze()
            self._frozen = False

"""Python's garbage collector, made to come seldom while records are processed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (8_000, 3, 1)
"""As many new objects until everything is collected as with Python's own (700, 10, 10), and by fewer collections: most
objects of a batch are freed by reference counts before the first would walk over them. With higher ones, or with a
`gc.freeze` at each checkpoint, what is in use at the time and refers to itself would pile up."""


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """The collector comes rarely and skips what was there before: modules, restored state. Then as ever."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()

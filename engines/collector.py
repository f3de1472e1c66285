"""How often Python's garbage collector comes while records are processed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (50_000, 20, 20)
"""The objects of a batch are fewer: they are freed by reference counts before a collection would walk over them all."""


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """The collector comes rarely and passes over what was there before, and what is frozen meanwhile; then as ever."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()

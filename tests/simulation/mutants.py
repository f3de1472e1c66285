"""Planted defects: each is a rule of the protocol left out of shipped code. The simulator must find every one of them.

make simulate SEEDS=100 MUTANT="no alignment"
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module

from planting import MUTANTS
from remembered import forget

for place in ("workers", "channels", "coordinators", "stores", "load", "windows", "broadcasts", "joins"):
    import_module(f"mutants_of_{place}")  # enters its own


__all__ = ["MUTANTS", "SAMPLE", "planted"]
SAMPLE = [*MUTANTS][10::18]
"""Those that `make test` plants."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        stack.callback(forget)
        for each in MUTANTS[name].patches():
            stack.enter_context(each)
        forget()
        yield

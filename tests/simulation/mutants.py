"""Planted defects: each is a rule of the protocol left out of shipped code. The simulator must find every one of them.

make simulate SEEDS=100 MUTANT="no alignment"
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from mutants_of_cleaning import CLEANING
from mutants_of_coordinators import COORDINATORS
from mutants_of_ends import ENDS
from mutants_of_local_files import LOCAL_FILES
from mutants_of_loops import LOOPS
from mutants_of_outside import OUTSIDE
from mutants_of_overtaking import OVERTAKING
from mutants_of_savepoints import SAVEPOINTS
from mutants_of_stores import STORES
from mutants_of_workers import WORKERS
from remembered import forget

MUTANTS = {
    **WORKERS, **COORDINATORS, **CLEANING, **STORES, **SAVEPOINTS, **OVERTAKING, **OUTSIDE, **LOCAL_FILES, **LOOPS,
    **ENDS,
}  # fmt: skip
"""By name."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Within this the defect *name* is there."""
    with ExitStack() as stack:
        stack.callback(forget)
        for each in MUTANTS[name].patches():
            stack.enter_context(each)
        forget()
        yield

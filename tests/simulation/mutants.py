"""Planted defects: each is a rule of the protocol left out of shipped code. The simulator must find every one of them.

    make simulate SEEDS=1000 ARGS='--mutant "no alignment"'
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from mutants_of_coordinators import COORDINATORS
from mutants_of_workers import WORKERS, Mutant

LEFT = r"leaves .* behind, which nothing refers to"
SWEPT = r"writes though it was swept|is left |have been open for longer|are held back|is visible twice"
TWICE = r"is visible twice in|comes instead of|comes out of order"
STUCK = r"the job has not come to its end|shows \d+ of \d+ decided records|are held back"
ABORTED = r"is aborted though it is decided|is visible twice in"
LOST = r"sink \w+ of checkpoint \d+ has \d+ records, not \d+"
MESSAGES = {
    "a restart does not look for the blocks of the attempt before": LEFT,
    "what a killed worker had sent and arrives late is not looked for": LEFT,
    "recovery looks behind a manifest that is not finalized": LEFT,
    "a manifest notes the ends though others are in flight behind it": LEFT,
    "a finished checkpoint is finalized before its orphans are dropped": LEFT,
    "ids that are Empty are not ended again once older attempts were fenced": SWEPT,
    "commit before the manifest": r"is committed though no durable record names it",
    "abort after an unknown answer": ABORTED,
    "an unknown manifest counts as not written": ABORTED + r"|is decided before the one before it is finalized",
    "the broker's count is not checked": LOST,
    "a commit does not wait for its markers": r"is finalized though it is not committed|" + TWICE,
    "what a lost marker holds back is not released": STUCK,
    "what is lost in one partition counts as lost in all": TWICE,
    "finalized with unknown fates": r"is finalized though it is not committed",
    "zombie coordinators are not fenced": r"there are two manifests|ids only grow|is decided before",
    "producers are initialised before the decided transactions are committed": r"is used again before its checkpoint",
    "no sweep of older transactions": SWEPT,
    "empty ids are not swept": SWEPT,
    "older transactions are swept before the decided ones are committed": ABORTED,
    "a repair is committed before it is recorded": r"is committed though no durable record names it",
    "recovery does not follow repairs": ABORTED,
    "markers that were written again are believed": r"is finalized though it is not committed|" + TWICE,
    "output of aborted checkpoints is not carried": LOST,
    "late output of aborted checkpoints is not carried": LOST,
    "a restart while deciding": SWEPT + "|" + ABORTED,
    "a clean end while a checkpoint is unfinished": r"a clean end leaves nothing unfinalized",
    "blocks of the chain are forgotten": r"A block that a manifest names must not be tombstoned|which is tombstoned",
}
"""By planted defect of the coordinator's side, the pattern of the oracle's message."""
MUTANTS: dict[str, Mutant] = {
    **WORKERS,
    **{name: Mutant(patches, MESSAGES[name]) for name, patches in COORDINATORS.items() if name in MESSAGES},
}
"""By name."""


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Within this the defect *name* is there."""
    with ExitStack() as stack:
        for each in MUTANTS[name].patches():
            stack.enter_context(each)
        yield

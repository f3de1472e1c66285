"""A cache of the answers of shipped pure functions, for simulations.

A process calls each of them once or twice in its life; hundreds of simulated ones are born in a second. Invariants: an
entry is the shipped function's answer to the same bytes or type, in any history; the cache is bounded; it is not used
if the function is replaced, as by a planted defect, and is emptied when a defect is planted anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from unittest.mock import patch

from msgspec import inspect

from exactlyonce.checkpoint.records import history
from exactlyonce.checkpoint.records.encoding import DecisionKey
from exactlyonce.checkpoint.records.manifest import TransactionalId
from exactlyonce.connectors.kafka.checkpoint_topic import blocks

ANSWERS_MAX = 1_000
"""The limit of each function."""
_PURE = tuple(
    (owner, name, vars(owner)[name], lru_cache(ANSWERS_MAX)(getattr(owner, name)))
    for owner, name in (
        (inspect, "type_info"),
        (history, "_checked"),
        (blocks, "verified_value"),
        (DecisionKey, "parse"),
        (TransactionalId, "parse"),
    )
)


@contextmanager
def remembered() -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, real, remembering in _PURE:
            if vars(owner)[name] is real:
                stack.enter_context(patch.object(owner, name, remembering))
        yield


def forget() -> None:
    """Forget all answers: what a function calls is another one from now on."""
    for *_, remembering in _PURE:
        remembering.cache_clear()

"""The last look at a decision log before it is taken over, to spare a living coordinator.

A new coordinator fences first, and writes its first record some moments later: until then only its transactional id
shows it. Invariant: the returned history was read while nobody began, or a beginning took longer than
`BEGINNING_TIMEOUT_MS`. Safety never rests on it.
"""

from __future__ import annotations

from collections.abc import Callable

from exactlyonce.checkpoint.clock import Clock
from exactlyonce.checkpoint.records.committable import coordinator_id
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.requests import DescribeTransactions, Pause, Procedure
from exactlyonce.checkpoint.transactions.broker_answers import TransactionState

BEGINNING_TIMEOUT_MS = 3_000
"""How long to wait for the first record of a new coordinator, which may have died before it."""
PAUSE_MS = 100
_BEGINNING = ("Empty", "Ongoing", "PrepareCommit", "PrepareAbort")
"""The states of the id of a coordinator that is initialised, and writes its first record."""


def last_look(pipeline: str, peek: Callable[[], Procedure[History]], clock: Clock) -> Procedure[History]:
    """The decisions so far, as *peek* reads them (`DecisionLog.peek_at_stable`), with an incarnation that just begins.

    It fences nobody.
    """
    name, until_ms = coordinator_id(pipeline), clock.monotonic_ms() + BEGINNING_TIMEOUT_MS
    while True:
        before: TransactionState | None = (yield DescribeTransactions((name,)))[name]
        history = yield from peek()
        after: TransactionState | None = (yield DescribeTransactions((name,)))[name]
        is_at_rest = after is None or after.state not in _BEGINNING
        if (is_at_rest and after == before) or clock.monotonic_ms() >= until_ms:
            return history
        yield Pause(PAUSE_MS)

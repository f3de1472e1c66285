"""The last look at a decision log before it is taken over, for whoever would leave a living coordinator in peace. Pure.

A coordinator that begins fences first, and writes who it is some moments later: until then its transactional id shows
it, and the log does not. Invariant: the history that is returned was read while nobody began, or somebody has taken
longer than `BEGINNING_TIMEOUT_MS` for it. Safety never rests on it. Whoever begins within the milliseconds between the
look and the fence behind it is fenced: it has decided nothing by then, ends with `Fenced`, and nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable

from exactlyonce.checkpoint.clock import Clock
from exactlyonce.checkpoint.records.committable import coordinator_id
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.requests import DescribeTransactions, Pause, Procedure
from exactlyonce.checkpoint.transactions.broker_answers import TransactionState

BEGINNING_TIMEOUT_MS = 3_000
"""How long the first record of one that begins is waited for. What has died so is never seen to begin."""
PAUSE_MS = 100
_BEGINNING = ("Empty", "Ongoing", "PrepareCommit", "PrepareAbort")
"""How the id of a coordinator looks that was initialised, and writes its first record."""


def last_look(pipeline: str, peek: Callable[[], Procedure[History]], clock: Clock) -> Procedure[History]:
    """The decisions so far, as *peek* reads them (`DecisionLog.peek_at_stable`), with the incarnation that is just
    beginning, if one is; fences nobody."""
    name, until_ms = coordinator_id(pipeline), clock.monotonic_ms() + BEGINNING_TIMEOUT_MS
    while True:
        before: TransactionState | None = (yield DescribeTransactions((name,)))[name]
        history = yield from peek()
        after: TransactionState | None = (yield DescribeTransactions((name,)))[name]
        is_at_rest = after is None or after.state not in _BEGINNING
        if (is_at_rest and after == before) or clock.monotonic_ms() >= until_ms:
            return history
        yield Pause(PAUSE_MS)

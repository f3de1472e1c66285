"""Succession: how long a new run waits before it takes over from the leader.

Safety never rests on this: a new run fences all older ones, whatever they do. It keeps runs that are restarted again
and again from fencing each other before a checkpoint is complete. Invariant: no two clocks are compared. The waiting
run's clock times the leader's heartbeats; the leader's own clock tells how long it has led.

`last_look` comes before a decision log is taken over, to spare a living coordinator: a new one fences first, and writes
its first record some moments later. Until then only its transactional id shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from exactlyonce.checkpoint.clock import Clock
from exactlyonce.checkpoint.records.history import SILENCE_MS, History
from exactlyonce.checkpoint.records.manifest import INITIAL, RESTORED, Incarnation, coordinator_id
from exactlyonce.checkpoint.requests import DescribeTransactions, Pause, Procedure, TransactionState, TxnState
from exactlyonce.pipeline.errors import ExactlyOnceError

LED_LONG_MS = 60_000
"""A run that led for so long ends a series of takeovers. It is twice the longest pause, which ends none."""
PAUSE_MIN_MS, PAUSE_MAX_MS = 1_000, 30_000
LOOK_PAUSE_MS = 1_000
"""Between two looks at the leader."""


class Awaited(NamedTuple):
    """The leader that a run waits for, and how long at most."""

    incarnation: Incarnation
    pause_ms: int | None
    """Since it was first seen, or since its failure; None: a standby waits until it leads no more."""

    def text(self, pipeline: str) -> str:
        """A line for people about a run of *pipeline* that waits."""
        who = self.incarnation
        other = f"incarnation {who.incarnation} of {pipeline} (process {who.process} on {who.host})"
        if who.exit_code and self.pause_ms is not None:
            return (
                f"{other} {who.end} This run takes over in {self.pause_ms // 1000} s. If it fails likewise, the next "
                f"standby waits longer."
            )
        if self.pause_ms is None:
            return (
                f"{other} leads: this run stands by. It takes over once that has ended, or has written no heartbeat "
                f"for {SILENCE_MS // 1000} s."
            )
        return (
            f"{other} has itself taken over a short time ago: this run leaves it alone for {self.pause_ms // 1000} s, "
            f"then takes over. Runs that are started again and again fence each other: give each of them --standby, "
            f"or stop all but one."
        )


class AnotherLeads(ExactlyOnceError):
    """Another run leads the pipeline, and is left alone for now. A run never raises it to its caller."""


def takeovers_in_a_row(history: History) -> int:
    """The number of takeovers in quick succession, up to the newest incarnation.

    A takeover is an incarnation whose predecessor had not ended cleanly; it counts if it led for less than
    `LED_LONG_MS`, as far as its heartbeats tell.
    """
    numbers, count = sorted(history.incarnations, reverse=True), 0
    for number, before in pairwise(numbers):
        life, predecessor = history.incarnations[number], history.incarnations[before]
        is_short = life.heartbeat_ms - life.started_at_ms < LED_LONG_MS
        if predecessor.ended or life.ended or not is_short:
            break
        count += 1
    return count


def pause_ms(history: History) -> int:
    """How long the newest incarnation leads undisturbed: 0, or 1, 2, 4, ... 30 s in a row of takeovers."""
    return _pause_ms(takeovers_in_a_row(history))


def _pause_ms(count: int) -> int:
    return min(PAUSE_MAX_MS, PAUSE_MIN_MS << (count - 1)) if count else 0


def failures_in_a_row(history: History) -> int:
    """The number of failed incarnations up to the newest one, since one of them has decided a checkpoint."""
    decided = {manifest.incarnation for manifest in history.retained if manifest.kind not in (INITIAL, RESTORED)}
    count = 0
    for number in sorted(history.incarnations, reverse=True):
        if not history.incarnations[number].exit_code:
            break
        count += 1
        if number in decided:
            break
    return count


class Succession:
    """Watches the leader for one new run. For one thread at a time.

    A *standby* waits until nobody leads: the newest incarnation has ended, is known to be dead, or has written no
    heartbeat for `SILENCE_MS`. After a failure it also waits for `pause_ms`, since the next one may meet the same
    record. Any other run waits at most `pause_ms` for one that has taken over, and not at all after a failure.
    """

    def __init__(self, *, standby: bool, clock: Clock) -> None:
        self.standby = standby
        self.reason = ""
        """Why there is nobody to wait for, where people should know."""
        self._clock = clock
        self._incarnation = 0
        """The leader that is watched, since `_since_ms`, or since it has failed then."""
        self._exit_code = 0
        self._since_ms = 0
        self._heartbeat_ms = 0
        """The leader's last heartbeat; it has been silent for `_silent_ms`."""
        self._silent_ms = 0
        self._looked_ms = 0

    def awaited(self, history: History, is_known_dead: Callable[[Incarnation], bool]) -> Awaited | None:
        """The leader to wait for, given a *history* that was just read; None: take over."""
        newest = history.newest_incarnation
        self.reason = ""
        if newest is None:
            return None
        self._look_at(newest)
        if newest.ended:
            self.reason = newest.end
        elif is_known_dead(newest):
            self.reason = newest.end if newest.exit_code else "has died"
        elif self._silent_ms >= SILENCE_MS:
            self.reason = f"has written no heartbeat for {SILENCE_MS // 1000} s"
        elif self.standby:
            return Awaited(newest, None)
        elif self._watched_ms < (pause := pause_ms(history)):
            return Awaited(newest, pause)
        if self.standby and newest.exit_code and self._watched_ms < (pause := _pause_ms(failures_in_a_row(history))):
            return Awaited(newest, pause)
        return None

    @property
    def _watched_ms(self) -> int:
        return self._clock.monotonic_ms() - self._since_ms

    def _look_at(self, newest: Incarnation) -> None:
        now_ms = self._clock.monotonic_ms()
        is_another = newest.incarnation != self._incarnation
        if is_another or newest.exit_code != self._exit_code:
            self._incarnation, self._exit_code, self._since_ms = newest.incarnation, newest.exit_code, now_ms
        if is_another or newest.heartbeat_ms != self._heartbeat_ms:
            self._heartbeat_ms, self._silent_ms = newest.heartbeat_ms, 0
        else:  # a look that took long met a broker that is away, for the leader as well
            self._silent_ms += min(now_ms - self._looked_ms, 2 * LOOK_PAUSE_MS)
        self._looked_ms = now_ms


BEGINNING_TIMEOUT_MS = 3_000
"""How long to wait for the first record of a new coordinator, which may have died before it."""
BEGINNING_PAUSE_MS = 100
_BEGINNING = (TxnState.EMPTY, TxnState.ONGOING, TxnState.PREPARE_COMMIT, TxnState.PREPARE_ABORT)
"""The states of the id of a coordinator that is initialised, and writes its first record."""


def last_look(pipeline: str, peek: Callable[[], Procedure[History]], clock: Clock) -> Procedure[History]:
    """The decisions so far, as *peek* reads them (`DecisionLog.peek_at_stable`), with an incarnation that just begins.

    They are read while nobody begins, or a beginning takes longer than `BEGINNING_TIMEOUT_MS`. It fences nobody.
    """
    name, until_ms = coordinator_id(pipeline), clock.monotonic_ms() + BEGINNING_TIMEOUT_MS
    while True:
        before: TransactionState | None = (yield DescribeTransactions((name,)))[name]
        history = yield from peek()
        after: TransactionState | None = (yield DescribeTransactions((name,)))[name]
        is_at_rest = after is None or after.state not in _BEGINNING
        if (is_at_rest and after == before) or clock.monotonic_ms() >= until_ms:
            return history
        yield Pause(BEGINNING_PAUSE_MS)

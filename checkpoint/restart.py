"""Restart strategies: whether, and after how long, a job that failed is started again. Pure; names are Flink's."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, fields
from typing import Protocol

from exactlyonce.pipeline.errors import ConfigError


class RestartStrategy(Protocol):
    """Takes failures and completed checkpoints."""

    def failed(self, now_ms: int) -> int | None:
        """Milliseconds to wait before the next attempt, or None: give up."""

    def completed(self, now_ms: int) -> None:
        """A checkpoint completed: the job makes progress."""


@dataclass
class NoRestart:
    """The first failure ends the job."""

    def failed(self, now_ms: int) -> int | None:
        return None

    def completed(self, now_ms: int) -> None:
        return None


@dataclass
class FixedDelay:
    """At most *attempts* restarts without a completed checkpoint between them, *delay_ms* apart."""

    attempts: int = 10
    delay_ms: int = 1_000
    _used: int = field(default=0, init=False)

    def failed(self, now_ms: int) -> int | None:
        self._used += 1
        return self.delay_ms if self._used <= self.attempts else None

    def completed(self, now_ms: int) -> None:
        self._used = 0


@dataclass
class FailureRate:
    """At most *failures* within *window_ms*: tolerates rare failures, stops a job that only fails."""

    failures: int = 5
    window_ms: int = 60_000
    delay_ms: int = 1_000
    _times: deque[int] = field(default_factory=deque, init=False)

    def failed(self, now_ms: int) -> int | None:
        self._times.append(now_ms)
        while self._times[0] <= now_ms - self.window_ms:
            self._times.popleft()
        return self.delay_ms if len(self._times) <= self.failures else None

    def completed(self, now_ms: int) -> None:
        return None


@dataclass
class ExponentialDelay:
    """Never gives up; waits twice as long after each failure without a completed checkpoint, up to *max_ms*."""

    initial_ms: int = 100
    max_ms: int = 30_000
    _next: int = field(default=0, init=False)

    def failed(self, now_ms: int) -> int | None:
        delay, self._next = self._next or self.initial_ms, min(self.max_ms, 2 * (self._next or self.initial_ms))
        return delay

    def completed(self, now_ms: int) -> None:
        self._next = 0


STRATEGIES: dict[str, type[NoRestart | FixedDelay | FailureRate | ExponentialDelay]] = {
    "none": NoRestart,
    "fixed_delay": FixedDelay,
    "failure_rate": FailureRate,
    "exponential_delay": ExponentialDelay,
}


def restart_strategy(name: str, **options: int) -> RestartStrategy:
    """The strategy called *name*, with *options* as its fields; ConfigError lists the strategies.

    >>> restart_strategy("fixed_delay", attempts=1).failed(0)
    1000
    """
    if name not in STRATEGIES:
        raise ConfigError(f"There is no restart strategy {name!r}. Choose one of: {', '.join(STRATEGIES)}.")
    wrong = [f"{option} {value}" for option, value in options.items() if value < (option == "window_ms")]
    if wrong:
        raise ConfigError(f"Restart strategy {name!r} cannot have {', '.join(wrong)}. Choose larger numbers.")
    try:
        return STRATEGIES[name](**options)
    except TypeError:
        given = ", ".join(option.removesuffix("_ms") for option in options)
        known = ", ".join(field.name.removesuffix("_ms") for field in fields(STRATEGIES[name]) if field.init)
        raise ConfigError(
            f"Restart strategy {name!r} does not take all of: {given}. It takes {known or 'no options'}."
        ) from None

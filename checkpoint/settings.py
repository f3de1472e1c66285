"""The settings of checkpoints, named as Flink names them, and their demands on the broker.

A transaction stays open from its first record until its checkpoint is decided, at worst through every tolerated failure
and one restart. Its timeout must be longer than that, and no longer than the broker allows. Decisions have transactions
of their own, whose timeout is no setting.

A restart strategy says whether, and after how long, a job that failed is started again; names are Flink's. Pure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, fields
from typing import Annotated

import msgspec

from exactlyonce.checkpoint.records.storage_url import TOPIC, storage_setting
from exactlyonce.checkpoint.transactions.transactional_writer import DECISION_TIMEOUT_MS
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.names import setting
from exactlyonce.pipeline.settings import CHOICE, COUNT, DURATION, FLAG, TEXT, Setting, check_bounds, declared
from exactlyonce.pipeline.sink import AT_LEAST_ONCE, EXACTLY_ONCE


class RestartStrategy:
    """Takes failures and completed checkpoints."""

    def failed(self, now_ms: int) -> int | None:
        """Milliseconds to wait before the next attempt, or None: give up."""
        raise NotImplementedError

    def completed(self, now_ms: int) -> None:
        """A checkpoint completed: the job makes progress."""


@dataclass
class NoRestart(RestartStrategy):
    """The first failure ends the job."""

    def failed(self, now_ms: int) -> int | None:
        return None


@dataclass
class FixedDelay(RestartStrategy):
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
class FailureRate(RestartStrategy):
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


@dataclass
class ExponentialDelay(RestartStrategy):
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


MODES = (EXACTLY_ONCE, AT_LEAST_ONCE)
RETAIN, DELETE = "retain_on_cancellation", "delete_on_cancellation"
RETENTION = (RETAIN, DELETE)
PARTITIONS, PARTITIONS_MIN = 5, 2
"""Partitions of the checkpoint topic: one for decisions, the others for blocks."""


class CheckpointSettings(msgspec.Struct, frozen=True):
    """The settings of a file's table [checkpoint]."""

    mode: Annotated[str, Setting(
        CHOICE, "at_least_once: no input is held back, and state may count records twice", choices=MODES,
        flink="`execution.checkpointing.mode`",
    )] = EXACTLY_ONCE  # fmt: skip
    """Whether an input is held back from its barrier to the snapshot; see `checkpoint.alignment`."""
    unaligned: Annotated[bool, Setting(
        FLAG, "a barrier overtakes the records before it, which become part of the checkpoint",
        flink="`execution.checkpointing.unaligned.enabled`",
    )] = False  # fmt: skip
    aligned_timeout_ms: Annotated[int, Setting(
        DURATION, "with --unaligned: for how long a barrier waits before it overtakes",
        flink="`execution.checkpointing.aligned-checkpoint-timeout`",
    )] = 0  # fmt: skip
    interval_ms: Annotated[int, Setting(
        DURATION, "from one to the next", minimum=10, keyword="checkpoint_interval",
        flink="`execution.checkpointing.interval`",
    )] = 1_000  # fmt: skip
    timeout_ms: Annotated[int, Setting(
        DURATION, "one that takes longer is aborted", minimum=1, keyword="checkpoint_timeout",
        flink="`execution.checkpointing.timeout`",
    )] = 60_000  # fmt: skip
    deploy_timeout_ms: Annotated[int, Setting(
        DURATION, "workers that are not ready by then are replaced", minimum=1,
    )] = 300_000  # fmt: skip
    """To import the pipeline, open its operators and restore its state."""
    min_pause_ms: Annotated[int, Setting(
        DURATION, "from the end of one to the next", flink="`execution.checkpointing.min-pause`",
    )] = 0  # fmt: skip
    max_concurrent: Annotated[int, Setting(
        COUNT, "how many may be under way", minimum=1, flink="`execution.checkpointing.max-concurrent-checkpoints`",
    )] = 1  # fmt: skip
    tolerable_failed: Annotated[int, Setting(
        COUNT, "failures in a row without a restart", flink="`execution.checkpointing.tolerable-failed-checkpoints`",
    )] = 0  # fmt: skip
    num_retained: Annotated[int, Setting(
        COUNT, "how many are kept", minimum=1, flink="`execution.checkpointing.num-retained`",
    )] = 3  # fmt: skip
    incremental: Annotated[bool, Setting(
        FLAG, "hold what changed since the last one, or all state, each for itself (default: what changed)",
        flink="`execution.checkpointing.incremental`, which is off there by default",
    )] = True  # fmt: skip
    retention: Annotated[str, Setting(
        CHOICE, "when the run is cancelled, they are kept or deleted", choices=RETENTION,
        flink="`execution.checkpointing.externalized-checkpoint-retention`: `RETAIN_ON_CANCELLATION` or "
        "`DELETE_ON_CANCELLATION`; the default there is `NO_EXTERNALIZED_CHECKPOINTS`, which a pipeline that "
        "is to go on after any crash cannot have",
    )] = RETAIN  # fmt: skip
    restart_budget_ms: Annotated[int, Setting(DURATION, "the longest that a restart takes")] = 60_000
    """A longer restart endangers open transactions."""
    store_timeout_ms: Annotated[int, Setting(DURATION, "how long a store that is away is waited for")] = 600_000
    """Counted from the first failed attempt; then the run ends."""
    stop_timeout_ms: Annotated[int, Setting(
        DURATION, "asked to stop, it ends by then, with or without a last checkpoint",
    )] = 30_000  # fmt: skip
    transaction_timeout_ms: Annotated[int, Setting(
        DURATION, "the broker aborts a transaction that is open longer", default="the most the broker allows",
        flink="`transaction.timeout.ms` of a `KafkaSink`",
    )] = 0  # fmt: skip
    """0: as long as the broker allows."""
    storage: Annotated[str, Setting(
        TEXT, "where state is kept: /folder, hdfs://host:port/folder or s3://bucket/prefix",
        keyword="checkpoint_storage", reader=storage_setting, default="topic", metavar="URL",
        flink="`execution.checkpointing.dir`, with `execution.checkpointing.storage: filesystem`",
    )] = TOPIC  # fmt: skip
    """See `records.storage_url`."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.unaligned and self.mode != EXACTLY_ONCE:
            raise ConfigError(
                f"{setting('unaligned')} goes with mode {EXACTLY_ONCE} only: in mode {self.mode} no record waits for a "
                f"barrier, so that there is no cut to say which records were on their way. Leave one of the two out."
            )
        if self.aligned_timeout_ms and not self.unaligned:
            raise ConfigError(
                f"{self._shown('aligned_timeout_ms')}, but checkpoints stay aligned however long it takes: set "
                f"{setting('unaligned')} as well."
            )

    def _shown(self, name: str) -> str:
        """A field and its value, at the beginning of an error."""
        unit = " ms" if name.endswith("_ms") else ""
        return f"{declared(type(self))[name].named} is {getattr(self, name)}{unit}"

    @property
    def slots(self) -> int:
        """Transactional ids of one sink subtask: those in flight, those carried over, and the one to come."""
        return self.max_concurrent + self.tolerable_failed + 3

    @property
    def transaction_timeout_needed_ms(self) -> int:
        """The longest that a transaction may have to stay open."""
        return (self.tolerable_failed + 1) * (self.interval_ms + self.timeout_ms) + self.restart_budget_ms

    def timeout_max_ms(self, transaction_timeout_ms: int) -> int:
        """The longest timeout of a checkpoint with which no transaction may have to be open longer."""
        tries_ms = transaction_timeout_ms - self.restart_budget_ms
        return max(self.timeout_ms, tries_ms // (self.tolerable_failed + 1) - self.interval_ms)

    def transaction_timeout_for(self, broker_cap_ms: int, *, decisions_ms: int = DECISION_TIMEOUT_MS) -> int:
        """The transaction timeout to use with a broker whose `transaction.max.timeout.ms` is *broker_cap_ms*.

        Raises ConfigError, with the settings to change, if the two do not go together.
        """
        chosen, needed = self.transaction_timeout_ms or broker_cap_ms, self.transaction_timeout_needed_ms
        own = setting("transaction_timeout")
        if broker_cap_ms < decisions_ms:
            raise ConfigError(
                f"The broker ends transactions after {broker_cap_ms} ms (transaction.max.timeout.ms), but those of "
                f"decisions may be open for {decisions_ms} ms, and those of sinks for {max(needed, chosen)} ms. Raise "
                f"the broker's transaction.max.timeout.ms to {max(decisions_ms, needed, chosen)} ms or more."
            )
        shown = [self._shown(name) for name in ("interval_ms", "timeout_ms", "tolerable_failed", "restart_budget_ms")]
        ways = f"Either lower one of these: {', '.join(shown)}; or raise "
        if chosen > broker_cap_ms:
            raise ConfigError(
                f"{own} is {chosen} ms, but the broker allows {broker_cap_ms} ms at most (transaction.max.timeout.ms). "
                f"Lower transaction_timeout, or raise the broker's setting."
            )
        if chosen < needed and self.transaction_timeout_ms:
            raise ConfigError(
                f"{own} is {chosen} ms, but interval, timeout and restarts can keep a transaction open "
                f"for {needed} ms. {ways}transaction_timeout to {needed} ms or more."
            )
        if chosen < needed:
            raise ConfigError(
                f"The broker ends transactions after {broker_cap_ms} ms (transaction.max.timeout.ms), but interval, "
                f"timeout and restarts can keep one open for {needed} ms. {ways}the broker's "
                f"transaction.max.timeout.ms to {needed} ms or more."
            )
        return chosen

"""The settings of checkpoints, named as Flink names them, and what they demand of the broker.

A transaction stays open from its first record until its checkpoint is decided, at worst through every tolerated failure
and one restart. Its timeout must be longer than that, and no longer than the broker allows.
"""

from __future__ import annotations

import msgspec

from exactlyonce.checkpoint.records.storage_url import TOPIC
from exactlyonce.pipeline.delivery import AT_LEAST_ONCE, EXACTLY_ONCE
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.names import setting

MODES = (EXACTLY_ONCE, AT_LEAST_ONCE)
RETAIN, DELETE = "retain_on_cancellation", "delete_on_cancellation"
RETENTION = (RETAIN, DELETE)


class CheckpointSettings(msgspec.Struct, frozen=True):
    """How often checkpoints are taken, and what is tolerated. All times in milliseconds."""

    mode: str = EXACTLY_ONCE
    """Whether an input is held back from its barrier to the snapshot; see `checkpoint.alignment`."""
    unaligned: bool = False
    """Whether a barrier may overtake the records before it, which become part of the checkpoint."""
    aligned_timeout_ms: int = 0
    """Where it may: how long after its trigger a checkpoint still tries to do without."""
    interval_ms: int = 1_000
    timeout_ms: int = 60_000
    """A checkpoint that takes longer is aborted."""
    deploy_timeout_ms: int = 300_000
    """Workers that have not imported the pipeline, opened its operators and restored its state by then are replaced."""
    min_pause_ms: int = 0
    """Between the end of one checkpoint and the trigger of the next."""
    max_concurrent: int = 1
    tolerable_failed: int = 0
    """Checkpoints in a row that may fail before the job restarts from the last completed one."""
    num_retained: int = 3
    incremental: bool = True
    """Whether a checkpoint holds what changed since the last one, and stands on older ones for the rest."""
    retention: str = RETAIN
    """Whether the checkpoints of a run that is cancelled stay, for the next run to go on from, or go."""
    restart_budget_ms: int = 60_000
    """How long a restart may take before open transactions are in danger."""
    store_timeout_ms: int = 600_000
    """A store that does not answer is waited for so long, once a checkpoint is decided; then the run ends."""
    stop_timeout_ms: int = 30_000
    """A run that is asked to stop ends after so long at most, with or without a last checkpoint."""
    transaction_timeout_ms: int = 0
    """0: as long as the broker allows."""
    storage: str = TOPIC
    """Where blocks are kept; see `records.storage_url`."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"{self._shown('mode')}: choose one of {', '.join(MODES)}.")
        if self.retention not in RETENTION:
            raise ConfigError(f"{self._shown('retention')}: choose one of {', '.join(RETENTION)}.")
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
        if self.interval_ms < 10:
            raise ConfigError(f"{self._shown('interval_ms')}: checkpoints need at least 10 ms. Set a longer interval.")
        for name in ("timeout_ms", "deploy_timeout_ms", "max_concurrent", "num_retained"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{self._shown(name)}: it must be at least 1.")
        for name in (
            "aligned_timeout_ms", "min_pause_ms", "tolerable_failed", "restart_budget_ms", "store_timeout_ms",
            "stop_timeout_ms", "transaction_timeout_ms",
        ):  # fmt: skip
            if getattr(self, name) < 0:
                raise ConfigError(f"{self._shown(name)}: it must not be negative.")

    def _shown(self, name: str) -> str:
        """A field and its value, as an error begins."""
        unit = " ms" if name.endswith("_ms") else ""
        return f"{setting(name.removesuffix('_ms'))} is {getattr(self, name)}{unit}"

    @property
    def slots(self) -> int:
        """Transactional ids of one sink subtask: those in flight, those carried over, and the one to come."""
        return self.max_concurrent + self.tolerable_failed + 3

    @property
    def transaction_timeout_needed_ms(self) -> int:
        """The longest that a transaction may have to stay open."""
        return (self.tolerable_failed + 1) * (self.interval_ms + self.timeout_ms) + self.restart_budget_ms

    def transaction_timeout_for(self, broker_cap_ms: int) -> int:
        """The transaction timeout to use with a broker whose `transaction.max.timeout.ms` is *broker_cap_ms*.

        Raises ConfigError, with the settings to change, where the two cannot be brought together.
        """
        chosen, needed = self.transaction_timeout_ms or broker_cap_ms, self.transaction_timeout_needed_ms
        own = setting("transaction_timeout")
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

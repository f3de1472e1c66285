"""The options of `exactlyonce run` and of `Pipeline.run`, checked before anything is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from exactlyonce.checkpoint.records.manifest import RecordPlace
from exactlyonce.checkpoint.restart import RestartStrategy, restart_strategy
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.backends import StateSettings
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.names import setting

UNTIL = ("running", "latest")
REPAIR = ("local", "spark", "halt")


@dataclass(frozen=True)
class Restoration:
    """Where a run is to begin, as its user says."""

    source: str
    """The number of a savepoint in the pipeline's topic, or the URL of an exported one."""
    mapping: Mapping[str, str] = field(default_factory=dict)
    """By id of an operator or a source in the savepoint, the id that it has now."""
    allow_dropped: bool = False
    """Whether state and sources of the savepoint may be left behind that the pipeline does not have."""
    rewind: bool = False
    """Whether a savepoint may be taken that is not the newest checkpoint: output since then is written again."""

    @property
    def number(self) -> int | None:
        """Of the savepoint in the topic; None: it was exported."""
        return int(self.source) if self.source.isdecimal() else None


@dataclass(frozen=True)
class RunOptions:
    """One run. Times are in milliseconds."""

    client: ClientConfig
    """How to reach the cluster; librdkafka's settings are passed through."""
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    state: StateSettings = field(default_factory=StateSettings)
    parallelism: int = 1
    until: str = "running"
    """"latest": process what is there, complete a last checkpoint and end; "running": go on until stopped."""
    standby: bool = False
    """Whether it waits until no other run leads the pipeline."""
    restart: Mapping[str, int | str] = field(default_factory=lambda: {"strategy": "exponential_delay"})
    accept_loss: int | None = None
    """A checkpoint whose lost output is given up, after a halt that named it."""
    repair: str = "local"
    """How output is made again that a decided checkpoint has lost and that can no longer be copied: by a replay in the
    coordinator's process, by one on Spark, or not: "halt"."""
    inline: bool = False
    """All in one process, for a debugger."""
    restoration: Restoration | None = None
    """The savepoint to begin from; None: the run goes on from its newest checkpoint."""
    allow_dropped_fields: bool = False
    """Whether fields of states that their types do not have are given up, whatever they hold."""
    skip: tuple[RecordPlace, ...] = ()
    """Records of the inputs that are left out."""
    checkpoint_partitions: int = 5
    """Of the checkpoint topic, when it is created."""

    def __post_init__(self) -> None:
        if self.until not in UNTIL:
            raise ConfigError(f"until is {self.until!r}: choose one of {', '.join(UNTIL)}.")
        if self.repair not in REPAIR:
            raise ConfigError(f"repair is {self.repair!r}: choose one of {', '.join(REPAIR)}.")
        if self.parallelism < 1:
            raise ConfigError(f"parallelism is {self.parallelism}: it must be at least 1.")
        if self.checkpoint_partitions < 2:
            raise ConfigError(
                f"{setting('checkpoint_partitions')} is {self.checkpoint_partitions}: it must be at least 2, one for "
                f"decisions."
            )
        if self.inline and self.parallelism != 1:
            raise ConfigError("inline (--inline) runs everything in one process: it goes with parallelism 1 only.")
        self.restart_strategy()

    def restart_strategy(self) -> RestartStrategy:
        """A fresh strategy as the options say."""
        options = dict(self.restart)
        name = str(options.pop("strategy", "exponential_delay"))
        return restart_strategy(name, **{key: int(value) for key, value in options.items()})

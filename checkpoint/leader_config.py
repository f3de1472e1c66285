"""The configuration of a leader, and its rule for keeping checkpoints: its callers give both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from exactlyonce.checkpoint.commits.stores import StagingSink
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Incarnation, Manifest, RecordPlace
from exactlyonce.checkpoint.records.storage_url import TOPIC, described, setting_of
from exactlyonce.checkpoint.settings import DELETE
from exactlyonce.pipeline.dead_letters import DeadLetterLimits
from exactlyonce.pipeline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LeaderConfig:
    """A pipeline, and the process that leads it: host, process, machine and cluster are filled in as it is opened."""

    pipeline: str
    transaction_timeout_ms: int
    fingerprint: str
    max_parallelism: int
    parallelism: int
    host: str = ""
    process: int = 0
    machine: str = ""
    """See `Incarnation.machine`."""
    cluster_id: str = ""
    transaction_version: int = 0
    accept_loss: int | None = None
    """The checkpoint whose lost output the user gives up."""
    attempt: int = 0
    """The first one."""
    staging: Mapping[str, StagingSink] = field(default_factory=dict)
    """The sinks that write to stores with a ledger."""
    store_timeout_ms: int = 0
    """How long to wait for such a store that does not answer."""
    storage: str = TOPIC
    """See `Manifest.storage`."""
    skips: tuple[RecordPlace, ...] = ()
    """The input records that the user has it leave out."""
    deletes: bool = False
    """Whether its checkpoints are deleted when it is cancelled."""
    bounded: bool = False
    without_output: bool = False
    """Whether its checkpoints are of history whose output is another application's."""
    dead_letter_limits: Mapping[str, DeadLetterLimits] = field(default_factory=dict)
    """By the id of the sink that dead letters go to."""
    max_late: float = 1.0
    """The largest share of its latest records that an operator may leave out as late; see `leader.LateRecords`."""
    restores: str = ""
    """The origin of the savepoint to continue from, unless it has done so already; empty: none."""

    def fenced_below(self, incarnation: Incarnation) -> tuple[int, int]:
        """(incarnation, attempt) below which all transactional ids were fenced when *incarnation* began."""
        return incarnation.fenced_below, 0

    def filled(self, manifest: Manifest) -> Manifest:
        """*manifest* with the fields that only this kind of pipeline has."""
        return manifest

    def goes_on_from_savepoint(self, newest: Manifest | None) -> bool:
        """Whether to begin from a savepoint; not if *newest* shows that this has been done."""
        return bool(self.restores) and (newest is None or newest.origin != self.restores)

    def require_same_storage(self, newest: Manifest | None) -> None:
        """Raise ConfigError if the pipeline continues from *newest*, and its blocks are kept elsewhere.

        A run that begins from a savepoint writes it anew, so it needs no block of the former storage.
        """
        if newest is None or newest.storage == self.storage or self.goes_on_from_savepoint(newest):
            return
        number = str(newest.checkpoint) if newest.is_savepoint else "N"
        taken = "" if newest.is_savepoint else (
            f" take a savepoint N, by `exactlyonce savepoint {self.pipeline} --stop` while it runs as it did;"
        )  # fmt: skip
        raise ConfigError(
            f"The checkpoints of {self.pipeline} are kept in {described(newest.storage)}, and this run was told to "
            f"keep them in {described(self.storage)}. Nothing was changed.\n"
            f"  To go on as before: --checkpoint-storage {setting_of(newest.storage)}\n"
            f"  To move them:{taken} `exactlyonce run PIPELINE --from-savepoint {number} --checkpoint-storage "
            f"{setting_of(self.storage)}`"
        )

    def require_not_condemned(self, history: History) -> None:
        """Raise ConfigError if a cancelled run has left its checkpoints to be deleted."""
        if history.condemned:
            raise ConfigError(
                f"The checkpoints of {self.pipeline} are to be deleted: its run was cancelled, with retention "
                f"{DELETE}. Nothing was changed. The next `exactlyonce run` deletes them first, and so does "
                f"`exactlyonce cancel {self.pipeline}`."
            )

    def topic_lost(self, topic: str, incarnation: int) -> str:
        """The text of the halt if *topic* is empty, but the broker knows of transactions of *incarnation*."""
        return (
            f"The checkpoint topic {topic} is empty, but transactions of incarnation {incarnation} of this pipeline "
            f"are known to the broker: the topic was deleted. Beginning anew would write all output again.\n"
            f"  Choices: restore the topic from a replica or backup and run again; or, if that is what you want, "
            f"`exactlyonce reset {self.pipeline}`."
        )

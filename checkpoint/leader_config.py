"""The configuration of a leader, and the rule by which it keeps checkpoints: its callers give both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from exactlyonce.checkpoint.commits.of_stores import StagingSink
from exactlyonce.checkpoint.decision import Dropped
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import BlockRef, Incarnation, Manifest, RecordPlace
from exactlyonce.checkpoint.records.storage_url import TOPIC, described, setting_of
from exactlyonce.checkpoint.requests import Procedure
from exactlyonce.checkpoint.settings import DELETE
from exactlyonce.pipeline.errors import ConfigError


class Retention:
    """The rule which checkpoints and blocks stay, and which may go; this one keeps all, where there are no blocks."""

    def recover(self, history: History, incarnation: int) -> Procedure[Dropped]:
        """The manifests and blocks that older incarnations have left and that may go."""
        yield from ()
        return (), ()

    def begin_attempt(self, newest: Manifest, incarnation: int, attempt: int, *, late: bool) -> Procedure[None]:
        """Look for what the attempt before has left since *newest*."""
        yield from ()

    def nothing_yet(self, ends: tuple[int, ...]) -> None:
        """The pipeline is new, and its block partitions end there."""

    def ends_to_note(self, checkpoint: int, base: int, *, final: bool) -> tuple[int, ...]:
        """The `Manifest.block_end_offsets` of *checkpoint*."""
        return ()

    def written(self, checkpoint: int, blocks: Iterable[BlockRef]) -> None:
        """*blocks* were written for *checkpoint*."""

    def completed(self, checkpoint: int, blocks: Iterable[BlockRef], *, keep: bool = False) -> None:
        """*checkpoint* is decided, and stands on *blocks*; *keep*: it is a savepoint, which never expires."""

    def release(self, checkpoint: int) -> None:
        """*checkpoint*, a savepoint, is wanted no more: it goes with the next that may."""

    def expire(self, manifest: Manifest, pinned: Iterable[int]) -> Procedure[Dropped]:
        """The manifests and blocks that may go in the transaction that finalizes *manifest*."""
        yield from ()
        return (), ()


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
    """The checkpoint whose lost output the user goes on without."""
    attempt: int = 0
    """The first one."""
    staging: Mapping[str, StagingSink] = field(default_factory=dict)
    """The sinks that write to stores with a ledger."""
    store_timeout_ms: int = 0
    """For how long such a store is waited for, if it does not answer."""
    storage: str = TOPIC
    """Where its blocks are kept; see `Manifest.storage`."""
    skips: tuple[RecordPlace, ...] = ()
    """The records of its inputs that the user has it leave out."""
    deletes: bool = False
    """Whether its checkpoints go when it is cancelled."""
    bounded: bool = False
    """Whether it does bounded work."""
    restores: str = ""
    """The origin of the savepoint that it is to go on from, unless it has done so already; empty: of none."""

    def fenced_below(self, incarnation: Incarnation) -> tuple[int, int]:
        """(incarnation, attempt) below which all transactional ids were fenced when *incarnation* began."""
        return incarnation.fenced_below, 0

    def filled(self, manifest: Manifest) -> Manifest:
        """*manifest* with the fields that only its kind of pipeline knows."""
        return manifest

    def goes_on_from_savepoint(self, newest: Manifest | None) -> bool:
        """Whether it is to begin from a savepoint, and *newest* shows that it has not done so yet."""
        return bool(self.restores) and (newest is None or newest.origin != self.restores)

    def require_same_storage(self, newest: Manifest | None) -> None:
        """ConfigError where the blocks of *newest*, which the pipeline goes on from, are kept elsewhere.

        A savepoint is written anew, whole, so that whoever goes on from one needs no block of where it was kept.
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
        """ConfigError where a run that was cancelled has left all that there is to be deleted."""
        if history.condemned:
            raise ConfigError(
                f"The checkpoints of {self.pipeline} are to be deleted: its run was cancelled, with retention "
                f"{DELETE}. Nothing was changed. The next `exactlyonce run` deletes them first, and so does "
                f"`exactlyonce cancel {self.pipeline}`."
            )

    def topic_lost(self, topic: str, incarnation: int) -> str:
        """The text of the halt where *topic* is empty, but the broker knows of transactions of *incarnation*."""
        return (
            f"The checkpoint topic {topic} is empty, but transactions of incarnation {incarnation} of this pipeline "
            f"are known to the broker: the topic was deleted. Beginning anew would write all output again.\n"
            f"  Choices: restore the topic from a replica or backup and run again; or, if that is what you want, "
            f"`exactlyonce reset {self.pipeline}`."
        )

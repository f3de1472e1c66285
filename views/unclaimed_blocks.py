"""The blocks of a pipeline that no manifest needs: on their way to the next checkpoint, or orphans.

They are searched for in the present storage and in former ones. A former storage that is gone is reported, and is no
error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from exactlyonce.checkpoint.block_storage import Scanned, UnreadableBlock
from exactlyonce.checkpoint.kept_blocks import first_places
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import BlockRef, Manifest, StoredBlock
from exactlyonce.checkpoint.records.storage_url import TOPIC
from exactlyonce.engines.blocks import Storages, references_or_why
from exactlyonce.pipeline.errors import ConfigError, StorageUnavailable

R = TypeVar("R")


@dataclass(frozen=True)
class BlockSurvey:
    """The blocks of a pipeline; see `survey`."""

    references: Mapping[int, frozenset[BlockRef] | str]
    """The blocks that each retained checkpoint needs, or why they are unknown."""
    scanned: Mapping[str, Scanned]
    first_places: tuple[int, ...]
    """The offsets from which the next run searches for orphans, by partition of the topic."""
    unreachable: Mapping[str, str] = field(default_factory=dict)
    """Former storages that cannot be read, each with the reason."""

    @property
    def claimed(self) -> set[BlockRef]:
        """The blocks that some checkpoint needs."""
        return {ref for refs in self.references.values() if not isinstance(refs, str) for ref in refs}

    @property
    def unclaimed(self) -> list[StoredBlock]:
        """The scanned blocks that no checkpoint needs; empty if a checkpoint's references are unknown."""
        if self.damaged:
            return []
        keys = {ref.key for ref in self.claimed}
        stored = ((storage, ref) for storage, scanned in self.scanned.items() for ref in scanned.blocks)
        return [StoredBlock(storage, ref) for storage, ref in stored if ref.key not in keys]

    def written_at_ms(self, refs: Iterable[BlockRef]) -> int | None:
        """When the first of *refs* was put; None if it is not known of any."""
        known = (scanned.written_at_ms.get(ref.key) for ref in refs for scanned in self.scanned.values())
        return min((at_ms for at_ms in known if at_ms is not None), default=None)

    @property
    def damaged(self) -> dict[int, str]:
        """Why a checkpoint cannot be restored, by its number."""
        return {checkpoint: why for checkpoint, why in self.references.items() if isinstance(why, str)}


def survey(storages: Storages, history: History, *, deep: bool) -> BlockSurvey:
    """Scan the blocks of *history*, which has a manifest: all if *deep*, else those where the next run searches."""
    places = first_places(history)
    scanned, unreachable = dict[str, Scanned](), dict[str, str]()
    for storage in history.storages:
        scan = partial(storages.of(storage).since, (0,) * len(places) if deep else places)
        blocks = _answer_or_why(storage, history, scan)
        if isinstance(blocks, str):
            unreachable[storage] = blocks
        else:
            scanned[storage] = blocks
    return BlockSurvey(needed_blocks(storages, history, history.retained), scanned, places, unreachable)


def needed_blocks(
    storages: Storages, history: History, manifests: Iterable[Manifest]
) -> dict[int, frozenset[BlockRef] | str]:
    """The blocks that each checkpoint of *manifests*, from *history*, needs, or why they are unknown."""
    return {
        manifest.checkpoint: _answer_or_why(
            manifest.storage, history, partial(references_or_why, manifest, storages.of(manifest.storage))
        )
        for manifest in manifests
    }


def _answer_or_why(storage: str, history: History, look: Callable[[], R]) -> R | str:
    """The answer of *look*; or why there is none: *storage* is a former one, or refuses a block."""
    try:
        return look()
    except (StorageUnavailable, ConfigError) as error:
        if storage not in (history.storage, TOPIC):
            return f"{storage}, where it is kept, cannot be looked at: {error}"
        if isinstance(error, UnreadableBlock):
            return str(error)
        raise

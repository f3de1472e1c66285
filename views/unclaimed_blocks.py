"""The blocks of a pipeline that no manifest stands on: on their way to the next checkpoint, or orphans.

They are looked for wherever its checkpoints are kept, and were before they were moved. One of these storages that it
has left may be gone for good: what is not known for that is said, and is no error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from exactlyonce.checkpoint.block_storage import Scanned, UnreadableBlock
from exactlyonce.checkpoint.orphans import first_places
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import BlockRef, StoredBlock
from exactlyonce.checkpoint.records.storage_url import TOPIC
from exactlyonce.engines.blocks import Storages, references_or_why
from exactlyonce.pipeline.errors import ConfigError, StorageUnavailable

R = TypeVar("R")


@dataclass(frozen=True)
class BlockSurvey:
    """The blocks of a pipeline; see `survey`."""

    references: Mapping[int, frozenset[BlockRef] | str]
    """The blocks that each retained checkpoint stands on, or why that is not known."""
    scanned: Mapping[str, Scanned]
    """The blocks that were looked at, by storage."""
    first_places: tuple[int, ...]
    """The offsets from which the next run looks for orphans, by partition of the topic."""
    unreachable: Mapping[str, str] = field(default_factory=dict)
    """Storages that the pipeline has left and that cannot be looked at, and why."""

    @property
    def claimed(self) -> set[BlockRef]:
        """The blocks that some checkpoint stands on."""
        return {ref for refs in self.references.values() if not isinstance(refs, str) for ref in refs}

    @property
    def unclaimed(self) -> list[StoredBlock]:
        """The scanned blocks that no checkpoint stands on; none where a checkpoint's blocks are not known."""
        if self.damaged:
            return []
        keys = {ref.key for ref in self.claimed}
        found = ((storage, ref) for storage, scanned in self.scanned.items() for ref in scanned.blocks)
        return [StoredBlock(storage, ref) for storage, ref in found if ref.key not in keys]

    def written_at_ms(self, refs: Iterable[BlockRef]) -> int | None:
        """When the first of *refs* was put; None: that of none of them is known."""
        known = (scanned.written_at_ms.get(ref.key) for ref in refs for scanned in self.scanned.values())
        return min((each for each in known if each is not None), default=None)

    @property
    def damaged(self) -> dict[int, str]:
        """Why nothing can be restored from a checkpoint, by its number."""
        return {checkpoint: why for checkpoint, why in self.references.items() if isinstance(why, str)}


def survey(storages: Storages, history: History, *, deep: bool) -> BlockSurvey:
    """Look at the blocks of *history*, in which there is a manifest: at all that there are where it is to be *deep*,
    else at those from where the next run looks for orphans, and at the indexes of the others."""
    places = first_places(history)
    scanned, unreachable = dict[str, Scanned](), dict[str, str]()
    for each in history.storages:
        found = _looked(each, history, partial(storages.of(each).since, (0,) * len(places) if deep else places))
        if isinstance(found, str):
            unreachable[each] = found
        else:
            scanned[each] = found
    return BlockSurvey(standing(storages, history), scanned, places, unreachable)


def standing(storages: Storages, history: History) -> dict[int, frozenset[BlockRef] | str]:
    """The blocks that each retained checkpoint stands on, or why that is not known."""
    return {
        each.checkpoint: _looked(each.storage, history, partial(references_or_why, each, storages.of(each.storage)))
        for each in history.retained
    }


def _looked(storage: str, history: History, look: Callable[[], R]) -> R | str:
    """The answer of *look*; or why there is none: the pipeline has left the *storage*, or a block is refused."""
    try:
        return look()
    except (StorageUnavailable, ConfigError) as error:
        if storage not in (history.storage, TOPIC):
            return f"{storage}, where it is kept, cannot be looked at: {error}"
        if isinstance(error, UnreadableBlock):
            return str(error)
        raise

"""The blocks of a checkpoint topic that no manifest stands on: on their way to the next checkpoint, or orphans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from exactlyonce.checkpoint.orphans import first_places
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.checkpoint.store.storage import BlockStorage, Scanned
from exactlyonce.engines.blocks import references_or_why


@dataclass(frozen=True)
class BlockSurvey:
    """What was found; see `survey`."""

    references: Mapping[int, frozenset[BlockRef] | str]
    """By retained checkpoint, the blocks that it stands on, or why that is not known."""
    scanned: Scanned
    first_places: tuple[int, ...]
    """By partition, where the next run looks for orphans from."""

    @property
    def claimed(self) -> set[BlockRef]:
        """Those that some checkpoint stands on."""
        return {ref for refs in self.references.values() if not isinstance(refs, str) for ref in refs}

    @property
    def unclaimed(self) -> list[BlockRef]:
        """Those that were scanned, and that no checkpoint stands on; none where that is not known of one of them."""
        if self.damaged:
            return []
        keys = {ref.key for ref in self.claimed}
        return [ref for ref in self.scanned.blocks if ref.key not in keys]

    @property
    def damaged(self) -> dict[int, str]:
        """By checkpoint, why nothing can be restored from it."""
        return {checkpoint: why for checkpoint, why in self.references.items() if isinstance(why, str)}


def survey(storage: BlockStorage, history: History, *, deep: bool) -> BlockSurvey:
    """Look at the blocks of *history*, in which there is a manifest: at all that there are where it is to be *deep*,
    else at those from where the next run looks for orphans, and at the indexes of the others."""
    places = first_places(history)
    scanned = storage.since((0,) * len(places) if deep else places)
    references = {manifest.checkpoint: references_or_why(manifest, storage) for manifest in history.retained}
    return BlockSurvey(references, scanned, places)

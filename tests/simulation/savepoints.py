"""Users who request and delete savepoints, and the guarantees that they have.

Invariants: one savepoint serves a request, whatever crashes meanwhile; it refers to no block of another checkpoint, nor
does a checkpoint if the settings say so; it stays until it is deleted, and then goes once nothing is built on it. A
failed request leaves no worker at work, and an ordinary checkpoint is decided before the next try.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from watched import demand

from exactlyonce.checkpoint.records.manifest import BlockRef, Manifest
from exactlyonce.state.chain import decode_index

PINNED_FOR = 1
"""The most checkpoints that build on the newest one at its deletion, with one in progress at a time."""

if TYPE_CHECKING:
    from collections.abc import Callable


class Savepoints:
    def __init__(self, body: Callable[[BlockRef], bytes], *, incremental: bool) -> None:
        self._body, self._incremental = body, incremental
        self.asked: dict[str, bool] = {}
        """Requests that no savepoint is known to serve, and whether the run is to stop behind it."""
        self.kept: set[int] = set()
        """Those that nobody wants to delete."""
        self.condemned = False
        """Whether whoever comes next deletes all that there is."""
        self._retained: set[int] = set()
        self._served: set[str] = set()
        self._deleted: dict[int, int] = {}
        """The incarnation that has said that a savepoint is kept no longer."""
        self._finalized_since: Counter[int] = Counter()
        """The number of checkpoints of that incarnation finalized since the deletion, by savepoint."""
        self._under_way: defaultdict[int, set[int]] = defaultdict(set)
        """Undecided savepoints of the attempt, by incarnation."""
        self._came_to_nothing: dict[int, int] = {}
        """The last one, by incarnation, while no ordinary checkpoint was decided since."""
        self._count = 0

    def ask(self, *, stop: bool) -> None:
        self._count += 1
        self.asked[f"request-{self._count}"] = stop

    def triggered(self, incarnation: int, checkpoint: int, *, final: bool, savepoint: bool) -> None:
        """A coordinator, with one checkpoint under way at a time, has triggered *checkpoint*. Only a last one is tried
        again by the same workers: they read nothing behind it."""
        late = self._under_way[incarnation]
        demand(final or not late, f"checkpoint {checkpoint} is triggered while workers may still write for {late}")
        if savepoint:
            failed = self._came_to_nothing.get(incarnation)
            demand(failed is None, f"savepoint {checkpoint} is triggered before a checkpoint behind {failed}")
            late.add(checkpoint)

    def restarted(self, incarnation: int) -> None:
        if late := self._under_way.pop(incarnation, None):
            self._came_to_nothing[incarnation] = max(late)

    def decided(self, manifest: Manifest) -> None:
        self._under_way[manifest.incarnation].discard(manifest.checkpoint)
        if not manifest.is_savepoint:
            self._came_to_nothing.pop(manifest.incarnation, None)
        demand(manifest.is_savepoint == bool(manifest.requests), "a savepoint is a checkpoint that somebody asked for")
        for request in manifest.requests:
            demand(request not in self._served, f"{request} is served twice")
            self._served.add(request)
        if manifest.is_savepoint:
            self.kept.add(manifest.checkpoint)
            self._retained.add(manifest.checkpoint)
        if manifest.is_savepoint or not self._incremental:
            self._judge_whole(manifest)

    def _judge_whole(self, manifest: Manifest) -> None:
        what = "savepoint" if manifest.is_savepoint else "checkpoint"
        for index in (ref for operator in manifest.operators for parts in operator.index for ref in parts):
            for block in decode_index(self._body(index)).blocks:
                own = block.checkpoint == manifest.checkpoint
                demand(own, f"{what} {manifest.checkpoint} stands on a block of checkpoint {block.checkpoint}")

    def finalized(self, manifest: Manifest, by: int) -> None:
        """All of *manifest* is committed, as incarnation *by* has noted: who asked for it learns of it."""
        for request in manifest.requests:
            self.asked.pop(request, None)
        for savepoint, incarnation in self._deleted.items():
            due = self._finalized_since[savepoint] > PINNED_FOR  # what goes with this mark is behind it in the log
            demand(not due or savepoint not in self._retained, f"savepoint {savepoint} stays though it was deleted")
            if incarnation == by and savepoint < manifest.checkpoint:
                self._finalized_since[savepoint] += 1

    def deleted(self, savepoint: int, incarnation: int) -> None:
        self._deleted[savepoint] = incarnation

    def dropped(self, checkpoint: int) -> None:
        demand(checkpoint not in self.kept, f"savepoint {checkpoint} is dropped though nobody has deleted it")
        self._retained.discard(checkpoint)

    @property
    def to_delete(self) -> list[int]:
        return sorted(self.kept)

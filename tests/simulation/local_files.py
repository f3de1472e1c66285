"""The state backends of simulated workers: in memory or in local files, drawn anew for each attempt.

The local files are real ones, of RocksDB, in a folder of this history. An attempt finds those of the previous one, or
none, as on another machine; a zombie has its own. Draws here change none elsewhere. One thread saves files at once, so
that a seed is one history.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar
from unittest.mock import patch

from exactlyonce.engines.options import HASHMAP, ROCKSDB, StateSettings
from exactlyonce.state.rocksdb import files, interval, memory, table

if TYPE_CHECKING:
    from world import World

    from exactlyonce.testing.simulation.world import Attempt

T = TypeVar("T")


class AtOnce:
    def __init__(self, *_: object) -> None:
        pass

    def submit(self, fn: Callable[..., T], /, *given: Any, **named: Any) -> Future[T]:
        done = Future[T]()
        try:
            done.set_result(fn(*given, **named))
        except Exception as error:
            done.set_exception(error)
        return done

    def shutdown(self) -> None:
        pass


SMALL = (
    (files, "ThreadPoolExecutor", AtOnce),
    (files, "SAVING_SHARE", float("inf")),
    (interval, "SLICE_ENTRIES", 3),
    (interval, "KEPT_BYTES", 0),
    (memory, "CACHED_SHARE", 1e-6),
    (memory, "CHANGES_SHARE", 4e-3),
)
"""Nothing stays in memory that was not touched just now, some intervals spill, no block stays, all files are saved."""
FETCHED_EVERY = 3
"""Turns between two slices of key groups that are read though no record wants them: barriers come before."""
TIERED_CHANCE = 0.05
"""How often a history has any local files; else it would take far longer."""


@contextmanager
def fetching_seldom() -> Iterator[None]:
    """A context in which a table takes its time to read what no record wants."""
    real, turns = table.TieredTable.fetch, count()

    def fetch(self: table.TieredTable[Any]) -> bool:
        return next(turns) % FETCHED_EVERY == 0 and real(self)

    with patch.object(table.TieredTable, "fetch", fetch):
        yield


class LocalState:
    def __init__(self, world: World, seed: int, chance: float | None) -> None:
        self._world = world
        self._rng = random.Random(f"local state of {seed}")
        self._is_tiered = self._rng.random() < (TIERED_CHANCE if chance is None else chance)
        self._folders: list[tempfile.TemporaryDirectory[str]] = []
        """The folders of one machine after the other; zombies may still work in older ones."""
        self._drawn: dict[tuple[int, int], StateSettings] = {}

    def settings(self, attempt: Attempt) -> StateSettings:
        if not self._is_tiered:
            return StateSettings()
        place = attempt.incarnation, attempt.number
        if place not in self._drawn:
            self._drawn[place] = self._draw()
        return self._drawn[place]

    def _draw(self) -> StateSettings:
        if self._rng.random() < 0.25:
            return StateSettings(HASHMAP)
        if not self._folders or self._rng.random() < 0.4:
            folder = tempfile.TemporaryDirectory(prefix="exactlyonce-simulated-", ignore_cleanup_errors=True)
            self._folders.append(folder)
            self._world.seen["another machine"] += 1
        self._world.seen["local files"] += 1
        return StateSettings(ROCKSDB, 1 << 20, self._folders[-1].name)

    def close(self) -> None:
        for folder in self._folders:
            folder.cleanup()

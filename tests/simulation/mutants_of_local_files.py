"""Planted defects of state that is restored lazily and kept in local files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from planting import COUNT, DISORDER, STATE, Table

from exactlyonce.state.chain import Chain
from exactlyonce.state.key_groups import mask_of
from exactlyonce.state.tiered.files import LocalFiles, Marker
from exactlyonce.state.tiered.store import LocalStore
from exactlyonce.state.tiered.table import TieredSnapshot, TieredTable

LOCAL_FILES = Table()
"""By name."""
mutant = LOCAL_FILES.mutant

WRONG = f"{STATE}|{COUNT}|{DISORDER}"


@mutant("a key group that was not read is taken for empty", WRONG, luck="local files")
def _taken_for_empty() -> Iterable[Any]:
    yield patch.object(TieredTable, "_read", lambda self, group: self._shelf.unread.discard(group))


@mutant("a snapshot leaves out what was not read", WRONG, luck="local files")
def _left_out() -> Iterable[Any]:
    real = TieredSnapshot.__init__

    def init(self: Any, intervals: Any, base: Chain, chains: Any, of: TieredTable[Any]) -> None:
        read = mask_of(set(of._shelf.groups) - of._shelf.unread)
        real(self, intervals, Chain.of(base.blocks, read), chains, of)

    yield patch.object(TieredSnapshot, "__init__", init)


@mutant("files of any checkpoint are taken", WRONG, luck="local files")
def _any_files() -> Iterable[Any]:
    def take(self: LocalFiles, wanted: Marker) -> Marker | None:
        found: list[Path] = sorted(self._folder.glob("saved-*"))
        target = self._folder / f"saved-{wanted.digest.hex()[:32]}"
        if found and wanted.digest and not target.exists():
            found[0].rename(target)
        return real(self, wanted)

    real = LocalFiles._take
    yield patch.object(LocalFiles, "_clean", lambda *_: None)
    yield patch.object(LocalFiles, "_take", take)
    yield patch.object(Marker, "same", lambda self, other: True)


@mutant("changes that outgrew memory are in no increment", WRONG, luck="local files")
def _no_increment() -> Iterable[Any]:
    yield patch.object(LocalStore, "changes", lambda self, snapshot, interval: iter(()))


@mutant("what leaves memory is forgotten", WRONG, luck="local files")
def _forgotten() -> Iterable[Any]:
    real = LocalStore.write

    def write(self: LocalStore, entries: Any, interval: Any) -> None:
        real(self, [(group, key, b"" if interval is None else packed) for group, key, packed in entries], interval)

    yield patch.object(LocalStore, "write", write)


@mutant("states in local files are of the latest barrier but one", WRONG, luck="local files")
def _one_behind() -> Iterable[Any]:
    real = LocalFiles.name

    def name(self: LocalFiles, checkpoint: int, digest: bytes) -> None:
        if checkpoint - 1 in self._begun and checkpoint in self._begun:
            self._begun[checkpoint] = self._begun[checkpoint - 1][0], self._begun.pop(checkpoint)[1]
        real(self, checkpoint, digest)

    yield patch.object(LocalFiles, "name", name)

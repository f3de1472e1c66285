"""Planted defects of state that is restored lazily and kept in local files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

from planting import COUNT, DISORDER, STATE, Table

from exactlyonce.state.chain import Chain
from exactlyonce.state.key_groups import mask_of
from exactlyonce.state.tiered import files
from exactlyonce.state.tiered.files import Marker
from exactlyonce.state.tiered.store import LocalStore
from exactlyonce.state.tiered.table import TieredSnapshot, TieredTable

LOCAL_FILES = Table()
"""By name."""
mutant = LOCAL_FILES.mutant

WRONG = f"{STATE}|{COUNT}|{DISORDER}"


@mutant("a key group that was not read is taken for empty", WRONG, luck="local files")
def _taken_for_empty() -> Iterable[Any]:
    yield patch.object(TieredTable, "_read", lambda self, groups: self._shelf.unread.difference_update([*groups]))


@mutant("a snapshot leaves out what was not read", WRONG, luck="local files")
def _left_out() -> Iterable[Any]:
    real = TieredSnapshot.__init__

    def init(self: Any, intervals: Any, base: Chain, chains: Any, of: TieredTable[Any], *, whole: bool) -> None:
        read = mask_of(set(of._shelf.groups) - of._shelf.unread)
        real(self, intervals, Chain.of(base.blocks, read), chains, of, whole=whole)

    yield patch.object(TieredSnapshot, "__init__", init)


@mutant("files of any checkpoint are taken", WRONG, "union", luck="local files")
def _any_files() -> Iterable[Any]:
    yield patch.object(files, "_name", lambda digest: "saved-state")
    yield patch.object(Marker, "same", lambda self, other: True)


@mutant("changes that outgrew memory are in no increment", WRONG, luck="local files", first=11)
def _no_increment() -> Iterable[Any]:
    yield patch.object(LocalStore, "changes", lambda self, *_: iter(()))


@mutant("what leaves memory is forgotten", WRONG, luck="local files")
def _forgotten() -> Iterable[Any]:
    real = LocalStore.write

    def write(self: LocalStore, entries: Any, interval: Any) -> None:
        real(self, [(group, key, b"" if interval is None else packed) for group, key, packed in entries], interval)

    yield patch.object(LocalStore, "write", write)

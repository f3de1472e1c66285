"""A folder as a block storage."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from exactlyonce.checkpoint.records.encoding import BlockKey
from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.checkpoint.store.files.local import LocalFolder
from exactlyonce.checkpoint.store.files.names import OFFSET, PARTITION, file_name, name_of, reference
from exactlyonce.checkpoint.store.files.storage import FileStorage
from exactlyonce.testing.storage_contract import BlockStorageContract

INNER = "totals/topic-1"


class TestLocalFolder(BlockStorageContract):
    """A folder keeps the contract."""

    beginning = (0,) * 5
    ordered = False

    @pytest.fixture(autouse=True)
    def _root(self, tmp_path: Path) -> None:
        self.root = tmp_path / "checkpoints"
        self.root.mkdir()

    def storage(self) -> FileStorage:
        return FileStorage(LocalFolder(self.root, INNER), away_timeout_s=0.5)

    def laid(self, key: str, value: bytes) -> tuple[int, int]:
        """Under every name that some reference of it may have: that of these bytes, and of the bytes that were cut."""
        parsed = BlockKey.parse(key)
        assert parsed is not None
        folder = self.root / INNER
        digests = {found.sha256 for each in folder.iterdir() if (found := reference(each.name, 0)) is not None}
        for digest in {*digests, hashlib.sha256(value).digest()}:
            (folder / file_name(parsed, digest)).write_bytes(value)
        return PARTITION, OFFSET

    def lost(self, ref: BlockRef) -> BlockRef:
        name = name_of(ref)
        assert name is not None
        (self.root / INNER / name).unlink()
        return ref

    @contextmanager
    def away(self) -> Iterator[None]:
        """Not mounted."""
        aside = self.root.with_name("unmounted")
        self.root.rename(aside)
        yield
        aside.rename(self.root)

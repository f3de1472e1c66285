"""The contract of a block storage that keeps blocks in files: a folder, S3 or HDFS."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from exactlyonce.checkpoint.records.encoding import BlockKey
from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.connectors.block_files import OFFSET, PARTITION, FileStorage, file_name, name_of, reference
from exactlyonce.testing.cluster import LIMIT_S
from exactlyonce.testing.storage_contract import BlockStorageContract


class FileStorageContract(BlockStorageContract):
    beginning = (0,) * 5
    ordered = False
    away_timeout_s = float(LIMIT_S)

    def folder(self) -> Any:
        """A new `FileStore` of the test's files."""
        raise NotImplementedError

    def storage(self) -> FileStorage:
        return FileStorage(self.folder(), away_timeout_s=self.away_timeout_s)

    def names(self) -> Iterable[str]:
        raise NotImplementedError

    def put_file(self, name: str, content: bytes) -> None:
        raise NotImplementedError

    def delete_file(self, name: str) -> None:
        raise NotImplementedError

    def laid(self, key: str, value: bytes) -> tuple[int, int]:
        """Under every name that some reference of it may have: that of these bytes, and of the bytes that were cut."""
        parsed = BlockKey.parse(key)
        assert parsed is not None
        digests = {found.sha256 for name in self.names() if (found := reference(name, 0)) is not None}
        for digest in {*digests, hashlib.sha256(value).digest()}:
            self.put_file(file_name(parsed, digest), value)
        return PARTITION, OFFSET

    def lost(self, ref: BlockRef) -> BlockRef:
        name = name_of(ref)
        assert name is not None
        self.delete_file(name)
        return ref

    def test_reading_while_it_is_away(self) -> None:
        """It is given up soon, where a busy server would be, too."""
        self.away_timeout_s = 0.5
        super().test_reading_while_it_is_away()

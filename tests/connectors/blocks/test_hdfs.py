"""HDFS as a block storage, on Hadoop's MiniDFSCluster."""

from __future__ import annotations

import uuid
from contextlib import AbstractContextManager
from typing import Any

import pytest
from in_files import FileStorageContract

from exactlyonce.connectors.filestore.hdfs import HdfsStore
from exactlyonce.pipeline.errors import ConfigError, StorageUnavailable

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


class TestHdfs(FileStorageContract):
    @pytest.fixture(autouse=True)
    def _folder(self, hdfs: Any) -> None:
        self.server, self.inner = hdfs, f"{uuid.uuid4().hex}/topic-1"
        self.path = f"prod/{self.inner}"

    def folder(self) -> HdfsStore:
        return HdfsStore(self.server.host, "prod", self.inner)

    def client(self) -> Any:
        import hdfs_native

        return hdfs_native.Client(f"hdfs://{self.server.host}")

    def names(self) -> list[str]:
        return [each.path.rpartition("/")[2] for each in self.client().list_status(f"/{self.path}")]

    def put_file(self, name: str, content: bytes) -> None:
        from hdfs_native import WriteOptions

        with self.client().create(f"/{self.path}/{name}", WriteOptions(overwrite=True)) as file:
            file.write(content)

    def delete_file(self, name: str) -> None:
        self.client().delete(f"/{self.path}/{name}")

    def away(self) -> AbstractContextManager[None]:
        away: AbstractContextManager[None] = self.server.away()
        return away


def test_what_stands_aside_is_not_what_was_put(hdfs: Any) -> None:
    folder = HdfsStore(hdfs.host, "prod", uuid.uuid4().hex)
    folder.check()
    folder.put("aside-1", b"a part", "aside-0")
    with pytest.raises(StorageUnavailable, match=r"does not answer: .*already exists"):
        folder.put("block", b"whole", "aside-1")
    assert folder.get("block") is None


def test_what_is_removed_and_what_stays(hdfs: Any) -> None:
    """Empty folders go too, but for the one that the user named."""
    import hdfs_native

    root = f"mine-{uuid.uuid4().hex}"
    folder = HdfsStore(hdfs.host, root, "totals/topic-1")
    folder.check()
    assert folder.remove_folder()
    assert not folder.remove_folder()
    client = hdfs_native.Client(f"hdfs://{hdfs.host}")
    assert list(client.list_status(f"/{root}")) == []


def test_a_folder_that_cannot_be_written(hdfs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HADOOP_USER_NAME", "somebody-else")
    with pytest.raises(ConfigError, match="refuses: Permission denied: user=somebody-else"):
        HdfsStore(hdfs.host, "prod-of-others", "x").check()

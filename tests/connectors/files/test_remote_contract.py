"""Files of S3 and HDFS keep the contract of a source, as local ones do."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import pytest
from contract_part import only

from exactlyonce.connectors import FileSource
from exactlyonce.connectors.filestore.hdfs import HdfsStore
from exactlyonce.connectors.filestore.s3 import S3Store
from exactlyonce.pipeline.errors import Halt
from exactlyonce.testing.source_contract import SOURCE
from tests.connectors.files.test_file_contract import InFiles

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow]
BUCKET = "checkpoints"


class RemoteContract(InFiles):
    url: str
    folder: Any

    def source(self) -> Any:
        return FileSource(self.url, value=str)

    def write_split(self, split: int, texts: Sequence[str]) -> None:
        name = f"{split}.jsonl"
        self.folder.remove([name])
        self.folder.put(name, "".join(f"{text}\n" for text in texts).encode(), f".{uuid.uuid4().hex}")

    def test_a_file_that_is_not_the_same(self) -> None:
        """It is noticed when the split is opened, and by the next look."""
        self.append(0, ["one"])
        (known,) = self.beginning([0])
        self.append(0, ["two"])
        with pytest.raises(Halt, match="was changed"):
            self.source().open_split(known)
        with pytest.raises(Halt, match="was changed"):
            self.source().finder(SOURCE).find([known])
        self.folder.remove(["0.jsonl"])
        with pytest.raises(Halt, match="is gone"):
            self.source().open_split(known)


class TestS3(RemoteContract):
    @pytest.fixture(autouse=True)
    def _prefix(self, s3: Any) -> None:
        prefix = f"in/{uuid.uuid4().hex}"
        self.folder, self.url = S3Store(BUCKET, prefix), f"s3://{BUCKET}/{prefix}"
        self.begin()


@only("test_records_come_in_order", "test_positions_are_exact", "test_a_split_is_added", "test_ranges",
      "test_a_file_that_is_not_the_same")  # fmt: skip
class TestHdfs(RemoteContract):
    @pytest.fixture(autouse=True)
    def _inner(self, hdfs: Any) -> None:
        inner = uuid.uuid4().hex
        self.folder, self.url = HdfsStore(hdfs.host, "", inner), f"hdfs://{hdfs.host}/{inner}"
        self.folder.check()
        self.begin()

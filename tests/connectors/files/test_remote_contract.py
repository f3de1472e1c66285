"""Files of S3 and HDFS keep the contract of a source, as local ones do."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import pytest
from contract_part import only

from exactlyonce.connectors import FileSource
from exactlyonce.connectors.blocks.hdfs import HdfsFolder
from exactlyonce.connectors.blocks.s3 import S3Folder
from exactlyonce.connectors.files import remote
from exactlyonce.connectors.files.places import FoundFile
from exactlyonce.pipeline.errors import Halt
from exactlyonce.testing.source_contract import SourceContract
from exactlyonce.testing.source_contract.sources import SOURCE, SPLITS

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow]
BUCKET = "checkpoints"


class RemoteContract(SourceContract):
    grows = False
    url: str
    folder: Any

    def filled_folder(self) -> None:
        self.texts: list[list[str]] = []
        for _ in range(SPLITS):
            self.add_split()

    def source(self) -> Any:
        return FileSource(self.url, value=str)

    def append(self, split: int, records: Sequence[str]) -> None:
        self.texts[split] += records
        name = f"{split}.jsonl"
        self.folder.remove([name])
        self.folder.put(name, "".join(f"{text}\n" for text in self.texts[split]).encode(), f".{uuid.uuid4().hex}")

    def add_split(self) -> int:
        self.texts.append([])
        self.append(len(self.texts) - 1, [])
        return len(self.texts) - 1

    def identity(self, split: int) -> str:
        identity: str = self.source().finder(SOURCE).find(())[split].topic_id
        return identity

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

    def test_ranges_are_the_file(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A file is read in ranges, and can be sought in."""
        content = bytes(range(256)) * 40
        self.folder.put("large", content, ".large")
        monkeypatch.setattr(remote, "RANGE_BYTES", 1_000)
        place = remote.RemotePlace(self.url)
        found = place.look("large")
        assert isinstance(found, FoundFile)
        with place.open(found) as stream:
            assert stream.read() == content
            for at in (5, 9_000, len(content) - 1, 0):
                stream.seek(at)
                assert stream.read(1_500) == content[at : at + 1_500]
            assert stream.seek(0, 2) == len(content)


class TestS3(RemoteContract):
    @pytest.fixture(autouse=True)
    def _prefix(self, s3: Any) -> None:
        prefix = f"in/{uuid.uuid4().hex}"
        self.folder, self.url = S3Folder(BUCKET, prefix), f"s3://{BUCKET}/{prefix}"
        self.filled_folder()


@only("test_records_come_in_order", "test_positions_are_exact", "test_a_split_is_added", "test_ranges",
      "test_a_file_that_is_not_the_same", "test_ranges_are_the_file")  # fmt: skip
class TestHdfs(RemoteContract):
    @pytest.fixture(autouse=True)
    def _inner(self, hdfs: Any) -> None:
        inner = uuid.uuid4().hex
        self.folder, self.url = HdfsFolder(hdfs.host, "", inner), f"hdfs://{hdfs.host}/{inner}"
        self.folder.check()
        self.filled_folder()

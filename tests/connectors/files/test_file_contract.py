"""A folder of files keeps the contract of a source, in every format and compression, whole or in parts."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fastavro
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from contract_part import only

from exactlyonce import EventTime, Record
from exactlyonce.connectors import FileSource
from exactlyonce.connectors.source import RangeContext
from exactlyonce.testing.source_contract import SOURCE, SPLITS, SourceContract

DAMAGED = "damaged"
COMPRESSED = (
    "test_records_come_in_order",
    "test_positions_are_exact",
    "test_every_position_can_be_gone_to",
    "test_ranges",
)
"""Lines are lines, however they are compressed."""


class Row(msgspec.Struct):
    text: str
    number: int


def rows_of(texts: Sequence[str]) -> list[dict[str, Any]]:
    """A damaged one has a number that is none."""
    return [{"text": text, "number": DAMAGED if text == DAMAGED else len(text)} for text in texts]


def write_lines(path: Path, texts: Sequence[str]) -> None:
    path.write_bytes(b"".join(b"\xff\n" if text == DAMAGED else f"{text}\n".encode() for text in texts))


def write_gzip(path: Path, texts: Sequence[str]) -> None:
    write_lines(path, texts)
    path.write_bytes(gzip.compress(path.read_bytes()))


def write_zstd(path: Path, texts: Sequence[str]) -> None:
    write_lines(path, texts)
    content = path.read_bytes()
    halves = content[: len(content) // 2], content[len(content) // 2 :]
    path.write_bytes(b"".join(bytes(pa.compress(half, "zstd", asbytes=True)) for half in halves))


def write_json(path: Path, texts: Sequence[str]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(texts)))


def write_csv(path: Path, texts: Sequence[str]) -> None:
    with open(path, "w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, ["number", "text"])
        writer.writeheader()
        writer.writerows(rows_of(texts))


def write_parquet(path: Path, texts: Sequence[str]) -> None:
    table = pa.table({"text": list(texts), "number": [-1 if text == DAMAGED else len(text) for text in texts]})
    pq.write_table(table, path, row_group_size=3)


def write_avro(path: Path, texts: Sequence[str]) -> None:
    fields = [{"name": "text", "type": "string"}, {"name": "number", "type": ["long", "string"]}]
    schema = {"type": "record", "name": "Row", "fields": fields}
    with open(path, "wb") as file:
        fastavro.writer(file, schema, rows_of(texts), sync_interval=30)


Write = Callable[[Path, Sequence[str]], None]


class InFiles(SourceContract):
    """Each split is a file, written anew when records are appended, before it is read."""

    grows = False
    texts: list[list[str]]

    def begin(self) -> None:
        self.texts = []
        for _ in range(SPLITS):
            self.add_split()

    def write_split(self, split: int, texts: Sequence[str]) -> None:
        raise NotImplementedError

    def append(self, split: int, records: Sequence[str]) -> None:
        self.texts[split] += records
        self.write_split(split, self.texts[split])

    def add_split(self) -> int:
        self.texts.append([])
        self.append(len(self.texts) - 1, [])
        return len(self.texts) - 1

    def identity(self, split: int) -> str:
        identity: str = self.source().finder(SOURCE).find(())[split].topic_id
        return identity


class FileContract(InFiles):
    format: Any = "jsonl"
    suffix = ".jsonl"
    value: Any = Row

    @staticmethod
    def write(path: Path, texts: Sequence[str]) -> None:
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "in"
        self.folder.mkdir()
        self.begin()

    def source(self) -> Any:
        return FileSource(self.folder, value=self.value, format=self.format)

    def text_of(self, record: Any) -> str:
        text: str = getattr(record, "text", record)
        return text

    def write_split(self, split: int, texts: Sequence[str]) -> None:
        self.write(self.folder / f"{split}{self.suffix}", texts)

    def append_damaged(self, split: int) -> None:
        self.append(split, [DAMAGED])


class TestLines(FileContract):
    value = str
    write = staticmethod(write_lines)


@only(*COMPRESSED)
class TestGzip(FileContract):
    value, suffix = str, ".gz"
    write = staticmethod(write_gzip)


@only(*COMPRESSED)
class TestZstd(FileContract):
    value, suffix = str, ".jsonl.zst"
    write = staticmethod(write_zstd)


class TestJson(FileContract):
    write = staticmethod(write_json)


class TestRecords(FileContract):
    """Each value with its place."""

    write = staticmethod(write_json)

    def source(self) -> Any:
        return FileSource.records(self.folder, value=Row)

    def text_of(self, record: Any) -> str:
        text: str = record.value.text
        return text


def test_a_record_names_its_file_and_number(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    write_json(file, ["one", "two"])
    source = FileSource.records(tmp_path, value=Row, time=EventTime("number"))
    assert (source.type, source.describe()["metadata"]) == (Record[Row], True)
    (start,) = source.finder(SOURCE).find(())
    read = source.open_range(RangeContext(start=start, end=2, client={}, kilobytes=1)).read(9)
    decoder = source.decoder()
    records = [decoder.decode(part) for part in decoder.parts(read)]
    at = int(file.stat().st_mtime * 1000)
    assert records == [
        Record(Row(text, 3), None, at, (), f"file:{file}", 0, n) for n, text in enumerate(["one", "two"])
    ]
    assert source.event_time
    assert source.event_time.function(records[0]) == 3


class TestCsv(FileContract):
    format, suffix = "csv", ".csv"
    write = staticmethod(write_csv)


class Positive(Row):
    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError("number is below 0")


class TestParquet(FileContract):
    value, format, suffix = Positive, "parquet", ".parquet"
    write = staticmethod(write_parquet)


class TestAvro(FileContract):
    format, suffix = "avro", ".avro"
    write = staticmethod(write_avro)

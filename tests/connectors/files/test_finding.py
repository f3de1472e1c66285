"""The files of a folder, as splits: numbers for good, and every change noticed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.connectors import FileSource
from exactlyonce.connectors.files import finding, formats
from exactlyonce.connectors.files.finding import FileSplit
from exactlyonce.connectors.source import ReaderContext
from exactlyonce.engines.runtime.source_decoder import SourceDecoder
from exactlyonce.pipeline.errors import ConfigError, ExactlyOnceError, GraphError, Halt, RecordError


class Row(msgspec.Struct):
    id: int
    name: str = "nobody"
    price: float | None = None


class Name(msgspec.Struct):
    name: str


def found(source: FileSource[Any], *known: SourceOffset) -> list[SourceOffset]:
    return source.finder("in").find(known)


def names(splits: list[SourceOffset]) -> list[tuple[int, str]]:
    return [(split.partition, FileSplit.parse(split.topic_id).name) for split in splits]


def ended(split: SourceOffset, offset: int = 1) -> SourceOffset:
    return msgspec.structs.replace(split, offset=offset, ended=True)


def read(source: FileSource[Any], start: SourceOffset) -> list[Any]:
    nobody: Any = None
    reader = source.open_reader(ReaderContext(source="in", positions=[start], targets=None, clients=nobody))
    reader.open()
    decoder, records = SourceDecoder("in", source), list[Any]()
    while not reader.finished:
        records += decoder.decode(reader.poll(7, 0.0)).records
    reader.close()
    return records


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """`folder("a", "b/c")`: the path of a folder with these files."""

    def made(*files: str) -> Path:
        for file in files:
            path = tmp_path / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{file}\n")
        return tmp_path

    return made


def test_numbers_follow_names_and_hidden_files_are_left_out(folder: Callable[..., Path]) -> None:
    path = folder("b", "a/z", "2", ".b", "_staging/x", "a/.c")
    source = FileSource(path, value=str)
    first = found(source)
    assert names(first) == [(0, "2"), (1, "a/z"), (2, "b")]
    folder("0")
    assert names(found(source, *first)) == [(3, "0")]
    assert names(found(FileSource(path, value=str, files="a/*"))) == [(0, "a/z")]


def test_removed_files_are_forgotten_but_for_the_last_number(folder: Callable[..., Path]) -> None:
    """A split without records keeps it."""
    path = folder("a", "b", "c")
    known = [ended(split) for split in found(FileSource(path, value=str))]
    for name in "abc":
        (path / name).unlink()
    source = FileSource(path, value=str, forget_removed=True)
    assert found(FileSource(path, value=str), *known) == []
    *gone, kept = found(source, *known)
    assert (gone, kept.partition, read(source, kept)) == (known, 3, [])
    assert found(source, ended(kept, 0)) == []
    folder("b")
    gone_number, new = found(source, ended(kept, 0))
    assert (gone_number, new.partition, read(source, new)) == (ended(kept, 0), 4, ["b"])


@pytest.mark.parametrize("others", [(), ("z",)])
def test_a_name_that_returns(others: tuple[str, ...], folder: Callable[..., Path]) -> None:
    """A look at which it was gone is enough, though checkpoints name it until the next one is complete."""
    path = folder("a", *others)
    finder = FileSource(path, value=str, watch="1ms", forget_removed=True).finder("in")
    known = [ended(split) for split in finder.find(())]
    (path / "a").unlink()
    time.sleep(0.01)
    known += (start for start in finder.find(known) if not start.ended)
    (path / "a").write_text("another a\n")
    for _ in range(2):
        time.sleep(0.01)
        looked = finder.find(known)
        known += (start for start in looked if not start.ended)
        assert [start.partition for start in looked if start.ended] == [0]
        assert names(known[-1:]) == [(2, "a")]


@pytest.mark.parametrize("change", ["longer", "newer", "gone", "ended and longer"])
def test_a_known_file_that_is_not_the_same(change: str, folder: Callable[..., Path]) -> None:
    path = folder("a")
    source = FileSource(path, value=str)
    (known,) = found(source)
    if "longer" in change:
        (path / "a").write_text("a\nb\n")
    elif change == "newer":
        os.utime(path / "a", ns=(1, 1))
    else:
        (path / "a").unlink()
    known = ended(known) if "ended" in change else known
    with pytest.raises(Halt, match=r"'a' of file:.* (was changed|is gone)"):
        found(source, known)
    with pytest.raises(Halt, match=r"'a' of file:.* (was changed|is gone)"):
        source.open_split(known)


def test_a_change_while_it_is_read(folder: Callable[..., Path]) -> None:
    path = folder("a")
    (path / "a").write_text("line\n" * 100_000)
    source = FileSource(path, value=str)
    opened = source.open_split(found(source)[0])
    opened.read(10)
    with open(path / "a", "a") as file:
        file.write("more\n")
    with pytest.raises(Halt, match=r"'a' of file:.* was changed"):
        assert [len(opened.read(10_000)) for _ in range(11)]


@pytest.mark.parametrize(("length", "last"), [(1, "\n"), (1023, "\n"), (1024, ""), (1025, "\n"), (5000, "")])
def test_parts_have_each_line_once(length: int, last: str, folder: Callable[..., Path]) -> None:
    """Lines may end at the end of a part, and be longer than several of them."""
    path = folder("a")
    lines = [f"{number}".rjust(length, "x") for number in range(max(20, 9000 // length))]
    (path / "a").write_text("\n".join(lines) + last)
    source = FileSource(path, value=str, split_bytes=1024)
    splits = found(source)
    assert len(splits) > 5
    assert [line for split in splits for line in read(source, split)] == lines


@pytest.mark.parametrize("begin", [10, 1020])
def test_a_line_that_is_too_long(begin: int, folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error of its record, which says so, wherever parts of the file begin, and never cut."""
    monkeypatch.setattr(formats, "LINE_BYTES_MAX", 1500)
    monkeypatch.setattr(formats, "CHUNK_BYTES", 100)
    path = folder("a")
    lines = ["s" * (begin - 1), "l" * 1500, "x" * 1501, "y" * 5000, "last"]
    (path / "a").write_text("\n".join(lines))
    for value in (str, bytes, int):
        source = FileSource(path, value=value, split_bytes=1024, on_error="skip")
        records = [record for split in found(source) for record in read(source, split)]
        kept = [line for line in lines if len(line) <= 1500 and value is not int]
        assert records == (kept if value is str else [line.encode() for line in kept])
    source = FileSource(path, value=bytes, split_bytes=1024)
    with pytest.raises(RecordError, match=r"offset \d: .*the line is not bytes in bytes: it has more than 0 MiB"):
        [read(source, split) for split in found(source)]


def test_row_groups_are_parts(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"id": range(10_000), "more": ["x"] * 10_000}), tmp_path / "a", row_group_size=1000)
    source = FileSource(tmp_path, value=Row, format="parquet", split_bytes=20_000)
    splits = found(source)
    assert 3 < len(splits) < 10
    assert [row.id for split in splits for row in read(source, split)] == [*range(10_000)]


def test_cells(folder: Callable[..., Path]) -> None:
    """Text becomes the type of the field; an empty cell is None or the default, but for text."""
    path = folder("a")
    (path / "a").write_text('name;id;price;more\n"a;\nb";1;2.5;x\n;2;;\n\nc;3;1e3;\n')
    source = FileSource(path, value=Row, format="csv", delimiter=";")
    (start,) = found(source)
    rows = [Row(1, "a;\nb", 2.5), Row(2, ""), Row(3, "c", 1000.0)]
    assert [read(source, msgspec.structs.replace(start, offset=skip)) for skip in (0, 2)] == [rows, rows[2:]]


def test_no_header(folder: Callable[..., Path]) -> None:
    """The columns are the fields, in their order."""
    path = folder("a")
    (path / "a").write_text("1|a|2.5\n2||\n")
    source = FileSource(path, value=Row, format="csv", delimiter="|", header=False)
    (start,) = found(source)
    rows = [Row(1, "a", 2.5), Row(2, "")]
    assert [read(source, msgspec.structs.replace(start, offset=skip)) for skip in (0, 1)] == [rows, rows[1:]]


def test_a_first_line_that_does_not_fit(folder: Callable[..., Path]) -> None:
    """It is an error once the file is found, before a record is read."""
    path = folder("a")
    (path / "a").write_text("id;name\n1;a\n")
    with pytest.raises(ConfigError, match=r"File 'a': its first line has the columns 'id;name', .* Set delimiter="):
        found(FileSource(path, value=Name, format="csv"))


def test_empty_lines_are_no_rows(folder: Callable[..., Path]) -> None:
    path = folder("a")
    (path / "a").write_text('name\na\n\n""\nb\n')
    source = FileSource(path, value=Name, format="csv")
    assert read(source, found(source)[0]) == [Name("a"), Name(""), Name("b")]


CASES: list[tuple[str, bytes, type[ExactlyOnceError], str]] = [
    ("csv", b"id,id\n1,2\n", Halt, "two columns of its first line have one name"),
    ("csv", b"id\n\xff\n", Halt, "'a' cannot be read to its end: UnicodeDecodeError"),
    ("csv", b'id\n"1', Halt, "unexpected end of data"),
    ("csv", b"id,name\n1\n", ExactlyOnceError, "the row is not Row: it has 1 cells, and there are 2 columns"),
    ("csv", b"id\nx\n", ExactlyOnceError, r"the row is not Row: Expected `int`"),
    ("parquet", b"PAR1", Halt, "'a' cannot be read to its end: ArrowInvalid"),
    ("avro", b"Obj\x01", Halt, "'a' cannot be read to its end"),
]


@pytest.mark.parametrize(("format", "content", "error", "text"), CASES)
def test_a_file_that_is_not_in_its_format(
    format: Any, content: bytes, error: type[ExactlyOnceError], text: str, folder: Callable[..., Path]
) -> None:
    path = folder("a")
    (path / "a").write_bytes(content)
    source = FileSource(path, value=Row, format=format)
    with pytest.raises(error, match=text):
        read(source, found(source)[0])


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_compressed_files_that_are_cut_off(suffix: str, tmp_path: Path) -> None:
    import gzip

    import pyarrow as pa

    content = b"".join(b"%d\n" % number for number in range(100_000))
    packed = gzip.compress(content) if suffix == "gz" else bytes(pa.compress(content, "zstd", asbytes=True))
    (tmp_path / f"a.{suffix}").write_bytes(packed[:-100])
    source = FileSource(tmp_path, value=str)
    with pytest.raises(Halt, match="cannot be read to its end"):
        read(source, found(source)[0])


def test_what_is_wrong(tmp_path: Path, folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({"format": "xml"}, "format='xml' must be one of 'jsonl', 'csv', 'parquet', 'avro'"),
        ({"value": object}, "object"),
    ]
    for wrong, text in wrongs:
        with pytest.raises(GraphError, match=text):
            FileSource(tmp_path, **{"value": Row, **wrong})
    options: dict[str, Any] = {
        "format": "csv", "delimiter": "ab", "watch": "often", "split_bytes": 1, "files": "", "on_error": "no",
        "name": "a b",
    }  # fmt: skip
    said = "\n".join(FileSource("in", value=str, **options).problems())
    for part in (
        "from / on",
        "delimiter='ab'",
        "watch is 'often'",
        "split_bytes=1 ",
        "files=''",
        "name='a b'",
        "on_error='no'",
        "no fields",
    ):
        assert part in said
    secret = "s3://user:hunter2@lake/orders"
    assert "hunter2" not in "\n".join(FileSource(secret, value=str).problems())
    with pytest.raises(GraphError) as refused:
        FileSource(secret, value=str, format=cast(Any, "xml"))
    assert "hunter2" not in str(refused.value)
    with pytest.raises(ConfigError, match="does not exist"):
        found(FileSource(tmp_path / "missing", value=str))
    monkeypatch.setattr(finding, "SPLITS_MAX", 2)
    with pytest.raises(ConfigError, match=r"has had 3 files, or parts of them, .* room for 2.*forget_removed=True"):
        found(FileSource(folder("a", "b", "c"), value=str))

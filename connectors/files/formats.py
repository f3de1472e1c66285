"""The formats of files that a source reads: JSON lines, CSV, Parquet, Avro; one split of a file, record by record.

Invariants: a split has the same records in the same order whenever it is read; the records of all parts of a file are
those of the file; a file that is not whole is an error, never an early end. Only the bytes of the version that was
found are read.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, BinaryIO, Protocol, cast

import msgspec

from exactlyonce.connectors.files.finding import FileSplit
from exactlyonce.connectors.filestore.store import StoredFile
from exactlyonce.connectors.splits import SplitDecoder
from exactlyonce.pipeline.codec import Codec
from exactlyonce.pipeline.errors import ConfigError, Halt, StorageUnavailable
from exactlyonce.pipeline.extras import needing
from exactlyonce.pipeline.shape import Form, describe, record_fields, type_name

CHUNK_BYTES = 1 << 18
"""Bytes of a file that are read at once."""
LINE_BYTES_MAX = 64 << 20
ROWS = 4_096
"""Rows of Parquet that are made at once."""
WHOLE = 1 << 62
"""The end of the only part of a file that cannot be read in parts."""


class FileFormat(Protocol):
    """A format, with the type that its records get."""

    def problems(self) -> Iterator[str]:
        """What speaks against this type, or an option."""

    def describe(self) -> dict[str, Any]:
        """What the records depend on, as JSON values."""

    def parts(self, file: StoredFile, stream: BinaryIO, bytes_max: int) -> Sequence[tuple[int, int]]:
        """The parts of a file of more than *bytes_max*; see `finding.Parts`."""

    def blocks(self, stream: BinaryIO, file: StoredFile, split: FileSplit, skip: int) -> Iterator[list[Any]]:
        """The records of *split* but for the first *skip*, in lists that are not empty."""

    def decoder(self) -> SplitDecoder: ...


def is_compressed(name: str) -> bool:
    """Whether a file can only be read from its beginning.

    >>> is_compressed("orders.jsonl.gz"), is_compressed("orders.jsonl")
    (True, False)
    """
    return name.endswith((".gz", ".zst"))


def uncompressed(stream: BinaryIO, name: str) -> BinaryIO:
    """The bytes of a file, as its name says how they are compressed."""
    if name.endswith(".gz"):
        return cast("BinaryIO", gzip.GzipFile(fileobj=stream, mode="rb"))
    if name.endswith(".zst"):
        with needing("files", "pyarrow", f"the source of {name}"):
            import pyarrow
        return cast("BinaryIO", pyarrow.CompressedInputStream(stream, "zstd"))
    return stream


@contextmanager
def whole(split: FileSplit) -> Iterator[None]:
    """Raise Halt where a file turns out not to be in its format, StorageUnavailable where it cannot be read."""
    try:
        yield
    except (EOFError, zlib.error, csv.Error, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise StorageUnavailable(f"File {split.name!r} cannot be read now: {error}.") from error
        raise Halt(
            f"File {split.name!r} cannot be read to its end: {type(error).__name__}: {error}. It is cut off, or in "
            f"another format than the source names.\n"
            f"  Choices: put a whole file in its place, under another name, and remove this one; or correct format=."
        ) from error


class JsonLines:
    """A record a line, which the source's codec decodes."""

    def __init__(self, codec: Codec[Any]) -> None:
        self._codec = codec

    def problems(self) -> Iterator[str]:
        return iter(())

    def describe(self) -> dict[str, Any]:
        return {"format": "jsonl", "value": self._codec.describe()}

    def parts(self, file: StoredFile, stream: BinaryIO, bytes_max: int) -> Sequence[tuple[int, int]]:
        if is_compressed(file.name):
            return [(0, WHOLE)]
        return [(begin, min(begin + bytes_max, file.size)) for begin in range(0, file.size or 1, bytes_max)]

    def blocks(self, stream: BinaryIO, file: StoredFile, split: FileSplit, skip: int) -> Iterator[list[Any]]:
        end = WHOLE if is_compressed(file.name) else split.end
        with whole(split):
            for lines in _lines(uncompressed(stream, file.name), split.begin, end, file.size):
                if skip < len(lines):
                    yield lines[skip:] if skip else lines
                skip = max(0, skip - len(lines))

    def decoder(self) -> SplitDecoder:
        name = f"the line is not {type_name(self._codec.type)} in {self._codec.name}"
        return SplitDecoder(
            self._codec.decode,
            lambda line: None if isinstance(line, LongLine) else cast(bytes, line),
            lambda line, error: f"{name}: {line if isinstance(line, LongLine) else error}",
        )


class LongLine:
    """A line of more than `LINE_BYTES_MAX`, which no codec decodes: it is not kept."""

    def __str__(self) -> str:
        return f"it has more than {LINE_BYTES_MAX >> 20} MiB"


def _lines(stream: BinaryIO, begin: int, end: int, size: int) -> Iterator[list[bytes | LongLine]]:
    """The lines that begin in [begin, end), without their ends; *size* is the file's, unless it is compressed."""
    at = 0
    if begin:
        stream.seek(begin - 1)
        at = begin - 1
        line = b""
        while not line.endswith(b"\n") and (line := stream.readline(CHUNK_BYTES)):
            at += len(line)  # the rest of a line that begins before
    rest, is_long = b"", False
    while at < end:
        chunk = stream.read(min(CHUNK_BYTES, end - at))
        if not chunk:
            if end != WHOLE:
                raise EOFError(f"it has only {at} of {size} bytes")
            break
        at += len(chunk)
        lines: list[Any] = (rest + chunk).split(b"\n")
        rest = lines.pop()
        if lines:
            if is_long or len(lines[0]) > LINE_BYTES_MAX:
                lines[0], is_long = LongLine(), False
            yield lines
        if is_long or len(rest) > LINE_BYTES_MAX:
            rest, is_long = b"", True
    if rest or is_long:
        line = (rest + stream.readline(LINE_BYTES_MAX + 1)).removesuffix(b"\n")
        yield [LongLine() if is_long or len(line) > LINE_BYTES_MAX else line]


class Rows:
    """A format whose records are rows with named columns; *strict*: their values have types."""

    name: str
    strict = True

    def __init__(self, type_: Any) -> None:
        self.type = type_

    def problems(self) -> Iterator[str]:
        if self.type in (bytes, str):
            yield f"value={type_name(self.type)} has no fields for the columns of {self.name}: give a Struct"

    def describe(self) -> dict[str, Any]:
        return {"format": self.name, "value": describe(self.type)}

    def parts(self, file: StoredFile, stream: BinaryIO, bytes_max: int) -> Sequence[tuple[int, int]]:
        return [(0, WHOLE)]

    def decoder(self) -> SplitDecoder:
        decode = partial(msgspec.convert, type=self.type, strict=self.strict)
        name = type_name(self.type)
        return SplitDecoder(decode, _row_as_json, lambda row, error: f"the row is not {name}: {_row_error(row, error)}")


def _row_as_json(row: Any) -> bytes:
    return msgspec.json.encode(row, enc_hook=str)


def _row_error(row: Any, error: BaseException) -> str:
    return row if isinstance(row, str) else str(error)


class Csv(Rows):
    """Rows of text, with the names of their columns in the first line.

    An empty cell of a column that is no text is None, or as if it were not there. An empty line is no row.
    """

    name, strict = "csv", False

    def __init__(self, type_: Any, delimiter: str, header: bool) -> None:
        """*header*: whether the first line names the columns; else they are the fields in their order."""
        super().__init__(type_)
        self._delimiter, self._header = delimiter, header

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if not isinstance(self._delimiter, str) or len(self._delimiter) != 1:
            yield f"delimiter={self._delimiter!r} must be one character"
        if not self._header and not record_fields(self.type):
            yield f"value={type_name(self.type)} has no fields for the columns of header=False: give a Struct"

    def describe(self) -> dict[str, Any]:
        header = {} if self._header else {"header": False}
        return {**super().describe(), "delimiter": self._delimiter, **header}

    def parts(self, file: StoredFile, stream: BinaryIO, bytes_max: int) -> Sequence[tuple[int, int]]:
        """One part. Raises `ConfigError` if its first line lacks a field of the type."""
        with whole(FileSplit(file.version, 0, WHOLE, file.name)):
            columns, _ = self._rows(stream, file)
        missing = [field.name for field in record_fields(self.type) if field.required]
        missing = [name for name in missing if columns and name not in columns]
        if missing:
            raise ConfigError(
                f"File {file.name!r}: its first line has the columns {', '.join(map(repr, columns))}, and "
                f"{type_name(self.type)} needs {', '.join(map(repr, missing))}. Set delimiter=, which is "
                f"{self._delimiter!r}; or header=False, if the first line is a row; or correct the type or the file."
            )
        return super().parts(file, stream, bytes_max)

    def _rows(self, stream: BinaryIO, file: StoredFile) -> tuple[list[str], Iterator[list[str]]]:
        """The columns, and the rows after the line that may name them."""
        text = io.TextIOWrapper(uncompressed(stream, file.name), encoding="utf-8-sig", newline="")
        rows = (row for row in csv.reader(text, delimiter=self._delimiter, strict=True) if row)
        return next(rows, []) if self._header else [field.name for field in record_fields(self.type)], rows

    def blocks(self, stream: BinaryIO, file: StoredFile, split: FileSplit, skip: int) -> Iterator[list[Any]]:
        with whole(split):
            header, rows = self._rows(stream, file)
            if len(set(header)) < len(header):
                raise ValueError(f"two columns of its first line have one name: {', '.join(header)}")
            empty = _empty_cells(self.type)
            after = islice(rows, skip, None)
            while block := [_named(header, row, empty) for row in islice(after, ROWS)]:
                yield block


def _named(header: list[str], row: list[str], empty: dict[str, bool]) -> dict[str, Any] | str:
    """The cells of *row* by column; a text, which converts to no type with fields, if there are more or less."""
    if len(row) != len(header):
        return f"it has {len(row)} cells, and there are {len(header)} columns"
    cells: dict[str, Any] = dict(zip(header, row, strict=True))
    if "" in row:
        for column in [column for column, cell in cells.items() if not cell and column in empty]:
            if empty[column]:
                cells[column] = None
            else:
                del cells[column]
    return cells


def _empty_cells(type_: Any) -> dict[str, bool]:
    """The columns in which an empty cell is no text, and whether it is None there."""
    forms = {field.name: {member.form for member in field.shape.members} for field in record_fields(type_)}
    return {name: Form.NULL in own for name, own in forms.items() if not own & {Form.STR, Form.ANY}}


class Parquet(Rows):
    """Rows in groups; a large file is read in parts of whole groups."""

    name = "parquet"

    def parts(self, file: StoredFile, stream: BinaryIO, bytes_max: int) -> Sequence[tuple[int, int]]:
        if file.size <= bytes_max:
            return [(0, WHOLE)]
        with whole(FileSplit(file.version, 0, WHOLE, file.name)):
            metadata = _parquet(stream).metadata
            sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
        begins, filled = [0], 0
        for group, size in enumerate(sizes):
            if filled and filled + size > bytes_max:
                begins.append(group)
                filled = 0
            filled += size
        return list(zip(begins, [*begins[1:], WHOLE], strict=True))

    def blocks(self, stream: BinaryIO, file: StoredFile, split: FileSplit, skip: int) -> Iterator[list[Any]]:
        with whole(split):
            opened = _parquet(stream)
            for group in range(split.begin, min(split.end, opened.num_row_groups)):
                rows = opened.metadata.row_group(group).num_rows
                if skip >= rows:
                    skip -= rows
                    continue
                for batch in opened.iter_batches(ROWS, row_groups=[group]):
                    if skip < batch.num_rows:
                        yield batch.slice(skip).to_pylist()
                    skip = max(0, skip - batch.num_rows)


def _parquet(stream: BinaryIO) -> Any:
    with needing("files", "pyarrow", 'format="parquet"'):
        import pyarrow.parquet
    return pyarrow.parquet.ParquetFile(stream)


class Avro(Rows):
    """The object container files of Avro, read with the schema in them."""

    name = "avro"

    def blocks(self, stream: BinaryIO, file: StoredFile, split: FileSplit, skip: int) -> Iterator[list[Any]]:
        from fastavro import block_reader

        with whole(split):
            for block in block_reader(uncompressed(stream, file.name)):
                if skip < block.num_records:
                    yield list(islice(block, skip, None))
                skip = max(0, skip - block.num_records)

"""The seam between a file sink and a file format, and JSON lines.

The worker's loop encodes, and meets all errors of a record; a thread writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from exactlyonce.connectors.filestore.store import NewFile
from exactlyonce.pipeline.columns import RowField
from exactlyonce.sinks.files import partitions


class EncodedPart(NamedTuple):
    """Encoded rows of one folder."""

    folder: str
    rows: int
    size: int
    content: Any
    """An item for `RowsFile.write` of the same format."""


class RowsFile(Protocol):
    """A file that is being written."""

    def write(self, contents: list[Any], /) -> None:
        """Write encoded rows, as one group if the format has groups."""

    def finish(self) -> None:
        """Complete the file."""


class FileFormat(Protocol):
    """A format, for records of one type, some of whose fields are in the folders' names."""

    suffix: str
    part_bytes: int
    """The approximate overhead in memory of one encoded part."""

    def encode(self, groups: Sequence[Sequence[Any]], /) -> Sequence[tuple[Any, int]]:
        """The encoded rows of each group of records, and their approximate size in bytes. ValueError or TypeError names
        a field that does not fit."""

    def joined(self, contents: list[Any], /) -> Any:
        """Encoded rows joined in memory of their own, so that the batches they came from can be freed."""

    def open(self, file: NewFile, /) -> RowsFile:
        """A new file."""


class PartitionedEncoder:
    """The `SinkEncoder` of a file sink: rows by folder."""

    def __init__(self, partition_by: Sequence[RowField], format_: FileFormat, target: str) -> None:
        self._partition_by = partition_by
        self._target = target
        self._format = format_

    def encode(self, records: Sequence[Any]) -> list[EncodedPart]:
        """The parts, in the order of their first records."""
        groups = partitions.grouped(self._partition_by, records, self._target)
        encoded = self._format.encode(list(groups.values()))
        return [
            EncodedPart(folder, len(group), size, content)
            for (folder, group), (content, size) in zip(groups.items(), encoded, strict=True)
        ]


class JsonLines:
    """JSON lines. A line is an object of *tag* and *fields*; None: the record as msgspec writes it."""

    suffix = "jsonl"
    part_bytes = 64

    def __init__(self, fields: Sequence[RowField] | None, tag: Mapping[str, Any] | None = None) -> None:
        self._fields = None if fields is None else [(field.name, field.get) for field in fields]
        self._tag = tag or {}
        self._encode = msgspec.json.Encoder().encode_lines

    def encode(self, groups: Sequence[Sequence[Any]]) -> list[tuple[bytes, int]]:
        """The lines of each group, each with its end."""
        return [(lines, len(lines)) for lines in map(_trimmed, map(self._lines, groups))]

    def _lines(self, records: Sequence[Any]) -> bytes:
        return self._encode(records if self._fields is None else list(map(self._object, records)))

    def _object(self, record: Any) -> dict[str, Any]:
        assert self._fields is not None
        fields = {name: value for name, get in self._fields if (value := get(record)) is not msgspec.UNSET}
        return {**self._tag, **fields} if self._tag else fields

    def joined(self, contents: list[bytes]) -> bytes:
        """The lines, joined."""
        return b"".join(contents)

    def open(self, file: NewFile) -> LinesFile:
        """A new file."""
        return LinesFile(file)


def _trimmed(lines: bytes) -> bytes:
    """Few lines without msgspec's buffer of a kilobyte."""
    return lines if len(lines) > 1024 else bytes(memoryview(lines))


class LinesFile:
    """A file of lines."""

    def __init__(self, file: NewFile) -> None:
        self._file = file

    def write(self, contents: list[bytes]) -> None:
        """Write lines, in one piece."""
        self._file.write(b"".join(contents))

    def finish(self) -> None:
        """Lines need no end."""

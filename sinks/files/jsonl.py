"""JSON lines: a record is a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from exactlyonce.sinks.files.format import ByteFile
from exactlyonce.sinks.sql.fields import RowField


class JsonLines:
    """The format. *fields*: those that make a line, as an object, behind *tag*; None: as msgspec writes the record."""

    suffix = "jsonl"
    part_bytes = 64

    def __init__(self, fields: Sequence[RowField] | None, tag: Mapping[str, Any] | None = None) -> None:
        self._fields = None if fields is None else [(field.name, field.get) for field in fields]
        self._tag = tag or {}
        self._encode = msgspec.json.Encoder().encode_lines

    def encode(self, groups: Sequence[Sequence[Any]]) -> list[tuple[bytes, int]]:
        """The lines of each group, each with its end."""
        return [(lines, len(lines)) for lines in map(_of_their_size, map(self._lines, groups))]

    def _lines(self, records: Sequence[Any]) -> bytes:
        return self._encode(records if self._fields is None else list(map(self._object, records)))

    def _object(self, record: Any) -> dict[str, Any]:
        assert self._fields is not None
        fields = {name: value for name, get in self._fields if (value := get(record)) is not msgspec.UNSET}
        return {**self._tag, **fields} if self._tag else fields

    def joined(self, contents: list[bytes]) -> bytes:
        """All lines."""
        return b"".join(contents)

    def open(self, file: ByteFile) -> LinesFile:
        """A new file."""
        return LinesFile(file)


def _of_their_size(lines: bytes) -> bytes:
    """A few lines, without the kilobyte that they were encoded in."""
    return lines if len(lines) > 1024 else bytes(memoryview(lines))


class LinesFile:
    """A file of lines."""

    def __init__(self, file: ByteFile) -> None:
        self._file = file

    def write(self, contents: list[bytes]) -> None:
        """Write lines, in one piece."""
        self._file.write(b"".join(contents))

    def finish(self) -> None:
        """Lines need no end."""

"""Files between the stages of bounded work: what a unit sends to the next stage, and what its sinks are to publish.

    file  = frames, each: length of the body (4 bytes, big-endian), body
    channel frame: time in ms since 1970 (8 bytes, big-endian), then a batch as `engines.runtime.batch_codec` encodes it
    output frame:  msgpack array: values, then keys, headers, origins, timestamps, each or nil (see `OutputBatch`)

Invariants: a file is written once, by one attempt, whose label is in its name; whoever reads it checks that it is as
long as the receipt says, so that a folder that not all executors share is an error and never a loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from exactlyonce.pipeline.errors import ConfigError

LENGTH_BYTES = 4
BUFFER_BYTES = 1 << 17
"""Of each open file; a unit has one for each receiver, and most frames are larger."""


class StagedFile(msgspec.Struct, frozen=True):
    """One file, and what must be in it."""

    path: str
    records: int
    size: int


class ChannelFile(msgspec.Struct, frozen=True):
    """All that one subtask sent to another."""

    edge: str
    sender: int
    receiver: int
    file: StagedFile
    groups: tuple[int, ...]
    """The key groups that have a record in it."""


class OutputFile(msgspec.Struct, frozen=True):
    """All that one subtask of a sink is to publish, in order."""

    sink: str
    subtask: int
    file: StagedFile


class OutputBatch(msgspec.Struct, frozen=True, array_like=True):
    """Encoded outputs in order; each list that is there has an entry for each."""

    values: list[bytes | None]
    keys: list[bytes | None] | None
    headers: list[list[tuple[str, bytes | None]]] | None
    origins: list[tuple[str, int, int]] | None
    """(topic, partition, offset) of the input record that it stems from."""
    timestamps: list[int] | None = None
    """In ms since 1970; None: those of the client's clock."""

    def part(self, start: int, end: int) -> OutputBatch:
        """The outputs from *start* to before *end*."""
        place = slice(start, end)
        return OutputBatch(
            self.values[place],
            self.keys and self.keys[place],
            self.headers and self.headers[place],
            self.origins and self.origins[place],
            self.timestamps and self.timestamps[place],
        )


class FrameWriter:
    """Writes the frames of one file, which is made with the first of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._records = self._size = 0

    def write(self, body: bytes, records: int, prefix: bytes = b"") -> None:
        """Append a frame of *records* records; *prefix* is the first part of its body."""
        file = self._file = self._file or self._path.open("xb", BUFFER_BYTES)
        length = len(prefix) + len(body)
        file.write(length.to_bytes(LENGTH_BYTES, "big") + prefix)
        file.write(body)
        self._records += records
        self._size += LENGTH_BYTES + length

    def close(self) -> StagedFile | None:
        """The finished file; None if there was nothing to write."""
        if self._file is None:
            return None
        self._file.close()
        return StagedFile(str(self._path), self._records, self._size)


def read_frames(staged: StagedFile) -> Iterator[bytes]:
    """The bodies of a file's frames, in order."""
    try:
        with open(staged.path, "rb", buffering=BUFFER_BYTES) as file:
            while header := file.read(LENGTH_BYTES):
                body = file.read(int.from_bytes(header, "big"))
                yield body
            found = file.tell()
    except OSError as error:
        raise _unshared(staged, error.strerror or str(error)) from None
    if found != staged.size:
        raise _unshared(staged, f"it has {found} bytes instead of {staged.size}")


_output_decoder = msgspec.msgpack.Decoder(OutputBatch)


def read_outputs(staged: StagedFile | str) -> Iterator[OutputBatch]:
    """The batches of an output file, in order."""
    if isinstance(staged, str):
        staged = StagedFile(staged, 0, Path(staged).stat().st_size)
    return map(_output_decoder.decode, read_frames(staged))


def _unshared(staged: StagedFile, what: str) -> ConfigError:
    return ConfigError(
        f"The staged file {staged.path} cannot be read whole: {what}. Every executor must see the folder of --staging "
        f"under the same path: give one on shared storage, with room for the input of a chunk."
    )

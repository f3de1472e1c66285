"""Files between the stages of bounded work: records for the next stage, and outputs to be published.

    file  = frames, each: length of the body (4 bytes, big-endian), body
    channel frame: time in ms since 1970 (8 bytes, big-endian), then a batch as `engines.runtime.batch_codec` encodes it
    output frame:  msgpack array: values, then keys, headers, origins, timestamps, partitions, each or nil

Invariants: a file is written once, by the attempt in its name; a reader checks its size against the receipt, so that a
folder that not all executors share is an error and never a loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from exactlyonce.pipeline.errors import ConfigError

LENGTH_BYTES = 4
BUFFER_BYTES = 1 << 17
"""The buffer of an open file; a unit has one for each receiver, and most frames are larger."""


class StagedFile(msgspec.Struct, frozen=True):
    path: str
    records: int
    size: int


class ChannelFile(msgspec.Struct, frozen=True):
    """All records from one subtask to another."""

    edge: str
    sender: int
    receiver: int
    file: StagedFile
    groups: tuple[int, ...]
    """The key groups of its records."""


class OutputFile(msgspec.Struct, frozen=True):
    """All outputs of one subtask of a sink, in order."""

    sink: str
    subtask: int
    file: StagedFile


class OutputBatch(msgspec.Struct, frozen=True, array_like=True):
    """Encoded outputs in order; each list has an entry for each output."""

    values: list[bytes | None]
    keys: list[bytes | None] | None
    headers: list[list[tuple[str, bytes | None]]] | None
    origins: list[tuple[str, int, int]] | None
    """(topic, partition, offset) of the input record."""
    timestamps: list[int] | None = None
    """In ms since 1970; None: the client's clock."""
    partitions: list[int] | None = None
    """None: the client chooses them."""

    def part(self, start: int, end: int) -> OutputBatch:
        """The outputs from *start* to before *end*."""
        place = slice(start, end)
        return OutputBatch(
            self.values[place],
            self.keys and self.keys[place],
            self.headers and self.headers[place],
            self.origins and self.origins[place],
            self.timestamps and self.timestamps[place],
            self.partitions and self.partitions[place],
        )


class FrameWriter:
    """Writes the frames of one file, which is created with the first frame."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._records = self._size = 0

    def write(self, body: bytes, records: int, prefix: bytes = b"") -> None:
        """Append a frame of *records* records; its body begins with *prefix*."""
        file = self._file = self._file or self._path.open("xb", BUFFER_BYTES)
        length = len(prefix) + len(body)
        file.write(length.to_bytes(LENGTH_BYTES, "big") + prefix)
        file.write(body)
        self._records += records
        self._size += LENGTH_BYTES + length

    def close(self) -> StagedFile | None:
        """The finished file; None if nothing was written."""
        if self._file is None:
            return None
        self._file.close()
        return StagedFile(str(self._path), self._records, self._size)


def read_frames(staged: StagedFile) -> Iterator[bytes]:
    """The bodies of a file's frames, in order."""
    try:
        with open(staged.path, "rb", buffering=BUFFER_BYTES) as file:
            while header := file.read(LENGTH_BYTES):
                yield file.read(int.from_bytes(header, "big"))
            size = file.tell()
    except OSError as error:
        raise _unshared(staged, error.strerror or str(error)) from None
    if size != staged.size:
        raise _unshared(staged, f"it has {size} bytes instead of {staged.size}")


_output_decoder = msgspec.msgpack.Decoder(OutputBatch)


def read_outputs(staged: StagedFile) -> Iterator[OutputBatch]:
    """The batches of an output file, in order."""
    return map(_output_decoder.decode, read_frames(staged))


def _unshared(staged: StagedFile, why: str) -> ConfigError:
    return ConfigError(
        f"The staged file {staged.path} cannot be read whole: {why}. Every executor must see the folder of --staging "
        f"under the same path: give one on shared storage, with room for the input of a chunk."
    )

"""Staged files: a stage's units, their records for the next stage, and outputs to be published.

    file      = frames, entries, directory, footer
    frame     = a batch as `engines.runtime.batch` encodes it, an `OutputBatch`, message or watermark in msgpack
    entry     = an `Entry` in msgpack: a receiver's records, key groups and places of its frames
    directory = by receiver the offset (8 bytes), length and CRC-32 (4 bytes each) of its entry; length 0: it has none
    footer    = the offset of the directory (8 bytes), the number of receivers (4 bytes), the magic bytes

Integers are big-endian. A receiver is a subtask, an output partition, or a unit.
Invariants: a file is written once, by the attempt in its name; a reader checks its size against the receipt, and the
CRC-32 of all that it takes, so that a folder that not all executors share is an error and never a loss. A file lies at
a path that all units see, or in HDFS or S3; there it appears whole, when it is finished, from a temporary file of this
machine. A storage that is away is asked again for `AWAY_TIMEOUT_S`, then `StorageUnavailable`.

A lane is an output partition where `Manifest.outputs_by_partition` has the sink; else the output of a subtask.
"""

from __future__ import annotations

import os
import secrets
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from exactlyonce.checkpoint.records.storage_url import is_url, parts_of, storage_url
from exactlyonce.connectors.confluent import NOW
from exactlyonce.connectors.filestore.store import AWAY_TIMEOUT_S, FileStore, Retries, store_at
from exactlyonce.connectors.kafka.partitioning import Partitioner
from exactlyonce.engines.runtime.watermarks import Watermark
from exactlyonce.pipeline.errors import ConfigError, require
from exactlyonce.sinks.kafka.sink import Outputs

STAGING = "The staging folder"
BUFFER_BYTES = 1 << 20
END_BYTES = 1 << 16
"""The end of a file in HDFS or S3 is read at once: it has the directory, and often the entries."""
FOLDERS_KEPT = 4


def staging_at(staging: str | os.PathLike[str]) -> str:
    """*staging* in its one spelling: an absolute path, or a URL of HDFS or S3. ConfigError if it is neither.

    >>> staging_at("/shared/eo/"), staging_at("file:///shared/eo"), staging_at("S3://shop//staging/")
    ('/shared/eo', '/shared/eo', 's3://shop/staging')
    """
    text = os.fspath(staging)
    if not is_url(text):
        return str(Path(text).absolute())
    url = storage_url(text, "--staging")
    scheme, _, path = parts_of(url)
    return f"/{path}" if scheme == "file" else url


@lru_cache(FOLDERS_KEPT)
def folder_at(url: str) -> FileStore:
    """The folder *url* in HDFS or S3, whose connection all units of this process share."""
    base, _, inner = url.rpartition("/")
    return store_at(base, inner, STAGING)


def created(location: str) -> WritableFile:
    """A new file; OSError, or our errors of a storage."""
    return _StoredNewFile(location) if is_url(location) else _LocalNewFile(location)


def opened(location: str, size: int) -> ReadableFile:
    """The file at *location*, which has *size* bytes. OSError unless it is there, and whole."""
    return _StoredReadFile(location, size) if is_url(location) else _LocalReadFile(location, size)


def put(url: str, content: bytes) -> None:
    """Write a small file at *url* in HDFS or S3."""
    folder, name = _place(url)
    Retries(AWAY_TIMEOUT_S)(lambda: folder.put(name, content, _aside(name)))


def _place(url: str) -> tuple[FileStore, str]:
    folder, _, name = url.rpartition("/")
    return folder_at(folder), name


def _aside(name: str) -> str:
    """A temporary name with the beginning of *name*, by which its command removes it."""
    return f"{name}.aside-{secrets.token_hex(8)}"


class _LocalNewFile:
    def __init__(self, path: str) -> None:
        file = open(path, "xb", BUFFER_BYTES)  # noqa: SIM115 - it stays open
        self.write, self.finish = file.write, file.close


class _StoredNewFile:
    def __init__(self, url: str) -> None:
        self._folder, self._name = _place(url)
        self._spool: Any = tempfile.TemporaryFile(buffering=BUFFER_BYTES)  # noqa: SIM115 - it stays open

    def write(self, data: bytes | bytearray) -> None:
        with _spooling():
            self._spool.write(data)

    def finish(self) -> None:
        with _spooling():
            self._spool.flush()
        with self._spool:
            Retries(AWAY_TIMEOUT_S)(lambda: self._folder.put(self._name, self._spool, _aside(self._name)))


@contextmanager
def _spooling() -> Iterator[None]:
    """Explain an error of this machine's disk."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"A staged file cannot be kept in {tempfile.gettempdir()} of this machine: {error.strerror}. It is written "
            f"there before it goes to the staging folder: make room, or let TMPDIR name another folder, on every "
            f"executor."
        ) from None


class _LocalReadFile:
    def __init__(self, path: str, size: int) -> None:
        self._file = open(path, "rb")  # noqa: SIM115 - it stays open
        self.close = self._file.close
        if (found := self._file.seek(0, os.SEEK_END)) != size:
            self.close()
            raise OSError(f"it has {found} bytes instead of {size}")

    def read(self, offset: int, length: int) -> bytes:
        self._file.seek(offset)
        return self._file.read(length)


class _StoredReadFile:
    def __init__(self, url: str, size: int) -> None:
        self._folder, self._name = _place(url)
        self._end_at = max(0, size - END_BYTES)
        self._end = self._range(self._end_at, size - self._end_at + 1)
        if self._end_at + len(self._end) != size:
            raise OSError(f"it does not have the {size} bytes that were written")

    def read(self, offset: int, length: int) -> bytes:
        if offset >= self._end_at:
            return self._end[offset - self._end_at : offset - self._end_at + length]
        return self._range(offset, length) if length else b""

    def _range(self, offset: int, length: int) -> bytes:
        data = Retries(AWAY_TIMEOUT_S)(lambda: self._folder.get_range(self._name, offset, length))
        if data is None:
            raise FileNotFoundError(2, os.strerror(2))
        return data

    def close(self) -> None:
        self._end = b""


WritableFile = _LocalNewFile | _StoredNewFile
ReadableFile = _LocalReadFile | _StoredReadFile


MAGIC = b"eostage1"
_SLOT = struct.Struct(">QII")
_FOOTER = struct.Struct(f">QI{len(MAGIC)}s")
OPEN_FILES_MAX = 64
"""A subtask reads a file of each sender; a closed one is opened again."""


class StagedFile(msgspec.Struct, frozen=True):
    location: str
    """A path, or the URL of a file in HDFS or S3."""
    size: int


class SentFile(msgspec.Struct, frozen=True):
    """All records that one subtask sends on an edge; receivers are the subtasks of the next task."""

    edge: str
    sender: int
    file: StagedFile


class OutputFile(msgspec.Struct, frozen=True):
    """All outputs of one subtask of a sink, in order."""

    sink: str
    subtask: int
    file: StagedFile
    counts: dict[int, int]
    """The number of outputs by receiver: the output partition, or 0 alone if the client chooses partitions."""

    @property
    def records(self) -> int:
        """The number of all outputs."""
        return sum(self.counts.values())


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
    """None: the receiver is the partition, or the client chooses them."""

    def part(self, start: int, end: int) -> OutputBatch:
        """The outputs from *start* to before *end*."""
        return self._taken(itemgetter(slice(start, end)))

    def share(self, numbers: Sequence[int]) -> OutputBatch:
        """The outputs at the places *numbers*, which grow."""
        if len(numbers) == len(self.values):
            return self.part(0, len(numbers))
        return self._taken(lambda column: [column[number] for number in numbers])

    def _taken(self, taken: Callable[[list[Any]], list[Any]]) -> OutputBatch:
        return OutputBatch(
            taken(self.values),
            self.keys and taken(self.keys),
            self.headers and taken(self.headers),
            self.origins and taken(self.origins),
            self.timestamps and taken(self.timestamps),
            self.partitions and taken(self.partitions),
        )

    def joined(self, more: OutputBatch) -> OutputBatch:
        """The outputs, then the outputs of *more*, which has the same columns; this batch is used up."""
        for name in self.__struct_fields__:
            column, other = getattr(self, name), getattr(more, name)
            require((column is None) == (other is None), "the outputs of a sink have the same columns")
            if column is not None and other is not None:
                column.extend(other)
        return self


class _Untraced(msgspec.Struct, frozen=True, array_like=True):
    """An `OutputBatch` whose origins are not decoded: that takes longer than all the rest."""

    values: list[bytes | None]
    keys: list[bytes | None] | None
    headers: list[list[tuple[str, bytes | None]]] | None
    origins: msgspec.Raw
    timestamps: list[int] | None = None
    partitions: list[int] | None = None

    def batch(self) -> OutputBatch:
        return OutputBatch(self.values, self.keys, self.headers, None, self.timestamps, self.partitions)


class FramePlace(msgspec.Struct, frozen=True, array_like=True):
    """The place of a frame in its file."""

    offset: int
    length: int
    crc: int
    """The CRC-32 of the frame."""
    time_ms: int
    """In ms since 1970, as its sender's clock of batches gives it; 0 for outputs and messages."""
    is_signal: bool = False
    """Whether it is a watermark."""


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """The frames of one receiver, in order."""

    records: int
    groups: tuple[int, ...]
    """The key groups of its records, if these have any."""
    places: tuple[FramePlace, ...]


@dataclass
class _Waiting:
    """The entry of a receiver, while its file is written."""

    records: int = 0
    places: list[FramePlace] = field(default_factory=list)


_encode = msgspec.msgpack.Encoder().encode
_entry_decoder = msgspec.msgpack.Decoder(Entry)


class FrameWriter:
    """Writes the frames of one file, which is created with the first frame."""

    def __init__(self, location: str | os.PathLike[str], receivers: int) -> None:
        self._location, self.receivers = os.fspath(location), receivers
        self._file: WritableFile | None = None
        self._size = 0
        self._waiting: dict[int, _Waiting] = {}

    def write(self, receiver: int, body: bytes, records: int, time_ms: int = 0, *, is_signal: bool = False) -> None:
        """Append a frame of *records* records."""
        with _access(self._location, "written"):
            file = self._file = self._file or created(self._location)
            file.write(body)
        waiting = self._waiting.setdefault(receiver, _Waiting())
        waiting.places.append(FramePlace(self._size, len(body), zlib.crc32(body), time_ms, is_signal))
        waiting.records += records
        self._size += len(body)

    @property
    def counts(self) -> dict[int, int]:
        """The number of records by receiver, of those with any."""
        return {receiver: waiting.records for receiver, waiting in sorted(self._waiting.items())}

    def close(self, groups: Mapping[int, Sequence[int]] | None = None) -> StagedFile | None:
        """The finished file; None if nothing was written. *groups* are the key groups of records, by receiver."""
        if self._file is None:
            return None
        directory = bytearray(_SLOT.size * self.receivers)
        file = self._file
        with _access(self._location, "written"):
            for receiver, waiting in sorted(self._waiting.items()):
                own = () if groups is None else tuple(groups.get(receiver, ()))
                entry = _encode(Entry(waiting.records, own, tuple(waiting.places)))
                _SLOT.pack_into(directory, _SLOT.size * receiver, self._size, len(entry), zlib.crc32(entry))
                file.write(entry)
                self._size += len(entry)
            file.write(directory + _FOOTER.pack(self._size, self.receivers, MAGIC))
            file.finish()
        return StagedFile(self._location, self._size + len(directory) + _FOOTER.size)


def stage_messages(location: str, messages: Iterable[object]) -> StagedFile:
    """Write a file with one frame for each receiver: the next of *messages*, which are msgspec structs or lists."""
    frames = [_encode(message) for message in messages]
    writer = FrameWriter(location, len(frames))
    for receiver, frame in enumerate(frames):
        writer.write(receiver, frame, 1)
    staged = writer.close()
    assert staged is not None
    return staged


class _Directory(NamedTuple):
    offset: int
    receivers: int


class StagedFiles:
    """Reads staged files, of which a few stay open between two reads."""

    def __init__(self) -> None:
        self._open: dict[str, ReadableFile] = {}
        """By location, the one that was used last at the end."""
        self._directories: dict[str, _Directory] = {}

    def close(self) -> None:
        """Close all; may be called more than once."""
        while self._open:
            self._open.popitem()[1].close()

    def frames(self, staged: StagedFile, receiver: int) -> Frames | None:
        """The frames of *receiver*; None if it has none."""
        directory = self._directory(staged)
        if receiver >= directory.receivers:
            raise _unreadable(staged, "it is damaged")
        slot = self._read(staged, directory.offset + receiver * _SLOT.size, _SLOT.size)
        offset, length, crc = _SLOT.unpack(slot)
        if not length:
            return None
        if offset + length > directory.offset:
            raise _unreadable(staged, "it is damaged")
        return Frames(self, staged, _entry_decoder.decode(self._checked(staged, offset, length, crc)))

    def _directory(self, staged: StagedFile) -> _Directory:
        """The place of the directory, which is read once."""
        known = self._directories.get(staged.location)
        if known is None:
            footer = self._read(staged, staged.size - _FOOTER.size, _FOOTER.size)
            offset, receivers, magic = _FOOTER.unpack(footer)
            if magic != MAGIC or offset + receivers * _SLOT.size + _FOOTER.size != staged.size:
                raise _unreadable(staged, "it is damaged")
            known = self._directories[staged.location] = _Directory(offset, receivers)
        return known

    def message(self, staged: StagedFile, receiver: int) -> bytes:
        """The one frame of *receiver*."""
        frames = self.frames(staged, receiver)
        if frames is None:
            raise _unreadable(staged, "it is damaged")
        return b"".join(frames.bodies())

    def frame(self, staged: StagedFile, place: FramePlace) -> bytes:
        """The frame at *place*."""
        return self._checked(staged, place.offset, place.length, place.crc)

    def _checked(self, staged: StagedFile, offset: int, length: int, crc: int) -> bytes:
        data = self._read(staged, offset, length)
        if zlib.crc32(data) != crc:
            raise _unreadable(staged, "it is damaged")
        return data

    def _read(self, staged: StagedFile, offset: int, length: int) -> bytes:
        with _access(staged.location, "read whole"):
            data = self._opened(staged).read(offset, length)
        if len(data) != length:
            raise _unreadable(staged, f"it ends at {offset + len(data)}")
        return data

    def _opened(self, staged: StagedFile) -> ReadableFile:
        file = self._open.pop(staged.location, None) or opened(staged.location, staged.size)
        self._open[staged.location] = file
        if len(self._open) > OPEN_FILES_MAX:
            self._open.pop(next(iter(self._open))).close()
        return file


@dataclass(frozen=True)
class Frames:
    """The frames of one receiver in one file."""

    files: StagedFiles
    staged: StagedFile
    entry: Entry

    def bodies(self) -> Iterator[bytes]:
        """The frames, in order."""
        return (self.files.frame(self.staged, place) for place in self.entry.places)

    def timed(self) -> Iterator[tuple[int, Watermark | Callable[[], bytes]]]:
        """The time of each frame, and the function that reads it, or its watermark, in order."""
        for place in self.entry.places:
            if place.is_signal:
                yield place.time_ms, _watermark_decoder.decode(self.files.frame(self.staged, place))
            else:
                yield place.time_ms, partial(self.files.frame, self.staged, place)


_watermark_decoder = msgspec.msgpack.Decoder(Watermark)
_output_decoder = msgspec.msgpack.Decoder(OutputBatch)
_untraced_decoder = msgspec.msgpack.Decoder(_Untraced)


def read_outputs(
    files: StagedFiles, staged: StagedFile, receiver: int, *, origins: bool = True
) -> Iterator[OutputBatch]:
    """The batches of one receiver in an output file, in order, if wanted without their *origins*."""
    frames = files.frames(staged, receiver)
    if frames is None:
        return iter(())
    if origins:
        return map(_output_decoder.decode, frames.bodies())
    return (_untraced_decoder.decode(body).batch() for body in frames.bodies())


def read_lane(outputs: Iterable[OutputFile], receiver: int, *, origins: bool = True) -> Iterator[OutputBatch]:
    """The batches of one receiver in *outputs*, file by file."""
    with closing(StagedFiles()) as files:
        for output in outputs:
            if receiver in output.counts:
                yield from read_outputs(files, output.file, receiver, origins=origins)


@contextmanager
def _access(location: str, done: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _problem(location, done, error.strerror or str(error)) from None


def _unreadable(staged: StagedFile, why: str) -> ConfigError:
    return _problem(staged.location, "read whole", why)


def _problem(location: str, done: str, why: str) -> ConfigError:
    return ConfigError(
        f"The staged file {location} cannot be {done}: {why}. Every executor must see the folder of --staging under "
        f"the same name: give one on shared storage, HDFS or S3, with room for the input of a chunk. Nothing of this "
        f"checkpoint is visible, and nothing is lost."
    )


Origin = tuple[str, int, int]
"""Topic, partition and offset of an input record."""


class RecomputedOutput(NamedTuple):
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]] | None
    origin: Origin | None
    timestamp_ms: int | None = None
    """None: the client's own time."""
    partition: int | None = None
    """The partition that the sink's ``partition=`` gives; None: the client chooses it."""

    def place(self, partition_of: Partitioner, partitions: int) -> int | None:
        """Its partition in a topic with so many; None: any."""
        return partition_of(self.key, partitions) if self.partition is None else self.partition

    def alone(self, partition: int) -> Outputs:
        """To be written into *partition*."""
        return Outputs(
            [self.value], [self.key], [self.headers or []], [self.timestamp_ms or NOW], partitions=[partition]
        )


def flat(batches: Iterable[OutputBatch]) -> Iterator[RecomputedOutput]:
    """The outputs one by one."""
    for batch in batches:
        none: list[None] = [None] * len(batch.values)
        yield from map(
            RecomputedOutput,
            batch.keys or none,
            batch.values,
            batch.headers or none,
            batch.origins or none,
            batch.timestamps or none,
            batch.partitions or none,
        )


def batches_of(
    outputs: Iterable[OutputFile], lane: int, *, by_partition: bool, origins: bool = True
) -> Iterator[OutputBatch]:
    """The outputs of a lane, in order. One that is a partition has its number in `OutputBatch.partitions`."""
    if not by_partition:
        return read_lane([output for output in outputs if output.subtask == lane], 0, origins=origins)
    return (
        msgspec.structs.replace(batch, partitions=[lane] * len(batch.values))
        for batch in read_lane(outputs, lane, origins=origins)
    )


def count_of(outputs: Iterable[OutputFile], lane: int, *, by_partition: bool) -> int:
    """The number of outputs in a lane."""
    if not by_partition:
        return sum(output.records for output in outputs if output.subtask == lane)
    return sum(output.counts.get(lane, 0) for output in outputs)

"""Staged files: a stage's units, their records for the next stage, and outputs to be published.

    file  = the range of each receiver that has frames, in the order of receivers
    range = the magic bytes, the length of the entry (4 bytes), its CRC-32 (4 bytes), the entry, the frames
    entry = an `Entry` in msgpack: a receiver's records, key groups, and the length and CRC-32 of each frame
    frame = a batch as `engines.runtime.batch` encodes it, an `OutputBatch`, message or watermark in msgpack

Integers are big-endian. A receiver is a subtask, an output partition, or a unit.
Invariants: a file is written once, by the attempt in its name; a receiver has one range, which is read once and
sequentially, in pieces; no file stays open between two. The bounds of ranges are in the receipt, not in the file: so
that a reader asks nobody for them. A reader checks the CRC-32 of all that it takes, so that a folder that not all
executors share is an error and never a loss. A file lies at a path that all units see, or in HDFS or S3; there it
appears whole, when it is finished. A storage that is away is asked again for `AWAY_TIMEOUT_S`, then
`StorageUnavailable`.

A lane is an output partition where `Manifest.outputs_by_partition` has the sink; else the output of a subtask.
"""

from __future__ import annotations

import errno
import os
import secrets
import struct
import tempfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import repeat
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from exactlyonce.checkpoint.records.storage_url import is_url, parts_of, storage_url
from exactlyonce.connectors.confluent import NOW
from exactlyonce.connectors.filestore.store import AWAY_TIMEOUT_S, STAGING, FileStore, Retries, store_at
from exactlyonce.connectors.kafka.partitioning import Partitioner
from exactlyonce.engines.runtime.watermarks import Watermark
from exactlyonce.pipeline.errors import ConfigError, InvariantViolation, require
from exactlyonce.sinks.kafka.sink import Outputs

FOLDERS_KEPT = 4
BUFFER_BYTES = 1 << 20
GATHERED_BYTES_MAX = 32 << 20
"""Frames of a new file that wait in memory; more of them wait in a temporary file."""
PIECE_BYTES_MIN, PIECE_BYTES_MAX = 64 << 10, 4 << 20
"""A range is read in such pieces: a request takes as long as some megabytes."""
MERGED_BYTES = 64 << 20
"""Two pieces of each range that is merged, unless that makes pieces too small."""
REQUESTS_AT_ONCE = 16
"""Requests of a unit to HDFS or S3, and ranges that are opened ahead where one follows another."""


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


def _write_file(location: str, size: int, content: Iterable[bytes]) -> None:
    """Write a new file of *size* bytes."""
    if not is_url(location):
        with open(location, "xb", BUFFER_BYTES) as file:
            file.writelines(content)
        return
    folder, name = _place(location)
    if size <= GATHERED_BYTES_MAX:
        whole = b"".join(content)
        Retries(AWAY_TIMEOUT_S)(lambda: folder.put(name, whole, _aside(name)))
        return
    with tempfile.TemporaryFile() as spool:
        with _spooling():
            spool.writelines(content)
            spool.flush()
        Retries(AWAY_TIMEOUT_S)(lambda: folder.put(name, spool, _aside(name)))


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


def _read(location: str, start: int, end: int, retries: Retries) -> bytes:
    """The bytes from *start* to before *end*, at least one; fewer where the file ends."""
    if is_url(location):
        folder, name = _place(location)
        data = retries(lambda: folder.get_range(name, start, end - start))
        if data is None:
            raise FileNotFoundError(2, os.strerror(2))
        return data
    with open(location, "rb", buffering=0) as file:
        file.seek(start)
        whole = file.read(end - start)
        while len(whole) < end - start and (more := file.read(end - start - len(whole))):
            whole += more  # a mounted store may give less at once
    return whole


MAGIC = b"eostage2"
_HEADER = struct.Struct(f">{len(MAGIC)}sII")
_BOUND = struct.Struct(">Q")
_SLOT = struct.Struct(">QQ")


class StagedRange(msgspec.Struct, frozen=True, array_like=True):
    """The frames of one receiver: the bytes of a file from *start* to before *end*."""

    location: str
    """A path, or the URL of a file in HDFS or S3."""
    start: int
    end: int


class StagedFile(msgspec.Struct, frozen=True):
    location: str
    """A path, or the URL of a file in HDFS or S3."""
    bounds: bytes
    """The offsets between the ranges of receivers: 8 bytes for the start of each, and for the end of the last. A
    receiver without frames has an empty range."""

    @property
    def size(self) -> int:
        """In bytes."""
        return int.from_bytes(self.bounds[-_BOUND.size :], "big")

    def slot(self, receiver: int) -> bytes:
        """The start and end of a receiver's range, 8 bytes each. See `ranges_in`."""
        start = receiver * _BOUND.size
        slot = self.bounds[start : start + _SLOT.size]
        require(len(slot) == _SLOT.size, "every receiver has a range in a staged file")
        return slot

    def range(self, receiver: int) -> StagedRange | None:
        """The range of *receiver*; None if it has no frames."""
        return next(ranges_in([self.location], self.slot(receiver)))


def ranges_in(locations: Iterable[str], slots: bytes) -> Iterator[StagedRange | None]:
    """The range in each of the files at *locations*, whose slots are joined in *slots*; None where it is empty."""
    for location, (start, end) in zip(locations, _SLOT.iter_unpack(slots), strict=True):
        yield StagedRange(location, start, end) if start < end else None


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


class FrameHead(msgspec.Struct, frozen=True, array_like=True):
    """A frame, as the entry of its range has it."""

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
    heads: tuple[FrameHead, ...]


@dataclass
class _Waiting:
    """The frames of a receiver, while its file is gathered."""

    records: int = 0
    heads: list[FrameHead] = field(default_factory=list)
    spooled: list[tuple[int, int]] = field(default_factory=list)
    """The offsets and lengths of its first frames in the temporary file."""
    frames: list[bytes] = field(default_factory=list)
    """The others."""


_encode = msgspec.msgpack.Encoder().encode
_entry_decoder = msgspec.msgpack.Decoder(Entry)


class FrameWriter:
    """Gathers the frames of one file, and writes it by receiver once it is closed."""

    def __init__(self, location: str | os.PathLike[str], receivers: int) -> None:
        self._location, self.receivers = os.fspath(location), receivers
        self._waiting: dict[int, _Waiting] = {}
        self._waiting_bytes = 0
        self._spool: Any = None

    def write(self, receiver: int, body: bytes, records: int, time_ms: int = 0, *, is_signal: bool = False) -> None:
        """Append a frame of *records* records."""
        waiting = self._waiting.get(receiver)
        if waiting is None:
            require(0 <= receiver < self.receivers, "a frame is for one of the receivers")
            waiting = self._waiting[receiver] = _Waiting()
        waiting.heads.append(FrameHead(len(body), zlib.crc32(body), time_ms, is_signal))
        waiting.frames.append(body)
        waiting.records += records
        self._waiting_bytes += len(body)
        if self._waiting_bytes > GATHERED_BYTES_MAX:
            self._set_aside()

    def _set_aside(self) -> None:
        """Move all waiting frames into the temporary file, which is on a disk of this machine: the staging folder may
        be a mounted store, where an open file cannot be read."""
        with _spooling():
            if self._spool is None:
                self._spool = tempfile.TemporaryFile()  # noqa: SIM115 - until the file is closed
            for waiting in self._waiting.values():
                if waiting.frames:
                    frames = b"".join(waiting.frames)
                    waiting.spooled.append((self._spool.tell(), len(frames)))
                    waiting.frames.clear()
                    self._spool.write(frames)
            self._spool.flush()
        self._waiting_bytes = 0

    @property
    def counts(self) -> dict[int, int]:
        """The number of records by receiver, of those with any."""
        return {receiver: waiting.records for receiver, waiting in sorted(self._waiting.items())}

    def close(self, groups: Mapping[int, Sequence[int]] | None = None) -> StagedFile | None:
        """The finished file; None if nothing was written. *groups* are the key groups of records, by receiver."""
        if not self._waiting:
            return None
        starts, bounds, size = dict[int, bytes](), [0], 0
        for receiver in range(self.receivers):
            if (waiting := self._waiting.get(receiver)) is not None:
                own = () if groups is None else tuple(groups.get(receiver, ()))
                entry = _encode(Entry(waiting.records, own, tuple(waiting.heads)))
                starts[receiver] = _HEADER.pack(MAGIC, len(entry), zlib.crc32(entry)) + entry
                size += len(starts[receiver]) + sum(head.length for head in waiting.heads)
            bounds.append(size)
        with _access(self._location, "written"):
            _write_file(self._location, size, self._content(starts))
        if self._spool is not None:
            self._spool.close()
        for waiting in self._waiting.values():
            waiting.frames.clear()
        return StagedFile(self._location, struct.pack(f">{len(bounds)}Q", *bounds))

    def _content(self, starts: Mapping[int, bytes]) -> Iterator[bytes]:
        """The file, whose ranges begin with *starts*."""
        for receiver, start in starts.items():
            yield start
            waiting = self._waiting[receiver]
            for offset, length in waiting.spooled:
                with _spooling():
                    frames = os.pread(self._spool.fileno(), length, offset)
                yield frames
            yield from waiting.frames


def stage_messages(location: str, messages: Iterable[object]) -> list[StagedRange]:
    """Write a file with *messages*, which are msgspec structs or lists; return the range of each. See `message`."""
    frames = [_encode(message) for message in messages]
    writer = FrameWriter(location, len(frames))
    for receiver, frame in enumerate(frames):
        writer.write(receiver, frame, 1)
    staged = writer.close()
    assert staged is not None
    found = ranges_in(repeat(location, len(frames)), b"".join(map(staged.slot, range(len(frames)))))
    return [place for place in found if place is not None]


class StagedFiles:
    """Reads ranges of staged files; those in HDFS or S3 ahead of their use, on threads that end with `close`.

    An error of a thread is raised where its piece is used.
    """

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._retries = Retries(AWAY_TIMEOUT_S)

    def close(self) -> None:
        """End the threads; may be called more than once."""
        if self._threads is not None:
            self._retries.end()
            self._threads.shutdown(cancel_futures=True)

    def merged(self, places: Sequence[StagedRange]) -> list[Frames]:
        """The frames of each of *places*, which are taken together: a piece or two of each are in memory."""
        piece_bytes = min(PIECE_BYTES_MAX, max(PIECE_BYTES_MIN, MERGED_BYTES // max(1, 2 * len(places))))

        def pieces(place: StagedRange) -> int:
            """A range of two pieces is one request: both would be in memory."""
            return piece_bytes if place.end - place.start > 2 * piece_bytes else 2 * piece_bytes

        return [Frames(_RangeReader(self, place, pieces(place))) for place in places]

    def in_turn(self, places: Iterable[StagedRange]) -> Iterator[Frames]:
        """The frames of each of *places*, which are taken one after the other: the next ones are asked for."""
        opened: deque[Frames] = deque()
        for place in places:
            opened.append(Frames(_RangeReader(self, place, PIECE_BYTES_MAX)))
            if len(opened) > REQUESTS_AT_ONCE:
                yield opened.popleft()
        while opened:
            yield opened.popleft()

    def message(self, place: StagedRange) -> bytes:
        """The one frame at *place*."""
        return b"".join(Frames(_RangeReader(self, place, place.end - place.start)).bodies())

    def ask(self, place: StagedRange, start: int, end: int) -> Callable[[], bytes]:
        """The function that gives these bytes of the file of *place*; HDFS or S3 is asked for them at once."""
        if not is_url(place.location):
            return partial(self._piece, place, start, end)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(REQUESTS_AT_ONCE, "staged")
        return self._threads.submit(self._piece, place, start, end).result

    def _piece(self, place: StagedRange, start: int, end: int) -> bytes:
        with _access(place.location, "read whole"):
            data = _read(place.location, start, end, self._retries)
        if len(data) != end - start:
            raise _unreadable(place, f"it ends at {start + len(data)}")
        return data


class _RangeReader:
    """Reads a range sequentially, in pieces; the next piece is asked for once half of one is taken."""

    def __init__(self, files: StagedFiles, place: StagedRange, piece_bytes: int) -> None:
        self.place, self._files, self._piece_bytes = place, files, piece_bytes
        self._piece, self._taken = b"", 0
        self._asked_to = place.start
        self._next: Callable[[], bytes] | None = None
        self._ask()

    def _ask(self) -> None:
        """Ask for the next piece, if there is one."""
        start, self._asked_to = self._asked_to, min(self._asked_to + self._piece_bytes, self.place.end)
        self._next = self._files.ask(self.place, start, self._asked_to) if start < self._asked_to else None

    def read(self, length: int) -> bytes:
        """The next *length* bytes."""
        end = self._taken + length
        if end > len(self._piece):
            self._piece, self._taken, end = self._joined(length), 0, length
        data = self._piece[self._taken : end]
        self._taken = end
        if self._next is None and 2 * end >= len(self._piece):
            self._ask()
        return data

    def _joined(self, length: int) -> bytes:
        """The rest of the piece, with as many of the next ones as *length* bytes need."""
        pieces = [self._piece[self._taken :]]
        missing = length - len(pieces[0])
        while missing > 0:
            if self._next is None:
                self._ask()
            if self._next is None:
                raise _damaged(self.place)
            pieces.append(self._next())
            self._next = None
            missing -= len(pieces[-1])
        return b"".join(pieces)


class Frames:
    """The frames of one range, which are taken once, in order."""

    def __init__(self, reader: _RangeReader) -> None:
        self._reader = reader
        self._entry: Entry | None = None

    @property
    def entry(self) -> Entry:
        """The entry, which is read first."""
        if self._entry is None:
            self._entry = self._read_entry()
        return self._entry

    def _read_entry(self) -> Entry:
        place, read = self._reader.place, self._reader.read
        magic, length, crc = _HEADER.unpack(read(_HEADER.size))
        if magic != MAGIC:
            raise _unreadable(place, "it is damaged, or another version of exactlyonce has written it")
        if zlib.crc32(encoded := read(length)) != crc:
            raise _damaged(place)
        entry = _entry_decoder.decode(encoded)
        if _HEADER.size + length + sum([head.length for head in entry.heads]) != place.end - place.start:
            raise _damaged(place)
        return entry

    def bodies(self) -> Iterator[bytes]:
        """The frames, in order."""
        return map(self._body, self.entry.heads)

    def timed(self) -> Iterator[tuple[int, Watermark | Callable[[], bytes]]]:
        """The time of each frame, and the function that reads it, or its watermark, in order. The function is called
        before the next frame is asked for."""
        for head in self.entry.heads:
            if head.is_signal:
                yield head.time_ms, _watermark_decoder.decode(self._body(head))
            else:
                yield head.time_ms, partial(self._body, head)

    def _body(self, head: FrameHead) -> bytes:
        body = self._reader.read(head.length)
        if zlib.crc32(body) != head.crc:
            raise _damaged(self._reader.place)
        return body


_watermark_decoder = msgspec.msgpack.Decoder(Watermark)
_output_decoder = msgspec.msgpack.Decoder(OutputBatch)
_untraced_decoder = msgspec.msgpack.Decoder(_Untraced)


def read_outputs(
    files: StagedFiles, lanes: Iterable[tuple[OutputFile, int]], *, origins: bool = True
) -> Iterator[Iterator[OutputBatch]]:
    """The batches of each of *lanes*, if wanted without their *origins*: files, each with a receiver that has any."""

    def places() -> Iterator[StagedRange]:
        for output, receiver in lanes:
            if (place := output.file.range(receiver)) is None:
                raise InvariantViolation("a receiver with outputs has a range in their file")
            yield place

    for frames in files.in_turn(places()):
        if origins:
            yield map(_output_decoder.decode, frames.bodies())
        else:
            yield (_untraced_decoder.decode(body).batch() for body in frames.bodies())


def read_lane(outputs: Iterable[OutputFile], receiver: int, *, origins: bool = True) -> Iterator[OutputBatch]:
    """The batches of one receiver in *outputs*, file by file."""
    lanes = [(output, receiver) for output in outputs if receiver in output.counts]
    with closing(StagedFiles()) as files:
        for batches in read_outputs(files, lanes, origins=origins):
            yield from batches


def read_places(places: Iterable[StagedRange]) -> Iterator[OutputBatch]:
    """The batches at *places*, one place after the other."""
    with closing(StagedFiles()) as files:
        for frames in files.in_turn(places):
            yield from map(_output_decoder.decode, frames.bodies())


@contextmanager
def _access(location: str, done: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        remedy = _MORE_ROOM if error.errno in _FULL else _ONE_FOLDER
        raise _problem(location, done, error.strerror or str(error), remedy) from None


def _damaged(place: StagedRange) -> ConfigError:
    return _unreadable(place, "it is damaged")


def _unreadable(place: StagedRange, why: str) -> ConfigError:
    return _problem(place.location, "read whole", why)


_FULL = (errno.ENOSPC, errno.EDQUOT)
_ONE_FOLDER = (
    "Every executor must see the folder of --staging under the same name: give one on shared storage, HDFS or S3, with "
    "room for the input of a chunk."
)
_MORE_ROOM = "Make room in the folder of --staging, give another one, or take smaller chunks (--chunk-records)."


def _problem(location: str, done: str, why: str, remedy: str = _ONE_FOLDER) -> ConfigError:
    return ConfigError(
        f"The staged file {location} cannot be {done}: {why}. {remedy} Nothing of this checkpoint is visible, and "
        f"nothing is lost."
    )


Origin = tuple[str, int, int]
"""Topic, partition and offset of an input record."""
_PLACE = struct.Struct(">qq")


def origin_bytes(origin: Origin) -> bytes:
    """The bytes of *origin*, in the order of its parts."""
    topic, partition, offset = origin
    return topic.encode() + b"\0" + _PLACE.pack(partition, offset)


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

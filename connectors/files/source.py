"""A folder of files as a source: the description. It opens nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeVar, overload

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.checkpoint.records.storage_url import is_url
from exactlyonce.connectors.files.finding import NO_FILE, FileFinder, FileSplit, changed, gone
from exactlyonce.connectors.files.formats import WHOLE, Avro, Csv, FileFormat, JsonLines, Parquet
from exactlyonce.connectors.filestore.store import FileStore, StoredFile, path_problems, store_of
from exactlyonce.connectors.splits import OpenSplit, PlacedDecoder, SplitDecoder, SplitSource, require_reached
from exactlyonce.pipeline import shape
from exactlyonce.pipeline.codec import Codec, codec_for
from exactlyonce.pipeline.dead_letters import OnError
from exactlyonce.pipeline.durations import Duration, duration_ms, duration_problems
from exactlyonce.pipeline.errors import GraphError
from exactlyonce.pipeline.grants import Grants, s3_grants
from exactlyonce.pipeline.location import caller, location
from exactlyonce.pipeline.records import Record
from exactlyonce.pipeline.sizes import Size, byte_count, size_problems
from exactlyonce.pipeline.source import TimeOf

if TYPE_CHECKING:
    from typing_extensions import TypedDict, TypeForm, Unpack

    class _Options(TypedDict, total=False):
        """What both ways to read files take."""

        format: Literal["jsonl", "csv", "parquet", "avro"]
        files: str
        delimiter: str
        header: bool
        watch: Duration | None
        forget_removed: bool
        split_bytes: Size
        name: str
        on_error: OnError


T = TypeVar("T")
V = TypeVar("V")

FORMATS = ("jsonl", "csv", "parquet", "avro")
SPLIT_BYTES = 64 << 20
SPLIT_BYTES_MIN = 1 << 10
FILE_RECORDS, RECORD_BYTES = 1_000, 64
"""The records of a file, as bounded work guesses them: so many, and one for so many bytes."""
NAME = re.compile(r"[A-Za-z0-9._-]*")


@dataclass(frozen=True, init=False, eq=False)
class FileSource(SplitSource[T]):
    """Reads the files of a folder, each once: ``FileSource("/data/orders", value=Order, files="*.jsonl.gz")``.

    - *path*: the folder, as an absolute path that all processes of the pipeline see, or as ``s3://BUCKET/PREFIX`` or
      ``hdfs://HOST:PORT/FOLDER``. Folders below it count, too, except in HDFS. Files and folders whose names begin with
      a dot or an underscore are left out.
    - *value*: the type of a record; of "jsonl" also a codec.
    - *files*: the pattern of the files' paths below the folder, as ``"*.csv"`` or ``"2026-*/orders-?.csv"``.
    - *format*: "jsonl", a value of JSON per line (or what the codec says), "csv" with the names of the columns in the
      first line, "parquet", or "avro". Names of "jsonl" and "csv" files that end in .gz or .zst are decompressed.
    - *delimiter*: between the cells of a row of "csv".
    - *header*: whether the first line of "csv" names the columns; else they are the fields of *value* in their order.
    - *watch*: an interval, as "10s", in which new files are looked for while the pipeline runs. None: only at its
      start, and the source ends once all are read.
    - *forget_removed*: a file that was read and removed is left out of checkpoints, so that there may be any number in
      time. Then its name may come back, and is read anew, also where its folder was only not mounted for a while. A run
      must have seen that the file was gone, see `watch`.
    - *name*: its name in checkpoints and errors, where several sources of a pipeline read one folder.
    - *split_bytes*: the size of the parts, read in parallel, of a larger file of "jsonl" or "parquet".
    - *on_error*, *time*: as of `KafkaSource`, of each part of a file.

    A file must be whole when it appears, as after a rename, and must not change. Once it is read, it may be removed.
    """

    path: str
    format: str
    files: str
    watch: Duration | None
    forget_removed: bool
    split_bytes: Size
    name: str
    value_type: Any

    # type checkers see no TypeForm in ``Order | None`` where there are overloads: hence the second one of each
    @overload
    def __init__(
        self: FileSource[V], path: str | os.PathLike[str], *, value: TypeForm[V] | Codec[V],
        time: TimeOf[V] | None = ..., **options: Unpack[_Options],
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self: FileSource[Any], path: str | os.PathLike[str], *, value: Any, time: TimeOf[Any] | None = ...,
        **options: Unpack[_Options],
    ) -> None: ...  # fmt: skip
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        value: Any,
        format: str = "jsonl",
        files: str = "*",
        delimiter: str = ",",
        header: bool = True,
        watch: Duration | None = None,
        forget_removed: bool = False,
        split_bytes: Size = SPLIT_BYTES,
        name: str = "",
        on_error: OnError = "fail",
        time: TimeOf[Any] | None = None,
    ) -> None:
        where = f"{location(caller())}: FileSource"  # a path may hold a password
        if format not in FORMATS:
            raise GraphError(f"{where}: format={format!r} must be one of {', '.join(map(repr, FORMATS))}")
        if isinstance(value, Codec) and format != "jsonl":
            raise GraphError(f"{where}: value= is a codec, and the rows of {format} have columns: give a type")
        try:
            reading = _format(format, value, delimiter, header)
            reading.describe()
        except shape.UnsupportedType as error:
            raise GraphError(f"{where}: {error}") from None
        fields = {
            "path": os.fspath(path) if is_url(os.fspath(path)) else os.path.normpath(path),
            "format": format,
            "files": files,
            "watch": watch,
            "endless": watch is not None,
            "forget_removed": forget_removed,
            "split_bytes": split_bytes,
            "name": name,
            "on_error": on_error,
            "time": time,
            "value_type": value.type if isinstance(value, Codec) else value,
            "_reading": reading,
        }
        for field, content in fields.items():
            object.__setattr__(self, field, content)

    _reading: FileFormat

    @overload
    @classmethod
    def records(
        cls, path: str | os.PathLike[str], *, value: TypeForm[V] | Codec[V], time: TimeOf[Record[V]] | None = ...,
        **options: Unpack[_Options],
    ) -> FileSource[Record[V]]: ...  # fmt: skip
    @overload
    @classmethod
    def records(
        cls, path: str | os.PathLike[str], *, value: Any, time: TimeOf[Any] | None = ..., **options: Unpack[_Options]
    ) -> FileSource[Record[Any]]: ...
    @classmethod
    def records(cls, path: str | os.PathLike[str], *, value: Any, **options: Any) -> FileSource[Any]:
        """Reads files as `Record`: `topic` is the file, `partition` the number of its part, `offset` the record's
        number in that from 0 on, `timestamp_ms` the time of the file, and `key` None.

        Takes the arguments of `FileSource`; a function for *time* takes the `Record`.
        """
        source = cls(path, value=value, **options)
        object.__setattr__(source, "metadata", True)
        return source

    @property
    def type(self) -> Any:
        return Record[self.value_type] if self.metadata else self.value_type  # type: ignore[name-defined]  # at run time

    @property
    def timed_type(self) -> Any:
        return self.value_type

    @property
    def place(self) -> str:
        return f"{self._url}#{self.name}" if self.name else self._url

    @property
    def _url(self) -> str:
        """The folder's name for people and checkpoints, without secrets; it has a colon."""
        return self.path.rstrip("/") if is_url(self.path) else f"file:{self.path}"

    @property
    def looks_at(self) -> str:
        return f"{self.place}: no file matches files={self.files!r}"

    def _store(self) -> FileStore:
        return store_of(self.path, "The source")

    def finder(self, source: str, topics: Any = None) -> FileFinder:
        interval_s = None if self.watch is None else duration_ms(self.watch) / 1000
        return FileFinder(
            source,
            self._store(),
            self._url,
            self.place,
            self.files,
            self._parts,
            interval_s,
            forgets_removed=self.forget_removed,
        )

    def _parts(self, file: StoredFile) -> Sequence[tuple[int, int]]:
        with closing(self._store().open(file)) as stream:
            return self._reading.parts(file, stream, byte_count(self.split_bytes))

    def left(self, position: SourceOffset) -> int:
        """A guess by the size of the file."""
        if position.ended or position.topic_id == NO_FILE:
            return 0
        split = FileSplit.parse(position.topic_id)
        whole = (split.begin, split.end) == (0, WHOLE)
        size = split.file_size if whole else min(split.file_size, byte_count(self.split_bytes))
        return max(1, FILE_RECORDS + size // RECORD_BYTES - position.offset)

    def open_split(self, position: SourceOffset) -> OpenSplit:
        if position.topic_id == NO_FILE:
            return NoFile(position.topic)
        return OpenFile(position, self._store(), self._url, self._reading)

    def decoder(self) -> SplitDecoder:
        decoder = self._reading.decoder()
        return PlacedDecoder(decoder) if self.metadata else decoder

    def grants(self, user: str) -> Grants | None:
        """See `Source`."""
        if not self.path.startswith("s3://"):
            return None
        return s3_grants(self.path, user, on_objects=("s3:GetObject",), on_bucket=("s3:ListBucket",))

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from self._reading.problems()
        yield from path_problems(self.path)
        if not isinstance(self.files, str) or not self.files:
            yield f'files={self.files!r} must be a pattern, as "*.csv"'
        if not isinstance(self.name, str) or not NAME.fullmatch(self.name):
            yield f"name={self.name!r} must be of letters, digits, '.', '_' and '-'"
        yield from size_problems(self.split_bytes, "split_bytes", least=SPLIT_BYTES_MIN)
        if self.watch is not None:
            yield from duration_problems(self.watch, "watch", least_ms=0)

    def describe(self) -> dict[str, Any]:
        """The folder and the format; how large the parts are is noted with each of them."""
        return {
            "source": "files",
            "path": self._url,
            "files": self.files,
            **self._reading.describe(),
            **({"metadata": True} if self.metadata else {}),
            **self.describe_time(),
        }


def _format(name: str, value: Any, delimiter: str, header: bool) -> FileFormat:
    match name:
        case "csv":
            return Csv(value, delimiter, header)
        case "parquet":
            return Parquet(value)
        case "avro":
            return Avro(value)
    return JsonLines(codec_for(value))


class NoFile(OpenSplit):
    """A split that only has a number; see `finding.NO_FILE`."""

    ended = True

    def __init__(self, name: str) -> None:
        self.name = name

    def read(self, records_max: int) -> list[Any]:
        return []


class OpenFile(OpenSplit):
    """A file, or a part of it."""

    ended = False

    def __init__(self, position: SourceOffset, store: FileStore, url: str, reading: FileFormat) -> None:
        self._position, self._store = position, store
        self._split = split = FileSplit.parse(position.topic_id)
        self.name = f"{url}/{split.name}"
        self._file = self._unchanged()
        self.time_ms = self._file.written_at_ms
        self._stream = self._opened()
        self._blocks = reading.blocks(self._stream, self._file, split, position.offset)
        self._block: list[Any] = []
        self._at = 0
        self._fill()
        if self.ended:
            self._require_reached(reading)

    def _opened(self) -> BinaryIO:
        try:
            return self._store.open(self._file)
        except FileNotFoundError:
            raise gone(self._position, self._split) from None

    def _unchanged(self) -> StoredFile:
        file = self._store.look(self._split.name)
        if file is None:
            raise gone(self._position, self._split)
        if file.version != self._split.version:
            raise changed(self._position, self._split)
        return file

    def _fill(self) -> None:
        """The next block; at the end of the file what was read must be what was found."""
        self._block, self._at = next(self._blocks, []), 0
        if not self._block:
            file = self._store.look(self._split.name)
            if file is not None and file.version != self._split.version:
                raise changed(self._position, self._split)
            self.ended = True

    def _require_reached(self, reading: FileFormat) -> None:
        """Raise Halt if the split ends before its position."""
        if self._position.offset:
            with closing(self._opened()) as stream:
                blocks = reading.blocks(stream, self._file, self._split, 0)
                require_reached(self._position, self.name, sum(map(len, blocks)))

    def read(self, records_max: int) -> list[Any]:
        read: list[Any] = []
        while len(read) < records_max and not self.ended:
            end = self._at + records_max - len(read)
            read += self._block[self._at : end]
            self._at = end
            if end >= len(self._block):
                self._fill()
        return read

    def buffered(self) -> int:
        return len(self._block) - self._at

    def close(self) -> None:
        self._stream.close()

"""A folder of files as a sink: the description. It opens nothing."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, TypeVar

from exactlyonce.connectors.filestore.store import path_problems
from exactlyonce.pipeline import shape
from exactlyonce.pipeline.columns import RowField, columns_of, fields_of
from exactlyonce.pipeline.durations import Duration, duration_ms, duration_problems
from exactlyonce.pipeline.extras import needing
from exactlyonce.pipeline.grants import Grants, s3_grants
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.sink import EXACTLY_ONCE, Sink, StoreDelivery, StoredRow, StoredRows
from exactlyonce.pipeline.sizes import Size, byte_count, size_problems
from exactlyonce.sinks.committer import CommitterContext
from exactlyonce.sinks.files import partitions
from exactlyonce.sinks.files.avro import Avro, avro_record
from exactlyonce.sinks.files.committer import FilesCommitter
from exactlyonce.sinks.files.format import FileFormat, JsonLines, PartitionedEncoder
from exactlyonce.sinks.files.layout import WriterId, hidden_folder
from exactlyonce.sinks.files.place import Place
from exactlyonce.sinks.files.writer import FilesWriter, StagedFiles, drop_older
from exactlyonce.sinks.sql.table import rows_of_table
from exactlyonce.sinks.writer import Opened, WriterContext

T = TypeVar("T")

FORMATS = ("parquet", "jsonl", "avro")
ROLL_BYTES_MIN = 1 << 10

S3_ON_OBJECTS = (
    "s3:PutObject", "s3:GetObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"
)  # fmt: skip
S3_ON_BUCKET = ("s3:ListBucket", "s3:ListBucketMultipartUploads", "s3:GetLifecycleConfiguration")
"""The rights in S3; the last is for `exactlyonce doctor`."""


@dataclass(frozen=True, eq=False)
class FileSink(Sink[T]):
    """Writes files into a folder, exactly once: a file appears whole, after its checkpoint was decided, and once.

    - *path*: the folder, as an absolute path, made if its parent exists, which all processes of the pipeline see; or
      `s3://bucket/prefix` or `hdfs://host:port/folder`.
    - *format*: "parquet" or "avro", with the fields of the record's type as columns, or "jsonl", an object per line.
    - *partition_by*: fields whose values are in the names of folders (`day=2026-11-22/`), and not in the files.
    - *roll_bytes*: the size at which a file is closed, and another one begun.
    - *roll_interval*: the age, as "10m", at which a file is closed when the next row comes. A barrier closes all files,
      so only one shorter than the checkpoint interval has an effect.
    - *delivery*: "exactly_once"; "at_least_once": files appear at the barrier, and after a failure rows come again.
    """

    path: str | os.PathLike[str]
    _: KW_ONLY
    format: Literal["parquet", "jsonl", "avro"] = "parquet"
    partition_by: tuple[str, ...] = ()
    roll_bytes: Size = 128 << 20
    roll_interval: Duration | None = None
    delivery: StoreDelivery = "exactly_once"

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", os.fspath(self.path))

    @property
    def transactional(self) -> bool:
        """False: files wait in no Kafka transaction."""
        return False

    # --- problems ---------------------------------------------------------------------------------------------------

    def problems(self, type_: Any) -> Iterator[str]:
        """The problems of the folder and the options, and of the type for the format."""
        yield from path_problems(os.fspath(self.path))
        if self.format not in FORMATS:
            yield f"format={self.format!r} must be one of {', '.join(map(repr, FORMATS))}"
        yield from size_problems(self.roll_bytes, "roll_bytes", least=ROLL_BYTES_MIN)
        if self.roll_interval is not None:
            yield from duration_problems(self.roll_interval, "roll_interval", least_ms=0)
        by = self.partition_by
        if not isinstance(by, tuple) or not all(isinstance(name, str) and name for name in by):
            yield f'partition_by={by!r} must be names of fields: partition_by=("day",)'
        elif len(set(by)) < len(by):
            yield f"partition_by={by!r} names a field twice: name each once"
        elif type_ is not UNKNOWN and self.format in FORMATS:
            yield from self._type_problems(type_)

    def _type_problems(self, type_: Any) -> Iterator[str]:
        try:
            typed = self.format != "jsonl"
            columns = columns_of(type_) if typed else ()
            if self.format == "avro":
                avro_record(columns, "row")
            fields = fields_of(type_) if self.partition_by or typed else ()
            shape.describe(type_)
        except shape.UnsupportedType as error:
            yield str(error)
            return
        yield from partitions.problems(self.partition_by, fields)

    def grants(self, user: str, type_: Any, *, creates: bool) -> Grants | None:
        """See `Sink`."""
        path = os.fspath(self.path)
        if not path.startswith("s3://"):
            return None
        return s3_grants(path, user, on_objects=S3_ON_OBJECTS, on_bucket=S3_ON_BUCKET)

    @property
    def shown(self) -> str:
        """Folder, format and partitions."""
        by = f" by {', '.join(self.partition_by)}" if self.partition_by else ""
        return f"{self.path} {self.format}{by}"

    def describe(self, type_: Any) -> dict[str, Any]:
        """Folder, format, partitions, and the records' schema, without the rolling of files."""
        return {
            "sink": "files",
            "path": self.path,
            "format": self.format,
            "partition_by": list(self.partition_by),
            "delivery": self.delivery,
            "value": shape.describe(type_),
        }

    def stored_rows(self, type_: Any) -> StoredRows[Any]:
        """See `Sink`: the columns, or the records as lines have them."""
        if self.format != "jsonl":
            return rows_of_table(type_, "append", (), os.fspath(self.path))

        def lines(records: Sequence[Any]) -> list[StoredRow]:
            return [StoredRow(None, record) for record in records]

        return StoredRows(os.fspath(self.path), "", lines)

    # --- committer and writer ---------------------------------------------------------------------------------------

    @property
    def stages(self) -> bool:
        """Whether it is exactly once."""
        return self.delivery == EXACTLY_ONCE

    def open_committer(self, context: CommitterContext) -> FilesCommitter:
        self._format(context.type)
        return FilesCommitter(self._place(context), context.pipeline, context.sink)

    def open_writer(self, context: WriterContext) -> Opened:
        """See `Writable`. Without a committer that cleans up after a crash, this does so."""
        place = self._place(context, waits=True)
        if not self.stages:
            with place.explained():
                drop_older(place, context.incarnation, context.attempt)
        format_ = self._format(context.type)
        interval_ms = None if self.roll_interval is None else duration_ms(self.roll_interval)
        files = StagedFiles(
            place=place,
            writer=WriterId(context.incarnation, context.attempt, context.subtask, secrets.token_hex(8)),
            format=format_,
            roll_bytes=byte_count(self.roll_bytes),
            roll_interval_ms=interval_ms,
            clock=context.clients.clock,
        )
        publish = None if self.stages else place.publish_all
        encoder = PartitionedEncoder(self._partition_fields(context.type), format_, os.fspath(self.path))
        return Opened(FilesWriter(context.sink, context.subtask, files, publish), encoder)

    def _place(self, context: CommitterContext | WriterContext, *, waits: bool = False) -> Place:
        """*waits*: its requests are repeated while the target is away."""
        return Place(os.fspath(self.path), hidden_folder(context.pipeline, context.sink), waits=waits)

    def _partition_fields(self, type_: Any) -> list[RowField]:
        if not self.partition_by:
            return []
        fields = {field.name: field for field in fields_of(type_)}
        return [fields[name] for name in self.partition_by]

    def _format(self, type_: Any) -> FileFormat:
        if self.format == "jsonl":
            return JsonLines(self._fields_of_lines(type_), _tag_of(type_))
        columns = [column for column in columns_of(type_) if column.field.name not in self.partition_by]
        if self.format == "avro":
            return Avro(columns, shape.type_name(type_))
        with needing("files", "pyarrow", f"FileSink({self.path!r}, format={self.format!r})"):
            from exactlyonce.sinks.files.parquet import Parquet
        return Parquet(columns)

    def _fields_of_lines(self, type_: Any) -> list[RowField] | None:
        """The fields of a line; None: all, as msgspec writes them. It would write an array for positional records."""
        if not (shape.shape_of(type_).is_array or self.partition_by):
            return None
        return [field for field in fields_of(type_) if field.name not in self.partition_by]


def _tag_of(type_: Any) -> dict[str, Any]:
    """The tag of a record's type on the wire."""
    tag = shape.shape_of(type_).tag
    return {} if tag is None else dict([tag])

"""A table of Delta as a sink: the description. It opens nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeVar

from exactlyonce.checkpoint.records.storage_url import is_url
from exactlyonce.pipeline import shape
from exactlyonce.pipeline.sizes import Size
from exactlyonce.sinks.committer import CommitterContext
from exactlyonce.sinks.lake.sink import LakeSink, property_problems, sink_name, writer_id
from exactlyonce.sinks.lake.table import Lake, StagedFiles
from exactlyonce.sinks.sql.table import row_type
from exactlyonce.sinks.writer import SinkEncoder, WriterContext

T = TypeVar("T")
_LOGIN = re.compile("://[^@]*:[^@]*@")
_WEB = re.compile(
    r"https?://(?![^/]*\.(core\.windows\.net|fabric\.microsoft\.com|amazonaws\.com|r2\.cloudflarestorage\.com)(/|$))"
)
"""Addresses of the web, except of clouds that have their stores there."""


@dataclass(frozen=True, eq=False)
class DeltaSink(LakeSink[T], Generic[T]):
    """Writes rows to a table of Delta Lake, exactly once: a checkpoint is one version of the table.

    - *path*: the table's folder, as an absolute path, or its address (``s3://lake/totals``).
    - *mode*: "append" adds each record, and has no *key*; "upsert" replaces the row that has the record's *key*, or
      adds one.
    - *create*: create the table if it is missing, with the fields of the record's type as columns.
    - *storage_options*: for the file system of an address, as deltalake has them. A value may be ``env:NAME`` or
      ``file:/path``, and one with a secret must be.
    - *roll_bytes*: the size of rows in memory at which a subtask writes them as files, before its interval ends.
    """

    kind: ClassVar[str] = "delta"
    library: ClassVar[str] = "deltalake"

    path: str | os.PathLike[str]
    _: KW_ONLY
    mode: Literal["append", "upsert"] = "append"
    key: str | tuple[str, ...] = ()
    create: bool = False
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)
    roll_bytes: Size = 128 << 20

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", os.fspath(self.path))

    @property
    def full_name(self) -> str:
        return os.fspath(self.path)

    @property
    def address(self) -> str:
        return self.full_name

    def problems(self, type_: Any) -> Iterator[str]:
        """The problems of the arguments, and of the type as rows of a table."""
        if not is_url(self.full_name) and not self.full_name.startswith("/"):
            yield (
                f"{self.full_name!r} must be the table's path from / on: workers may run in another folder than this "
                f"process"
            )
        if _WEB.match(self.full_name):
            yield (
                f"{self.full_name!r} is a web address, and deltalake writes to none: give the address of the store, as "
                f"s3://bucket/table, and its server as AWS_ENDPOINT_URL in storage_options="
            )
        if _LOGIN.search(self.full_name):
            yield "its address holds a user and a password, which would be shown: give them in storage_options="
        if not isinstance(self.storage_options, Mapping):
            yield "storage_options= must be options with their values, as text"
        else:
            yield from property_problems("storage_options", self.storage_options)
        yield from super().problems(type_)

    def describe(self, type_: Any) -> dict[str, Any]:
        """Path, mode, key, and the records' schema."""
        described = {"sink": "delta", "path": self.path, "mode": self.mode, "key": list(self.key_columns)}
        return {**described, "value": shape.describe(row_type(type_, self.mode))}

    def _open_lake(self, context: CommitterContext) -> tuple[Lake, str]:
        with self._needing_library():
            from exactlyonce.sinks.delta.table import DeltaLake, TablePlace, ledger_application

        app = ledger_application(context.pipeline, context.sink)
        place = TablePlace(self.full_name, self.storage_options)
        lake = DeltaLake(
            place, self.columns(context.type), app, sink_name(context), self.key_columns, create=self.create
        )
        return lake, f"the transactions {app!r} of table {self.path}"

    def _open_files(self, context: WriterContext) -> tuple[StagedFiles, SinkEncoder]:
        with self._needing_library():
            from exactlyonce.sinks.delta.table import DeltaChanges, DeltaFiles, DeltaRows, TablePlace

        place = TablePlace(self.full_name, self.storage_options)
        with place.explained():
            table = place.load()
            rows = DeltaRows(self.columns(context.type), table, place.path, self.changed(context.type))
        folder, writer = sink_name(context), writer_id(context)
        if self.key_columns:
            return DeltaChanges(place, folder, writer), rows
        return DeltaFiles(place, rows.partition_by, folder, writer), rows

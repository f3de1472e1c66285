"""A table of Delta as a lake: staged Parquet files, and commits that write the ledger as transaction identifiers.

Invariants: a commit is the version after the one whose ledger was read, or it is refused: delta-rs retries none. So a
commit of an older incarnation is refused, whenever it lands. Identifiers outlive the expiry of the log.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import date, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable
from deltalake._internal import DeltaFileSystemHandler
from deltalake.exceptions import CommitFailedError, DeltaError, DeltaProtocolError, TableNotFoundError
from deltalake.transaction import AddAction, Transaction

from exactlyonce.checkpoint.records.storage_url import is_url
from exactlyonce.connectors import refusals
from exactlyonce.connectors.filestore.local import local_path, sync
from exactlyonce.pipeline.arrow import arrow_schema
from exactlyonce.pipeline.columns import Column
from exactlyonce.pipeline.errors import ConfigError, StoreError, StoreUnavailable
from exactlyonce.pipeline.secrets import look_up, masked
from exactlyonce.sinks.files.layout import WriterId
from exactlyonce.sinks.lake.columns import DELETED, TableRows, last_of_each, matched
from exactlyonce.sinks.lake.sink import refers
from exactlyonce.sinks.lake.table import (
    BEGUN,
    NO_BUCKET,
    RIGHTS,
    Conflict,
    StagedInterval,
    StagedNames,
    changed,
    decode_begun,
    encode_begun,
    gone,
    has_no_bucket,
    is_denied,
    left_over,
    parts_of,
)
from exactlyonce.sinks.ledger import SinkLedger
from exactlyonce.sinks.sql.fields import ChangedRows

STAGED = "_exactlyonce"
"""The folder for lists of staged files; readers and vacuum leave out names with an underscore."""
TEXT_STATISTICS_MAX = 64
"""Longer texts are in no statistics."""
WRITER_VERSION_MAX = 2
EXPIRY = "delta.setTransactionRetentionDuration"
FEATURES = {
    "appendOnly", "changeDataFeed", "deletionVectors", "invariants", "timestampNtz", "v2Checkpoint",
    "vacuumProtocolCheck",
}  # fmt: skip
"""Features of tables that an added file of plain Parquet agrees with; invariants only while there are none."""
NOT_MERGED = {"appendOnly", "deletionVectors"}
"""Features that exclude merges by delta-rs."""
_OWN_RULES = re.compile(r"delta\.(constraints\.|columnMapping\.mode$|identity|generationExpression|invariants)")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_CAUSE = "↳"
_NO_TLS = "URL scheme is not allowed"
_AWAY = re.compile(r"timed? ?out|connect|dns|\b50[03]\b|reset|refused|unavailable|No space", re.IGNORECASE)


class StagedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file in the list of a committable, as the table's log describes it."""

    path: str
    size: int
    rows: int
    partition: dict[str, str | None]
    statistics: str


class StagedList(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a committable: the file that lists its files."""

    path: str
    size: int
    partition_by: tuple[str, ...]
    rows: int
    parts: int = 0
    """See `lake.table`."""


encode_body = msgspec.msgpack.Encoder().encode
decode_body = msgspec.msgpack.Decoder(StagedList).decode
encode_files = msgspec.json.Encoder().encode
decode_files = msgspec.json.Decoder(list[StagedFile]).decode


class TablePlace:
    """Where a table is, and its errors as ours. No error text has a secret in it."""

    def __init__(self, path: str, options: Mapping[str, str]) -> None:
        self.path, self._given = path, options
        self._folder = local_path(path)

    @property
    def options(self) -> dict[str, str]:
        """The storage options, with secrets looked up anew."""
        limits = S3_LIMITS if is_s3(self.path) else {}
        return {**limits, **self._given, **self._secrets()}

    def _secrets(self) -> dict[str, str]:
        given = {name: value for name, value in self._given.items() if refers(value)}
        return {name: look_up(f"storage_options[{name!r}]", value) for name, value in given.items()}

    def find(self) -> DeltaTable:
        """The table as it is; `TableNotFoundError` if there is none."""
        return DeltaTable(self.path, storage_options=self.options)

    def load(self) -> DeltaTable:
        """The table, which was there at the check; `StoreUnavailable` if it is gone."""
        try:
            return self.find()
        except TableNotFoundError as error:
            if is_denied(error):
                raise
            raise self.away() from None

    @cached_property
    def files(self) -> Any:
        """The table's folder, as a file system: pyarrow's for S3, as delta-rs' stops all threads during a request.

        It keeps the secrets of its connection, so another one is made after each error.
        """
        if is_s3(self.path):
            return s3_file_system(self.path, self.options)
        return DeltaFileSystemHandler(self.path, self.options)

    def away(self) -> StoreUnavailable:
        """The error while the table's disk is away."""
        return refusals.passing(f"Delta table {self.path}", "is its disk mounted?", "there is no table")

    def require_table(self) -> None:
        """`StoreUnavailable` unless the table is on its disk; an address that is no folder of this machine has none."""
        if self._folder is not None and not (self._folder / "_delta_log").is_dir():
            raise self.away()

    def require_whole(self, sizes: Mapping[str, int]) -> None:
        """Raise `StoreError` unless all of these files are there, and of these sizes in bytes."""
        for info in self.files.get_file_info(list(sizes)) if sizes else ():
            if info.type is pa_fs.FileType.NotFound:
                raise gone(info.path, "VACUUM with a retention")
            if info.size != sizes[info.path]:
                raise changed(info.path, info.size, sizes[info.path])

    def read(self, path: str, size: int) -> bytes:
        """The content of a file of the table; `StoreError` if it is gone, or not of *size* bytes."""
        self.require_whole({path: size})
        content: bytes = self.files.open_input_file(path).read(size)
        return content

    def get(self, path: str) -> bytes:
        """The content of a file of the table."""
        (info,) = self.files.get_file_info([path])
        content: bytes = self.files.open_input_file(path).read(info.size) if info.size else b""
        return content

    def names_in(self, folder: str) -> list[str]:
        """The names of the files in a folder; none if it is missing."""
        if is_s3(self.path):
            found = self.files.get_file_info(pa_fs.FileSelector(folder, allow_not_found=True))
        else:
            found = self.files.get_file_info_selector(folder, True, False)
        return [info.base_name for info in found if info.type is pa_fs.FileType.File]

    def remove(self, path: str) -> None:
        """Remove a file, unless it is gone."""
        with suppress(FileNotFoundError):
            self.files.delete_file(path)

    def write(self, path: str, content: bytes) -> None:
        """Write a durable file."""
        self.require_table()
        file = self.files.open_output_stream(path)
        file.write(content)
        file.close()
        if self._folder is not None:
            sync([self._folder / path], self._folder)
            self.require_table()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn errors of deltalake into ours."""
        try:
            yield
        except (StoreError, StoreUnavailable, ConfigError, Conflict):
            raise
        except TableNotFoundError as error:
            if is_denied(error):
                raise self._explained(error) from None
            raise StoreError(
                f"There is no Delta table at {self.path}. Create it, set create=True, or correct the path."
            ) from None
        except CommitFailedError as error:
            raise Conflict(self._text(error)) from None
        except (DeltaError, OSError, pa.ArrowException) as error:
            vars(self).pop("files", None)
            raise self._explained(error) from None

    def _text(self, error: BaseException) -> str:
        """The first line, and delta-rs' causes of it, without their colours."""
        text = _COLOURS.sub("", masked(str(error), self._secrets().values()))
        first, *others = [line.strip() for line in text.strip().splitlines()] or [type(error).__name__]
        causes = [line.removeprefix(_CAUSE).strip() for line in others if line.startswith(_CAUSE)]
        return ": ".join([first, *causes]).rstrip(".")

    def _explained(self, error: Exception) -> StoreError | StoreUnavailable:
        where, text = f"Delta table {self.path}", self._text(error)
        if isinstance(error, DeltaProtocolError):
            return refusals.refused(where, text, "Write it with another program, or make a table without the feature.")
        if is_denied(error):
            advice = f", in S3 {RIGHTS}" if is_s3(self.path) else ""
            return refusals.refused(where, text, f"Give this user the right to read and write its folder{advice}.")
        if has_no_bucket(error):
            return refusals.refused(where, NO_BUCKET, "Create it, or correct the path.")
        if _NO_TLS in text:
            return refusals.refused(
                where, text, 'An endpoint of http:// needs "AWS_ALLOW_HTTP": "true" in storage_options=.'
            )
        if isinstance(error, OSError) or _AWAY.search(text):
            return refusals.passing(where, "its folder cannot be read or written", text)
        return refusals.refused(where, text, "Correct the table, or the sink.")


_IN_PARTITIONS = (pa.types.is_string, pa.types.is_integer, pa.types.is_date32, pa.types.is_boolean)


def require(table: DeltaTable, columns: Sequence[Column], path: str, key: Sequence[str]) -> None:
    """Raise `StoreError` unless *table* takes files of *columns*, or merges with a *key*."""
    protocol, configuration = table.protocol(), table.metadata().configuration
    features = set(protocol.writer_features or ())
    known = FEATURES - NOT_MERGED if key else FEATURES
    if protocol.min_writer_version > WRITER_VERSION_MAX and not features:
        wanted = f"writer version {protocol.min_writer_version}"
    else:
        wanted = ", ".join(sorted(features - known))
    rules = sorted(name for name, value in configuration.items() if _OWN_RULES.match(name) and value != "none")
    for field in table.schema().fields:
        rules += [f"{name} of {field.name}" for name in field.metadata if _OWN_RULES.match(name)]
    if wanted or rules:
        raise StoreError(
            f"Delta table {path} needs a writer that knows {wanted or ', '.join(rules)}, and rows are added as plain "
            f"files: make a table without it."
        )
    if EXPIRY in configuration:
        raise StoreError(
            f"Delta table {path} has the property {EXPIRY}, after which transactions expire, and the ledger is made of "
            f"them: rows would come twice. Remove it: ALTER TABLE ... UNSET TBLPROPERTIES ('{EXPIRY}')."
        )
    present = columns_of_table(table)
    matched(columns, present, path)
    partition_by = table.metadata().partition_columns
    if not key and {column.field.name for column in columns} <= set(partition_by):
        raise StoreError(
            f"Delta table {path} is partitioned by all fields of the record, and its files would have no column: add a "
            f"field that is no partition, or take one out of the partitions."
        )
    for name in partition_by:
        if not any(fits(present.field(name).type) for fits in _IN_PARTITIONS):
            raise StoreError(
                f"Delta table {path} is partitioned by {name!r}, a column of {present.field(name).type}: make a table "
                f"partitioned by text, integers, dates or booleans."
            )
        if name not in {column.field.name for column in columns}:
            raise StoreError(f"Delta table {path} is partitioned by {name!r}, and no field has that name: add one.")


def columns_of_table(table: DeltaTable) -> Any:
    """The columns of *table*, as Arrow."""
    return pa.schema(table.schema().to_arrow())


class DeltaLake:
    """See `Lake`. *app*: the name of the ledger; *folder*: of the sink's staged files; *key*: columns by which
    rows are replaced, or none to append."""

    def __init__(
        self, place: TablePlace, columns: Sequence[Column], app: str, folder: str, key: Sequence[str], *, create: bool
    ) -> None:
        self.place, self.columns, self.app, self.key = place, columns, app, key
        self.folder, self._create = folder, create
        self._table: DeltaTable | None = None

    def check(self) -> None:
        """See `Lake`; also writes a file into the table's folder, and removes it."""
        place = self.place
        with place.explained():
            if self._create:
                self._require_parent()
                schema = arrow_schema(self.columns)
                with suppress(CommitFailedError):  # another process has just created it
                    DeltaTable.create(place.path, schema, mode="ignore", storage_options=place.options)
            self.inspect()
            probe = f"{STAGED}/probe-{secrets.token_hex(8)}"
            place.write(probe, b"probe")
            place.files.delete_file(probe)

    def inspect(self) -> None:
        with self.place.explained():
            require(self.place.find(), self.columns, self.place.path, self.key)

    def _require_parent(self) -> None:
        parent = Path(self.place.path).parent
        if not is_url(self.place.path) and not parent.is_dir():
            raise StoreError(
                f"Delta table {self.place.path} cannot be made: {parent} is missing, or is not a folder. Make it, "
                f"mount it, or correct the path."
            )

    def load(self) -> LoadedDelta:
        """See `Lake`."""
        with self.place.explained():
            return LoadedDelta(self, self.place.load())

    def close(self) -> None:
        """There is no connection."""


class LoadedDelta:
    """See `LoadedTable`."""

    def __init__(self, lake: DeltaLake, table: DeltaTable) -> None:
        self._lake, self._table = lake, table
        self.ledger = read_ledger(lake.app, table.transaction_version)
        self.growth = ""  # the log has checkpoints, and expires by itself

    def commit(self, ledger: SinkLedger, staged: Sequence[bytes], checkpoint: int) -> None:
        """See `LoadedTable`. Data files keep their places."""
        lake, table, bodies = self._lake, self._table, [decode_body(body) for body in staged]
        with lake.place.explained():
            properties = CommitProperties(
                custom_metadata={"exactlyonce": f"{lake.app} checkpoint {checkpoint}"},
                max_commit_retries=0,
                app_transactions=[Transaction(*change) for change in ledger_changes(lake.app, self.ledger, ledger)],
            )
            listed = [(body, decode_files(lake.place.read(body.path, body.size))) for body in bodies]
            if bodies:
                require(table, lake.columns, lake.place.path, lake.key)
            for body, files in listed:
                self._require_whole(body, files)
            if lake.key and bodies:
                self._merge([file for _, files in listed for file in files], properties)
            else:
                self._add([file for _, files in listed for file in files], properties)

    def forget(self, staged: Sequence[bytes]) -> None:
        place, suffix = self._lake.place, "parquet" if self._lake.key else BEGUN
        with place.explained():
            for body in map(decode_body, staged):
                for path in (*parts_of(body.path, body.parts, suffix), body.path):
                    place.remove(path)

    def sweep(self, incarnation: int, attempt: int) -> None:
        """See `LoadedTable`. Files that delta-rs has written for a merge are VACUUM's."""
        folder, place = f"{STAGED}/{self._lake.folder}", self._lake.place
        with place.explained():
            for name in left_over(place.names_in(folder), incarnation, attempt):
                path = f"{folder}/{name}"
                if name.endswith(BEGUN):
                    for file in decode_begun(place.get(path)):
                        place.remove(file)
                place.remove(path)

    def _add(self, files: Sequence[StagedFile], properties: CommitProperties) -> None:
        """Commit *files* as they are."""
        table = self._table
        now_ms = time.time_ns() // 1_000_000  # noqa: TID251 - a file's time in the table's log
        adds: list[Any] = [
            AddAction(file.path, file.size, file.partition, now_ms, True, file.statistics) for file in files
        ]
        partition_by = table.metadata().partition_columns
        table.create_write_transaction(adds, "append", table.schema(), partition_by, commit_properties=properties)

    def _merge(self, files: Sequence[StagedFile], properties: CommitProperties) -> None:
        """Commit the rows of *files*, the last of each key."""
        key = self._lake.key
        parts = [pq.read_table(pa.BufferReader(self._lake.place.read(file.path, file.size))) for file in files]
        rows = last_of_each(pa.concat_tables(parts), key)
        predicate = " AND ".join(f"target.{_quoted(name)} = source.{_quoted(name)}" for name in key)
        merge = self._table.merge(
            rows, predicate, source_alias="source", target_alias="target", commit_properties=properties
        )
        if DELETED in rows.schema.names:
            gone, told = f"source.{_quoted(DELETED)}", [DELETED]
            merge = merge.when_matched_delete(gone).when_matched_update_all(except_cols=told)
            merge.when_not_matched_insert_all(f"NOT {gone}", told).execute()
        else:
            merge.when_matched_update_all().when_not_matched_insert_all().execute()

    def _require_whole(self, body: StagedList, files: Sequence[StagedFile]) -> None:
        """Raise `StoreError` unless all files of a committable are whole, and fit the table as it is now."""
        place = self._lake.place
        if not self._lake.key and list(body.partition_by) != self._table.metadata().partition_columns:
            raise StoreError(f"Delta table {place.path} was partitioned anew since rows were set aside: undo it.")
        if sum(file.rows for file in files) != body.rows:
            raise StoreError(f"{body.path} does not list the {body.rows:,} rows that were written: it was changed.")
        place.require_whole({file.path: file.size for file in files})


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


class DeltaRows(TableRows):
    """The `SinkEncoder` for *table*, which also refuses what a partition would change."""

    def __init__(
        self, columns: Sequence[Column], table: DeltaTable, path: str, changed: ChangedRows | None = None
    ) -> None:
        schema = columns_of_table(table)
        super().__init__(columns, matched(columns, schema, path), changed)
        self.partition_by = table.metadata().partition_columns
        self._partitions = [name for name in self.partition_by if pa.types.is_string(schema.field(name).type)]

    def encode(self, records: Sequence[Any]) -> Any:
        batch = super().encode(records)
        for name in self._partitions:
            if pc.any(pc.equal(batch.column(name), "")).as_py():
                raise ValueError(f"{name}: '' would become null, for the table is partitioned by it")
        return batch


class DeltaFiles:
    """See `StagedFiles`. *folder* has the sink's staged files."""

    def __init__(self, place: TablePlace, partition_by: Sequence[str], folder: str, writer: WriterId) -> None:
        self._place, self._partition_by, self._name = place, tuple(partition_by), f"{folder}-{writer}"
        self._staged = StagedNames(f"{STAGED}/{folder}", writer)
        self._files: list[StagedFile] = []
        self._number = 0

    def require_table(self) -> None:
        with self._place.explained():
            self._place.require_table()

    def write(self, rows: Any) -> None:
        with self._place.explained():
            parts = list(_partitioned(rows, self._partition_by))
            paths = [self._path() for _ in parts]
            self._place.write(self._staged.part(BEGUN), encode_begun(paths))
            for path, (values, part) in zip(paths, parts, strict=True):
                self._files.append(self._written(path, values, part))

    def _written(self, path: str, partition: dict[str, str | None], rows: Any) -> StagedFile:
        output, collected = pa.BufferOutputStream(), list[Any]()
        with pq.ParquetWriter(output, rows.schema, metadata_collector=collected) as writer:
            writer.write_table(rows)
        content = output.getvalue().to_pybytes()
        self._place.write(path, content)
        statistics = json.dumps(_statistics(collected[0]))
        return StagedFile(
            path=path, size=len(content), rows=collected[0].num_rows, partition=partition, statistics=statistics
        )  # fmt: skip

    def _path(self) -> str:
        self._number += 1
        return f"part-{self._name}-{self._number}.parquet"

    def cut(self, checkpoint: int) -> StagedInterval:
        """See `StagedFiles`."""
        files, self._files = self._files, []
        (path, parts), listing = self._staged.end("json"), encode_files(files)
        with self._place.explained():
            self._place.write(path, listing)
        rows = sum(file.rows for file in files)
        body = StagedList(path=path, size=len(listing), partition_by=self._partition_by, rows=rows, parts=parts)
        return StagedInterval(encode_body(body), rows)

    def close(self) -> None:
        """There is no connection."""


class DeltaChanges(DeltaFiles):
    """Files of rows to be merged, in their order; they are never the table's."""

    def __init__(self, place: TablePlace, folder: str, writer: WriterId) -> None:
        super().__init__(place, (), folder, writer)

    def write(self, rows: Any) -> None:
        with self._place.explained():
            self._files.append(self._written(self._staged.part("parquet"), {}, rows))


def _partitioned(rows: Any, partition_by: Sequence[str]) -> Iterator[tuple[dict[str, str | None], Any]]:
    """*rows* by the values of these columns, as a table's log writes them, and without the columns."""
    if not partition_by:
        yield {}, rows
        return
    for values in rows.group_by(list(partition_by)).aggregate([]).to_pylist():
        chosen = pa.array([True] * rows.num_rows)
        for name, value in values.items():
            column = rows.column(name)
            same = pc.is_null(column) if value is None else pc.equal(column, pa.scalar(value, column.type))
            chosen = pc.and_(chosen, same)
        part = rows.filter(chosen).drop_columns(list(partition_by)).combine_chunks()
        yield {name: _partition_text(value) for name, value in values.items()}, part


def _partition_text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    return value.isoformat() if isinstance(value, date) else str(value)


def _statistics(metadata: Any) -> dict[str, Any]:
    """The statistics of a file, of its columns that are no lists, maps or structs."""
    smallest: dict[str, Any] = {}
    largest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    columns = set(metadata.schema.to_arrow_schema().names)
    for column in range(metadata.num_columns):
        parts = [metadata.row_group(number).column(column) for number in range(metadata.num_row_groups)]
        name = parts[0].path_in_schema
        groups = [part.statistics for part in parts]
        if name not in columns or not all(group is not None and group.has_null_count for group in groups):
            continue
        nulls[name] = sum(group.null_count for group in groups)
        if all(group.has_min_max for group in groups):
            low = _bound(min(group.min for group in groups), up=False)
            high = _bound(max(group.max for group in groups), up=True)
            if low is not None and high is not None:
                smallest[name], largest[name] = low, high
    return {"numRecords": metadata.num_rows, "minValues": smallest, "maxValues": largest, "nullCount": nulls}


def _bound(value: Any, *, up: bool) -> Any:
    """A bound as JSON; None: it has no form that all readers know."""
    if isinstance(value, bool) or (isinstance(value, str) and len(value) > TEXT_STATISTICS_MAX):
        return None
    if isinstance(value, datetime):
        if up and value.microsecond % 1000:
            value += timedelta(milliseconds=1)
        zone = "" if value.tzinfo is None else "Z"
        return value.replace(tzinfo=None).isoformat(timespec="milliseconds") + zone
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, int | str) else None


# --- S3 ---------------------------------------------------------------------------------------------------------------

S3_LIMITS = {"timeout": "30s", "retry_timeout": "60s", "max_retries": "3"}
"""How long delta-rs waits for a store that does not answer, unless an option says otherwise. A repeated commit is
refused: it puts a file that must not exist."""
_CONNECT_TIMEOUT_S, _REQUEST_TIMEOUT_S, _ATTEMPTS_MAX = 5, 20, 3
_ENDPOINTS = ("endpoint", "endpoint_url", "endpoint_url_s3")


def is_s3(address: str) -> bool:
    """Whether *address* names a bucket of S3.

    >>> is_s3("s3://lake/totals"), is_s3("/s3/totals")
    (True, False)
    """
    return urlsplit(address).scheme in ("s3", "s3a")


def s3_file_system(address: str, options: Mapping[str, str]) -> Any:
    """The file system below *address*. An option that is not given has the source of every AWS client."""
    settings = {**_aws_settings(os.environ), **_aws_settings(options)}
    endpoint = urlsplit(next((settings[name] for name in _ENDPOINTS if name in settings), ""))
    store = pa_fs.S3FileSystem(
        access_key=settings.get("access_key_id"), secret_key=settings.get("secret_access_key"),
        session_token=settings.get("session_token", settings.get("token")),
        region=settings.get("region", settings.get("default_region")),
        endpoint_override=endpoint.netloc or None, scheme=endpoint.scheme or "https",
        force_virtual_addressing=settings.get("virtual_hosted_style_request", "").lower() == "true",
        connect_timeout=_CONNECT_TIMEOUT_S, request_timeout=_REQUEST_TIMEOUT_S,
        retry_strategy=pa_fs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS_MAX),
    )  # fmt: skip
    parts = urlsplit(address)
    return pa_fs.SubTreeFileSystem(f"{parts.netloc}{parts.path}".rstrip("/"), store)


def _aws_settings(options: Mapping[str, str]) -> dict[str, str]:
    """The settings of AWS, by their names without its prefix.

    >>> _aws_settings({"AWS_REGION": "eu-west-1", "aws_endpoint_url": "http://127.0.0.1:9000", "HOME": "/"})
    {'region': 'eu-west-1', 'endpoint_url': 'http://127.0.0.1:9000'}
    """
    lower = {name.lower(): value for name, value in options.items()}
    return {name.removeprefix("aws_"): value for name, value in lower.items() if name.startswith("aws_")}


# --- the ledger -------------------------------------------------------------------------------------------------------

_CHUNK_BYTES = 7
"""A number has 63 bits."""
_VersionOf = Callable[[str], int | None]


def ledger_application(pipeline: str, sink: str) -> str:
    """The name of the first of the ledger's transaction identifiers, which are an application's name and a number.

        exactlyonce/<pipeline>/<sink>              the incarnation that may commit
        exactlyonce/<pipeline>/<sink>/origin       the length of the checkpoint topic's id, in bytes
        exactlyonce/<pipeline>/<sink>/origin/<n>   seven of these bytes, as a number
        exactlyonce/<pipeline>/<sink>/subtasks     one more than the highest subtask
        exactlyonce/<pipeline>/<sink>/<subtask>    its checkpoint

    Every commit of ours writes the first one, so any two of one sink conflict; the table keeps the newest of each,
    without end, for none has a time. No name of a pipeline or sink has a slash in it.
    """
    return f"exactlyonce/{pipeline}/{sink}"


def read_ledger(app: str, version_of: _VersionOf) -> SinkLedger:
    """The ledger under the name *app*.

    >>> ledger = SinkLedger(incarnation=3, origin="a longer topic id", checkpoints={0: 7, 2: 9})
    >>> read_ledger("a", dict(ledger_changes("a", SinkLedger(), ledger)).get) == ledger
    True
    >>> dict(ledger_changes("a", ledger, SinkLedger(incarnation=3, origin=ledger.origin, checkpoints={0: 8, 2: 9})))
    {'a': 3, 'a/0': 8}
    """
    incarnation = version_of(app)
    if incarnation is None:
        return SinkLedger()
    length = version_of(f"{app}/origin") or 0
    chunks = [version_of(f"{app}/origin/{number}") or 0 for number in range(-(-length // _CHUNK_BYTES))]
    origin = b"".join(chunk.to_bytes(_CHUNK_BYTES, "little") for chunk in chunks)[:length].decode()
    versions = {subtask: version_of(f"{app}/{subtask}") for subtask in range(version_of(f"{app}/subtasks") or 0)}
    checkpoints = {subtask: checkpoint for subtask, checkpoint in versions.items() if checkpoint is not None}
    return SinkLedger(incarnation=incarnation, origin=origin, checkpoints=checkpoints)


def ledger_changes(app: str, before: SinkLedger, after: SinkLedger) -> Iterator[tuple[str, int]]:
    """The transactions of a commit that replaces *before* with *after*."""
    yield app, after.incarnation
    if after.origin != before.origin:
        origin = after.origin.encode()
        yield f"{app}/origin", len(origin)
        for number in range(-(-len(origin) // _CHUNK_BYTES)):
            chunk = origin[number * _CHUNK_BYTES : (number + 1) * _CHUNK_BYTES]
            yield f"{app}/origin/{number}", int.from_bytes(chunk, "little")
    subtasks = max(after.checkpoints, default=-1) + 1
    if subtasks > max(before.checkpoints, default=-1) + 1:
        yield f"{app}/subtasks", subtasks
    for subtask, checkpoint in after.checkpoints.items():
        if checkpoint != before.checkpoints.get(subtask):
            yield f"{app}/{subtask}", checkpoint

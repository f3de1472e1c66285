"""A table of Iceberg as a lake: staged data files, and commits that write the ledger as a property of the table.

Invariants: every change of a ledger makes a snapshot of the main branch, and the catalog compares that the branch is
where it was when the ledger was read. So a commit whose ledger was replaced is refused, whenever it lands: a fence,
too, makes a snapshot, of no files. A property outlives `expire_snapshots`, and other writers keep it. pyiceberg
retries no commit of ours: its retries would not read the ledger. A refusal proves nothing, for the request may have
come twice: the files of a commit are removed only once another snapshot follows the one that it requires.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq
from pyiceberg import exceptions as iceberg
from pyiceberg.avro.file import AvroFile
from pyiceberg.expressions import AlwaysTrue, And, GreaterThanOrEqual, LessThanOrEqual, Reference
from pyiceberg.io.pyarrow import (
    ArrowScan,
    PyArrowFileIO,
    _determine_partitions,
    bin_pack_arrow_table,
    pyarrow_to_schema,
    schema_to_pyarrow,
    write_file,
)  # fmt: skip
from pyiceberg.manifest import DataFile, ManifestEntry, ManifestEntryStatus, ManifestFile, write_manifest
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask, Table, TableProperties, Transaction, WriteTask
from pyiceberg.table.locations import load_location_provider
from pyiceberg.table.sorting import NullOrder, SortDirection
from pyiceberg.table.update import AssertTableUUID

from exactlyonce.connectors import refusals
from exactlyonce.connectors.filestore.local import local_path, sync
from exactlyonce.pipeline.arrow import arrow_schema
from exactlyonce.pipeline.columns import Column
from exactlyonce.pipeline.errors import StoreError
from exactlyonce.sinks.files.layout import WriterId
from exactlyonce.sinks.iceberg.catalog import OpenCatalog
from exactlyonce.sinks.lake.columns import DELETED, last_of_each, matched, nullable, present, without
from exactlyonce.sinks.lake.table import (
    BEGUN,
    StagedInterval,
    StagedNames,
    changed,
    decode_begun,
    encode_begun,
    gone,
    left_over,
    parts_of,
)
from exactlyonce.sinks.ledger import SinkLedger

FORMAT_VERSION_MAX = 2
"""Of the tables to which pyiceberg writes."""
LOOKED_AT_ONCE = 16
BOUNDED = {
    TableProperties.METADATA_DELETE_AFTER_COMMIT_ENABLED: "true",
    TableProperties.METADATA_PREVIOUS_VERSIONS_MAX: "20",
    TableProperties.MANIFEST_MERGE_ENABLED: "true",
    TableProperties.MANIFEST_MIN_MERGE_COUNT: "50",
}
"""The properties of a table that a sink creates: earlier metadata, and the manifests of a snapshot, do not add up."""
SNAPSHOTS_MAX = 1000
"""Each commit reads and writes the list of all; with more a look says so."""


def ledger_property(pipeline: str, sink: str) -> str:
    """The property of a table that has the ledger; no name has a slash in it."""
    return f"exactlyonce.ledger.{pipeline}/{sink}"


class StagedChanges(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The body of a committable of rows that replace others: files of them, in their order, that are no data files."""

    sizes: dict[str, int]
    """The size of each, in bytes, by its path."""
    rows: int


class StagedManifest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The body of a committable: a manifest that lists its files, and belongs to no snapshot."""

    path: str
    size: int
    spec_id: int
    rows: int
    parts: int = 0
    """See `lake.table`."""


encode_body = msgspec.msgpack.Encoder().encode
decode_body = msgspec.msgpack.Decoder(StagedManifest | StagedChanges).decode


class IcebergLake:
    """See `Lake`. *identifier*: "namespace.table"; *folder*: the sink's name, as its folder has it."""

    def __init__(
        self, catalog: OpenCatalog, identifier: str, columns: Sequence[Column], ledger: str, folder: str,
        key: Sequence[str], *, create: bool,
    ) -> None:  # fmt: skip
        self.catalog, self.identifier, self._columns = catalog, identifier, columns
        self.ledger_property, self.folder, self.key = ledger, folder, key
        self._create = create

    def check(self) -> None:
        """See `Lake`; also writes a file into the table's folder, and removes it."""
        with self.catalog.explained(starting=True):
            try:
                table = self.catalog.get(create=self._create).load_table(self.identifier)
            except (iceberg.NoSuchTableError, iceberg.NoSuchNamespaceError):
                if not self._create:
                    raise StoreError(self._missing()) from None
                table = self._created()
            self.require(table)
            place = _locations(table).new_metadata_location(f"exactlyonce-probe-{secrets.token_hex(8)}")
            with table.io.new_output(place).create() as probe:
                probe.write(b"")
            table.io.delete(place)

    def inspect(self) -> None:
        with self.catalog.explained(starting=True):
            try:
                self.require(self.catalog.get().load_table(self.identifier))
            except (iceberg.NoSuchTableError, iceberg.NoSuchNamespaceError):
                raise StoreError(self._missing()) from None

    def _missing(self) -> str:
        namespace = self.identifier.rpartition(".")[0]
        try:
            names = sorted(".".join(name) for name in self.catalog.get().list_tables(namespace))
            found = f"has {', '.join(names[:10])}" if names else "is empty"
            there = f"Namespace {namespace!r} {found}"
        except iceberg.NoSuchNamespaceError:
            there = f"It has no namespace {namespace!r} either"
        return (
            f"Catalog {self.catalog.name!r} has no table {self.identifier}. {there}. Create the table, set "
            f"create=True, or correct the name of the table, or `name` in catalog=."
        )

    def _created(self) -> Table:
        catalog = self.catalog.get()
        catalog.create_namespace_if_not_exists(self.identifier.rpartition(".")[0])
        return catalog.create_table_if_not_exists(self.identifier, arrow_schema(self._columns), properties=BOUNDED)

    def ids_of_columns(self, schema: Schema) -> dict[str, int]:
        """The ids of this sink's columns in *schema*, also of columns within them."""
        names = {column.field.name for column in self._columns}
        ids = {name: schema.find_field(name).field_id for name in schema.column_names}
        return {
            name: id for name, id in ids.items()
            if name in names or any(name.startswith(f"{outer}.") for outer in names)
        }  # fmt: skip

    def require(self, table: Table) -> Any:
        """The columns to write, as Arrow. Raise unless *table*, changed since the check or not, takes such rows."""
        if table.metadata.format_version > FORMAT_VERSION_MAX:
            raise StoreError(
                f"Table {self.identifier} has format version {table.metadata.format_version}, and pyiceberg writes up "
                f"to {FORMAT_VERSION_MAX}: make a table with 'format-version' = '{FORMAT_VERSION_MAX}'."
            )
        written = table.properties.get(TableProperties.WRITE_FILE_FORMAT, TableProperties.WRITE_FILE_FORMAT_DEFAULT)
        if written != "parquet":
            raise StoreError(f"Table {self.identifier} wants {written} files, and Parquet is written: set "
                             f"'{TableProperties.WRITE_FILE_FORMAT}' = 'parquet'.")  # fmt: skip
        return matched(self._columns, columns_of_table(table), self.identifier)

    def load(self) -> LoadedIceberg:
        with self.catalog.explained():
            return LoadedIceberg(self, self.catalog.get().load_table(self.identifier))

    def close(self) -> None:
        self.catalog.close()


def columns_of_table(table: Table) -> Any:
    """The columns of *table*, as Arrow."""
    return schema_to_pyarrow(table.schema(), include_field_ids=False)


def _locations(table: Table) -> Any:
    return load_location_provider(table.metadata.location, table.metadata.properties)


def _folder(table: Table, sink: str) -> str:
    """The folder of staged files of *sink*, beside the metadata."""
    return str(_locations(table).new_metadata_location(f"exactlyonce/{sink}"))


def _names_in(table: Table, folder: str) -> list[str]:
    """The names of the files in *folder*; none if it is missing, or the file system of the catalog cannot list."""
    io = table.io
    if not isinstance(io, PyArrowFileIO):
        return []
    scheme, host, path = io.parse_location(folder, io.properties)
    listed = io.fs_by_scheme(scheme, host).get_file_info(pa_fs.FileSelector(path, allow_not_found=True))
    return [info.base_name for info in listed if info.is_file]


class LoadedIceberg:
    """See `LoadedTable`."""

    def __init__(self, lake: IcebergLake, table: Table) -> None:
        self._lake, self._table = lake, table

    @property
    def ledger(self) -> SinkLedger:
        return SinkLedger.decode(self._table.properties.get(self._lake.ledger_property))

    @property
    def growth(self) -> str:
        """See `LoadedTable`. Earlier metadata counts where nobody removes it; it has all snapshots, too."""
        table, signs = self._table, list[str]()
        if (snapshots := len(table.snapshots())) > SNAPSHOTS_MAX:
            signs.append(f"has {snapshots:,} snapshots, all of which each commit reads and writes: expire old ones")
        removes, versions = TableProperties.METADATA_DELETE_AFTER_COMMIT_ENABLED, len(table.metadata.metadata_log)
        are_many = versions >= int(BOUNDED[TableProperties.METADATA_PREVIOUS_VERSIONS_MAX])
        if are_many and table.properties.get(removes, "false").lower() != "true":
            signs.append(f"keeps every earlier version of its metadata: set '{removes}' = 'true'")
        return "; it ".join(signs)

    def commit(self, ledger: SinkLedger, staged: Sequence[bytes], checkpoint: int) -> None:
        """See `LoadedTable`. Data files keep their places."""
        table, bodies = self._table, [decode_body(body) for body in staged]
        with self._lake.catalog.explained():
            if bodies:
                self._lake.require(table)
            written = WrittenFiles(table, secrets.token_hex(8))
            added, replaced = self._files(bodies, written), list[DataFile]()
            changes = [body for body in bodies if isinstance(body, StagedChanges)]
            if changes:
                added, replaced = self._changed(changes, written)
            summary = {"exactlyonce.ledger": self._lake.ledger_property, "exactlyonce.checkpoint": str(checkpoint)}
            change = table.transaction()
            change.set_properties({self._lake.ledger_property: ledger.encode().decode()})
            update: Any = change.update_snapshot(summary)
            snapshot = update.overwrite() if replaced else update.merge_append()  # merges if the table's properties say
            for file in replaced:
                snapshot.delete_data_file(file)
            for file in added:
                snapshot.append_data_file(file)
            snapshot.commit()  # within the transaction
            self._send(change, snapshot, written)

    def _send(self, change: Transaction, snapshot: Any, written: WrittenFiles) -> None:
        """Commit *change*, which has *snapshot*.

        A refusal proves nothing: a gateway that delivers a commit twice gives the answer to the second one. pyiceberg's
        own commit takes it for a proof, and removes the manifests of the snapshot that has landed.
        """
        table = self._table
        same = AssertTableUUID(uuid=table.metadata.table_uuid)
        try:
            table._do_commit(change._updates, (*change._requirements, same))
        except iceberg.CommitFailedException:
            if self._is_overtaken(snapshot.snapshot_id):
                snapshot._clean_all_uncommitted()
                written.remove()
            raise

    def _is_overtaken(self, snapshot_id: int) -> bool:
        """Whether another snapshot follows the present one, so that the commit of *snapshot_id* on it never lands.

        False if that cannot be seen: it may land still, or has landed, and what it needs stays.
        """
        newest = self._lake.catalog.get().load_table(self._lake.identifier)
        parents = {snapshot.snapshot_id: snapshot.parent_snapshot_id for snapshot in newest.snapshots()}
        before, follower = self._table.metadata.current_snapshot_id, newest.metadata.current_snapshot_id
        while follower in parents and parents[follower] != before:
            follower = parents[follower]
        return follower in parents and snapshot_id not in parents

    def forget(self, staged: Sequence[bytes]) -> None:
        with self._lake.catalog.explained():
            for body in map(decode_body, staged):
                if isinstance(body, StagedChanges):
                    paths = list(body.sizes)
                else:
                    paths = [*parts_of(body.path, body.parts, BEGUN), body.path]
                for path in paths:
                    self._remove(path)

    def sweep(self, incarnation: int, attempt: int) -> None:
        """See `LoadedTable`. Files that a leader has written anew, and not committed, are remove_orphan_files'."""
        folder = _folder(self._table, self._lake.folder)
        with self._lake.catalog.explained():
            for name in left_over(_names_in(self._table, folder), incarnation, attempt):
                path = f"{folder}/{name}"
                if name.endswith(BEGUN):
                    with self._table.io.new_input(path).open() as begun:
                        files = decode_begun(begun.read())
                    for file in files:
                        self._remove(file)
                self._remove(path)

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._table.io.delete(path)

    def _files(self, bodies: Sequence[StagedManifest | StagedChanges], written: WrittenFiles) -> list[DataFile]:
        """The staged files to add, all of which are there, in the table's present partitions."""
        spec_id = self._table.metadata.default_spec_id
        files: list[DataFile] = []
        for body in bodies:
            if isinstance(body, StagedChanges):
                continue
            listed = [entry.data_file for entry in self._entries(body)]
            self._require_whole(body, listed)
            schema = self._staged_schema(body)
            fits = body.spec_id == spec_id and self._has_columns_of(schema)
            files += listed if fits else self._written_anew(listed, schema, written)
        return files

    def _staged_schema(self, body: StagedManifest) -> Schema:
        """The table's schema as the writer had it."""
        with AvroFile[Any](self._table.io.new_input(body.path)) as manifest:
            return Schema.model_validate_json(manifest.header.meta["schema"])

    def _has_columns_of(self, staged: Schema) -> bool:
        """Whether the columns that were written are still the table's. Readers tell them by ids, not by names."""
        lake = self._lake
        return lake.ids_of_columns(staged).items() <= lake.ids_of_columns(self._table.schema()).items()

    def _entries(self, body: StagedManifest) -> list[ManifestEntry]:
        _require_size(self._table, body.path, body.size)
        manifest = ManifestFile.from_args(manifest_path=body.path, partition_spec_id=body.spec_id)
        return manifest.fetch_manifest_entry(self._table.io)

    def _require_whole(self, body: StagedManifest, files: Sequence[DataFile]) -> None:
        rows = sum(file.record_count for file in files)
        if rows != body.rows:
            raise StoreError(f"{body.path} lists {rows:,} rows, and {body.rows:,} were written: it was changed.")
        with ThreadPoolExecutor(LOOKED_AT_ONCE) as pool:
            list(pool.map(lambda file: _require_size(self._table, file.file_path, file.file_size_in_bytes), files))

    def _changed(self, bodies: Sequence[StagedChanges], written: WrittenFiles) -> tuple[list[DataFile], list[DataFile]]:
        """The files to add, and those that they replace: all with a row whose key is in *bodies*."""
        table, key = self._table, self._lake.key
        for body in bodies:
            for path, size in body.sizes.items():
                _require_size(table, path, size)
        changes = last_of_each(pa.concat_tables([self._read(path) for body in bodies for path in body.sizes]), key)
        rows = present(changes).cast(self._lake.require(table))
        added, replaced = written.write(rows) if rows.num_rows else [], list[DataFile]()
        scan = ArrowScan(table.metadata, table.io, table.schema(), AlwaysTrue())
        for task in table.scan(row_filter=_bounds(changes, key)).plan_files():
            rows = scan.to_table([task])
            kept = without(rows, changes, key)
            if kept.num_rows < rows.num_rows:
                replaced.append(task.file)
                added += written.write(kept) if kept.num_rows else []
        return added, replaced

    def _written_anew(self, files: Iterable[DataFile], staged: Schema, written: WrittenFiles) -> list[DataFile]:
        """The rows of *files*, written as *staged*, in new ones with the table's present columns and partitions."""
        table, new, schema = self._table, list[DataFile](), self._lake.require(self._table)
        scan = ArrowScan(table.metadata, table.io, staged, AlwaysTrue())
        for file in files:
            new += written.write(self._fitting(scan.to_table([FileScanTask(file)]), file.file_path, schema))
        return new

    def _read(self, path: str) -> Any:
        """The rows of a file of changes."""
        with self._table.io.new_input(path).open() as file:
            rows = pq.read_table(file)
        schema = nullable(self._lake.require(self._table))
        told = [field for field in rows.schema if field.name == DELETED]
        return self._fitting(rows, path, pa.schema([*schema, *told]))

    def _fitting(self, rows: Any, path: str, schema: Any) -> Any:
        """The rows of the staged file *path*, in the types of the table's present columns."""
        try:
            return rows.select(schema.names).cast(schema)
        except pa.ArrowException as error:
            raise StoreError(
                f"Table {self._lake.identifier} has a column of another type since {path} was set aside, and a value "
                f"does not fit: {error}. Give the column its type again."
            ) from None


_BOUNDED = (
    pa.types.is_integer, pa.types.is_string, pa.types.is_large_string, pa.types.is_date, pa.types.is_timestamp,
    pa.types.is_decimal,
)  # fmt: skip
"""Columns by whose bounds files are chosen. NaN, which equals itself in no filter, is in none."""


def _bounds(rows: Any, key: Sequence[str]) -> Any:
    """A filter that all rows with a key of *rows* pass, to choose files by their statistics."""
    bounds: Any = AlwaysTrue()
    for name in key:
        values = rows.column(name)
        if not any(kind(values.type) for kind in _BOUNDED):
            continue
        extremes = pc.min_max(values).as_py()
        term = Reference(name)
        low = GreaterThanOrEqual(term=term, value=extremes["min"])
        bounds = And(bounds, low, LessThanOrEqual(term=term, value=extremes["max"]))
    return bounds


def _require_size(table: Table, path: str, size_written: int) -> None:
    """Raise `StoreError` unless a staged file is there, and whole."""
    try:
        size = len(table.io.new_input(path))
    except FileNotFoundError:
        raise gone(path, "remove_orphan_files with a limit") from None
    if size != size_written:
        raise changed(path, size, size_written)


def _require_mounted(table: Table) -> None:
    """Raise `StoreUnavailable` unless the table's metadata is on its disk. Older files of it are removed meanwhile."""
    location = local_path(table.metadata_location)
    if location is None:
        return
    with suppress(FileNotFoundError), os.scandir(location.parent) as entries:
        if any(".metadata.json" in entry.name for entry in entries):
            return
    raise refusals.passing(
        f"The warehouse of table {'.'.join(table.name())}", "is it mounted?", f"{location.parent} has no metadata"
    )


def _sync(table: Table, addresses: Iterable[str]) -> None:
    """Make files of *table* durable, where they are on a disk. An object store has done so."""
    top = local_path(table.metadata.location)
    if top is not None:
        sync([path for address in addresses if (path := local_path(address)) is not None], top)


class WrittenFiles:
    """Durable data files of a table, as it was when it was loaded. *name* is in their names, and unique; *announce*
    hears of their paths before they are written."""

    def __init__(self, table: Table, name: str, announce: Callable[[list[str]], None] = lambda paths: None) -> None:
        self._table, self._name, self._announce = table, name, announce
        self._number = count(1)
        self._paths: list[str] = []

    def write(self, rows: Any) -> list[DataFile]:
        """One file for each partition, or more where it is larger than `write.target-file-size-bytes`."""
        table, locations = self._table, _locations(self._table)
        tasks = list(self._tasks(_sorted(table, rows)))
        paths = [
            locations.new_data_location(task.generate_data_file_filename("parquet"), task.partition_key)
            for task in tasks
        ]
        self._announce(paths)
        self._paths += paths
        files = list(write_file(table.io, table.metadata, iter(tasks)))
        _sync(table, paths)
        return files

    def _tasks(self, rows: Any) -> Iterator[WriteTask]:
        """One for each file, as pyiceberg makes them."""
        metadata = self._table.metadata
        unique: Any = self._name  # pyiceberg, too, makes it a part of names alone
        size = int(metadata.properties.get(TableProperties.WRITE_TARGET_FILE_SIZE_BYTES,
                                           TableProperties.WRITE_TARGET_FILE_SIZE_BYTES_DEFAULT))  # fmt: skip
        spec, own = metadata.spec(), metadata.schema()
        schema = pyarrow_to_schema(rows.schema, own.name_mapping, format_version=metadata.format_version)
        partitions: list[tuple[Any, Any]] = [(None, rows)]
        if not spec.is_unpartitioned():
            parts = _determine_partitions(spec=spec, schema=own, arrow_table=rows)
            partitions = [(part.partition_key, part.arrow_table_partition) for part in parts]
        for key, part in partitions:
            for batches in bin_pack_arrow_table(part, size):
                yield WriteTask(unique, next(self._number), schema, batches, partition_key=key)

    def remove(self) -> None:
        """Remove the files, which are in no snapshot, and never will be; one that stays is remove_orphan_files'."""
        for path in self._paths:
            with suppress(OSError):
                self._table.io.delete(path)


def _sorted(table: Table, rows: Any) -> Any:
    """*rows* in the table's sort order."""
    fields = table.sort_order().fields
    if not fields:
        return rows
    schema = table.schema()
    names, keys = [], []
    for number, field in enumerate(fields):
        source: Any = rows
        for part in (schema.find_column_name(field.source_id) or "").split("."):
            source = source.column(part) if isinstance(source, pa.Table) else pc.struct_field(source, part)
        transform = field.transform.pyarrow_transform(schema.find_type(field.source_id))
        names.append(str(number))
        keys.append(transform(source))
    order = [
        (name, "ascending" if field.direction is SortDirection.ASC else "descending",
         "at_start" if field.null_order is NullOrder.NULLS_FIRST else "at_end")
        for name, field in zip(names, fields, strict=True)
    ]  # fmt: skip
    return rows.take(pc.sort_indices(pa.table(keys, names), sort_keys=order))


class IcebergFiles:
    """See `StagedFiles`."""

    def __init__(self, catalog: OpenCatalog, table: Table, folder: str, writer: WriterId) -> None:
        self._catalog, self._table = catalog, table
        self._staged = StagedNames(_folder(table, folder), writer)
        self._written = WrittenFiles(table, f"{folder}-{writer}", self._announce)
        self._files: list[DataFile] = []

    def _announce(self, paths: list[str]) -> None:
        begun = self._staged.part(BEGUN)
        with self._table.io.new_output(begun).create() as file:
            file.write(encode_begun(paths))
        _sync(self._table, [begun])

    def require_table(self) -> None:
        with self._catalog.explained():
            _require_mounted(self._table)

    def write(self, rows: Any) -> None:
        self.require_table()
        with self._catalog.explained():
            self._files += self._written.write(rows)

    def cut(self, checkpoint: int) -> StagedInterval:
        """Write the manifest. Its snapshot id is none: the commit lists its files in one of its own."""
        self.require_table()
        files, self._files = self._files, []
        metadata, io = self._table.metadata, self._table.io
        path, parts = self._staged.end("avro")
        with (
            self._catalog.explained(),
            write_manifest(
                metadata.format_version, metadata.spec(), self._table.schema(), io.new_output(path), 0, "null"
            ) as manifest,
        ):  # fmt: skip
            for file in files:
                manifest.add(ManifestEntry.from_args(status=ManifestEntryStatus.ADDED, snapshot_id=0, data_file=file))
        with self._catalog.explained():
            _sync(self._table, [path])
            size = len(io.new_input(path))
        self.require_table()
        rows = sum(file.record_count for file in files)
        body = StagedManifest(path=path, size=size, spec_id=metadata.default_spec_id, rows=rows, parts=parts)
        return StagedInterval(encode_body(body), rows)

    def close(self) -> None:
        self._catalog.close()


class IcebergChanges:
    """See `StagedFiles`: rows that replace others wait in files beside the table's metadata."""

    def __init__(self, catalog: OpenCatalog, table: Table, folder: str, writer: WriterId) -> None:
        self._catalog, self._table = catalog, table
        self._staged = StagedNames(_folder(table, folder), writer)
        self._sizes: dict[str, int] = {}
        self._rows = 0

    def require_table(self) -> None:
        with self._catalog.explained():
            _require_mounted(self._table)

    def write(self, rows: Any) -> None:
        self.require_table()
        path = self._staged.part("parquet")
        with self._catalog.explained():
            with self._table.io.new_output(path).create() as file:
                pq.write_table(rows, file)
            _sync(self._table, [path])
            self._sizes[path] = len(self._table.io.new_input(path))
        self._rows += rows.num_rows

    def cut(self, checkpoint: int) -> StagedInterval:
        """See `StagedFiles`."""
        self.require_table()
        sizes, rows = self._sizes, self._rows
        self._sizes, self._rows = {}, 0
        self._staged.end("")
        return StagedInterval(encode_body(StagedChanges(sizes=sizes, rows=rows)), rows)

    def close(self) -> None:
        self._catalog.close()

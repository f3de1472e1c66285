"""A table of Iceberg as a sink: the description. It opens nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeVar

from exactlyonce.pipeline import shape
from exactlyonce.pipeline.sizes import Size
from exactlyonce.sinks.committer import CommitterContext
from exactlyonce.sinks.lake.sink import LakeSink, property_problems, sink_name, writer_id
from exactlyonce.sinks.lake.table import Lake, StagedFiles
from exactlyonce.sinks.sql.table import row_type
from exactlyonce.sinks.writer import SinkEncoder, WriterContext

T = TypeVar("T")
_FROM_ROOT = re.compile(r"/|[a-z][a-z0-9+.-]*:")
_RELATIVE_FILE = re.compile(r"sqlite(\+\w+)?:///[^/:]")
_IDENTIFIER = re.compile(r"[^.\s]+(\.[^.\s]+)+")


@dataclass(frozen=True, eq=False)
class IcebergSink(LakeSink[T], Generic[T]):
    """Writes rows to a table of Iceberg, exactly once: a checkpoint is one snapshot of the table.

    - *table*: "namespace.table".
    - *catalog*: the properties of pyiceberg's catalog: ``{"type": "sql", "uri": ..., "warehouse": ...}``, or ``{"type":
      "rest", "uri": ...}``; ``name``, "default" unless given, tells catalogs of one database apart. A value may be
      ``env:NAME`` or ``file:/path``, and one with a secret must be.
    - *mode*: "append" adds each record, and has no *key*; "upsert" replaces the row that has the record's *key*, or
      adds one: files with such rows are written again.
    - *create*: create the table, and its namespace, if it is missing, with the fields of the record's type as columns.
    - *roll_bytes*: the size of rows in memory at which a subtask writes them as files, before its interval ends.
    """

    kind: ClassVar[str] = "iceberg"
    library: ClassVar[str] = "pyiceberg"

    table: str
    _: KW_ONLY
    catalog: Mapping[str, str] = field(repr=False)
    mode: Literal["append", "upsert"] = "append"
    key: str | tuple[str, ...] = ()
    create: bool = False
    roll_bytes: Size = 128 << 20

    @property
    def full_name(self) -> str:
        return self.table

    @property
    def address(self) -> str:
        """The warehouse, if it is in the properties."""
        return self.catalog.get("warehouse", "")

    # --- problems ---------------------------------------------------------------------------------------------------

    def problems(self, type_: Any) -> Iterator[str]:
        """The problems of the arguments, and of the type as rows of a table."""
        if not isinstance(self.table, str) or not _IDENTIFIER.fullmatch(self.table):
            yield f'table={self.table!r} must be a namespace and a name: "shop.totals"'
        yield from _catalog_problems(self.catalog)
        yield from super().problems(type_)

    def describe(self, type_: Any) -> dict[str, Any]:
        """Table, the catalog's name, mode, key, and the records' schema."""
        return {
            "sink": "iceberg",
            "table": self.table,
            "catalog": self.catalog.get("name", "default"),
            "mode": self.mode,
            "key": list(self.key_columns),
            "value": shape.describe(row_type(type_, self.mode)),
        }

    def _open_lake(self, context: CommitterContext) -> tuple[Lake, str]:
        with self._needing_library():
            from exactlyonce.sinks.iceberg.catalog import OpenCatalog
            from exactlyonce.sinks.iceberg.table import IcebergLake, ledger_property

        ledger = ledger_property(context.pipeline, context.sink)
        catalog = OpenCatalog(self.catalog, self.table)
        columns, folder = self.columns(context.type), sink_name(context)
        lake = IcebergLake(catalog, self.table, columns, ledger, folder, self.key_columns, create=self.create)
        return lake, f"the property {ledger} of table {self.table}"

    def _open_files(self, context: WriterContext) -> tuple[StagedFiles, SinkEncoder]:
        with self._needing_library():
            from exactlyonce.sinks.iceberg.catalog import OpenCatalog
            from exactlyonce.sinks.iceberg.table import IcebergChanges, IcebergFiles, columns_of_table
            from exactlyonce.sinks.lake.columns import TableRows, matched

        catalog = OpenCatalog(self.catalog, self.table)
        kind = IcebergChanges if self.key_columns else IcebergFiles
        try:
            with catalog.explained():
                table = catalog.get().load_table(self.table)
            files = kind(catalog, table, sink_name(context), writer_id(context))
            columns, changed = self.columns(context.type), self.changed(context.type)
            return files, TableRows(columns, matched(columns, columns_of_table(table), self.table), changed)
        except BaseException:
            catalog.close()
            raise


def _catalog_problems(catalog: Any) -> Iterator[str]:
    """The problems of a catalog's properties, none of which is shown."""
    if not isinstance(catalog, Mapping) or not catalog:
        yield 'catalog= must be the properties of a catalog: {"type": "sql", "uri": ..., "warehouse": ...}'
        return
    yield from property_problems("catalog", catalog)
    if not {"type", "uri", "py-catalog-impl"} & set(catalog):
        yield 'catalog= has no "type": "sql", "rest", or another one that pyiceberg knows'
    if catalog.get("type") == "sql" and not _FROM_ROOT.match(str(catalog.get("warehouse", "/"))):
        yield "catalog['warehouse'] must be a path from / on, or an address: runs may begin elsewhere"
    if _RELATIVE_FILE.match(str(catalog.get("uri", ""))):
        yield "catalog['uri'] must name its file from / on, sqlite:////lake/catalog.db: runs may begin elsewhere"

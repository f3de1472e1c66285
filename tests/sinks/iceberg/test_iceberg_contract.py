"""A table of Iceberg keeps the contract of a sink whose output the leader commits; see `testing.sink_contract`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from exactlyonce.sinks import IcebergSink
from exactlyonce.testing.sink_contract import SinkContract

pytest.importorskip("pyiceberg", reason="ICEBERG NOT TESTED: it needs the extra `iceberg`")

pytestmark = pytest.mark.exhaustive


class Order(msgspec.Struct):
    number: int
    version: int


class IcebergContract(SinkContract):
    """A table in a folder; subclasses have the catalog, as *uri*."""

    type = Order
    uri: str

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "lake"
        self.folder.mkdir()
        self._catalogs: list[Any] = []

    @pytest.fixture(autouse=True)
    def _closing(self) -> Iterator[None]:
        yield
        for catalog in self._catalogs:
            catalog.close()

    @property
    def properties(self) -> dict[str, str]:
        return {"type": "sql", "uri": self.uri, "warehouse": f"file://{self.folder}"}

    def sink(self) -> IcebergSink[Order]:
        key = ("number",) if self.keyed else ()
        mode = "upsert" if self.keyed else "append"
        return IcebergSink("shop.orders", catalog=self.properties, mode=mode, key=key, create=True)

    def record(self, number: int, version: int = 0) -> Order:
        return Order(number, version)

    def table(self) -> Any:
        from pyiceberg.catalog import load_catalog

        self._catalogs.append(load_catalog("default", **self.properties))
        return self._catalogs[-1].load_table("shop.orders")

    def read(self) -> list[Order]:
        return [Order(**row) for row in self.table().scan().to_arrow().to_pylist()]

    def clean_up(self) -> None:
        """A second writer's commits, one of which deletes again, and the expiry of all snapshots before them."""
        table = self.table()
        rows = pa.table({"number": [-1], "version": [-1]})
        table.append(rows.cast(table.schema().as_arrow()))
        table.delete("number = -1")
        older = [snapshot.snapshot_id for snapshot in table.snapshots() if snapshot != table.current_snapshot()]
        table.maintenance.expire_snapshots().by_ids(older).commit()
        assert len(table.snapshots()) == 1


class TestOnSQLite(IcebergContract):
    """The catalog lies beside the tables."""

    test_secrets_show_nowhere: Any = None  # there are none

    @property
    def uri(self) -> str:  # type: ignore[override]  # it is known with the folder
        return f"sqlite:///{self.folder}/catalog.db"

    @contextmanager
    def unavailable(self) -> Iterator[None]:
        away = self.folder.rename(self.folder.with_name("away"))
        try:
            yield
        finally:
            away.rename(self.folder)

    def backup(self) -> Callable[[], None]:
        copy = self.folder.with_name("backup")
        shutil.copytree(self.folder, copy)

        def restore() -> None:
            shutil.rmtree(self.folder)
            shutil.copytree(copy, self.folder)

        return restore


class TestUpsertOnSQLite(TestOnSQLite):
    """Rows replace those with their key."""

    keyed = True

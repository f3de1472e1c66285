"""A catalog in a folder, its tables, and the writers and committers of a sink, each as in its own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lake_hands import Hands, Total

from exactlyonce.sinks import IcebergSink


class Lake(Hands):
    """A folder with a catalog in SQLite, and a sink "out" of pipeline "totals" that writes to shop.totals."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.properties = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}
        self.options = {"catalog": self.properties}

    def catalog(self) -> Any:
        from pyiceberg.catalog import load_catalog

        catalog = load_catalog("default", **self.properties)
        self.to_end.append(catalog.close)
        return catalog

    def create(self, schema: Any, **options: Any) -> Any:
        catalog = self.catalog()
        catalog.create_namespace_if_not_exists("shop")
        return catalog.create_table("shop.totals", schema, **options)

    def table(self) -> Any:
        return self.catalog().load_table("shop.totals")

    def rows(self) -> list[tuple[Any, ...]]:
        rows = self.table().scan().to_arrow().to_pylist()
        return sorted(tuple(row.values()) for row in rows)

    def sink(self) -> IcebergSink[Any]:
        return IcebergSink("shop.totals", **self.options)


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[Lake]:
    (tmp_path / "lake").mkdir()
    lake = Lake(tmp_path / "lake")
    yield lake
    lake.end()


@pytest.fixture
def totals() -> Callable[..., list[Total]]:
    return lambda *cents: [Total("ann", each) for each in cents]

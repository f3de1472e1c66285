"""A table in a folder, and the writers and committers of a sink, each as in its own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from lake_hands import Hands, Total

from exactlyonce.sinks import DeltaSink


class Table(Hands):
    """The table, and a sink "out" of pipeline "totals" that writes to it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def sink(self) -> DeltaSink[Any]:
        return DeltaSink(self.folder, **self.options)

    def create(self, schema: Any, **options: Any) -> None:
        from deltalake import DeltaTable

        DeltaTable.create(self.folder, schema, **options)

    def handle(self) -> Any:
        from deltalake import DeltaTable

        return DeltaTable(self.folder)

    def rows(self) -> list[tuple[Any, ...]]:
        return sorted(tuple(row.values()) for row in pa.table(self.handle().to_pyarrow_table()).to_pylist())


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    table = Table(tmp_path / "totals")
    yield table
    table.end()


@pytest.fixture
def totals() -> Callable[..., list[Total]]:
    return lambda *cents: [Total("ann", each) for each in cents]

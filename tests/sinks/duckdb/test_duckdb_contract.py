"""A table of DuckDB keeps the contract of a sink whose output the leader commits; see `testing.sink_contract`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from contract_part import OF_COMMITS, only
from orders_contract import Order, OrdersContract

from exactlyonce.sinks import DuckDBSink

pytest.importorskip("duckdb", reason="DUCKDB NOT TESTED: it needs the extra `duckdb`")
from duckdb_file import asked, held


class TestAppend(OrdersContract):
    """Rows are inserted, in their order."""

    ordered = True
    test_secrets_show_nowhere: Any = None  # there are none

    @pytest.fixture(autouse=True)
    def _file(self, tmp_path: Path) -> None:
        self.path = tmp_path / "shop.duckdb"

    def sink(self) -> DuckDBSink[Order]:
        key = ("number",) if self.keyed else ()
        return DuckDBSink(self.path, table="orders", mode="upsert" if self.keyed else "append", key=key, create=True)

    def read(self) -> list[Order]:
        return [Order(*row) for row in asked(self.path, "SELECT number, version FROM orders ORDER BY rowid")]

    def unavailable(self) -> Any:
        return held(self.path)

    def backup(self) -> Callable[[], None]:
        copy = shutil.copy(self.path, self.path.with_name("copy.duckdb"))

        def restore() -> None:
            shutil.copy(copy, self.path)

        return restore

    def clean_up(self) -> None:
        asked(self.path, "VACUUM")
        asked(self.path, "FORCE CHECKPOINT")


@pytest.mark.exhaustive
@only(*OF_COMMITS[:-1], "test_what_the_store_cleans_up")
class TestUpsert(TestAppend):
    """Rows replace those with their key."""

    keyed = True
    ordered = False

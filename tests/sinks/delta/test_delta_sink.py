"""Tables of Delta as people have them: partitioned, evolving, written to by others, or unfit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from lake_hands import TOTALS, Hands, commit, lake_in, totals, without_rights

from exactlyonce.pipeline.errors import ConfigError, StoreError, StoreUnavailable
from exactlyonce.sinks.writer import SinkFailed
from exactlyonce.testing.sink_contract.hooks import ORIGIN

pytest.importorskip("deltalake", reason="DELTA NOT TESTED: it needs the extra `delta`")

from exactlyonce.sinks.delta import table as delta_table


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Hands]:
    with lake_in(tmp_path / "totals", "delta") as hands:
        yield hands


class Sale(msgspec.Struct):
    day: date
    shop: str | None
    is_web: bool
    number: int


def test_partitions_of_the_table(table: Any) -> None:
    """Values of partitions are those that a reader gets back, None and awkward text too."""
    schema = pa.schema([("day", pa.date32()), ("shop", pa.string()), ("is_web", pa.bool_()), ("number", pa.int64())])
    table.create(schema, partition_by=["day", "shop", "is_web"])
    table.type = Sale
    shops = [None, "a/b=c%20", "ü"]
    sales = [Sale(date(2026, 11, 1 + n % 2), shops[n % 3], n % 2 == 0, n) for n in range(12)]
    commit(table.led(), table.staged(sales, 1))
    files = pa.table(table.handle().get_add_actions(flatten=True)).to_pylist()
    assert [file["num_records"] for file in files] == [2] * 6
    assert (min(f["min.number"] for f in files), max(f["max.number"] for f in files)) == (0, 11)
    found = sorted(table.handle().to_pyarrow_table().to_pylist(), key=lambda row: row["number"])
    assert found == [msgspec.structs.asdict(sale) for sale in sales]
    with pytest.raises(ValueError, match="shop: '' would become null"):
        table.staged([Sale(date(2026, 11, 1), "", True, 1)], 2)


def test_rows_replaced_by_key(table: Any) -> None:
    """The last of a key counts, within an interval, its files and the table; all of it is one version."""
    schema = pa.schema([("day", pa.date32()), ("shop", pa.string()), ("is_web", pa.bool_()), ("number", pa.int64())])
    table.create(schema, partition_by=["shop"])
    table.type, day = Sale, date(2026, 11, 1)
    table.options |= {"mode": "upsert", "key": ("day", "is_web"), "roll_bytes": 1}
    committer = table.led()
    commit(committer, table.staged([Sale(day, "a", n % 2 == 0, n) for n in range(300)], 1))
    before = table.handle().version()
    moved = [Sale(day, "b", True, 300), Sale(date(2026, 11, 2), "b", True, 301), Sale(day, "b", True, 302)]
    commit(committer, table.staged(moved, 2, previous=1))
    assert table.handle().version() == before + 1
    assert table.rows() == [(day, "a", False, 299), (day, "b", True, 302), (date(2026, 11, 2), "b", True, 301)]
    assert list(table.folder.glob("_exactlyonce/*/*")) == []


# --- others at the table ----------------------------------------------------------------------------------------------


def test_a_column_that_comes_between_staging_and_commit(table: Any) -> None:
    from deltalake.schema import Field, PrimitiveType

    table.create(TOTALS)
    committer, staged = table.led(), table.staged(totals(1), 1)
    table.handle().alter.add_columns([Field("note", PrimitiveType("string"))])
    commit(committer, staged)
    commit(committer, table.staged(totals(2), 2, previous=1))
    assert table.rows() == [("ann", 1, None), ("ann", 2, None)]


def test_a_table_that_is_away(table: Any) -> None:
    """While its disk is not mounted, what is decided waits; a start says that there is no table."""
    table.create(TOTALS)
    committer, staged = table.led(), table.staged(totals(1), 1)
    away = table.folder.rename(table.folder.with_name("away"))
    with pytest.raises(StoreUnavailable, match="is its disk mounted"):
        commit(committer, staged)
    with pytest.raises(StoreUnavailable, match="is its disk mounted"):
        committer.fence(1, ORIGIN)
    with pytest.raises(StoreUnavailable, match="is its disk mounted"):
        table.opened()
    with pytest.raises(StoreError, match="There is no Delta table"):
        committer.check()
    away.rename(table.folder)
    assert commit(committer, staged)


def test_rows_that_are_in_no_file(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer counts them before it acknowledges, whatever the table has done with them."""
    table.create(TOTALS)
    monkeypatch.setattr(delta_table, "_partitioned", lambda rows, partition_by: [({}, rows.slice(1))])
    with pytest.raises(SinkFailed, match="1 rows are in files, and 2 records were written"):
        table.staged(totals(1, 2), 1)


# --- what is wrong ----------------------------------------------------------------------------------------------------


def no_parent(table: Any) -> None:
    table.folder = table.folder / "deeper" / "still"
    table.options["create"] = True


def constraint(table: Any) -> None:
    table.create(TOTALS)
    table.handle().alter.add_constraint({"positive": "cents > 0"})


def newer_features(table: Any) -> None:
    """As Spark makes it, with column mapping."""
    table.create(TOTALS)
    (entry,) = (table.folder / "_delta_log").glob("*.json")
    actions = [json.loads(line) for line in entry.read_text().splitlines()]
    for action in actions:
        if "protocol" in action:
            action["protocol"] = {"minReaderVersion": 2, "minWriterVersion": 5}
        if "metaData" in action:
            action["metaData"]["configuration"] = {"delta.columnMapping.mode": "name"}
            schema = json.loads(action["metaData"]["schemaString"])
            for number, field in enumerate(schema["fields"]):
                mapped = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": f"col-{number}"}
                field["metadata"] = mapped
            action["metaData"]["schemaString"] = json.dumps(schema)
    entry.write_text("\n".join(map(json.dumps, actions)))


def no_variable(table: Any) -> None:
    table.create(TOTALS)
    table.options["storage_options"] = {"AWS_SECRET_ACCESS_KEY": "env:NOT_THERE"}


def partitioned_by(field: pa.Field, *names: str) -> Callable[[Any], None]:
    return lambda table: table.create(TOTALS.append(field), partition_by=[*names])


EXPIRING = {"delta.setTransactionRetentionDuration": "interval 1 days"}
BAD_TABLES: list[tuple[Callable[[Any], object], str]] = [
    (lambda table: None, "There is no Delta table at"),
    (no_parent, "is missing, or is not a folder. Make it, mount it"),
    (constraint, "rows are added as plain files: make a table without it"),
    (partitioned_by(pa.field("at", pa.timestamp("us", "UTC")), "at"), "is partitioned by 'at', a column of timestamp"),
    (partitioned_by(pa.field("day", pa.date32()), "day"), "is partitioned by 'day', and no field has that name"),
    (partitioned_by(pa.field("note", pa.string()), "customer", "cents"),
     "is partitioned by all fields of the record, and its files would have no column"),
    (lambda table: table.create(TOTALS, configuration=EXPIRING),
     "after which transactions expire, and the ledger is made of them"),
    (newer_features, "rows are added as plain files: make a table without it"),
    (no_variable, "the environment has no variable NOT_THERE"),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "said"), BAD_TABLES, ids=[said for _, said in BAD_TABLES])
def test_a_table_that_does_not_fit(table: Any, bad: Callable[[Any], object], said: str) -> None:
    bad(table)
    with pytest.raises(ConfigError if "variable" in said else StoreError, match=re.escape(said)):
        table.committer().check()


def test_a_folder_without_rights(table: Any) -> None:
    """The table is there: the error says so, and does not ask for create=True."""
    table.create(TOTALS)
    committer = table.committer()
    with without_rights(table.folder), pytest.raises(StoreError, match=r"refuses: .*Give this user the right"):
        committer.check()

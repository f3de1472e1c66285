"""Tables of Delta as people have them: partitioned, evolving, written to by others, or unfit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pyarrow as pa
import pytest
from lake_hands import assert_swept, commit, without_rights

from exactlyonce.pipeline.errors import ConfigError, StoreError, StoreUnavailable
from exactlyonce.sinks import DeltaSink
from exactlyonce.sinks.writer import SinkFailed
from exactlyonce.testing.sink_contract.hooks import ORIGIN

pytest.importorskip("deltalake", reason="DELTA NOT TESTED: it needs the extra `delta`")
from deltalake import DeltaTable, write_deltalake

from exactlyonce.sinks.delta import table as delta_table

TOTALS = pa.schema([pa.field("customer", pa.string(), nullable=False), pa.field("cents", pa.int64(), nullable=False)])


def test_all_subtasks_of_a_checkpoint_are_one_version(table: Any, totals: Any) -> None:
    table.create(TOTALS)
    committer = table.led()
    before = table.handle().version()
    assert commit(committer, table.staged(totals(1, 2), 7), table.staged(totals(3), 7, subtask=1))
    assert table.handle().version() == before + 1
    assert [cents for _, cents in table.rows()] == [1, 2, 3]
    assert list(table.folder.glob("_exactlyonce/*/*")) == [], "lists of staged files are removed"


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
    assert len(table.handle().file_uris()) == 6
    found = sorted(table.handle().to_pyarrow_table().to_pylist(), key=lambda row: row["number"])
    assert found == [msgspec.structs.asdict(sale) for sale in sales]
    with pytest.raises(ValueError, match="shop: '' would become null"):
        table.staged([Sale(date(2026, 11, 1), "", True, 1)], 2)


def test_large_intervals_make_several_files(table: Any, totals: Any) -> None:
    table.create(TOTALS)
    table.options["roll_bytes"] = 10_000
    commit(table.led(), table.staged(totals(*range(5_000)), 1))
    files = pa.table(table.handle().get_add_actions(flatten=True)).to_pylist()
    assert len(files) > 5
    assert sum(file["num_records"] for file in files) == 5_000
    assert (min(f["min.cents"] for f in files), max(f["max.cents"] for f in files)) == (0, 4_999)
    assert [cents for _, cents in table.rows()] == list(range(5_000))


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


def test_another_writer(table: Any, totals: Any) -> None:
    """Another program appends, and expires the log: nothing is lost, or comes twice."""
    table.create(TOTALS)
    committer = table.led()
    first = table.staged(totals(1), 1)
    commit(committer, first)
    second = table.staged(totals(2), 2, previous=1)
    write_deltalake(table.handle(), pa.table({"customer": ["bob"], "cents": [50]}, schema=TOTALS), mode="append")
    assert commit(committer, second)
    table.handle().create_checkpoint()
    table.handle().vacuum(0, dry_run=False, enforce_retention_duration=False)
    for again in (committer, table.committer()):
        assert not commit(again, first)
        assert not commit(again, second)
    assert [cents for _, cents in table.rows()] == [1, 2, 50]


@pytest.mark.parametrize("between", ["a fence", "another writer"])
def test_a_commit_that_was_overtaken(table: Any, totals: Any, monkeypatch: pytest.MonkeyPatch, between: str) -> None:
    """A commit stands still on its way: a fence that comes meanwhile refuses it, another writer's rows do not."""
    table.create(TOTALS)
    zombie, staged = table.led(1), table.staged(totals(1), 1)
    send = DeltaTable.create_write_transaction

    def delayed(handle: Any, *request: Any, **options: Any) -> None:
        monkeypatch.setattr(DeltaTable, "create_write_transaction", send)
        if between == "a fence":
            table.led(2)
        else:
            write_deltalake(table.handle(), pa.table({"customer": ["bob"], "cents": [2]}, schema=TOTALS), mode="append")
        send(handle, *request, **options)

    monkeypatch.setattr(DeltaTable, "create_write_transaction", delayed)
    if between == "another writer":
        assert commit(zombie, staged)
        assert table.rows() == [("ann", 1), ("bob", 2)]
        return
    with pytest.raises(Exception, match="newer instance has taken over"):
        commit(zombie, staged)
    assert table.rows() == []
    assert table.committer().commit([staged], 2, ORIGIN)
    assert table.rows() == [("ann", 1)]


def test_a_column_that_comes_between_staging_and_commit(table: Any, totals: Any) -> None:
    from deltalake.schema import Field, PrimitiveType

    table.create(TOTALS)
    committer, staged = table.led(), table.staged(totals(1), 1)
    table.handle().alter.add_columns([Field("note", PrimitiveType("string"))])
    commit(committer, staged)
    commit(committer, table.staged(totals(2), 2, previous=1))
    assert table.rows() == [("ann", 1, None), ("ann", 2, None)]


@pytest.mark.parametrize("pattern", ["_exactlyonce/*/*.json", "part-*.parquet"])
def test_a_staged_file_that_another_program_removed_halts(table: Any, totals: Any, pattern: str) -> None:
    table.create(TOTALS)
    committer, staged = table.led(), table.staged(totals(1), 1)
    (path,) = table.folder.glob(pattern)
    copy = path.rename(table.folder / "copy")
    with pytest.raises(StoreError, match=f"{path.name} was set aside, and is gone"):
        commit(committer, staged)
    copy.rename(path)
    commit(committer, staged)
    assert table.rows() == [("ann", 1)]


def test_a_table_that_is_away(table: Any, totals: Any) -> None:
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


def test_a_disk_that_is_not_mounted_at_a_barrier(table: Any, totals: Any) -> None:
    """Files below the empty mount point would be gone once it is back."""
    table.create(TOTALS)
    committer = table.led()
    assert commit(committer, table.staged_while_away(totals(1), 1, table.folder))
    assert table.rows() == [("ann", 1)]


@pytest.mark.parametrize("pattern", ["_exactlyonce/*/*.json", "part-*.parquet"])
def test_a_staged_file_that_is_cut_short_halts(table: Any, totals: Any, pattern: str) -> None:
    table.create(TOTALS)
    committer, staged = table.led(), table.staged(totals(1), 1)
    (path,) = table.folder.glob(pattern)
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(StoreError, match=f"{path.name} was set aside with {len(content)} bytes"):
        commit(committer, staged)
    path.write_bytes(content)
    assert commit(committer, staged)


def test_rows_that_are_in_no_file(table: Any, totals: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer counts them before it acknowledges, whatever the table has done with them."""
    table.create(TOTALS)
    monkeypatch.setattr(delta_table, "_partitioned", lambda rows, partition_by: [({}, rows.slice(1))])
    with pytest.raises(SinkFailed, match="1 rows are in files, and 2 records were written"):
        table.staged(totals(1, 2), 1)


def test_each_error_ends_the_connection(table: Any) -> None:
    """The next one has the secrets as they are then: credentials are rotated."""
    table.create(TOTALS)
    place = delta_table.TablePlace(str(table.folder), {})
    place.write("one", b"1")
    connected = place.files
    with pytest.raises(StoreUnavailable), place.explained():
        raise OSError("ExpiredToken")
    place.write("two", b"2")
    assert place.files is not connected


def test_staged_files_are_durable(table: Any, totals: Any, synced: list[str]) -> None:
    """Files, and the names of their folders."""
    table.create(TOTALS)
    table.staged(totals(1), 1)
    files = [*table.folder.glob("_exactlyonce/totals.out/*"), *table.folder.glob("part-totals.out-*")]
    assert len(files) == 3
    assert {str(path) for file in files for path in (file, file.parent)} | {str(table.folder)} <= set(synced)


# --- values -----------------------------------------------------------------------------------------------------------


class Part(msgspec.Struct):
    id: int
    tag: str | None = None


class Everything(msgspec.Struct):
    a: bool
    b: float
    c: bytes
    d: Decimal
    e: datetime
    f: Annotated[datetime, msgspec.Meta(tz=False)]
    g: date
    h: list[int]
    i: dict[str, int | None]
    j: Part | None


KEPT = (bytes, Decimal, datetime, date)


def test_values_of_every_type(table: Any) -> None:
    """A table that the sink creates takes all of them, and gives them back."""
    instant, local = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=timezone.utc), datetime(2026, 1, 2)
    row = Everything(
        a=True, b=float("inf"), c=b"\0", d=Decimal("-1.5"), e=instant, f=local, g=date(1, 1, 1), h=[1, 2],
        i={"x": None}, j=None,
    )  # fmt: skip
    other = msgspec.structs.replace(row, j=Part(2**63 - 1, "ü"))
    table.type, table.options["create"] = Everything, True
    commit(table.led(), table.staged([row, other], 1))
    found = [{**each, "i": dict(each["i"])} for each in table.handle().to_pyarrow_table().to_pylist()]
    assert found == [msgspec.to_builtins(each, builtin_types=KEPT) for each in (row, other)]


# --- what is wrong ----------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "a login in the address": ("s3://key:abc@lake/totals", {}, "its address holds a user and a password"),
    "a relative path": ("lake/totals", {}, "must be the table's path from / on"),
    "mode": ("/t", {"mode": "delete"}, "mode='delete' must be one of 'append', 'upsert'"),
    "a key": ("/t", {"key": ("id",)}, "leave key= out"),
    "no key": ("/t", {"mode": "upsert"}, "mode='upsert' needs the columns"),
    "no such key": ("/t", {"mode": "upsert", "key": ("day",)}, "key= names 'day'"),
    "a key of None": ("/t", {"mode": "upsert", "key": ("tag",)}, "tag is in key=, and its type admits None"),
    "create": ("/t", {"create": 1}, "create=1 must be True or False"),
    "options": ("/t", {"storage_options": "x"}, "storage_options= must be options"),
    "a secret": ("s3://t", {"storage_options": {"AWS_SECRET_ACCESS_KEY": "abc"}}, "has a secret written out"),
    "roll_bytes": ("/t", {"roll_bytes": 0}, "roll_bytes=0 must be a number of bytes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    path, options, message = WRONG[name]
    sink: DeltaSink[Any] = DeltaSink(path, **options)
    problems = "; ".join(sink.problems(Part))
    assert re.search(message, problems)
    assert "abc" not in problems


def no_table(table: Any) -> None:
    """Nothing is there."""


def no_parent(table: Any) -> None:
    table.folder = table.folder / "deeper" / "still"
    table.options["create"] = True


def missing_column(table: Any) -> None:
    table.create(pa.schema([("customer", pa.string())]))


def wrong_type(table: Any) -> None:
    table.create(pa.schema([("customer", pa.int64()), ("cents", pa.float64())]))


def constraint(table: Any) -> None:
    table.create(TOTALS)
    table.handle().alter.add_constraint({"positive": "cents > 0"})


def odd_partition(table: Any) -> None:
    table.create(TOTALS.append(pa.field("at", pa.timestamp("us", "UTC"))), partition_by=["at"])


def unknown_partition(table: Any) -> None:
    table.create(TOTALS.append(pa.field("day", pa.date32())), partition_by=["day"])


def partitions_alone(table: Any) -> None:
    table.create(TOTALS.append(pa.field("note", pa.string())), partition_by=["customer", "cents"])


def expiring_ledger(table: Any) -> None:
    table.create(TOTALS, configuration={"delta.setTransactionRetentionDuration": "interval 1 days"})


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


BAD_TABLES: dict[Callable[[Any], None], str] = {
    no_table: "There is no Delta table at",
    no_parent: "is missing, or is not a folder. Make it, mount it",
    missing_column: "it has no column 'cents', but customer: add the column, or leave the field out",
    wrong_type: "its column 'customer' is int64, and the field is str: change the type of one of them",
    constraint: "rows are added as plain files: make a table without it",
    odd_partition: "is partitioned by 'at', a column of timestamp",
    unknown_partition: "is partitioned by 'day', and no field has that name",
    partitions_alone: "is partitioned by all fields of the record, and its files would have no column",
    expiring_ledger: "after which transactions expire, and the ledger is made of them",
    newer_features: "rows are added as plain files: make a table without it",
    no_variable: "the environment has no variable NOT_THERE",
}


@pytest.mark.parametrize("bad", BAD_TABLES, ids=lambda bad: bad.__name__)
def test_a_table_that_does_not_fit(table: Any, bad: Callable[[Any], None]) -> None:
    bad(table)
    kind = ConfigError if bad is no_variable else StoreError
    with pytest.raises(kind, match=re.escape(BAD_TABLES[bad])):
        table.committer().check()


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_files_that_were_never_committed_are_removed(table: Any, totals: Any, mode: str) -> None:
    table.create(TOTALS)
    table.options |= {"mode": mode, "key": ("customer",) if mode == "upsert" else ()}
    assert_swept(table, totals, lambda: set(map(Path, table.handle().file_uris())))


@pytest.mark.parametrize("create", [False, True])
def test_a_folder_without_rights(table: Any, create: bool) -> None:
    """The table is there, or could not be made: the error says so, and does not ask for create=True."""
    table.create(TOTALS)
    table.options["create"] = create
    committer = table.committer()
    with without_rights(table.folder), pytest.raises(StoreError, match=r"refuses: .*Give this user the right"):
        committer.check()


def test_a_folder_where_no_table_may_be_made(table: Any) -> None:
    table.options["create"] = True
    with without_rights(table.folder.parent), pytest.raises(StoreError, match=r"refuses: .*Give this user the right"):
        table.committer().check()

"""Tables of Iceberg as people have them: partitioned, sorted, evolving, written to by others, or unfit."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lake_hands import assert_swept, commit

from exactlyonce.pipeline.errors import ConfigError, StoreError, StoreUnavailable
from exactlyonce.sinks import IcebergSink
from exactlyonce.sinks.lake import keyed
from exactlyonce.testing.sink_contract.hooks import ORIGIN

pytest.importorskip("pyiceberg", reason="ICEBERG NOT TESTED: it needs the extra `iceberg`")
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.sorting import SortDirection, SortField, SortOrder
from pyiceberg.transforms import BucketTransform, DayTransform, IdentityTransform
from pyiceberg.types import DoubleType, IntegerType, LongType, NestedField, StringType, TimestamptzType

from exactlyonce.sinks.iceberg import table as iceberg_table

TOTALS = pa.schema([pa.field("customer", pa.string(), nullable=False), pa.field("cents", pa.int64(), nullable=False)])


MODES: dict[str, dict[str, Any]] = {"append": {}, "upsert": {"mode": "upsert", "key": ("customer",)}}


class Event(msgspec.Struct):
    id: int
    at: datetime
    tag: str | None = None


def test_all_subtasks_of_a_checkpoint_are_one_snapshot(lake: Any, totals: Any) -> None:
    lake.create(TOTALS)
    committer = lake.led()
    before = len(lake.table().snapshots())
    assert commit(committer, lake.staged(totals(1, 2), 7), lake.staged(totals(3), 7, subtask=1))
    table = lake.table()
    assert len(table.snapshots()) == before + 1
    assert table.current_snapshot().summary["exactlyonce.checkpoint"] == "7"
    assert [cents for _, cents in lake.rows()] == [1, 2, 3]
    assert list(lake.folder.rglob("exactlyonce/*/*")) == [], "lists of staged files are removed"


def test_partitions_and_sort_order_of_the_table(lake: Any) -> None:
    """Files are of one partition each, whatever the transform, and their rows are sorted."""
    schema = Schema(
        NestedField(1, "id", LongType(), required=True), NestedField(2, "at", TimestamptzType(), required=True),
        NestedField(3, "tag", StringType(), required=False),
    )  # fmt: skip
    day, bucket = PartitionField(2, 1000, DayTransform(), "day"), PartitionField(1, 1001, BucketTransform(2), "b")
    spec = PartitionSpec(day, bucket)
    order = SortOrder(SortField(1, IdentityTransform(), SortDirection.DESC))
    lake.create(schema, partition_spec=spec, sort_order=order)
    lake.type = Event
    events = [Event(number, datetime(2026, 11, 1 + number % 2, tzinfo=timezone.utc)) for number in range(20)]
    commit(lake.led(), lake.staged(events, 1))
    files = list(lake.table().scan().plan_files())
    assert len({str(file.file.partition) for file in files}) == len(files) == 4
    for file in files:
        ids = pq.read_table(file.file.file_path.removeprefix("file://"))["id"].to_pylist()
        assert ids == sorted(ids, reverse=True)
    assert lake.table().scan(row_filter="at < '2026-11-02T00:00:00+00:00'").to_arrow().num_rows == 10


def test_large_intervals_make_several_files(lake: Any, totals: Any) -> None:
    lake.create(TOTALS)
    lake.options["roll_bytes"] = 10_000
    commit(lake.led(), lake.staged(totals(*range(5_000)), 1))
    assert len(list(lake.table().scan().plan_files())) > 5
    assert [cents for _, cents in lake.rows()] == list(range(5_000))


def test_rows_replaced_by_key(lake: Any) -> None:
    """The last of a key counts, within an interval, its files and the table; all of it is one snapshot."""
    schema = Schema(
        NestedField(1, "id", LongType(), required=True), NestedField(2, "at", TimestamptzType(), required=True),
        NestedField(3, "tag", StringType(), required=False),
    )  # fmt: skip
    lake.create(schema, partition_spec=PartitionSpec(PartitionField(2, 1000, DayTransform(), "day")))
    lake.type = Event
    lake.options |= {"mode": "upsert", "key": ("id", "at"), "roll_bytes": 1}
    days = [datetime(2026, 11, day, tzinfo=timezone.utc) for day in (1, 2, 3)]
    committer = lake.led()
    commit(committer, lake.staged([Event(n % 3, days[n % 2], str(n)) for n in range(300)], 1))
    before = lake.table()
    untouched = {
        file.file.file_path for file in before.scan(row_filter="at < '2026-11-02T00:00:00+00:00'").plan_files()
    }
    changes = [Event(1, days[1], "x"), Event(1, days[2], "new"), Event(1, days[1], "y")]
    commit(committer, lake.staged(changes, 2, previous=1), lake.staged([Event(2, days[1], "z")], 2, subtask=1))
    table = lake.table()
    assert len(table.snapshots()) == len(before.snapshots()) + 1
    rows = sorted((row["id"], row["at"].day, row["tag"]) for row in table.scan().to_arrow().to_pylist())
    assert rows == [(0, 1, "294"), (0, 2, "297"), (1, 1, "298"), (1, 2, "y"), (1, 3, "new"), (2, 1, "296"), (2, 2, "z")]
    assert untouched < {file.file.file_path for file in table.scan().plan_files()}
    assert list(lake.folder.rglob("exactlyonce/*/*")) == []


def test_an_upsert_that_another_writer_overtakes(lake: Any, totals: Any) -> None:
    """Rows that came meanwhile are replaced as well."""
    lake.create(TOTALS)
    lake.options |= {"mode": "upsert", "key": ("customer",)}
    committer, staged = lake.led(), lake.staged(totals(1), 1)
    lake.table().append(pa.table({"customer": ["ann", "bob"], "cents": [50, 60]}, schema=TOTALS))
    commit(committer, staged)
    assert lake.rows() == [("ann", 1), ("bob", 60)]


# --- others at the table ----------------------------------------------------------------------------------------------


def test_another_writer_and_expiry(lake: Any, totals: Any) -> None:
    """Another program appends, compacts the metadata and expires all snapshots: nothing is lost, or comes twice."""
    lake.create(TOTALS)
    committer = lake.led()
    first = lake.staged(totals(1), 1)
    commit(committer, first)
    other = lake.table()
    second = lake.staged(totals(2), 2, previous=1)
    other.append(pa.table({"customer": ["bob"], "cents": [50]}, schema=TOTALS))
    assert commit(committer, second), "it was overtaken, and does it again on what is there now"
    table = lake.table()
    table.maintenance.expire_snapshots().by_ids(
        [each.snapshot_id for each in table.snapshots() if each is not table.current_snapshot()][:-1]
    ).commit()
    for again in (committer, lake.committer()):
        assert not commit(again, first)
        assert not commit(again, second)
    assert [cents for _, cents in lake.rows()] == [1, 2, 50]


def test_a_late_request_of_an_older_leader_is_refused(lake: Any, totals: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A zombie's commit stands still on its way to the catalog while a newer leader fences: it is refused there."""
    from pyiceberg.catalog.sql import SqlCatalog

    lake.create(TOTALS)
    zombie, staged = lake.led(1), lake.staged(totals(1), 1)
    send = SqlCatalog.commit_table

    def delayed(catalog: Any, *request: Any) -> Any:
        monkeypatch.setattr(SqlCatalog, "commit_table", send)
        lake.led(2)
        return send(catalog, *request)

    monkeypatch.setattr(SqlCatalog, "commit_table", delayed)
    with pytest.raises(Exception, match="newer instance has taken over"):
        commit(zombie, staged)
    assert lake.rows() == []
    assert lake.committer().commit([staged], 2, ORIGIN)
    assert lake.rows() == [("ann", 1)]


def test_an_unknown_outcome(lake: Any, totals: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit lands and its answer is lost: the store is asked again, and its files are still there."""
    from pyiceberg.catalog.sql import SqlCatalog
    from sqlalchemy.exc import OperationalError

    lake.create(TOTALS)
    committer, staged = lake.led(), lake.staged(totals(1), 1)
    send = SqlCatalog.commit_table

    def lost(catalog: Any, *request: Any) -> Any:
        monkeypatch.setattr(SqlCatalog, "commit_table", send)
        send(catalog, *request)
        raise OperationalError("COMMIT", {}, Exception("server closed the connection unexpectedly"))

    monkeypatch.setattr(SqlCatalog, "commit_table", lost)
    with pytest.raises(StoreUnavailable, match="server closed the connection"):
        commit(committer, staged)
    assert not commit(committer, staged)
    assert lake.rows() == [("ann", 1)]


def add_column(table: Any) -> None:
    with table.update_schema() as update:
        update.add_column("note", StringType())


def move_columns(table: Any) -> None:
    with table.update_schema() as update:
        update.add_column("note", StringType())
        update.move_first("note")


def repartition(table: Any) -> None:
    with table.update_spec() as update:
        update.add_field("customer", BucketTransform(4), "bucket")


@pytest.mark.parametrize("evolve", [add_column, move_columns, repartition])
def test_a_table_that_evolves_between_staging_and_commit(lake: Any, totals: Any, evolve: Callable[[Any], None]) -> None:
    lake.create(TOTALS)
    committer = lake.led()
    staged = lake.staged(totals(1, 2), 1)
    evolve(lake.table())
    commit(committer, staged)
    commit(committer, lake.staged(totals(3), 2, previous=1))
    table = lake.table()
    rows = table.scan(selected_fields=("customer", "cents")).to_arrow().to_pylist()
    assert sorted(row["cents"] for row in rows) == [1, 2, 3]
    assert {file.file.spec_id for file in table.scan().plan_files()} == {table.spec().spec_id}


def drop_and_add(table: Any) -> None:
    with table.update_schema(allow_incompatible_changes=True) as update:
        update.delete_column("cents")
    with table.update_schema() as update:
        update.add_column("cents", LongType())


def rename_and_add(table: Any) -> None:
    with table.update_schema() as update:
        update.rename_column("cents", "cents_before")
    with table.update_schema() as update:
        update.add_column("cents", LongType())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("evolve", [drop_and_add, rename_and_add])
def test_another_column_of_the_same_name(lake: Any, totals: Any, evolve: Callable[[Any], None], mode: str) -> None:
    """It has the values of the field from the commit on, also of a worker that began before."""
    lake.create(pa.schema([("customer", pa.string()), ("cents", pa.int32())]))
    lake.options |= MODES[mode]
    committer, opened = lake.led(), lake.opened()
    for checkpoint in (1, 2):
        if checkpoint == 2:
            evolve(lake.table())
        opened.writer.write(opened.encoder.encode([lake.type(f"customer {checkpoint}", checkpoint)]))
        opened.writer.barrier(checkpoint)
        commit(committer, lake.flushed(opened, checkpoint, checkpoint - 1))
    table = lake.table()
    rows = table.scan(selected_fields=("customer", "cents")).to_arrow().to_pylist()
    assert {row["customer"]: row["cents"] for row in rows} == {"customer 1": None, "customer 2": 2}
    if evolve is rename_and_add:
        assert sorted(table.scan().to_arrow()["cents_before"].to_pylist(), key=str) == [1, None]


def test_an_upsert_of_workers_that_knew_different_types(lake: Any, totals: Any) -> None:
    lake.create(pa.schema([("customer", pa.string()), ("cents", pa.int32())]))
    lake.options |= MODES["upsert"]
    committer, before = lake.led(), lake.staged([lake.type("ann", 1)], 1)
    with lake.table().update_schema() as update:
        update.update_column("cents", LongType())
    commit(committer, before, lake.staged([lake.type("bob", 2**40)], 1, subtask=1))
    assert lake.rows() == [("ann", 1), ("bob", 2**40)]


class Customer(msgspec.Struct):
    nick: str = msgspec.field(name="nick name")


class Order(msgspec.Struct):
    customer: Customer
    cents: int = msgspec.field(name="in cents")


def test_names_that_are_written_otherwise_in_files(lake: Any) -> None:
    """Files that are written again keep the values of columns whose names Avro would not take."""
    lake.type, lake.options["create"] = Order, True
    committer, staged = lake.led(), lake.staged([Order(Customer("ann"), 1)], 1)
    with lake.table().update_spec() as update:
        update.add_field("in cents", BucketTransform(4), "bucket")
    commit(committer, staged)
    assert lake.rows() == [({"nick name": "ann"}, 1)]


def test_a_narrower_column_of_the_same_name_halts(lake: Any, totals: Any) -> None:
    lake.create(pa.schema([("customer", pa.string()), ("cents", pa.int64())]))
    committer, staged = lake.led(), lake.staged(totals(2**40), 1)
    with lake.table().update_schema(allow_incompatible_changes=True) as update:
        update.delete_column("cents")
    with lake.table().update_schema() as update:
        update.add_column("cents", IntegerType())
    with pytest.raises(StoreError, match=r"has a column of another type since .* Give the column its type again"):
        commit(committer, staged)


def test_a_column_that_is_dropped_halts(lake: Any, totals: Any) -> None:
    lake.create(TOTALS)
    committer, staged = lake.led(), lake.staged(totals(1), 1)
    with lake.table().update_schema(allow_incompatible_changes=True) as update:
        update.delete_column("cents")
    with pytest.raises(StoreError, match=r"shop\.totals does not fit the records: it has no column 'cents'"):
        commit(committer, staged)


@pytest.mark.parametrize("pattern", ["exactlyonce/*/*.avro", "data/*totals.out*.parquet"])
def test_a_staged_file_that_another_program_removed_halts(lake: Any, totals: Any, pattern: str) -> None:
    """Nothing is committed, and the message says which file is gone; put back, it is committed."""
    lake.create(TOTALS)
    committer, staged = lake.led(), lake.staged(totals(1), 1)
    (path,) = lake.folder.rglob(pattern)
    copy = path.rename(lake.folder / "copy")
    with pytest.raises(StoreError, match=f"{path.name} was set aside, and is gone"):
        commit(committer, staged)
    copy.rename(path)
    commit(committer, staged)
    assert lake.rows() == [("ann", 1)]


@pytest.mark.parametrize("mode", MODES)
def test_a_disk_that_is_not_mounted_at_a_barrier(lake: Any, totals: Any, mode: str) -> None:
    """Files below the empty mount point would be gone once it is back."""
    lake.create(TOTALS)
    lake.options |= MODES[mode]
    committer = lake.led()
    assert commit(committer, lake.staged_while_away(totals(1), 1, lake.folder))
    assert lake.rows() == [("ann", 1)]


@pytest.mark.parametrize(
    ("mode", "pattern"),
    [
        ("append", "exactlyonce/*/*.avro"), ("append", "data/*totals.out*.parquet"),
        ("upsert", "exactlyonce/*/*.parquet"),
    ],
)  # fmt: skip
def test_a_staged_file_that_is_cut_short_halts(lake: Any, totals: Any, mode: str, pattern: str) -> None:
    lake.create(TOTALS)
    lake.options |= MODES[mode]
    committer, staged = lake.led(), lake.staged(totals(1), 1)
    (path,) = lake.folder.rglob(pattern)
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(StoreError, match=f"{path.name} was set aside with {len(content):,} bytes"):
        commit(committer, staged)
    path.write_bytes(content)
    assert commit(committer, staged)


@pytest.mark.parametrize("mode", MODES)
def test_staged_files_are_durable(lake: Any, totals: Any, synced: list[str], mode: str) -> None:
    """Files, and the names of their folders."""
    lake.create(TOTALS)
    lake.options |= MODES[mode]
    lake.staged(totals(1), 1)
    staged = list(lake.folder.rglob("exactlyonce/totals.out/*"))
    files = [*staged, *lake.folder.rglob("data/*totals.out-*")]
    assert len(files) == (3 if mode == "append" else 1)
    assert {str(path) for file in files for path in (file, file.parent, file.parent.parent)} <= set(synced)


# --- values -----------------------------------------------------------------------------------------------------------


KEPT = (bytes, Decimal, datetime, date)


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
    j: Event | None


def test_values_of_every_type(lake: Any) -> None:
    """A table that the sink creates takes all of them, and gives them back."""
    instant, local = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=timezone.utc), datetime(2026, 1, 2)
    row = Everything(
        a=True, b=float("inf"), c=b"\0", d=Decimal("-1.5"), e=instant, f=local, g=date(1, 1, 1), h=[1, 2],
        i={"x": None}, j=None,
    )  # fmt: skip
    other = msgspec.structs.replace(row, j=Event(2**63 - 1, instant, "ü"))
    lake.type, lake.options["create"] = Everything, True
    commit(lake.led(), lake.staged([row, other], 1))
    found = lake.table().scan().to_arrow().to_pylist()
    found = [{**each, "i": dict(each["i"])} for each in found]
    assert found == [msgspec.to_builtins(each, builtin_types=KEPT) for each in (row, other)]


def test_narrow_columns_take_what_fits(lake: Any) -> None:
    """A value that a column of 32 bits cannot hold unchanged is refused by the encoder, with the field's name."""
    schema = pa.schema([("customer", pa.string()), ("cents", pa.int32())])
    lake.create(schema)
    lake.led()
    with pytest.raises(ValueError, match=r"cents: .*too large"):
        lake.staged([lake.type("ann", 2**31)], 1)

    class Share(msgspec.Struct):
        customer: str
        cents: float

    lake.catalog().drop_table("shop.totals")
    lake.create(pa.schema([("customer", pa.string()), ("cents", pa.float32())]))
    lake.type = Share
    for value in (0.1, 1e300):
        with pytest.raises(ValueError, match=r"cents: .* would be rounded"):
            lake.staged([Share("ann", value)], 1)
    commit(lake.led(), lake.staged([Share("ann", 0.5), Share("ann", float("nan"))], 1))


# --- what is wrong ----------------------------------------------------------------------------------------------------

CATALOG = {"type": "sql", "uri": "sqlite://", "warehouse": "/lake"}
WRONG: dict[str, tuple[tuple[str], dict[str, Any], str]] = {
    "no namespace": (("totals",), {}, "must be a namespace and a name"),
    "no catalog": (("a.b",), {"catalog": {}}, "catalog= must be the properties"),
    "no type": (("a.b",), {"catalog": {"warehouse": "/lake"}}, 'catalog= has no "type"'),
    "not text": (("a.b",), {"catalog": {**CATALOG, "echo": True}}, r"catalog\['echo'\] must be text"),
    "a password": (("a.b",), {"catalog": {**CATALOG, "uri": "postgresql://a:b@c/d"}}, "a secret written out"),
    "a token": (("a.b",), {"catalog": {**CATALOG, "token": "abc"}}, r"catalog\['token'\] has a secret written out"),
    "no variable": (("a.b",), {"catalog": {**CATALOG, "uri": "env:"}}, "names no variable"),
    "mode": (("a.b",), {"mode": "delete"}, "mode='delete' must be one of 'append', 'upsert'"),
    "a key": (("a.b",), {"key": ("id",)}, "leave key= out"),
    "no key": (("a.b",), {"mode": "upsert"}, "mode='upsert' needs the columns"),
    "a key of None": (("a.b",), {"mode": "upsert", "key": ("tag",)}, "tag is in key=, and its type admits None"),
    "create": (("a.b",), {"create": 1}, "create=1 must be True or False"),
    "roll_bytes": (("a.b",), {"roll_bytes": 0}, "roll_bytes=0 must be a number of bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    arguments, options, message = WRONG[name]
    all_options: dict[str, Any] = {"catalog": CATALOG, **options}
    sink: IcebergSink[Any] = IcebergSink(*arguments, **all_options)
    problems = "; ".join(sink.problems(Event))
    assert re.search(message, problems)
    assert "abc" not in problems


def no_table(lake: Any) -> None:
    lake.catalog().create_namespace("shop")
    lake.catalog().create_table("shop.others", TOTALS)


def no_namespace(lake: Any) -> None:
    lake.catalog()


def no_catalog(lake: Any) -> None:
    """The database is somebody else's."""


def anothers_catalog(lake: Any) -> None:
    """Two catalogs in one database, told apart by their names."""
    lake.create(TOTALS)
    lake.options["catalog"] = {**lake.properties, "name": "production"}


def missing_column(lake: Any) -> None:
    lake.create(pa.schema([("customer", pa.string())]))


def required_column(lake: Any) -> None:
    lake.create(TOTALS.append(pa.field("day", pa.date32(), nullable=False)))


def wrong_type(lake: Any) -> None:
    lake.create(pa.schema([("customer", pa.int64()), ("cents", pa.float64())]))


def other_files(lake: Any) -> None:
    lake.create(TOTALS, properties={"write.format.default": "orc"})


def newer_format(lake: Any) -> None:
    """As Spark makes it; pyiceberg makes none."""
    lake.create(TOTALS)
    (path,) = lake.folder.rglob("*.metadata.json")
    path.write_text(path.read_text().replace('"format-version":2', '"format-version":3,"next-row-id":0'))


def no_folder(lake: Any) -> None:
    lake.options["catalog"] = {**lake.properties, "uri": f"sqlite:///{lake.folder}/missing/catalog.db"}


def no_variable(lake: Any) -> None:
    lake.options["catalog"] = {**lake.properties, "uri": "env:NOT_THERE"}


def no_driver(lake: Any) -> None:
    lake.options["catalog"] = {**lake.properties, "uri": "oracle://x"}


BAD_TABLES: dict[Callable[[Any], None], str] = {
    no_table: "has no table shop.totals. Namespace 'shop' has shop.others. Create the table, set create=True",
    no_namespace: "It has no namespace 'shop' either",
    no_folder: "Make or mount the folder of its file, or correct uri in catalog=",
    no_catalog: "The database has no catalog in it",
    anothers_catalog: "Catalog 'production' has no table shop.totals",
    missing_column: "it has no column 'cents', but customer: add the column, or leave the field out",
    required_column: "its column 'day' is required, and no field has that name: add one",
    wrong_type: "its column 'customer' is int64, and the field is str: change the type of one of them",
    other_files: "wants orc files, and Parquet is written",
    newer_format: "has format version 3, and pyiceberg writes up to 2",
    no_variable: "the environment has no variable NOT_THERE",
    no_driver: "Install what it names beside exactlyonce",
}


@pytest.mark.parametrize("bad", BAD_TABLES, ids=lambda bad: bad.__name__)
def test_a_table_that_does_not_fit(lake: Any, bad: Callable[[Any], None]) -> None:
    """The check before a run says what is missing and what to do; a look beside a run says the same."""
    bad(lake)
    kind = ConfigError if bad is no_variable else StoreError
    with pytest.raises(kind, match=re.escape(BAD_TABLES[bad])):
        lake.committer().check()


def test_two_pipelines_share_a_table(lake: Any, totals: Any) -> None:
    """A look shows each its own ledger."""
    lake.create(TOTALS)
    commit(lake.led(), lake.staged(totals(1), 3))
    other = lake.committer("more")
    other.fence(1, "topic-9")
    mine, others = lake.committer().look(), other.look()
    assert (mine.ledger, mine.origin, mine.problem) == ({0: 3}, ORIGIN, "")
    assert (others.ledger, others.origin) == ({}, "topic-9")


def test_a_warehouse_without_the_right_to_write(lake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyiceberg.io.pyarrow import PyArrowFile

    lake.create(TOTALS)

    def denied(file: Any, overwrite: bool = False) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(PyArrowFile, "create", denied)
    with pytest.raises(StoreError, match="Give this user the right to read and write the warehouse"):
        lake.committer().check()


def test_a_double_is_no_int(lake: Any) -> None:
    lake.create(Schema(NestedField(1, "customer", StringType()), NestedField(2, "cents", DoubleType())))
    with pytest.raises(StoreError, match="its column 'cents' is double, and the field is int"):
        lake.committer().check()


@pytest.mark.parametrize("mode", MODES)
def test_files_that_were_never_committed_are_removed(lake: Any, totals: Any, mode: str) -> None:
    with lake.create(TOTALS).update_spec() as spec:
        spec.add_identity("customer")
    lake.options |= MODES[mode]
    assert_swept(lake, totals, lambda: live_files(lake))


def live_files(lake: Any) -> set[Path]:
    return {
        lake.folder / file.file.file_path.partition(f"{lake.folder}/")[2] for file in lake.table().scan().plan_files()
    }


def test_files_of_an_overtaken_upsert_are_removed(lake: Any, totals: Any) -> None:
    """The leader has written them for a snapshot that was refused."""
    lake.create(TOTALS)
    lake.options |= MODES["upsert"]
    committer = lake.led()
    commit(committer, lake.staged(totals(1), 1))
    staged = lake.staged(totals(2), 2, previous=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(iceberg_table, "without", overtaken_by(lake, totals(3)))
        commit(committer, staged)
    live = live_files(lake)
    assert lake.rows() == [("ann", 2)]
    written = set(lake.folder.rglob("data/*.parquet"))
    assert len(written - live) == 2, "the two that the upsert and the other writer have replaced"


def overtaken_by(lake: Any, rows: Any) -> Any:
    """Lets another writer append *rows*, once, while the leader writes files."""
    without, left = keyed.without, [rows]

    def overtaken(*arguments: Any) -> Any:
        if left:
            schema = lake.table().schema().as_arrow()
            lake.table().append(pa.Table.from_pylist([msgspec.structs.asdict(row) for row in left.pop()], schema))
        return without(*arguments)

    return overtaken


def test_a_writer_that_does_not_fit_closes_its_catalog(lake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyiceberg.catalog.sql import SqlCatalog

    closed, close = list[Any](), SqlCatalog.close
    lake.create(pa.schema([pa.field("customer", pa.string())]))

    def closing(catalog: Any) -> None:
        closed.append(catalog)
        close(catalog)

    monkeypatch.setattr(SqlCatalog, "close", closing)
    with pytest.raises(StoreError, match="it has no column 'cents'"):
        lake.opened()
    assert len(closed) == 1

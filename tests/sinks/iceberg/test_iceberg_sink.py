"""Tables of Iceberg as people have them: partitioned, sorted, evolving, written to by others, or unfit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lake_hands import MODES, TOTALS, Hands, before_a_commit, commit, files_below, lake_in, totals

from exactlyonce.pipeline.errors import ConfigError, StoreError, StoreUnavailable
from exactlyonce.testing.sink_contract.hooks import ORIGIN

pytest.importorskip("pyiceberg", reason="ICEBERG NOT TESTED: it needs the extra `iceberg`")

from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.sorting import SortDirection, SortField, SortOrder
from pyiceberg.transforms import BucketTransform, DayTransform, IdentityTransform
from pyiceberg.types import IntegerType, LongType, NestedField, StringType, TimestamptzType

from exactlyonce.sinks.iceberg import table as iceberg_table
from exactlyonce.sinks.lake.sink import LakeCommitter


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[Hands]:
    with lake_in(tmp_path / "lake", "iceberg") as hands:
        yield hands


class Event(msgspec.Struct):
    id: int
    at: datetime
    tag: str | None = None


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


# --- others at the table ----------------------------------------------------------------------------------------------


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
def test_a_table_that_evolves_between_staging_and_commit(lake: Any, evolve: Callable[[Any], None]) -> None:
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


@pytest.mark.parametrize(("evolve", "mode"), [(drop_and_add, "append"), (rename_and_add, "upsert")])
def test_another_column_of_the_same_name(lake: Any, evolve: Callable[[Any], None], mode: str) -> None:
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


def test_a_narrower_column_of_the_same_name_halts(lake: Any) -> None:
    lake.create(pa.schema([("customer", pa.string()), ("cents", pa.int64())]))
    committer, staged = lake.led(), lake.staged(totals(2**40), 1)
    with lake.table().update_schema(allow_incompatible_changes=True) as update:
        update.delete_column("cents")
    with lake.table().update_schema() as update:
        update.add_column("cents", IntegerType())
    with pytest.raises(StoreError, match=r"has a column of another type since .* Give the column its type again"):
        commit(committer, staged)


def test_a_column_that_is_dropped_halts(lake: Any) -> None:
    lake.create(TOTALS)
    committer, staged = lake.led(), lake.staged(totals(1), 1)
    with lake.table().update_schema(allow_incompatible_changes=True) as update:
        update.delete_column("cents")
    with pytest.raises(StoreError, match=r"shop\.totals does not fit the records: it has no column 'cents'"):
        commit(committer, staged)


# --- a refusal proves nothing -----------------------------------------------------------------------------------------


@contextmanager
def twice(lake: Any) -> Iterator[None]:
    """The next commit is delivered twice on its way, and its sender gets the answer to the second."""
    owner, name, _ = lake.client()
    send = getattr(owner, name)
    with pytest.MonkeyPatch.context() as patch:

        def repeated(*request: Any) -> Any:
            patch.undo()
            send(*request)
            return send(*request)

        patch.setattr(owner, name, repeated)
        yield
    assert getattr(owner, name) is send, "the commit has met it"


def files_in_snapshots(lake: Any) -> set[Path]:
    """The manifest lists, manifests and data files that snapshots of the table have."""
    table, paths = lake.table(), set[str]()
    for snapshot in table.snapshots():
        manifests = snapshot.manifests(table.io)
        entries = [entry for manifest in manifests for entry in manifest.fetch_manifest_entry(table.io)]
        paths |= {snapshot.manifest_list, *(manifest.manifest_path for manifest in manifests)}
        paths |= {entry.data_file.file_path for entry in entries}
    return {Path(path.removeprefix("file://")) for path in paths}


def files_there(lake: Any) -> set[Path]:
    """All of them on the disk, whether a snapshot has them or not."""
    return {path for path in files_below(lake.folder) if path.suffix in (".avro", ".parquet")}


@pytest.mark.parametrize("mode", [*MODES, "fence"])
def test_a_commit_that_is_delivered_twice(lake: Any, mode: str) -> None:
    """The first lands, and the second is refused: the snapshot keeps its files, and the next commit follows it."""
    lake.create(TOTALS)
    lake.options |= MODES.get(mode, {})
    committer = lake.led()
    commit(committer, lake.staged(totals(1), 1))
    staged = lake.staged(totals(2), 2, previous=1)
    with twice(lake):
        committer.fence(2, ORIGIN) if mode == "fence" else commit(committer, staged)
    newest = {"append": [("ann", 1), ("ann", 2)], "upsert": [("ann", 2)], "fence": [("ann", 1)]}
    assert lake.rows() == newest[mode]
    assert files_in_snapshots(lake) <= files_there(lake)
    assert committer.commit([staged], 2, ORIGIN) is (mode == "fence")
    assert committer.commit([lake.staged(totals(2), 3, previous=2)], 2, ORIGIN)
    assert ("ann", 2) in lake.rows()


@pytest.mark.parametrize("mode", MODES)
def test_a_commit_that_is_overtaken_leaves_nothing(lake: Any, mode: str) -> None:
    """Another snapshot follows the one that it requires, so its files are no snapshot's, and are removed."""
    lake.create(TOTALS)
    lake.options |= MODES[mode]
    committer, staged = lake.led(), lake.staged(totals(1), 1)
    with before_a_commit(lake, lambda: lake.append(*totals(2))):
        commit(committer, staged)
    assert files_there(lake) == files_in_snapshots(lake)


def test_a_catalog_that_answers_with_an_older_state(lake: Any) -> None:
    """A cache before it shows the table as it was before the commit: it may have landed, and all of it stays."""
    lake.create(TOTALS)
    lake.options |= MODES["upsert"]
    committer = lake.led()
    commit(committer, lake.staged(totals(1), 1))
    staged, client = lake.staged(totals(2), 2, previous=1), committer.lake.catalog.get()
    older, load, asked = client.load_table("shop.totals"), client.load_table, count()
    committer.fence(2, ORIGIN)

    def cached(identifier: str) -> Any:
        """The loads of the committer, of the commit twice on its way, and then older states."""
        return load(identifier) if next(asked) < 3 else older

    with pytest.MonkeyPatch.context() as patch, twice(lake):
        patch.setattr(client, "load_table", cached)
        with pytest.raises(StoreUnavailable, match="Other writers of the table were faster"):
            committer.commit([staged], 2, ORIGIN)
    assert lake.rows() == [("ann", 2)]
    assert files_in_snapshots(lake) <= files_there(lake)
    assert not committer.commit([staged], 2, ORIGIN)


# --- upkeep -----------------------------------------------------------------------------------------------------------


def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a sink's table is created with, in smaller numbers."""
    numbers = {"write.metadata.previous-versions-max": "3", "commit.manifest.min-count-to-merge": "4"}
    monkeypatch.setattr(iceberg_table, "BOUNDED", {**iceberg_table.BOUNDED, **numbers})
    monkeypatch.setattr(iceberg_table, "SNAPSHOTS_MAX", 6)


def commits(lake: Any, count: int) -> LakeCommitter:
    committer: LakeCommitter = lake.led()
    for checkpoint in range(1, count + 1):
        commit(committer, lake.staged(totals(checkpoint), checkpoint, previous=checkpoint - 1))
    return committer


def test_what_does_not_add_up_in_a_table_that_the_sink_creates(lake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier metadata is removed, manifests are merged, and every snapshot can still be read."""
    few(monkeypatch)
    lake.options["create"] = True
    commits(lake, 9)
    table = lake.table()
    assert len([*lake.folder.rglob("*.metadata.json")]) == 4, "the present one and three before it"
    assert len(table.current_snapshot().manifests(table.io)) <= 4
    assert [cents for _, cents in lake.rows()] == [*range(1, 10)]
    read = [table.scan(snapshot_id=snapshot.snapshot_id).to_arrow().num_rows for snapshot in table.snapshots()]
    assert read == [*range(10)], "the fence, and nine commits"


def test_a_look_says_what_grows(lake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names too many snapshots, and metadata that nobody removes; after upkeep nothing, and the ledger is there."""
    few(monkeypatch)
    lake.create(TOTALS)
    committer = commits(lake, 6)
    growth = committer.look().growth
    assert growth.startswith("has 7 snapshots, all of which each commit reads and writes: expire old ones; it keeps")
    assert "'write.metadata.delete-after-commit.enabled' = 'true'" in growth
    lake.expire()
    with lake.table().transaction() as change:
        change.set_properties({"write.metadata.delete-after-commit.enabled": "true"})
    view = committer.look()
    assert (view.growth, view.ledger) == ("", {0: 6})


# --- values -----------------------------------------------------------------------------------------------------------


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


def with_properties(**changed: str) -> Callable[[Any], None]:
    return lambda lake: lake.options.update(catalog={**lake.properties, **changed})


def no_table(lake: Any) -> None:
    lake.catalog().create_namespace("shop")
    lake.catalog().create_table("shop.others", TOTALS)


def anothers_catalog(lake: Any) -> None:
    """Two catalogs in one database, told apart by their names."""
    lake.create(TOTALS)
    with_properties(name="production")(lake)


def newer_format(lake: Any) -> None:
    """As Spark makes it; pyiceberg makes none."""
    lake.create(TOTALS)
    (path,) = lake.folder.rglob("*.metadata.json")
    path.write_text(path.read_text().replace('"format-version":2', '"format-version":3,"next-row-id":0'))


BAD_TABLES: list[tuple[Callable[[Any], object], str]] = [
    (no_table, "has no table shop.totals. Namespace 'shop' has shop.others. Create the table, set create=True"),
    (lambda lake: lake.catalog(), "It has no namespace 'shop' either"),
    (with_properties(uri="sqlite:////missing/catalog.db"), "Make or mount the folder of its file, or correct uri in"),
    (lambda lake: None, "The database has no catalog in it"),
    (anothers_catalog, "Catalog 'production' has no table shop.totals"),
    (lambda lake: lake.create(TOTALS.append(pa.field("day", pa.date32(), nullable=False))),
     "its column 'day' is required, and no field has that name: add one"),
    (lambda lake: lake.create(TOTALS, properties={"write.format.default": "orc"}), "wants orc files, and Parquet is"),
    (newer_format, "has format version 3, and pyiceberg writes up to 2"),
    (with_properties(uri="env:NOT_THERE"), "the environment has no variable NOT_THERE"),
    (with_properties(uri="oracle://x"), "Install what it names beside exactlyonce"),
]  # fmt: skip


@pytest.mark.parametrize(("bad", "said"), BAD_TABLES, ids=[said for _, said in BAD_TABLES])
def test_a_table_that_does_not_fit(lake: Any, bad: Callable[[Any], object], said: str) -> None:
    bad(lake)
    with pytest.raises(ConfigError if "variable" in said else StoreError, match=re.escape(said)):
        lake.committer().check()

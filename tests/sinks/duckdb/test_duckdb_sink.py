"""A table of DuckDB: values, modes, tables that do not fit, a file in other hands, and processes that die."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from tempfile import mkdtemp
from typing import Annotated, Any
from uuid import UUID

import msgspec
import pytest
from changed_rows import Item, applied, as_records, changes
from table_rows import Total

from exactlyonce.pipeline.changes import Change, holds_changes
from exactlyonce.pipeline.errors import Fenced, StoreError, StoreUnavailable
from exactlyonce.pipeline.records import Record
from exactlyonce.sinks import DuckDBSink
from exactlyonce.sinks.committer import Inspectable, StoreView
from exactlyonce.testing.sink_contract.hooks import ORIGIN, Forked, MemoryBlocks, stand_still

pytest.importorskip("duckdb", reason="DUCKDB NOT TESTED: it needs the extra `duckdb`")
import duckdb
from duckdb_file import DuckDBTable, asked, held

UTC = timezone.utc
NOBODY = 65534


class Line(msgspec.Struct, frozen=True):
    sku: str
    count: int | None


class Receipt(msgspec.Struct, frozen=True):
    id: int
    paid: bool
    weight: float
    note: str | None
    raw: bytes
    price: Decimal
    at: datetime
    local: Annotated[datetime, msgspec.Meta(tz=False)]
    day: date
    hour: time
    code: UUID
    tags: list[str]
    lines: list[Line]
    first: Line | None
    counts: dict[str, int]


RECEIPTS = [
    Receipt(
        2**63 - 1, True, -math.inf, None, b"\0\xff", Decimal("99999999999999999999.999999999999999999"),
        datetime(9999, 12, 31, 23, 59, 59, 999_999, UTC), datetime(1, 1, 1), date(1, 1, 1), time(23, 59, 59, 999_999),
        UUID(int=2**127), ["a", ""], [Line("x", 1), Line('"', None)], Line("\0", -1), {"é": 1, "": -1},
    ),
    Receipt(
        -(2**63), False, 5e-324, "\0\n'\"\\\U0001f600", b"", Decimal("-0.000000000000000001"),
        datetime(1970, 1, 1, tzinfo=timezone(timedelta(hours=5.5))), datetime(9999, 12, 31, 23, 59, 59, 1),
        date(9999, 12, 31), time(0), UUID(int=0), [], [], None, {},
    ),
]  # fmt: skip
TYPES = {
    "id": "BIGINT", "paid": "BOOLEAN", "weight": "DOUBLE", "note": "VARCHAR", "raw": "BLOB", "price": "DECIMAL(38,18)",
    "at": "TIMESTAMP WITH TIME ZONE", "local": "TIMESTAMP", "day": "DATE", "hour": "TIME", "code": "UUID",
    "tags": "VARCHAR[]", "lines": "STRUCT(sku VARCHAR, count BIGINT)[]", "first": "STRUCT(sku VARCHAR, count BIGINT)",
    "counts": "MAP(VARCHAR, BIGINT)",
}  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shop.duckdb"


def test_every_type_comes_back(path: Path) -> None:
    table = DuckDBTable(path, Receipt)
    assert table.led().commit([table.staged(RECEIPTS)], 1, ORIGIN)
    described = table.asked("DESCRIBE totals")
    assert {name: type_ for name, type_, *_ in described} == TYPES
    assert {name for name, _, null, *_ in described if null == "YES"} == {"note", "first"}
    found = [dict(zip(TYPES, row, strict=True)) for row in table.rows()]
    wanted = [msgspec.structs.asdict(receipt) for receipt in RECEIPTS]
    for row in wanted:
        row["lines"] = [msgspec.structs.asdict(line) for line in row["lines"]]
        row["first"] = row["first"] and msgspec.structs.asdict(row["first"])
    assert found == wanted


def test_values_that_do_not_fit_are_errors_of_their_records(path: Path) -> None:
    encode = DuckDBTable(path, Receipt).opened().encoder.encode
    for field, value in (
        ("id", 2**63), ("price", Decimal("1e-19")), ("price", Decimal(10**20)), ("at", datetime(2026, 1, 1)),
        ("local", datetime(2026, 1, 1, tzinfo=UTC)), ("note", "\ud800"), ("tags", [None]), ("raw", b"x" * (1 << 20)),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=f"{field}: |a row of 1,"):
            encode([RECEIPTS[1], msgspec.structs.replace(RECEIPTS[0], **{field: value})])


def test_upserts_of_lists_and_records_keep_the_last_of_each_key(path: Path) -> None:
    table = DuckDBTable(path, Receipt, mode="upsert", key=("day", "code"))
    leader = table.led()
    rows = [msgspec.structs.replace(RECEIPTS[0], id=number, tags=[str(number)]) for number in range(3)]
    for checkpoint, some in enumerate(([RECEIPTS[1], *rows], [*rows, RECEIPTS[1]]), 1):
        assert leader.commit([table.staged(some, checkpoint, batch=1)], 1, ORIGIN)
        assert table.asked("SELECT id, tags FROM totals ORDER BY id") == [(RECEIPTS[1].id, []), (2, ["2"])]


def test_an_upsert_leaves_other_columns_as_they_are(path: Path) -> None:
    asked(path, "CREATE TABLE totals (CUSTOMER VARCHAR PRIMARY KEY, cents BIGINT, note VARCHAR DEFAULT 'new')")
    asked(path, "INSERT INTO totals VALUES ('ann', 1, 'old')")
    table = DuckDBTable(path, Total, mode="upsert", key="customer", create=False)
    assert table.led().commit([table.staged([Total("ann", 2), Total("bob", 3)])], 1, ORIGIN)
    assert table.asked("SELECT * FROM totals ORDER BY 1") == [("ann", 2, "old"), ("bob", 3, "new")]


def test_deletes_take_only_the_key(path: Path) -> None:
    asked(path, "CREATE TABLE totals AS SELECT unnest(['ann', 'bob', 'ann']) AS customer")
    table = DuckDBTable(path, Total, mode="delete", key="customer")
    assert table.led().commit([table.staged([Total("ann", 1), Total("cid", 1)])], 1, ORIGIN)
    assert table.rows() == [("bob",)]


@pytest.mark.parametrize("key", [("id",), ("shop", "id")], ids="-".join)
@pytest.mark.parametrize("type_", [Change[Item], Record[Item | None]])
def test_the_table_has_what_the_changes_leave(path: Path, key: tuple[str, ...], type_: Any) -> None:
    table = DuckDBTable(path, type_, mode="upsert", key=key)
    leader = table.led()
    left: dict[Any, Item] = {}
    for checkpoint, made in enumerate(changes(random.Random(7), key, 4, 300, left), 1):
        given: Any = made if holds_changes(type_) else as_records(made)
        assert leader.commit([table.staged(given, checkpoint, batch=50)], 1, ORIGIN)
        left = applied(left, made)
        found = table.asked("SELECT shop, id, name, note FROM totals")
        assert sorted(found, key=repr) == sorted(map(msgspec.structs.astuple, left.values()), key=repr)


def test_more_rows_than_fit_into_blocks_that_a_manifest_names(path: Path) -> None:
    table = DuckDBTable(path, Total)
    records = [Total("x" * 1000, number) for number in range(9_000)]
    committable = table.staged(records, batch=3_000)
    assert committable.body == b"indexed"
    assert committable.records == 9_000
    assert table.led().commit([committable], 1, ORIGIN)
    assert [cents for _, cents in table.rows()] == [*range(9_000)]


def test_a_schema_of_the_file_and_names_that_are_quoted(tmp_path: Path) -> None:
    path = tmp_path / "main.duckdb"  # the database has the name of a schema
    asked(path, 'CREATE SCHEMA "select"')
    type_: Any = msgspec.defstruct("Row", [("group", str), ("cents", int)], rename={"cents": "a b"})
    table = DuckDBTable(path, type_, table='select.or"der', mode="upsert", key="group")
    assert table.led().commit([table.staged([type_("a", 1)])], 1, ORIGIN)
    assert table.asked('SELECT * FROM "select"."or""der"') == [("a", 1)]
    again = DuckDBTable(tmp_path / "again" / "main.duckdb", Total)
    again.path.parent.mkdir()
    again.led()
    assert again.rows() == []


# --- what the start refuses -------------------------------------------------------------------------------------------


MISFITS = {
    "CREATE TABLE totals (customer VARCHAR)": r"it has no column 'cents', but customer: add the column",
    "CREATE TABLE totals (customer VARCHAR, cents INTEGER)": r"its column 'cents' is INTEGER, and the field needs "
    r'BIGINT: ALTER TABLE "shop"\."main"\."totals" ALTER "cents" TYPE BIGINT',
    "CREATE TABLE totals (customer VARCHAR, cents BIGINT, day DATE NOT NULL)": r"'day' is NOT NULL without a default",
    "CREATE TABLE totals (customer VARCHAR, cents BIGINT GENERATED ALWAYS AS (1))": r"into a generated column",
    "CREATE VIEW totals AS SELECT 1 AS customer": "has no table totals",
    "CREATE TABLE exactlyonce_ledger (a BIGINT)": "exactlyonce_ledger is not that of exactlyonce",
}


@pytest.mark.parametrize("statement", MISFITS)
def test_a_table_that_does_not_fit(path: Path, statement: str) -> None:
    asked(path, statement)
    table = DuckDBTable(path, Total, create=False)
    with pytest.raises(StoreError, match=MISFITS[statement]):
        table.committer().check()
    assert looked(table).problem or "GENERATED" in statement


@pytest.mark.parametrize("mode", ["upsert", "delete"])
def test_a_key_column_with_a_collation_is_refused(path: Path, mode: Any) -> None:
    """Else keys that are equal by it would be told apart within a checkpoint alone."""
    asked(path, "CREATE TABLE totals (cents BIGINT, Customer VARCHAR COLLATE NOCASE.NOACCENT)")
    table = DuckDBTable(path, Total, mode=mode, key="customer")
    said = (
        r"its key column 'customer' has the collation NOCASE\.NOACCENT, by which different keys are equal: "
        r'(ALTER TABLE "shop"\."main"\."totals" ALTER "customer" TYPE VARCHAR)\.'
    )
    with pytest.raises(StoreError, match=said) as raised:
        table.committer().check()
    refusal = re.search(said, looked(table).problem or "")
    assert refusal is not None
    assert refusal[0] in str(raised.value)
    asked(path, refusal[1])
    table.committer().check()
    assert not looked(table).problem


def test_a_collation_that_makes_no_keys_equal_is_taken(path: Path) -> None:
    asked(path, 'CREATE TABLE totals (customer VARCHAR COLLATE "BINARY", cents BIGINT, note VARCHAR COLLATE NOCASE)')
    DuckDBTable(path, Total, mode="upsert", key="customer").committer().check()
    DuckDBTable(path, Total).committer().check()


def test_a_collation_of_the_process_is_refused(path: Path) -> None:
    table = DuckDBTable(path, Total, mode="upsert", key="customer")
    with duckdb.connect(path) as other:
        other.execute("SET GLOBAL default_collation = 'NOCASE'")
        with pytest.raises(StoreError, match="this process has set default_collation to NOCASE"):
            table.committer().check()
    table.committer().check()


def test_a_field_that_may_be_none_needs_a_column_that_may_be_null(path: Path) -> None:
    type_: Any = msgspec.defstruct("Row", [("a", int | None)])
    asked(path, "CREATE TABLE totals (a BIGINT NOT NULL)")
    with pytest.raises(StoreError, match=r"'a' is NOT NULL, and the field admits None: ALTER .* DROP NOT NULL"):
        DuckDBTable(path, type_).committer().check()


def looked(table: DuckDBTable) -> StoreView:
    committer = table.committer()
    assert isinstance(committer, Inspectable)
    view = committer.look()
    assert view is not None
    return view


def test_a_file_or_folder_that_is_missing(path: Path) -> None:
    for missing, options, said in (
        (path / "shop.duckdb", {}, "its folder is missing. Make it, mount it, or correct the path"),
        (path, {"create": False}, f"DuckDB file {path} does not exist. Create it, set create=True"),
    ):
        table = DuckDBTable(missing, Total, **options)
        with pytest.raises(StoreError, match=said):
            table.committer().check()
        assert said in looked(table).problem or not options
    assert looked(DuckDBTable(path, Total)) == StoreView()
    assert not path.exists()


def newer(path: Path) -> None:
    asked(path, "CREATE TABLE totals (customer VARCHAR, cents BIGINT)")
    content = bytearray(path.read_bytes())
    content[12:20] = (9_999).to_bytes(8, "little")
    checksum = 5_381
    for (word,) in struct.iter_unpack("<Q", content[8:4096]):
        checksum ^= word * 0xBF58476D1CE4E5B9 % (1 << 64)
    content[:8] = checksum.to_bytes(8, "little")
    path.write_bytes(content)


def torn(path: Path) -> None:
    asked(path, "CREATE TABLE totals AS SELECT 'x' AS customer, i AS cents FROM range(100_000) t(i)")
    content = bytearray(path.read_bytes())
    content[4096:12_288] = bytes(reversed(content[4096:12_288]))
    path.write_bytes(content)


BROKEN: dict[Any, str] = {
    lambda path: path.write_bytes(b"no database" * 1000): r"is not a valid DuckDB database file\. Correct the path",
    lambda path: path.touch(): r"is not a valid .* a crash has left empty may be removed",
    lambda path: path.mkdir(): r"Is a directory\. Correct the path",
    newer: r"version number 9999.* Upgrade duckdb where the pipeline runs",
    torn: r"Restore it, with its ledger, from a backup",
}


@pytest.mark.parametrize("breaks", BROKEN)
def test_a_file_that_is_no_database(path: Path, breaks: Any) -> None:
    breaks(path)
    with pytest.raises(StoreError, match=BROKEN[breaks]):
        DuckDBTable(path, Total).committer().check()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without rights")
def test_a_file_without_a_right_to_write(request: pytest.FixtureRequest) -> None:
    place = Path(mkdtemp())  # pytest's own folders are closed to others
    request.addfinalizer(lambda: shutil.rmtree(place))
    place.chmod(0o755)
    table = DuckDBTable(place / "shop.duckdb", Total)
    leader, committable = table.led(), table.staged([Total("ann", 1)])

    def as_nobody(tell: Any) -> None:
        os.setuid(NOBODY)
        leader.commit([committable], 1, ORIGIN)

    child = Forked(as_nobody)
    said = child.next_line()
    child.end()
    assert said.startswith(f"StoreError: DuckDB file {table.path} refuses: ")
    assert "Permission denied. Give this user the right to write it, and its folder." in said
    assert leader.commit([committable], 1, ORIGIN)


def test_a_table_that_was_dropped_is_not_made_anew(path: Path) -> None:
    table = DuckDBTable(path, Total)
    assert table.led().commit([table.staged([Total("ann", 1)])], 1, ORIGIN)
    table.asked("DROP TABLE totals")
    with pytest.raises(StoreError, match=r"no table totals, but its ledger has checkpoint 1 of the sink: .* not made"):
        table.committer().check()
    with pytest.raises(StoreError, match="has no table totals"):
        table.committer().commit([table.staged([Total("ann", 1)], 2)], 1, ORIGIN)
    table.asked("DROP TABLE exactlyonce_ledger")
    with pytest.raises(StoreError, match=r"the ledger exactlyonce_ledger is gone\. Restore it with the table"):
        table.committer().commit([table.staged([Total("ann", 1)], 2)], 1, ORIGIN)


def test_a_column_that_changes_while_the_pipeline_runs_takes_no_row(path: Path) -> None:
    """DuckDB would round without a word."""
    type_: Any = msgspec.defstruct("Row", [("a", float)])
    table = DuckDBTable(path, type_)
    leader = table.led()
    table.asked("ALTER TABLE totals ALTER a TYPE FLOAT")
    with pytest.raises(StoreError, match="its column 'a' is FLOAT, and the field needs DOUBLE"):
        leader.commit([table.staged([type_(0.1)])], 1, ORIGIN)
    table.asked("ALTER TABLE totals ALTER a TYPE DOUBLE")
    assert leader.commit([table.staged([type_(0.1)])], 1, ORIGIN)
    assert table.rows() == [(0.1,)]


def test_a_constraint_of_the_table_halts_and_leaves_nothing(path: Path) -> None:
    asked(path, "CREATE TABLE totals (customer VARCHAR, cents BIGINT CHECK (cents > 0))")
    table = DuckDBTable(path, Total)
    leader, committable = table.led(), table.staged([Total("ann", 1), Total("bob", 0)])
    with pytest.raises(StoreError, match=r"CHECK constraint failed.* Correct the table, or the sink, and run again"):
        leader.commit([committable], 1, ORIGIN)
    assert table.rows() == []
    assert table.asked("SELECT ledger->>'checkpoints' FROM exactlyonce_ledger") == [("{}",)]


@pytest.mark.parametrize(
    ("sink", "said"),
    [
        (DuckDBSink("s3://lake/shop.duckdb", table="t"), "must be the path of a file of this machine"),
        (DuckDBSink("", table="t"), "must be the path of a file of this machine"),
        (DuckDBSink("a.duckdb", table="a.b.c"), 'must be "table" or "schema.table"'),
        (DuckDBSink("a.duckdb", table="t", mode="upsert"), "mode='upsert' needs the columns"),
        (DuckDBSink("a.duckdb", table="t", key="customer"), "mode='append' inserts every record"),
        (DuckDBSink("a.duckdb", table="t", mode="upsert", key="id"), "key= names 'id'"),
    ],
)  # fmt: skip
def test_a_description_that_is_wrong(sink: DuckDBSink[Any], said: str) -> None:
    assert any(said in problem for problem in sink.problems(Total))


def test_types_that_no_table_of_duckdb_has() -> None:
    sink = DuckDBSink[Any]("a.duckdb", table="t")
    twice: Any = msgspec.defstruct("Row", [("a", int), ("A", int)])
    lasting: Any = msgspec.defstruct("Row", [("a", timedelta)])
    assert "differs from another in capitals alone" in next(sink.problems(twice))
    assert "write a duration as an int" in next(sink.problems(lasting))


# --- a file in other hands, and processes that die --------------------------------------------------------------------


def test_a_reader_that_holds_the_file_is_an_outage_and_named(path: Path) -> None:
    table = DuckDBTable(path, Total)
    leader, committable = table.led(), table.staged([Total("ann", 1)])
    with held(path) as pid:
        for ask in (lambda: leader.commit([committable], 1, ORIGIN), leader.check):
            with pytest.raises(StoreUnavailable, match=rf"another process has it open, .*\(PID {pid}\)\. Nothing is"):
                ask()
        assert looked(table).incarnation == 1, "two processes may read at once"
    assert leader.commit([committable], 1, ORIGIN)
    assert table.rows() == [("ann", 1)]


class _Standing:
    """Blocks of which the last is never read: who asks for it stands still."""

    def __init__(self, blocks: MemoryBlocks, tell: Any) -> None:
        self._blocks, self._tell = blocks, tell

    def fetch(self, refs: Any) -> Iterator[Any]:
        yield from self._blocks.fetch([*refs][:-1])
        self._tell()
        stand_still()


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_a_leader_that_is_stopped_in_a_transaction_and_killed(
    path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor waits for it, and is told its pid; what it had written is undone; a zombie is fenced."""
    monkeypatch.setattr("exactlyonce.sinks.duckdb.committer.INSERTED_BYTES", 1)  # each block is inserted at once
    table = DuckDBTable(path, Total, mode=mode, key="customer" if mode == "upsert" else ())
    table.led()
    committable = table.staged([Total(f"{number:01000}", number) for number in range(1_500)])
    assert len(committable.blocks) > 2
    stopped = Forked(lambda tell: table.committer(_Standing(table.blocks, tell)).commit([committable], 1, ORIGIN))
    try:
        assert stopped.next_line() == "in the middle"
        with pytest.raises(StoreUnavailable, match=rf"another process has it open, .*\(PID {stopped.pid}\)"):
            table.committer().fence(2, ORIGIN)
    finally:
        stopped.end()
    leader = table.committer()
    assert leader.fence(2, ORIGIN) == {}
    assert table.rows() == []
    with pytest.raises(Fenced):
        table.committer().commit([committable], 1, ORIGIN)
    assert leader.commit([committable], 2, ORIGIN)
    assert not leader.commit([committable], 2, ORIGIN)
    assert table.asked("SELECT count(*), count(DISTINCT cents), sum(cents) FROM totals") == [(1_500, 1_500, 1_124_250)]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 6 MB; the test is skipped where this user cannot mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("this user cannot mount a small disk")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_disk_that_is_full_read_only_or_away(disk: Path) -> None:
    table = DuckDBTable(disk / "shop.duckdb", Total)
    leader, committable = table.led(), table.staged([Total(random.Random(1).randbytes(30_000).hex(), 1)] * 12)
    ballast = disk / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    with pytest.raises(StoreUnavailable, match=r"its disk is full\. It says: .*No space left"):
        leader.commit([committable], 1, ORIGIN)
    ballast.unlink()
    assert table.rows() == []
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(StoreUnavailable, match="its disk is read-only"):
        leader.commit([committable], 1, ORIGIN)
    subprocess.run(["umount", str(disk)], check=True)
    with pytest.raises(StoreUnavailable, match=r"is its disk mounted\? It says: there is no such file"):
        leader.commit([committable], 1, ORIGIN)
    assert os.listdir(disk) == []
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(disk)], check=True)  # for the fixture


def test_the_ledger_is_one_value_for_each_sink(path: Path) -> None:
    table = DuckDBTable(path, Total)
    assert table.led(3).commit([table.staged([Total("ann", 1)])], 3, ORIGIN)
    ((pipeline, sink, ledger),) = table.asked("SELECT * FROM exactlyonce_ledger")
    assert (pipeline, sink) == ("shop", "out")
    assert json.loads(ledger) == {"incarnation": 3, "origin": ORIGIN, "checkpoints": {"0": 1}}

"""Tables of Iceberg and of Delta, with other writers, leaders and faults at them: both keep the same rules."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pyarrow as pa
import pytest
from changed_rows import Item, applied, change, changes, key_of
from lake_hands import MODES, TOTALS, Hands, before_a_commit, commit, files_below, lake_in, totals
from waiting import until

from exactlyonce.pipeline.changes import Change
from exactlyonce.pipeline.errors import StoreError, StoreUnavailable
from exactlyonce.sinks import DeltaSink, IcebergSink
from exactlyonce.testing.sink_contract.hooks import ORIGIN

each_mode = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(params=["iceberg", "delta"])
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hands]:
    with lake_in(tmp_path / "lake", request.param) as hands:
        yield hands


def test_all_subtasks_of_a_checkpoint_are_one_commit(lake: Hands) -> None:
    lake.create(TOTALS)
    committer = lake.led()
    before = lake.commits()
    assert commit(committer, lake.staged(totals(1, 2), 7), lake.staged(totals(3), 7, subtask=1))
    assert lake.commits() == before + 1
    assert [cents for _, cents in lake.rows()] == [1, 2, 3]
    assert {*lake.staged_files()} == lake.live(), "lists of staged files are removed"


def test_large_intervals_make_several_files(lake: Hands) -> None:
    lake.create(TOTALS)
    lake.options["roll_bytes"] = 10_000
    commit(lake.led(), lake.staged(totals(*range(5_000)), 1))
    assert len(lake.live()) > 5
    assert [cents for _, cents in lake.rows()] == list(range(5_000))


def test_two_pipelines_share_a_table(lake: Hands) -> None:
    """A look shows each its own ledger."""
    lake.create(TOTALS)
    commit(lake.led(), lake.staged(totals(1), 3))
    other = lake.committer("more")
    other.fence(1, "topic-9")
    mine, others = lake.committer().look(), other.look()
    assert (mine.ledger, mine.origin, mine.problem) == ({0: 3}, ORIGIN, "")
    assert (others.ledger, others.origin) == ({}, "topic-9")


class Part(msgspec.Struct):
    id: int
    at: datetime
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


def test_values_of_every_type(lake: Hands) -> None:
    """A table that the sink creates takes all of them, and gives them back."""
    instant, local = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=timezone.utc), datetime(2026, 1, 2)
    row = Everything(
        a=True, b=float("inf"), c=b"\0", d=Decimal("-1.5"), e=instant, f=local, g=date(1, 1, 1), h=[1, 2],
        i={"x": None}, j=None,
    )  # fmt: skip
    other = msgspec.structs.replace(row, j=Part(2**63 - 1, instant, "ü"))
    lake.type, lake.options["create"] = Everything, True
    commit(lake.led(), lake.staged([row, other], 1))
    kept = (bytes, Decimal, datetime, date)
    found = [{**value, "i": dict(value["i"])} for value in lake.values()]
    assert found == [msgspec.to_builtins(given, builtin_types=kept) for given in (row, other)]


# --- others at the table ----------------------------------------------------------------------------------------------


def test_another_writer_and_expiry(lake: Hands) -> None:
    """Another program appends, and removes what is old: nothing is lost, or comes twice."""
    lake.create(TOTALS)
    committer = lake.led()
    first = lake.staged(totals(1), 1)
    commit(committer, first)
    second = lake.staged(totals(2), 2, previous=1)
    lake.append(*totals(50))
    assert commit(committer, second), "it was overtaken, and does it again on what is there now"
    lake.expire()
    for again in (committer, lake.committer()):
        assert not commit(again, first)
        assert not commit(again, second)
    assert [cents for _, cents in lake.rows()] == [1, 2, 50]


def test_a_late_request_of_an_older_leader_is_refused(lake: Hands) -> None:
    """A zombie's commit stands still on its way while a newer leader fences."""
    lake.create(TOTALS)
    zombie, staged = lake.led(1), lake.staged(totals(1), 1)
    with before_a_commit(lake, lambda: lake.led(2)), pytest.raises(Exception, match="newer instance has taken over"):
        commit(zombie, staged)
    assert lake.rows() == []
    assert lake.committer().commit([staged], 2, ORIGIN)
    assert lake.rows() == [("ann", 1)]


@each_mode
def test_a_request_that_another_writer_overtakes(lake: Hands, mode: str) -> None:
    """An upsert replaces rows that came meanwhile as well."""
    lake.create(TOTALS)
    lake.options |= MODES[mode]
    committer, staged = lake.led(), lake.staged(totals(1), 1)
    with before_a_commit(lake, lambda: lake.append(*totals(2))):
        assert commit(committer, staged)
    assert lake.rows() == [("ann", 1), *([("ann", 2)] if mode == "append" else [])]


@each_mode
def test_a_commit_of_the_same_meanwhile(lake: Hands, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """The files that it removes once it is done are missed by nobody."""
    lake.create(TOTALS)
    lake.options |= MODES[mode]
    first, second, staged = lake.led(), lake.committer(), lake.staged(totals(1), 1)
    load = second.lake.load

    def overtaken() -> Any:
        table = load()
        monkeypatch.undo()
        assert commit(first, staged)
        return table

    monkeypatch.setattr(second.lake, "load", overtaken)
    assert not commit(second, staged)
    assert lake.rows() == [("ann", 1)]


def test_an_unknown_outcome(lake: Hands, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit lands and its answer is lost: the store is asked again, and its files are still there."""
    lake.create(TOTALS)
    committer, staged = lake.led(), lake.staged(totals(1), 1)

    owner, name, error = lake.client()
    send = getattr(owner, name)

    def lost(*request: Any, **options: Any) -> None:
        send(*request, **options)
        raise error

    monkeypatch.setattr(owner, name, lost)
    with pytest.raises(StoreUnavailable, match="server closed the connection"):
        commit(committer, staged)
    monkeypatch.undo()
    assert not commit(committer, staged)
    assert lake.rows() == [("ann", 1)]


def test_output_that_is_committed_is_never_given_up(lake: Hands, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its list of files cannot be removed: with --accept-loss a later sweep would take the files for left over."""
    lake.create(TOTALS)
    committer, staged = lake.led(), lake.staged(totals(1), 1)

    def refused(*_: Any) -> None:
        raise StoreError("The folder is read-only.")

    monkeypatch.setattr(type(committer.lake.load()), "forget", refused)
    with pytest.raises(StoreUnavailable, match=r"read-only\. The output is in the table"):
        commit(committer, staged)
    monkeypatch.undo()
    assert not commit(committer, staged)
    assert lake.rows() == [("ann", 1)]


# --- staged files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "damage"), [("append", "removed"), ("upsert", "cut short")])
def test_a_staged_file_that_is_damaged_halts(lake: Hands, mode: str, damage: str) -> None:
    """Nothing is committed, and the message names the file; put back, it is committed."""
    lake.create(TOTALS)
    lake.options |= MODES[mode]
    committer, staged = lake.led(), lake.staged(totals(1), 1)
    for path in lake.staged_files():
        content = path.read_bytes()
        size = len(content)
        if path.suffix == ".begun":  # for the sweep alone
            continue
        path.unlink()
        if damage == "cut short":
            path.write_bytes(content[:-1])
        said = "and is gone" if damage == "removed" else f"with ({size}|{size:,}) bytes"
        with pytest.raises(StoreError, match=f"{path.name} was set aside,? {said}"):
            commit(committer, staged)
        path.write_bytes(content)
    assert lake.rows() == []
    assert commit(committer, staged)
    assert lake.rows() == [("ann", 1)]


def test_a_disk_that_is_not_mounted_at_a_barrier(lake: Hands) -> None:
    """Files below the empty mount point would be gone once it is back."""
    lake.create(TOTALS)
    committer = lake.led()
    assert commit(committer, lake.staged_while_away(totals(1), 1, lake.folder))
    assert lake.rows() == [("ann", 1)]


@each_mode
def test_staged_files_are_durable(lake: Hands, synced: list[str], mode: str) -> None:
    """Files, and the names of their folders."""
    lake.create(TOTALS)
    lake.options |= MODES[mode]
    lake.staged(totals(1), 1)
    paths = {path for file in lake.staged_files() for path in (file, *file.parents[:2])}
    assert {str(path) for path in paths if path.is_relative_to(lake.folder)} <= set(synced)


@each_mode
def test_files_that_were_never_committed_are_removed(lake: Hands, mode: str) -> None:
    """Nothing else is: files of commits, which the next one replaces, of this attempt, of another pipeline, and of
    other programs stay."""
    lake.create_by_customer()
    lake.options |= {**MODES[mode], "roll_bytes": 1}
    committer = lake.led(1)
    commit(committer, lake.staged(totals(1), 1))
    committed = lake.live()
    decided = lake.staged(totals(2), 2, previous=1)
    before = files_below(lake.folder)
    lake.staged(totals(3), 3, previous=2)
    cut_off = lake.opened()
    cut_off.writer.write(cut_off.encoder.encode(totals(4)))
    until(lambda: cut_off.writer.poll() or len(files_below(lake.folder) - before) > 3)
    other = lake.committer("others")
    other.fence(1, ORIGIN)
    committer.clean(1, 1)
    assert commit(committer, decided), "nothing of this attempt was removed"
    foreign = lake.folder / "data" / "part-1.parquet"
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_bytes(b"of another program")

    other.clean(9, 9)
    seen = files_below(lake.folder)
    lake.committer().clean(1, 2)
    removed = seen - files_below(lake.folder)
    assert removed, "of the third interval, and of the one that was cut off"
    assert not removed & (committed | lake.live() | {foreign})
    assert [path for path in files_below(lake.folder) if "totals.out" in path.parts] == []
    rest = {path for path in files_below(lake.folder) if path.suffix == ".parquet" and "totals.out" in path.name}
    assert rest <= committed | lake.live()


# --- what is wrong ----------------------------------------------------------------------------------------------------

CATALOG = {"type": "sql", "uri": "sqlite://", "warehouse": "/lake"}


def iceberg(name: str = "a.b", **options: Any) -> IcebergSink[Any]:
    return IcebergSink(name, **{"catalog": CATALOG, **options})


def delta(path: str = "/t", **options: Any) -> DeltaSink[Any]:
    return DeltaSink(path, **options)


WRONG: list[tuple[Any, str]] = [
    (iceberg("totals"), "must be a namespace and a name"),
    (iceberg(catalog={}), "catalog= must be the properties"),
    (iceberg(catalog={"warehouse": "/lake"}), 'catalog= has no "type"'),
    (iceberg(catalog={"type": "sql", "warehouse": "lake"}), r"catalog\['warehouse'\] must be a path from / on"),
    (iceberg(catalog={"type": "sql", "uri": "sqlite:///catalog.db"}), r"catalog\['uri'\] must name its file from / on"),
    (iceberg(catalog={**CATALOG, "echo": True}), r"catalog\['echo'\] must be text"),
    (iceberg(catalog={**CATALOG, "uri": "postgresql://a:abc@c/d"}), "a secret written out"),
    (iceberg(catalog={**CATALOG, "token": "abc"}), r"catalog\['token'\] has a secret written out"),
    (iceberg(catalog={**CATALOG, "uri": "env:"}), "names no variable"),
    (delta("s3://key:abc@lake/totals"), "its address holds a user and a password"),
    (delta("lake/totals"), "must be the table's path from / on"),
    (delta("http://h:9000/lake"), "is a web address, .*give the address of the store, as s3://bucket/table"),
    (delta(storage_options="x"), "storage_options= must be options"),
    (delta("s3://t", storage_options={"AWS_SECRET_ACCESS_KEY": "abc"}), "has a secret written out"),
    *((sink(**options), said) for sink in (iceberg, delta) for options, said in (
        ({"mode": "delete"}, "mode='delete' must be one of 'append', 'upsert'"),
        ({"key": ("id",)}, "leave key= out"),
        ({"mode": "upsert"}, "mode='upsert' needs the columns"),
        ({"mode": "upsert", "key": ("day",)}, "key= names 'day'"),
        ({"mode": "upsert", "key": ("tag",)}, "tag is in key=, and its type admits None"),
        ({"create": 1}, "create=1 must be True or False"),
        ({"roll_bytes": 0}, "roll_bytes=0 must be 1b or more"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("sink", "said"), WRONG)
def test_wrong_arguments(sink: Any, said: str) -> None:
    problems = "; ".join(sink.problems(Part))
    assert re.search(said, problems)
    assert "abc" not in problems


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ([("customer", pa.string())], "it has no column 'cents', but customer: add the column, or leave the field out"),
        ([("customer", pa.int64()), ("cents", pa.float64())],
         "its column 'customer' is int64, and the field is str: change the type of one of them"),
        ([("customer", pa.string()), ("cents", pa.float64())], "its column 'cents' is double, and the field is int"),
    ],
)  # fmt: skip
def test_columns_that_do_not_fit(lake: Hands, columns: Any, said: str) -> None:
    lake.create(pa.schema(columns))
    with pytest.raises(StoreError, match=re.escape(said)):
        lake.committer().check()


@pytest.mark.parametrize("key", [("id",), ("shop", "id")], ids="-".join)
def test_changes_are_rows_and_deletes_in_one_order(lake: Hands, key: tuple[str, ...]) -> None:
    """Each checkpoint is one commit, of many changes of a key; the last commit has deletes alone."""
    lake.type = Change[Item]
    lake.options |= {"mode": "upsert", "key": key, "create": True}
    committer = lake.led()
    left: dict[Any, Item] = {}
    for checkpoint, made in enumerate(changes(random.Random(3), key, 3, 250, left), 1):
        before = lake.commits()
        assert commit(committer, lake.staged(made, checkpoint, previous=checkpoint - 1))
        left = applied(left, made)
        assert lake.commits() == before + 1
        assert lake.rows() == sorted(map(msgspec.structs.astuple, left.values())), checkpoint
    gone = [change("delete", each) for each in left]
    assert commit(committer, lake.staged([*gone, change("insert", *new_in(key))], 4, previous=3))
    assert commit(committer, lake.staged([change("delete", new_in(key)[0])], 5, previous=4))
    assert lake.rows() == []


def new_in(key: tuple[str, ...]) -> tuple[Any, Item]:
    item = Item("a", 5, "back", None)
    return key_of(item, key), item

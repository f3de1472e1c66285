"""The rows of a table and then its changes, each once and in order, wherever the reader ends."""

from __future__ import annotations

import random
import re
import string
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
import psycopg
import pytest
from changing_table import Account, Shop, a_left_over_reader_is_ended, rows_of
from waiting import until

from exactlyonce import KafkaSink, Pipeline
from exactlyonce.connectors import splits
from exactlyonce.connectors.postgres import change_split, change_stream
from exactlyonce.engines.runtime.batch import Batch, BatchCodec, Coordinates
from exactlyonce.pipeline.changes import UNCHANGED, Change, Unchanged
from exactlyonce.pipeline.errors import ConfigError, Halt, StoreUnavailable
from exactlyonce.sinks import PostgresSink
from exactlyonce.state.state_type import StateType

ACCOUNTS = 1_000


@contextmanager
def busy(shop: Shop, writers: int = 3) -> Iterator[None]:
    """Sessions that insert, update, move and delete accounts, and roll back, until the context ends."""
    over = threading.Event()

    def write(seed: int) -> None:
        luck = random.Random(seed)
        with psycopg.connect(shop.server.dsn(), autocommit=True) as session:
            while not over.is_set():
                id = luck.randrange(1, ACCOUNTS * 3 // 2)
                session.execute("BEGIN")
                for _ in range(luck.choice((1, 1, 3, 30))):
                    statement = luck.choice(STATEMENTS)
                    session.execute(statement, {"id": id})
                    id += 1
                session.execute(luck.choice(("COMMIT", "COMMIT", "COMMIT", "ROLLBACK")))

    threads = [threading.Thread(target=write_until_deadlock, args=(write, seed)) for seed in range(writers)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def write_until_deadlock(write: Any, seed: int) -> None:
    """Two of the writers may wait for each other: the server ends one of them, which begins again."""
    while True:
        try:
            write(seed)
            return
        except (psycopg.errors.DeadlockDetected, psycopg.errors.UniqueViolation):
            seed += 100


STATEMENTS = (
    "INSERT INTO accounts VALUES (%(id)s, 'new', 1) ON CONFLICT (id) DO UPDATE SET amount = accounts.amount + 1",
    "UPDATE accounts SET amount = amount + 1 WHERE id = %(id)s",
    "DELETE FROM accounts WHERE id = %(id)s",
    "UPDATE accounts SET id = id + 100000 WHERE id = %(id)s AND NOT EXISTS"
    " (SELECT FROM accounts a WHERE a.id = %(id)s + 100000)",
)


def in_table(shop: Shop) -> dict[int, Account]:
    return {row[0]: Account(*row) for row in shop.sql("SELECT id, owner, amount FROM accounts")}


@pytest.mark.exhaustive(but=["0-DEFAULT", "1-FULL"])
@pytest.mark.parametrize("identity", ["DEFAULT", "FULL"])
@pytest.mark.parametrize("seed", range(2))
def test_pages_beside_writers(shop: Shop, seed: int, identity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table as the changes make it is the table, though the reader ends at any place, also within a page and a
    transaction."""
    luck = random.Random(seed)
    monkeypatch.setattr(change_split, "PAGE_ROWS", 90)
    shop.begin()
    shop.sql(f"INSERT INTO accounts SELECT i, 'old', 0 FROM generate_series(1, {ACCOUNTS}) i")
    shop.sql(f"ALTER TABLE accounts REPLICA IDENTITY {identity}")
    with busy(shop):
        while len(shop.changes) < 6 * ACCOUNTS:
            if shop.poll(luck.choice((1, 7, 100))) and luck.random() < 0.03:
                shop.end()
            if luck.random() < 0.02:
                shop.reader.finalized(shop.positions)
    shop.read_all()
    assert rows_of(shop.changes) == in_table(shop)
    ops = {change.op for change in shop.changes}
    assert ops == {"read", "insert", "update", "delete"}


def test_a_commit_that_is_streamed_before_it_is_visible(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page waits for it: else the row would be in neither."""
    shop.begin()
    shop.sql("INSERT INTO accounts VALUES (1, 'ann', 1)")
    monkeypatch.setattr(change_split, "PAGE_ROWS", 1)
    shop.sql("ALTER SYSTEM SET synchronous_standby_names = 'absent'")
    shop.sql("SELECT pg_reload_conf()")
    until(lambda: shop.sql("SHOW synchronous_standby_names") == [("absent",)])

    def commit() -> None:
        with shop.session() as session:
            session.execute("INSERT INTO accounts VALUES (2, 'bob', 2)")

    waiting = threading.Thread(target=commit)
    waiting.start()
    until(lambda: shop.sql("SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"))
    assert [change.key for change in shop.poll()] == [1]

    def dropped() -> bool:
        assert not shop.poll()
        return '"dropped":[' in shop.positions[0].cursor

    until(dropped)
    for _ in range(30):
        assert not shop.poll(), "the page has been read without the row"
    shop.end()
    assert not shop.poll()
    shop.sql("ALTER SYSTEM RESET synchronous_standby_names")
    shop.sql("SELECT pg_reload_conf()")
    waiting.join()
    assert [(change.op, change.key) for change in shop.read_all()] == [("read", 2)]


def test_an_open_transaction_is_read_on_where_the_reader_ended(shop: Shop) -> None:
    """Also where the server says how far it is before it sends that transaction again."""
    shop.begin(snapshot="never")
    shop.sql("INSERT INTO accounts SELECT i, 'ann', i FROM generate_series(1, 50) i")
    until(lambda: shop.poll(7))
    for _ in range(3):
        shop.end()
        until(lambda: shop.poll(5))
    shop.read_all(7)
    assert [change.key for change in shop.changes] == list(range(1, 51))
    assert len({change.transaction for change in shop.changes}) == 1


def test_the_server_forgets_only_what_is_finalized(shop: Shop) -> None:
    shop.begin(snapshot="never")
    begun = shop.confirmed()
    shop.sql("INSERT INTO accounts VALUES (1, 'ann', 1)")
    shop.read_all()
    first = shop.positions
    shop.sql("INSERT INTO accounts VALUES (2, 'bob', 2)")
    assert [change.key for change in shop.read_all()] == [2]
    assert shop.confirmed() == begun
    shop.reader.finalized(first)
    until(lambda: shop.confirmed() != begun)
    shop.end()
    shop.positions = first
    assert [change.key for change in shop.read_all()] == [2]


def test_an_idle_table_keeps_no_log(shop: Shop) -> None:
    """The position follows what others write."""
    shop.begin(snapshot="never")
    shop.read_all()
    before = shop.positions[0].cursor
    shop.sql("CREATE TABLE others AS SELECT generate_series(1, 10000)")
    shop.sql("DROP TABLE others")
    until(lambda: not shop.poll() and shop.reader.quiet() and shop.positions[0].cursor != before)
    shop.reader.finalized(shop.positions)
    until(lambda: shop.sql("SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn) < 10000 "
                           "FROM pg_replication_slots") == [(True,)])  # fmt: skip


def test_a_page_that_was_not_whole_is_followed_by_the_next(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it waits for the visibility of dropped changes, and nothing else comes."""
    monkeypatch.setattr(change_split, "PAGE_ROWS", 8)
    shop.begin()
    shop.sql("INSERT INTO accounts SELECT i, 'ann', i FROM generate_series(1, 20) i")
    until(lambda: shop.poll(3))
    shop.end()
    shop.sql("UPDATE accounts SET amount = -amount")
    shop.read_all()
    assert rows_of(shop.changes) == in_table(shop)
    assert [(change.op, change.key) for change in shop.changes if change.op == "update"] == [
        ("update", key) for key in (1, 2, 3)
    ]


def test_truncate_begins_the_pages_anew(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_split, "PAGE_ROWS", 3)
    shop.begin()
    shop.sql("INSERT INTO accounts SELECT i, 'ann', i FROM generate_series(1, 20) i")
    while len(shop.changes) < 4:
        shop.poll(2)
    with shop.session() as session:
        session.execute("INSERT INTO accounts VALUES (0, 'zoe', 0)")
        session.execute("TRUNCATE accounts")
        session.execute("INSERT INTO accounts SELECT i, 'bob', i FROM generate_series(1, 5) i")
    while not any(change.op == "truncate" for change in shop.changes):
        shop.poll(2)
    shop.end()
    shop.read_all(2)
    assert rows_of(shop.changes) == in_table(shop)


def test_a_walsender_that_ends_and_a_server_that_starts_again(shop: Shop) -> None:
    shop.begin()
    shop.sql("INSERT INTO accounts VALUES (1, 'ann', 1)")
    shop.read_all()
    shop.sql("SELECT pg_terminate_backend(active_pid, 10000) FROM pg_replication_slots")
    shop.sql("INSERT INTO accounts VALUES (2, 'bob', 2)")
    assert [change.key for change in shop.read_all()] == [2]
    shop.server.kill()
    with pytest.raises(StoreUnavailable):
        until(lambda: shop.poll())
    shop.end()
    shop.server.start()
    shop.sql("INSERT INTO accounts VALUES (3, 'eve', 3)")
    assert [change.key for change in shop.read_all()] == [3]


def test_a_reader_that_is_left_over_is_ended(shop: Shop) -> None:
    shop.begin()
    a_left_over_reader_is_ended(shop)


def test_a_stream_that_begins_again_acknowledges_no_more(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no finalized checkpoint has stays in the slot."""
    monkeypatch.setattr(change_stream, "STATUS_S", 0)
    shop.begin()
    shop.insert(1)
    shop.read_all()
    checkpoint = shop.positions
    shop.reader.finalized(checkpoint)
    shop.insert(2)
    shop.read_all()
    shop.sql("SELECT pg_terminate_backend(active_pid, 10000) FROM pg_replication_slots")
    shop.insert(3)
    assert [change.key for change in shop.read_all()] == [3]
    until(lambda: shop.poll() == [] and shop.sql("SELECT flush_lsn IS NULL FROM pg_stat_replication") == [(False,)])
    shop.end()
    shop.positions = checkpoint
    assert [change.key for change in shop.read_all()] == [2, 3]


def test_a_slot_of_another_program_is_left_alone(shop: Shop) -> None:
    shop.begin()
    with psycopg.connect(shop.server.dsn(), autocommit=True) as session:
        other = psycopg.connect(f"{shop.server.dsn()} replication=database application_name=debezium", autocommit=True)
        other.pgconn.send_query(
            b"START_REPLICATION SLOT exactlyonce_shop LOGICAL 0/0 (proto_version '1', publication_names 'x')"
        )
        until(lambda: session.execute("SELECT active FROM pg_replication_slots").fetchone() == (True,))
        with pytest.raises(ConfigError, match="'debezium'"):
            until(shop.poll)
        other.close()
        until(lambda: session.execute("SELECT active FROM pg_replication_slots").fetchone() == (False,))


class Everything(msgspec.Struct):
    id: str
    shop: int
    price: Decimal
    rate: float | None
    paid: bool
    at: datetime
    data: bytes
    tags: dict[str, int]
    number: UUID
    ago: timedelta
    opens: time


def test_types_and_keys_of_several_columns(shop: Shop) -> None:
    """A page and the stream give the same values."""
    shop.begin(
        "id text, shop int, price numeric(20, 4), rate float8, paid bool, at timestamptz, data bytea, tags jsonb,"
        " number uuid, ago interval, opens timetz, more text, PRIMARY KEY (id, shop)",
        key=("id", "shop"), value=Everything,
    )  # fmt: skip
    insert = (
        "INSERT INTO accounts VALUES (%s, 7, 12.5, NULL, true, '2026-01-02 03:04:05.678+01', '\\x00ff', '{\"a\": 1}',"
        " '00000000-0000-0000-0000-000000000001', '-26:30', '08:00+02', %s)"
    )
    odd = "a\tb\\N\n\\é'\""
    shop.sql(insert, odd, odd)
    (read,) = shop.read_all()
    shop.sql("DELETE FROM accounts")
    shop.sql(insert, odd, None)
    deleted, inserted = shop.read_all()
    assert [read.op, deleted.op, inserted.op] == ["read", "delete", "insert"]
    assert read.key == deleted.key == inserted.key == msgspec.json.encode([odd, "7"]).decode()
    assert read.after == inserted.after
    assert deleted.after is None
    assert deleted.before is None
    at = datetime(2026, 1, 2, 2, 4, 5, 678000, tzinfo=timezone.utc)
    number = UUID("00000000-0000-0000-0000-000000000001")
    ago, opens = timedelta(hours=-26, minutes=-30), time(8, tzinfo=timezone(timedelta(hours=2)))
    amount, data = Decimal("12.5000"), b"\x00\xff"
    assert read.after == Everything(odd, 7, amount, None, True, at, data, {"a": 1}, number, ago, opens)


def test_a_large_value_that_an_update_leaves_as_it_was(shop: Shop) -> None:
    """It is never None: it is the old one under REPLICA IDENTITY FULL, and else the record is refused."""
    shop.begin(snapshot="never")
    large = "".join(random.Random(1).choices("abcdefghij", k=20_000))
    shop.sql("ALTER TABLE accounts ALTER owner SET STORAGE EXTERNAL")
    shop.sql("INSERT INTO accounts VALUES (1, %s, 1)", large)
    shop.sql("ALTER TABLE accounts REPLICA IDENTITY FULL")
    shop.sql("UPDATE accounts SET amount = 2")
    _, updated = shop.read_all()
    assert updated.before == Account(1, large, 1)
    assert updated.after == Account(1, large, 2)
    shop.sql("ALTER TABLE accounts REPLICA IDENTITY DEFAULT")
    shop.sql("UPDATE accounts SET amount = 3")
    with pytest.raises(ValueError, match=r"column 'owner' has a large value .* REPLICA IDENTITY FULL"):
        shop.read_all()


class Note(msgspec.Struct):
    id: int
    owner: str | Unchanged | None = UNCHANGED
    amount: int = 0


def fill(last: Note | None, change: Change[Note]) -> tuple[Note | None, Change[Note]]:
    """The recipe of docs/sources/changes.md."""
    row = change.after
    if row is not None and row.owner is UNCHANGED and last is not None:
        row = msgspec.structs.replace(row, owner=last.owner)
    return row, msgspec.structs.replace(change, after=row)


def test_an_unchanged_value_is_filled_from_state(shop: Shop) -> None:
    """A field that admits UNCHANGED gets it, and None stays None; frames and states keep both."""
    pipeline = Pipeline("notes")
    source = shop.accounts(value=Note)
    keyed = pipeline.source("accounts", source).key_by(lambda change: change.key)
    keyed.stateful_map("filled", fill).sink("out", KafkaSink("out"))
    graph = pipeline.build()
    table = PostgresSink[Note]("notes", dsn="env:SHOP_DSN", mode="append")
    assert "'owner' of Note may be UNCHANGED" in " ".join(table.problems(Note))
    shop.begin(value=Note, snapshot="never")
    large = "".join(random.Random(1).choices("abcdefghij", k=20_000))
    shop.sql("ALTER TABLE accounts ALTER owner SET STORAGE EXTERNAL")
    shop.sql("INSERT INTO accounts VALUES (1, %s, 1)", large)
    shop.sql("UPDATE accounts SET amount = 2")
    shop.sql("UPDATE accounts SET owner = NULL")
    changes = shop.read_all()
    assert [change.after.owner for change in changes] == [large, UNCHANGED, None]
    codec, state = BatchCodec(Change[Note]), StateType[Note]("filled", graph.node("filled").kept)
    letter = msgspec.json.decode(shop.source.decoder().letter(shop.records[1]).value or b"")
    assert letter == {"op": "update", "row": {"id": "1", "amount": "2"}}
    assert codec.decode(codec.encode(Batch(changes, [Coordinates("t", 0, 0)] * 3, [b"k"] * 3))).records == changes
    last, filled = None, []
    for change in changes:
        last, change = fill(last, change)
        filled.append(change.after)
        last = None if last is None else state.unpack(state.pack([last])[0])
    assert filled == [Note(1, large, 1), Note(1, large, 2), Note(1, None, 2)]


class Lists(msgspec.Struct):
    id: int
    owner: list[str | None]
    amount: list[int] | None
    numbers: list[UUID] = []


def test_arrays(shop: Shop) -> None:
    """A page and the stream give the same lists; one of two dimensions is no list of the field's type."""
    shop.begin("id int PRIMARY KEY, owner text[], amount int[], numbers uuid[]", value=Lists)
    insert = """INSERT INTO accounts VALUES (%s, '{a,"b,\\"c",NULL,"",é}', %s, ARRAY[gen_random_uuid()])"""
    shop.sql(insert, 1, [1, 2])
    (read,) = shop.read_all()
    shop.sql("UPDATE accounts SET id = 2")
    shop.sql(insert, 3, None)
    _, moved, inserted = shop.read_all()
    assert read.after == msgspec.structs.replace(moved.after, id=1)
    assert (read.after.owner, read.after.amount) == (["a", 'b,"c', None, "", "é"], [1, 2])
    assert inserted.after.amount is None
    shop.sql("UPDATE accounts SET amount = '{{1,2},{3,4}}' WHERE id = 3")
    with pytest.raises(msgspec.ValidationError, match="amount"):
        shop.read_all()


@pytest.mark.parametrize(
    ("type", "reason"), [("int4range", "only a field of str takes"), ("numeric[]", "only a field of str takes")]
)
def test_a_list_of_a_type_without_a_rule(shop: Shop, type: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        shop.begin(f"id int PRIMARY KEY, owner {type}, amount int[]", value=Lists)


class Word(msgspec.Struct):
    id: str
    amount: int


def test_pages_are_in_the_order_of_the_column(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in that of the database, by which a key of the newest page may lie behind it."""
    monkeypatch.setattr(change_split, "PAGE_ROWS", 3)
    shop.begin('id text COLLATE "und-x-icu" PRIMARY KEY, amount int', value=Word)
    shop.sql("INSERT INTO accounts SELECT unnest(ARRAY['a', 'A', 'b', 'B', 'c', 'C']), 0")
    assert [change.key for change in shop.poll()] == ["a", "A", "b"]
    shop.sql("UPDATE accounts SET amount = 1")
    shop.read_all()
    assert rows_of(shop.changes) == {id: Word(id, 1) for id in ("a", "A", "b", "B", "c", "C")}


@pytest.mark.parametrize("identity", ["DEFAULT", "FULL"])
def test_a_large_key_is_unchanged(shop: Shop, identity: str) -> None:
    """The server sends it with the old row alone."""
    shop.begin("id text PRIMARY KEY, amount int, more text", value=Word, snapshot="never")
    shop.sql(f"ALTER TABLE accounts REPLICA IDENTITY {identity}")
    luck = random.Random(1)
    key, more = ("".join(luck.choices(string.ascii_letters + string.digits, k=length)) for length in (2_000, 1_900))
    shop.sql("INSERT INTO accounts VALUES (%s, 0, %s)", key, more)
    shop.sql("UPDATE accounts SET amount = 1")
    shop.read_all()
    assert [(change.op, change.key, change.after) for change in shop.changes] == [
        ("insert", key, Word(key, 0)),
        ("update", key, Word(key, 1)),
    ]


@pytest.mark.parametrize("type", ["int[]", "text[]", "int4range"])
def test_a_type_without_a_rule_is_text(shop: Shop, type: str) -> None:
    shop.begin(f"id int PRIMARY KEY, owner {type}, amount int")
    value = "[1,2)" if type == "int4range" else "{1,2}"
    shop.sql("INSERT INTO accounts VALUES (1, %s, 1)", value)
    (read,) = shop.read_all()
    shop.sql("UPDATE accounts SET amount = 2")
    (updated,) = shop.read_all()
    assert read.after == Account(1, value, 1)
    assert updated.after == Account(1, value, 2)


def test_a_table_that_had_another_name(shop: Shop) -> None:
    """The changes that it had meanwhile are of it as well."""
    shop.begin()
    shop.read_all()
    shop.end()
    shop.sql("ALTER TABLE accounts RENAME TO others")
    shop.sql("INSERT INTO others VALUES (1, 'ann', 1)")
    shop.sql("ALTER TABLE others RENAME TO accounts")
    shop.sql("INSERT INTO accounts VALUES (2, 'bob', 2)")
    assert [change.key for change in shop.read_all()] == [1, 2]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("ALTER TABLE accounts RENAME owner TO name", "has no column 'owner'"),
        ("ALTER TABLE accounts ALTER amount TYPE text", "'amount' is text"),
        ("DROP TABLE accounts; CREATE TABLE accounts (id int PRIMARY KEY, owner text, amount int);"
         "ALTER PUBLICATION exactlyonce_shop ADD TABLE accounts", "dropped or made anew"),
        ("ALTER PUBLICATION exactlyonce_shop DROP TABLE accounts;"
         "ALTER PUBLICATION exactlyonce_shop ADD TABLE accounts", "altered or dropped"),
        ("ALTER PUBLICATION exactlyonce_shop SET (publish = 'insert');"
         "ALTER PUBLICATION exactlyonce_shop SET (publish = 'insert, update, delete, truncate')",
         "altered or dropped"),
        ("SELECT pg_drop_replication_slot('exactlyonce_shop');"
         "SELECT pg_create_logical_replication_slot('exactlyonce_shop', 'pgoutput')", "forgotten all before"),
        ("INSERT INTO accounts VALUES (7, 'gus', 7);"
         "SELECT pg_replication_slot_advance('exactlyonce_shop', pg_current_wal_lsn())", "forgotten all before"),
        ("SELECT pg_drop_replication_slot('exactlyonce_shop')", "no replication slot .* any more"),
        ("DROP PUBLICATION exactlyonce_shop", "altered or dropped"),
        ("ALTER PUBLICATION exactlyonce_shop SET TABLE accounts WHERE (id > 3)", "altered or dropped"),
        ("CREATE UNIQUE INDEX by_owner ON accounts (owner); ALTER TABLE accounts ALTER owner SET NOT NULL;"
         "ALTER TABLE accounts REPLICA IDENTITY USING INDEX by_owner", "replica identity of accounts was changed"),
        ("ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'; SELECT pg_reload_conf();"
         + 4 * "SELECT pg_logical_emit_message(false, '', ''), pg_switch_wal();" + "CHECKPOINT",
         "it kept more log than max_slot_wal_keep_size: changes are lost"),
    ],
)  # fmt: skip
def test_what_would_lose_changes_stops(shop: Shop, change: str, reason: str) -> None:
    shop.begin()
    shop.read_all()
    shop.end()
    until(lambda: shop.sql("SELECT active FROM pg_replication_slots") == [(False,)])
    for statement in change.split(";"):
        shop.sql(statement)
    name = "name" if "RENAME" in change else "owner"
    shop.sql(f"INSERT INTO accounts (id, {name}, amount) VALUES (1, 'ann', '1')")
    shop.sql("UPDATE accounts SET amount = '2'")
    error = shop.halt()
    assert re.search(reason, str(error))
    assert error.choices or "run the program that fits" in str(error)


class Renamed(msgspec.Struct):
    id: int
    name: str
    amount: int


RENAME = "ALTER TABLE accounts RENAME owner TO name"


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("within", [False, True])
def test_the_version_that_fits_reads_to_a_change_of_columns(shop: Shop, behind: bool, within: bool) -> None:
    """All before it is in a finalized checkpoint when the run halts, and the next version goes on there: also if the
    run was not there yet when it began, and *within* the transaction of the change."""
    shop.begin()
    shop.sql("INSERT INTO accounts VALUES (1, 'ann', 1)")
    shop.read_all()
    if behind:
        shop.end()
    with shop.session() as session:
        session.execute("UPDATE accounts SET amount = 2")
        if not within:
            session.commit()
        session.execute(RENAME)
        session.execute("INSERT INTO accounts (id, name, amount) VALUES (3, 'cid', 3)")
    described = shop.source
    shop.end()
    if not within:
        shop.source = shop.described(value=Renamed)
        assert "no column 'name'" in str(shop.halt()), "it is too early for this version"
    shop.source = described
    if behind:
        assert not shop.find(), "the leader takes the columns of now as well"
    assert "no column 'owner'" in str(shop.halt())
    assert [(change.op, change.key) for change in shop.changes] == [("read", 1), ("update", 1)]
    shop.source = shop.described(value=Renamed)
    assert [change.after for change in shop.read_all()] == [Renamed(3, "cid", 3)]


@pytest.mark.parametrize("update", [False, True])
def test_a_change_of_columns_between_pages(shop: Shop, update: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages that are left are read by the version that fits them."""
    monkeypatch.setattr(change_split, "PAGE_ROWS", 3)
    shop.begin()
    shop.sql("INSERT INTO accounts SELECT i, 'old', 0 FROM generate_series(1, 10) i")
    assert [change.key for change in shop.poll()] == [1, 2, 3]
    shop.sql("UPDATE accounts SET amount = 1")
    shop.sql(RENAME)
    if update:
        shop.sql("UPDATE accounts SET amount = 2")
    shop.end()
    assert "no column 'owner'" in str(shop.halt())
    assert [change.key for change in shop.changes if change.op == "update"] == [1, 2, 3]
    shop.source = shop.described(value=Renamed)
    shop.read_all()
    now = {id: change for id, change in rows_of(shop.changes).items() if update or id > 3}
    assert now == {id: Renamed(id, "old", 2 if update else 1) for id in now}
    assert len(now) == (10 if update else 7)


def test_a_table_that_has_another_name(shop: Shop) -> None:
    """The run halts and names it; under that name it goes on, with all changes."""
    shop.begin()
    shop.sql("INSERT INTO accounts VALUES (1, 'ann', 1)")
    shop.read_all()
    shop.end()
    shop.sql("ALTER TABLE accounts RENAME TO savings")
    shop.sql("INSERT INTO savings VALUES (2, 'bob', 2)")
    with pytest.raises(Halt, match="was renamed, and is savings now"):
        shop.find()
    assert "is savings now" in str(shop.halt())
    shop.source = shop.shared(accounts=shop.accounts("savings"))
    shop.sql("INSERT INTO savings VALUES (3, 'eve', 3)")
    assert [change.key for change in shop.read_all()] == [2, 3]


def test_inserts_go_on_without_a_replica_identity(shop: Shop) -> None:
    """The server refuses all other changes then."""
    shop.begin()
    shop.read_all()
    shop.sql("ALTER TABLE accounts REPLICA IDENTITY NOTHING")
    shop.sql("INSERT INTO accounts VALUES (1, 'ann', 1)")
    shop.sql("ALTER TABLE accounts REPLICA IDENTITY DEFAULT")
    shop.sql("DELETE FROM accounts")
    assert [change.op for change in shop.read_all()] == ["insert", "delete"]


def test_a_new_column_goes_on(shop: Shop) -> None:
    shop.begin()
    shop.sql("ALTER TABLE accounts ADD COLUMN more int")
    shop.sql("INSERT INTO accounts VALUES (1, 'ann', 1, 1)")
    shop.sql("ALTER TABLE accounts ADD COLUMN again int")
    shop.sql("UPDATE accounts SET amount = 2")
    shop.read_all()
    assert rows_of(shop.changes) == {1: Account(1, "ann", 2)}


@pytest.mark.parametrize("change", ["DROP more", "RENAME more TO less", "ALTER id TYPE bigint", "ADD less int"])
def test_columns_change_between_pages(shop: Shop, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are no fields, or still are such."""
    monkeypatch.setattr(change_split, "PAGE_ROWS", 3)
    shop.begin("id int PRIMARY KEY, owner text, amount int, more text")
    shop.sql("INSERT INTO accounts SELECT i, 'old', 0 FROM generate_series(1, 10) i")
    assert [change.key for change in shop.poll()] == [1, 2, 3]
    shop.sql(f"ALTER TABLE accounts {change}")
    shop.sql("UPDATE accounts SET amount = 1")
    shop.read_all()
    assert rows_of(shop.changes) == {id: Account(id, "old", 1) for id in range(1, 11)}


def test_a_table_made_anew_between_pages(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_split, "PAGE_ROWS", 3)
    shop.begin()
    shop.sql("INSERT INTO accounts SELECT i, 'old', 0 FROM generate_series(1, 10) i")
    shop.poll()
    shop.sql("DROP TABLE accounts")
    shop.sql("CREATE TABLE accounts (id int PRIMARY KEY, owner text, amount int)")
    shop.sql("INSERT INTO accounts VALUES (20, 'new', 0)")
    with pytest.raises(Halt, match="made anew"):
        shop.read_all()


@pytest.mark.parametrize(
    ("columns", "remedy"),
    [
        ("id int, owner text, amount int", "takes NULL"),
        ("id int NOT NULL, owner text, amount int", "unique index"),
        ("id int PRIMARY KEY, owner text, amount int GENERATED ALWAYS AS (1) STORED", "'amount' is generated"),
        ("id int PRIMARY KEY, owner text", "no column 'amount'"),
    ],
)
def test_a_table_that_cannot_be_captured(shop: Shop, columns: str, remedy: str) -> None:
    def capture() -> None:
        shop.begin(columns)
        shop.find()

    with pytest.raises(ConfigError, match=remedy):
        capture()


@pytest.mark.parametrize("identity", ["DEFAULT", "FULL"])
def test_a_deferrable_key_is_refused(shop: Shop, identity: str) -> None:
    """Its rows may trade keys within a statement; and once it is published, the server would refuse updates."""
    shop.sql("CREATE TABLE accounts (id int PRIMARY KEY DEFERRABLE, owner text, amount int)")
    shop.sql(f"ALTER TABLE accounts REPLICA IDENTITY {identity}")
    shop.source = shop.described()
    with pytest.raises(ConfigError, match="DEFERRABLE"):
        shop.source.setup()
    shop.sql("INSERT INTO accounts VALUES (1, 'ann', 1)")
    shop.sql("UPDATE accounts SET amount = 2")


def test_a_table_without_primary_key_gets_a_replica_identity(shop: Shop) -> None:
    shop.begin("id int NOT NULL UNIQUE, owner text, amount int")
    shop.sql("INSERT INTO accounts VALUES (1, 'ann', 1)")
    shop.sql("DELETE FROM accounts")
    assert rows_of(shop.read_all()) == {}
    shop.sql("ALTER TABLE accounts REPLICA IDENTITY NOTHING")
    shop.end()
    shop.positions = ()
    with pytest.raises(ConfigError, match="its replica identity is nothing, and key= id: `exactlyonce changes setup`"):
        shop.find()


def test_without_setup(shop: Shop) -> None:
    shop.sql("CREATE TABLE accounts (id int PRIMARY KEY, owner text, amount int)")
    shop.source = shop.described()
    with pytest.raises(ConfigError, match="changes setup"):
        shop.find()


def test_another_timeline(shop: Shop) -> None:
    """A failover: the server goes on if it has all that was read, and else the run halts."""
    shop.begin()
    shop.sql("INSERT INTO accounts VALUES (1, 'ann', 1)")
    shop.read_all()
    before = shop.positions
    shop.end()
    shop.server.kill()
    (shop.server.folder / "data" / "recovery.signal").touch()
    shop.server.settings["restore_command"] = "false"
    shop.server.start()
    until(lambda: shop.sql("SELECT NOT pg_is_in_recovery()") == [(True,)])
    shop.sql("INSERT INTO accounts VALUES (2, 'bob', 2)")
    assert [change.key for change in shop.read_all()] == [2]
    assert '"timeline":2' in shop.positions[0].cursor
    shop.end()
    ahead = msgspec.json.decode(before[0].cursor) | {"lsn": change_stream.read_lsn("F/0")}
    shop.positions = (msgspec.structs.replace(before[0], cursor=msgspec.json.encode(ahead).decode()),)
    with pytest.raises(Halt, match="on timeline 2 since a failover, left that one before"):
        shop.poll()


def test_a_log_that_was_removed_though_the_slot_needs_it(shop: Shop) -> None:
    """A failover led to a server that was copied later, and has the slot, which it calls "reserved" all the same."""
    shop.begin()
    shop.read_all()
    shop.end()
    shop.insert(1)
    ((segment,),) = shop.sql("SELECT pg_walfile_name(restart_lsn) FROM pg_replication_slots")
    shop.sql("SELECT pg_switch_wal()")
    (shop.server.folder / "data" / "pg_wal" / segment).unlink()
    with pytest.raises(Halt, match=f"not have the log that this slot needs(?s:.*){segment}"):
        until(shop.poll)


def test_a_slot_that_was_copied_without_its_snapshot(shop: Shop) -> None:
    """The server decodes only what begins after the transactions that were open, and says nothing of the others."""
    shop.begin(snapshot="never")
    with shop.session() as session:
        session.execute("SELECT txid_current()")
        for id in (1, 2):
            shop.sql("CHECKPOINT")
            shop.insert(id)
            shop.read_all()
            shop.reader.finalized(shop.positions)
        until(lambda: shop.sql("SELECT confirmed_flush_lsn >= pg_current_wal_flush_lsn() FROM pg_replication_slots"))
        shop.end()
        shop.insert(3)
        session.commit()
    for snapshot in (shop.server.folder / "data" / "pg_logical" / "snapshots").iterdir():
        snapshot.unlink()
    shop.sql("CHECKPOINT")
    shop.insert(4)
    with pytest.raises(Halt, match="the server leaves out what was committed from"):
        shop.read_all()


def test_another_database_cluster(shop: Shop) -> None:
    """Its log has other changes at the same positions."""
    shop.begin()
    shop.read_all()
    shop.end()
    (position,) = shop.positions
    identity = msgspec.json.decode(position.identity) | {"system": "7"}
    shop.positions = (msgspec.structs.replace(position, topic_id=msgspec.json.encode(identity).decode()),)
    for action in (shop.find, shop.poll):
        with pytest.raises(Halt, match="another database cluster"):
            action()


def test_how_far_it_is_in_the_log(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A count of records is not known, and not shown; a server that does not answer is no error."""
    monkeypatch.setattr(splits, "LOG_INTERVAL_S", 0)
    monkeypatch.setattr(change_split, "PAGE_ROWS", 100)

    def log() -> Any:
        (now,) = shop.reader.logs()
        return now

    shop.begin()
    shop.sql("INSERT INTO accounts SELECT i, 'ann', i FROM generate_series(1, 1000) i")
    shop.sql("ANALYZE accounts")
    until(lambda: len(shop.poll(30)) and len(shop.changes) > 300)
    assert msgspec.to_builtins(log().tables) == [{"table": "accounts", "page": 4, "pages": 10}]
    shop.end()
    shop.poll(30)
    assert log().tables[0].page == 4, "it goes on at its page"
    shop.read_all()
    assert (log().tables, log().lag_ms, log().lag_bytes, log().status) == ([], 0, 0, "reserved")
    shop.sql("UPDATE accounts SET amount = 0")
    until(lambda: log().lag_ms > 300)
    assert log().lag_bytes > 50_000
    assert log().kept_bytes >= log().lag_bytes
    assert shop.reader.lags() == {}
    shop.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
             " WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()")  # fmt: skip
    assert log().lag_ms is None
    shop.read_all()
    assert (log().lag_ms, log().problem) == (0, "")
    shop.sql("ALTER SYSTEM SET max_slot_wal_keep_size = '16MB'")
    shop.sql("SELECT pg_reload_conf()")
    for _ in range(4):
        shop.sql("SELECT pg_logical_emit_message(false, '', ''), pg_switch_wal()")
    until(lambda: log().status == "unreserved")
    assert log().problem.startswith("the server may remove log that slot exactlyonce_shop needs: it keeps")

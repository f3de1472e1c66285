"""Sources of one pipeline share a slot: each table's changes once and in order, wherever the reader ends."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import psycopg
import pytest
from changing_table import Account, Shop, of_table, rows_of
from waiting import until

from exactlyonce import KafkaSink, Pipeline, Record
from exactlyonce.connectors import PostgresChanges, PostgresMessages, PostgresTransactions
from exactlyonce.connectors.changes import logs_of
from exactlyonce.connectors.postgres import change_split
from exactlyonce.pipeline.errors import ConfigError, GraphError, Halt
from exactlyonce.pipeline.source import EventTime

ACCOUNTS = 200
COLUMNS = "(id int PRIMARY KEY, owner text, amount int)"


def begin(shop: Shop, **options: Any) -> None:
    """Two tables, and a slot for both."""
    for table in ("accounts", "savings"):
        shop.sql(f"CREATE TABLE {table} {COLUMNS}")
    shop.source = shop.shared(accounts=shop.accounts(**options), savings=shop.accounts("savings", **options))
    shop.source.setup()


def rows_in(shop: Shop, table: str) -> dict[int, Account]:
    return {row[0]: Account(*row) for row in shop.sql(f"SELECT id, owner, amount FROM {table}")}


@pytest.mark.exhaustive(but=["0"])
@pytest.mark.parametrize("seed", range(3))
def test_transfers_between_two_tables(shop: Shop, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each transaction has both its changes, in the order of the commits, though the reader ends at any place."""
    luck = random.Random(seed)
    monkeypatch.setattr(change_split, "PAGE_ROWS", 40)
    begin(shop)
    for table in ("accounts", "savings"):
        shop.sql(f"INSERT INTO {table} SELECT i, 'ann', 100 FROM generate_series(1, {ACCOUNTS}) i")
    with transfers(shop):
        read_with_kills(shop, luck, 4 * ACCOUNTS)
    shop.read_all()
    count = len(shop.changes)
    with transfers(shop):
        read_with_kills(shop, luck, count + 2 * ACCOUNTS)
    shop.read_all()
    for table in ("accounts", "savings"):
        assert rows_of(of_table(shop.changes, table)) == rows_in(shop, table)
    later = [(routed[1].lsn, routed[1].table) for routed in shop.changes[count:]]
    commits = sorted({lsn for lsn, _ in later})
    assert later == [(lsn, table) for lsn in commits for table in ("accounts", "savings")]


def test_a_table_that_waits_for_an_open_transaction_holds_no_other(shop: Shop) -> None:
    shop.begin()
    shop.sql(f"CREATE TABLE savings {COLUMNS}")
    shop.insert(1)
    shop.read_all()
    shop.end()
    with shop.session() as session:
        session.execute("CREATE TEMPORARY TABLE others AS SELECT 1")
        shop.source = shop.shared(accounts=shop.accounts(), savings=shop.accounts("savings"))
        shop.source.setup()
        shop.sql("INSERT INTO savings VALUES (7, 'ann', 1)")
        for id in (2, 3, 4):
            shop.insert(id)
            until(lambda: of_table(shop.poll(), "accounts"))
    until(lambda: of_table(shop.poll(), "savings"))
    assert [change.key for change in of_table(shop.changes[1:], "accounts")] == [2, 3, 4]
    assert [change.key for change in of_table(shop.changes[1:], "savings")] == [7]


@contextmanager
def transfers(shop: Shop) -> Iterator[None]:
    """Two sessions that move amounts from accounts to savings, and roll some back, until the context ends."""
    over = threading.Event()

    def transfer(seed: int) -> None:
        luck = random.Random(seed)
        with psycopg.connect(shop.server.dsn(), autocommit=True) as session:
            while not over.is_set():
                one, other = luck.randrange(1, ACCOUNTS + 1), luck.randrange(1, ACCOUNTS + 1)
                session.execute("BEGIN")
                session.execute("UPDATE accounts SET amount = amount - 1 WHERE id = %s", (one,))
                session.execute("UPDATE savings SET amount = amount + 1 WHERE id = %s", (other,))
                session.execute(luck.choice(("COMMIT", "COMMIT", "ROLLBACK")))

    writers = [threading.Thread(target=transfer, args=(seed,)) for seed in range(2)]
    for writer in writers:
        writer.start()
    try:
        yield
    finally:
        over.set()
        for writer in writers:
            writer.join()


def read_with_kills(shop: Shop, luck: random.Random, count: int) -> None:
    """Poll until there are *count* changes; the reader ends now and then."""
    while len(shop.changes) < count:
        if shop.poll(luck.choice((1, 7, 100))) and luck.random() < 0.05:
            shop.end()


def test_a_table_that_is_added_later(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins with its pages, though a transaction has written before it was published, and commits after it."""
    monkeypatch.setattr(change_split, "PAGE_ROWS", 2)
    shop.begin()
    shop.sql(f"CREATE TABLE savings {COLUMNS}")
    shop.sql("INSERT INTO accounts VALUES (1, 'ann', 1)")
    shop.read_all()
    before = shop.changes
    shop.end()
    shop.sql("INSERT INTO savings SELECT i, 'bob', i FROM generate_series(1, 5) i")
    shop.source = both = shop.shared(accounts=shop.accounts(), savings=shop.accounts("savings"))
    with pytest.raises(ConfigError, match="does not have the table savings: `exactlyonce changes setup` adds it"):
        shop.find()
    with shop.session() as session:
        session.execute("UPDATE savings SET amount = 50 WHERE id = 5")
        (statement,) = both.setup()
        assert statement == 'ALTER PUBLICATION "exactlyonce_shop" ADD TABLE "public"."savings"'
        shop.changes = []
        assert shop.find() == [], "the leader goes on"
        shop.sql("INSERT INTO accounts VALUES (2, 'ann', 2)")
        until(lambda: shop.poll())
        for _ in range(5):
            assert not shop.poll(), "a page has been read without the change of a transaction that is open"
    shop.read_all()
    assert rows_of([*before, *of_table(shop.changes, "accounts")]) == rows_in(shop, "accounts")
    assert rows_of(of_table(shop.changes, "savings")) == rows_in(shop, "savings")
    assert rows_in(shop, "savings")[5].amount == 50
    shop.end()
    shop.source, shop.changes = shop.shared(accounts=shop.accounts()), []
    shop.sql("INSERT INTO savings VALUES (6, 'bob', 6)")
    assert shop.read_all() == []
    assert "savings" not in shop.positions[0].cursor


@pytest.mark.parametrize("change", ["added", "removed"])
def test_members_that_change_within_a_transaction(shop: Shop, change: str) -> None:
    """Its changes are counted for each table: those of others are no reason to leave out one, or to give it twice."""
    begin(shop, snapshot="never")
    both, one = shop.source, shop.shared(accounts=shop.accounts(snapshot="never"))
    notes = PostgresMessages("notes", dsn="env:SHOP_DSN", value=str)
    shop.source = both.with_member("notes", notes) if change == "removed" else one
    with shop.session() as session:
        for number in range(10):
            emit(session, "notes", f"n{number}")
            session.execute("INSERT INTO savings VALUES (%s, 'bob', 0)", (number,))
            session.execute("INSERT INTO accounts VALUES (%s, 'ann', 0)", (number,))
    while len(shop.changes) < 7:  # what has come by now may be less
        shop.poll(7 - len(shop.changes))
    shop.end()
    shop.changes = []
    shop.source = one if change == "removed" else both
    shop.read_all(3)
    if change == "removed":
        assert [change.key for change in shop.changes] == list(range(2, 10))
    else:
        assert [change.key for change in of_table(shop.changes, "accounts")] == list(range(7, 10))
        assert [change.key for change in of_table(shop.changes, "savings")] == list(range(10))


def test_a_key_is_not_changed_silently(shop: Shop) -> None:
    shop.sql("CREATE TABLE accounts (id int PRIMARY KEY, owner text NOT NULL UNIQUE, amount int)")
    shop.source = shop.described()
    shop.source.setup()
    shop.read_all()
    shop.end()
    shop.sql("ALTER TABLE accounts REPLICA IDENTITY FULL")
    shop.source = shop.described(key="owner")
    with pytest.raises(ConfigError, match="was read by key= id"):
        shop.poll()


def test_a_truncate_of_two_tables(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a change of each, also where a page is due, and the reader ends between the two."""
    monkeypatch.setattr(change_split, "PAGE_ROWS", 2)
    begin(shop)
    for table in ("accounts", "savings"):
        shop.sql(f"INSERT INTO {table} SELECT i, 'ann', i FROM generate_series(1, 5) i")
    until(lambda: not shop.poll(1) and len(shop.changes) >= 3)
    shop.sql("TRUNCATE accounts, savings")
    shop.sql("INSERT INTO savings VALUES (7, 'eve', 7)")
    until(lambda: any(routed[1].op == "truncate" for routed in shop.poll(1)))
    shop.end()
    shop.read_all(1)
    ops = [(routed[1].table, routed[1].op) for routed in shop.changes if routed[1].op != "read"]
    assert sorted(ops) == [("accounts", "truncate"), ("savings", "truncate")]
    for table in ("accounts", "savings"):
        assert rows_of(of_table(shop.changes, table)) == rows_in(shop, table)


def test_one_table_as_a_stream_and_as_a_table(shop: Shop) -> None:
    """It is read once, and given to both."""
    shop.sql(f"CREATE TABLE accounts {COLUMNS}")
    pipeline = Pipeline("shop")
    stream = pipeline.source("stream", shop.accounts(time="timestamp_ms"))
    table = pipeline.table("table", shop.accounts(time="timestamp_ms"))
    keyed = stream.key_by(lambda change: int(change.key))
    keyed.lookup("joined", table).map(str, output=str).sink("out", KafkaSink("out"))
    (shop.source,) = logs_of(pipeline.build())
    shop.source.setup()
    shop.sql("INSERT INTO accounts VALUES (1, 'ann', 1)")
    (routed,) = shop.read_all()
    change, record = routed[1]
    assert (routed[0], change.after) == (("stream", "table"), Account(1, "ann", 1))
    assert record == Record(change.after, 1, change.timestamp_ms)
    assert shop.source.event_time is not None
    assert shop.source.event_time.function(routed) == change.timestamp_ms


def test_one_table_by_two_names(shop: Shop) -> None:
    shop.sql(f"CREATE TABLE accounts {COLUMNS}")
    shop.source = shop.shared(one=shop.accounts(), other=shop.accounts("public.accounts"))
    shop.source.setup()
    with pytest.raises(ConfigError, match="'one' and 'other' name one table"):
        shop.find()


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        ({"on_error": "skip"}, {}, "on_error= belongs to all that postgres-changes:exactlyonce_shop reads"),
        ({"time": EventTime("timestamp_ms", disorder="5s")}, {"time": "timestamp_ms"}, "disorder=, idle="),
        ({"snapshot": "never", "table": "accounts"}, {"table": "accounts"}, "with another snapshot="),
        ({"time": "timestamp_ms", "table": "accounts"}, {"time": "lsn", "table": "accounts"}, "another time="),
        ({}, {"dsn": "env:OTHER_DSN"}, "is of another database than at"),
    ],
)
def test_settings_in_which_members_differ(one: dict[str, Any], other: dict[str, Any], reason: str) -> None:
    def described(table: str, options: dict[str, Any]) -> PostgresChanges[Account]:
        settings = {"table": table, "dsn": "env:SHOP_DSN", "key": "id", "value": Account, **options}
        return PostgresChanges(**settings)

    pipeline = Pipeline("shop")
    pipeline.source("one", described("accounts", one)).sink("one-out", KafkaSink("one"))
    pipeline.source("other", described("savings", other)).sink("other-out", KafkaSink("other"))
    with pytest.raises(GraphError, match=reason):
        pipeline.build()


@pytest.mark.parametrize(
    ("dsn", "reason"),
    [
        ("postgresql://ann:secret@db/shop", "has a password written out"),
        ("env:", "names no variable"),
        ("", "is not set"),
    ],
)
def test_a_wrong_dsn_of_any_member(dsn: str, reason: str) -> None:
    """It is refused once, and is not in the error."""
    table = PostgresChanges("accounts", dsn=dsn, key="id", value=Account)
    for source in (table, PostgresMessages("orders", dsn=dsn, value=Placed), PostgresTransactions(dsn=dsn)):
        pipeline = Pipeline("shop")
        pipeline.source("member", source).sink("out", KafkaSink("out"))
        with pytest.raises(GraphError, match=reason) as raised:
            pipeline.build()
        assert len(list(source.problems())) == 1
        assert "secret" not in str(raised.value)


def test_a_table_taken_out_of_the_publication_by_hand(shop: Shop) -> None:
    begin(shop)
    shop.read_all()
    shop.sql("ALTER PUBLICATION exactlyonce_shop DROP TABLE savings")
    with pytest.raises(Halt, match="Source 'savings' cannot go on: publication exactlyonce_shop was altered"):
        shop.find()


class Placed(msgspec.Struct):
    id: int


def emit(session: Any, prefix: str, content: str, transactional: bool = True) -> None:
    session.execute("SELECT pg_logical_emit_message(%s, %s, %s)", (transactional, prefix, content))


def test_an_outbox_beside_a_table(shop: Shop) -> None:
    """Messages of committed transactions, each once and in order with the changes, wherever the reader ends."""
    shop.sql(f"CREATE TABLE accounts {COLUMNS}")
    shop.source = shop.shared(
        orders=PostgresMessages("orders", dsn="env:SHOP_DSN", value=Placed),
        notes=PostgresMessages.records("notes", dsn="env:SHOP_DSN", value=str),
        accounts=shop.accounts(),
    )
    shop.source.setup()
    shop.read_all()
    with shop.session() as session:
        for number in range(20):
            emit(session, "orders", f'{{"id": {number}}}')
            session.execute("INSERT INTO accounts VALUES (%s, 'ann', 0)", (number,))
            emit(session, "notes", f"n{number}")
        emit(session, "others", "not read")
        emit(session, "orders", "not of a transaction", transactional=False)
        session.commit()
        emit(session, "orders", '{"id": 99}')
        session.rollback()
    for _ in range(6):
        until(lambda: shop.poll(7))
        shop.end()
    shop.read_all(7)
    commit = shop.changes[1][1].timestamp_ms
    expected = [
        [("orders", Placed(number)), ("accounts", number), ("notes", Record(f"n{number}", None, commit))]
        for number in range(20)
    ]
    found = [(ids[0], record.key if ids == ("accounts",) else record) for ids, record in shop.changes]
    assert found == [record for records in expected for record in records]


def test_the_ends_of_transactions(shop: Shop) -> None:
    """After the last change of each, once, though the reader ends before it or right after it; the counts are whole."""
    begin(shop, snapshot="never")
    shop.source = shop.source.with_member("ends", PostgresTransactions(dsn="env:SHOP_DSN"))
    shop.sql("INSERT INTO accounts SELECT i, 'ann', 0 FROM generate_series(1, 4) i")
    with shop.session() as session:
        session.execute("UPDATE accounts SET id = id + 10 WHERE id < 3")
        session.execute("INSERT INTO savings VALUES (1, 'bob', 0)")
    shop.sql("CREATE TABLE others AS SELECT 1")
    shop.sql("DROP TABLE others")

    def read_one() -> None:
        shop.poll(1)
        shop.end()

    until(lambda: len(shop.changes) >= 11, meanwhile=read_one, pause_s=0)
    shop.read_all()
    ends = [record for ids, record in shop.changes if ids == ("ends",)]
    assert [end.changes for end in ends] == [{"accounts": 4}, {"accounts": 4, "savings": 1}]
    assert [shop.changes.index((("ends",), end)) for end in ends] == [4, 10]
    last = shop.changes[9][1]
    assert (last.lsn, last.timestamp_ms, last.transaction) == (ends[1].lsn, ends[1].timestamp_ms, ends[1].transaction)


def test_the_ends_of_transactions_beside_pages(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """They begin once all tables are read: until then a row of a page may have the changes. So counts are true."""
    monkeypatch.setattr(change_split, "PAGE_ROWS", 2)
    begin(shop)
    shop.source = shop.source.with_member("ends", PostgresTransactions(dsn="env:SHOP_DSN"))
    for table in ("accounts", "savings"):
        shop.sql(f"INSERT INTO {table} SELECT i, 'ann', 0 FROM generate_series(1, 4) i")
    until(lambda: shop.poll(1))
    shop.sql("INSERT INTO savings VALUES (5, 'bob', 0), (6, 'bob', 0)")
    shop.read_all(1)
    assert [ids for ids, _ in shop.changes if ids == ("ends",)] == []
    assert len(shop.changes) == 10
    shop.end()
    shop.sql("UPDATE savings SET amount = 1")
    changed = shop.read_all(4)
    assert [ids for ids, _ in changed] == [("savings",)] * 6 + [("ends",)]
    assert changed[6][1].changes == {"savings": 6}


def test_an_outbox_alone(shop: Shop) -> None:
    """Its publication has no table. A message that does not decode is an error of its own."""
    shop.source = shop.shared(orders=PostgresMessages("orders", dsn="env:SHOP_DSN", value=Placed))
    assert shop.source.setup()[0] == 'CREATE PUBLICATION "exactlyonce_shop"'
    with shop.session() as session:
        emit(session, "orders", '{"id": 1}')
    assert shop.read_all() == [Placed(1)]
    with shop.session() as session:
        emit(session, "orders", '{"id": "one"}')
    decoder = shop.source.decoder()
    records: list[Any] = []
    while not records:
        records += shop.reader.poll(10, 0.0)
    with pytest.raises(msgspec.ValidationError) as raised:
        decoder.decode(records[0].part)
    problem = decoder.problem(records[0], raised.value)
    assert re.search(
        r"the message 'orders' at 0/\w+, of transaction \d+, is not Placed in json: Expected `int`", problem
    )
    assert decoder.letter(records[0]).value == b'{"id": "one"}'


def test_times_of_members() -> None:
    """One without a time has its commit's, if its records tell it."""

    def slot(**options: Any) -> Any:
        pipeline = Pipeline("shop")
        changes = PostgresChanges("accounts", dsn="env:SHOP_DSN", key="id", value=Account, time="timestamp_ms")
        pipeline.source("accounts", changes).sink("out", KafkaSink("out"))
        orders = PostgresMessages("orders", dsn="env:SHOP_DSN", value=Placed, **options)
        pipeline.source("orders", orders).sink("orders-out", KafkaSink("orders-out"))
        return logs_of(pipeline.build())[0].event_time

    with pytest.raises(GraphError, match="'orders' has no time="):
        slot()
    assert slot(time="id").function((("orders",), Placed(7))) == 7

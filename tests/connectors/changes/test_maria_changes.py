"""The rows of a table of MariaDB and then its changes, each once and in order, wherever the reader ends."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, cast

import msgspec
import pymysql
import pytest
from changing_maria import LOGGING, MariaShop
from changing_table import Account, a_left_over_reader_is_ended, rows_of
from waiting import until

from exactlyonce.connectors import MySQLChanges
from exactlyonce.connectors.mysql import change_split
from exactlyonce.connectors.mysql.binlog import Event
from exactlyonce.pipeline.changes import Change
from exactlyonce.pipeline.errors import ConfigError, Halt, StoreError, StoreUnavailable
from exactlyonce.testing.servers.mariadb import MariaDB

ACCOUNTS = 1_000


@pytest.fixture(scope="module")
def logging_server() -> Iterator[MariaDB]:
    server = MariaDB()
    server.start(*LOGGING)
    yield server
    server.remove()


@pytest.fixture
def shop(logging_server: MariaDB, monkeypatch: pytest.MonkeyPatch) -> Iterator[MariaShop]:
    shop = MariaShop(logging_server, monkeypatch)
    yield shop
    shop.close()


STATEMENTS = (
    "INSERT INTO accounts VALUES ({id}, 'new', 1) ON DUPLICATE KEY UPDATE amount = amount + 1",
    "REPLACE INTO accounts VALUES ({id}, 'again', 1)",
    "UPDATE accounts SET amount = amount + 1 WHERE id = {id}",
    "DELETE FROM accounts WHERE id = {id}",
    "UPDATE IGNORE accounts SET id = id + 100000 WHERE id = {id}",
)


@contextmanager
def busy(shop: MariaShop, writers: int = 3) -> Iterator[None]:
    """Sessions that insert, update, move and delete accounts, and roll back, until the context ends."""
    over = threading.Event()

    def write(seed: int) -> None:
        luck = random.Random(seed)
        while not over.is_set():
            try:
                connection = shop.server.connection()
                while not over.is_set():
                    id = luck.randrange(1, ACCOUNTS * 3 // 2)
                    with connection.cursor() as cursor:
                        cursor.execute("BEGIN")
                        for _ in range(luck.choice((1, 1, 3, 30))):
                            cursor.execute(luck.choice(STATEMENTS).format(id=id))
                            id += 1
                        cursor.execute(luck.choice(("COMMIT", "COMMIT", "COMMIT", "ROLLBACK")))
            except pymysql.MySQLError:  # a deadlock, or the server was killed
                over.wait(0.1)

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(writers)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def let_others_run() -> None:
    """A reader that asks without a pause would keep the interpreter from the threads that write."""
    threading.Event().wait(0.002)


def in_table(shop: MariaShop) -> dict[int, Account]:
    return {row[0]: Account(*row) for row in shop.sql("SELECT id, owner, amount FROM accounts")}


def fill(shop: MariaShop, count: int) -> None:
    shop.sql(f"INSERT INTO accounts SELECT seq, 'old', 0 FROM seq_1_to_{count}")


@pytest.mark.exhaustive(but=["0"])
@pytest.mark.parametrize("seed", range(3))
def test_maria_pages_beside_writers(shop: MariaShop, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table as the changes make it is the table, though the reader ends at any place, also within a page and a
    transaction."""
    luck = random.Random(seed)
    monkeypatch.setattr(change_split, "PAGE_ROWS", 90)
    shop.begin()
    fill(shop, ACCOUNTS)
    with busy(shop):
        while len(shop.changes) < 4 * ACCOUNTS:
            if not shop.poll(luck.choice((1, 7, 100))):
                let_others_run()
            elif luck.random() < 0.03:
                shop.end()
    shop.read_all()
    assert rows_of(shop.changes) == in_table(shop)
    ops = {change.op for change in shop.changes}
    assert ops == {"read", "insert", "update", "delete"}


def test_maria_server_that_is_killed_beside_writers(shop: MariaShop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_split, "PAGE_ROWS", 90)
    luck = random.Random(7)
    shop.begin()
    fill(shop, ACCOUNTS)
    with busy(shop):
        for _ in range(3):
            count = len(shop.changes) + ACCOUNTS
            while len(shop.changes) < count:
                if not shop.poll(luck.choice((1, 7, 100))):
                    let_others_run()
            shop.server.kill()
            with pytest.raises(StoreUnavailable):
                until(lambda: shop.poll() and None)
            shop.end()
            shop.server.start(*LOGGING)
    shop.read_all()
    assert rows_of(shop.changes) == in_table(shop)


def test_maria_commit_that_is_streamed_before_it_is_visible(shop: MariaShop) -> None:
    """A page waits for it: else the row would be in neither."""
    shop.begin()
    shop.sql("INSERT INTO accounts VALUES (1, 'ann', 1)")
    for setting in ("timeout = 3600000", "wait_point = 'AFTER_SYNC'", "enabled = ON"):
        shop.sql(f"SET GLOBAL rpl_semi_sync_master_{setting}")

    def commit() -> None:
        with shop.server.connection() as session:
            session.cursor().execute("INSERT INTO accounts VALUES (2, 'bob', 2)")

    waiting = threading.Thread(target=commit)
    waiting.start()
    try:
        until(lambda: shop.sql("SELECT 1 FROM information_schema.processlist WHERE state LIKE '%semi-sync ACK%'"))
        for _ in range(30):
            assert not shop.poll(), "the page has been read without the row"
        shop.end()
        assert not shop.poll()
    finally:
        shop.sql("SET GLOBAL rpl_semi_sync_master_enabled = OFF")
        waiting.join()
    assert [(change.op, change.key) for change in shop.read_all()] == [("read", 1), ("read", 2)]


@pytest.mark.parametrize("taken_max", [1, 10_000])
def test_maria_open_transaction_is_read_on_where_the_reader_ended(
    shop: MariaShop, taken_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_split, "TAKEN_MAX", taken_max)
    shop.begin(snapshot="never")
    shop.poll()
    fill(shop, 50)
    until(lambda: shop.poll(7))
    for _ in range(3):
        shop.end()
        until(lambda: shop.poll(5))
    shop.read_all(7)
    assert [change.key for change in shop.changes] == list(range(1, 51))
    assert len({change.transaction for change in shop.changes}) == 1


def test_maria_truncate_between_pages(shop: MariaShop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_split, "PAGE_ROWS", 3)
    shop.begin()
    fill(shop, 20)
    until(lambda: not shop.poll(2) and len(shop.changes) >= 4)
    shop.sql("INSERT INTO accounts VALUES (0, 'zoe', 0)")
    shop.sql("truncate /* all */ `shop`.accounts")
    fill(shop, 5)
    while not any(change.op == "truncate" for change in shop.changes):
        shop.poll(2)
    shop.end()
    shop.read_all(2)
    assert rows_of(shop.changes) == in_table(shop)


def test_maria_stream_that_ends(shop: MariaShop) -> None:
    shop.begin()
    shop.sql("INSERT INTO accounts VALUES (1, 'ann', 1)")
    shop.read_all()
    for (id,) in shop.sql("SELECT id FROM information_schema.processlist WHERE command = 'Binlog Dump'"):
        shop.sql(f"KILL {id}")
    shop.sql("INSERT INTO accounts VALUES (2, 'bob', 2)")
    assert [change.key for change in shop.read_all()] == [2]


def test_maria_names_in_another_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that keeps names in lower case knows the table by a dsn in capitals, too, and so does its log."""
    server = MariaDB()
    server.start(*LOGGING, "--lower-case-table-names=1")
    try:
        shop = MariaShop(server, monkeypatch)
        monkeypatch.setenv("SHOP_MYSQL", server.dsn.replace("/shop", "/SHOP"))
        shop.begin()
        shop.insert(1)
        assert [change.op for change in shop.read_all()] == ["read"]
        shop.insert(2)
        assert [change.key for change in shop.read_all()] == [2]
        shop.end()
    finally:
        server.remove()


def test_maria_reader_that_is_left_over_is_ended(shop: MariaShop) -> None:
    shop.begin()
    a_left_over_reader_is_ended(shop)


class Everything(msgspec.Struct):
    id: str
    shop: int
    a: int
    b: Decimal
    c: float | None
    d: float
    e: str
    f: str
    g: bytes
    h: bytes
    i: dict[str, int]
    j: time
    k: timedelta
    l: datetime  # noqa: E741 - a column
    m: datetime
    n: date
    o: str
    p: bool
    q: int


COLUMNS = """
id varchar(20) CHARACTER SET latin1, shop bigint unsigned, a mediumint, b decimal(30, 12), c float, d double,
e enum('x', 'ä'), f set('x', 'y'), g binary(4), h mediumblob, i json, j time(3), k time(6), l datetime(6),
m timestamp(3) NULL, n date, o text CHARACTER SET utf16, p tinyint(1), q int AS (a + 1) VIRTUAL,
more point, PRIMARY KEY (id, shop)
"""
VALUES = (
    "'{}', 18446744073709551615, -8000000, '-123456789012345678.000000000012', 0.1, 1e-300, 'ä', 'x,y', 'ab', 'h', "
    "'{{\"a\": 1}}', '10:11:12.013', '-838:59:59.000001', '2020-01-02 03:04:05.678901', '2037-12-31 23:59:59.999', "
    "'9999-12-31', 'añ', 1, DEFAULT, NULL"
)


@pytest.mark.parametrize("compressed", [False, True])
def test_maria_types_and_keys_of_several_columns(shop: MariaShop, compressed: bool) -> None:
    """A page and the stream give the same values, also of a compressed binlog without checksums."""
    shop.begin(COLUMNS, key=("id", "shop"), value=Everything)
    shop.sql(f"SET GLOBAL binlog_checksum = {'NONE' if compressed else 'CRC32'}")
    shop.sql(f"SET GLOBAL log_bin_compress = {compressed}, log_bin_compress_min_len = 10")
    try:
        shop.sql("SET NAMES utf8mb4")
        insert = f"INSERT INTO accounts VALUES ({VALUES.format('é')})"
        shop.sql(insert)
        (read,) = shop.read_all()
        shop.sql("DELETE FROM accounts")
        shop.sql(insert)
        shop.sql("UPDATE accounts SET c = NULL, o = repeat('o', 5000)")
        deleted, inserted, updated = shop.read_all()
    finally:
        shop.sql("SET GLOBAL binlog_checksum = CRC32, log_bin_compress = 0")
    assert [read.op, deleted.op, inserted.op] == ["read", "delete", "insert"]
    assert read.key == deleted.key == inserted.key == msgspec.json.encode(["é", str(2**64 - 1)]).decode()
    assert read.after == inserted.after == deleted.before == updated.before
    assert updated.after == msgspec.structs.replace(cast("Any", read.after), c=None, o="o" * 5000)
    assert read.after == Everything(
        "é", 2**64 - 1, -8000000, Decimal("-123456789012345678.000000000012"), 0.1, 1e-300, "ä", "x,y", b"ab\0\0", b"h",
        {"a": 1}, time(10, 11, 12, 13000), -timedelta(hours=838, minutes=59, seconds=59, microseconds=1),
        datetime(2020, 1, 2, 3, 4, 5, 678901), datetime(2037, 12, 31, 23, 59, 59, 999000), date(9999, 12, 31), "añ",
        True, -7999999,
    )  # fmt: skip


class Word(msgspec.Struct):
    id: str
    amount: int


def test_maria_pages_are_in_the_order_of_the_column(shop: MariaShop, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the collation of the column, not of the session, by which a key that was read may lie behind the page."""
    monkeypatch.setattr(change_split, "PAGE_ROWS", 3)
    shop.begin("id varchar(5) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PRIMARY KEY, amount int", value=Word)
    shop.sql("INSERT INTO accounts VALUES ('a', 0), ('A', 0), ('b', 0), ('B', 0), ('c', 0), ('C', 0)")
    assert [change.key for change in shop.poll()] == ["A", "B", "C"]
    shop.sql("UPDATE accounts SET amount = 1")
    shop.read_all()
    assert rows_of(shop.changes) == {id: Word(id, 1) for id in ("a", "A", "b", "B", "c", "C")}


def test_maria_tables_share_the_stream_and_one_that_is_added_begins_with_its_rows(shop: MariaShop) -> None:
    """Also within a transaction of which the first table has given a part."""
    shop.begin(snapshot="never")
    shop.sql("CREATE TABLE orders (id int PRIMARY KEY, owner text, amount int)")
    try:
        shop.poll()
        with shop.server.connection() as session, session.cursor() as cursor:
            cursor.execute("BEGIN")
            for id in range(1, 11):
                cursor.execute("INSERT INTO orders VALUES (%s, 'ann', 1)", (id,))
                cursor.execute("INSERT INTO accounts VALUES (%s, 'ann', 1)", (id,))
            cursor.execute("COMMIT")
        until(lambda: shop.poll(3))
        shop.end()
        orders = MySQLChanges("orders", dsn="env:SHOP_MYSQL", key="id", value=Account)
        shop.source = shop.source.with_member("orders", orders)
        shop.sql("UPDATE orders SET amount = 2 WHERE id = 1")
        shop.changes += [record for _, record in cast("Any", shop.read_all())]
        changes = [change for change in shop.changes if isinstance(change, Change)]
        assert [change.key for change in changes if change.table == "accounts"] == list(range(1, 11))
        assert rows_of([change for change in changes if change.table == "orders"]) == {
            id: Account(id, "ann", 2 if id == 1 else 1) for id in range(1, 11)
        }
    finally:
        shop.end()
        shop.sql("DROP TABLE orders")


def test_maria_transaction_of_which_a_dead_server_left_a_part(shop: MariaShop) -> None:
    """It did not happen."""
    shop.begin(snapshot="never")
    shop.poll()
    shop.end()
    shop.sql("INSERT INTO accounts VALUES (1, 'ann', 1)")
    log = max((shop.server.folder / "data").glob("bin.0*"))
    size = log.stat().st_size
    shop.sql("INSERT INTO accounts VALUES (2, 'bob', 2)")
    shop.server.kill()
    data = log.read_bytes()
    event = size
    while data[event + 4] != Event.XID:
        event += int.from_bytes(data[event + 9 : event + 13], "little")
    os.truncate(log, event)
    shop.server.start(*LOGGING)
    shop.sql("INSERT INTO accounts VALUES (3, 'eve', 3)")
    assert [change.key for change in shop.read_all()] == [1, 3]


def test_maria_prepared_transactions(shop: MariaShop) -> None:
    """One of another table is skipped; one of the table halts, as it may be rolled back."""
    shop.begin()
    shop.sql("CREATE TABLE others (id int PRIMARY KEY)")
    try:
        shop.sql("INSERT INTO accounts VALUES (1, 'ann', 1)")
        shop.read_all()
        for statement, end in (("INSERT INTO others VALUES (1)", "COMMIT"), ("DELETE FROM accounts", "ROLLBACK")):
            for word in ("XA START 'x'", statement, "XA END 'x'", "XA PREPARE 'x'", f"XA {end} 'x'"):
                shop.sql(word)
            shop.sql("UPDATE accounts SET amount = amount + 1")
        assert "XA PREPARE" in str(shop.halt())
        assert [change.op for change in shop.changes] == ["read", "update"]
    finally:
        shop.sql("DROP TABLE others")


def test_maria_failover(shop: MariaShop, monkeypatch: pytest.MonkeyPatch) -> None:
    """To a replica that has all that was read it goes on; to one that lacks some, it halts."""
    shop.sql("RESET MASTER")
    shop.begin()
    shop.sql("INSERT INTO accounts VALUES (1, 'ann', 1)")
    shop.read_all()
    replica = MariaDB()
    try:
        replica.start(*LOGGING, "--server-id=2", "--log-slave-updates")
        replica.sql("RESET MASTER", database=None)
        replica.sql(f"CHANGE MASTER TO master_host = '127.0.0.1', master_port = {shop.server.port}, "
                    "master_user = 'root', master_use_gtid = slave_pos", database=None)  # fmt: skip
        replica.sql("START SLAVE", database=None)
        shop.sql("INSERT INTO accounts VALUES (2, 'bob', 2)")
        position = "SELECT @@gtid_binlog_pos"
        until(
            lambda: replica.sql(position) == shop.sql(position),
            told=lambda: replica.sql("SHOW SLAVE STATUS"),
        )
        replica.sql("STOP SLAVE", database=None)
        shop.end()
        before = shop.positions
        shop.sql("INSERT INTO accounts VALUES (3, 'eve', 3)")
        replica.sql("INSERT INTO accounts VALUES (4, 'joe', 4)")
        monkeypatch.setenv("SHOP_MYSQL", replica.dsn)
        until(lambda: shop.poll() and shop.changes[-1].key == 4)
        assert [change.key for change in shop.changes] == [1, 2, 4]
        shop.end()
        monkeypatch.setenv("SHOP_MYSQL", shop.server.dsn)
        assert "not in the binlog" in str(shop.halt())
        shop.positions = before
        assert [change.key for change in shop.read_all()] == [2, 3]
    finally:
        replica.remove()


def test_maria_doctor_names_what_is_wrong(shop: MariaShop) -> None:
    """A reader that is at work goes on."""
    shop.begin()
    shop.read_all()
    shop.reader._ask_logs_s = 0
    (log,) = shop.reader.logs()
    assert (log.lag_ms, log.tables) == (0, [])
    state, findings = shop.source.examine(shop.positions)
    assert "kept, never removed by age" in state
    assert findings == []
    assert shop.source.setup() == []
    shop.sql("SET GLOBAL binlog_expire_logs_seconds = 3600")
    shop.sql("SET GLOBAL binlog_row_image = 'MINIMAL'")
    _, (finding,) = shop.source.examine(shop.positions)
    assert finding.do == "SET GLOBAL binlog_row_image = FULL, and in its configuration"
    shop.sql("SET GLOBAL binlog_row_image = 'FULL'")
    _, (finding,) = shop.source.examine(shop.positions)
    assert "removes its binlogs after 1h" in finding.what
    shop.sql("SET GLOBAL binlog_expire_logs_seconds = 0")
    shop.sql("INSERT INTO accounts VALUES (1, 'ann', 1)")
    assert [change.key for change in shop.read_all()] == [1]


def purge(shop: MariaShop) -> None:
    """Leave only the newest file of the binlog. A reader that the server takes for alive keeps the others."""
    shop.end()
    shop.sql("FLUSH BINARY LOGS")
    ((name, *_),) = shop.sql("SHOW MASTER STATUS")

    def is_purged() -> bool:
        shop.sql(f"PURGE BINARY LOGS TO '{name}'")
        return len(shop.sql("SHOW BINARY LOGS")) == 1

    until(is_purged)


def test_maria_binlog_that_is_gone(shop: MariaShop) -> None:
    """Purged, or begun anew: also where the new one has come as far."""
    shop.begin()
    shop.sql("INSERT INTO accounts VALUES (1, 'ann', 1)")
    shop.read_all()
    shop.sql("UPDATE accounts SET amount = 2")
    shop.read_all()
    purge(shop)
    assert shop.read_all() == []  # all that is purged was read
    shop.sql("UPDATE accounts SET amount = 3")
    purge(shop)
    assert "not in the binlog" in str(shop.halt())
    read = int(shop.cursor["gtids"].rpartition("-")[2])
    shop.sql("RESET MASTER")
    assert "binlog" in str(shop.halt())
    for _ in range(read + 1):
        shop.sql("UPDATE accounts SET amount = amount + 1")
    with pytest.raises(Halt, match="begun its binlog anew"):
        shop.poll()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("ALTER TABLE accounts DROP COLUMN owner", "no column 'owner'"),
        ("ALTER TABLE accounts RENAME COLUMN owner TO keeper", "no column 'owner'"),
        ("ALTER TABLE accounts MODIFY amount datetime", "'amount' is datetime"),
        ("RENAME TABLE accounts TO gone, gone TO accounts", "renamed"),
        ("CREATE OR REPLACE TABLE accounts (id int PRIMARY KEY, owner text, amount int)", "made anew"),
        ("ALTER TABLE years EXCHANGE PARTITION one WITH TABLE accounts", "exchanged with a partition"),
        ("SET STATEMENT binlog_format = 'STATEMENT' FOR UPDATE accounts SET amount = 4", "binlog_format"),
        ("SET STATEMENT binlog_row_image = 'MINIMAL' FOR UPDATE accounts SET amount = 4", "binlog_row_image"),
    ],
)
def test_maria_change_of_the_table_halts(shop: MariaShop, change: str, what: str) -> None:
    """What was before it is given."""
    shop.begin()
    shop.sql("INSERT INTO accounts VALUES (1, 'ann', 1)")
    shop.read_all()
    shop.sql("UPDATE accounts SET amount = 0")
    shop.sql("SET SESSION binlog_format = 'ROW'")
    shop.sql("CREATE OR REPLACE TABLE years LIKE accounts")
    shop.sql("ALTER TABLE years PARTITION BY RANGE (id) (PARTITION one VALUES LESS THAN (100))")
    shop.sql(change)
    if shop.sql("SELECT 1 FROM information_schema.columns WHERE table_name = 'accounts' AND column_name = 'amount'"):
        shop.sql("REPLACE INTO accounts (id) VALUES (1), (2)")
    assert what in str(shop.halt())
    assert [(change.op, change.key) for change in shop.changes] == [("read", 1), ("update", 1)]


class Renamed(msgspec.Struct):
    id: int
    name: str
    amount: int


def test_maria_version_that_fits_reads_to_a_change_of_columns(shop: MariaShop) -> None:
    """Also if the run was not there yet when it began; the next version goes on there."""
    shop.begin()
    shop.insert(1)
    shop.read_all()
    shop.sql("UPDATE accounts SET amount = 2")
    shop.sql("ALTER TABLE accounts RENAME COLUMN owner TO name")
    shop.sql("INSERT INTO accounts (id, name, amount) VALUES (3, 'cid', 3)")
    described = shop.source
    shop.end()
    shop.source = shop.described(value=Renamed)
    assert "no column 'name'" in str(shop.halt()), "it is too early for this version"
    shop.source = described
    assert "no column 'owner'" in str(shop.halt())
    assert [(change.op, change.key) for change in shop.changes] == [("read", 1), ("update", 1)]
    shop.source = shop.described(value=Renamed)
    assert [change.after for change in shop.read_all()] == [Renamed(3, "cid", 3)]


def test_maria_column_that_is_no_field_may_come_and_go(shop: MariaShop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_split, "PAGE_ROWS", 3)
    shop.begin("id int PRIMARY KEY, owner text, amount int, more text")
    fill_more = "INSERT INTO accounts SELECT seq, 'old', 0, '' FROM seq_1_to_10"
    shop.sql(fill_more)
    until(lambda: shop.poll(3))
    shop.sql("ALTER TABLE accounts DROP COLUMN more, ADD COLUMN other int FIRST")
    shop.sql("UPDATE accounts SET amount = 1")
    shop.read_all()
    assert rows_of(shop.changes) == {id: Account(id, "old", 1) for id in range(1, 11)}


@pytest.mark.parametrize(
    ("columns", "remedy"),
    [
        ("id int, owner text, amount int", "takes NULL"),
        ("id int NOT NULL, owner text, amount int", "unique index"),
        ("id int PRIMARY KEY, owner text", "no column 'amount'"),
        ("id int PRIMARY KEY, owner uuid, amount int", "uuid, for which there is no rule"),
        ("id int PRIMARY KEY, owner text character set koi8r, amount int", "koi8r"),
        ("id int PRIMARY KEY, owner text, amount int) ENGINE = MyISAM COMMENT = '' -- ", "InnoDB"),
        ("id int PRIMARY KEY, owner text, amount int) WITH SYSTEM VERSIONING -- ", "SYSTEM VERSIONED"),
        ("id int PRIMARY KEY, owner text, amount int) PARTITION BY HASH (id", "partitioned"),
        ("id int PRIMARY KEY, owner text, amount int, FOREIGN KEY (amount) REFERENCES accounts (id) ON DELETE CASCADE",
         "ON DELETE CASCADE"),
    ],
)  # fmt: skip
def test_maria_table_that_cannot_be_captured(shop: MariaShop, columns: str, remedy: str) -> None:
    shop.begin(columns)
    with pytest.raises(ConfigError, match=remedy):
        shop.find()


@pytest.mark.parametrize(
    "setting", ["binlog_format = 'MIXED'", "binlog_row_image = 'MINIMAL'", "binlog_row_metadata = 'MINIMAL'"]
)
def test_maria_setting_that_hides_changes(shop: MariaShop, setting: str) -> None:
    shop.begin()
    name = setting.partition(" ")[0]
    ((before,),) = shop.sql(f"SELECT @@global.{name}")
    shop.sql(f"SET GLOBAL {setting}")
    try:
        with pytest.raises(ConfigError, match=f"SET GLOBAL {name} = {before}"):
            shop.find()
    finally:
        shop.sql(f"SET GLOBAL {name} = '{before}'")


def test_maria_user_with_the_rights_that_are_printed(shop: MariaShop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.begin()
    shop.sql("CREATE USER reader@'%' IDENTIFIED BY 'secret word'")
    try:
        for statement in reversed(shop.source.grants("reader").statements):
            monkeypatch.setenv("SHOP_MYSQL", shop.server.dsn.replace("root@", "reader:secret%20word@"))
            with pytest.raises((ConfigError, StoreError)) as refused:
                shop.find()
            assert "secret word" not in str(refused.value)
            shop.sql(statement)
        shop.sql("INSERT INTO accounts VALUES (1, 'ann', 1)")
        assert [change.key for change in shop.read_all()] == [1]
        shop.end()
        shop.sql("ALTER TABLE accounts ADD FOREIGN KEY (amount) REFERENCES accounts (id) ON DELETE CASCADE")
        with pytest.raises(ConfigError, match="ON DELETE CASCADE"):
            shop.poll()
    finally:
        shop.sql("DROP USER reader")

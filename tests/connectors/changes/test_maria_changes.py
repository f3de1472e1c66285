"""The rows of a table of MariaDB and then its changes, each once and in order, wherever the reader ends."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pymysql
import pytest
from changing_maria import LOGGING, MariaShop
from changing_table import Account, rows_of
from waiting import until

from exactlyonce.connectors.mysql import change_split
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


def in_table(shop: MariaShop) -> dict[int, Account]:
    return {row[0]: Account(*row) for row in shop.sql("SELECT id, owner, amount FROM accounts")}


def fill(shop: MariaShop, count: int) -> None:
    shop.sql(f"INSERT INTO accounts SELECT seq, 'old', 0 FROM seq_1_to_{count}")


@pytest.mark.parametrize("seed", range(2))
def test_maria_pages_beside_writers(shop: MariaShop, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table as the changes make it is the table, though the reader ends at any place, also within a page and a
    transaction."""
    luck = random.Random(seed)
    monkeypatch.setattr(change_split, "PAGE_ROWS", 90)
    shop.begin()
    fill(shop, ACCOUNTS)
    with busy(shop):
        while len(shop.changes) < 6 * ACCOUNTS:
            if shop.poll(luck.choice((1, 7, 100))) and luck.random() < 0.03:
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
                shop.poll(luck.choice((1, 7, 100)))
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


def test_maria_open_transaction_is_read_on_where_the_reader_ended(shop: MariaShop) -> None:
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


def test_maria_truncate_ends_the_pages(shop: MariaShop, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_maria_reader_that_is_left_over_is_ended(shop: MariaShop) -> None:
    """It does not take the stream back."""
    shop.begin()
    shop.sql("INSERT INTO accounts VALUES (1, 'ann', 1)")
    shop.read_all()
    left_over, shop._reader = shop.reader, None
    assert shop.read_all() == []
    with pytest.raises(StoreUnavailable, match="another incarnation"):
        until(lambda: left_over.poll(10, 0.0))
    left_over.close()
    shop.sql("INSERT INTO accounts VALUES (2, 'bob', 2)")
    assert [change.key for change in shop.read_all()] == [2]


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
    with pytest.raises(Halt, match="not in the binlog"):
        until(lambda: shop.poll() and None)
    read = int(shop.cursor["gtids"].rpartition("-")[2])
    shop.sql("RESET MASTER")
    with pytest.raises(Halt, match="binlog"):
        until(lambda: shop.poll() and None)
    shop.end()
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
    shop.sql(change)
    if shop.sql("SELECT 1 FROM information_schema.columns WHERE table_name = 'accounts' AND column_name = 'amount'"):
        shop.sql("REPLACE INTO accounts (id) VALUES (1), (2)")
    with pytest.raises(Halt, match=what):
        until(lambda: shop.poll() and None)
    assert [(change.op, change.key) for change in shop.changes] == [("read", 1), ("update", 1)]


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

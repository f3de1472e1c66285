"""Refusals: what is missing or wrong is named, with what to do and without a secret; what passes is unavailable."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from datetime import datetime
from decimal import Decimal
from threading import Event, Thread
from typing import Any

import msgspec
import pymysql
import pytest
from table_keys import key_of

from exactlyonce.pipeline.errors import StoreError, StoreUnavailable, UserError
from exactlyonce.sinks.mysql.address import MySQLAddress
from exactlyonce.sinks.mysql.refusals import as_ours
from exactlyonce.sinks.write_ahead.store import LedgerEntry

Stores = Callable[..., Any]
SECRET = "hunter2"
FIRST = LedgerEntry(pipeline="p", sink="s", subtask=0, checkpoint=1, previous=0, incarnation=1, origin="origin")
COLUMNS = "customer VARCHAR(50) COLLATE utf8mb4_bin NOT NULL, cents BIGINT NOT NULL"


class Total(msgspec.Struct):
    customer: str
    cents: int


@pytest.fixture
def shop(mariadb: Any) -> Iterator[str]:
    """The dsn of a user with a password and no rights; each test grants what it is about."""
    mariadb.sql(f"CREATE USER shop IDENTIFIED BY '{SECRET}'")
    yield mariadb.dsn.replace("root@", f"shop:{SECRET}@")
    mariadb.sql("DROP USER shop")


def refusal(store: Any, kind: type[UserError] = StoreError, act: str = "check") -> str:
    """What the store says; no error that led to it has the secret either."""
    with pytest.raises(kind) as raised:
        getattr(store, act)()
    assert type(raised.value) is kind
    assert SECRET not in f"{raised.value} {raised.value.__cause__!r} {raised.value.__context__!r}"
    return str(raised.value)


def test_a_wrong_password_is_named(mariadb: Any, stores: Stores, shop: str) -> None:
    """User, host and what to correct; not the password that was tried."""
    mariadb.sql("ALTER USER shop IDENTIFIED BY 'another'")
    said = refusal(stores(Total, dsn=shop))
    assert "Access denied for user 'shop'@'127.0.0.1' (using password: YES) (1045)" in said
    assert "User or password of the dsn are wrong" in said


def test_a_missing_database_is_named(mariadb: Any, stores: Stores) -> None:
    """With the SQL that creates it."""
    said = refusal(stores(Total, dsn=mariadb.dsn.replace("/shop?", "/shopp?")))
    assert "Unknown database 'shopp' (1049)" in said
    assert "CREATE DATABASE shopp" in said


def test_a_database_without_rights_is_named(stores: Stores, shop: str) -> None:
    """With the rights that are needed."""
    said = refusal(stores(Total, dsn=shop))
    assert "Access denied for user 'shop'@'%' to database 'shop' (1044)" in said
    assert "GRANT SELECT, INSERT, UPDATE, DELETE, CREATE ON shop.* TO" in said


def test_a_missing_table_is_named(mariadb: Any, stores: Stores) -> None:
    """By check and by encoder, with both ways to get it."""
    for act in ("check", "encoder"):
        said = refusal(stores(Total), act=act)
        assert re.search("no table totals at 127.0.0.1:.* Create it, give the sink create=True, or GRANT INSERT", said)


@pytest.mark.parametrize(
    ("mode", "granted", "missing", "grant"),
    [
        ("append", "SELECT", "INSERT command denied", "GRANT INSERT ON `shop`.`totals` TO `shop`@'%'"),
        ("upsert", "INSERT", "UPDATE command denied", "GRANT INSERT, UPDATE ON `shop`.`totals` TO `shop`@'%'"),
        ("delete", "SELECT", "DELETE command denied", "GRANT SELECT, DELETE ON `shop`.`totals` TO `shop`@'%'"),
        (
            "delete",
            "DELETE",
            "the user may not see it and its columns",
            "GRANT SELECT, DELETE ON `shop`.`totals` TO `shop`@'%'",
        ),
    ],
)
def test_a_missing_right_is_named(
    mariadb: Any, stores: Stores, shop: str, mode: str, granted: str, missing: str, grant: str
) -> None:
    """At the start, before any row; the table is as it was."""
    mariadb.sql(f"CREATE TABLE totals ({COLUMNS}, PRIMARY KEY (customer))")
    mariadb.sql(f"GRANT {granted} ON shop.totals TO shop")
    said = refusal(stores(Total, dsn=shop, mode=mode, key=key_of(mode)))
    assert missing in said
    assert grant in said


def test_a_ledger_that_cannot_be_made_is_named(mariadb: Any, stores: Stores, shop: str) -> None:
    """With the SQL for an administrator; made by one, and the rights given, the check is content with no more."""
    mariadb.sql(f"CREATE TABLE totals ({COLUMNS})")
    mariadb.sql("GRANT INSERT ON shop.totals TO shop")
    said = refusal(stores(Total, dsn=shop))
    assert "CREATE command denied" in said
    statement = said.split("let an administrator run, in the dsn's database: ")[1]
    assert statement.startswith("CREATE TABLE IF NOT EXISTS exactlyonce_ledger (")
    mariadb.sql(statement.rstrip(";"))
    mariadb.sql("GRANT SELECT, INSERT ON shop.exactlyonce_ledger TO shop")
    said = refusal(stores(Total, dsn=shop))
    assert "GRANT SELECT, INSERT, UPDATE ON `shop`.exactlyonce_ledger TO `shop`@'%'" in said
    mariadb.sql("GRANT UPDATE ON shop.exactlyonce_ledger TO shop")
    store = stores(Total, dsn=shop)
    store.check()
    store.fence("p", "s", 1, "origin")
    assert store.apply(store.encoder().encode([Total("ann", 1)]), FIRST)


@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
def test_a_weaker_delivery_needs_no_ledger(mariadb: Any, stores: Stores, shop: str, delivery: str) -> None:
    """The right to write to the table is all that it takes."""
    mariadb.sql(f"CREATE TABLE totals ({COLUMNS})")
    mariadb.sql("GRANT INSERT ON shop.totals TO shop")
    store = stores(Total, dsn=shop, delivery=delivery)
    store.check()
    store.write(store.encoder().encode([Total("ann", 1)]))
    assert mariadb.sql("SELECT * FROM totals") == [("ann", 1)]
    assert mariadb.sql("SHOW TABLES") == [("totals",)]


def test_a_table_that_cannot_be_made_is_named(mariadb: Any, stores: Stores, shop: str) -> None:
    """With the SQL that an administrator can run, which makes what create=True would."""
    mariadb.sql("GRANT INSERT, UPDATE ON shop.* TO shop")
    said = refusal(stores(Total, dsn=shop, create=True, mode="upsert", key=("customer",)))
    mariadb.sql(said.split("in the dsn's database: ")[1].rstrip(";"))
    store = stores(Total, mode="upsert", key=("customer",))
    store.check()


PROBLEMS = [
    ("append", "customer TEXT", "it has no column 'cents', but customer: add the column"),
    ("append", f"{COLUMNS}, at DATE NOT NULL", "'at' is NOT NULL without a default, and no field has that name"),
    ("append", f"{COLUMNS[:-8]} AS (length(customer))", "its column 'cents' is generated, and takes no value"),
    ("append", "customer TEXT, cents DOUBLE", "needs one of TINYINT, SMALLINT, MEDIUMINT, INT, BIGINT, DECIMAL: "
     "ALTER TABLE `totals` MODIFY `cents` BIGINT"),
    ("append", "customer ENUM('ann'), cents INT", "column 'customer' is enum('ann'), and a field of str needs one of"),
    ("append", "customer TEXT CHARACTER SET sjis, cents INT", "has the character set sjis: ALTER TABLE `totals` MODIFY "
     "`customer` text CHARACTER SET utf8mb4"),
    ("append", "customer TEXT, cents INT) ENGINE=(MyISAM", "its engine is MyISAM, which has no transactions that "
     "the ledger could be part of: ALTER TABLE `totals` ENGINE=InnoDB"),
    ("upsert", COLUMNS, "needs a unique key on `customer`: ALTER TABLE `totals` ADD UNIQUE KEY (`customer`)"),
    ("upsert", f"{COLUMNS}, UNIQUE KEY (customer, cents)", "needs a unique key on `customer`"),
    ("upsert", f"{COLUMNS}, UNIQUE KEY (customer(5))", "needs a unique key on `customer`"),
    ("upsert", f"{COLUMNS}, PRIMARY KEY (customer), UNIQUE KEY other (cents)", "its unique index `other` is not on the "
     "key, and MySQL would change the row that it finds, which is another key's: ALTER TABLE `totals` DROP INDEX"),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "columns", "said"), PROBLEMS, ids=[said[:40] for _, _, said in PROBLEMS])
def test_a_table_that_does_not_match_is_refused(
    mariadb: Any, stores: Stores, mode: str, columns: str, said: str
) -> None:
    """At the start, each difference with the SQL that removes it where there is one."""
    mariadb.sql(f"CREATE TABLE totals ({columns})".replace("(MyISAM)", "MyISAM"))
    assert said in refusal(stores(Total, mode=mode, key=key_of(mode)))


@pytest.mark.parametrize(
    "columns",
    [
        f"id INT AUTO_INCREMENT PRIMARY KEY, {COLUMNS}, UNIQUE KEY (customer)",
        f"{COLUMNS}, UNIQUE KEY (customer), UNIQUE KEY (cents, customer)",
        f"{COLUMNS}, at TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP, PRIMARY KEY (customer), KEY (cents)",
    ],
)
def test_other_indexes_that_find_no_other_row_are_accepted(mariadb: Any, stores: Stores, columns: str) -> None:
    """A number that the server gives out, an index that holds the key, one that is not unique: none is in the way."""
    mariadb.sql(f"CREATE TABLE totals ({columns})")
    stores(Total, mode="upsert", key=("customer",)).check()


def test_a_view_is_refused(mariadb: Any, stores: Stores) -> None:
    """Rows go into tables."""
    mariadb.sql(f"CREATE TABLE t ({COLUMNS})")
    mariadb.sql("CREATE VIEW totals AS SELECT * FROM t")
    assert "it is a view: name the table" in refusal(stores(Total))


def test_a_ledger_that_is_none_is_refused(mariadb: Any, stores: Stores) -> None:
    """A table of that name with other columns, or without transactions, is named and left alone."""
    mariadb.sql(f"CREATE TABLE totals ({COLUMNS})")
    mariadb.sql("CREATE TABLE exactlyonce_ledger (id INT)")
    assert "is not the ledger of exactlyonce: its columns must be pipeline, sink" in refusal(stores(Total))
    mariadb.sql(
        "CREATE OR REPLACE TABLE exactlyonce_ledger (pipeline VARCHAR(9), sink VARCHAR(9), subtask INT, "
        "checkpoint BIGINT, incarnation BIGINT, origin VARCHAR(9), PRIMARY KEY (pipeline, sink, subtask)) ENGINE=MyISAM"
    )
    assert "has the engine MyISAM, which has no transactions: ALTER TABLE exactlyonce_ledger" in refusal(stores(Total))


def test_names_are_quoted(mariadb: Any, stores: Stores) -> None:
    """A table or a column may have any name: none is taken for SQL."""
    type_ = msgspec.defstruct(
        "Row", [("a", int), ("b", int)], rename={"a": "x`; DROP TABLE t; --", "b": "50% `select`"}
    )
    store = stores(type_, "or`der %s", create=True, mode="upsert", key=("x`; DROP TABLE t; --",))
    store.check()
    store.fence("p", "s", 1, "origin")
    assert store.apply(store.encoder().encode([type_(1, 2), type_(1, 3)]), FIRST)
    assert mariadb.sql("SELECT * FROM `or``der %s`") == [(1, 3)]


def test_values_that_a_constraint_forbids_are_an_error(mariadb: Any, stores: Stores) -> None:
    """What no encoder can know: a check, a foreign key, a unique key; the server's words, and what can be done."""
    mariadb.sql(f"CREATE TABLE totals ({COLUMNS}, UNIQUE KEY (customer), CHECK (cents > 0))")
    store = stores(Total)
    encoder = store.encoder()
    with pytest.raises(StoreError, match=r"CONSTRAINT `CONSTRAINT_1` failed .*\(4025\).*ALTER TABLE"):
        store.write(encoder.encode([Total("ann", 0)]))
    with pytest.raises(StoreError, match=r"Duplicate entry 'ann' .*\(1062\).*mode='upsert'"):
        store.write(encoder.encode([Total("ann", 1), Total("ann", 1)]))
    assert mariadb.sql("SELECT count(*) FROM totals") == [(0,)]


def test_a_column_altered_under_the_rows_is_an_error(mariadb: Any, stores: Stores) -> None:
    """Rows that were encoded for a wider column are refused as a whole by the strict session, and none is cut."""
    mariadb.sql(f"CREATE TABLE totals ({COLUMNS})")
    store = stores(Total)
    encoded = store.encoder().encode([Total("a name of some length", 1), Total("b", 1 << 40)])
    mariadb.sql("ALTER TABLE totals MODIFY cents INT")
    with pytest.raises(StoreError, match=r"Out of range value .*\(1264\). The table has changed since the rows"):
        store.write(encoded)
    mariadb.sql("ALTER TABLE totals DROP cents")
    with pytest.raises(StoreError, match=r"Unknown column 'cents' .*\(1054\)"):
        store.write(encoded)
    assert mariadb.sql("SELECT count(*) FROM totals") == [(0,)]


class Priced(msgspec.Struct):
    customer: str
    price: Decimal
    at: datetime


@pytest.mark.parametrize(
    "column",
    ["price DECIMAL(9,1)", "at DATETIME(0)", "at TIMESTAMP(6)", "customer CHAR(20)"],
)
@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_a_column_that_becomes_another_while_rows_wait(mariadb: Any, stores: Stores, mode: str, column: str) -> None:
    """What it would round or shift is refused, until it is what it was; the same, only wider, is taken."""
    columns = "customer VARCHAR(20) PRIMARY KEY, price DECIMAL(9,2), at DATETIME(6)"
    mariadb.sql(f"CREATE TABLE totals ({columns})")
    store = stores(Priced, mode=mode, key=("customer",) if mode == "upsert" else ())
    row = ("ann ", Decimal("1.25"), datetime(2026, 3, 1, 12, 0, 0, 500000))
    encoded = store.encoder().encode([Priced(*row)])
    mariadb.sql(f"ALTER TABLE totals MODIFY {column}")
    for _ in range(2):
        with pytest.raises(StoreError, match=r"encoded for other types of its columns.* Make them what they were"):
            store.write(encoded)
    assert mariadb.sql("SELECT count(*) FROM totals") == [(0,)]
    mariadb.sql("DROP TABLE totals")
    mariadb.sql(f"CREATE TABLE totals ({columns.replace('20', '30').replace('9,2', '12,2')})")
    store.write(encoded)
    assert mariadb.sql("SELECT * FROM totals") == [row]


@pytest.mark.parametrize("mode", ["append", "upsert", "delete"])
def test_a_table_stays_as_it_is_while_rows_go_into_it(mariadb: Any, stores: Stores, mode: str) -> None:
    """No ALTER TABLE comes between the look at its columns and its rows."""
    mariadb.sql(f"CREATE TABLE totals ({COLUMNS})")
    store = stores(Total, mode=mode, key=() if mode == "append" else ("customer",))
    encoded = store.encoder().encode([Total("ann", 1)])

    def chunks() -> Iterator[bytes]:
        with pytest.raises(pymysql.err.OperationalError, match="Lock wait timeout"):
            mariadb.sql("SET STATEMENT lock_wait_timeout = 0 FOR ALTER TABLE totals MODIFY cents DECIMAL(9,1)")
        yield from encoded

    store.write(chunks())
    assert mariadb.sql("SELECT count(*) FROM totals") == [(int(mode != "delete"),)]


def test_a_table_that_is_just_being_altered_takes_rows(mariadb: Any, stores: Stores) -> None:
    """MariaDB shows no columns of it to a transaction that has locked another: they are asked for when it is
    locked, too."""
    mariadb.sql("CREATE TABLE totals (customer VARCHAR(20), cents BIGINT)")
    store = stores(Total)
    store.check()
    store.fence("p", "s", 1, "origin")
    encoded = store.encoder().encode([Total("ann", 1)])
    done = Event()

    def alter() -> None:
        while not done.is_set():
            mariadb.sql("ALTER TABLE totals FORCE")

    (altering := Thread(target=alter)).start()
    try:
        for checkpoint in range(1, 301):
            assert store.apply(encoded, msgspec.structs.replace(FIRST, checkpoint=checkpoint))
    finally:
        done.set()
        altering.join()
    assert mariadb.sql("SELECT count(*) FROM totals") == [(300,)]


class Measured(msgspec.Struct):
    id: int
    size: float


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("MODIFY size DOUBLE(9,1)", "encoded for other types of its columns"),
        ("CHANGE size SIZE DOUBLE(9,1)", "has no column size"),
    ],
)
def test_a_double_that_rounds_while_rows_wait(mariadb: Any, stores: Stores, change: str, said: str) -> None:
    """A DOUBLE that has got a number of digits would round: rows that wait are refused, in whatever case its name is
    now, which is nothing to the server."""
    mariadb.sql("CREATE TABLE totals (id BIGINT, size DOUBLE)")
    store = stores(Measured)
    encoded = store.encoder().encode([Measured(1, 1.25)])
    mariadb.sql(f"ALTER TABLE totals {change}")
    with pytest.raises(StoreError, match=said):
        store.write(encoded)
    assert mariadb.sql("SELECT count(*) FROM totals") == [(0,)]


def test_no_connection_left_passes_by_itself(mariadb: Any, stores: Stores, shop: str) -> None:
    """A user who has as many connections as may be is unavailable, until one is free."""
    mariadb.sql(f"CREATE TABLE totals ({COLUMNS})")
    mariadb.sql("GRANT ALL ON shop.* TO shop WITH MAX_USER_CONNECTIONS 1")
    with pymysql.connect(host="127.0.0.1", port=mariadb.port, user="shop", password=SECRET):
        said = refusal(stores(Total, dsn=shop), StoreUnavailable)
    assert "has no connection left for this user" in said
    stores(Total, dsn=shop).check()


def test_a_read_only_server_passes_by_itself(mariadb: Any, stores: Stores, shop: str) -> None:
    """As in a failover: the rows wait."""
    mariadb.sql(f"CREATE TABLE totals ({COLUMNS})")
    mariadb.sql("GRANT ALL ON shop.* TO shop")
    store = stores(Total, dsn=shop)
    encoded = store.encoder().encode([Total("ann", 1)])
    mariadb.sql("SET GLOBAL read_only = 1")
    try:
        with pytest.raises(StoreUnavailable, match="is read-only: a failover is under way"):
            store.write(encoded)
    finally:
        mariadb.sql("SET GLOBAL read_only = 0")
    store.write(encoded)


def test_a_statement_that_is_killed_passes_by_itself(mariadb: Any, stores: Stores) -> None:
    """A limit of the server's own ended it: it can be tried again."""
    mariadb.sql(f"CREATE TABLE totals ({COLUMNS})")
    mariadb.sql("CREATE TRIGGER slow BEFORE INSERT ON totals FOR EACH ROW DO SLEEP(30)")
    mariadb.sql("SET GLOBAL max_statement_time = 0.2")
    try:
        store = stores(Total)
        with pytest.raises(
            StoreUnavailable, match="was told to end the statement, by KILL or by its max_statement_time"
        ):
            store.write(store.encoder().encode([Total("ann", 1)]))
    finally:
        mariadb.sql("SET GLOBAL max_statement_time = 0")


def test_an_alter_table_under_way_is_waited_for(mariadb: Any, stores: Stores) -> None:
    """Whoever holds the table, by LOCK TABLES or ALTER TABLE, makes it unavailable for no longer than the limit."""
    mariadb.sql(f"CREATE TABLE totals ({COLUMNS})")
    store = stores(Total, timeout_s=2.0)
    encoded = store.encoder().encode([Total("ann", 1)])
    with mariadb.connection() as other:
        other.query("LOCK TABLES totals WRITE")
        with pytest.raises(
            StoreUnavailable, match="waited too long for a lock; another transaction holds it, or an ALTER"
        ):
            store.write(encoded)
    store.write(encoded)


@pytest.mark.exhaustive
def test_a_full_disk_passes_by_an_operators_hand(mariadb: Any, stores: Stores) -> None:
    """Where the server's file cannot grow the rows wait, nothing of them is there, and the error says what to do."""
    mariadb.sql("CREATE TABLE totals (customer VARCHAR(2000), cents INT)")
    store = stores(Total)
    encoded = [b"".join(store.encoder().encode([Total("x" * 2000, n) for n in range(10_000)]))]
    mariadb.kill()
    mariadb.start(file_bytes_max=17 << 20)
    try:
        with pytest.raises(StoreUnavailable, match="has no room left: make some on its disk"):
            store.write(encoded)
        assert mariadb.sql("SELECT count(*) FROM totals") == [(0,)]
    finally:
        mariadb.kill()
        mariadb.start()
    store.write(encoded)
    assert mariadb.sql("SELECT count(*) FROM totals") == [(10_000,)]


def test_a_name_that_is_not_known_is_unavailable(stores: Stores) -> None:
    """A host that is not found may be found later."""
    said = refusal(stores(Total, dsn=f"mysql://shop:{SECRET}@nowhere.invalid/shop"), StoreUnavailable)
    assert "MySQL at nowhere.invalid:3306 cannot be reached. Start it, or correct the dsn" in said


def test_tls_that_is_asked_for_is_had_or_refused(mariadb: Any, stores: Stores) -> None:
    """A server without TLS, a certificate of nobody's, and one that is trusted."""
    mariadb.sql(f"CREATE TABLE totals ({COLUMNS})")
    folder, plain = mariadb.folder, mariadb.dsn.partition("?")[0]
    assert "SSL is required but the server doesn't support it" in refusal(
        stores(Total, dsn=f"{plain}?ssl_mode=required")
    )
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", folder / "key", "-out", folder / "cert",
         "-days", "9", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"], capture_output=True,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    (folder / "key").chmod(0o644)
    mariadb.kill()
    mariadb.start(f"--ssl-cert={folder / 'cert'}", f"--ssl-key={folder / 'key'}")
    try:
        said = refusal(stores(Total, dsn=f"{plain}?ssl_mode=verify_identity"))
        assert re.search(
            r"The certificate of MySQL at .* is not trusted: .* Name its authority by ssl_ca in the dsn", said
        )
        for options in (f"ssl_ca={folder / 'cert'}", "ssl_mode=required", "ssl_mode=preferred", "ssl_mode=disabled"):
            stores(Total, dsn=f"{plain}?{options}").check()
    finally:
        mariadb.kill()
        mariadb.start()


@pytest.mark.parametrize(
    ("number", "kind", "said"),
    [
        (1040, StoreUnavailable, "has no connection left"),
        (1053, StoreUnavailable, "is shutting down"),
        (1180, StoreUnavailable, "cannot answer at present"),
        (1213, StoreUnavailable, "to break a deadlock, and rolled it back"),
        (3024, StoreUnavailable, "was told to end the statement"),
        (1130, StoreError, "Let the user connect from this host"),
        (1665, StoreError, "binlog_format ROW or MIXED"),
        (9999, StoreError, "Correct it, then run again; nothing is lost."),
    ],
)
def test_errors_of_a_server_that_cannot_be_provoked_here(number: int, kind: type[UserError], said: str) -> None:
    """By its number an error passes by itself or does not; an unknown one does not. No password stays in its words."""
    address = MySQLAddress.parse(f"mysql://shop:{SECRET}@db/shop")
    error = as_ours(pymysql.err.OperationalError(number, f"words {SECRET}"), address, 30.0)
    assert type(error) is kind
    assert said in str(error)
    assert f"words *** ({number})" in str(error)


class Moment(msgspec.Struct):
    id: int
    at: datetime


def test_what_is_created_takes_what_the_type_has(mariadb: Any, stores: Stores) -> None:
    """With create=True the table has a column for each field, and in no mode but append a primary key."""
    store = stores(Moment, create=True, mode="upsert", key=("id",))
    store.check()
    store.write(store.encoder().encode([Moment(1, datetime(2026, 1, 2, 3, 4, 5, 6))]))
    assert mariadb.sql("SELECT * FROM totals") == [(1, datetime(2026, 1, 2, 3, 4, 5, 6))]
    appending = stores(Moment, "log", create=True)
    appending.check()
    appending.fence("p", "log", 1, "topic-1")
    appending.write(appending.encoder().encode([Moment(1, datetime(2026, 1, 2))]) * 2)
    assert mariadb.sql("SELECT count(*) FROM log") == [(2,)]

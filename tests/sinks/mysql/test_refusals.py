"""Refusals: what is missing or wrong is named, with what to do and without a secret; what passes is unavailable."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import pymysql
import pytest
import refusing
from table_rows import ORIGIN, Total, entry, key_of

from exactlyonce.connectors.mysql.address import MySQLAddress
from exactlyonce.connectors.mysql.session import as_ours
from exactlyonce.pipeline.errors import StoreError, StoreUnavailable, UserError

Stores = Callable[..., Any]
SECRET = "hunter2"
refused = partial(refusing.refused, secrets=[SECRET])
COLUMNS = "customer VARCHAR(50) COLLATE utf8mb4_bin NOT NULL, cents BIGINT NOT NULL"
TABLE = f"CREATE TABLE totals ({COLUMNS})"
KEYED = f"CREATE TABLE totals ({COLUMNS}, PRIMARY KEY (customer))"


@pytest.fixture
def shop(mariadb: Any) -> Iterator[str]:
    """The dsn of a user with a password and no rights; each test grants what it is about."""
    mariadb.sql(f"CREATE OR REPLACE USER shop IDENTIFIED BY '{SECRET}'")
    yield mariadb.dsn.replace("root@", f"shop:{SECRET}@")
    mariadb.sql("DROP USER shop")


def run(mariadb: Any, statements: str) -> None:
    for statement in filter(None, statements.split("; ")):
        mariadb.sql(statement)


def as_root(dsn: str) -> str:
    return re.sub("shop:.*@", "root@", dsn)


DENIED_GRANTS = [
    ("append", "SELECT", "INSERT command denied", "GRANT INSERT ON `shop`.`totals` TO `shop`@'%'"),
    ("upsert", "INSERT", "UPDATE command denied", "GRANT SELECT, INSERT, UPDATE ON `shop`.`totals` TO `shop`@'%'"),
    ("delete", "SELECT", "DELETE command denied", "GRANT SELECT, DELETE ON `shop`.`totals` TO `shop`@'%'"),
    ("delete", "DELETE", "the user may not see it and its columns",
     "GRANT SELECT, DELETE ON `shop`.`totals` TO `shop`@'%'"),
]  # fmt: skip
LOGINS = [
    ("append", "ALTER USER shop IDENTIFIED BY 'another'", str, StoreError,
     ("Access denied for user 'shop'@'127.0.0.1' (using password: YES) (1045)",
      "User or password of the dsn are wrong")),
    ("append", "", lambda dsn: as_root(dsn).replace("/shop?", "/shopp?"), StoreError,
     ("Unknown database 'shopp' (1049)", "CREATE DATABASE shopp")),
    ("append", "", str, StoreError, ("Access denied for user 'shop'@'%' to database 'shop' (1044)",
                                     "GRANT SELECT, INSERT, UPDATE, DELETE, CREATE ON shop.* TO")),
    ("append", "", lambda _: f"mysql://shop:{SECRET}@nowhere.invalid/shop", StoreUnavailable,
     ("MySQL at nowhere.invalid:3306 cannot be reached: ", "Start it, or correct its address",)),
    ("append", "", lambda dsn: f"{as_root(dsn).partition('?')[0]}?ssl_mode=required", StoreError,
     ("SSL is required but the server doesn't support it",)),
    *((mode, f"{KEYED}; GRANT {granted} ON shop.totals TO shop", str, StoreError, texts)
      for mode, granted, *texts in DENIED_GRANTS),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "sql", "dsn", "kind", "texts"), LOGINS, ids=[texts[0][:40] for *_, texts in LOGINS])
def test_a_user(
    mariadb: Any, stores: Stores, shop: str, mode: str, sql: str, dsn: Any, kind: type[UserError], texts: Any
) -> None:
    run(mariadb, sql)
    refused(stores(Total, dsn=dsn(shop), mode=mode, key=key_of(mode)).check, kind, *texts)


@pytest.mark.parametrize("act", ["check", "encoder"])
def test_a_missing_table(stores: Stores, act: str) -> None:
    texts = ("no table totals at 127.0.0.1:", "Create it, or give the sink create=True; or GRANT INSERT")
    refused(getattr(stores(Total), act), StoreError, *texts)


def test_a_ledger_that_cannot_be_made(mariadb: Any, stores: Stores, shop: str) -> None:
    run(mariadb, f"{TABLE}; GRANT INSERT ON shop.totals TO shop")
    said = refused(stores(Total, dsn=shop).check, StoreError, "CREATE command denied")
    statement = said.split("let an administrator run, in the dsn's database: ")[1]
    assert statement.startswith("CREATE TABLE IF NOT EXISTS exactlyonce_ledger (")
    mariadb.sql(statement.rstrip(";"))
    mariadb.sql("GRANT SELECT, INSERT ON shop.exactlyonce_ledger TO shop")
    lacking = "GRANT SELECT, INSERT, UPDATE ON `shop`.`exactlyonce_ledger` TO `shop`@'%'"
    refused(stores(Total, dsn=shop).check, StoreError, lacking)
    mariadb.sql("GRANT UPDATE ON shop.exactlyonce_ledger TO shop")
    store = stores(Total, dsn=shop)
    store.check()
    store.fence("p", "s", 1, ORIGIN)
    assert store.apply(store.encoder().encode([Total("ann", 1)]), entry(1))


def test_a_weaker_delivery_needs_no_ledger(mariadb: Any, stores: Stores, shop: str) -> None:
    run(mariadb, f"{TABLE}; GRANT INSERT ON shop.totals TO shop")
    store = stores(Total, dsn=shop, delivery="at_least_once")
    store.check()
    store.write(store.encoder().encode([Total("ann", 1)]))
    assert mariadb.sql("SELECT * FROM totals") == [("ann", 1)]
    assert mariadb.sql("SHOW TABLES") == [("totals",)]


def test_a_table_that_cannot_be_made(mariadb: Any, stores: Stores, shop: str) -> None:
    mariadb.sql("GRANT INSERT, UPDATE ON shop.* TO shop")
    said = refused(stores(Total, dsn=shop, create=True, mode="upsert", key=("customer",)).check, StoreError)
    mariadb.sql(said.split("in the dsn's database: ")[1].rstrip(";"))
    stores(Total, mode="upsert", key=("customer",)).check()


LEDGER = (
    "exactlyonce_ledger (pipeline VARCHAR(9), sink VARCHAR(9), subtask INT, checkpoint BIGINT, incarnation BIGINT, "
    "origin VARCHAR(9), PRIMARY KEY (pipeline, sink, subtask)) ENGINE="
)
PROBLEMS = [
    ("append", "CREATE TABLE totals (customer TEXT)", "it has no column 'cents', but customer: add the column"),
    ("append", f"CREATE TABLE totals ({COLUMNS}, at DATE NOT NULL)",
     "'at' is NOT NULL without a default, and no field has that name"),
    ("append", f"CREATE TABLE totals ({COLUMNS[:-8]} AS (length(customer)))",
     "its column 'cents' is generated, and takes no value"),
    ("append", "CREATE TABLE totals (customer TEXT, cents DOUBLE)", "needs one of TINYINT, SMALLINT, MEDIUMINT, INT, "
     "BIGINT, DECIMAL: ALTER TABLE `totals` MODIFY `cents` BIGINT"),
    ("append", "CREATE TABLE totals (customer ENUM('ann'), cents INT)",
     "column 'customer' is enum('ann'), and a field of str needs one of"),
    ("append", "CREATE TABLE totals (customer TEXT CHARACTER SET sjis, cents INT)",
     "has the character set sjis: ALTER TABLE `totals` MODIFY `customer` text CHARACTER SET utf8mb4"),
    ("append", "CREATE TABLE totals (customer TEXT, cents INT) ENGINE=MyISAM", "its engine is MyISAM, which has no "
     "transactions that the ledger could be part of: ALTER TABLE `totals` ENGINE=InnoDB"),
    ("append", f"CREATE TABLE t ({COLUMNS}); CREATE VIEW totals AS SELECT * FROM t", "it is a view: name the table"),
    ("append", f"{TABLE}; CREATE TABLE exactlyonce_ledger (id INT)",
     "is not that of exactlyonce: its columns must be pipeline, sink"),
    ("append", f"{TABLE}; CREATE TABLE {LEDGER}MyISAM",
     "has the engine MyISAM, which has no transactions: ALTER TABLE exactlyonce_ledger"),
    ("upsert", TABLE, "needs a unique key on `customer`: ALTER TABLE `totals` ADD UNIQUE KEY (`customer`)"),
    ("upsert", f"CREATE TABLE totals ({COLUMNS}, UNIQUE KEY (customer, cents))", "needs a unique key on `customer`"),
    ("upsert", f"CREATE TABLE totals ({COLUMNS}, UNIQUE KEY (customer(5)))", "needs a unique key on `customer`"),
    ("upsert", f"CREATE TABLE totals ({COLUMNS}, PRIMARY KEY (customer), UNIQUE KEY other (cents))", "its unique index "
     "`other` is not on the key, and MySQL would change the row that it finds, of another key: ALTER TABLE "
     "`totals` DROP INDEX"),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "sql", "said"), PROBLEMS, ids=[said[:40] for _, _, said in PROBLEMS])
def test_a_table_that_does_not_match(mariadb: Any, stores: Stores, mode: str, sql: str, said: str) -> None:
    run(mariadb, sql)
    refused(stores(Total, mode=mode, key=key_of(mode)).check, StoreError, said)


@pytest.mark.parametrize(
    "columns",
    [
        f"id INT AUTO_INCREMENT PRIMARY KEY, {COLUMNS}, UNIQUE KEY (customer)",
        f"{COLUMNS}, UNIQUE KEY (customer), UNIQUE KEY (cents, customer)",
        f"{COLUMNS}, at TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP, PRIMARY KEY (customer), KEY (cents)",
    ],
)
def test_other_indexes_that_find_no_other_row(mariadb: Any, stores: Stores, columns: str) -> None:
    """A number that the server gives out, an index that holds the key, one that is not unique: none is in the way."""
    mariadb.sql(f"CREATE TABLE totals ({columns})")
    stores(Total, mode="upsert", key=("customer",)).check()


def test_names_are_quoted(mariadb: Any, stores: Stores) -> None:
    names = {"a": "x`; DROP TABLE t; --", "b": "50% `select`"}
    type_ = msgspec.defstruct("Row", [("a", int), ("b", int)], rename=names)
    store = stores(type_, "or`der %s", create=True, mode="upsert", key=("x`; DROP TABLE t; --",))
    store.check()
    store.fence("p", "s", 1, ORIGIN)
    assert store.apply(store.encoder().encode([type_(1, 2), type_(1, 3)]), entry(1))
    assert mariadb.sql("SELECT * FROM `or``der %s`") == [(1, 3)]


# --- while rows wait --------------------------------------------------------------------------------------------------

CONSTRAINTS = [
    ("MODIFY cents INT", ("Out of range value", "(1264). The table has changed since the rows")),
    ("DROP cents", ("Unknown column 'cents'", "(1054)")),
    ("ADD CHECK (cents < 9)", ("CONSTRAINT `CONSTRAINT_1` failed", "(4025)", "ALTER TABLE")),
    ("ADD UNIQUE KEY (customer)", ("Duplicate entry 'ann'", "(1062)", "mode='upsert'")),
]


@pytest.mark.parametrize(("change", "texts"), CONSTRAINTS, ids=[change for change, _ in CONSTRAINTS])
def test_rows_that_the_server_refuses(mariadb: Any, stores: Stores, change: str, texts: tuple[str, ...]) -> None:
    mariadb.sql(TABLE)
    store = stores(Total)
    encoded = store.encoder().encode([Total("ann", 1), Total("ann", 1 << 40)])
    mariadb.sql(f"ALTER TABLE totals {change}")
    refused(lambda: store.write(encoded), StoreError, *texts)
    assert mariadb.sql("SELECT count(*) FROM totals") == [(0,)]


@pytest.mark.parametrize("mode", ["append", "delete"])
def test_a_table_stays_as_it_is_while_rows_go_into_it(mariadb: Any, stores: Stores, mode: str) -> None:
    """No ALTER TABLE comes between the look at its columns and its rows."""
    mariadb.sql(TABLE)
    store = stores(Total, mode=mode, key=key_of(mode))
    encoded = store.encoder().encode([Total("ann", 1)])

    def chunks() -> Iterator[bytes]:
        with pytest.raises(pymysql.err.OperationalError, match="Lock wait timeout"):
            mariadb.sql("SET STATEMENT lock_wait_timeout = 0 FOR ALTER TABLE totals MODIFY cents DECIMAL(9,1)")
        yield from encoded

    store.write(chunks())
    assert mariadb.sql("SELECT count(*) FROM totals") == [(int(mode != "delete"),)]


# --- what passes by itself --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sql", "setting", "said"),
    [
        ("GRANT ALL ON shop.* TO shop", "read_only = 1", "is read-only: a failover is under way"),
        ("GRANT ALL ON shop.* TO shop; CREATE TRIGGER slow BEFORE INSERT ON totals FOR EACH ROW DO SLEEP(30)",
         "max_statement_time = 0.2", "was told to end the statement, by KILL or by its max_statement_time"),
    ],
)  # fmt: skip
def test_a_setting_of_the_server(mariadb: Any, stores: Stores, shop: str, sql: str, setting: str, said: str) -> None:
    run(mariadb, f"{TABLE}; {sql}")
    store = stores(Total, dsn=shop)
    encoded = store.encoder().encode([Total("ann", 1)])
    mariadb.sql(f"SET GLOBAL {setting}")
    try:
        refused(lambda: stores(Total, dsn=shop).write(encoded), StoreUnavailable, said)
    finally:
        mariadb.sql(f"SET GLOBAL {setting.partition('=')[0]} = 0")
    mariadb.sql("DROP TRIGGER IF EXISTS slow")
    stores(Total, dsn=shop).write(encoded)


def test_tls_that_is_asked_for_is_had_or_refused(mariadb: Any, stores: Stores) -> None:
    mariadb.sql(TABLE)
    folder, plain = mariadb.folder, mariadb.dsn.partition("?")[0]
    done = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", folder / "key", "-out", folder / "cert",
         "-days", "9", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"], capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (folder / "key").chmod(0o644)
    mariadb.kill()
    mariadb.start(f"--ssl-cert={folder / 'cert'}", f"--ssl-key={folder / 'key'}")
    try:
        texts = ("The certificate of MySQL at ", "is not trusted: ", "Name its authority by ssl_ca in the dsn")
        refused(stores(Total, dsn=f"{plain}?ssl_mode=verify_identity").check, StoreError, *texts)
        for options in (f"ssl_ca={folder / 'cert'}", "ssl_mode=required", "ssl_mode=preferred", "ssl_mode=disabled"):
            stores(Total, dsn=f"{plain}?{options}").check()
    finally:
        mariadb.kill()
        mariadb.start()


@pytest.mark.parametrize(
    ("number", "kind", "said"),
    [
        (1040, StoreUnavailable, "has no connection left"),
        (1226, StoreUnavailable, "has no connection left"),
        (1053, StoreUnavailable, "is shutting down"),
        (1114, StoreUnavailable, "has no room left: make some on its disk"),
        (1180, StoreUnavailable, "cannot answer at present"),
        (1213, StoreUnavailable, "to break a deadlock, and rolled it back"),
        (3024, StoreUnavailable, "was told to end the statement"),
        (1130, StoreError, "Let the user connect from this host"),
        (1665, StoreError, "binlog_format ROW or MIXED"),
        (9999, StoreError, "Correct it, then run again; nothing is lost."),
    ],
)
def test_errors_of_a_server_that_cannot_be_provoked_here(number: int, kind: type[UserError], said: str) -> None:
    address = MySQLAddress.parse(f"mysql://shop:{SECRET}@db/shop")
    error = as_ours(pymysql.err.OperationalError(number, f"words {SECRET}"), address, 30.0)
    assert type(error) is kind
    assert said in str(error)
    assert f"words *** ({number})" in str(error)

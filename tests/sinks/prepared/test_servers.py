"""Single servers: limits of PostgreSQL, and connections of MariaDB that hold what they have prepared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from preparing import Preparing, PreparingMariaDB, PreparingPostgres, on_mariadb
from table_rows import ORIGIN, Total

from exactlyonce.connectors.mysql.session import MySQLSession
from exactlyonce.pipeline.errors import StoreError, StoreUnavailable
from exactlyonce.sinks.mysql import prepared as mysql
from exactlyonce.sinks.postgres import prepared as postgres
from exactlyonce.sinks.prepared.store import TABLE, TransactionName, owner_of
from exactlyonce.sinks.writer import SinkFailed
from exactlyonce.testing.servers.mariadb import DATABASE
from exactlyonce.testing.servers.postgres import PostgresServer


@pytest.fixture
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[PreparingPostgres]:
    server = PostgresServer(request.param)
    server.start()
    try:
        preparing = PreparingPostgres(server, monkeypatch)
        yield preparing
        preparing.close()
    finally:
        server.remove()


@pytest.mark.parametrize("few", [0], indirect=True)
def test_a_server_that_prepares_nothing(few: PreparingPostgres) -> None:
    with pytest.raises(StoreError, match="ALTER SYSTEM SET max_prepared_transactions = 100 and restart the server"):
        few.store().check()


@pytest.mark.exhaustive(matrix=True)
@pytest.mark.parametrize("few", [1], indirect=True)
def test_a_server_that_prepares_too_few(few: PreparingPostgres) -> None:
    committer, writer = few.committer(1), few.writer(1)
    first = few.prepare(writer, 1, "ann")
    with pytest.raises(SinkFailed, match="maximum number of prepared transactions reached"):
        few.prepare(writer, 2, "bob")
    assert committer.commit([first], 1, ORIGIN)
    assert committer.commit([few.prepare(few.writer(1, attempt=1), 3, "bob", previous=1)], 1, ORIGIN)


@pytest.fixture
def mariadb(preparing: Preparing) -> PreparingMariaDB:
    assert isinstance(preparing, PreparingMariaDB)
    return preparing


def stays_connected(writer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the writer keep the connection by which it prepares, as one that is stopped there does."""
    session: MySQLSession = writer.store._session
    monkeypatch.setattr(session, "close", lambda: None)


@on_mariadb
def test_an_owner_that_stays_connected(mariadb: PreparingMariaDB, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its owner is connected the server says that it knows no such transaction: the owner is ended."""
    committer, writer = mariadb.committer(1), mariadb.writer(1)
    stays_connected(writer, monkeypatch)
    committable = mariadb.prepare(writer, 1, "ann")
    assert committer.commit([committable], 1, ORIGIN)
    assert mariadb.rows() == ["ann"]


@on_mariadb
def test_a_zombie_that_holds_what_it_has_prepared(mariadb: PreparingMariaDB, monkeypatch: pytest.MonkeyPatch) -> None:
    mariadb.committer(1)
    writer = mariadb.writer(1)
    stays_connected(writer, monkeypatch)
    mariadb.prepare(writer, 1, "ann")
    mariadb.committer(2)
    assert (mariadb.listed(), mariadb.rows()) == ([], [])


@on_mariadb
def test_an_owner_that_cannot_be_ended(mariadb: PreparingMariaDB, monkeypatch: pytest.MonkeyPatch) -> None:
    committer, writer = mariadb.committer(1), mariadb.writer(1)
    stays_connected(writer, monkeypatch)
    committable = mariadb.prepare(writer, 1, "ann")
    with monkeypatch.context() as patched:
        patched.setattr(mysql, "TRIES", mysql.TRIES_IN_PEACE)
        with pytest.raises(StoreUnavailable, match="cannot be ended: the connection that has prepared it"):
            committer.commit([committable], 1, ORIGIN)
    assert committer.commit([committable], 1, ORIGIN)


@on_mariadb
def test_an_older_server(mariadb: PreparingMariaDB, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that rolls back what is prepared when its connection ends is refused."""
    monkeypatch.setattr(mysql, "_VERSION_MIN", {True: (99, 0), False: (99, 0)})
    with pytest.raises(StoreError, match=r"needs MariaDB 10\.5 or MySQL 8\.0"):
        mariadb.store().check()


@on_mariadb
def test_rights(mariadb: PreparingMariaDB, monkeypatch: pytest.MonkeyPatch) -> None:
    mariadb.committer(1)
    user = "clerk@'%%'"
    mariadb.server.sql(f"CREATE OR REPLACE USER {user} IDENTIFIED BY %s", ("secret",))
    for rights, table in (
        ("INSERT", "totals"), ("SELECT, INSERT, UPDATE", "exactlyonce_ledger"), ("SELECT, INSERT", TABLE),
    ):  # fmt: skip
        mariadb.sql(f"GRANT {rights} ON {DATABASE}.{table} TO clerk@'%'")
    dsn = f"mysql://clerk:secret@127.0.0.1:{mariadb.port}/{DATABASE}?ssl_mode=disabled"
    monkeypatch.setenv("TOTALS_DSN", dsn)
    with pytest.raises(StoreError, match=f"GRANT SELECT, INSERT, DELETE ON `{DATABASE}`.`?{TABLE}") as refused:
        mariadb.committer(2)
    assert "secret" not in str(refused.value)
    mariadb.sql(f"GRANT DELETE ON {DATABASE}.{TABLE} TO clerk@'%'")
    committer = mariadb.committer(2)
    mariadb._encoder = mariadb.sink().preparing_store(Total).encoder()
    assert committer.commit([mariadb.prepare(mariadb.writer(2), 1, "ann")], 2, ORIGIN)
    mariadb.sql("DROP USER clerk@'%'")


LONG = "a-pipeline-with-quite-a-long-name" * 8
LARGEST = 2**63 - 1


def name(owner: str) -> TransactionName:
    return TransactionName(owner, 2**31 - 1, LARGEST, LARGEST, 2**31 - 1, "0123abcd")


def test_names_are_parsed_as_they_are_written() -> None:
    transaction = name(owner_of("totals", "out", "public", 100))
    assert TransactionName.parse(str(transaction)) == transaction
    assert transaction.written_in == (LARGEST, 2**31 - 1)


@pytest.mark.parametrize(
    "text",
    ["", "eo:totals:0:1:1.0:ab", "eo:totals.out~0011:0:1:1.0:ab", "eo:totals.out~00112233aabbccdd:0:1:1.0:ab\n",
     "xeo:totals.out~00112233aabbccdd:0:1:1.0:ab", "eo:totals.out~00112233aabbccdd:0:1:1:ab"],
)  # fmt: skip
def test_what_is_no_name_of_ours(text: str) -> None:
    assert TransactionName.parse(text) is None


def test_the_longest_names_fit() -> None:
    """PostgreSQL takes 199 bytes, XA 64 for each of two parts."""
    assert len(str(name(owner_of(LONG, LONG, "public", postgres.OWNER_LENGTH_MAX)))) < 200
    xa = name(owner_of(LONG, LONG, "shop", mysql.OWNER_LENGTH_MAX))
    assert (len(xa.transaction) <= 64, len(xa.branch) <= 64) == (True, True)


def test_owners_are_told_apart() -> None:
    of = [("p", "s", "x"), ("p", "s", "y"), ("p", "t", "x"), ("q", "s", "x"), ("p.s", "", "x"), (LONG, "s", "x"),
          (LONG + "2", "s", "x")]  # fmt: skip
    assert len({owner_of(*each, 40) for each in of}) == len(of)

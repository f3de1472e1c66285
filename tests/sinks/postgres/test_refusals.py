"""Each thing that is missing, or away, is an error of the right kind, which says what to do, and no secret."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
import refusing
from postgres_rows import Database, chunks
from table_rows import ORIGIN, Total, entry, key_of

from exactlyonce.connectors.postgres.connection import Limits, PostgresConnection, Refusals
from exactlyonce.pipeline.errors import ConfigError, ExactlyOnceError, StoreError, StoreUnavailable
from exactlyonce.testing.servers.postgres import OWNER, PASSWORD

ROLE_PASSWORD = "an0ther s3cret/ä"
refused = partial(refusing.refused, secrets=(PASSWORD, ROLE_PASSWORD, "wr0ng", "s3cret"))
TABLE = "CREATE TABLE totals (customer text, cents bigint)"
KEYED = "CREATE TABLE totals (customer text PRIMARY KEY, cents bigint)"
UPSERT: dict[str, Any] = {"mode": "upsert", "key": ("customer",)}
EXISTING: dict[str, Any] = {"create": False}


@pytest.fixture
def role(database: Database) -> str:
    """A role without rights, as which stores connect."""
    with suppress(psycopg.errors.UndefinedObject):
        database.execute("DROP OWNED BY clerk")
    database.execute("DROP ROLE IF EXISTS clerk")
    database.execute(f"CREATE ROLE clerk LOGIN PASSWORD '{ROLE_PASSWORD}'")
    database.use(database.server.dsn(database.name, "clerk", ROLE_PASSWORD))
    return "clerk"


# --- logins -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dsn", "kind", "texts"),
    [
        ({"password": "wr0ng-s3cret"}, StoreError, ("dsn=env:TOTALS_DSN", f'user "{OWNER}"', "Correct the password")),
        ({"user": "nobody"}, StoreError, ('user "nobody"', "Correct the password or the user")),
        ({"database": "nowhere"}, StoreError, ('database "nowhere" does not exist', "Create the database")),
        ({"port": 1}, StoreUnavailable, ("cannot be reached", "refused", "Start it")),
        *(
            (text, StoreError, ("cannot be read", "Write it as postgresql://"))
            for text in (
                f"postgres//{PASSWORD}@host", f"host=x password='{PASSWORD}", "postgresql://u:x?y@s3cret@host",
                "postgresql://u:12/s3cret@host/d",
            )
        ),
    ],
)  # fmt: skip
def test_a_login(database: Database, dsn: Any, kind: type[ExactlyOnceError], texts: tuple[str, ...]) -> None:
    database.use(dsn if isinstance(dsn, str) else database.server.dsn(**{"database": database.name, **dsn}))
    refused(database.store().check, kind, *texts)


@pytest.mark.parametrize(
    ("forbid", "kind", "text"),
    [
        ("REVOKE CONNECT ON DATABASE shared FROM PUBLIC", StoreError, "GRANT CONNECT"),
        ("ALTER ROLE clerk CONNECTION LIMIT 0", StoreUnavailable, "too many connections"),
    ],
)
def test_a_login_of_a_role(database: Database, role: str, forbid: str, kind: Any, text: str) -> None:
    database.execute(forbid)
    try:
        refused(database.store().check, kind, text)
    finally:
        database.execute("GRANT CONNECT ON DATABASE shared TO PUBLIC")


def test_the_dsn_is_looked_up_late(database: Database, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, right = tmp_path / "dsn", os.environ["TOTALS_DSN"]
    monkeypatch.delenv("TOTALS_DSN")
    refused(database.store().check, ConfigError, "no variable TOTALS_DSN. Export it.")
    store = database.store(dsn=f"file:{file}")
    refused(store.check, ConfigError, "cannot be read: No such file")
    file.write_text(database.server.dsn("nowhere"))
    refused(store.check, StoreError, f"dsn=file:{file}")
    file.write_text(right + "\n")
    store.check()


def test_a_secret_in_other_forms() -> None:
    refusals = Refusals("env:X")
    dsn = "postgresql://u:s3cret%3Ap%40ss%2Fword@h/d"
    refusals.learn(dsn, psycopg.conninfo.conninfo_to_dict(dsn))
    assert refusals.redact(f"a {PASSWORD} b {dsn} c s3cret%3Ap%40ss%2Fword") == "a *** b *** c ***"


def refuse_logins(listener: socket.socket, code: str, said: str) -> None:
    """A server that answers every login so, in PostgreSQL's protocol, until *listener* is closed."""
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rwb", buffering=0) as stream:
                while True:
                    request = stream.read(int.from_bytes(stream.read(4), "big") - 4)
                    if request.startswith(b"\0\3"):
                        break
                    stream.write(b"N")  # neither TLS nor GSSAPI
                fields = (("S", "FATAL"), ("V", "FATAL"), ("C", code), ("M", said))
                answer = "".join(f"{kind}{value}\0" for kind, value in fields).encode() + b"\0"
                stream.write(b"E" + (len(answer) + 4).to_bytes(4, "big") + answer)


@pytest.mark.parametrize(
    ("code", "said", "kind", "text"),
    [
        ("28P01", "Passwort-Authentifizierung für Benutzer »ann« fehlgeschlagen", StoreError, "Correct the login"),
        ("28000", "aucune entrée dans pg_hba.conf", StoreError, "or pg_hba.conf"),
        ("57P03", "das Datenbanksystem startet", StoreUnavailable, "cannot be reached"),
    ],
)
def test_a_server_that_does_not_speak_english(
    monkeypatch: pytest.MonkeyPatch, code: str, said: str, kind: type[ExactlyOnceError], text: str
) -> None:
    """The code alone tells passing errors from lasting ones."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=refuse_logins, args=(listener, code, said), daemon=True).start()
        port = listener.getsockname()[1]
        monkeypatch.setenv("TOTALS_DSN", f"postgresql://ann:s3cret@127.0.0.1:{port}/shop")
        refused(lambda: PostgresConnection("env:TOTALS_DSN", Limits()).rows("SELECT 1"), kind, said, text)


# --- at the start -----------------------------------------------------------------------------------------------------


CHECKED = [
    ("", EXISTING, ("no table 'totals' in any schema", "create=True")),
    ("", {"create": False, "table": "shop.totals"}, ("'totals' in schema 'shop'",)),
    ("", {"table": "shop.totals"}, ('schema "shop" does not exist',)),
    ("CREATE TABLE totals (customer uuid, total int NOT NULL, n int GENERATED ALWAYS AS IDENTITY)", {},
     ('Rows cannot be written to table "public"."totals": ', "no column 'cents'",
      "'total' is NOT NULL without a default", "'customer' is uuid")),
    ("CREATE TABLE totals (customer text, cents bigint GENERATED ALWAYS AS (1) STORED)", {},
     ("column 'cents' is generated",)),
    ("CREATE UNLOGGED TABLE totals (customer text, cents bigint)", {}, ('ALTER TABLE "public"."totals" SET LOGGED',)),
    ("CREATE VIEW totals AS SELECT 'a'::text AS customer, 1::bigint AS cents", {}, ("a view",)),
    (f"{TABLE} PARTITION BY LIST (cents); CREATE UNLOGGED TABLE one PARTITION OF totals FOR VALUES IN (1)", {},
     ("SET LOGGED",)),
    ("CREATE TABLE exactlyonce_ledger (a int)", {}, ("is not that of exactlyonce", "Rename it")),
]  # fmt: skip


@pytest.mark.parametrize(("sql", "options", "texts"), CHECKED, ids=[texts[0] for _, _, texts in CHECKED])
def test_a_table_that_differs(database: Database, sql: str, options: dict[str, Any], texts: tuple[str, ...]) -> None:
    database.execute(sql or "SELECT 1")
    refused(database.store(**options).check, StoreError, *texts)
    if not sql:
        refused(database.store(**{**options, "create": False}).encoder, StoreError, "no table 'totals'")


@pytest.mark.parametrize(
    "index",
    [
        "CREATE UNIQUE INDEX ON totals (customer, cents)", "CREATE INDEX ON totals (customer)",
        "CREATE UNIQUE INDEX ON totals (customer) WHERE cents > 0", "CREATE UNIQUE INDEX ON totals (lower(customer))",
        "ALTER TABLE totals ADD UNIQUE (customer) DEFERRABLE",
    ],
)  # fmt: skip
def test_no_unique_index(database: Database, index: str) -> None:
    database.execute(f"{TABLE}; {index}")
    store = database.store(**UPSERT)
    said = refused(store.check, StoreError, "no unique index on exactly (customer)")
    create = re.search("CREATE UNIQUE INDEX .*(?=[.]$)", said)
    assert create is not None
    database.execute(create[0])
    store.check()


@pytest.mark.parametrize(("mode", "event"), [("append", "INSERT"), ("upsert", "UPDATE"), ("delete", "DELETE")])
def test_a_rule(database: Database, mode: str, event: str) -> None:
    """A rule on what the mode does is passed by, changes it, or is refused by the server only when rows come."""
    database.execute(f"{KEYED}; CREATE TABLE log (n int)")
    database.execute(f"CREATE RULE noted AS ON {event} TO totals DO ALSO INSERT INTO log VALUES (1)")
    store = database.store(mode=mode, key=key_of(mode))
    refused(store.check, StoreError, f"it has the rule noted on {event}", 'use a trigger: DROP RULE "noted" ON')
    database.execute("ALTER TABLE totals DISABLE RULE noted")
    if event == "UPDATE":  # PostgreSQL itself refuses ON CONFLICT all the same
        refused(store.check, StoreError, "it has the rule noted on UPDATE")
        database.execute("DROP RULE noted ON totals")
    store.check()


@pytest.mark.parametrize(("column", "index"), [('"und-ci"', '"C"'), ('"C"', '"und-ci"')])
def test_a_unique_index_of_another_collation(database: Database, column: str, index: str) -> None:
    """An index that takes other texts for one key than its column does is refused, also beside a right one."""
    database.execute("CREATE COLLATION \"und-ci\" (provider=icu, locale='und-u-ks-level2', deterministic=false)")
    database.execute(f"CREATE TABLE totals (customer text COLLATE {column}, cents bigint)")
    database.execute(f"CREATE UNIQUE INDEX odd ON totals (customer COLLATE {index})")
    store = database.store(**UPSERT)
    said = refused(store.check, StoreError, "unique index odd has another collation than its column")
    database.execute(said.partition("deferrable: ")[2].partition(";")[0])
    said = refused(store.check, StoreError, "unique index odd has another collation than its column")
    assert "no unique index" not in said
    database.execute(said[said.index("DROP INDEX") :].rstrip("."))
    store.check()


def test_a_database_in_another_encoding(database: Database) -> None:
    if not database.execute("SELECT 1 FROM pg_database WHERE datname = 'latin'"):
        database.execute("CREATE DATABASE latin TEMPLATE template0 ENCODING LATIN1")
    database.use(database.server.dsn("latin"))
    refused(database.store().check, StoreError, "encoded in LATIN1", "WITH ENCODING 'UTF8'")


def test_a_ledger_that_a_crash_would_empty(database: Database) -> None:
    database.store().check()
    database.execute("ALTER TABLE exactlyonce_ledger SET UNLOGGED")
    refused(database.store().check, StoreError, "UNLOGGED", "SET LOGGED")


# --- rights -----------------------------------------------------------------------------------------------------------


def test_one_right_after_the_other(database: Database, role: str) -> None:
    database.execute(KEYED)
    database.execute("REVOKE TEMPORARY ON DATABASE shared FROM PUBLIC")
    store = database.store(create=False, **UPSERT)
    steps: list[str] = []
    try:
        refused(database.store(table="public.totals").check, StoreError, "permission denied for schema", "GRANT it")
        database.execute("GRANT USAGE ON SCHEMA public TO clerk")
        for _ in range(9):
            try:
                store.check()
                break
            except StoreError as error:
                said = str(error).replace("; GRANT", ";\nGRANT")
                steps += re.findall(r"((?:GRANT|CREATE TABLE) .*?)(?=;|\.$|$)", said, re.M)
                for step in steps:
                    database.execute(step)
    finally:
        database.execute("GRANT TEMPORARY ON DATABASE shared TO PUBLIC")
    assert steps[0] == 'GRANT SELECT, INSERT, UPDATE ON "public"."totals" TO "clerk"'
    assert store.fence("p", "s", 1, ORIGIN) == {}
    assert store.apply(chunks(store, [Total("ann", 1)]), entry(1))


def test_a_weaker_delivery_needs_no_ledger(database: Database, role: str) -> None:
    database.execute(f"{TABLE}; GRANT USAGE ON SCHEMA public TO clerk; GRANT INSERT ON totals TO clerk")
    store = database.store(create=False, delivery="at_least_once")
    store.check()
    store.write(chunks(store, [Total("ann", 1)]))
    assert database.totals() == [("ann", 1)]
    assert database.execute("SELECT to_regclass('exactlyonce_ledger')") == [(None,)]


# --- while rows wait --------------------------------------------------------------------------------------------------

AS_CLERK = f"GRANT ALL ON SCHEMA public TO clerk; {KEYED}; GRANT ALL ON totals TO clerk"
HIDDEN = "ALTER TABLE totals ENABLE ROW LEVEL SECURITY; CREATE POLICY own ON totals USING (customer = current_user)"
BYPASS = ("ALTER ROLE clerk BYPASSRLS", ("Row-level security would hide rows", "BYPASSRLS"))
UNIDENTIFIED = (
    "CREATE TABLE totals (customer text NOT NULL, cents bigint); CREATE UNIQUE INDEX by_customer ON totals (customer)"
)
IDENTIFIED = "ALTER TABLE totals REPLICA IDENTITY USING INDEX by_customer"
CHANGES = [
    ("append", "", "ALTER TABLE totals ALTER cents TYPE smallint", "ALTER TABLE totals ALTER cents TYPE bigint",
     ("out of range", "22003", "line 2, column cents")),
    ("append", "", "ALTER TABLE totals DROP COLUMN cents", "ALTER TABLE totals ADD cents bigint NOT NULL",
     ("no column 'cents'", "add the column")),
    ("append", "", "DROP TABLE totals", TABLE, ('"public.totals" does not exist', "42P01", "create it")),
    ("append", "", "ALTER TABLE totals ADD CHECK (cents < 99)", "ALTER TABLE totals DROP CONSTRAINT totals_cents_check",
     ("violates check constraint", "breaks a constraint")),
    ("append", "", "ALTER TABLE totals ADD CONSTRAINT one UNIQUE (customer) DEFERRABLE INITIALLY DEFERRED",
     "ALTER TABLE totals DROP CONSTRAINT one", ("duplicate key value",)),
    ("upsert", "", "ALTER TABLE totals DROP CONSTRAINT totals_pkey", "ALTER TABLE totals ADD PRIMARY KEY (customer)",
     ("42P10", "no unique index on the key any more")),
    ("append", f"GRANT ALL ON SCHEMA public TO clerk; {TABLE}; GRANT INSERT ON totals TO clerk",
     "REVOKE INSERT ON totals FROM clerk", "GRANT INSERT ON totals TO clerk",
     ("permission denied for table totals", "GRANT it")),
    ("append", AS_CLERK.replace(" PRIMARY KEY", ""), HIDDEN, *BYPASS),
    ("delete", AS_CLERK, HIDDEN, *BYPASS),
    ("delete", UNIDENTIFIED, "CREATE PUBLICATION totals_published FOR TABLE totals", IDENTIFIED,
     ("[55000]", "REPLICA IDENTITY USING INDEX")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "before", "change", "remedy", "texts"), CHANGES, ids=[f"{mode}-{c[:40]}" for mode, _, c, _, _ in CHANGES]
)
def test_a_change_while_rows_wait(
    database: Database, request: Any, mode: str, before: str, change: str, remedy: str, texts: tuple[str, ...]
) -> None:
    if "clerk" in before:
        request.getfixturevalue("role")
    database.execute(before or "SELECT 1")
    store = database.ready(mode=mode, key=key_of(mode), create=not before)
    there = [("ann", 1)] if mode == "delete" else []
    for row in there:
        database.execute("INSERT INTO totals VALUES (%s, %s)", *row)
    waiting = chunks(store, [Total("ann", 1), Total("ann", 99999)])
    database.execute(change)
    refused(lambda: store.apply(waiting, entry(1)), StoreError, *texts)
    assert database.ledger() == {-1: (0, 1)}
    database.execute(remedy)
    assert database.totals() == there
    assert store.apply(waiting, entry(1))
    assert database.totals() == {"append": [("ann", 1), ("ann", 99999)], "upsert": [("ann", 99999)], "delete": []}[mode]


def test_row_level_security_at_the_start(database: Database, role: str) -> None:
    """It is named where it hides rows from the role: the owner of a table passes its policies, unless forced."""
    database.execute(f"{TABLE}; ALTER TABLE totals ENABLE ROW LEVEL SECURITY; GRANT ALL ON totals TO clerk")
    database.execute("GRANT ALL ON SCHEMA public TO clerk")
    refused(database.store(create=False).check, StoreError, "row-level security")
    database.execute("ALTER TABLE totals OWNER TO clerk; INSERT INTO totals VALUES ('ann', 1)")
    deletes: dict[str, Any] = {"mode": "delete", "key": ("customer",)}
    store = database.ready(**deletes)
    assert store.apply(chunks(store, [Total("ann", 0)]), entry(1))
    assert database.totals() == []
    database.execute("ALTER TABLE totals FORCE ROW LEVEL SECURITY")
    refused(database.store(**deletes).check, StoreError, "row-level security")


def test_a_lock_that_somebody_holds(database: Database) -> None:
    store = database.ready(limits=Limits(lock=0.2, grace=0.2))
    waiting = chunks(store, [Total("ann", 1)])
    with psycopg.connect(database.server.dsn(database.name)) as other:
        other.execute("LOCK TABLE totals")
        refused(lambda: store.apply(waiting, entry(1)), StoreUnavailable, "another session holds a lock")
        other.rollback()
        other.execute("LOCK TABLE exactlyonce_ledger IN EXCLUSIVE MODE")
        refused(lambda: store.fence("p", "s", 2, ORIGIN), StoreUnavailable, "pg_terminate_backend(pid)", "none")
    assert database.ready().apply(waiting, entry(1))


def test_a_statement_that_takes_long(database: Database) -> None:
    """It is cut, and would be each time: the message names the setting, with which it comes to its end."""
    slow = "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(1); RETURN NEW; END'"
    database.execute(f"{TABLE}; {slow}")
    database.execute("CREATE TRIGGER slow BEFORE INSERT ON totals FOR EACH ROW EXECUTE FUNCTION slow()")
    waiting = chunks(database.ready(), [Total("ann", 1)])
    store = database.store(answer_timeout="500ms")
    refused(lambda: store.apply(waiting, entry(1)), StoreUnavailable, "set answer_timeout= of the sink")
    assert database.ready(answer_timeout="20m").apply(waiting, entry(1))


class Odd(msgspec.Struct):
    spans: list[timedelta]
    span: timedelta
    names: list[str | None]


def test_settings_of_the_role_change_nothing(database: Database, role: str) -> None:
    database.execute("GRANT ALL ON SCHEMA public TO clerk")
    store = database.ready(Odd)
    for setting in (
        *("synchronous_commit = off", "default_transaction_isolation = serializable", "statement_timeout = 200"),
        *("default_transaction_read_only = on", "DateStyle = 'German, DMY'", "client_encoding = LATIN1"),
        *("intervalstyle = sql_standard", "array_nulls = off"),
    ):
        database.execute(f"ALTER ROLE clerk SET {setting}")
    spans = [timedelta(seconds=-1), timedelta(hours=-30), timedelta(days=-3, microseconds=7)]
    waiting = chunks(store, [Odd(spans, span, ["ä", None, "NULL"]) for span in spans], rows=1)
    store.close()

    def slowly() -> Iterator[bytes]:
        yield waiting[0]
        threading.Event().wait(0.4)  # longer than the role's statement_timeout
        yield from waiting[1:]

    assert store.apply(slowly(), entry(1))
    assert database.execute("SELECT * FROM totals") == [(spans, span, ["ä", None, "NULL"]) for span in spans]
    with store._session.transaction("any"):
        assert store._session.rows("SHOW synchronous_commit") == [("on",)]
        assert store._session.rows("SHOW transaction_isolation") == [("read committed",)]


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (psycopg.errors.DiskFull, StoreUnavailable, "the server's disk is full: make room"),
        (psycopg.errors.DeadlockDetected, StoreUnavailable, "another transaction was in the way"),
        (psycopg.errors.SerializationFailure, StoreUnavailable, "asked again"),
        (psycopg.errors.CannotConnectNow, StoreUnavailable, "starting up or shutting down"),
        (psycopg.errors.CrashShutdown, StoreUnavailable, "ended the request"),
        (psycopg.errors.TooManyConnections, StoreUnavailable, "max_connections"),
        (psycopg.errors.OutOfMemory, StoreUnavailable, "short of something"),
        (psycopg.errors.ReadOnlySqlTransaction, StoreUnavailable, "target_session_attrs=read-write"),
        (psycopg.errors.IdleInTransactionSessionTimeout, StoreUnavailable, "too long"),
        (psycopg.errors.InternalError_, StoreUnavailable, "see its log"),
        (psycopg.errors.DatabaseDropped, StoreError, "The database was dropped"),
        (psycopg.errors.DataCorrupted, StoreError, "restore it"),
        (psycopg.errors.IndexCorrupted, StoreError, "REINDEX"),
        (psycopg.errors.ProgramLimitExceeded, StoreError, "2,700 bytes"),
        (psycopg.errors.UndefinedFunction, StoreError, "refuses"),
    ],
)
def test_the_errors_that_are_hard_to_provoke(error: type[psycopg.Error], kind: type[Any], text: str) -> None:
    found = Refusals("env:X").of(error("it happened"))
    assert isinstance(found, kind)
    assert text in str(found)

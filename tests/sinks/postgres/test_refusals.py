"""Each thing that is missing, or away, is an error of the right kind, which says what to do, and no secret."""

from __future__ import annotations

import os
import re
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
from postgres_rows import ORIGIN, Database, Total, chunks, entry
from postgres_server import OWNER, PASSWORD
from table_keys import key_of

from exactlyonce.pipeline.errors import ConfigError, ExactlyOnceError, StoreError, StoreUnavailable
from exactlyonce.sinks.postgres.connection import Limits
from exactlyonce.sinks.postgres.refusals import Refusals

ROLE_PASSWORD = "an0ther s3cret/ä"


def refused(call: Callable[[], object], kind: type[ExactlyOnceError], *texts: str) -> str:
    """What *call* says when it raises an error of the kind that has all the texts, and no secret, also in its repr."""
    with pytest.raises(kind) as raised:
        call()
    said = str(raised.value)
    for text in texts:
        assert text in said, said
    whole = said + repr(raised.value) + "".join(traceback.format_exception(raised.value))
    for secret in (PASSWORD, ROLE_PASSWORD, "wr0ng", "s3cret"):
        assert secret not in whole
    return said


@pytest.fixture
def role(database: Database) -> str:
    """A role without rights, as which stores connect."""
    database.execute(
        "DROP OWNED BY clerk" if database.execute("SELECT 1 FROM pg_roles WHERE rolname = 'clerk'") else "SELECT 1"
    )
    database.execute("DROP ROLE IF EXISTS clerk")
    database.execute(f"CREATE ROLE clerk LOGIN PASSWORD '{ROLE_PASSWORD}'")
    database.use(database.server.dsn(database.name, "clerk", ROLE_PASSWORD))
    return "clerk"


class TestLogin:
    """Errors before there is a connection."""

    def test_a_wrong_password(self, database: Database) -> None:
        """It names the user, and where the password is to be corrected."""
        database.use(database.server.dsn(database.name, password="wr0ng-s3cret"))
        refused(database.store().check, StoreError, "dsn=env:TOTALS_DSN", f'user "{OWNER}"', "Correct the password")

    def test_no_such_user(self, database: Database) -> None:
        """A role that is missing cannot be told from a wrong password."""
        database.use(database.server.dsn(database.name, user="nobody"))
        refused(database.store().check, StoreError, 'user "nobody"', "Correct the password or the user")

    def test_no_such_database(self, database: Database) -> None:
        """It names the database."""
        database.use(database.server.dsn("nowhere"))
        refused(database.store().check, StoreError, 'database "nowhere" does not exist', "Create the database")

    def test_no_right_to_connect(self, database: Database, role: str) -> None:
        """It says which right is missing."""
        database.execute("REVOKE CONNECT ON DATABASE shared FROM PUBLIC")
        try:
            refused(database.store().check, StoreError, "GRANT CONNECT")
        finally:
            database.execute("GRANT CONNECT ON DATABASE shared TO PUBLIC")

    @pytest.mark.parametrize("dsn", [
        f"postgres//{PASSWORD}@host", f"host=x password='{PASSWORD}", "passwort=s3cret x",
        "postgresql://u:x@s3cret@host/d", "postgresql://u:x?y@s3cret@host", "postgresql://u:s3cret/x@host/d",
        "postgresql://u:12/s3cret@host/d",
    ])  # fmt: skip
    def test_an_unreadable_connection_string(self, database: Database, dsn: str) -> None:
        """It says how to write one, and shows nothing of it."""
        database.use(dsn)
        refused(database.store().check, StoreError, "cannot be read", "Write it as postgresql://")

    def test_nobody_there(self, database: Database) -> None:
        """A server that is away is asked again."""
        database.use(database.server.dsn(database.name, port=1))
        refused(database.store().check, StoreUnavailable, "cannot be reached", "refused", "Start it")

    def test_too_many_connections(self, database: Database) -> None:
        """A role or a server that has no connection left is asked again."""
        database.execute("DROP ROLE IF EXISTS few")
        database.execute(f"CREATE ROLE few LOGIN PASSWORD '{ROLE_PASSWORD}' CONNECTION LIMIT 0")
        database.use(database.server.dsn(database.name, "few", ROLE_PASSWORD))
        refused(database.store().check, StoreUnavailable, "too many connections")

    def test_no_variable_and_no_file(self, database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
        """A reference that leads nowhere is named."""
        monkeypatch.delenv("TOTALS_DSN")
        refused(database.store().check, ConfigError, "no variable TOTALS_DSN. Export it.")
        refused(database.store(dsn="file:/nowhere/dsn").check, ConfigError, "cannot be read: No such file")

    def test_a_file(self, database: Database, tmp_path: Path) -> None:
        """A connection string in a file is read when it is needed, and again after a change."""
        file = tmp_path / "dsn"
        file.write_text(database.server.dsn("nowhere"))
        store = database.store(dsn=f"file:{file}")
        refused(store.check, StoreError, f"dsn=file:{file}")
        file.write_text(os.environ["TOTALS_DSN"] + "\n")
        store.check()

    def test_a_secret_in_other_forms(self) -> None:
        """A password is taken out of a text as it is, and as it stands in an address."""
        refusals = Refusals("env:X")
        dsn = "postgresql://u:s3cret%3Ap%40ss%2Fword@h/d"
        refusals.learn(dsn, psycopg.conninfo.conninfo_to_dict(dsn))
        assert refusals.redact(f"a {PASSWORD} b {dsn} c s3cret%3Ap%40ss%2Fword") == "a *** b *** c ***"


class Row(msgspec.Struct):
    """A row with an obligatory key."""

    customer: str
    cents: int


class TestTable:
    """Errors of the check."""

    def test_no_table(self, database: Database) -> None:
        """It says that it may be created."""
        refused(database.store(create=False).check, StoreError, "no table 'totals' in any schema", "create=True")
        refused(database.store(create=False, table="shop.totals").check, StoreError, "'totals' in schema 'shop'")
        refused(database.store(create=False).encoder, StoreError, "no table 'totals'")
        refused(database.store(table="shop.totals").check, StoreError, 'schema "shop" does not exist')

    def test_columns_that_differ(self, database: Database) -> None:
        """All that differs is said at once."""
        database.execute("CREATE TABLE totals (customer uuid, total int NOT NULL, n int GENERATED ALWAYS AS IDENTITY)")
        said = refused(database.store().check, StoreError, "no column 'cents'", "'total' is NOT NULL without a default")
        assert said.startswith('Rows cannot be written to table "public"."totals": ')
        assert "'customer' is uuid" in said

    def test_a_generated_column(self, database: Database) -> None:
        """A column that takes no value is named."""
        database.execute("CREATE TABLE totals (customer text, cents bigint GENERATED ALWAYS AS (1) STORED)")
        refused(database.store().check, StoreError, "column 'cents' is generated")

    @pytest.mark.parametrize(
        "index",
        [
            "", "CREATE UNIQUE INDEX ON totals (customer, cents)",
            "CREATE UNIQUE INDEX ON totals (customer) WHERE cents > 0",
            "CREATE UNIQUE INDEX ON totals (lower(customer))", "CREATE INDEX ON totals (customer)",
            "ALTER TABLE totals ADD UNIQUE (customer) DEFERRABLE",
        ],
    )  # fmt: skip
    def test_no_unique_index(self, database: Database, index: str) -> None:
        """Upserts need a unique index on exactly the key, of all rows; its SQL is given, and works."""
        database.execute("CREATE TABLE totals (customer text NOT NULL, cents bigint)")
        database.execute(index or "SELECT 1")
        store = database.store(mode="upsert", key=("customer",))
        said = refused(store.check, StoreError, "no unique index on exactly (customer)")
        create = re.search("CREATE UNIQUE INDEX .*(?=[.]$)", said)
        assert create is not None
        database.execute(create[0])
        store.check()

    @pytest.mark.parametrize(
        ("table", "text"),
        [
            ("CREATE UNLOGGED TABLE totals (customer text, cents bigint)", 'ALTER TABLE "public"."totals" SET LOGGED'),
            ("CREATE VIEW totals AS SELECT 'a'::text AS customer, 1::bigint AS cents", "a view"),
            ("CREATE TABLE totals (customer text, cents bigint) PARTITION BY LIST (cents);"
             "CREATE UNLOGGED TABLE one PARTITION OF totals FOR VALUES IN (1)", "SET LOGGED"),
        ],
    )  # fmt: skip
    def test_a_table_that_is_not_kept_as_the_ledger_is(self, database: Database, table: str, text: str) -> None:
        """What a crash would empty, or what is elsewhere, cannot be exactly once."""
        for statement in table.split(";"):
            database.execute(statement)
        refused(database.store().check, StoreError, text)

    @pytest.mark.parametrize(
        ("mode", "event"), [("append", "INSERT"), ("upsert", "INSERT"), ("upsert", "UPDATE"), ("delete", "DELETE")]
    )
    def test_a_rule(self, database: Database, mode: str, event: str) -> None:
        """A rule on what the mode does is passed by, changes it, or is refused by the server only when rows come."""
        database.execute("CREATE TABLE totals (customer text UNIQUE NOT NULL, cents bigint)")
        database.execute("CREATE TABLE log (n int)")
        database.execute(f"CREATE RULE noted AS ON {event} TO totals DO ALSO INSERT INTO log VALUES (1)")
        store = database.store(mode=mode, key=key_of(mode))
        refused(store.check, StoreError, f"it has the rule noted on {event}", 'use a trigger: DROP RULE "noted" ON')
        database.execute("ALTER TABLE totals DISABLE RULE noted")
        if event == "UPDATE":  # PostgreSQL itself refuses ON CONFLICT all the same
            refused(store.check, StoreError, "it has the rule noted on UPDATE")
        else:
            store.check()
        database.execute("DROP RULE noted ON totals")
        store.check()

    def test_row_level_security(self, database: Database, role: str) -> None:
        """Where it hides rows from the role, it is named."""
        database.execute("CREATE TABLE totals (customer text, cents bigint)")
        database.execute("ALTER TABLE totals ENABLE ROW LEVEL SECURITY")
        database.execute("GRANT ALL ON totals TO clerk")
        database.execute("GRANT USAGE ON SCHEMA public TO clerk")
        refused(database.store(create=False).check, StoreError, "row-level security")

    @pytest.mark.parametrize(("column", "index"), [('"und-ci"', '"C"'), ('"C"', '"und-ci"')])
    def test_a_unique_index_of_another_collation(self, database: Database, column: str, index: str) -> None:
        """An index that takes other texts for one key than its column does is refused, also beside a right one."""
        database.execute("CREATE COLLATION \"und-ci\" (provider=icu, locale='und-u-ks-level2', deterministic=false)")
        database.execute(f"CREATE TABLE totals (customer text COLLATE {column}, cents bigint)")
        database.execute(f"CREATE UNIQUE INDEX odd ON totals (customer COLLATE {index})")
        store = database.store(mode="upsert", key=("customer",))
        said = refused(store.check, StoreError, "unique index odd has another collation than its column")
        database.execute(said.partition("deferrable: ")[2].partition(";")[0])
        said = refused(store.check, StoreError, "unique index odd has another collation than its column")
        assert "no unique index" not in said
        database.execute(said[said.index("DROP INDEX") :].rstrip("."))
        store.check()

    def test_a_unique_index_of_another_order(self, database: Database) -> None:
        """A collation that takes the same texts for equal is right, whatever order it has."""
        database.execute("CREATE TABLE totals (customer text, cents bigint)")
        database.execute('CREATE UNIQUE INDEX ON totals (customer COLLATE "C")')
        store = database.ready(mode="upsert", key=("customer",))
        assert store.apply(chunks(store, [Total("ann", 1), Total("Ann", 2), Total("ann", 3)]), entry(1))
        assert database.totals() == [("Ann", 2), ("ann", 3)]

    def test_a_database_in_another_encoding(self, database: Database) -> None:
        """Text is checked as UTF-8, so the database has to be."""
        if not database.execute("SELECT 1 FROM pg_database WHERE datname = 'latin'"):
            database.execute("CREATE DATABASE latin TEMPLATE template0 ENCODING LATIN1")
        database.use(database.server.dsn("latin"))
        refused(database.store().check, StoreError, "encoded in LATIN1", "WITH ENCODING 'UTF8'")

    def test_another_table_of_the_ledgers_name(self, database: Database) -> None:
        """A table of somebody else's, or one that a crash would empty, is no ledger."""
        database.execute("CREATE TABLE exactlyonce_ledger (a int)")
        refused(database.store().check, StoreError, "no ledger of exactlyonce", "Rename it")
        database.execute("DROP TABLE exactlyonce_ledger")
        database.store().check()
        database.execute("ALTER TABLE exactlyonce_ledger SET UNLOGGED")
        refused(database.store().check, StoreError, "UNLOGGED", "SET LOGGED")


class TestRights:
    """A role without rights is told which."""

    def test_one_right_after_the_other(self, database: Database, role: str) -> None:
        """The SQL of each error, run by an administrator, leads to the next, and at last to success."""
        database.execute("CREATE TABLE totals (customer text PRIMARY KEY, cents bigint NOT NULL)")
        database.execute("REVOKE TEMPORARY ON DATABASE shared FROM PUBLIC")
        store = database.store(create=False, mode="upsert", key=("customer",))
        try:
            refused(database.store(table="public.totals").check, StoreError, "permission denied for schema", "GRANT it")
            database.execute("GRANT USAGE ON SCHEMA public TO clerk")
            steps = []
            for _ in range(9):
                try:
                    store.check()
                    break
                except StoreError as error:
                    steps += re.findall(
                        r"((?:GRANT|CREATE TABLE) .*?)(?=;|\.$|$)", str(error).replace("; GRANT", ";\nGRANT"), re.M
                    )
                    for step in steps:
                        database.execute(step)
        finally:
            database.execute("GRANT TEMPORARY ON DATABASE shared TO PUBLIC")
        assert steps[0] == 'GRANT SELECT, INSERT, UPDATE ON "public"."totals" TO "clerk"'
        assert store.fence("p", "s", 1, ORIGIN) == {}
        assert store.apply(chunks(store, [Total("ann", 1)]), entry(1))

    @pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
    def test_a_weaker_delivery_needs_no_ledger(self, database: Database, role: str, delivery: str) -> None:
        """The right to write to the table is all that it takes."""
        database.execute("CREATE TABLE totals (customer text, cents bigint)")
        database.execute("GRANT USAGE ON SCHEMA public TO clerk; GRANT INSERT ON totals TO clerk")
        store = database.store(create=False, delivery=delivery)
        store.check()
        store.write(chunks(store, [Total("ann", 1)]))
        assert database.totals() == [("ann", 1)]
        assert database.execute("SELECT to_regclass('exactlyonce_ledger')") == [(None,)]

    def test_a_right_that_is_taken_away_meanwhile(self, database: Database, role: str) -> None:
        """A right that goes while rows wait is an error of the apply; given back, the rows come."""
        database.execute("GRANT ALL ON SCHEMA public TO clerk")
        database.execute("CREATE TABLE totals (customer text, cents bigint)")
        database.execute("GRANT INSERT ON totals TO clerk")
        store = database.ready(create=False)
        waiting = chunks(store, [Total("ann", 1)])
        database.execute("REVOKE INSERT ON totals FROM clerk")
        refused(lambda: store.apply(waiting, entry(1)), StoreError, "permission denied for table totals", "GRANT it")
        database.execute("GRANT INSERT ON totals TO clerk")
        assert store.apply(waiting, entry(1))


class TestApply:
    """Errors while rows are written: nothing of them is in the table, and the ledger has not gone on."""

    @pytest.mark.parametrize(
        ("change", "texts"),
        [
            ("ALTER TABLE totals ALTER cents TYPE smallint", ("out of range", "22003", "line 2, column cents")),
            ("ALTER TABLE totals DROP COLUMN cents", ("no column 'cents'", "add the column")),
            ("DROP TABLE totals", ('"public.totals" does not exist', "42P01", "create it")),
            ("ALTER TABLE totals ADD CHECK (cents < 99)", ("violates check constraint", "breaks a constraint")),
            ("ALTER TABLE totals ADD UNIQUE (customer)", ("duplicate key value", "breaks a constraint")),
            ("ALTER TABLE totals ADD UNIQUE (customer) DEFERRABLE INITIALLY DEFERRED", ("duplicate key value",)),
            ("DROP TABLE exactlyonce_ledger", ("The ledger", "is gone. Restore it",)),
        ],
    )  # fmt: skip
    def test_a_change_under_way(self, database: Database, change: str, texts: tuple[str, ...]) -> None:
        """A table that was changed after the check refuses the rows, and says which and why."""
        store = database.ready()
        waiting = chunks(store, [Total("ann", 1), Total("ann", 99999)])
        database.execute(change)
        refused(lambda: store.apply(waiting, entry(1)), StoreError, *texts)
        if "ledger" not in change:
            assert database.ledger() == {-1: (0, 1)}

    def test_an_index_that_is_dropped(self, database: Database) -> None:
        """An upsert without its unique index is refused."""
        store = database.ready(mode="upsert", key=("customer",))
        waiting = chunks(store, [Total("ann", 1)])
        database.execute("ALTER TABLE totals DROP CONSTRAINT totals_pkey")
        refused(lambda: store.apply(waiting, entry(1)), StoreError, "42P10", "no unique index on the key any more")

    def test_a_table_that_somebody_locks(self, database: Database) -> None:
        """A lock is waited for a while; then it is asked again."""
        store = database.ready(limits=Limits(lock=0.2, grace=0.2))
        waiting = chunks(store, [Total("ann", 1)])
        with psycopg.connect(database.server.dsn(database.name)) as other:
            other.execute("LOCK TABLE totals")
            refused(lambda: store.apply(waiting, entry(1)), StoreUnavailable, "another session holds a lock")
            other.rollback()
            other.execute("LOCK TABLE exactlyonce_ledger IN EXCLUSIVE MODE")
            refused(lambda: store.fence("p", "s", 2, ORIGIN), StoreUnavailable, "pg_terminate_backend(pid)", "none")
        assert store.apply(waiting, entry(1))

    def test_a_statement_that_takes_long(self, database: Database) -> None:
        """It is cut, and would be each time: the message names the setting, with which it comes to its end."""
        database.execute("CREATE TABLE totals (customer text, cents bigint)")
        database.execute(
            "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(1); RETURN NEW; END'"
        )
        database.execute("CREATE TRIGGER slow BEFORE INSERT ON totals FOR EACH ROW EXECUTE FUNCTION slow()")
        store = database.ready(answer_timeout="500ms")
        waiting = chunks(store, [Total("ann", 1)])
        refused(lambda: store.apply(waiting, entry(1)), StoreUnavailable, "set answer_timeout= of the sink")
        assert database.ready(answer_timeout="20s").apply(waiting, entry(1))

    def test_a_session_that_is_ended(self, database: Database) -> None:
        """An administrator who ends the session makes it ask again."""
        store = database.ready()
        waiting = chunks(store, [Total("ann", 1)])
        database.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'exactlyonce'"
        )
        refused(lambda: store.apply(waiting, entry(1)), StoreUnavailable, "asked again")
        assert store.apply(waiting, entry(1))

    def test_settings_of_the_role_do_not_weaken_it(self, database: Database, role: str) -> None:
        """A role that is set to lose commits, or to other rules for transactions, writes as any other."""
        database.execute("GRANT ALL ON SCHEMA public TO clerk")
        store = database.ready(mode="upsert", key=("customer",))
        for setting in (
            *("synchronous_commit = off", "default_transaction_isolation = serializable", "statement_timeout = 200"),
            *("default_transaction_read_only = on", "DateStyle = 'German, DMY'", "client_encoding = LATIN1"),
        ):
            database.execute(f"ALTER ROLE clerk SET {setting}")
        waiting = chunks(store, [Total("ä", 1), Total("ö", 2)], rows=1)
        store.close()

        def slowly() -> Iterator[bytes]:
            yield waiting[0]
            time.sleep(0.4)
            yield waiting[1]

        assert store.apply(slowly(), entry(1))
        assert database.totals() == [("ä", 1), ("ö", 2)]
        with store._connection.transaction("any"):
            assert store._connection.rows("SHOW synchronous_commit") == [("on",)]
            assert store._connection.rows("SHOW transaction_isolation") == [("read committed",)]

    @pytest.mark.parametrize("mode", ["append", "upsert", "delete"])
    def test_row_level_security_that_is_switched_on(self, database: Database, role: str, mode: str) -> None:
        """It hides no row from a delete in silence: the role is told, and with BYPASSRLS the rows that wait get in."""
        database.execute("CREATE TABLE totals (customer text PRIMARY KEY, cents bigint)")
        database.execute("INSERT INTO totals VALUES ('ann', 1)")
        database.execute("GRANT ALL ON totals TO clerk")
        database.execute("GRANT ALL ON SCHEMA public TO clerk")
        store = database.ready(mode=mode, key=key_of(mode), create=False)
        name = "bob" if mode == "append" else "ann"
        waiting = chunks(store, [Total(name, 2)])
        database.execute("ALTER TABLE totals ENABLE ROW LEVEL SECURITY")
        database.execute("CREATE POLICY own ON totals USING (customer = current_user)")
        refused(lambda: store.apply(waiting, entry(1)), StoreError, "row-level security would hide rows", "BYPASSRLS")
        assert (database.totals(), database.ledger()) == ([("ann", 1)], {-1: (0, 1)})
        database.execute("ALTER ROLE clerk BYPASSRLS")
        assert store.apply(waiting, entry(1))
        assert database.totals() == {"append": [("ann", 1), ("bob", 2)], "upsert": [("ann", 2)], "delete": []}[mode]

    @pytest.mark.parametrize("mode", ["upsert", "delete"])
    def test_a_publication_that_cannot_tell_rows_apart(self, database: Database, mode: str) -> None:
        """A published table without a replica identity takes no change, ever; with what it says the rows get in."""
        database.execute("CREATE TABLE totals (customer text NOT NULL, cents bigint)")
        database.execute("CREATE UNIQUE INDEX by_customer ON totals (customer)")
        database.execute("INSERT INTO totals VALUES ('ann', 1)")
        database.execute("CREATE PUBLICATION totals_published FOR TABLE totals")
        try:
            store = database.ready(mode=mode, key=("customer",))
            waiting = chunks(store, [Total("ann", 2)])
            refused(lambda: store.apply(waiting, entry(1)), StoreError, "[55000]", "REPLICA IDENTITY USING INDEX")
            database.execute("ALTER TABLE totals REPLICA IDENTITY USING INDEX by_customer")
            assert store.apply(waiting, entry(1))
        finally:
            database.execute("DROP PUBLICATION totals_published")
        assert database.totals() == ([("ann", 2)] if mode == "upsert" else [])

    def test_row_level_security_that_does_not_apply_to_the_owner(self, database: Database, role: str) -> None:
        """The owner of a table passes its policies, unless they are forced."""
        database.execute("GRANT ALL ON SCHEMA public TO clerk")
        store = database.ready(mode="delete", key=("customer",))
        database.execute("INSERT INTO totals VALUES ('ann', 1)")
        database.execute("ALTER TABLE totals ENABLE ROW LEVEL SECURITY")
        database.ready(mode="delete", key=("customer",))
        assert store.apply(chunks(store, [Total("ann", 0)]), entry(1))
        assert database.totals() == []
        database.execute("ALTER TABLE totals FORCE ROW LEVEL SECURITY")
        refused(database.store(mode="delete", key=("customer",)).check, StoreError, "row-level security")

    def test_settings_of_the_role_change_no_value(self, database: Database, role: str) -> None:
        """Texts mean what they were written for, whatever the role's settings would make of them."""

        class Odd(msgspec.Struct):
            spans: list[timedelta]
            span: timedelta
            names: list[str | None]

        for setting in ("intervalstyle = sql_standard", "array_nulls = off", "DateStyle = 'SQL, DMY'"):
            database.execute(f"ALTER ROLE clerk SET {setting}")
        database.execute("GRANT ALL ON SCHEMA public TO clerk")
        store = database.ready(Odd)
        spans = [timedelta(seconds=-1), timedelta(hours=-30), timedelta(days=-3, microseconds=7)]
        assert store.apply(chunks(store, [Odd(spans, span, ["a", None, "NULL"]) for span in spans]), entry(1))
        assert database.execute("SELECT * FROM totals") == [(spans, span, ["a", None, "NULL"]) for span in spans]


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
        (psycopg.errors.DatabaseDropped, StoreError, "the database was dropped"),
        (psycopg.errors.DataCorrupted, StoreError, "restore it"),
        (psycopg.errors.IndexCorrupted, StoreError, "REINDEX"),
        (psycopg.errors.ProgramLimitExceeded, StoreError, "2,700 bytes"),
        (psycopg.errors.UndefinedFunction, StoreError, "refuses"),
    ],
)
def test_the_errors_that_are_hard_to_provoke(error: type[psycopg.Error], kind: type[Any], text: str) -> None:
    """What passes is asked again, and what comes again is not."""
    found = Refusals("env:X").of(error("it happened"))
    assert isinstance(found, kind)
    assert text in str(found)

"""A bank whose tables change: transfers that leave the sum as it is, an audit by triggers, and its writers."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import psycopg
from change_judge import Audited

ACCOUNTS, ENTRIES_OF_ONE = 8_000, 3
ENTRIES_FROM = 1_500
"""The accounts up to this one have entries."""
KEYS = ACCOUNTS + 500
"""Accounts come and go up to this one."""
HOT = 300
"""Half of all changes are of the first keys."""
LAST = 1_000_000_000
"""The key of a row in each table that nobody changes: once it has come, all pages were read."""
LARGE = 3_000
"""The rows of a large transaction."""
PAUSE_S = 0.02
"""The wait of a writer between two transactions."""

MADE = """
DROP TABLE IF EXISTS accounts, entries, audit CASCADE;
DROP SEQUENCE IF EXISTS versions;
CREATE SEQUENCE versions;
CREATE TABLE accounts (id int PRIMARY KEY, amount int NOT NULL, version bigint);
CREATE TABLE entries (account int, number int, amount int NOT NULL, version bigint, PRIMARY KEY (account, number));
CREATE TABLE audit (n bigserial PRIMARY KEY, name text, key text, version bigint, amount int, transaction bigint);
CREATE OR REPLACE FUNCTION stamp() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.version := nextval('versions');
    RETURN NEW;
END $$;
CREATE OR REPLACE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE old_key text; new_key text;
BEGIN
    IF TG_TABLE_NAME = 'accounts' THEN
        IF TG_OP <> 'INSERT' THEN old_key := OLD.id::text; END IF;
        IF TG_OP <> 'DELETE' THEN new_key := NEW.id::text; END IF;
    ELSE
        IF TG_OP <> 'INSERT' THEN old_key := format('["%s","%s"]', OLD.account, OLD.number); END IF;
        IF TG_OP <> 'DELETE' THEN new_key := format('["%s","%s"]', NEW.account, NEW.number); END IF;
    END IF;
    IF old_key IS DISTINCT FROM new_key AND old_key IS NOT NULL THEN
        INSERT INTO audit (name, key, amount, transaction) VALUES (TG_TABLE_NAME, old_key, 0, txid_current());
    END IF;
    IF new_key IS NOT NULL THEN
        INSERT INTO audit (name, key, version, amount, transaction)
            VALUES (TG_TABLE_NAME, new_key, NEW.version, NEW.amount, txid_current());
    END IF;
    RETURN NULL;
END $$;
"""
TRIGGERS = """
CREATE TRIGGER stamp BEFORE INSERT OR UPDATE ON {0} FOR EACH ROW EXECUTE FUNCTION stamp();
CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON {0} FOR EACH ROW EXECUTE FUNCTION note();
"""
FILLED = f"""
INSERT INTO accounts SELECT i, 100, nextval('versions') FROM generate_series(1, {ACCOUNTS}) i;
INSERT INTO entries SELECT i, j, 1, nextval('versions')
    FROM generate_series(1, {ENTRIES_FROM}) i, generate_series(1, {ENTRIES_OF_ONE}) j;
INSERT INTO accounts VALUES ({LAST}, 0, nextval('versions'));
INSERT INTO entries VALUES ({LAST}, 1, 0, nextval('versions'));
INSERT INTO audit (name, key, version, amount, transaction)
    SELECT 'accounts', id::text, version, amount, txid_current() FROM accounts
    UNION ALL SELECT 'entries', format('["%s","%s"]', account, number), version, amount, txid_current() FROM entries;
"""
TOTAL = 100 * ACCOUNTS
LAST_KEYS = {"accounts": str(LAST), "entries": f'["{LAST}","1"]'}
KEY_COLUMNS = {"accounts": "id::text", "entries": """format('["%s","%s"]', account, number)"""}


def fill(dsn: str) -> None:
    """Make the tables anew, with their rows."""
    with psycopg.connect(dsn, autocommit=True) as session:
        session.execute(MADE.encode())
        session.execute(FILLED.encode())
        for table in LAST_KEYS:
            session.execute(TRIGGERS.format(table).encode())


def audit_of(session: psycopg.Connection[Any], table: str) -> list[Audited]:
    query = "SELECT n, key, version, amount, transaction FROM audit WHERE name = %s ORDER BY n"
    return [Audited(*row) for row in session.execute(query, (table,))]


def versions_in(session: psycopg.Connection[Any], table: str) -> dict[str, int]:
    """The version of each row, by its key as messages have it."""
    return dict(session.execute(f"SELECT {KEY_COLUMNS[table]}, version FROM {table}".encode()).fetchall())


class Writers:
    """Sessions that change both tables, through faults of the server, until they are ended."""

    def __init__(self, dsn: str, seed: int, count: int = 3) -> None:
        self._dsn = dsn
        self._is_over, self._may_write, self._is_large_due = threading.Event(), threading.Event(), threading.Event()
        self._may_write.set()
        self._writing = threading.Semaphore(count)
        self._count = count
        self.committed = 0
        self.unexpected: list[str] = []
        """Errors that no fault of a server explains."""
        self._threads = [
            threading.Thread(target=self._write, args=(random.Random(f"{seed}/{n}"),), daemon=True)
            for n in range(count)
        ]  # fmt: skip
        for thread in self._threads:
            thread.start()

    def _write(self, luck: random.Random) -> None:
        session: psycopg.Connection[Any] | None = None
        try:
            while not self._is_over.wait(PAUSE_S):
                self._may_write.wait()
                with self._writing:
                    try:
                        if session is None or session.closed:
                            session = psycopg.connect(self._dsn, connect_timeout=5, prepare_threshold=None)
                        self._transact(session, luck)
                    except psycopg.OperationalError:
                        if session is not None:
                            session.close()
                        self._is_over.wait(0.05)
        except Exception as error:
            self.unexpected.append(repr(error))
        finally:
            if session is not None:
                session.close()

    def _transact(self, session: psycopg.Connection[Any], luck: random.Random) -> None:
        try:
            self._change(session, luck)
        except (psycopg.errors.DeadlockDetected, psycopg.errors.UniqueViolation):
            session.rollback()
            return
        if luck.random() < 0.1:
            session.rollback()
        else:
            session.commit()
            self.committed += 1

    def _change(self, session: psycopg.Connection[Any], luck: random.Random) -> None:
        if self._is_large_due.is_set() and luck.random() < 0.5:
            self._is_large_due.clear()
            self._large(session, luck)
        else:
            for _ in range(luck.choice((1, 1, 2, 5))):
                luck.choice((transfer, transfer, close, opened, moved, entry))(session, luck)

    def _large(self, session: psycopg.Connection[Any], luck: random.Random) -> None:
        first = luck.randrange(1, KEYS - LARGE)
        session.execute("UPDATE accounts SET amount = amount WHERE id BETWEEN %s AND %s", (first, first + LARGE))
        session.execute(
            "UPDATE entries SET amount = amount + 1 WHERE account <= %s AND account %% 3 = %s",
            (ENTRIES_FROM, luck.randrange(3)),
        )

    def write_large(self) -> None:
        """One of them writes a large transaction next."""
        self._is_large_due.set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """None of them is within a transaction."""
        self._may_write.clear()
        for _ in range(self._count):
            self._writing.acquire()
        try:
            yield
        finally:
            for _ in range(self._count):
                self._writing.release()
            self._may_write.set()

    def end(self) -> None:
        """Returns once all have ended."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        assert not self.unexpected, self.unexpected


def some(luck: random.Random) -> int:
    return luck.randrange(1, HOT) if luck.random() < 0.5 else luck.randrange(1, KEYS)


def is_there(session: psycopg.Connection[Any], id: int) -> bool:
    return session.execute("SELECT FROM accounts WHERE id = %s FOR UPDATE", (id,)).rowcount == 1


class Pair(NamedTuple):
    one: int
    other: int


def pair(session: psycopg.Connection[Any], luck: random.Random) -> Pair | None:
    """Two accounts that are there, now locked."""
    one, other = some(luck), some(luck)
    return Pair(one, other) if one != other and all(is_there(session, id) for id in sorted((one, other))) else None


def transfer(session: psycopg.Connection[Any], luck: random.Random) -> None:
    if (both := pair(session, luck)) is not None:
        amount = luck.randrange(1, 9)
        session.execute("UPDATE accounts SET amount = amount - %s WHERE id = %s", (amount, both.one))
        session.execute("UPDATE accounts SET amount = amount + %s WHERE id = %s", (amount, both.other))


def close(session: psycopg.Connection[Any], luck: random.Random) -> None:
    """Delete an account; another one has its amount."""
    if (both := pair(session, luck)) is not None:
        rows = session.execute("DELETE FROM accounts WHERE id = %s RETURNING amount", (both.one,)).fetchall()
        session.execute("UPDATE accounts SET amount = amount + %s WHERE id = %s", (rows[0][0], both.other))


def opened(session: psycopg.Connection[Any], luck: random.Random) -> None:
    """Insert an account that is not there, with nothing in it."""
    session.execute("INSERT INTO accounts VALUES (%s, 0) ON CONFLICT DO NOTHING", (some(luck),))


def moved(session: psycopg.Connection[Any], luck: random.Random) -> None:
    """Change the key of an account to one that is not there."""
    one, other = some(luck), some(luck)
    free = "NOT EXISTS (SELECT FROM accounts WHERE id = %s)"
    session.execute(f"UPDATE accounts SET id = %s WHERE id = %s AND {free}".encode(), (other, one, other))


def entry(session: psycopg.Connection[Any], luck: random.Random) -> None:
    """Insert, update, delete or move an entry."""
    account, number = min(some(luck), ENTRIES_FROM), luck.randrange(1, ENTRIES_OF_ONE + 3)
    session.execute(
        luck.choice((
            "UPDATE entries SET amount = amount + 1 WHERE account = %s AND number = %s",
            "DELETE FROM entries WHERE account = %s AND number = %s",
            "INSERT INTO entries VALUES (%s, %s, 1) ON CONFLICT DO NOTHING",
            "UPDATE entries SET number = number + 10 WHERE account = %s AND number = %s",
        )),
        (account, number),
    )  # fmt: skip

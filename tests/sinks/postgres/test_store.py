"""The PostgreSQL store writes rows with their ledger row: in each mode, once, and for nobody else."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from decimal import Decimal
from threading import Event, Thread
from typing import Any

import msgspec
import psycopg
import pytest
from postgres_rows import ORIGIN, Database, Total, chunks, entry
from table_keys import key_of

from exactlyonce.pipeline.errors import Fenced, StoreError
from exactlyonce.sinks.write_ahead.store import ForeignLedger, LedgerBehind


def test_rows_come_with_their_ledger_row(database: Database) -> None:
    """Rows are in the table once, however often they are applied, and the ledger has their checkpoint."""
    store = database.ready()
    waiting = chunks(store, [Total("ann", 1), Total("bob", 2)])
    assert [store.apply(waiting, entry(1)), store.apply(waiting, entry(1))] == [True, False]
    assert database.totals() == [("ann", 1), ("bob", 2)]
    assert database.ledger() == {-1: (0, 1), 0: (1, 1)}


def test_an_empty_interval_is_noted(database: Database) -> None:
    """Without rows the ledger goes on all the same, in every mode."""
    for checkpoint, mode in enumerate(("upsert", "append", "delete"), 1):
        store = database.ready(mode=mode, key=key_of(mode))
        assert store.apply([], entry(checkpoint))


def test_upsert_keeps_the_last_row_of_a_key(database: Database) -> None:
    """Of the rows of a key the last one counts, in a transaction and from one to the next, wide or narrow."""
    store = database.ready(mode="upsert", key=("customer",))
    names = ["ann", "x" * 2000, "bob", "y" * 2500]
    rows = [Total(name, turn) for turn in range(300) for name in names]
    assert store.apply(chunks(store, rows), entry(1))
    assert database.totals() == sorted((name, 299) for name in names)
    assert store.apply(chunks(store, [Total("ann", 7), Total("cy", 8)]), entry(2))
    assert database.totals()[:3] == [("ann", 7), ("bob", 299), ("cy", 8)]


def test_upsert_of_nothing_but_a_key(database: Database) -> None:
    """Where every column is of the key, a row that is there stays."""
    store = database.ready(mode="upsert", key=("cents", "customer"))
    assert store.apply(chunks(store, [Total("ann", 1), Total("ann", 1)]), entry(1))
    assert store.apply(chunks(store, [Total("ann", 1), Total("ann", 2)]), entry(2))
    assert database.totals() == [("ann", 1), ("ann", 2)]


def test_delete_removes_the_rows_of_the_keys(database: Database) -> None:
    """Only the key of a record is looked at; what is not there is no error."""
    writes = database.ready(mode="upsert", key=("customer",))
    writes.apply(chunks(writes, [Total("ann", 1), Total("bob", 2), Total("cy", 3)]), entry(1))
    deletes = database.store(mode="delete", key=("customer",))
    deletes.check()
    deletes.fence("p", "gone", 1, ORIGIN)
    assert deletes.apply(chunks(deletes, [Total("bob", 9), Total("dan", 9)]), entry(1, sink="gone"))
    assert database.totals() == [("ann", 1), ("cy", 3)]


def test_subtasks_of_one_checkpoint_do_not_share_a_row(database: Database) -> None:
    """Two committables of one checkpoint, of different subtasks, are both applied; rows of subtasks taken away stay."""
    store = database.ready()
    assert all(store.apply(chunks(store, [Total("ann", part)]), entry(5, subtask=part)) for part in range(3))
    assert database.totals() == [("ann", 0), ("ann", 1), ("ann", 2)]
    assert store.apply(chunks(store, [Total("ann", 9)]), entry(6, subtask=0))
    assert database.store().fence("p", "s", 2, ORIGIN) == {0: 6, 1: 5, 2: 5}


def test_two_pipelines_write_one_table(database: Database) -> None:
    """Pipelines and sinks have rows of their own: one's fence and checkpoints are nothing to the other."""
    one, other = database.ready(), database.store()
    assert other.fence("q", "s", 9, ORIGIN) == {}
    assert one.apply(chunks(one, [Total("ann", 1)]), entry(3))
    assert other.apply(chunks(other, [Total("ann", 2)]), entry(1, incarnation=9, pipeline="q"))
    assert one.fence("p", "s", 1, ORIGIN) == {0: 3}
    assert one.fence("p", "t", 1, ORIGIN) == {}


def test_an_older_incarnation_is_fenced(database: Database) -> None:
    """After a fence an older incarnation neither fences nor applies; what it finds changes nothing."""
    old, new = database.ready(), database.store()
    waiting = chunks(old, [Total("ann", 1)])
    assert new.fence("p", "s", 2, ORIGIN) == {}
    with pytest.raises(Fenced, match=r"has incarnation 2: .* from incarnation 1"):
        old.apply(waiting, entry(1, incarnation=1))
    with pytest.raises(Fenced, match="nothing is lost"):
        old.fence("p", "s", 1, ORIGIN)
    assert database.totals() == []
    assert database.ledger() == {-1: (0, 2)}
    assert new.apply(waiting, entry(1, incarnation=2))


def test_an_older_checkpoint_is_not_applied(database: Database) -> None:
    """What comes after a newer checkpoint of its subtask has been applied before."""
    store = database.ready()
    assert store.apply(chunks(store, [Total("ann", 2)]), entry(2))
    assert not store.apply(chunks(store, [Total("ann", 1)]), entry(1))
    assert database.totals() == [("ann", 2)]


def test_a_ledger_of_another_topic_is_refused(database: Database) -> None:
    """A fence with another origin says whose ledger it is, and changes nothing, whatever its incarnation."""
    database.ready(incarnation=5)
    for incarnation in (1, 9):
        with pytest.raises(ForeignLedger) as refused:
            database.store().fence("p", "s", incarnation, "topic-2")
        assert refused.value.args == (ORIGIN,)
    assert database.ledger() == {-1: (0, 5)}


def test_a_restored_ledger_is_told_by_its_numbers(database: Database) -> None:
    """After the database was restored a fence returns the older numbers; a run that goes on meanwhile is refused."""
    store = database.ready()
    for checkpoint in (1, 2):
        assert store.apply(chunks(store, [Total("ann", checkpoint)]), entry(checkpoint))
    database.execute("UPDATE exactlyonce_ledger SET checkpoint = 1 WHERE subtask = 0")
    for found, row in ((1, entry(3, previous=2)), (0, entry(3, previous=2, subtask=1))):
        with pytest.raises(LedgerBehind) as behind:
            store.apply(chunks(store, [Total("ann", 3)]), row)
        assert behind.value.args == (found,)
    assert database.store().fence("p", "s", 2, ORIGIN) == {0: 1}
    database.execute("DELETE FROM exactlyonce_ledger")
    with pytest.raises(StoreError, match=r"has no row of sink 's', pipeline 'p'.* the database was restored"):
        database.store().apply([], entry(3, incarnation=2))
    assert database.totals() == [("ann", 1), ("ann", 2)]


def test_weaker_deliveries_write_without_the_ledger(database: Database) -> None:
    """`write` doubles what is written twice, and leaves the ledger alone."""
    store = database.ready()
    for _ in range(2):
        store.write(chunks(store, [Total("ann", 1)]))
    assert database.totals() == [("ann", 1), ("ann", 1)]
    assert database.ledger() == {-1: (0, 1)}


def test_what_reading_the_chunks_raises_undoes_the_transaction(database: Database) -> None:
    """An error of whoever gives the chunks comes through, nothing is written, and the next call succeeds."""
    store = database.ready(mode="upsert", key=("customer",))
    waiting = chunks(store, [Total("ann", 1)])

    def broken() -> Any:
        yield waiting[0]
        raise ZeroDivisionError("the topic is gone")

    with pytest.raises(ZeroDivisionError):
        store.apply(broken(), entry(1))
    assert database.totals() == []
    assert store.apply(waiting, entry(1))


class Other(msgspec.Struct):
    """A row as a later version of the pipeline has it."""

    customer: str
    euros: int


def test_rows_of_other_columns_are_not_mistaken(database: Database) -> None:
    """Rows that were encoded for another type, mode or key are refused, and none of their chunk is written."""
    store = database.ready()
    database.execute("ALTER TABLE totals ADD COLUMN euros bigint NOT NULL DEFAULT 0")
    database.execute("ALTER TABLE totals ALTER COLUMN cents SET DEFAULT 0")
    other = database.store(Other)
    later = chunks(other, [Other("ann", 1)])
    with pytest.raises(StoreError, match=r"encoded for other columns.*Run the pipeline as it was before"):
        store.apply([*chunks(store, [Total("ann", 1)]), *later], entry(1))
    with pytest.raises(StoreError, match="other columns"):
        store.apply([chunks(store, [Total("ann", 1)])[0] + later[0]], entry(1))
    assert database.totals() == []
    assert other.apply(later, entry(1))


class Priced(msgspec.Struct, frozen=True):
    """A row whose values a column may round or shift."""

    customer: str
    price: Decimal
    at: datetime


@pytest.mark.parametrize("mode", ["append", "upsert"])
@pytest.mark.parametrize(
    "change",
    [
        "ALTER COLUMN price TYPE numeric(9,1)", "ALTER COLUMN price TYPE double precision",
        "ALTER COLUMN at TYPE timestamp", "ALTER COLUMN at TYPE timestamptz(0)",
        "RENAME TO before; CREATE TABLE totals (customer text UNIQUE NOT NULL, price numeric(9,2), at timestamp)",
    ],
)  # fmt: skip
def test_a_column_that_becomes_another_while_rows_wait(database: Database, mode: str, change: str) -> None:
    """What it would round or shift is refused, until it is what it was; the same, only wider, is taken."""
    database.execute("CREATE TABLE totals (customer varchar(9) UNIQUE NOT NULL, price numeric(9,2), at timestamptz)")
    store = database.ready(Priced, mode=mode, key=key_of(mode))
    at = datetime(2026, 3, 1, 12, 0, 0, 500000, tzinfo=timezone(timedelta(hours=2)))
    waiting = chunks(store, [Priced("ann", Decimal("1.25"), at)])
    for statement in f"ALTER TABLE totals {change}".split(";"):
        database.execute(statement)
    for again in (store, database.store(Priced, mode=mode, key=key_of(mode), create=False)):
        with pytest.raises(StoreError, match=r"encoded for other columns.*with the table as it was"):
            again.apply(waiting, entry(1))
    assert database.execute("SELECT count(*) FROM totals") == [(0,)]
    database.execute("DROP TABLE totals")
    database.execute("CREATE TABLE totals (customer text UNIQUE NOT NULL, price numeric(12,2), at timestamptz)")
    assert store.apply(waiting, entry(1))
    assert database.execute("SELECT * FROM totals") == [("ann", Decimal("1.25"), at)]


def test_a_table_that_another_takes_the_place_of_takes_rows(database: Database) -> None:
    """In one transaction a table is renamed, and another made: rows go into one of them, and never is there none."""
    store = database.ready()
    waiting = chunks(store, [Total("ann", 1)])
    done = Event()

    def replace() -> None:
        with psycopg.connect(database.server.dsn(database.name), autocommit=True) as connection:
            while not done.is_set():
                connection.execute("ALTER TABLE totals RENAME TO old; CREATE TABLE totals (LIKE old); DROP TABLE old")

    (replacing := Thread(target=replace)).start()
    try:
        for checkpoint in range(1, 101):
            assert store.apply(waiting, entry(checkpoint))
    finally:
        done.set()
        replacing.join()


class Lasting(msgspec.Struct, frozen=True):
    """A row whose span a column may cut."""

    customer: str
    lasts: timedelta


@pytest.mark.parametrize("type_", ["interval(0)", "interval hour to minute"])
def test_an_interval_that_is_cut_while_rows_wait(database: Database, type_: str) -> None:
    """A span that the column would round or cut is refused."""
    store = database.ready(Lasting)
    waiting = chunks(store, [Lasting("ann", timedelta(seconds=1.25))])
    database.execute(f"ALTER TABLE totals ALTER COLUMN lasts TYPE {type_}")
    with pytest.raises(StoreError, match="encoded for other columns"):
        store.apply(waiting, entry(1))
    assert database.execute("SELECT count(*) FROM totals") == [(0,)]


def test_a_table_that_leaves_its_ledger_is_not_followed(database: Database) -> None:
    """One that is moved to another schema of the search_path, where its ledger is not, gets no rows."""
    for schema in ("one", "two"):
        database.execute(f"CREATE SCHEMA {schema}")
    database.use(f"{database.server.dsn(database.name)} options='-c search_path=one,two'")
    store = database.ready()
    assert store.apply(chunks(store, [Total("ann", 1)]), entry(1))
    database.execute("ALTER TABLE one.totals SET SCHEMA two")
    for _ in range(2):
        with pytest.raises(StoreError, match=r'relation "one.totals" does not exist'):
            store.apply(chunks(store, [Total("bob", 2)]), entry(2))
    assert database.execute("SELECT * FROM two.totals") == [("ann", 1)]


@pytest.mark.parametrize("table", ['we"ird Näme; DROP TABLE x--', "select", "a%sb{c}"])
def test_names_are_quoted(database: Database, table: str) -> None:
    """A table, schema, pipeline and sink of any name are written to, and nothing else happens."""
    database.execute('CREATE SCHEMA "my.%s schema{}"')
    for mode in ("append", "upsert", "delete"):
        store = database.store(table=table + mode, schema="my.%s schema{}", mode=mode, key=key_of(mode))
        store.check()
        name = f's"{mode}'
        assert store.fence("p'%s{}\\", name, 1, ORIGIN) == {}
        assert store.apply(chunks(store, [Total("ann", 1)]), entry(1, pipeline="p'%s{}\\", sink=name))
        assert database.execute("SELECT count(*) > 1 FROM pg_tables WHERE schemaname = $$my.%s schema{}$$") == [(True,)]


def test_a_table_in_a_schema(database: Database) -> None:
    """The name "schema.table" is looked for there, and the ledger is beside the table."""
    database.execute("CREATE SCHEMA shop")
    store = database.ready(table="shop.totals")
    assert store.apply(chunks(store, [Total("ann", 1)]), entry(1))
    assert database.execute("SELECT count(*) FROM shop.totals") == [(1,)]
    assert database.execute("SELECT count(*) FROM shop.exactlyonce_ledger") == [(2,)]


def test_a_table_that_was_dropped(database: Database) -> None:
    """It is not made anew while the ledger has rows of the sink; it is for another one, and for a weaker delivery."""
    store = database.ready()
    assert store.apply(chunks(store, [Total("ann", 1)]), entry(1))
    database.execute("DROP TABLE totals")
    again = database.store()
    again.check()
    with pytest.raises(StoreError, match="was dropped or renamed"):
        again.fence("p", "s", 2, ORIGIN)
    assert database.execute("SELECT to_regclass('totals')") == [(None,)]
    again.fence("p", "another", 2, ORIGIN)
    assert database.totals() == []
    database.execute("DROP TABLE totals")
    database.store(delivery="at_least_once").check()
    assert database.totals() == []

"""The PostgreSQL store writes rows with their ledger row: in each mode, once, and for nobody else."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from postgres_rows import Database, chunks
from table_rows import ORIGIN, Total, entry, key_of

from exactlyonce.pipeline.errors import StoreError
from exactlyonce.sinks.postgres.copy_text import unmarked


class Other(msgspec.Struct):
    """A row as a later version of the pipeline has it."""

    customer: str
    euros: int


def test_rows_of_other_columns_are_not_mistaken(database: Database) -> None:
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


def test_a_table_that_leaves_its_ledger_is_not_followed(database: Database) -> None:
    """A table moved to another schema of the search_path gets no rows: its ledger is not there."""
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


def test_names_are_quoted(database: Database) -> None:
    table = 'we"ird %s{c}; DROP TABLE x--'
    database.execute('CREATE SCHEMA "my.%s schema{}"')
    for mode in ("append", "upsert", "delete"):
        store = database.store(table=table + mode, schema="my.%s schema{}", mode=mode, key=key_of(mode))
        store.check()
        name = f's"{mode}'
        assert store.fence("p'%s{}\\", name, 1, ORIGIN) == {}
        assert store.apply(chunks(store, [Total("ann", 1)]), entry(1, pipeline="p'%s{}\\", sink=name))
        assert database.execute("SELECT count(*) > 1 FROM pg_tables WHERE schemaname = $$my.%s schema{}$$") == [(True,)]


def test_a_table_in_a_schema(database: Database) -> None:
    database.execute("CREATE SCHEMA shop")
    store = database.ready(table="shop.totals")
    assert store.apply(chunks(store, [Total("ann", 1)]), entry(1))
    assert database.execute("SELECT count(*) FROM shop.totals") == [(1,)]
    assert database.execute("SELECT count(*) FROM shop.exactlyonce_ledger") == [(2,)]


def test_a_table_that_was_dropped(database: Database) -> None:
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


MARK = b"ab01ab01"


def counted(chunk: bytes) -> bool:
    lines = chunk.splitlines(keepends=True)
    return all(line.startswith(MARK) and line.endswith(b"\n") for line in lines)


@given(st.lists(st.sampled_from([b"", b"\n", b"1\t2", MARK, b"ab01", b"\n" + MARK, MARK + b"x\n"]), max_size=12))
def test_a_chunk_gives_its_lines_if_all_are_marked(parts: list[bytes]) -> None:
    """Each line loses one mark, however much its text looks like one; a line without a mark, or an end, is refused."""
    chunk = b"".join(parts)
    expected = b"".join(line.removeprefix(MARK) for line in chunk.splitlines(keepends=True)) if counted(chunk) else None
    assert unmarked(chunk, MARK) == expected

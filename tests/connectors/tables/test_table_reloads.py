"""A table that is reloaded while a source begins to read it: all of its rows are read, those of before or of after."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
import pytest
from shop import on_mariadb, on_postgres
from table_reading import Named, read, read_on

from exactlyonce.connectors.tables import TableSplit
from exactlyonce.pipeline.errors import ConfigError, Halt

ROWS = 2_500
NUMBERS = f"SELECT i, i::text FROM generate_series(1, {ROWS}) i"


def read_meanwhile(source: Any, waits: Any, go_on: Any) -> list[Any]:
    """The rows of *source*, which is read while a reload holds the table; *go_on* ends that once the reader *waits*."""
    rows = list[Any]()
    reading = threading.Thread(target=lambda: rows.extend(read(source, ROWS)), daemon=True)
    reading.start()
    while not waits():
        assert reading.is_alive(), "it has read a table that is being reloaded"
    go_on()
    reading.join(60)
    return rows


@on_postgres
def test_postgres(shop: Any) -> None:
    shop.sql("CREATE TABLE names (id int PRIMARY KEY, name text)")
    shop.sql(f"INSERT INTO names {NUMBERS}")
    with shop.connection() as loading:
        loading.execute("TRUNCATE names")
        loading.execute(f"INSERT INTO names {NUMBERS}")
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        rows = read_meanwhile(shop.source("names", value=Named), lambda: shop.sql(waiting)[0][0], loading.commit)
    assert len(rows) == ROWS


@on_mariadb
def test_mariadb(shop: Any) -> None:
    shop.sql("CREATE TABLE names (id int PRIMARY KEY, name varchar(9))")
    with shop.connection() as loading:
        cursor = loading.cursor()
        cursor.execute("LOCK TABLES names WRITE")

        def load() -> None:
            cursor.executemany("INSERT INTO names VALUES (%s, %s)", [(i, str(i)) for i in range(ROWS)])
            cursor.execute("UNLOCK TABLES")

        waiting = "SELECT count(*) FROM information_schema.processlist WHERE state LIKE 'Waiting for table%%'"
        rows = read_meanwhile(shop.source("names", value=Named), lambda: shop.sql(waiting)[0][0], load)
    assert len(rows) == ROWS


@on_postgres
def test_a_snapshot_of_another_start_of_the_server_is_gone(shop: Any) -> None:
    """Its name is used again after a restart."""
    shop.sql("CREATE TABLE names (id int PRIMARY KEY, name text)")
    shop.sql("INSERT INTO names SELECT i, i::text FROM generate_series(1, 50) i")
    source = shop.source("names", value=Named, one_snapshot=True)
    finder = source.finder("s")
    _, (position,) = read_on(source, finder.find(()), 20)
    assert "@" in position.topic_id
    with pytest.raises(Halt, match="as of one moment"):
        read_on(source, (msgspec.structs.replace(position, topic_id=position.topic_id.replace("@", "@1")),), 20)
    assert len(read_on(source, (position,), 100)[0]) == 30
    finder.close()


@on_postgres
def test_a_snapshot_is_gone_while_its_session_ends(shop: Any) -> None:
    """The session's process has ended, its file is still there."""
    shop.sql("CREATE TABLE names (id int PRIMARY KEY, name text)")
    shop.sql("INSERT INTO names VALUES (1, 'a')")
    source = shop.source("names", value=Named)
    finder = source.finder("s")
    splits = finder.find(())
    name, _, _ = TableSplit.parse(splits[0].topic_id).snapshot.partition("@")
    exported = shop.server.folder / "data" / "pg_snapshots" / name
    content = exported.read_bytes()
    finder.close()
    while exported.exists():
        time.sleep(0.01)
    exported.write_bytes(content)
    exported.chmod(0o644)
    try:
        assert len(read_on(source, splits, 20)[0]) == 1
    finally:
        exported.unlink()


@on_postgres
def test_names_of_columns_that_a_query_might_have(shop: Any) -> None:
    column = "place"
    shop.sql(f'CREATE TABLE names ("{column}" int PRIMARY KEY, name text, r int, t int)')
    shop.sql(f"INSERT INTO names {NUMBERS.replace('i::text', 'i::text, 1, 2')}")
    assert len(read(shop.source("names", key=column, value=Named), ROWS)) == ROWS


@on_postgres
def test_a_table_with_heirs_is_refused(shop: Any) -> None:
    shop.sql("CREATE TABLE names (id int PRIMARY KEY, name text)")
    shop.sql("CREATE TABLE heirs (PRIMARY KEY (id)) INHERITS (names)")
    with pytest.raises(ConfigError, match="other tables inherit from it"):
        read(shop.source("names", value=Named))

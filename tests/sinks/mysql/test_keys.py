"""Keys of upserts and deletes: in every character set a key finds its rows and no others, by the index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from exactlyonce.sinks.mysql.store import DELETED_AT_ONCE

Stores = Callable[..., Any]
LATIN = ["a", "é", "Ã©", "\\é", "é\f", "€", "'", "ß", "x"]
TEXTS = {"ascii": ["a", "\\a", "a\f", "'", "x"], "latin1": LATIN}


class Total(msgspec.Struct):
    name: str
    shop: int
    cents: int


def put(store: Any, *records: Total) -> None:
    store.write([b"".join(store.encoder().encode(records))])


def table(charset: str, key: tuple[str, ...]) -> str:
    name = f"name VARCHAR(20) CHARACTER SET {charset} COLLATE {charset}_bin NOT NULL"
    return f"CREATE TABLE totals ({name}, shop INT NOT NULL, cents BIGINT NOT NULL, PRIMARY KEY ({', '.join(key)}))"


@pytest.mark.parametrize(
    ("charset", "key"),
    [("utf8mb4", ("name", "shop")), ("utf8mb3", ("name",)), ("latin1", ("name",)), ("ascii", ("shop", "name"))],
)
def test_a_key_in_every_character_set(mariadb: Any, stores: Stores, charset: str, key: tuple[str, ...]) -> None:
    mariadb.sql(table(charset, key))
    texts = TEXTS.get(charset, [*LATIN, "Ω"])
    upserts, deletes = stores(Total, mode="upsert", key=key), stores(Total, mode="delete", key=key)
    for cents in (1, 2):
        put(upserts, *[Total(text, 7, cents) for text in texts])
        for text in texts:
            put(upserts, Total(text, 7, cents))
    assert sorted(mariadb.sql("SELECT name, cents FROM totals")) == sorted((text, 2) for text in texts)
    for n, text in enumerate(texts):
        put(deletes, Total(text, 7, 0))
        assert {name for (name,) in mariadb.sql("SELECT name FROM totals")} == set(texts[n + 1 :])
    put(upserts, *[Total(text, 7, 1) for text in texts])
    put(deletes, *[Total(text, 7, 0) for text in texts[1:]])
    assert mariadb.sql("SELECT name FROM totals") == [(texts[0],)]


@pytest.mark.parametrize(("charset", "count"), [("utf8mb4", 2), ("latin1", DELETED_AT_ONCE)])
def test_a_delete_by_two_columns_reads_the_index(mariadb: Any, stores: Stores, charset: str, count: int) -> None:
    mariadb.sql(table(charset, ("name", "shop")))
    rows = [Total(f"é{n}", n % 7, n) for n in range(5_000)]
    put(stores(Total), *rows)
    store = stores(Total, mode="delete", key=("name", "shop"))
    statements: list[bytes] = []
    with pytest.MonkeyPatch.context() as patch:
        store.encoder()  # connects
        patch.setattr(store._session, "send", statements.append)
        put(store, *rows[:count])
    (statement,) = statements
    with mariadb.connection() as connection, connection.cursor() as cursor:
        cursor.execute(b"EXPLAIN " + statement)
        assert cursor.fetchone()[3:6:2] == ("range", "PRIMARY")
        cursor.execute("FLUSH STATUS")
        assert cursor.execute(statement) == count
        cursor.execute("SHOW SESSION STATUS LIKE 'Handler_read_rnd_next'")
        assert int(cursor.fetchone()[1]) < 100

"""A stream of `Change` in mode "upsert": rows and deletes by key, the last change of a key wins."""

from __future__ import annotations

import random
from datetime import date, datetime, timezone
from decimal import Decimal
from typing import Any, cast
from uuid import UUID

import msgspec
import pytest
from changed_rows import Item, applied, as_records, change, changes
from table_rows import ORIGIN, entry
from table_stores import Tables, on_postgres

from exactlyonce.pipeline.changes import Change, holds_changes
from exactlyonce.pipeline.errors import StoreError
from exactlyonce.pipeline.records import Record


@pytest.mark.parametrize("key", [("id",), ("shop", "id")], ids="-".join)
@pytest.mark.parametrize(("per_chunk", "type_"), [(1, Change[Item]), (7, Change[Item]), (500, Record[Item | None])])
def test_the_table_has_what_the_changes_leave(tables: Tables, key: tuple[str, ...], per_chunk: int, type_: Any) -> None:
    """Also if they are the records of a table."""
    store = tables.of(type_, create=True, mode="upsert", key=key)
    store.check()
    store.fence("p", "s", 1, ORIGIN)
    left: dict[Any, Item] = {}
    for checkpoint, made in enumerate(changes(random.Random(per_chunk), key, 4, 300, left), 1):
        encoded = store.encoder().encode(made if holds_changes(type_) else as_records(made))
        assert store.apply([b"".join(encoded[n : n + per_chunk]) for n in range(0, 300, per_chunk)], entry(checkpoint))
        left = applied(left, made)
        found = tables.sql("SELECT shop, id, name, note FROM totals ORDER BY 1, 2")
        assert found == sorted(msgspec.structs.astuple(row) for row in left.values()), checkpoint


class Kept(msgspec.Struct, frozen=True):
    number: int
    day: date
    at: datetime
    price: Decimal
    code: UUID
    size: str


KEPT = Kept(
    7, date(2026, 3, 1), datetime(2026, 3, 1, 12, 0, 0, 500000, timezone.utc), Decimal("1.50"), UUID(int=5), 'a"\\'
)
TEXTS = ["7", "2026-03-01", "2026-03-01 12:00:00.5+00", "1.50", str(UUID(int=5)), 'a"\\']
KEPT_AS = "number bigint, day date, at {at}, price numeric(9,2), code {code}, size varchar(9)"


def test_a_delete_finds_its_row_by_the_texts_of_its_key(tables: Tables) -> None:
    types = {"postgres": ("timestamptz", "uuid"), "mariadb": ("timestamp(6)", "char(36)")}[tables.name]
    names = Kept.__struct_fields__
    tables.sql(f"CREATE TABLE totals ({KEPT_AS.format(at=types[0], code=types[1])}, UNIQUE ({', '.join(names)}))")
    store = tables.of(Change[Kept], mode="upsert", key=names)
    key = msgspec.json.encode(TEXTS).decode()
    for made, rows in ((change("insert", key, KEPT), 1), (change("delete", key), 0)):
        store.write([b"".join(store.encoder().encode([made]))])
        assert tables.sql("SELECT count(*) FROM totals") == [(rows,)]


@on_postgres
def test_what_is_no_change_of_the_rows_key_is_an_error_of_the_record(tables: Tables) -> None:
    store = tables.of(Change[Item], create=True, mode="upsert", key=("shop", "id"))
    store.check()
    encode, nothing = store.encoder().encode, cast(str, None)
    for wrong, said in (
        (change("insert", '["y","5"]', Item("x", 5)), r"shop, id: the row has .* and the change is of the key"),
        (change("delete", 5), "key= has 2 columns, and the change is of the key 5"),
        (change("delete", ("x", 5, 6)), r"key= has 2 columns, and the change is of the key \('x', 5, 6\)"),
        (change("delete", '["x","x"]'), "id: the change is of the key 'x', which is no int"),
        (change("truncate", None), "TRUNCATE has deleted all rows of items"),
        (change("insert", '["x","5"]', Item("x", 5, nothing)), "name: None does not fit"),
    ):
        with pytest.raises(ValueError, match=said):
            encode([wrong])


@on_postgres
def test_a_table_that_cannot_take_deletes_is_refused(tables: Tables) -> None:
    tables.sql("CREATE DOMAIN given AS text NOT NULL")
    tables.sql("CREATE TABLE totals (shop text, id bigint, name given, note text, UNIQUE (shop, id))")
    with pytest.raises(StoreError, match="its column 'name' is of the domain given, which refuses NULL"):
        tables.of(Change[Item], mode="upsert", key=("shop", "id")).check()
    for mode, said in (("delete", "may be a row"), ("upsert", "key= names 'op'")):
        sink = tables.sink("totals", dsn="env:TOTALS_DSN", mode=mode, key=("op",))
        assert said in next(iter(sink.problems(Change[Item])))

"""The rows that sinks of stores write, as two versions of a pipeline are compared by: without asking any store."""

from __future__ import annotations

import random
from typing import Any, cast

import msgspec
import pytest
from changed_rows import Item, applied, change, changes

from exactlyonce import Record
from exactlyonce.pipeline.changes import Change
from exactlyonce.pipeline.sink import Sink, StoredRow, StoredRows
from exactlyonce.sinks import (
    DeltaSink,
    DuckDBSink,
    FileSink,
    HttpSink,
    KafkaSink,
    MySQLSink,
    PostgresSink,
    PrintSink,
    RedisSink,
)
from exactlyonce.sinks.redis.rows import row

ITEM = Item("a", 1, "first")
COLUMNS = {"shop": "a", "id": 1, "name": "first", "note": None}
NOWHERE = "postgresql://nobody@127.0.0.1:1/none"


def stored(sink: Sink[Any], type_: Any) -> StoredRows[Any]:
    rows = sink.stored_rows(type_)
    assert rows is not None
    return rows


def tables(**options: Any) -> list[Sink[Any]]:
    return [
        PostgresSink("items", dsn=NOWHERE, **options),
        MySQLSink("items", dsn="mysql://nobody@127.0.0.1:1/none", **options),
    ]


@pytest.mark.parametrize("sink", tables(mode="upsert", key=("shop", "id")), ids=lambda sink: type(sink).__name__)
def test_an_upsert_has_the_key_of_its_columns(sink: Sink[Any]) -> None:
    rows = stored(sink, Item)
    assert (rows.place, rows.found_by) == ("items", "shop, id")
    assert rows.rows([ITEM]) == [StoredRow(("a", 1), COLUMNS)]


def test_an_append_has_no_key() -> None:
    lake: Sink[Any] = DeltaSink("/lake/items")
    duckdb: Sink[Any] = DuckDBSink("shop.duckdb", table="items")
    for sink in [*tables(), lake, duckdb, FileSink("/files/items"), FileSink("/files/items", format="avro")]:
        rows = stored(sink, Item)
        assert rows.found_by == ""
        assert rows.rows([ITEM, ITEM]) == [StoredRow(None, COLUMNS)] * 2


def test_a_request_is_compared_as_its_record() -> None:
    rows = stored(HttpSink("https://shop.example/hook?token=1"), Item)
    assert (rows.place, rows.found_by) == ("https://shop.example/hook", "")
    assert rows.rows([ITEM]) == [StoredRow(None, ITEM)]


def test_a_delete_has_the_key_alone() -> None:
    rows = stored(PostgresSink("items", dsn=NOWHERE, mode="delete", key="id"), Item)
    assert rows.rows([ITEM, msgspec.structs.replace(ITEM, name="other")]) == [StoredRow((1,), None)] * 2


@pytest.mark.parametrize("key", [("id",), ("shop", "id")], ids="-".join)
def test_changes_are_found_by_the_key_of_their_row(key: tuple[str, ...]) -> None:
    """Rows and deletes, applied by these keys, leave what the changes leave."""
    rows = stored(PostgresSink("items", dsn=NOWHERE, mode="upsert", key=key), Change[Item])
    (made,) = changes(random.Random(7), key, 1, 500, {})
    table: dict[Any, Any] = {}
    for stored_row in rows.rows(made):
        if stored_row.content is None:
            table.pop(stored_row.key, None)
        else:
            table[stored_row.key] = stored_row.content
    left = [msgspec.structs.asdict(item) for item in applied({}, made).values()]
    assert sorted(table.values(), key=repr) == sorted(left, key=repr)
    with pytest.raises(ValueError, match="is of the key"):
        rows.rows([change("insert", "[]" if len(key) > 1 else 9, ITEM)])


def test_values_have_the_classes_of_their_columns() -> None:
    class Priced(msgspec.Struct):
        id: int
        price: float

    (row,) = stored(PostgresSink("priced", dsn=NOWHERE), Priced).rows([Priced(1, cast("float", 2))])
    assert type(row.content["price"]) is float
    with pytest.raises(TypeError, match="price: 'x' is str, not float"):
        stored(PostgresSink("priced", dsn=NOWHERE), Priced).rows([Priced(1, cast("float", "x"))])


def test_lines_are_the_records() -> None:
    assert stored(FileSink("/files/items", format="jsonl"), Item).rows([ITEM]) == [StoredRow(None, ITEM)]


def test_redis_rows_have_the_keys_that_are_written() -> None:
    """Key and value are those of the encoder, and None deletes."""
    sink = RedisSink[Record[Item | None]]("redis://127.0.0.1:1/0")
    records = [Record(ITEM, "item:1"), Record(None, "item:2")]
    rows = stored(sink, Record[Item | None])
    found = [
        row(key[0], [] if content is None else [content]) for key, content in rows.rows(records) if key is not None
    ]
    assert found == sink.store(Record[Item | None]).encoder().encode(records)
    hashes = stored(RedisSink[Item]("redis://127.0.0.1:1/0", key=lambda item: item.id, kind="hash"), Item)
    assert hashes.rows([ITEM]) == [StoredRow((b"1",), ITEM)]


def test_topics_and_printed_lines_have_no_rows() -> None:
    assert KafkaSink[Item]("items").stored_rows(Item) is None
    assert PrintSink().stored_rows(Item) is None

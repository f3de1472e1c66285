"""The options of a write to a store, and the type of its records: what they make, and what is refused."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as spark

from exactlyonce.engines.spark.sink.options import SinkOptions, parse_sink_options
from exactlyonce.engines.spark.sink.position import tally_of
from exactlyonce.engines.spark.sink.target import StoreTarget, record_type
from exactlyonce.engines.spark.sink.target import sink_of as class_of
from exactlyonce.pipeline import shape
from exactlyonce.pipeline.errors import ConfigError, RecordError
from exactlyonce.sinks import FileSink, MySQLSink, PostgresSink, RedisSink

CANARY = "canary-0a7e"
COLUMNS = (
    spark.StructType()
    .add("id", spark.LongType(), False)
    .add("customer", spark.StringType())
    .add("day", spark.DateType())
    .add("ratio", spark.DoubleType())
)
POSTGRES = {"sink": "postgres", "table": "totals", "dsn": "env:DSN"}
REDIS = {"sink": "redis", "url": "env:CACHE", "key": "total:{customer}"}


def parse(columns: Any = COLUMNS, **options: str) -> SinkOptions:
    given = {"sinkId": "totals", "kafka.bootstrap.servers": "127.0.0.1:9092", **options}
    return parse_sink_options(given, columns, streaming=True)


def target_of(options: SinkOptions) -> StoreTarget:
    assert options.target is not None
    return options.target


def sink_of(options: SinkOptions) -> Any:
    return target_of(options).sink


def test_options_are_the_arguments_of_the_sinks() -> None:
    sink = sink_of(parse(**POSTGRES, mode="upsert", KEY="customer, day", create="TRUE", schema="shop"))
    assert isinstance(sink, PostgresSink)
    assert (sink.table, sink.schema, sink.dsn, sink.mode) == ("totals", "shop", "env:DSN", "upsert")
    assert (sink.key, sink.create, sink.delivery) == (("customer", "day"), True, "exactly_once")
    sink = sink_of(parse(sink="MariaDB", table="totals", dsn="env:DSN", commit="write_ahead"))
    assert isinstance(sink, MySQLSink)
    assert sink.commit == "write_ahead"
    sink = sink_of(parse(sink="files", path="/data", partitionBy="day", roll_bytes="4kb", rollInterval="10m"))
    assert isinstance(sink, FileSink)
    assert (sink.path, sink.partition_by, sink.roll_bytes, sink.roll_interval) == ("/data", ("day",), "4kb", "10m")
    options = parse(**{**REDIS, "key": "{{shop}}:{customer}:{day}"}, kind="hash", hash_tag="shop", store_timeout="5s")
    sink = sink_of(options)
    assert isinstance(sink, RedisSink)
    assert (sink.kind, sink.hash_tag, options.store_timeout_ms) == ("hash", "shop", 5_000)
    record = target_of(options).type(7, "ann", date(2026, 11, 22), 0.5)
    assert sink.key is not None
    assert sink.key(record) == "{shop}:ann:2026-11-22"


def test_options_travel() -> None:
    """Spark pickles them; every process makes the same type, with the columns of the key that cannot be null."""
    options = parse(**POSTGRES, mode="upsert", key="customer")
    assert sink_of(options).key == ("customer",)
    again = pickle.loads(pickle.dumps(options))
    assert again == options
    assert hash(again.target) == hash(options.target)
    described = [shape.describe(target_of(each).type) for each in (options, again)]
    assert described[0] == described[1]
    optional = {"day": {"union": ["date", "null"]}, "ratio": {"union": ["float", "null"]}}
    assert dict(described[0]["fields"]) == {"id": "int", "customer": "str", **optional}
    assert "env:DSN" not in repr(options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sink": "oracle"}, r"sink is 'oracle': write one of kafka, postgres, mysql"),
        ({"sink": "postgres", "dsn": "env:DSN"}, r"needs the option table"),
        ({**POSTGRES, "topic": "a"}, r"no option 'topic' for a stream with sink=postgres.*storeTimeout, table"),
        ({**POSTGRES, "writeId": "a"}, r"no option 'writeid'"),
        ({**POSTGRES, "create": "yes"}, r"create is 'yes': write true or false"),
        ({**POSTGRES, "mode": "upsert", "key": "client"}, r"key names 'client', and the DataFrame has .*customer"),
        ({**POSTGRES, "mode": "replace"}, r"Sink 'totals' cannot write to postgres: mode='replace' must be one of"),
        ({**POSTGRES, "delivery": "at_most_once"}, r"delivery='at_most_once' is for Kafka alone"),
        ({**POSTGRES, "delivery": "once"}, r"delivery='once' must be one of"),
        ({**POSTGRES, "storeTimeout": "soon"}, r"storeTimeout"),
        ({"sink": "mysql", "table": "a", "dsn": f"mysql://me:{CANARY}@db/shop"}, r"has a password written out"),
        ({**REDIS, "url": f"redis://me:{CANARY}@cache:6379"}, r"the URL of the server has a password written out"),
        ({**REDIS, "key": "total"}, r"key='total' names no column"),
        ({**REDIS, "key": "total:{client}"}, r"key names 'client'"),
        ({**REDIS, "key": "total:{ratio}"}, r"key names 'ratio', a column of float"),
        ({**REDIS, "key": "total:{customer"}, r"is no template"),
        ({**REDIS, "key": "total:{customer!r}"}, r"braces with something else than a column"),
        ({**REDIS, "part_rows": "many"}, r"part_rows is 'many': write a number"),
        ({"sink": "files", "path": "data"}, r"must be the folder's path from / on"),
        ({"sink": "files", "path": "/data", "partition_by": "ratio"}, r"partition_by names 'ratio'"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:20],
)
def test_what_is_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){said}") as refused:
        parse(**options)
    assert CANARY not in str(refused.value)


def test_columns_that_no_store_takes() -> None:
    months = spark.YearMonthIntervalType()
    for columns, said in (
        (spark.StructType().add("span", months), "Column 'span' is of type interval year to month"),
        (spark.StructType().add("a", spark.StructType().add("b", spark.ArrayType(months))), r"Column 'a\.b' is of"),
        (spark.StructType().add("nothing", spark.NullType()), "Column 'nothing' is of type void"),
        (spark.StructType().add("a", spark.LongType()).add("a", spark.LongType()), "Two columns of .* named 'a'"),
        (spark.StructType(), "There is no column"),
    ):
        with pytest.raises(ConfigError, match=said):
            parse(columns, **POSTGRES)


def test_records() -> None:
    pairs = spark.MapType(spark.StringType(), spark.ArrayType(spark.MapType(spark.StringType(), spark.LongType())))
    columns = spark.StructType().add("class", spark.StringType()).add("sizes", pairs).add("a b", spark.LongType())
    options = parse(columns, **POSTGRES, mode="upsert", key="class")
    type_ = pa.map_(pa.string(), pa.list_(pa.map_(pa.string(), pa.int64())))
    sizes = pa.array([[("m", [[("x", 1)], None])], None], type=type_)
    batch = pa.record_batch([pa.array(["first", "second"]), sizes, pa.array([1, None])], names=columns.names)
    records = target_of(options).records()
    values, made = records.take(batch)
    assert values == [("first", {"m": [{"x": 1}, None]}, 1), ("second", None, None)]
    assert [shape.describe(type(each)) for each in made] == [
        shape.describe(record_type(columns.json(), ("class",)))
    ] * 2
    broken = pa.record_batch([pa.array(["a", None]), sizes, pa.array([1, 2])], names=columns.names)
    with pytest.raises(RecordError, match=r"Row 4 of a task has null in column 'class'.*filter"):
        records.take(broken)


def test_a_map_whose_keys_are_no_strings() -> None:
    """A row with one is counted and hashed as any other, however its pairs are ordered; another key is another row."""
    days = spark.MapType(spark.DateType(), spark.MapType(spark.IntegerType(), spark.StringType()))
    records = target_of(parse(spark.StructType().add("days", days), **POSTGRES)).records()
    type_ = pa.map_(pa.date32(), pa.map_(pa.int32(), pa.string()))
    pairs = [(date(2026, 11, day), [(7, "a"), (day, "b")]) for day in (21, 22)]
    turned = [(day, each[::-1]) for day, each in reversed(pairs)]
    tallies = [
        tally_of(records.take(pa.record_batch([pa.array([each], type=type_)], names=["days"]))[0])
        for each in (pairs, turned, [(date(2026, 11, 20), pairs[0][1]), pairs[1]], [])
    ]
    assert tallies[0] == tallies[1]
    assert len(set(tallies)) == 3


SINKS_OF_OTHERS = """
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal
from exactlyonce.sinks import WriteAheadSink

@dataclass
class TableSink(WriteAheadSink):
    table: str
    rows_max: int | None = None
    key: tuple[str, ...] = ()
    create: bool = False
    mode: Literal["insert", "upsert"] = "insert"
    properties: dict[str, str] | None = None
    choose: Callable[[str], str] = str

    def describe(self, type_):
        return {"sink": "table"}

    def store(self, type_):
        raise NotImplementedError

class ChoosingSink(TableSink):
    def __init__(self, choose: Callable[[str], str]) -> None:
        self.choose = choose

def function():
    pass
"""
NAMES_OF_OTHERS = """[exactlyonce.sinks]
table = sinks_of_others:TableSink
choosing = sinks_of_others:ChoosingSink
function = sinks_of_others:function
missing = sinks_of_others:Missing
"""


@pytest.fixture
def others(
    installed: Callable[[str, str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., SinkOptions]]:
    monkeypatch.syspath_prepend(installed("sinks_of_others", SINKS_OF_OTHERS, NAMES_OF_OTHERS))
    yield parse
    sys.modules.pop("sinks_of_others", None)
    class_of.cache_clear()


def test_the_sink_of_another_package(others: Callable[..., SinkOptions]) -> None:
    """Its arguments are options, by their types; what no text stands for is none."""
    sink = sink_of(others(
        sink="Table", table="totals", rowsMax="7", KEY="customer, day", create="TRUE", mode="upsert",
        properties='{"zone": "eu"}',
    ))  # fmt: skip
    assert type(sink).__name__ == "TableSink"
    assert (sink.table, sink.rows_max, sink.key, sink.create) == ("totals", 7, ("customer", "day"), True)
    assert (sink.mode, sink.properties, sink.choose) == ("upsert", {"zone": "eu"}, str)
    assert target_of(others(sink="table", table="totals", key="customer")).key == ("customer",)
    for given, said in (
        ({"sink": "table"}, r"sink=table needs the option table: the name of the table that rows go to\."),
        ({"sink": "table", "table": "t", "choose": "str"}, r"no option 'choose' .* rows_max, key, create, mode"),
        ({"sink": "table", "table": "t", "rows_max": "many"}, r"rows_max is 'many': write a number"),
        ({"sink": "table", "table": "t", "key": "client"}, r"key names 'client'"),
        ({"sink": "choosing"}, r"cannot be used on Spark: ChoosingSink needs the argument choose"),
        ({"sink": "function"}, r"must be a class derived from exactlyonce\.sinks\.WriteAheadSink"),
        ({"sink": "missing"}, r"cannot be loaded: AttributeError.* uninstall the package sinks_of_others 1\.2"),
        ({"sink": "tables"}, r"one of kafka, .*iceberg, choosing, function, missing, table\. .* on every executor"),
    ):
        with pytest.raises(ConfigError, match=f"(?s){said}"):
            others(**given)

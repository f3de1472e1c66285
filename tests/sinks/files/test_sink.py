"""The description of a file sink."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from table_rows import Total

from exactlyonce import Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.pipeline.errors import GraphError
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.sinks import FileSink
from exactlyonce.sinks.committer import Committing
from exactlyonce.testing.sink_contract.hooks import ORIGIN


@dataclass
class Odd:
    took: timedelta


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"path": "totals"}, "must be the folder's path from / on"),
        (
            {"path": "s3a://bucket/totals"},
            "path: s3a:// has no files here: give a path from / on, s3://bucket/prefix or hdfs://",
        ),
        ({"path": "s3://key:secret@bucket/totals"}, "path: it holds a user or a password"),
        ({"path": "s3a://key:secret@bucket/totals"}, "path: s3a:// has no files here"),
        ({"path": "hdfs:///totals"}, "path: the host is missing"),
        ({"path": "file:///totals"}, "give a path from / on"),
        ({"path": "/"}, "cannot be the folder"),
        ({"path": "/a\0b"}, "has a NUL in it"),
        ({"format": "csv"}, "format='csv' must be one of 'parquet', 'jsonl', 'avro'"),
        ({"roll_bytes": 0}, 'roll_bytes=0 must be 1kb or more: "128mb", or a number of bytes'),
        ({"roll_bytes": True}, "roll_bytes is True: write a number with a unit"),
        ({"roll_interval": "soon"}, "roll_interval is 'soon': write a number with a unit"),
        ({"partition_by": "customer"}, "partition_by='customer' must be names of fields"),
        ({"partition_by": ("customer", "customer")}, "names a field twice"),
        ({"partition_by": ("day",)}, "names 'day', which is no field of the record: it has customer, cents"),
        ({"partition_by": ("customer", "cents")}, "names all fields, and nothing would be left"),
    ],
)
def test_problems_say_what_is_wrong(options: dict[str, Any], problem: str) -> None:
    sink: FileSink[Total] = FileSink(**{"path": "/data/totals", **options})
    (found,) = sink.problems(Total)
    assert problem in found
    assert "secret" not in found


@pytest.mark.parametrize(
    ("type_", "options", "problem"),
    [
        (Odd, {}, "took has a type that Parquet and Avro do not have: write a duration as an int"),
        (str, {}, "str has no fields to be columns"),
        (Total | None, {}, "admits None, which is no row"),
        (str, {"format": "jsonl", "partition_by": ("x",)}, "str has no fields to be columns"),
        (object, {"format": "jsonl"}, "object cannot be encoded"),
        (str, {"format": "jsonl"}, None),
        (Odd, {"format": "jsonl"}, None),
        (UNKNOWN, {}, None),
    ],
)
def test_types_that_a_format_cannot_hold_are_problems(type_: Any, options: dict[str, Any], problem: str | None) -> None:
    sink: FileSink[Any] = FileSink("/data/totals", **options)
    found = list(sink.problems(type_))
    assert (problem in found[0] and len(found) == 1) if problem else not found


class Tagged(msgspec.Struct, tag_field="kind", tag="tagged"):
    customer: str
    cents: int


@pytest.mark.parametrize("partition_by", [(), ("customer",)])
def test_a_line_has_the_tag_of_its_record(make_target, stage, partition_by: tuple[str, ...]) -> None:
    target = make_target(Tagged, partition_by=partition_by)
    target.led()
    committable = stage(target.open(), 1, [Tagged("ann", 1)]).staged.committable
    target.committer().commit([committable], 1, ORIGIN)
    customer = {} if partition_by else {"customer": "ann"}
    assert target.lines() == [{"kind": "tagged", **customer, "cents": 1}]


def test_a_pipeline_with_it_can_be_built() -> None:
    pipeline = Pipeline("totals")
    stream = pipeline.source("in", KafkaSource("totals", value=Total))
    stream.sink("out", FileSink("/data/totals", partition_by=("customer",)))
    (sink,) = pipeline.build().sinks
    assert isinstance(sink.sink, Committing)
    assert sink.sink.describe(Total) == {
        "sink": "files", "path": "/data/totals", "format": "parquet", "partition_by": ["customer"],
        "delivery": "exactly_once", "value": {"record": "Total", "fields": [["customer", "str"], ["cents", "int"]]},
    }  # fmt: skip
    stream.sink("again", FileSink("totals"))
    with pytest.raises(GraphError, match=r"from / on"):
        pipeline.build()

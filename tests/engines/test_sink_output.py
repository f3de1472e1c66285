"""The end of a branch: whose fault it is that a record cannot be written, and which record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import pytest

from exactlyonce.engines.runtime.batch import Batch, Coordinates
from exactlyonce.engines.runtime.operators import Declared, SinkOutput
from exactlyonce.pipeline.errors import RecordError
from exactlyonce.sinks import KafkaSink, RedisSink
from exactlyonce.sinks.writer import SinkEncoder


class Total(msgspec.Struct):
    customer: Any
    cents: Any


class Columns:
    """An encoder that works column by column, as those of tables do: it meets the second record's fault first."""

    def encode(self, records: Sequence[Total]) -> list[bytes]:
        for record in records:
            if record.cents > 9:
                raise ValueError(f"cents: {record.cents} does not fit (the column of table t is digit)")
        for record in records:
            if record.customer is None:
                raise TypeError("customer: None is no str (the column of table t is text)")
        return [b"" for _ in records]


class Written(NamedTuple):
    outputs: list[Any]

    def write(self, outputs: Any) -> None:
        self.outputs.append(outputs)


def refusal(encoder: SinkEncoder, *records: Any) -> str:
    """The error for a batch of these that cannot be written, whose first is at orders[2] offset 10."""
    origins = [Coordinates("orders", 2, 10 + place) for place in range(len(records))]
    written = Written([])
    with pytest.raises(RecordError) as refused:
        SinkOutput("table", written.write, encoder)(Batch(list(records), origins))
    assert written.outputs == []
    return str(refused.value)


def test_a_value_of_another_type_is_told_of_the_operator() -> None:
    """The operator gives another type than it declares; other faults are the sink's."""
    places = [Coordinates("orders", 2, 10), Coordinates("orders", 2, 11)]
    sink = SinkOutput("out", Written([]).write, KafkaSink[str]("out").encoder(str), declared=Declared("name", str))
    with pytest.raises(RecordError) as refused:
        sink(Batch(["ann", 7], places))
    assert str(refused.value).startswith(
        "Operator 'name' says that it gives str, and gave something else for the record at orders[2] offset 11: "
        "Expected `str`, got `int`. The job has stopped before it; nothing is lost. Let its function return str, or "
        "declare what it returns; or leave the record out: --skip orders:2:11."
    )
    table = SinkOutput("table", Written([]).write, Columns(), declared=Declared("sum", Total))
    with pytest.raises(RecordError, match="Sink 'table' cannot write the record at"):
        table(Batch([Total("ann", 10)], places[:1]))


def test_a_value_that_does_not_fit_is_told_of_the_sink() -> None:
    """The error is that of the first of two such records."""
    said = refusal(Columns(), Total("ann", 1), Total(None, 1), Total("bob", 10))
    assert said.startswith(
        "Sink 'table' cannot write the record at orders[2] offset 11: customer: None is no str (the column of table t "
        "is text)"
    )
    assert "The job has stopped before it; nothing is lost. Change the target" in said
    assert "offset 10: cents: 10 does not fit" in refusal(Columns(), Total("ann", 10))


def test_an_output_that_has_no_encoding_is_told_of_the_sink() -> None:
    encoder = KafkaSink[Total]("totals").encoder(Total)
    said = refusal(encoder, Total("ann", 1), Total(object(), 1))
    assert said.startswith("Sink 'table' cannot write the record at orders[2] offset 11: ")
    assert "object" in said


@pytest.mark.parametrize("store", ["kafka", "redis"])
def test_a_function_of_a_sink_that_raises_is_told_as_the_users(store: str) -> None:
    def key(total: Total) -> str:
        return str(total.customer["name"])

    encoder: Any = KafkaSink[Total]("totals", key=key).encoder(Total)
    if store == "redis":
        encoder = RedisSink[Total]("env:CACHE", key=key).store(Total).encoder()
    said = refusal(encoder, Total({"name": "ann"}, 1), Total({}, 1))
    assert said.startswith("key= of sink 'table' raised KeyError: 'name' (")
    assert f"{__file__.rsplit('/', 1)[-1]}:" in said
    assert "on the record at orders[2] offset 11. The job has stopped before it; nothing is lost. Fix the func" in said


@pytest.mark.parametrize("argument", ["key", "headers", "timestamp"])
def test_a_function_of_a_sink_that_finds_nothing_cuts_nothing_short(argument: str) -> None:
    """StopIteration is an error of its record, and no end of the batch."""

    def nothing(total: Total) -> Any:
        return next(each for each in (total.customer,) if each)

    given: Any = 5 if argument == "timestamp" else [("a", b"1")]

    make: Any = KafkaSink
    encoder = make("totals", **{argument: nothing}).encoder(Total)
    said = refusal(encoder, Total(given, 1), Total("", 1), Total(given, 1))
    assert said.startswith(f"{argument}= of sink 'table' raised StopIteration")
    assert "offset 11" in said


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_only_none_is_a_tombstone(value: float) -> None:
    """Values that JSON writes as null are refused, as value and as key: they would delete the key."""
    assert "for which JSON has no number" in refusal(KafkaSink[Any]("totals").encoder(float), value)
    encoder = KafkaSink[Any]("totals", key=lambda total: total.cents).encoder(Total)
    assert "for which JSON has no number" in refusal(encoder, Total("ann", value))
    outputs = KafkaSink[Any]("totals").encoder(float | None).encode([1.0, None])
    assert outputs.values == [b"1.0", None]

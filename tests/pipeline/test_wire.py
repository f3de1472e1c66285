"""The form of records between processes: that of their type, or of their class if nothing else tells them apart."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest

from exactlyonce import Pipeline, Record
from exactlyonce.connectors import KafkaSource
from exactlyonce.errors import GraphError
from exactlyonce.pipeline import shape
from exactlyonce.pipeline.lossy import in_utc
from exactlyonce.pipeline.records import apart, wire_of, wire_schema
from exactlyonce.sinks import KafkaSink


class Order(msgspec.Struct):
    id: int


class Refund(msgspec.Struct):
    id: int
    at: datetime | None = None


class Tagged(msgspec.Struct, tag=True):
    id: int


@dataclass
class Credit:
    id: int


class Pair(NamedTuple):
    id: int
    other: int


class Larger(Order):
    sum: int = 0


SameName = msgspec.defstruct("Order", [("id", int)])


@pytest.mark.parametrize(
    "type_",
    [Order | Refund, Order | Refund | None, Order | Credit, Tagged | Order, Order | Credit | Pair | None],
    ids=shape.type_name,
)
def test_records_come_back_as_of_their_class(type_: Any) -> None:
    given: dict[type, Any] = {
        Order: Order(1), Refund: Refund(2), Tagged: Tagged(3), Credit: Credit(4), Pair: Pair(5, 6), type(None): None
    }  # fmt: skip
    records = [given[each] for each in type_.__args__] * 2
    wire = wire_of(type_)
    assert wire.wrap is not None
    assert wire.unwrap is not None
    packed = msgspec.msgpack.encode(wire.wrap(records))
    wire_type: Any = wire.type
    assert wire.unwrap(msgspec.msgpack.decode(packed, type=list[wire_type])) == records
    assert wire_schema(type_) == shape.describe(wire.type)


@pytest.mark.parametrize("type_", [int, int | str, Order | None, Order | int, Order | Pair, list[Order], Record[Order]])
def test_what_msgspec_tells_apart_stays_as_it_is(type_: Any) -> None:
    """Older checkpoints are read as before."""
    wire = wire_of(type_)
    assert (wire.type, wire.wrap, wire.unwrap) == (type_, None, None)
    assert wire_schema(type_) == shape.describe(type_)


@pytest.mark.parametrize("record", [Larger(1), {"id": 1}, None, 1], ids=repr)
def test_a_record_of_another_class_is_none_of_them(record: Any) -> None:
    wrap = wire_of(Order | Refund).wrap
    assert wrap is not None
    with pytest.raises(TypeError, match=f"a {type(record).__name__} is none of its classes, Order, Refund$"):
        wrap([Order(1), record])


@pytest.mark.parametrize(
    "type_",
    [
        Order | SameName,
        Order | Refund | int,
        Record[Order] | Record[Refund],
        list[Order | Refund],
        Order | dict[str, int],
        SimpleNamespace | Order,
    ],
    ids=shape.type_name,
)
def test_what_no_class_tells_apart_is_refused(type_: Any) -> None:
    assert apart(type_) == {}
    with pytest.raises(shape.UnsupportedType):
        wire_schema(type_)


def test_points_in_time_are_in_utc_by_class() -> None:
    change = in_utc(Order | Refund)
    assert change is not None
    at = datetime.fromisoformat("2026-07-01T00:30:00+02:00")
    assert change(Refund(1, at)).at.isoformat() == "2026-06-30T22:30:00+00:00"
    assert change(order := Order(1)) is order
    assert in_utc(Order | Credit) is None


def folded(count: int | None, record: Order | Refund) -> tuple[int, int]:
    return 1, record.id


def test_a_union_without_tags_may_be_dealt_and_go_round_and_not_be_kept_or_written() -> None:
    pipeline = Pipeline("p")
    loop = pipeline.feedback("again", Order | Refund)
    orders = pipeline.source("orders", KafkaSource("orders", value=Order))
    both = orders.union(pipeline.source("refunds", KafkaSource("refunds", value=Refund))).union(loop)
    both.filter(lambda record: record.id > 0).feed(loop)
    keyed = both.key_by(lambda record: record.id)
    keyed.stateful_map("folded", folded).sink("out", KafkaSink("out"))
    assert pipeline.build().fingerprint()
    keyed.reduce("newest", lambda old, new: new).sink("newest-out", KafkaSink("newest"))
    with pytest.raises(GraphError) as error:
        pipeline.build()
    problems = str(error.value).splitlines()[1:]
    assert re.search(r"the state cannot be kept in a checkpoint: .*Order.* cannot be encoded", problems[0])
    assert all(each.endswith("a tag, as class Order(msgspec.Struct, tag=True)") for each in problems), problems

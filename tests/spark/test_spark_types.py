"""The columns of state: which types they have, and that every value comes through as it was. No session is needed."""

from __future__ import annotations

from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Any, Literal, NamedTuple
from uuid import UUID

import msgspec
import pytest

from exactlyonce.engines.savepoints.contents import KeptEntry
from exactlyonce.engines.spark.source import state_reading
from exactlyonce.engines.spark.source.spark_types import Unfit, column
from exactlyonce.engines.spark.source.state_reading import Columns
from exactlyonce.pipeline.errors import ConfigError, RecordError
from exactlyonce.pipeline.keys import canonical_key
from exactlyonce.pipeline.shape import describe
from exactlyonce.pipeline.versions import VersionedState
from exactlyonce.state.errors import StateIncompatible
from exactlyonce.state.state_type import StateType


class Colour(Enum):
    RED = "red"


class Level(IntEnum):
    LOW = 1


class Point(NamedTuple):
    x: int
    y: float


class Packed(msgspec.Struct, array_like=True, tag=True):
    a: int
    b: str = "b"


class Total(msgspec.Struct, omit_defaults=True):
    sum: int
    by_day: dict[str, list[int]] = {}
    last: datetime | None = None


class Tree(msgspec.Struct):
    value: int
    left: Tree | None = None


class Circle(msgspec.Struct, tag="circle"):
    r: float


class Square(msgspec.Struct, tag="square"):
    a: float


NOON = datetime(2026, 11, 23, 12, 0, 0, 123456, timezone.utc)
ID = UUID("12345678-1234-5678-1234-567812345678")
VALUES: list[tuple[Any, str, Any, Any]] = [
    (bool, "boolean", True, True),
    (int, "bigint", -(1 << 63), -(1 << 63)),
    (float, "double", 1.5, 1.5),
    (float, "double", 2, 2.0),
    (str, "string", "Ünïcode", "Ünïcode"),
    (bytes, "binary", b"\x00\xff", b"\x00\xff"),
    (Decimal, "decimal(38,18)", Decimal("-12345678901234567890.000000000000000001"), Decimal(
        "-12345678901234567890.000000000000000001")),
    (datetime, "timestamp", NOON, NOON),
    (date, "date", date(2026, 2, 28), date(2026, 2, 28)),
    (timedelta, "interval day to second", timedelta(days=-1, microseconds=7), timedelta(days=-1, microseconds=7)),
    (time, "string", time(1, 2, 3), "01:02:03"),
    (UUID, "string", ID, str(ID)),
    (Colour, "string", Colour.RED, "red"),
    (Level, "bigint", Level.LOW, 1),
    (Literal["a", 1], "string", 1, "1"),
    (int | None, "bigint", None, None),
    (int | str, "string", "x", '"x"'),
    (Circle | Square, "string", Square(1.0), '{"type":"square","a":1.0}'),
    (list[int | None], "array<bigint>", [1, None], [1, None]),
    (set[str], "array<string>", {"a"}, ["a"]),
    (tuple[str, int], "struct<_1:string,_2:bigint>", ("a", 1), {"_1": "a", "_2": 1}),
    (dict[int, Point], "map<bigint,struct<x:bigint,y:double>>", {1: Point(2, 3.0)}, [(1, {"x": 2, "y": 3.0})]),
    (dict[str, Any], "map<string,string>", {"a": [1]}, [("a", "[1]")]),
    (Packed, "struct<a:bigint,b:string>", Packed(1, "c"), {"a": 1, "b": "c"}),
    (Circle, "struct<r:double>", Circle(2.0), {"r": 2.0}),
    (Total, "struct<sum:bigint,by_day:map<string,array<bigint>>,last:timestamp>",
     Total(1, {"mo": [1, 2]}, NOON), {"sum": 1, "by_day": [("mo", [1, 2])], "last": NOON}),
    (Total, "struct<sum:bigint,by_day:map<string,array<bigint>>,last:timestamp>",
     Total(1), {"sum": 1, "by_day": None, "last": None}),
    (Tree, "struct<value:bigint,left:string>", Tree(1, Tree(2)), {"value": 1, "left": '{"value":2,"left":null}'}),
]  # fmt: skip


def columns(type_: Any, *, key: Any = "str", today: Any = None, version: int = 1, in_json: bool = False) -> Columns:
    known: StateType[Any] | None = StateType("totals", today) if today is not None else None
    written = describe(type_)
    return Columns("totals", 7, key=key, written=written, version=version, today=known, in_json=in_json)


def entry(key: Any, state: Any, version: int = 1) -> KeptEntry:
    return KeptEntry(3, canonical_key(key), msgspec.msgpack.encode(state), version)


@pytest.mark.parametrize(("type_", "shown", "state", "expected"), VALUES, ids=str)
def test_every_value_comes_through(type_: Any, shown: str, state: Any, expected: Any) -> None:
    found = columns(type_)
    assert found.schema["value"].dataType.simpleString() == shown
    (batch,) = found.batches([entry("ann", state)])
    assert batch.to_pylist() == [{"key": "ann", "value": expected, "key_group": 3, "checkpoint": 7}]


@pytest.mark.parametrize(
    ("type_", "value", "message"),
    [
        (int, 1 << 63, "larger than 64 bits"),
        (int, True, "it is bool, not int"),
        (str, 1, "it is int, not str"),
        (datetime, datetime(2026, 1, 1), "has no time zone"),
        (Decimal, Decimal("0.1234567890123456789"), "more digits than"),
        (Decimal, Decimal("1e20"), "more digits than"),
        (Decimal, Decimal("NaN"), "more digits than"),
        (tuple[int, int], (1,), "it has 1 items, not 2"),
        (dict[str, int], {None: 1}, "the key null"),
        (Packed, ["Packed", 1, "b", 2], "it has 3 fields, and Packed has 2"),
        (Total, {"sum": 1, "more": 2}, "it has a field 'more', which Total has not"),
        (Total, {}, "it has no field 'sum'"),
        (list[int], "abc", "it is str, not a list"),
    ],
)
def test_what_does_not_fit_is_an_error(type_: Any, value: Any, message: str) -> None:
    with pytest.raises(Unfit, match=message):
        column(describe(type_)).value(msgspec.msgpack.decode(msgspec.msgpack.encode(value)))
    with pytest.raises(RecordError, match=rf"'totals': the state of key 'ann' is no .*{message}.*json=true"):
        list(columns(type_).batches([entry("ann", value)]))


class Sale(msgspec.Struct):
    sum: float
    day: date
    clock: time | None
    colour: Colour
    by_day: dict[str, list[int]]


class Sum(msgspec.Struct):
    sum: float


def test_states_of_an_older_version_by_avro_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"kept by an Avro schema, which this exactlyonce does not read any more"):
        Columns("totals", 7, key="str", written={"avro": "long"}, version=1, today=None, in_json=False)


def test_all_of_it_as_json() -> None:
    """The command line's output, of keys and states alike: also what no column could hold."""
    states = [
        (Decimal, Decimal("1e20"), '"1E+20"'),
        (Packed, Packed(1), '{"a":1,"b":"b"}'),
        (int, 1 << 63, str(1 << 63)),
        (dict[tuple[str, int], Packed], {("bob", 2): Packed(1)}, '{"[\\"bob\\",2]":{"a":1,"b":"b"}}'),
    ]
    for type_, state, text in states:
        (batch,) = columns(type_, in_json=True).batches([entry("ann", state)])
        assert [batch[name].to_pylist() for name in ("key", "value")] == [['"ann"'], [text]]


def test_keys() -> None:
    keys = ["ann", 7, ["ann", 1]]
    (batch,) = columns(int, key="any").batches([entry(key, 1) for key in keys])
    assert batch["key"].to_pylist() == ['"ann"', "7", '["ann",1]']
    (batch,) = columns(int, key={"tuple": ["str", "int"]}).batches([entry(("ann", 1), 1)])
    assert batch["key"].to_pylist() == [{"_1": "ann", "_2": 1}]
    with pytest.raises(RecordError, match=r"the key of key 7 is no string: it is int, not str.*keyType"):
        list(columns(int).batches([entry(7, 1)]))


def test_versions() -> None:
    old, new = entry("ann", 5), entry("bob", 600, version=2)
    with pytest.raises(RecordError, match=r"states of version 1 .* version 2.*types=orders:pipeline"):
        list(columns(int, version=2).batches([new, old]))
    cents = VersionedState(int, 2, {1: lambda euros: euros * 100})
    (batch,) = columns(int, version=2, today=cents).batches([new, old, entry("cid", 7)])
    assert batch["value"].to_pylist() == [600, 500, 700]
    with pytest.raises(StateIncompatible, match="no migration of version 1"):
        list(columns(int, version=2, today=VersionedState(int, 2)).batches([new, old]))
    with pytest.raises(StateIncompatible, match="is of version 2, and the pipeline knows version 1"):
        list(columns(int, version=2, today=int).batches([new, old]))


def test_batches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_reading, "BATCH_ENTRIES", 4)
    monkeypatch.setattr(state_reading, "BATCH_BYTES", 100)
    sizes = [1, 1, 1, 1, 1, 200, 60, 60, 1]
    batches = list(columns(str).batches(entry(str(n), "x" * size) for n, size in enumerate(sizes)))
    assert [batch.num_rows for batch in batches] == [4, 2, 2, 1]
    assert [key for batch in batches for key in batch["key"].to_pylist()] == [str(n) for n in range(len(sizes))]
    assert list(columns(str).batches([])) == []

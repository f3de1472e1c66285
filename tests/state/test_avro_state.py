"""State that is kept by an Avro schema: what becomes of it under another one, in every backend."""

from __future__ import annotations

from datetime import date, datetime, time, timezone
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from exactlyonce.pipeline.avro import AvroCodec
from exactlyonce.pipeline.keys import canonical_key
from exactlyonce.pipeline.versions import VersionedState
from exactlyonce.state.errors import DamagedState, StateIncompatible, StateUnstorable
from exactlyonce.state.index import decode_index
from exactlyonce.state.state_type import StateType
from tests.state.conftest import Restore


class Total(msgspec.Struct):
    sum: int
    note: str = ""


class Day(msgspec.Struct):
    on: date


class Grown(msgspec.Struct):
    cents: float
    count: int


def codec(type_: Any, *fields: dict[str, Any], name: str = "Total") -> AvroCodec[Any]:
    return AvroCodec(type_, {"type": "record", "name": name, "fields": list(fields)})


FIRST = codec(Total, {"name": "sum", "type": "int"}, {"name": "note", "type": "string"})
SECOND = codec(
    Grown,
    {"name": "cents", "type": "double", "aliases": ["sum"]},
    {"name": "count", "type": "long", "default": 7},
)
OTHER = codec(Total, {"name": "sum", "type": "string"}, {"name": "note", "type": "string"})


def keys(count: int) -> list[bytes]:
    return [canonical_key(f"c{number}") for number in range(count)]


def add(total: Total | None, amount: int) -> tuple[Total, None]:
    total = total or Total(0, "n")
    total.sum += amount
    return total, None


def first(topic: Any, restored: Restore, count: int = 200) -> tuple[bytes, ...]:
    """The index of checkpoint 2, with an increment in its chain, by the first schema."""
    table = restored(FIRST, 0, ())
    table.apply(add, keys(count), [1] * count)
    topic.write(table.freeze(1, 0))
    table.apply(add, keys(3), [1] * 3)
    index: tuple[bytes, ...] = topic.write(table.freeze(2, 1))
    return index


def test_state_by_the_same_schema(topic: Any, restored: Restore) -> None:
    index = first(topic, restored)
    table = restored(FIRST, 2, index)
    assert table.get(keys(3)[0]) == Total(2, "n")
    written = len(topic.bodies)
    table.apply(add, keys(1), [1])
    assert dict(restored(FIRST, 3, topic.write(table.freeze(3, 2))).items()) == dict(table.items())
    assert len(topic.bodies) == written + 1
    assert decode_index(index[0]).head.schema == {"avro": FIRST.schema}


def test_another_schema_is_resolved(topic: Any, restored: Restore) -> None:
    """Field by field; and the first snapshot has all states by the new one, those that no record has changed, too."""
    table = restored(SECOND, 2, first(topic, restored))
    expected = {key: Grown(2.0 if number < 3 else 1.0, 7) for number, key in enumerate(keys(200))}
    assert table.get(keys(5)[4]) == Grown(1.0, 7)
    snapshot = table.freeze(3, 2)
    index = topic.write(snapshot)
    assert dict(table.items()) == expected
    assert {block.checkpoint for block in snapshot.chain.blocks} == {3}
    again = restored(SECOND, 3, index)
    assert dict(again.items()) == expected
    again.apply(lambda state, _: (Grown(state.cents, 9) if state else None, None), keys(1), [0])
    again.freeze(4, 3)
    assert again.get(keys(1)[0]) == Grown(2.0, 9)


def test_what_does_not_resolve_is_refused(topic: Any, restored: Restore) -> None:
    index = first(topic, restored)
    topic.read.clear()
    with pytest.raises(StateIncompatible, match=r"operator 'totals' .*'sum' was written as int and is read as string"):
        restored(OTHER, 2, index)
    with pytest.raises(StateIncompatible, match=r"it was kept by an Avro schema, and is declared by a type alone"):
        restored(Total, 2, index)
    assert topic.read == []


def test_a_type_alone_becomes_an_avro_schema(topic: Any, restored: Restore) -> None:
    table = restored(Total, 0, ())
    table.apply(add, keys(50), [3] * 50)
    index = topic.write(table.freeze(1, 0))
    with pytest.raises(StateIncompatible, match=r"it was kept by a type alone, and is declared by an Avro schema"):
        restored(VersionedState(FIRST, 2), 1, index)

    def grow(state: Total) -> Grown:
        return Grown(100.0 * state.sum, 1)

    def shrink(state: Grown) -> Total:
        return Total(int(state.cents), "back")

    by_avro = restored(VersionedState(SECOND, 2, {1: grow}), 1, index)
    index = topic.write(by_avro.freeze(2, 1))
    by_type = restored(VersionedState(Total, 3, {2: shrink}), 2, index)
    assert set(map(msgspec.structs.astuple, dict(by_type.items()).values())) == {(300, "back")}
    index = topic.write(by_type.freeze(3, 2))
    assert restored(VersionedState(Total, 3), 3, index).get(keys(1)[0]) == Total(300, "back")


def test_a_migration_takes_the_place_of_the_rules() -> None:
    """It takes what the old schema holds, as its annotation has it, or as a dict."""
    written = StateType[Any]("totals", AvroCodec(Day))
    encoded = written.encode([Day(date(2026, 2, 28))])

    def by_type(state: Day) -> Total:
        return Total(state.on.day)

    def by_name(state: Any) -> Total:
        return Total(int(state["on"][-2:]))

    for migration in (by_type, by_name):
        today = StateType[Any]("totals", VersionedState(FIRST, 2, {1: migration}))
        today.require_readable(written.schema, 1)
        assert today.decode(encoded, written.schema, 1) == [Total(28)]
        assert today.unpack(today.split(encoded, written.schema, 1)[0]) == Total(28)


def test_a_version_without_a_migration_is_resolved() -> None:
    written = StateType[Any]("totals", FIRST)
    today = StateType[Any]("totals", VersionedState(SECOND, 2))
    today.require_readable(written.schema, 1)
    assert today.decode(written.encode([Total(5)]), written.schema, 1) == [Grown(5.0, 7)]
    with pytest.raises(StateIncompatible, match="field 'sum' was written as int"):
        StateType("totals", VersionedState(OTHER, 2)).require_readable(written.schema, 1)


def test_states_are_checked() -> None:
    short = StateType[Any]("totals", codec(Total, {"name": "sum", "type": "int"}))
    with pytest.raises(StateUnstorable, match=r"operator 'totals' does not fit its Avro schema.*note"):
        short.encode([Total(1, "kept")])
    full = StateType[Any]("totals", FIRST)
    with pytest.raises(StateUnstorable, match="operator 'totals' is not a valid Total"):
        full.encode([Total("1")])  # type: ignore[arg-type]  # wrong on purpose
    state = Total(1, "n")
    assert (full.clone(state), full.clone(state) is state) == (state, False)


NOW = datetime(2026, 1, 1, 0, 0, 0, 123456, tzinfo=timezone.utc)
MILLIS = {"type": "long", "logicalType": "timestamp-millis"}
CENTS: dict[str, Any] = {"type": "fixed", "name": "D", "size": 4, "logicalType": "decimal", "precision": 9, "scale": 2}


class Omitting(msgspec.Struct, omit_defaults=True):
    n: int = 1
    tags: list[int] = []
    either: int | None = 5


class Readings(msgspec.Struct):
    values: list[float]
    seen: set[str]
    price: Decimal = Decimal(0)


READINGS = codec(
    Readings,
    {"name": "values", "type": {"type": "array", "items": "double"}},
    {"name": "seen", "type": {"type": "array", "items": "string"}},
    {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
)
OMITTING = codec(
    Omitting,
    {"name": "n", "type": "long", "default": 0},
    {"name": "tags", "type": {"type": "array", "items": "long"}, "default": []},
    {"name": "either", "type": ["long", "null"], "default": 5},
)


@pytest.mark.parametrize(
    ("by", "state", "change"),
    [
        (AvroCodec(datetime, MILLIS), NOW, "the value is .*123456.* and is read as .*123000"),
        (AvroCodec(datetime, MILLIS), datetime(2026, 1, 1), "the value is .* and is read as .*timezone.utc"),
        (AvroCodec(time, {"type": "int", "logicalType": "time-millis"}), time(1, 2, 3, 456789), "456789.*456000"),
        (AvroCodec(float, {"type": "float"}), 0.1, "the value is 0.1, and is read as 0.10000000149"),
        (AvroCodec(dict[str, list[float]], {"type": "map", "values": {"type": "array", "items": "float"}}),
         {"a": [0.5], "b": [0.5, 1e300]}, "field 'b' is 1e[+]300, and is read as inf"),
        (AvroCodec(Decimal, CENTS), Decimal("-0"), r"is Decimal\('-0'\), and is read as Decimal\('-0.02'\)"),
        (OMITTING, Omitting(1), "the value is {}, and is read as {'n': 0}"),
    ],
)  # fmt: skip
def test_what_the_schema_cannot_hold_exactly(by: AvroCodec[Any], state: Any, change: str) -> None:
    with pytest.raises(
        StateUnstorable, match=rf"(?s)operator 'totals' cannot hold a state exactly: .*{change}.*double"
    ):
        StateType("totals", by).encode([state])


@pytest.mark.parametrize(
    ("by", "states"),
    [
        (AvroCodec(float, {"type": "float"}), [0.5, float("nan"), float("-inf")]),
        (AvroCodec(Decimal, CENTS), [Decimal("1.5"), Decimal("-0.01")]),
        (AvroCodec(datetime, MILLIS), [NOW.replace(microsecond=123000)]),
        (READINGS, [Readings([float("nan")], set("abcdefgh"), Decimal("1.5")), Readings([], set("xyz"), Decimal(1))]),
        (READINGS, [Readings([1], set())]),
        (OMITTING, [Omitting(2), Omitting(0, [1], None)]),
    ],
)
def test_what_the_schema_holds(by: AvroCodec[Any], states: list[Any]) -> None:
    state_type = StateType[Any]("totals", by)
    for given in (states, tuple(states)):
        assert len(state_type.decode(state_type.encode(given), state_type.schema)) == len(states)


def test_what_is_no_state_of_the_type() -> None:
    wrong: list[Any] = [[], "", 5, None, {"sum": "1"}]
    for state in wrong:
        with pytest.raises(StateUnstorable, match=r"is not a valid Total.* return Total, or declare another type"):
            StateType[Any]("totals", FIRST).encode([state])
    with pytest.raises(
        StateUnstorable, match=r"does not fit its Avro schema: .*with the field's default; or do without"
    ):
        StateType[Any]("totals", AvroCodec(Omitting)).encode([Omitting(2)])


def test_bytes_that_do_not_decode_are_damage() -> None:
    state_type = StateType[Any]("totals", FIRST)
    for bad in (b"", b"\x91\x01", b"\x91\xc4\x01\x02", b"\x91\xc4\x04\x02\x02nn"):
        with pytest.raises(DamagedState, match="operator 'totals'"):
            state_type.decode(bad, state_type.schema)

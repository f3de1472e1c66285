"""Schemas that are read by others: nothing that decoding would drop without a word is overlooked."""

from __future__ import annotations

from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactlyonce.pipeline.schema import UnsupportedType, describe
from exactlyonce.pipeline.schema_evolution import lost, unfit


class P1(msgspec.Struct, frozen=True):
    x: int
    y: int


class P2(msgspec.Struct, frozen=True):
    x: int


class A1(msgspec.Struct, array_like=True):
    x: int


class A2(msgspec.Struct, array_like=True):
    x: int
    y: int = 0


class K1(msgspec.Struct, frozen=True):
    code: str


class K2(msgspec.Struct, frozen=True):
    code: Decimal


class Pair(NamedTuple):
    left: int
    right: int


class Swapped(NamedTuple):
    right: int
    left: int


class Longer(NamedTuple):
    left: int
    right: int
    note: str


def struct(*fields: Any, name: str = "S", **config: Any) -> Any:
    return msgspec.defstruct(name, fields, **config)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (struct(("a", P1), ("b", P1)), struct(("b", P2), ("a", P2)), ["S.a.y"]),
        (struct(("a", P1), ("b", P1)), struct(("first", P2 | None), ("a", P2), ("b", P2)), ["S.a.y"]),
        (struct(("a", P1)), struct(("a", P2 | None)), ["S.a.y"]),
        (struct(("a", P1 | None)), struct(("a", P2)), ["S.a.y"]),
        (struct(("a", P1 | None)), struct(("a", P2 | int | None, None)), ["S.a.y"]),
        (list[P1], set[P2], ["S (its items that are there more than once)", "S.y"]),
        (list[P1], tuple[P2, P2], ["S.y"]),
        (tuple[P1, int], list[P2 | int], ["S.y"]),
        (dict[P1, int], dict[P2, int], ["S.y"]),
        (P1, dict[str, int], []),
        (struct(("a", P1)), dict[str, P2], ["S.y"]),
        (dict[str, int], P1, ["S (its keys beside x, y)"]),
        (dict[str, dict[str, int]], dict[str, P1], ["S (its keys beside x, y)"]),
        (Any, P1, ["S (its content beside x, y)"]),
        (list[Any], tuple[P1, ...], ["S (its content beside x, y)"]),
        (Any, dict[str, list[int]], []),
        (P1, Any, []),
        (list[int], A1, ["S (its items beside x)"]),
        (tuple[int, int], A1, ["S (its items beside x)"]),
        (tuple[int, int], A2, []),
        (A2, A1, ["S (its fields are stored by position)"]),
        (A1, A2, []),
        (struct(("x", str), name="A", array_like=True, tag=True), struct(("x", str), name="A", array_like=True),
         ["S (its fields are stored by position)"]),
        (A2, list[int], []),
        (Pair, Swapped, ["S (its fields are stored by position)"]),
        (Longer, Pair, ["S (its fields are stored by position)"]),
        (Pair, Longer, []),
        (list[int], set[int], ["S (its items that are there more than once)"]),
        (Any, frozenset[int], ["S (its items that are there more than once)"]),
        (dict[tuple[int, ...], int], dict[frozenset[int], int], ["S (its items that are there more than once)"]),
        (set[int], frozenset[int], []),
        (frozenset[int], list[int], []),
        (struct(("n", int, 3), omit_defaults=True), dict[str, int], ["S (its fields that omit_defaults has left out)"]),
        (struct(("x", int), ("y", int), tag_field="type", tag="A"), struct(("x", int), tag_field="kind", tag="A"),
         ["S.y"]),
        (int, float, []),
        (dict[str, int], dict[Decimal, int], ["S (its keys or items that are the same decimal)"]),
        (dict[str, int], dict[UUID, int], ["S (its keys or items that are the same uuid)"]),
        (dict[str, int], dict[datetime, int], ["S (its keys or items that are the same datetime)"]),
        (struct(("of", dict[str, int])), struct(("of", dict[timedelta, int])),
         ["S.of (its keys or items that are the same timedelta)"]),
        (dict[int, int], dict[float, int], ["S (its keys or items that are the same float)"]),
        (dict[int | str, int], dict[int | float | str, int], []),
        (dict[int, str], dict[Decimal, Decimal], []),
        (dict[str, int], dict[date, int], []),
        (Any, dict[UUID, int], ["S (its keys or items that are the same uuid)"]),
        (set[str], set[Decimal], ["S (its keys or items that are the same decimal)"]),
        (list[str], list[Decimal], []),
        (dict[tuple[str, int], int], dict[tuple[Decimal, int], int],
         ["S (its keys or items that are the same decimal)"]),
        (frozenset[K1], frozenset[K2], ["S.code (its keys or items that are the same decimal)"]),
        (tuple[K1, dict[K1, int]], tuple[K2, dict[K2, int]],
         ["S.code (its keys or items that are the same decimal)"]),
        (struct(("at", str)), struct(("at", datetime)), ["S.at (what its texts say that a datetime cannot)"]),
        (struct(("at", str | None, None)), struct(("at", time | None, None)),
         ["S.at (what its texts say that a time cannot)"]),
        (struct(("at", datetime)), struct(("at", datetime)), []),
        (struct(("at", str)), struct(("at", date)), []),
        (struct(("at", datetime)), struct(("at", str)), []),
    ],
)  # fmt: skip
def test_what_is_lost(old: Any, new: Any, expected: list[str]) -> None:
    """Wherever a record is read as another one, or from what says nothing of its keys, what has no place is named."""
    assert lost(describe(old), describe(new), "S") == expected


def test_members_of_unions() -> None:
    """Records of a union are read by their tags; without them nobody knows which of several one was."""
    cash = struct(("sum", int), ("coins", int), name="Cash", tag=True)
    card = struct(("sum", int), name="Card", tag=True)
    less = struct(("sum", int), name="Cash", tag=True)
    plain = struct(("sum", int), ("coins", int, 0), name="Payment")
    assert lost(describe(cash | card), describe(less | card), "S") == ["S.coins"]
    assert lost(describe(cash | card), describe(card | cash), "S") == []
    assert lost(describe(cash | card), describe(plain), "S") == ["S (which of 2 records it is)"]
    assert lost(describe(cash), describe(plain), "S") == []


class Node(msgspec.Struct):
    value: int
    left: Node | None = None
    right: Node | None = None


class Other(msgspec.Struct, rename={"left": "left"}):
    value: int
    note: str = ""
    nodes: list[Other] = []
    left: Other | None = None


def test_records_within_themselves() -> None:
    """They end; what is lost is named once."""
    assert lost(describe(Node), describe(Node), "Node") == []
    assert lost(describe(Node), describe(Other), "Node") == ["Node.right"]
    assert lost(describe(Other), describe(Node), "Other") == ["Other.note", "Other.nodes"]
    assert unfit(describe(Node), describe(Other), "Node") == []


def test_what_a_named_tuple_is_in_older_checkpoints() -> None:
    """Older schemas do not say that its fields are stored by position; it is read all the same, in its order alone."""
    old = {name: of for name, of in describe(Pair).items() if name != "array"}
    assert lost(old, describe(Pair), "Pair") == unfit(old, describe(Pair), "Pair") == []
    assert lost(old, describe(Swapped), "Pair") == ["Pair (its fields are stored by position)"]


def test_what_is_missing_in_a_record_that_is_described_elsewhere() -> None:
    """A field without a default is found where the schema only names its record."""
    before, now = struct(("x", int), name="P"), struct(("x", int), ("z", int), name="P")
    old, new = struct(("a", before), ("b", before)), struct(("b", now), ("a", now))
    assert unfit(describe(old), describe(new), "S") == ["S.b.z is new and has no default"]


def test_a_default_that_goes() -> None:
    """Values that were written before the field was there may lie beside those that have it, and need the default."""
    old, new = struct(("x", int), ("z", int, 0)), struct(("x", int), ("z", int))
    assert unfit(describe(old), describe(new), "S") == ["S.z has lost its default"]
    assert unfit(describe(new), describe(old), "S") == unfit(describe(old), describe(old), "S") == []


SCALARS = st.sampled_from([int, str])


def _records(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    fields = st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
    return st.builds(lambda found, array: struct(*found.items(), name="R", array_like=array), fields, st.booleans())


def _types(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        _records(inner),
        inner.map(lambda each: dict[str, each]),  # type: ignore[valid-type]  # known when it runs
        inner.map(lambda each: list[each]),  # type: ignore[valid-type]  # likewise
        inner.map(lambda each: each | None),
        st.lists(inner, max_size=2).map(lambda some: tuple[tuple(some)] if some else tuple[()]),  # type: ignore[misc]  # likewise
    )


def _of(info: Any, draw: st.DataObject) -> Any:
    inspect = msgspec.inspect
    if isinstance(info, inspect.StructType):
        return info.cls(*(_of(each.type, draw) for each in info.fields))
    if isinstance(info, inspect.DictType):
        return {name: _of(info.value_type, draw) for name in draw.draw(st.sets(st.sampled_from("abcdk")))}
    if isinstance(info, inspect.ListType):
        return [_of(info.item_type, draw) for _ in range(draw.draw(st.integers(0, 3)))]
    if isinstance(info, inspect.TupleType):
        return tuple(_of(each, draw) for each in info.item_types)
    if isinstance(info, inspect.UnionType):
        return _of(draw.draw(st.sampled_from(info.types)), draw)
    if isinstance(info, inspect.NoneType):
        return None
    return draw.draw(st.integers(0, 9)) if isinstance(info, inspect.IntType) else draw.draw(st.text("xyz", max_size=2))


def _leaves(value: Any) -> int:
    """How many scalars it holds, the keys of maps not counted."""
    if isinstance(value, dict):
        return sum(map(_leaves, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_leaves, value))
    return value is not None


TYPES = st.recursive(SCALARS, _types, max_leaves=6)


@given(old=TYPES, new=TYPES, draw=st.data())
def test_whatever_is_read_without_a_loss_is_whole(old: Any, new: Any, draw: st.DataObject) -> None:
    """Any value of any type, read as any other: where nothing is said to be lost, nothing of it is."""
    try:
        schemas = describe(old), describe(new)
    except UnsupportedType:  # a union of what msgpack writes alike
        return
    written = msgspec.msgpack.encode(_of(msgspec.inspect.type_info(old), draw))
    try:
        read = msgspec.msgpack.decode(written, type=new)
    except msgspec.ValidationError:
        return
    if not lost(*schemas, "S"):
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(read))
        assert _leaves(msgspec.msgpack.decode(written)) <= _leaves(again)


def test_a_default_that_the_bytes_leave_out() -> None:
    """It would be read as the default of today, wherever the record is. A type that leaves nothing out does not say
    its own."""
    was, same, other, plain = (
        struct(("n", int, default), ("z", list[int], []), name="P", omit_defaults=omits)
        for default, omits in ((3, True), (3, True), (5, True), (3, False))
    )
    gone = ["S.a.n (its 3 that omit_defaults has left out)"]
    listed: list[Any] = [describe(struct(("a", list.__class_getitem__(each)))) for each in (was, same, other, plain)]
    assert [lost(listed[0], each, "S")[:1] for each in listed] == [[], [], gone, gone]
    assert lost(describe(was), describe(other), "S") == ["S.n (its 3 that omit_defaults has left out)"]
    assert describe(was) == describe(same) != describe(other)
    by_factory = struct(("at", dict[str, int], msgspec.field(default_factory=lambda: {"a": 1})), omit_defaults=True)
    assert "omitted" not in str(describe(by_factory))

"""Schemas that are read by others: nothing that decoding would drop without a word is overlooked."""

from __future__ import annotations

from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import pytest
from hypothesis import assume, given, reject
from hypothesis import strategies as st

from exactlyonce.pipeline.schema_evolution import changed, has_default, lost, unfit
from exactlyonce.pipeline.shape import UnsupportedType, describe, described_shape, shape_of


def struct(*fields: Any, name: str = "S", **config: Any) -> Any:
    return msgspec.defstruct(name, fields, **config)


A1 = struct(("x", int), name="A1", array_like=True)
A2 = struct(("x", int), ("y", int, 0), name="A2", array_like=True)


class P1(msgspec.Struct, frozen=True):
    x: int
    y: int


class P2(msgspec.Struct, frozen=True):
    x: int


class Pair(NamedTuple):
    left: int
    right: int


class Swapped(NamedTuple):
    right: int
    left: int


LOST: list[tuple[Any, Any, str]] = [
    (struct(("a", P1), ("b", P1)), struct(("first", P2 | None), ("a", P2), ("b", P2)), "S.a.y"),
    (dict[str, dict[str, int]], dict[str, P1], "S (its keys beside x, y)"), (tuple[P1, int], tuple[P2, int], "S.y"),
    (tuple[int, int], A1, "S (its items beside x)"),
    (A2, A1, "S (its fields are stored by position)"), (Pair, Swapped, "S (its fields are stored by position)"),
    (dict[tuple[int, ...], int], dict[frozenset[int], int], "S (its items that occur more than once)"),
    (struct(("n", int, 3), omit_defaults=True), dict[str, int], "S (its fields that omit_defaults has left out)"),
    (struct(("of", dict[str, int])), struct(("of", dict[timedelta, int])),
     "S.of (its keys or items that are the same timedelta)"),
    (list[str], list[datetime], "S (details of its texts that a datetime lacks)"),
]  # fmt: skip
WHOLE: list[tuple[Any, Any]] = [
    (P1, dict[str, int]), (P1, Any), (Any, dict[str, list[int]]), (tuple[int, int], A2), (A1, A2), (A2, list[int]),
    (set[int], frozenset[int]), (frozenset[int], list[int]), (int, float), (list[str], list[Decimal]),
    (dict[int | str, int], dict[int | float | str, int]), (dict[int, str], dict[Decimal, Decimal]),
    (dict[str, int], dict[date, int]), (list[str], list[date]), (list[datetime], list[str]),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "expected"), LOST)
def test_what_has_no_place_is_named(old: Any, new: Any, expected: str) -> None:
    assert lost(describe(old), describe(new), "S") == [expected]


@pytest.mark.parametrize(("old", "new"), WHOLE)
def test_what_loses_nothing_has_no_problem(old: Any, new: Any) -> None:
    assert lost(describe(old), describe(new), "S") == []


def test_members_of_unions() -> None:
    """Tags tell records of a union apart; without them several could be meant."""
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


class Other(msgspec.Struct):
    value: int
    note: str = ""
    nodes: list[Other] = []
    left: Other | None = None


def test_records_within_themselves() -> None:
    assert lost(describe(Node), describe(Node), "Node") == []
    assert lost(describe(Node), describe(Other), "Node") == ["Node.right"]
    assert lost(describe(Other), describe(Node), "Other") == ["Other.note", "Other.nodes"]
    assert unfit(describe(Node), describe(Other), "Node") == []


def test_what_a_named_tuple_is_in_older_checkpoints() -> None:
    """Older schemas do not say that fields are stored by position; it is read all the same, in its order alone."""
    old = {name: of for name, of in describe(Pair).items() if name != "array"}
    assert lost(old, describe(Pair), "Pair") == unfit(old, describe(Pair), "Pair") == []
    assert lost(old, describe(Swapped), "Pair") == ["Pair (its fields are stored by position)"]


def test_what_is_missing_in_a_record_that_is_described_elsewhere() -> None:
    before, now = struct(("x", int), name="P"), struct(("x", int), ("z", int), name="P")
    old, new = struct(("a", before), ("b", before)), struct(("b", now), ("a", now))
    assert unfit(describe(old), describe(new), "S") == ["S.b.z is new and has no default"]


def test_a_default_that_goes() -> None:
    """Values that were written before the field was there may lie beside those that have it, and need the default."""
    old, new = struct(("x", int), ("z", int, 0)), struct(("x", int), ("z", int))
    assert unfit(describe(old), describe(new), "S") == ["S.z has lost its default"]
    assert unfit(describe(new), describe(old), "S") == unfit(describe(old), describe(old), "S") == []


def test_a_default_that_the_bytes_leave_out() -> None:
    """It would be read as the default of today. A type that leaves nothing out does not say its own."""
    was, same, other, plain = (
        struct(("n", int, default), ("z", list[int], []), name="P", omit_defaults=omits)
        for default, omits in ((3, True), (3, True), (5, True), (3, False))
    )
    gone = ["S.a.n (its 3 that omit_defaults has left out)"]
    listed: list[Any] = [describe(struct(("a", list.__class_getitem__(each)))) for each in (was, same, other, plain)]
    assert [lost(listed[0], each, "S")[:1] for each in listed] == [[], [], gone, gone]
    assert describe(was) == describe(same) != describe(other)
    by_factory = struct(("at", dict[str, int], msgspec.field(default_factory=lambda: {"a": 1})), omit_defaults=True)
    assert "omitted" not in str(describe(by_factory))


# --- whatever the types ---------------------------------------------------------------------------------------------

TEXTS: dict[Any, list[str]] = {
    Decimal: ["1", "1.0", "1.00"],
    UUID: ["a" * 8 + "-1111-1111-1111-" + "b" * 12, "A" * 8 + "-1111-1111-1111-" + "b" * 12],
    datetime: ["2026-01-01T00:00:00Z", "2026-01-01T01:00:00+01:00", "2026-01-01T00:00:00.0000001Z"],
    date: ["2026-01-01", "2026-01-02"],
    time: ["10:00:00", "10:00:00.0000001"],
    timedelta: ["PT1H", "PT60M"],
    str: ["x", "y"],
}
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(0, 3) | st.sampled_from([2**53, 2**53 + 1]),
    float: st.sampled_from([0.5, 2.0]),
    Decimal: st.sampled_from([Decimal("1.0"), Decimal("2")]),
    UUID: st.builds(UUID, st.sampled_from(TEXTS[UUID])),
    datetime: st.just(datetime(2026, 1, 1, tzinfo=timezone.utc)),
    date: st.dates(date(2026, 1, 1), date(2026, 1, 3)),
    time: st.just(time(10)),
    timedelta: st.just(timedelta(hours=1)),
}
Drawn = tuple[Any, Any, st.SearchStrategy[Any]]
"""A type, one that may read its values, and those values."""


@st.composite
def scalars(draw: st.DrawFn) -> Drawn:
    if draw(st.booleans()):
        new = draw(st.sampled_from([*TEXTS]))
        return str, new, st.sampled_from(TEXTS[new])
    old = draw(st.sampled_from([*VALUES]))
    return old, draw(st.sampled_from([old, old, str, float])), VALUES[old]


@st.composite
def items(draw: st.DrawFn, depth: int, hashable: bool) -> Drawn:
    """Lists, sets and tuples; a set's are equal to none beside them."""
    kinds: list[Any] = [tuple, frozenset] if hashable else [list, tuple, frozenset]
    was, now = draw(st.sampled_from(kinds)), draw(st.sampled_from(kinds))
    old, new, values = draw(drawn(depth - 1, hashable or frozenset in (was, now)))
    several = {
        list: st.lists(values, max_size=3),
        tuple: st.lists(values, max_size=3).map(tuple),
        frozenset: st.frozensets(values, max_size=3),
    }
    old, new = (of[each, ...] if of is tuple else of[each] for of, each in ((was, old), (now, new)))
    return old, new, several[was]


@st.composite
def maps(draw: st.DrawFn, depth: int) -> Drawn:
    old_key, new_key, keys = draw(drawn(depth - 1, True))
    old, new, values = draw(drawn(depth - 1, False))
    return dict[old_key, old], dict[new_key, new], st.dictionaries(keys, values, max_size=3)  # type: ignore[valid-type]  # they are drawn


@st.composite
def records(draw: st.DrawFn, depth: int, hashable: bool) -> Drawn:
    """Fields go and come, and change their order; some are integers with defaults, which may be left out."""
    fields = {name: draw(drawn(depth - 1, hashable)) for name in draw(st.lists(st.sampled_from("abc"), unique=True))}
    default, changed = draw(st.sampled_from([(0, 0), (0, 0), (0, 1)]))
    config = {"array_like": draw(st.booleans()), "omit_defaults": draw(st.booleans()), "frozen": hashable}
    old = struct(*((name, was) for name, (was, _, _) in fields.items()), ("n", int, default), name="R", **config)
    kept = draw(st.permutations([*fields]) | st.just([*fields]))[: draw(st.integers(0, 3) | st.just(3))]
    config |= draw(st.fixed_dictionaries({}, optional={"array_like": st.booleans(), "omit_defaults": st.booleans()}))
    new = struct(*((name, fields[name][1]) for name in kept), ("n", int, changed), name="R", **config)
    reads = st.sampled_from([new, new, new, dict[str, Any]]) if not hashable else st.just(new)
    return old, draw(reads), st.builds(old, *(values for _, _, values in fields.values()), st.integers(0, 1))


@st.composite
def unions(draw: st.DrawFn, depth: int) -> Drawn:
    """Unions of records with tags, and of values that may be missing."""
    if draw(st.booleans()):
        old, new, values = draw(drawn(depth - 1, False))
        return old | None, draw(st.sampled_from([new | None, new])), values | st.none()
    one, other = (struct(("x", int), name=name, tag=True) for name in ("One", "Other"))
    new = draw(st.sampled_from([other | one, struct(("x", int)), struct(("type", str), ("x", int)), dict[str, Any]]))
    return one | other, new, st.builds(one, st.just(1)) | st.builds(other, st.just(1))


@st.composite
def drawn(draw: st.DrawFn, depth: int = 2, hashable: bool = False) -> Drawn:
    kinds = [scalars(), *([items(depth, hashable), records(depth, hashable)] if depth else [])]
    kinds += [maps(depth), unions(depth)] if depth and not hashable else []
    old, new, values = draw(st.one_of(kinds))
    if not hashable and draw(st.integers(0, 9)) == 0:
        anything = [(old, Any)] if "omitted" in str(described(old)) else [(Any, new), (old, Any)]
        old, new = draw(st.sampled_from(anything))  # of what Any has left out nobody knows
    return old, new, values


class Fields(dict[str, Any]):
    """The fields of a record, by their written names."""


def tree(value: Any) -> Any:
    """*value* in builtin types, in which fields still have their names."""
    if isinstance(value, msgspec.Struct):
        fields = {name: tree(getattr(value, name)) for name in value.__struct_fields__}
        return Fields(fields | ({"type": tag} if (tag := value.__struct_config__.tag) else {}))
    if isinstance(value, dict):
        return [(tree(key), tree(each)) for key, each in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [tree(each) for each in value]
    return msgspec.to_builtins(value)


def is_kept(was: Any, now: Any) -> bool:
    """Whether all of *was* is in *now*, in whichever order a set has it."""
    if isinstance(was, Fields) and isinstance(now, list):
        if all(isinstance(each, tuple) for each in now):
            return is_kept(was, Fields(now))
        now = Fields(zip(was, now, strict=False))
    if isinstance(was, Fields):
        return was.keys() <= now.keys() and all(is_kept(each, now[name]) for name, each in was.items())
    if isinstance(was, list):
        there = list(now.values()) if isinstance(now, Fields) else now
        pairs = zip(was, there, strict=False)
        in_place = all(is_kept(*pair) for pair in pairs)
        return len(was) <= len(there) and (in_place or all(any(is_kept(each, e) for e in there) for each in was))
    if isinstance(was, tuple):
        return all(is_kept(*pair) for pair in zip(was, now, strict=True))
    return bool(was == now or (isinstance(now, float) and float(was) == now) or str(was).lower() == str(now).lower())


def described(type_: Any) -> Any:
    try:
        return describe(type_)
    except UnsupportedType:  # a union of what msgpack writes alike
        reject()


@given(drawn(), st.data())
def test_what_has_no_problem_is_read_without_a_loss(types: Drawn, data: st.DataObject) -> None:
    old, new, values = types
    schemas = described(old), described(new)
    assume(not lost(*schemas, "S"))
    value = data.draw(values)
    try:
        read = msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=new)
    except msgspec.DecodeError:
        return
    assert is_kept(tree(value), tree(read))


@st.composite
def grown(draw: st.DrawFn, depth: int = 2) -> Drawn:
    """A type, the same with fewer fields, and values of the first: each field that goes has a default."""
    form = draw(st.sampled_from(["int", "list", "dict", "optional", "union", "record", "record"] if depth else ["int"]))
    if form == "int":
        return int, int, st.integers(0, 1)
    if form == "record":
        return draw(records_that_grew(depth, "R"))
    if form == "union":
        (one, less, some), (other, least, others) = (draw(records_that_grew(depth, name, tag=True)) for name in "AB")
        return one | other, least | less, some | others
    old, new, values = draw(grown(depth - 1))
    if form == "list":
        return list[old], list[new], st.lists(values, max_size=2)  # type: ignore[valid-type]  # they are drawn
    if form == "dict":
        of = st.dictionaries(st.sampled_from("xy"), values, max_size=2)
        return dict[str, old], dict[str, new], of  # type: ignore[valid-type]  # they are drawn
    return old | None, new | None, values | st.none()


@st.composite
def records_that_grew(draw: st.DrawFn, depth: int, name: str, tag: bool = False) -> Drawn:
    (inner, less, some), (new, _, others) = draw(grown(depth - 1)), draw(grown(depth - 1))
    default = draw(others)
    by_factory = msgspec.field(default_factory=lambda: default)
    gone = [("flag", bool, False), ("few", list[int], []), ("made", new, by_factory)]
    gone += [("added", new, default)] if new is int else []
    config = {"omit_defaults": draw(st.booleans()), "tag": tag or None}
    taken = draw(st.lists(st.sampled_from(gone), max_size=3, unique_by=lambda field: field[0]))
    old = struct(("kept", inner), *taken, name=name, **config)
    values = {"flag": st.booleans(), "few": st.lists(st.integers(0, 1), max_size=1), "added": others, "made": others}
    drawn_fields = {field: values[field] for field in old.__struct_fields__ if field != "kept"}
    return old, struct(("kept", less), name=name, **config), st.builds(old, kept=some, **drawn_fields)


@given(grown(), st.data())
def test_what_goes_by_a_rollback_comes_back_with_the_code(types: Drawn, data: st.DataObject) -> None:
    """A dropped field is named exactly if newer code would not get it back. A factory's default has changed."""
    old, new, values = types
    was, now = describe(old, defaults=True), describe(new, defaults=True)
    unknown = [each for each in lost(was, now, "S", has_default) if not each.endswith(".made")]
    assert unknown == []
    value = data.draw(values)
    packed = msgspec.msgpack.encode(value)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.msgpack.decode(packed, type=new)), type=old)
    named = changed(msgspec.msgpack.decode(packed), described_shape(was), described_shape(now), "S")
    assert bool(named) >= (again != value)
    assert not named or again != value or any(each.endswith(".made") for each in named)


def test_a_default_says_what_may_go() -> None:
    """A bool equals no number here, and None nothing else. Fields without a default, and those of keys, may not go."""
    fields: list[Any] = [("n", int | bool | float | None, None), ("d", dict[int, bytes], {})]
    was = describe(struct(("a", int), *fields), defaults=True)
    now = describe(struct(("a", int)), defaults=True)
    assert lost(was, now, "S", has_default) == []
    for value, named in (
        ({"n": None}, []), ({"n": False}, ["S.n"]), ({"n": 0}, ["S.n"]), ({"n": float("nan")}, ["S.n"]),
        ({"d": {}}, []), ({"d": {1: b"x"}}, ["S.d"]), ({"strange": 1}, ["S.strange"]),
    ):  # fmt: skip
        assert changed({"a": 1} | value, described_shape(was), described_shape(now), "S") == named
    for default, content, same in ((1, 1.0, True), (1, True, False), ((1,), [1], True), ((1,), [True], False)):
        old = describe(struct(("n", Any, default)), defaults=True)
        assert bool(changed({"n": content}, described_shape(old), shape_of(struct()), "S")) != same
    keyed = describe(dict[struct(("x", int), ("y", int, 0), frozen=True), int], defaults=True)  # type: ignore[misc]  # made at run time
    assert lost(keyed, describe(dict[P2, int]), "S", has_default) == ["S.y"]
    assert lost(describe(P1, defaults=True), describe(P2), "S", has_default) == ["S.y"]


@given(drawn())
def test_a_type_reads_itself(types: Drawn) -> None:
    schema = described(types[0])
    assert lost(schema, schema, "S") == unfit(schema, schema, "S") == []

"""State types: mutability, clones, and what may be read as what."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import inspect
import json
import math
from collections.abc import Iterator
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypedDict, TypeVar
from zoneinfo import ZoneInfo

import msgspec
import pytest

from exactlyonce import Emit, Pipeline, Session, Timers, Tumbling
from exactlyonce.connectors import KafkaSource
from exactlyonce.pipeline.versions import VersionedState
from exactlyonce.sinks import KafkaSink
from exactlyonce.state.errors import DamagedState, StateIncompatible, StateUnstorable
from exactlyonce.state.state_type import StateType, json_text

UTC = datetime.timezone.utc
EAST = datetime.timezone(datetime.timedelta(hours=2))


class Frozen(msgspec.Struct, frozen=True):
    sum: int


class Flat(msgspec.Struct):
    sum: int
    name: str = ""


class Nested(msgspec.Struct):
    days: dict[str, list[int]]


class FrozenWithList(msgspec.Struct, frozen=True):
    items: list[int]


class Tree(msgspec.Struct, frozen=True):
    children: tuple[Tree, ...]


class Pair(NamedTuple):
    left: int
    right: str


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass(frozen=True)
class FrozenData:
    sum: int


@dataclasses.dataclass
class Data:
    sum: int


@pytest.mark.parametrize(
    "type_",
    [
        int, float, str, bytes, bool, int | str, datetime.datetime, Color, Literal[1, 2], tuple[int, str],
        tuple[int, ...], frozenset[str], Frozen, Frozen | int, Tree, Pair, FrozenData,
        Annotated[int, msgspec.Meta(ge=0)],
    ],
)  # fmt: skip
def test_immutable_types_are_known(type_: Any) -> None:
    assert not StateType("totals", type_).mutable


@pytest.mark.parametrize(
    ("type_", "state"),
    [
        (list[int], [1]), (set[str], {"a"}), (dict[str, int], {"a": 1}), (bytearray, bytearray(b"a")),
        (list[list[int]], [[1]]), (tuple[list[int], int], ([1], 2)), (Flat, Flat(1)), (Nested, Nested({"mon": [1]})),
        (FrozenWithList, FrozenWithList([1])), (Data, Data(1)), (Flat | int, Flat(1)), (Any, {"a": [1]}),
    ],
)  # fmt: skip
def test_mutable_types_are_cloned(type_: Any, state: Any) -> None:
    state_type = StateType[Any]("totals", type_)
    assert state_type.mutable
    clone = state_type.clone(state)
    assert clone == state
    assert clone is not state
    assert not {id(part) for part in _mutable(clone)} & {id(part) for part in _mutable(state)}


def _mutable(value: Any) -> Iterator[Any]:
    """The parts of a state that may be changed in place."""
    if isinstance(value, msgspec.Struct | Data):
        inner = [getattr(value, name) for name in inspect.signature(type(value)).parameters]
    else:
        inner = list(value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ())
    if not isinstance(value, tuple | Frozen | FrozenWithList | int | str):
        yield value
    for part in inner:
        yield from _mutable(part)


@pytest.mark.parametrize(("type_", "state"), [(int, 1.5), (int, 2**64), (int, object()), (Flat, Frozen("1"))])  # type: ignore[arg-type]  # wrong on purpose
def test_values_of_another_type_are_refused(type_: Any, state: Any) -> None:
    with pytest.raises(StateUnstorable, match=rf"operator 'totals' is not a valid {type_.__name__}"):
        StateType[Any]("totals", type_).encode([state])


class Handler:
    def on_record(self, key: str, state: Flat | None, record: str, timers: Timers, emit: Emit[str]) -> Flat | None:
        return state


WRONG: Any = Frozen("1")  # type: ignore[arg-type]  # on purpose


def mapped(state: Flat | None, record: str) -> tuple[Flat, str]:
    return Flat(1), record


def added(state: Flat, record: str) -> Flat:
    return state


def merged(state: Flat, other: Flat) -> Flat:
    return state


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (lambda keyed: keyed.process("totals", Handler, order="arrival"), (WRONG, False)),
        (lambda keyed: keyed.stateful_map("totals", mapped, ttl="1h"), (7, WRONG)),
        (lambda keyed: keyed.window(Session("1m")).fold("totals", lambda: Flat(0), added, merged), (7, 8, WRONG)),
        (lambda keyed: keyed.window(Tumbling("1m")).fold("totals", lambda: Flat(0), added, merged, early="9s"),
         (None, {7: WRONG})),
    ],
)  # fmt: skip
def test_a_refusal_names_the_users_type_where_more_is_kept(keep: Any, kept: Any) -> None:
    pipeline = Pipeline("p")
    texts = pipeline.source("in", KafkaSource("in", value=str, time=int))
    keep(texts.key_by(lambda text: text)).sink("out", KafkaSink("out", value=str))
    node = pipeline.build().node("totals")
    with pytest.raises(StateUnstorable, match=r"not a valid (Optional\[)?Flat\]?: .* state: return (Optional\[)?Flat"):
        StateType[Any]("totals", node.kept).encode([kept])


class Base(msgspec.Struct):
    sum: int


class Derived(Base):
    note: str


class Silent(Base):
    """Says no more than its base."""


class Numbers(list[int]):
    """A list of its own."""


class Word(str, enum.Enum):
    OPEN = "open"


class Seen(msgspec.Struct):
    at: dict[str, datetime.datetime]
    inner: tuple[Seen, ...] = ()


@dataclasses.dataclass
class Noted:
    sum: int
    note: Any = dataclasses.field(default=None, compare=False)


class Linked(TypedDict, total=False):
    next: Linked
    at: datetime.datetime


class Unset(msgspec.Struct):
    seen: Seen | msgspec.UnsetType | None = msgspec.UNSET
    more: Seen | msgspec.UnsetType = msgspec.UNSET


class ByItself(msgspec.Struct, frozen=True):
    inner: dict[ByItself, Any]


class Data2(TypedDict):
    sum: int


@dataclasses.dataclass
class Odd:
    sum: int
    half: float = 0.0

    def __post_init__(self) -> None:
        self.half += self.sum / 2


@pytest.mark.parametrize(
    ("type_", "state", "why"),
    [
        (Base, Derived(1, "a"), "note"),
        (Data2, {"sum": 1, "more": 2}, "more"),
        (float, 2**53 + 1, "9007199254740992.0"),
        (Odd, Odd(1), "half"),
        (dict, {"pair": (1, 2)}, r"\(1, 2\), and is read as \[1, 2\]"),
        (Any, datetime.date(2026, 1, 1), "2026-01-01"),
        (dict[str, Any], {"a": [{"on": datetime.datetime(2026, 1, 1)}]}, "2026-01-01"),
        (datetime.datetime, datetime.datetime(2026, 1, 1, tzinfo=EAST), "2025, 12, 31, 22, .*keep it in UTC"),
        (Seen, Seen({}, (Seen({"a": datetime.datetime(2026, 1, 1, tzinfo=EAST)}),)), "keep it in UTC"),
        (Linked, {"next": {"next": {"at": datetime.datetime(2026, 1, 1, tzinfo=EAST)}}}, "keep it in UTC"),
        (dict, {"state": Word.OPEN}, "OPEN.* is read as 'open'"),
        (dict[str, int], collections.Counter("aab"), "Counter.* is read as a dict"),
        (dict[str, list[int]], {"a": Numbers([1])}, "is read as a list"),
        (tuple[int, str], Pair(1, "a"), "Pair.* is read as a tuple"),
        (list[int], {1}, "is read as a list"),
        (bytes | None, bytearray(b"ab"), "is read as a bytes"),
        (tuple[int, int], [1, 2], "is read as a tuple"),
        (frozenset[int], {1}, "is read as a frozenset"),
        (set[int], frozenset((1,)), "is read as a set"),
        (datetime.datetime, datetime.datetime(2026, 10, 25, 2, 30, fold=1), "keep it in UTC"),
        (datetime.time | None, datetime.time(2, 30, fold=1), "keep it in UTC"),
        (Base | int, Silent(1), "Silent.* is read as a Base"),
        (Noted, Noted(1, (1, 2)), r"is read as \[1, 2\]"),
    ],
)
def test_what_would_come_back_as_something_else_is_refused(type_: Any, state: Any, why: str) -> None:
    state_type = StateType[Any]("totals", type_)
    for encode in (state_type.encode, state_type.pack):
        with pytest.raises(StateUnstorable, match=rf"operator 'totals' would not come back .* as it was: .*{why}"):
            encode([state])


@pytest.mark.parametrize(
    ("type_", "state"),
    [
        (float, 1),
        (float, math.nan),
        (set[str], set("abcdefghij")),
        (tuple[datetime.datetime, set[str]], (datetime.datetime(2026, 1, 1, tzinfo=UTC), set("abcdefghij"))),
        (dict[str, datetime.datetime], {"a": datetime.datetime(2026, 1, 1, tzinfo=ZoneInfo("UTC"))}),
        (Any, [datetime.datetime(2026, 1, 1, tzinfo=UTC)]),
        (datetime.datetime | int, datetime.datetime(2026, 1, 1)),
        (ByItself, ByItself({})),
        (Unset, Unset()),
        (Unset, Unset(None)),
        (Word, Word.OPEN),
        (dict[Word, frozenset[float]], {Word.OPEN: frozenset((0.5, 1.0))}),
        (dict, {"a": [1, 2.5, None, {"b": b"c", 3: math.nan}]}),
        (dict, {("a", 1): "b"}),
        (dict[tuple[str, Any], Any], {("a", (1, 2)): "b"}),
        (Nested, Nested({"mon": []})),
        (Any, None),
    ],
)
def test_what_comes_back_as_it_was_is_taken(type_: Any, state: Any) -> None:
    state_type = StateType[Any]("totals", type_)
    (read,) = state_type.decode(state_type.encode([state]), state_type.schema)
    assert state_type.pack([read]) == state_type.pack([read])


def _versions() -> tuple[Any, Any, Any, Any]:
    first = msgspec.defstruct("Total", [("sum", int), ("name", str)])
    grown = msgspec.defstruct("Total", [("sum", int), ("name", str), ("count", int, 0)])
    renamed = msgspec.defstruct("Total", [("name", str), ("total", int, 0)])
    demanding = msgspec.defstruct("Total", [("sum", int), ("name", str), ("count", int)])
    return first, grown, renamed, demanding


def test_a_new_field_with_a_default_is_compatible() -> None:
    first, grown, _, _ = _versions()
    old, new = StateType[Any]("totals", first), StateType[Any]("totals", grown)
    new.require_readable(old.schema)
    assert new.decode(old.encode([first(1, "a")]), old.schema) == [grown(1, "a", 0)]


def test_a_lost_field_is_an_error_even_if_the_rest_decodes() -> None:
    first, _, renamed, _ = _versions()
    pairs = [(first, renamed), (list[first], list[renamed]), (dict[str, first | int], dict[str, renamed | int])]  # type: ignore[valid-type]  # made at run time
    for old, new in pairs:
        with pytest.raises(StateIncompatible, match=r"operator 'totals'.*\.sum would be lost.*Keep every old field"):
            StateType("totals", new).require_readable(StateType("totals", old).schema)


def test_a_field_that_has_its_default_may_go() -> None:
    """Code of before reads the states of newer code, and never writes beside them: what it drops does not come back."""
    first, grown, _, _ = _versions()
    before, after = StateType[Any]("totals", first), StateType[Any]("totals", grown)
    before.require_readable(after.schema)
    assert before.decode(after.encode([grown(1, "a"), grown(2, "b", 0)]), after.schema) == [
        first(1, "a"),
        first(2, "b"),
    ]
    assert before.dropped(after.schema, 1) == ["Total.count"]
    assert not before.may_share_chain(after.schema, 1)
    assert after.may_share_chain(before.schema, 1)


def test_a_field_that_has_not_its_default_goes_only_where_it_is_given_up() -> None:
    first, grown, _, _ = _versions()
    before, after = StateType[Any]("totals", first), StateType[Any]("totals", grown)
    written = after.encode([grown(1, "a"), grown(2, "b", 7), grown(3, "c", 8)])
    refusal = (
        r"operator 'totals' has fields that Total does not have: Total\.count\. In 2 of .*3 keys.*--allow-dropped-fi"
    )
    for read in (before.decode, before.split):
        with pytest.raises(StateIncompatible, match=refusal):
            read(written, after.schema, 1)
    giving_up = StateType[Any]("totals", VersionedState(first, drops_fields=True))
    assert giving_up.decode(written, after.schema) == [first(1, "a"), first(2, "b"), first(3, "c")]
    assert not giving_up.may_share_chain(after.schema, 1)


def test_a_field_without_a_known_default_goes_only_where_it_is_given_up() -> None:
    first, _, _, demanding = _versions()
    by_factory = msgspec.defstruct(
        "Total", [("sum", int), ("name", str), ("at", int, msgspec.field(default_factory=int))]
    )
    for grown in (demanding, by_factory):
        with pytest.raises(StateIncompatible, match="would be lost"):
            StateType[Any]("totals", first).require_readable(StateType("totals", grown).schema)
        giving_up = StateType[Any]("totals", VersionedState(first, drops_fields=True))
        giving_up.require_readable(StateType("totals", grown).schema)
    placed = msgspec.defstruct("Total", [("sum", int), ("name", str), ("count", int, 0)], array_like=True)
    fewer = msgspec.defstruct("Total", [("sum", int), ("name", str)], array_like=True)
    giving_up = StateType[Any]("totals", VersionedState(fewer, drops_fields=True))
    with pytest.raises(StateIncompatible, match="stored by position"):
        giving_up.require_readable(StateType("totals", placed).schema)


def test_a_new_field_without_a_default_is_an_error() -> None:
    first, _, _, demanding = _versions()
    old, new = StateType[Any]("totals", first), StateType[Any]("totals", demanding)
    with pytest.raises(StateIncompatible, match=r"Total\.count is new and has no default.*It was written as"):
        new.require_readable(old.schema)
    with pytest.raises(StateIncompatible, match=r"`count`.*It was written as .*the pipeline now declares"):
        new.decode(old.encode([first(1, "a")]), old.schema)


def test_bytes_of_the_same_type_that_do_not_decode_are_damage() -> None:
    """Only a change of type is the user's to fix; anything else is a damaged block."""
    state_type = StateType[int]("totals", int)
    for bad in (b"", b"\x91", b"\x91\xa1a", b"\xdd\xff\xff\xff\xff"):
        with pytest.raises(DamagedState, match="operator 'totals'"):
            state_type.decode(bad, state_type.schema)


def test_an_older_version_is_migrated_step_by_step() -> None:
    first = msgspec.defstruct("Total", [("sum", int), ("name", str)])
    last = msgspec.defstruct("Total", [("cents", int), ("count", int, 1)])

    def to_second(state: dict[str, Any]) -> dict[str, Any]:
        return {"cents": 100 * state["sum"]}

    old = StateType[Any]("totals", first)
    new = StateType[Any]("totals", VersionedState(last, 3, {1: to_second}))
    written = old.encode([first(7, "ann")])
    new.require_readable(old.schema, 1)
    assert new.decode(written, old.schema, 1) == [last(700, 1)]
    with pytest.raises(StateIncompatible, match="of version 4, and the pipeline knows version 3"):
        new.require_readable(old.schema, 4)


def test_a_migration_takes_the_type_that_it_names() -> None:
    def migrate(state: int) -> int:
        return 100 // state

    new = StateType[int]("totals", VersionedState(int, 2, {1: migrate}))
    assert new.decode(StateType[int]("totals", int).encode([5]), "int", 1) == [20]
    with pytest.raises(StateIncompatible, match=r"migration of version 1 .* operator 'totals' failed: ZeroDivision"):
        new.decode(StateType[int]("totals", int).encode([0]), "int", 1)


def test_a_new_version_may_drop_fields() -> None:
    old = StateType[Any]("totals", msgspec.defstruct("Total", [("sum", int), ("name", str)]))
    shorter = msgspec.defstruct("Total", [("sum", int)])
    with pytest.raises(StateIncompatible, match=r"Total\.name would be lost"):
        StateType("totals", shorter).require_readable(old.schema, 1)
    StateType("totals", VersionedState(shorter, 2)).require_readable(old.schema, 1)
    with pytest.raises(StateIncompatible, match=r"operator 'totals' .*Total\.sum is str now, and was int"):
        StateType("totals", msgspec.defstruct("Total", [("sum", str), ("name", str)])).require_readable(old.schema, 1)
    StateType("totals", msgspec.defstruct("Total", [("sum", float), ("name", str)])).require_readable(old.schema, 1)


T = TypeVar("T")


class Box(msgspec.Struct, Generic[T]):
    value: T


def test_a_record_of_a_generic_type() -> None:
    states = StateType[Any]("totals", dict[str, Box[int]])
    assert states.decode(states.encode([{"a": Box(1)}]), states.schema) == [{"a": Box(1)}]
    assert StateType[Any]("totals", Box[int]).clone(Box(1)) == Box(1)
    with pytest.raises(StateUnstorable, match="not a valid"):
        StateType[Any]("totals", Box[int]).encode([Box("a")])


def test_what_a_new_version_takes_out_is_not_in_its_chain() -> None:
    """Else keys that have not changed since would have it back, once a field has its name again."""
    first, second, third = (
        msgspec.defstruct("Total", [("sum", int), *more]) for more in ([("count", int)], [], [("count", int, 0)])
    )
    schema = StateType[Any]("totals", first).schema
    assert not StateType[Any]("totals", VersionedState(second, 2)).may_share_chain(schema, 1)
    assert not StateType[Any]("totals", VersionedState(third, 2)).may_share_chain(schema, 1)
    assert StateType[Any]("totals", third).may_share_chain(schema, 1)


def test_keys_are_named_at_every_depth() -> None:
    value = {"days": [{(1, (True, None)): {False: b"\x00"}}, {2.5: "half", "[1]": 1}]}
    shown = {"days": [{"[1,[true,null]]": {"false": "AA=="}}, {"2.5": "half", "[1]": 1}]}
    assert json.loads(json_text(value)) == shown


def test_states_of_an_older_version_by_avro_are_refused() -> None:
    """Whatever the version: they are never misread, and the way to read them is named."""
    state_type = StateType[int]("totals", VersionedState(int, 2, {1: int}))
    for version in (1, 2):
        with pytest.raises(
            StateIncompatible, match=r"operator 'totals' is kept by an Avro schema.*Run the pipeline once"
        ):
            state_type.require_readable({"avro": "long"}, version)
        with pytest.raises(StateIncompatible, match=r"operator 'totals' is kept by an Avro schema"):
            state_type.decode(b"\x91\xc4\x01\x02", {"avro": "long"}, version)

"""Types of keys: which keys of one are keys of another, by what is written of them."""

from __future__ import annotations

from datetime import datetime, timezone
from enum import Enum
from typing import Any, Literal, NamedTuple
from uuid import UUID

import msgspec
import pytest

from exactlyonce import Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.keys import canonical_key, heads_of, holds_keys, key_schema
from exactlyonce.sinks import KafkaSink


class Shop(msgspec.Struct, frozen=True):
    city: str
    number: int


class Place(msgspec.Struct, frozen=True):
    number: int
    city: str


class Mapped(msgspec.Struct, frozen=True, array_like=True, tag=True):
    city: str
    number: int


class Pair(NamedTuple):
    city: str
    number: int


class Colour(Enum):
    RED = "red"


def struct(name: str, *fields: Any, **config: Any) -> Any:
    return msgspec.defstruct(name, fields, frozen=True, **config)


SAME: list[tuple[Any, Any]] = [
    (str, str), (str, str | None), (int | str, str | int | None), (str, Colour), (Colour, str),
    (Literal[1, None], int | None), (tuple[str, int], tuple[str, int]), (tuple[str, int], Pair),
    (Pair, tuple[str, int | None]), (tuple[str, int], tuple[Any, int]), (frozenset[str], frozenset[str | int]),
    (Shop, struct("Branch", ("city", str), ("number", int))), (Any, int), (int, Any), (UNKNOWN, int), (int, UNKNOWN),
    (int, object),
]  # fmt: skip
"""Types of which the second reads the keys of the first."""
OTHER: list[tuple[Any, Any]] = [
    (str, int), (int, float), (bool, int), (str, datetime), (str | None, str), (Literal[1, "a"], str),
    (tuple[str, int], tuple[int, str]), (tuple[str, int], tuple[str, int, int]), (list[str], list[int]),
    (frozenset[str], list[str]), (dict[str, int], dict[str, str]), (Shop, Place), (Shop, Mapped),
    (Mapped, struct("Mapped", ("number", int), ("city", str), array_like=True, tag=True)),
    (Shop, struct("Shop", ("city", str))), (Shop, struct("Shop", ("city", str), ("number", str))),
    (struct("S", ("n", int, 0), omit_defaults=True), struct("S", ("n", int, 1), omit_defaults=True)), (Shop, str),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "holds"), [(*each, True) for each in SAME] + [(*each, False) for each in OTHER])
def test_keys_of_another_type(old: Any, new: Any, holds: bool) -> None:
    """Names of classes, and what wraps a value, are not in the bytes; all else is."""
    assert holds_keys(key_schema(new), key_schema(old)) is holds


@pytest.mark.parametrize(
    ("type_", "keys", "others"),
    [
        (str, ["", "a" * 300, Colour.RED, UUID(int=1)], [b"a", 1, None, ("a",)]),
        (bytes, [b"", b"a" * 300], ["a", 1]),
        (int, [-1, 200, 2**63], ["1", 1.0, True]),
        (float, [0.5, 1], ["1", False]),
        (Colour, [Colour.RED, "red"], [1]),
        (str | None, ["a", None], [b"a"]),
        (UUID | int, [UUID(int=1), 1, "text"], [b"a"]),
        (datetime, [datetime(2026, 1, 1), datetime(2026, 1, 1, tzinfo=timezone.utc)], [1, b"a"]),
        (tuple[str, int], [("a", 1), Pair("a", 1)], ["a", 1]),
        (Shop, [Shop("Ulm", 1)], ["Ulm", 1]),
    ],
)
def test_the_first_byte_tells_keys_of_another_type(type_: Any, keys: list[Any], others: list[Any]) -> None:
    heads = heads_of(key_schema(type_))
    assert heads is not None
    assert all(heads[canonical_key(key)[0]] for key in keys)
    assert not any(heads[canonical_key(key)[0]] for key in others)


@pytest.mark.parametrize("type_", [Any, UNKNOWN, object, str | Any])
def test_any_byte_begins_keys_of_unknown_types(type_: Any) -> None:
    assert heads_of(key_schema(type_)) is None


def test_what_is_written_alike() -> None:
    assert canonical_key(Shop("Ulm", 1)) == canonical_key(struct("Branch", "city", "number")("Ulm", 1))
    assert canonical_key(Shop("Ulm", 1)) != canonical_key(Place(1, "Ulm"))
    assert canonical_key(Pair("Ulm", 1)) == canonical_key(("Ulm", 1))
    assert canonical_key(Colour.RED) == canonical_key("red")


def customer(order: str) -> str:
    return order


def test_what_keeps_state_knows_its_keys() -> None:
    pipeline = Pipeline("totals")
    orders = pipeline.source("orders", KafkaSource("orders", value=str))
    for name, key in (("known", customer), ("unknown", lambda order: order)):
        orders.key_by(key).reduce(name, max).sink(f"{name}-out", KafkaSink(name))
    found = pipeline.build()
    assert [found.node(name).kept.keys for name in ("known", "unknown")] == ["str", None]

"""Types of keys: which keys of one are keys of another, by what is written of them."""

from __future__ import annotations

from datetime import datetime
from enum import Enum
from typing import Any, Literal, NamedTuple

import msgspec
import pytest

from exactlyonce import Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.pipeline import key_types
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.key_types import described
from exactlyonce.pipeline.keys import canonical_key
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


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (str, str, True),
        (str, int, False),
        (int, float, False),
        (bool, int, False),
        (str, datetime, False),
        (str, str | None, True),
        (str | None, str, False),
        (int | str, str | int | None, True),
        (str, Colour, True),
        (Colour, str, True),
        (Literal[1, "a"], str, False),
        (Literal[1, None], int | None, True),
        (tuple[str, int], tuple[str, int], True),
        (tuple[str, int], tuple[int, str], False),
        (tuple[str, int], tuple[str, int, int], False),
        (tuple[str, int], Pair, True),
        (Pair, tuple[str, int | None], True),
        (tuple[str, int], tuple[Any, int], True),
        (list[str], list[int], False),
        (frozenset[str], frozenset[str | int], True),
        (frozenset[str], list[str], False),
        (dict[str, int], dict[str, str], False),
        (Shop, Place, False),
        (Shop, struct("Branch", ("city", str), ("number", int)), True),
        (Shop, Mapped, False),
        (Mapped, struct("Mapped", ("number", int), ("city", str), array_like=True, tag=True), False),
        (Shop, struct("Shop", ("city", str)), False),
        (Shop, struct("Shop", ("city", str), ("number", str)), False),
        (struct("S", ("n", int, 0), omit_defaults=True), struct("S", ("n", int, 1), omit_defaults=True), False),
        (Shop, str, False),
        (Any, int, True),
        (int, Any, True),
        (UNKNOWN, int, True),
        (int, UNKNOWN, True),
        (int, object, True),
    ],
)  # fmt: skip
def test_keys_of_another_type(old: Any, new: Any, expected: bool) -> None:
    """Names of classes, and what wraps a value, are not in the bytes; all else is."""
    assert key_types.holds(described(new), described(old)) is expected


def test_what_is_written_alike() -> None:
    """It is one key; fields are written in their order."""
    assert canonical_key(Shop("Ulm", 1)) == canonical_key(struct("Branch", "city", "number")("Ulm", 1))
    assert canonical_key(Shop("Ulm", 1)) != canonical_key(Place(1, "Ulm"))
    assert canonical_key(Pair("Ulm", 1)) == canonical_key(("Ulm", 1))
    assert canonical_key(Colour.RED) == canonical_key("red")


def customer(order: str) -> str:
    """A key."""
    return order


def test_what_keeps_state_knows_its_keys() -> None:
    """By the annotation of the function of `key_by`, and not without."""
    pipeline = Pipeline("totals")
    orders = pipeline.source("orders", KafkaSource("orders", value=str))
    for name, key in (("known", customer), ("unknown", lambda order: order)):
        orders.key_by(key).reduce(name, max).sink(f"{name}-out", KafkaSink(name))
    found = pipeline.build()
    assert [found.node(name).kept.keys for name in ("known", "unknown")] == ["str", None]

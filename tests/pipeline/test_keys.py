"""Canonical keys and key groups."""

from __future__ import annotations

import dataclasses
import enum
import struct
import uuid
from datetime import datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.partitioner.default import murmur2

from exactlyonce.pipeline.keys import canonical_key, key_group, key_groups

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=5
)


class Point(msgspec.Struct):
    x: int
    y: int


@dataclasses.dataclass
class Place:
    x: int
    y: int


class Colour(enum.Enum):
    RED = "red"


def test_equal_text_of_other_type_is_another_key() -> None:
    assert len(set(map(canonical_key, [1, "1", True, 1.0, b"1", None]))) == 6


def typed(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: typed(item) for name, item in value.items()}
    if isinstance(value, list):
        return [typed(item) for item in value]
    return (type(value), struct.pack(">d", value) if isinstance(value, float) else value)


@given(values, values)
def test_two_values_share_a_key_only_if_they_are_the_same(left: Any, right: Any) -> None:
    assert (canonical_key(left) == canonical_key(right)) == (typed(left) == typed(right))


dicts = st.dictionaries(st.text(), values, max_size=4)


@given(dicts.flatmap(lambda key: st.tuples(st.just(key), st.permutations([*key]))))
def test_the_order_of_a_dict_does_not_matter(keys: tuple[dict[str, Any], list[str]]) -> None:
    key, order = keys
    assert canonical_key({name: key[name] for name in order}) == canonical_key(key)


@given(st.sets(st.integers()).filter(lambda key: all(-(2**63) <= item < 2**64 for item in key)) | st.sets(st.text()))
def test_the_order_of_a_set_does_not_matter(key: set[Any]) -> None:
    assert canonical_key(key) == canonical_key(frozenset(key)) == canonical_key(sorted(key))


def test_what_msgpack_writes_alike_is_one_key() -> None:
    """And an instant, whatever the time zone in which it is said."""
    number, utc = uuid.UUID(int=7), datetime(2026, 1, 1, tzinfo=timezone.utc)
    pairs = [((1, 2), [1, 2]), (Colour.RED, "red"), (number, str(number)), (Point(1, 2), Place(1, 2))]
    for left, right in [*pairs, (utc, utc.astimezone(timezone(timedelta(hours=5))))]:
        assert canonical_key(left) == canonical_key(right)


@pytest.mark.parametrize("key", [2**64, -(2**63) - 1, {1: 2}, {1, "a"}, object()])
def test_what_has_no_canonical_encoding_is_refused(key: Any) -> None:
    with pytest.raises((TypeError, OverflowError)):
        canonical_key(key)


@given(st.lists(st.binary(max_size=70)), st.integers(1, 32_768) | st.sampled_from([2, 64, 128, 256]))
def test_a_batch_of_any_lengths_has_the_groups_of_kafkas_murmur2(keys: list[bytes], max_parallelism: int) -> None:
    expected = [(murmur2(key) & 0x7FFFFFFF) % max_parallelism for key in keys]
    assert key_groups(keys, max_parallelism) == expected
    assert [key_group(key, max_parallelism) for key in keys] == expected

"""Restoring: what is read, what is refused, and that a restored table goes on as the old one would."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Any

import msgspec
import pytest

from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.pipeline.errors import InvariantViolation
from exactlyonce.pipeline.keys import canonical_key, key_group
from exactlyonce.state import blocks
from exactlyonce.state.backend import Table
from exactlyonce.state.chain import Chain, decode_index, encode_index
from exactlyonce.state.errors import DamagedState, StateIncompatible
from exactlyonce.state.hash_map import KeyedTable
from exactlyonce.state.key_groups import group_range, mask_of
from exactlyonce.state.stored import StoredState


class Total(msgspec.Struct):
    sum: int


def _add(total: int | None, amount: int) -> tuple[int, int]:
    total = (total or 0) + amount
    return total, total


def _table(count: int, groups: int = 128) -> Table[int]:
    table: Table[int] = KeyedTable(
        StoredState(operator="totals", type=int, groups=range(groups), max_parallelism=groups)
    )
    keys = [canonical_key(f"customer-{number:07}") for number in range(count)]
    table.apply(_add, keys, list(range(count)))
    return table


def test_a_reader_of_one_group_reads_its_share(topic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 150_000
    monkeypatch.setattr(blocks, "RAW_TARGET", blocks.RAW_TARGET * count // 1_000_000)
    table: Table[int] = KeyedTable(StoredState(operator="totals", type=int, groups=range(128), max_parallelism=128))
    table.apply(_add, [canonical_key(f"customer-{number:07}") for number in range(count)], list(range(count)))
    index = topic.write(table.freeze(1, 0))
    table = topic.restored(index, touched=[77])
    assert sum(1 for _ in table.items()) > count / 200
    assert topic.bytes_read + sum(map(len, index)) <= 2 / 128 * sum(map(len, topic.bodies.values()))


def _key_of(group: int) -> bytes:
    return next(key for key in map(canonical_key, range(10_000)) if key_group(key, 128) == group)


KEYS = 20_000


def test_groups_that_are_not_touched_are_carried_over_unread(topic: Any) -> None:
    whole = topic.write(_table(KEYS).freeze(1, 0))
    image = list(topic.bodies)
    indexes: list[bytes] = []
    for subtask in range(3):
        groups = group_range(subtask, 3, 128)
        touched = [groups[5], groups[6]]
        topic.read.clear()
        table = topic.restored(whole, 1, groups, 128, touched=touched)
        assert {key_group(key, 128) for key, _ in table.items()} == set(touched)
        assert topic.bytes_read <= 3 * max(ref.size for ref in image)
        table.apply(_add, [_key_of(groups[6])], [1_000_000])
        snapshot = table.freeze(2, 1)
        indexes += topic.write(snapshot)
        held = [block.groups for block in snapshot.chain.blocks]
        assert mask_of(groups) == reduce(or_, held), "no block is listed for groups of other subtasks"
        assert held[-1] == mask_of([groups[6]])
    assert len(topic.bodies) == len(image) + 3
    expected = dict(_table(KEYS).items()) | {_key_of(group_range(each, 3, 128)[6]): 1_000_000 for each in range(3)}
    assert dict(topic.restored(indexes, 2).items()) == expected


@pytest.mark.parametrize(
    "use", [lambda table, key: table.apply(_add, [key], [1]), lambda table, key: table.reduce(max, [key], [1])]
)
def test_what_was_not_restored_is_not_touched(use: Callable[[Table[int], bytes], Any], topic: Any) -> None:
    index = topic.write(_table(1_000).freeze(1, 0))
    table = topic.restored(index, 1, range(64), 128, touched={7, 9})
    use(table, _key_of(7))
    with pytest.raises(InvariantViolation, match=r"the key groups \{8\} are"):
        use(table, _key_of(8))
    with pytest.raises(InvariantViolation, match="among them"):
        topic.restored(index, 1, range(64), 128, touched={64})


def test_an_index_that_is_not_true_is_damage(topic: Any) -> None:
    whole = decode_index(*topic.write(_table(20).freeze(1, 0)))
    for change in ({"checkpoint": 0}, {"images": 0}, {"groups": mask_of(range(128))}):
        lie = Chain(msgspec.structs.replace(block, **change) for block in whole.blocks)
        with pytest.raises(DamagedState, match="which its index says"):
            topic.restored(encode_index(lie, whole.head))


def _first_missing(found: list[tuple[BlockRef, bytes]]) -> list[tuple[BlockRef, bytes]]:
    return found[1:]


def _foreign(found: list[tuple[BlockRef, bytes]]) -> list[tuple[BlockRef, bytes]]:
    return [(ref, body.replace(b"totals", b"counts")) for ref, body in found]


def _cut(found: list[tuple[BlockRef, bytes]]) -> list[tuple[BlockRef, bytes]]:
    return [(ref, body[:-9]) for ref, body in found]


@pytest.mark.parametrize(
    ("asked", "change", "why"),
    [
        ({"operator": "counts"}, list, "operator 'counts' at checkpoint 1 turned out to be that of operator 'totals'"),
        ({"checkpoint": 2}, list, "at checkpoint 2 turned out to be that of operator 'totals' at checkpoint 1"),
        ({}, _first_missing, "1 blocks of operator 'totals' are missing, the first is block/1/1/totals"),
        ({}, _foreign, "does not hold that state of operator 'totals' which its index says"),
        ({}, _cut, "A block of state is damaged"),
    ],
)
def test_what_is_not_what_it_should_be_is_damage(
    asked: dict[str, Any], change: Callable[[Any], Any], why: str, topic: Any
) -> None:
    index = topic.write(_table(100).freeze(1, 0))
    with pytest.raises(DamagedState, match=why):
        topic.restored(index, fetch=lambda refs: change(list(topic.fetch(refs))), **asked)


def test_another_type_or_layout_is_the_users_to_fix(topic: Any) -> None:
    index = topic.write(_table(100).freeze(1, 0))
    with pytest.raises(StateIncompatible, match=r'operator \'totals\' cannot be read as Total.*written as "int"'):
        topic.restored(index, type_=Total)
    with pytest.raises(StateIncompatible, match=r"max_parallelism 128, the pipeline asks for 64.*set it to 128"):
        topic.restored(index, 1, range(64))

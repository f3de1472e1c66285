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
from exactlyonce.state.backend import Table
from exactlyonce.state.chain import Chain
from exactlyonce.state.errors import DamagedState, StateIncompatible
from exactlyonce.state.hash_map import HashMapBackend
from exactlyonce.state.index import decode_index, encode_index
from exactlyonce.state.key_groups import group_range, mask_of, subtask_of
from exactlyonce.state.restore import restore
from exactlyonce.state.table import KeyedTable


class Total(msgspec.Struct):
    sum: int


def _add(total: int | None, amount: int) -> tuple[int, int]:
    total = (total or 0) + amount
    return total, total


def _table(count: int, groups: int = 128) -> Table[int]:
    table: Table[int] = KeyedTable("totals", int, range(groups), groups)
    keys = [canonical_key(f"customer-{number:07}") for number in range(count)]
    table.apply(_add, keys, list(range(count)))
    return table


def test_a_restored_table_goes_on_with_increments(topic: Any) -> None:
    """After a restore the next snapshot writes only what changed since, and its chain builds on the old one."""
    table = _table(5_000)
    table = restore(
        "totals", int, range(128), 128, 1, topic.write_all(table.freeze(1, 0)), topic.fetch, backend=HashMapBackend()
    )
    written = len(topic.bodies)
    table.apply(_add, [canonical_key("customer-0000007")], [1])
    snapshot = table.freeze(2, 1)
    index = topic.write_all(snapshot)
    assert len(topic.bodies) == written + 1
    again = restore("totals", int, range(128), 128, 2, index, topic.fetch, backend=HashMapBackend())
    assert dict(again.items()) == dict(table.items())
    assert again.get(canonical_key("customer-0000007")) == 8


def test_an_empty_state_is_restored_from_nothing(topic: Any) -> None:
    """With no index at all the table is empty, and its checkpoint is a base."""
    table = restore("totals", int, range(4), 4, 9, (), topic.fetch, backend=HashMapBackend())
    assert dict(table.items()) == {}
    assert topic.write_all(table.freeze(10, 9)) == ()


@pytest.mark.parametrize("path", [(1, 3, 2), (4, 1, 3, 8)])
def test_state_moves_between_parallelisms(path: tuple[int, ...], topic: Any) -> None:
    """State written by any number of subtasks is restored by any other, also several times, and goes on from there."""
    keys = [canonical_key(number) for number in range(500)]
    model: dict[bytes, int] = {}
    indexes: list[bytes] = []
    for checkpoint, parallelism in enumerate(path, 1):
        tables = [
            restore(
                "totals",
                int,
                group_range(each, parallelism, 8),
                8,
                checkpoint - 1,
                indexes,
                topic.fetch,
                backend=HashMapBackend(),
            )
            for each in range(parallelism)
        ]
        assert {key: state for table in tables for key, state in table.items()} == model
        for key in keys[checkpoint :: checkpoint + 1]:
            model[key] = model.get(key, 0) + checkpoint
            tables[subtask_of(key_group(key, 8), parallelism, 8)].apply(_add, [key], [checkpoint])
        indexes = [part for table in tables for part in topic.write_all(table.freeze(checkpoint, checkpoint - 1))]


def test_groups_are_as_their_owner_left_them(topic: Any) -> None:
    """A block that two subtasks inherited is read for each group as its owner left it."""
    table = _table(60, groups=2)
    index = topic.write_all(table.freeze(1, 0))
    halves = [
        restore("totals", int, range(each, each + 1), 2, 1, index, topic.fetch, backend=HashMapBackend())
        for each in range(2)
    ]
    for key in [key for key, _ in halves[0].items()]:
        halves[0].apply(lambda *_: (None, None), [key], [0])
    indexes = [part for half in halves for part in topic.write_all(half.freeze(2, 1))]
    whole = restore("totals", int, range(2), 2, 2, indexes, topic.fetch, backend=HashMapBackend())
    assert dict(whole.items()) == dict(halves[1].items())


@pytest.mark.exhaustive(but=["str"])
@pytest.mark.slow
@pytest.mark.parametrize("name", [str, "customer-{:07}".format])
def test_a_reader_of_one_group_reads_its_share(name: Callable[[int], str], topic: Any) -> None:
    """Of an image of a million keys in 128 groups and its index, at most two in 128 bytes are read for one group."""
    table: Table[int] = KeyedTable("totals", int, range(128), 128)
    table.apply(_add, [canonical_key(name(number)) for number in range(1_000_000)], list(range(1_000_000)))
    index = topic.write_all(table.freeze(1, 0))
    table = restore("totals", int, range(128), 128, 1, index, topic.fetch, [77], backend=HashMapBackend())
    assert sum(1 for _ in table.items()) > 5_000
    assert topic.bytes_read + sum(map(len, index)) <= 2 / 128 * sum(map(len, topic.bodies.values()))


def _key_of(group: int) -> bytes:
    return next(key for key in map(canonical_key, range(10_000)) if key_group(key, 128) == group)


def test_groups_that_are_not_touched_are_carried_over_unread(topic: Any) -> None:
    """Whoever restores some groups reads their blocks alone, writes what changed of them, and refers to all others."""
    whole = topic.write_all(_table(100_000).freeze(1, 0))
    image = list(topic.bodies)
    indexes: list[bytes] = []
    for subtask in range(3):
        groups = group_range(subtask, 3, 128)
        touched = [groups[5], groups[6]]
        topic.bytes_read = 0
        table = restore("totals", int, groups, 128, 1, whole, topic.fetch, touched, backend=HashMapBackend())
        assert {key_group(key, 128) for key, _ in table.items()} == set(touched)
        assert topic.bytes_read <= 3 * max(ref.size for ref in image)
        table.apply(_add, [_key_of(groups[6])], [1_000_000])
        snapshot = table.freeze(2, 1)
        indexes += topic.write_all(snapshot)
        held = [block.groups for block in snapshot.chain.blocks]
        assert mask_of(groups) == reduce(or_, held), "no block is listed for groups of other subtasks"
        assert held[-1] == mask_of([groups[6]])
    assert len(topic.bodies) == len(image) + 3
    expected = dict(_table(100_000).items()) | {_key_of(group_range(each, 3, 128)[6]): 1_000_000 for each in range(3)}
    assert (
        dict(restore("totals", int, range(128), 128, 2, indexes, topic.fetch, backend=HashMapBackend()).items())
        == expected
    )


@pytest.mark.parametrize(
    "use", [lambda table, key: table.apply(_add, [key], [1]), lambda table, key: table.reduce(max, [key], [1])]
)
def test_what_was_not_restored_is_not_touched(use: Callable[[Table[int], bytes], Any], topic: Any) -> None:
    """A record of a group that was not restored is a defect: it never meets an empty state. So is a foreign group."""
    index = topic.write_all(_table(1_000).freeze(1, 0))
    table = restore("totals", int, range(64), 128, 1, index, topic.fetch, {7, 9}, backend=HashMapBackend())
    use(table, _key_of(7))
    with pytest.raises(InvariantViolation, match=r"all keys are of the key groups \[7, 9\]"):
        use(table, _key_of(8))
    with pytest.raises(InvariantViolation, match="among them"):
        restore("totals", int, range(64), 128, 1, index, topic.fetch, {64}, backend=HashMapBackend())


def test_an_index_that_is_not_true_is_damage(topic: Any) -> None:
    """A block must be of the checkpoint that its index says, and an image of no more and no fewer groups."""
    whole = decode_index(*topic.write_all(_table(20).freeze(1, 0)))
    for change in ({"checkpoint": 0}, {"images": 0}, {"groups": mask_of(range(128))}):
        lie = Chain(msgspec.structs.replace(block, **change) for block in whole.blocks)
        with pytest.raises(DamagedState, match="which its index says"):
            restore(
                "totals", int, range(128), 128, 1, encode_index(lie, whole.head), topic.fetch, backend=HashMapBackend()
            )


def _other_operator(index: bytes, fetch: Any) -> None:
    restore("counts", int, range(128), 128, 1, [index], fetch, backend=HashMapBackend())


def _other_checkpoint(index: bytes, fetch: Any) -> None:
    restore("totals", int, range(128), 128, 2, [index], fetch, backend=HashMapBackend())


def _missing_block(index: bytes, fetch: Any) -> None:
    restore("totals", int, range(128), 128, 1, [index], lambda refs: list(fetch(refs))[1:], backend=HashMapBackend())


def _foreign_block(index: bytes, fetch: Any) -> None:
    def swapped(refs: list[BlockRef]) -> list[tuple[BlockRef, bytes]]:
        return [(ref, body.replace(b"totals", b"counts")) for ref, body in fetch(refs)]

    restore("totals", int, range(128), 128, 1, [index], swapped, backend=HashMapBackend())


def _cut_block(index: bytes, fetch: Any) -> None:
    restore(
        "totals",
        int,
        range(128),
        128,
        1,
        [index],
        lambda refs: [(ref, body[:-9]) for ref, body in fetch(refs)],
        backend=HashMapBackend(),
    )


@pytest.mark.parametrize(
    ("attempt", "why"),
    [
        (_other_operator, "operator 'counts' at checkpoint 1 turned out to be that of operator 'totals'"),
        (_other_checkpoint, "at checkpoint 2 turned out to be that of operator 'totals' at checkpoint 1"),
        (_missing_block, "1 blocks of operator 'totals' are missing, the first is block/1/1/totals"),
        (_foreign_block, "does not hold that state of operator 'totals' which its index says"),
        (_cut_block, "A block of state is damaged"),
    ],
)
def test_what_is_not_what_it_should_be_is_damage(attempt: Callable[[bytes, Any], None], why: str, topic: Any) -> None:
    """Nothing is restored from a wrong index, or from missing, wrong or damaged blocks."""
    (index,) = topic.write_all(_table(100).freeze(1, 0))
    with pytest.raises(DamagedState, match=why):
        attempt(index, topic.fetch)


def test_another_type_or_layout_is_the_users_to_fix(topic: Any) -> None:
    """A checkpoint of another state type or `max_parallelism` is refused, saying what was and what is asked for."""
    (index,) = topic.write_all(_table(100).freeze(1, 0))
    with pytest.raises(StateIncompatible, match=r'operator \'totals\' cannot be read as Total.*written as "int"'):
        restore("totals", Total, range(128), 128, 1, [index], topic.fetch, backend=HashMapBackend())
    with pytest.raises(StateIncompatible, match=r"max_parallelism 128, the pipeline asks for 64.*set it to 128"):
        restore("totals", int, range(64), 64, 1, [index], topic.fetch, backend=HashMapBackend())

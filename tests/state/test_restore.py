"""Restoring: what is read, what is refused, and that a restored table goes on as the old one would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from exactlyonce.checkpoint.manifest import BlockRef
from exactlyonce.pipeline.keys import canonical_key, key_group
from exactlyonce.state.errors import DamagedState, StateIncompatible
from exactlyonce.state.key_groups import group_range, subtask_of
from exactlyonce.state.restore import restore
from exactlyonce.state.table import KeyedTable


class Total(msgspec.Struct):
    sum: int


def _add(total: int | None, amount: int) -> tuple[int, int]:
    total = (total or 0) + amount
    return total, total


def _table(count: int, groups: int = 128) -> KeyedTable[int]:
    table: KeyedTable[int] = KeyedTable("totals", int, range(groups), groups)
    keys = [canonical_key(f"customer-{number:07}") for number in range(count)]
    table.apply(_add, keys, list(range(count)))
    return table


def test_a_restored_table_goes_on_with_increments(topic: Any) -> None:
    """After a restore the next snapshot writes only what changed since, and its chain builds on the old one."""
    table = _table(5_000)
    table = restore("totals", int, range(128), 128, 1, topic.write_all(table.freeze(1, 0)), topic.fetch)
    written = len(topic.bodies)
    table.apply(_add, [canonical_key("customer-0000007")], [1])
    snapshot = table.freeze(2, 1)
    index = topic.write_all(snapshot)
    assert len(topic.bodies) == written + 1
    again = restore("totals", int, range(128), 128, 2, index, topic.fetch)
    assert dict(again.items()) == dict(table.items())
    assert again.get(canonical_key("customer-0000007")) == 8


def test_an_empty_state_is_restored_from_nothing(topic: Any) -> None:
    """With no index at all the table is empty, and its checkpoint is a base."""
    table = restore("totals", int, range(4), 4, 9, (), topic.fetch)
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
            restore("totals", int, group_range(each, parallelism, 8), 8, checkpoint - 1, indexes, topic.fetch)
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
    halves = [restore("totals", int, range(each, each + 1), 2, 1, index, topic.fetch) for each in range(2)]
    for key in [key for key, _ in halves[0].items()]:
        halves[0].apply(lambda *_: (None, None), [key], [0])
    indexes = [part for half in halves for part in topic.write_all(half.freeze(2, 1))]
    whole = restore("totals", int, range(2), 2, 2, indexes, topic.fetch)
    assert dict(whole.items()) == dict(halves[1].items())


@pytest.mark.slow
def test_a_reader_of_one_group_reads_its_share(topic: Any) -> None:
    """Of a fresh image of a million keys in 128 groups, at most two in 128 bytes are read for one group."""
    index = topic.write_all(_table(1_000_000).freeze(1, 0))
    table = restore("totals", int, range(77, 78), 128, 1, index, topic.fetch)
    assert sum(1 for _ in table.items()) > 5_000
    assert topic.bytes_read <= 2 / 128 * sum(map(len, topic.bodies.values()))


def _other_operator(index: bytes, fetch: Any) -> None:
    restore("counts", int, range(128), 128, 1, [index], fetch)


def _other_checkpoint(index: bytes, fetch: Any) -> None:
    restore("totals", int, range(128), 128, 2, [index], fetch)


def _missing_block(index: bytes, fetch: Any) -> None:
    restore("totals", int, range(128), 128, 1, [index], lambda refs: list(fetch(refs))[1:])


def _foreign_block(index: bytes, fetch: Any) -> None:
    def swapped(refs: list[BlockRef]) -> list[tuple[BlockRef, bytes]]:
        return [(ref, body.replace(b"totals", b"counts")) for ref, body in fetch(refs)]

    restore("totals", int, range(128), 128, 1, [index], swapped)


def _cut_block(index: bytes, fetch: Any) -> None:
    restore("totals", int, range(128), 128, 1, [index], lambda refs: [(ref, body[:-9]) for ref, body in fetch(refs)])


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


def test_another_type_or_layout_is_the_users_to_mend(topic: Any) -> None:
    """A checkpoint of another state type or `max_parallelism` is refused, saying what was and what is asked for."""
    (index,) = topic.write_all(_table(100).freeze(1, 0))
    with pytest.raises(StateIncompatible, match=r'operator \'totals\' cannot be read as Total.*written as "int"'):
        restore("totals", Total, range(128), 128, 1, [index], topic.fetch)
    with pytest.raises(StateIncompatible, match=r"max_parallelism 128, the pipeline asks for 64.*set it to 128"):
        restore("totals", int, range(64), 64, 1, [index], topic.fetch)

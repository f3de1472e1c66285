"""State of another version, or by other keys: what becomes of a chain, in every backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from exactlyonce.pipeline.keys import canonical_key, key_group
from exactlyonce.pipeline.versions import VersionedState
from exactlyonce.state import state_type
from exactlyonce.state.chain import decode_index
from exactlyonce.state.errors import StateIncompatible
from tests.state.conftest import Restore


class Total(msgspec.Struct):
    amount: int


def cents(state: Total) -> Total:
    return Total(100 * state.amount)


EUROS = VersionedState(Total)
CENTS = VersionedState(Total, 2, {1: cents})
WITHOUT = VersionedState(Total, 2)
"""The code of a pipeline that has been migrated, and forgotten how."""
KEYS = [canonical_key(f"c{number}") for number in range(50)]


def add(amount: int) -> Callable[[Total | None, None], tuple[Total, None]]:
    return lambda total, _: (Total((total.amount if total else 0) + amount), None)


def first(topic: Any, restored: Restore) -> tuple[bytes, ...]:
    """The index of checkpoint 1: five euros of each key."""
    table = restored(EUROS, 0, ())
    table.apply(add(5), KEYS, [None] * 50)
    index: tuple[bytes, ...] = topic.write(table.freeze(1, 0))
    return index


def test_a_new_version_is_that_of_all_states(topic: Any, restored: Restore) -> None:
    """The version counts from the first checkpoint on: code without the migration never takes euros for cents."""
    table = restored(CENTS, 1, first(topic, restored))
    table.apply(add(100), KEYS[:1], [None])
    snapshot = table.freeze(2, 1)
    index = topic.write(snapshot)
    assert {block.checkpoint for block in snapshot.chain.blocks} == {2}
    for type_ in (CENTS, WITHOUT):
        found = dict(restored(type_, 2, index).items())
        assert found == {key: Total(600 if key == KEYS[0] else 500) for key in KEYS}


def test_a_first_checkpoint_that_failed(topic: Any, restored: Restore) -> None:
    table = restored(CENTS, 1, first(topic, restored))
    table.freeze(2, 1)
    table.apply(add(100), KEYS[:1], [None])
    snapshot = table.freeze(3, 1)
    index = topic.write(snapshot)
    assert min(block.checkpoint for block in snapshot.chain.blocks) == 2
    assert dict(restored(WITHOUT, 3, index).items()) == {key: Total(600 if key == KEYS[0] else 500) for key in KEYS}


def test_key_groups_that_are_not_touched(topic: Any, restored: Restore) -> None:
    table = restored(CENTS, 1, first(topic, restored), [key_group(KEYS[0], 16)])
    index = topic.write(table.freeze(2, 1))
    assert dict(restored(WITHOUT, 2, index).items()) == dict.fromkeys(KEYS, Total(500))


def test_a_version_without_a_migration(topic: Any, restored: Restore) -> None:
    """It is that of all states, too: a migration that a later version has is of this one."""
    table = restored(WITHOUT, 1, first(topic, restored))
    index = topic.write(table.freeze(2, 1))
    later = restored(VersionedState(Total, 3, {1: cents, 2: lambda state: state}), 2, index)
    assert dict(later.items()) == dict.fromkeys(KEYS, Total(5))


def mixed(topic: Any, restored: Restore, monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, ...]:
    """The index of checkpoint 2, in which states of version 1 lie beside one of version 2: as they were kept once."""
    with monkeypatch.context() as before:
        before.setattr(state_type.StateType, "may_share_chain", lambda *_: True)
        before.setattr("exactlyonce.state.rocksdb.groups.WHOLE_BYTES", 0)  # files of the whole state have one version
        table = restored(CENTS, 1, first(topic, restored))
        table.apply(add(100), KEYS[:1], [None])
        index: tuple[bytes, ...] = topic.write(table.freeze(2, 1))
    (part,) = map(decode_index, index)
    assert (part.head.version, {block.checkpoint for block in part.blocks}) == (2, {1, 2})
    return index


def test_a_chain_of_several_versions(topic: Any, restored: Restore, monkeypatch: pytest.MonkeyPatch) -> None:
    index = mixed(topic, restored, monkeypatch)
    expected = {key: Total(600 if key == KEYS[0] else 500) for key in KEYS}
    with pytest.raises(StateIncompatible, match=r"'totals' is of version 2, and some .* no migration of version 1\."):
        dict(restored(WITHOUT, 2, index).items())
    table = restored(CENTS, 2, index)
    assert dict(table.items()) == expected
    savepoint = topic.write(table.freeze(3, 2, whole=True))
    assert dict(restored(WITHOUT, 3, savepoint).items()) == expected


def test_a_step_that_is_missing(topic: Any, restored: Restore, monkeypatch: pytest.MonkeyPatch) -> None:
    third = restored(VersionedState(Total, 3, {1: cents}), 2, mixed(topic, restored, monkeypatch))
    assert third.get(KEYS[1]) == Total(500)
    states = state_type.StateType[Any]("totals", VersionedState(Total, 4, {1: cents, 3: cents}))
    states.require_migrations(3, 4)
    with pytest.raises(StateIncompatible, match=r"no migration of version 2\."):
        states.require_migrations(1, 4)


def test_keys_of_another_type(topic: Any, restored: Restore) -> None:
    texts, numbers = (VersionedState(Total, key_type=each) for each in (str, int))
    table = restored(texts, 0, ())
    table.apply(add(5), KEYS, [None] * 50)
    index = topic.write(table.freeze(1, 0))
    topic.read.clear()
    with pytest.raises(StateIncompatible, match=r"operator 'totals' has keys of type \"str\", .* of type \"int\" now"):
        restored(numbers, 1, index)
    assert topic.read == []
    unknown = restored(EUROS, 1, index)
    assert dict(restored(numbers, 2, topic.write(unknown.freeze(2, 1))).items()) == dict.fromkeys(KEYS, Total(5))

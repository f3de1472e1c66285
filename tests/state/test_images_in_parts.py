"""A key group too large for one checkpoint: its image is written by several, while its keys change."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.state.backend import CheckpointedState, StateBackend, Table
from exactlyonce.state.blocks import IMAGE, BlockDecoder
from exactlyonce.state.key_groups import PARTED_ENTRIES, Merging
from exactlyonce.testing.state_contract.memory import key_of

KEYS = 30_000
CHANGED = 2_000


def _put(table: Table[int], model: dict[bytes, int], states: dict[bytes, int | None]) -> None:
    table.apply(lambda _, state: (state, None), list(states), list(states.values()))
    for key, state in states.items():
        model.pop(key, None)
        if state is not None:
            model[key] = state


def test_no_checkpoint_writes_all_of_it(topic: Any, backend: Callable[[], StateBackend]) -> None:
    dice, model = random.Random(1), dict[bytes, int]()
    table = CheckpointedState(operator="totals", type=int, groups=range(1), max_parallelism=1).table(backend())
    _put(table, model, {key_of(number): number for number in range(KEYS)})
    index = topic.write(table.freeze(1, 0))
    _merging_of(table)._earned = KEYS
    written, chain = list[int](), tuple[BlockRef, ...]()
    for checkpoint in range(2, 80):
        changed = [key_of(dice.randrange(KEYS + 1_000)) for _ in range(CHANGED)]
        _put(table, model, {key: None if key in model and dice.random() < 0.1 else checkpoint for key in changed})
        snapshot, before = table.freeze(checkpoint, checkpoint - 1), len(topic.bodies)
        index = topic.write(snapshot)
        new = list(topic.bodies.values())[before:]
        written.append(sum(section.entries for body in new for section in BlockDecoder(body).header.sections))
        chain = snapshot.chain.refs
        if checkpoint % 9 == 0:
            topic.keep(chain)
            assert dict(topic.restored(index, checkpoint, range(1)).items()) == model
    assert max(written) <= CHANGED + PARTED_ENTRIES < 0.8 * len(model)
    assert len(chain) < 60, "nothing before the first part is needed"
    (end,) = (ref for ref in chain if any(s.kind == IMAGE for s in BlockDecoder(topic.bodies[ref]).header.sections))
    assert BlockDecoder(topic.bodies[end]).header.sections[0].entries == 0


@pytest.mark.parametrize("parts", [1, 3])
def test_what_is_deleted_between_two_parts_stays_deleted(
    parts: int, topic: Any, backend: Callable[[], StateBackend], images_often: None
) -> None:
    """Also if nothing else is left of the list of keys, and if most of the key group went."""
    for_each = 10
    model: dict[bytes, int] = {}
    table = CheckpointedState(operator="totals", type=int, groups=range(1), max_parallelism=1).table(backend())
    _put(table, model, {key_of(number): 1 for number in range(for_each)})
    topic.write(table.freeze(1, 0))
    for checkpoint in range(2, 30):
        number = (checkpoint * parts) % for_each
        _put(table, model, {key_of(number): None, key_of((number + 4) % for_each): checkpoint})
        index = topic.write(table.freeze(checkpoint, checkpoint - 1))
        assert dict(topic.restored(index, checkpoint, range(1)).items()) == model


def test_a_key_group_shrinks_while_it_is_written(topic: Any, backend: Callable[[], StateBackend]) -> None:
    """Less is left than was written: the rest is written all the same."""
    model: dict[bytes, int] = {}
    table = CheckpointedState(operator="totals", type=int, groups=range(1), max_parallelism=1).table(backend())
    _put(table, model, {key_of(number): 1 for number in range(KEYS)})
    topic.write(table.freeze(1, 0))
    merging = _merging_of(table)
    merging._earned = KEYS
    checkpoint = 1
    while not merging.parts or merging.parts[0].written <= KEYS // 2:
        checkpoint += 1
        _put(table, model, {key_of(checkpoint): checkpoint})
        index = topic.write(table.freeze(checkpoint, checkpoint - 1))
    gone = list(model)[: KEYS * 9 // 10]
    _put(table, model, dict.fromkeys(gone))
    for later in range(checkpoint + 1, checkpoint + 12):
        index = topic.write(table.freeze(later, later - 1))
        assert dict(topic.restored(index, later, range(1)).items()) == model
    assert not merging.parts


def _merging_of(table: Any) -> Merging:
    found: Merging = table._contents.merging if hasattr(table, "_contents") else table._groups.merging
    return found

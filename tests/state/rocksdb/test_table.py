"""The tiered table: what it reads and when, and that it is a dict to records, whatever lies in memory."""

from __future__ import annotations

import copy
import os
import tracemalloc
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from threading import Event, Timer
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.pipeline.keys import key_group
from exactlyonce.state.backend import TableSnapshot
from exactlyonce.state.chain import decode_index
from exactlyonce.state.hash_map import HashMapBackend
from exactlyonce.state.rocksdb import groups, store
from exactlyonce.state.rocksdb.interval import KEPT_BYTES
from exactlyonce.state.rocksdb.store import LocalStore
from exactlyonce.state.rocksdb.table import TieredTable
from exactlyonce.testing.cluster import LIMIT_S
from exactlyonce.testing.state_contract.memory import MAX_PARALLELISM, StateBlocks, Subtasks, key_of

Process = Callable[..., Subtasks]
KEYS = range(400)
COUNT = 9_000
MANY = 30_000
"""So many keys that each key group has blocks of its own."""


def group_of(number: int) -> int:
    return key_group(key_of(number), MAX_PARALLELISM)


def written(process: Process, count: int = COUNT) -> list[bytes]:
    """The index of checkpoint 1: an image of every key, in other files than those of the process to come."""
    before = Subtasks(HashMapBackend(), process().blocks)
    before.put(dict.fromkeys(range(count), 1))
    return before.write(before.freeze(1, 0))


def groups_read(blocks: StateBlocks, indexes: list[bytes]) -> set[int]:
    found = {block.ref: block.groups for part in indexes for block in decode_index(part).blocks}
    masks = [found[ref] for ref in blocks.read]
    return {group for group in range(MAX_PARALLELISM) for mask in masks if mask >> group & 1}


def test_state_is_read_when_a_record_wants_it(process: Process, blocks: StateBlocks) -> None:
    indexes = written(process, MANY)
    blocks.read.clear()
    after = process(indexes=indexes, checkpoint=1)
    assert blocks.read == []
    after.put({7: 2})
    assert groups_read(blocks, indexes) == {group_of(7)}
    count = len(blocks.read)
    after.put({7: 3})
    assert len(blocks.read) == count
    assert after.tables[0].get(key_of(7)) == 3


@pytest.mark.parametrize("slices", [0, 3])
def test_small_state_is_read_whole_for_its_first_record(
    slices: int, process: Process, blocks: StateBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each record of another key group would fetch its blocks anew; a state of just one byte more is read in parts."""
    indexes = written(process)
    size = sum(block.ref.size for part in indexes for block in decode_index(part).blocks)
    for whole_bytes, is_whole in ((size, True), (size - 1, False)):
        monkeypatch.setattr(groups, "WHOLE_BYTES", whole_bytes)
        after = process(indexes=indexes, checkpoint=1)
        for _ in range(slices):
            assert after.tables[0].fetch()
        after.put({7: 2})
        table: Any = after.tables[0]
        assert (not table._groups.unread) == is_whole
        count = len(blocks.read)
        after.put(dict.fromkeys(range(MAX_PARALLELISM), 2))
        assert (len(blocks.read) == count) == is_whole
        expected = {key_of(each): 1 for each in range(COUNT)} | {key_of(each): 2 for each in range(MAX_PARALLELISM)}
        assert after.items() == expected | {key_of(7): 2}


def test_the_rest_is_read_between_batches(process: Process, blocks: StateBlocks) -> None:
    indexes = written(process)
    blocks.read.clear()
    subtasks, counts = process(indexes=indexes, checkpoint=1), set[int]()
    table: Any = subtasks.tables[0]
    while table.fetch():
        counts.add(MAX_PARALLELISM - len(table._groups.unread))
    assert counts == set(range(MAX_PARALLELISM + 1)), "a key group at a time, and slices of each"
    assert groups_read(blocks, indexes) == set(range(MAX_PARALLELISM))
    count = len(blocks.read)
    assert subtasks.items() == {key_of(number): 1 for number in range(COUNT)}
    assert len(blocks.read) == count


@pytest.mark.exhaustive(but=["4"])
@pytest.mark.parametrize("slices", [4, 12])
def test_a_record_wants_what_is_being_read(
    slices: int, process: Process, blocks: StateBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "LOADED_ENTRIES", 300)
    indexes = written(process)
    for number in range(12):
        after = process(indexes=indexes, checkpoint=1)
        for _ in range(slices):
            after.tables[0].fetch()
        after.put({number: 2})
        after.write(after.freeze(2, 1))
        while after.tables[0].fetch():
            pass
        assert after.items() == {key_of(each): 1 for each in range(COUNT)} | {key_of(number): 2}


def while_one_is_read(process: Process, monkeypatch: pytest.MonkeyPatch) -> tuple[Subtasks, int, int]:
    """Subtasks at checkpoint 1 that have read a part of a key group; a number of it, and one of another."""
    monkeypatch.setattr(store, "LOADED_ENTRIES", 300)
    after = process(indexes=written(process), checkpoint=1)
    table: Any = after.tables[0]
    while table._groups._partly_read is None:
        assert table.fetch()
    begun = next(number for number in KEYS if group_of(number) == table._groups._partly_read)
    other = next(number for number in KEYS if group_of(number) in table._groups.unread - {table._groups._partly_read})
    return after, begun, other


def test_records_want_another_while_one_is_read(
    process: Process, blocks: StateBlocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    after, begun, other = while_one_is_read(process, monkeypatch)
    after.put({other: 2})
    after.put({begun: 3})
    after.write(after.freeze(2, 1))
    while after.tables[0].fetch():
        pass
    expected = {key_of(each): 1 for each in range(COUNT)} | {key_of(other): 2, key_of(begun): 3}
    savepoint = after.write(after.freeze(3, 2, whole=True))
    assert Subtasks(HashMapBackend(), blocks, checkpoint=3, indexes=savepoint).items() == expected
    assert after.items() == expected


def test_blocks_that_go_while_they_are_read(process: Process, blocks: StateBlocks) -> None:
    """A key group that records want while others are read may be in new blocks alone: nobody keeps the old."""
    index = written(process, MANY)
    after = process(indexes=index, checkpoint=1)
    table: Any = after.tables[0]
    first = 0
    old = {block.ref for part in index for block in decode_index(part).blocks if block.groups == 1 << first}
    blocks.read.clear()
    while not blocks.read:
        assert table.fetch()
    assert len(old) == 1, "a block of its own"
    assert old.isdisjoint(blocks.read), "it is not fetched yet"
    changed, checkpoint = [number for number in range(MANY) if group_of(number) == first], 1
    while old & (needed := {block.ref for part in index for block in decode_index(part).blocks}):
        checkpoint += 1
        after.put(dict.fromkeys(changed, checkpoint))
        index = after.write(after.freeze(checkpoint, checkpoint - 1))
    blocks.keep(needed)
    while table.fetch():
        pass
    unchanged = {key_of(each): 1 for each in range(MANY)}
    assert after.items() == unchanged | dict.fromkeys(map(key_of, changed), checkpoint)


def test_a_disk_that_fills_within_a_batch(process: Process, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    after = process()
    after.put(dict.fromkeys(range(4), 1))
    after.freeze(1, 0)
    looks = iter([""])
    monkeypatch.setattr(LocalStore, "no_room", lambda self: next(looks, "it is full"))
    after.put(dict.fromkeys(range(20), 2))
    assert after.tables[0].full
    assert [after.tables[0].get(key_of(number)) for number in range(20)] == [2] * 20


@pytest.mark.timeout(LIMIT_S, method="thread")
def test_a_record_wants_what_is_read_while_the_disk_is_full(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that was on its way does not wait for room: its worker would obey nobody meanwhile."""
    after, begun, other = while_one_is_read(process, monkeypatch)
    monkeypatch.setattr(LocalStore, "no_room", lambda self: "it is full")
    after.put({begun: 2, other: 3})
    assert not after.tables[0].fetch(), "what no record wants waits"
    assert [after.tables[0].get(key_of(number)) for number in (begun, other)] == [2, 3]


def test_a_checkpoint_of_what_was_not_read(process: Process, blocks: StateBlocks) -> None:
    indexes = written(process)
    table = process(indexes=indexes, checkpoint=1)
    table.put({7: 2})
    blocks.read.clear()
    again = table.write(table.freeze(2, 1))
    assert blocks.read == [], "a snapshot reads no block"
    expected = {key_of(number): 1 for number in range(COUNT)} | {key_of(7): 2}
    assert Subtasks(HashMapBackend(), blocks, checkpoint=2, indexes=again).items() == expected
    assert process(indexes=again, checkpoint=2).items() == expected


def test_saving_is_waited_for_by_what_would_change_it(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    may_save, log = Event(), list[str]()
    save, write = LocalStore.save, LocalStore.write

    def saving(self: LocalStore, path: Path) -> None:
        may_save.wait()
        save(self, path)
        log.append("saved")

    def writing(self: LocalStore, *given: Any) -> None:
        log.append("written")
        write(self, *given)

    monkeypatch.setattr(LocalStore, "save", saving)
    monkeypatch.setattr(LocalStore, "write", writing)
    subtasks = process()
    subtasks.put({1: 1})
    subtasks.write(subtasks.freeze(1, 0))
    assert log == ["written"]
    subtasks.put({1: 2})
    Timer(0.2, may_save.set).start()
    subtasks.write(subtasks.freeze(2, 1))
    assert log[:3] == ["written", "saved", "written"]


class Cart(msgspec.Struct):
    items: list[int]


def fill(cart: Cart | None, item: int) -> tuple[Cart | None, Cart | None]:
    """Adds in place; a negative item deletes."""
    if item < 0:
        return None, None
    cart = cart or Cart([])
    cart.items.append(item)
    return cart, cart


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("records"), st.lists(st.tuples(st.integers(0, 25), st.integers(-1, 3)), max_size=12)),
        st.tuples(st.just("freeze"), st.integers(0, 12)),
        st.tuples(st.just("write"), st.just(0)),
        st.tuples(st.just("restart"), st.booleans()),
        st.tuples(st.just("fetch"), st.just(0)),
    ),
    max_size=25,
)


@settings(max_examples=settings().max_examples // 3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_any_history(
    steps: list[tuple[str, Any]], process: Process, small: None, every_one_saved: None, images_often: None
) -> None:
    subtasks, model = process(Cart), dict[bytes, Cart]()
    indexes, checkpoint, latest, at_checkpoint = list[bytes](), 0, 0, dict[bytes, Cart]()
    for step, value in steps:
        table = subtasks.tables[0]
        if step == "records" and value:
            keys, items = [key_of(number) for number, _ in value], [item for _, item in value]
            outputs = table.apply(fill, keys, items)
            for key, item, output in zip(keys, items, outputs, strict=True):
                state, expected = fill(model.get(key), item)
                model.pop(key, None)
                model.update({key: state} if state else {})
                assert output == expected
                model = copy.deepcopy(model)
        elif step == "freeze":  # and give it up
            latest += 1
            for _ in islice(table.freeze(latest, checkpoint).encode(), value):
                pass
        elif step == "write":
            latest += 1
            indexes = subtasks.write(subtasks.freeze(latest, checkpoint))
            checkpoint, at_checkpoint = latest, copy.deepcopy(model)
        elif step == "restart":
            backend: Any = HashMapBackend() if value else None
            options: dict[str, Any] = {"checkpoint": checkpoint, "indexes": indexes}
            subtasks = Subtasks(backend, subtasks.blocks, Cart, **options) if value else process(Cart, **options)
            model, latest = copy.deepcopy(at_checkpoint), checkpoint
        else:
            table.fetch()
    assert subtasks.items() == model


RECORDS = st.dictionaries(st.integers(0, 40), st.sampled_from([None, 1, 2, 3]), min_size=1)
WHILE_RECORDS_COME = st.lists(
    st.one_of(
        st.tuples(st.just("records"), RECORDS),
        st.tuples(st.just("freeze"), st.booleans()),
        st.tuples(st.just("encode"), st.integers(1, 6)),
        st.tuples(st.just("restart"), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=settings().max_examples // 2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=WHILE_RECORDS_COME)
def test_checkpoints_while_records_come(
    steps: list[tuple[str, Any]], process: Process, small: None, every_one_saved: None, images_often: None
) -> None:
    subtasks, model = process(), dict[bytes, int]()
    indexes, base, latest, at_base = list[bytes](), 0, 0, dict[bytes, int]()
    open_: list[tuple[int, TableSnapshot, Any, list[BlockRef], dict[bytes, int]]] = []
    for step, value in [*steps, *[("encode", 1_000)] * 40]:
        if step == "records":
            subtasks.put(value)
            model |= {key_of(number): state for number, state in value.items() if state is not None}
            for number in (each for each, state in value.items() if state is None):
                model.pop(key_of(number), None)
        elif step == "freeze":
            latest += 1
            (snapshot,) = subtasks.freeze(latest, base, whole=value)
            open_.append((latest, snapshot, snapshot.encode(), [], dict(model)))
        elif step == "encode" and open_:
            checkpoint, snapshot, encoding, refs, at_barrier = open_[0]
            some = list(islice(encoding, value))
            refs += [subtasks.blocks.put(block) for block in some if block is not None]
            if len(some) < value:
                indexes, base, at_base = list(snapshot.seal(refs)), checkpoint, at_barrier
                del open_[0]
                restored = Subtasks(HashMapBackend(), subtasks.blocks, checkpoint=base, indexes=indexes)
                assert restored.items() == at_base
        elif step == "restart":
            subtasks = process(indexes=indexes, checkpoint=base)
            model, latest, open_ = dict(at_base), base, []
    assert subtasks.items() == model


def test_an_interval_that_is_settled_before_an_older_one_is_encoded(
    process: Process, blocks: StateBlocks, small: None
) -> None:
    """Memory settles the second interval while the first is still to be encoded: neither's keys are lost."""
    numbers = [number for number in range(1_000) if group_of(number) == 3]
    other = [number for number in range(1_000) if group_of(number) == 1]
    subtasks = process()
    first_keys, second_keys = [*other[:4], *numbers[:4]], numbers[4:50]
    subtasks.put(dict.fromkeys(first_keys, 1))
    first = subtasks.freeze(1, 0)
    subtasks.put(dict.fromkeys(second_keys, 2))
    second = subtasks.freeze(2, 0)
    subtasks.put(dict.fromkeys(numbers[50:100], 3))
    subtasks.write(first)
    restored = Subtasks(HashMapBackend(), blocks, checkpoint=2, indexes=subtasks.write(second))
    assert restored.items() == {key_of(n): 1 for n in first_keys} | {key_of(n): 2 for n in second_keys}


def test_a_savepoint_that_is_settled_before_an_older_checkpoint_is_encoded(
    process: Process, blocks: StateBlocks, small: None
) -> None:
    """It has images of all key groups, also of one that has no block yet while the older one is encoded."""
    numbers = [number for number in range(2_000) if group_of(number) == 3]
    others = [number for number in range(2_000) if group_of(number) == 1]
    subtasks = process()
    subtasks.put({others[0]: 1})
    first = subtasks.freeze(1, 0, whole=True)
    subtasks.put(dict.fromkeys(numbers[:40], 2))
    second = subtasks.freeze(2, 0)
    subtasks.write(first)
    savepoint = subtasks.freeze(3, 0, whole=True)
    subtasks.put(dict.fromkeys(others[1:100], 4))
    subtasks.write(second)
    restored = Subtasks(HashMapBackend(), blocks, checkpoint=3, indexes=subtasks.write(savepoint))
    assert restored.items() == {key_of(others[0]): 1} | dict.fromkeys(map(key_of, numbers[:40]), 2)


def test_memory_is_bounded(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    subtasks = process()
    table: Any = subtasks.tables[0]
    assert isinstance(table, TieredTable)
    entries = 0
    for start in range(0, 60_000, 250):
        subtasks.put(dict.fromkeys(range(start, start + 250), 1)) if start < 500 else table.apply(
            lambda state, record: (record, None), [key_of(number) for number in range(start, start + 250)], [1] * 250
        )
        unsettled = sum(len(layer) for layer in table._layers())
        entries = max(entries, len(table._states) + len(table._cold) + unsettled)
    held = table._memory._worker.table_bytes / table._memory.entry_bytes
    assert 0 < entries <= 1.2 * held < 60_000
    assert key_of(59_999) in table._states
    assert len(subtasks.items()) == 60_000


@pytest.mark.exhaustive
def test_a_whole_snapshot_is_never_in_memory(process: Process) -> None:
    """The writer of its blocks holds some; so does the table, also when all are written again."""
    subtasks, blocks = process(bytes), 40
    for number in range(blocks):
        subtasks.put({1_000 * number + each: os.urandom(100_000) for each in range(10)})
    large, bound = blocks * 1_000_000, 3 * KEPT_BYTES
    (savepoint,) = subtasks.freeze(1, 0, whole=True)
    assert large > 3 * bound
    assert _most_held(savepoint) < bound, "and nobody seals it"
    subtasks.put({0: b"0"})
    (after,) = subtasks.freeze(2, 0)
    assert _most_held(after) < bound


def _most_held(snapshot: TableSnapshot) -> int:
    """The most memory that was taken at once while all blocks of *snapshot* were made, beyond what was before."""
    tracemalloc.start()
    try:
        written = sum(len(block.body) for block in snapshot.encode() if block is not None)
        assert written > 40_000_000
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_key_groups_that_are_read_while_a_checkpoint_is_settled(process: Process, blocks: StateBlocks) -> None:
    """They have increments, and no image in this checkpoint: they were not there at its barrier."""
    before = Subtasks(HashMapBackend(), blocks)
    before.put(dict.fromkeys(range(COUNT), 1))
    before.write(before.freeze(1, 0))
    before.put(dict.fromkeys(range(COUNT), 2))
    after = process(indexes=before.write(before.freeze(2, 1)), checkpoint=2)
    (snapshot,) = after.freeze(3, 2)
    steps = snapshot.encode()
    assert next(steps) is None
    while after.tables[0].fetch():
        pass
    index = snapshot.seal([blocks.put(block) for block in steps if block is not None])
    restored = Subtasks(HashMapBackend(), blocks, checkpoint=3, indexes=index)
    assert restored.items() == {key_of(number): 2 for number in range(COUNT)}

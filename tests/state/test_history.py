"""Random histories of tables against a plain dict.

Records change, delete and mutate states in place while older snapshots are half encoded; checkpoints overlap, abort and
complete; the job restarts with another parallelism, and with all key groups or some. Whatever happens, a checkpoint
restores to what the dict was at its barrier, from no other blocks than those that its indexes list.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.pipeline.keys import canonical_key, key_group
from exactlyonce.state import blocks, interval
from exactlyonce.state.backend import CheckpointedState, Table, TableSnapshot
from exactlyonce.state.blocks import EncodedBlock
from exactlyonce.state.chain import decode_index
from exactlyonce.state.hash_map import HashMapBackend, KeyedTable
from exactlyonce.state.key_groups import CYCLE_MAX, PART_ENTRIES, RATIO, Merging, group_range, mask_of, subtask_of
from exactlyonce.state.stored import StoredState
from tests.state.conftest import choose_often

MAX_PARALLELISM = 4
GROUPS = range(MAX_PARALLELISM)
KEYS = [canonical_key(f"k{number}") for number in range(16)]


class Cart(msgspec.Struct):
    items: list[int]
    total: int = 0


def put(cart: Cart | None, amount: int) -> tuple[Cart | None, Cart | None]:
    """Changes the cart in place; 0 deletes it, and a negative amount makes a new one."""
    if amount == 0:
        return None, cart
    if cart is None or amount < 0:
        cart = Cart([])
    cart.items.append(amount)
    cart.total += amount
    return cart, cart


def put_number(number: int | None, amount: int) -> tuple[int | None, int | None]:
    """The same for a state that cannot change in place."""
    number = None if amount == 0 else amount if amount < 0 else (number or 0) + amount
    return number, number


@dataclass
class Pending:
    """A checkpoint on its way, on all subtasks."""

    checkpoint: int
    model: dict[bytes, Any]
    snapshots: list[TableSnapshot]
    encoders: list[Iterator[EncodedBlock | None]] = field(init=False)
    refs: list[list[BlockRef]] = field(init=False)

    def __post_init__(self) -> None:
        self.encoders = [snapshot.encode() for snapshot in self.snapshots]
        self.refs = [[] for _ in self.snapshots]


def _of(model: dict[bytes, Any], groups: Collection[int]) -> dict[bytes, Any]:
    return {key: state for key, state in model.items() if key_group(key, MAX_PARALLELISM) in groups}


class Histories(RuleBasedStateMachine):
    """One operator of a job: its subtasks' tables, and its checkpoints."""

    type_: Any = Cart
    fn: Any = staticmethod(put)

    def __init__(self) -> None:
        super().__init__()
        self.sizes = interval.SLICE_ENTRIES, blocks.RAW_TARGET, interval._ENTRIES_AT_FIRST
        self.choose = Merging.choose
        interval.SLICE_ENTRIES, blocks.RAW_TARGET, interval._ENTRIES_AT_FIRST = 3, 60, 2
        Merging.choose = choose_often  # type: ignore[assignment,method-assign]  # histories are too short for its own policy

    def teardown(self) -> None:
        interval.SLICE_ENTRIES, blocks.RAW_TARGET, interval._ENTRIES_AT_FIRST = self.sizes
        Merging.choose = self.choose  # type: ignore[method-assign]  # as it was

    @initialize(parallelism=st.integers(1, 3))
    def start(self, parallelism: int) -> None:
        self.bodies: dict[BlockRef, bytes] = {}
        self.written = 0
        self.model: dict[bytes, Any] = {}
        self.completed = self.latest = 0
        self.completed_model: dict[bytes, Any] = {}
        self.indexes: list[bytes] = []
        self.restart(parallelism, GROUPS)

    @rule(parallelism=st.integers(1, 3), touched=st.just(GROUPS) | st.sets(st.sampled_from(GROUPS)))
    def restart(self, parallelism: int, touched: Collection[int]) -> None:
        """Everything since the last completed checkpoint is lost; its state comes back, or that of *touched*."""
        self.parallelism, self.touched = parallelism, touched
        self.pending: list[Pending] = []
        self.tables = self._restored(parallelism, touched)
        self.model = copy.deepcopy(self.completed_model)

    def _restored(self, parallelism: int, touched: Collection[int]) -> list[Table[Any]]:
        tables = []
        for subtask in range(parallelism):
            groups = group_range(subtask, parallelism, MAX_PARALLELISM)
            some = None if set(groups) <= set(touched) else set(groups) & set(touched)
            stored = CheckpointedState(
                operator="carts", type=self.type_, groups=groups, max_parallelism=MAX_PARALLELISM,
                checkpoint=self.completed, indexes=self.indexes, fetch=self._fetch,
            )  # fmt: skip
            tables.append(stored.table(HashMapBackend(), some))
        return tables

    def _fetch(self, refs: Sequence[BlockRef]) -> list[tuple[BlockRef, bytes]]:
        return [(ref, self.bodies[ref]) for ref in reversed(refs)]

    @rule(records=st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from([0, 0, 1, 2, 3, -1])), max_size=30))
    def process(self, records: list[tuple[bytes, int]]) -> None:
        batches: dict[int, tuple[list[bytes], list[int], list[Any]]] = {}
        for key, amount in records:
            if key_group(key, MAX_PARALLELISM) not in self.touched:
                continue
            subtask = subtask_of(key_group(key, MAX_PARALLELISM), self.parallelism, MAX_PARALLELISM)
            keys, amounts, expected = batches.setdefault(subtask, ([], [], []))
            state, output = self.fn(self.model.pop(key, None), amount)
            if state is not None:
                self.model[key] = state
            keys.append(key)
            amounts.append(amount)
            expected.append(copy.deepcopy(output))
        for subtask, (keys, amounts, expected) in batches.items():
            assert self.tables[subtask].apply(self.fn, keys, amounts) == expected

    @precondition(lambda self: len(self.pending) < 3)
    @rule(gap=st.integers(1, 3))
    def barrier(self, gap: int) -> None:
        self.latest += gap
        snapshots = [table.freeze(self.latest, self.completed) for table in self.tables]
        self.pending.append(Pending(self.latest, copy.deepcopy(self.model), snapshots))

    @precondition(lambda self: self.pending)
    @rule(which=st.integers(0, 2), slices=st.integers(1, 40))
    def encode(self, which: int, slices: int) -> None:
        pending = self.pending[which % len(self.pending)]
        for subtask in range(self.parallelism):
            for _ in range(slices):
                self._advance(pending, subtask)

    @precondition(lambda self: self.pending)
    @rule(which=st.integers(0, 2))
    def abort(self, which: int) -> None:
        del self.pending[which % len(self.pending)]

    @precondition(lambda self: self.pending)
    @rule(which=st.integers(0, 2), parallelism=st.integers(1, 4), touched=st.sets(st.sampled_from(GROUPS)))
    def complete(self, which: int, parallelism: int, touched: set[int]) -> None:
        which %= len(self.pending)
        done, self.pending = self.pending[which], self.pending[which + 1 :]
        for subtask in range(self.parallelism):
            while self._advance(done, subtask):
                pass
        self.indexes = [
            part for snapshot, refs in zip(done.snapshots, done.refs, strict=True) for part in snapshot.seal(refs)
        ]
        self.completed, self.completed_model = done.checkpoint, done.model
        self._expire()
        for some in (GROUPS, touched):
            restored = {key: state for table in self._restored(parallelism, some) for key, state in table.items()}
            assert restored == _of(done.model, some)

    def _expire(self) -> None:
        """Blocks are deleted that neither the completed checkpoint nor one on its way refers to."""
        needed = {block.ref for part in self.indexes for block in decode_index(part).blocks}
        for pending in self.pending:
            needed.update(ref for refs in pending.refs for ref in refs)
            needed.update(ref for snapshot in pending.snapshots for ref in snapshot.chain.refs)
        for ref in self.bodies.keys() - needed:
            del self.bodies[ref]

    @invariant()
    def newest_states_are_the_models(self) -> None:
        if hasattr(self, "tables"):
            model = _of(self.model, self.touched)
            assert {key: state for table in self.tables for key, state in table.items()} == model
            for key in KEYS:
                subtask = subtask_of(key_group(key, MAX_PARALLELISM), self.parallelism, MAX_PARALLELISM)
                assert self.tables[subtask].get(key) == model.get(key)

    def _advance(self, pending: Pending, subtask: int) -> bool:
        """One slice; False at the end."""
        done = object()
        block = next(pending.encoders[subtask], done)
        if isinstance(block, EncodedBlock):
            assert not block.header.groups & ~mask_of(self.touched)
            self.written += 1
            key = f"block/{pending.checkpoint}/{self.written}"
            ref = BlockRef(1, self.written, key, len(block.body), bytes(32))
            self.bodies[ref] = block.body
            pending.refs[subtask].append(ref)
        return block is not done


class NumberHistories(Histories):
    """The same with states that are never cloned."""

    type_ = int
    fn = staticmethod(put_number)


LONG = settings(stateful_step_count=60)
TestHistoriesOfMutableStates = Histories.TestCase
TestHistoriesOfMutableStates.settings = LONG
TestHistoriesOfImmutableStates = pytest.mark.exhaustive(NumberHistories.TestCase)
TestHistoriesOfImmutableStates.settings = LONG


def _put_each(table: Table[int], states: Mapping[bytes, int]) -> None:
    table.apply(lambda _, state: (state, None), list(states), list(states.values()))


@pytest.mark.parametrize("incarnations", [1, 5])
def test_long_histories_stay_short_chains(incarnations: int, topic: Any) -> None:
    """Also where every incarnation takes one checkpoint, and restores no more than it changes."""
    table: Table[int] = KeyedTable(StoredState(operator="totals", type=int, groups=range(8), max_parallelism=8))
    model: dict[bytes, int] = {}
    keys = [canonical_key(number) for number in range(400)]
    index: tuple[bytes, ...] = ()
    longest = 0
    for checkpoint in range(1, 400):
        changed = keys if checkpoint == 1 else [keys[checkpoint * 7 % 400], keys[checkpoint * 31 % 400]]
        states = {key: checkpoint * number for number, key in enumerate(changed)}
        if checkpoint % incarnations == 0:
            touched = {key_group(key, 8) for key in changed} if incarnations == 1 else None
            table = topic.restored(index, checkpoint - 1, range(8), touched=touched)
        model.update(states)
        _put_each(table, states)
        snapshot = table.freeze(checkpoint, checkpoint - 1)
        index = topic.write(snapshot)
        longest = max(longest, len(snapshot.chain.blocks))
    assert longest < 40
    assert dict(topic.restored(index, 399, range(8)).items()) == model


class Sizes(dict[int, range]):
    """Tables of which only the lengths matter."""


def _run(sizes: Sizes, changes_per_checkpoint: list[dict[int, int]]) -> tuple[int, list[int], Merging]:
    merging, imaged, per_checkpoint = Merging(), 0, []
    for checkpoint, changes in enumerate(changes_per_checkpoint, 1):
        chosen = merging.choose(checkpoint, sum(changes.values()), sizes)
        images, written = chosen.keys() - merging.parts.keys(), 0
        for group, part in chosen.items():
            if group in images:
                merging.imaged(group)
                written += len(sizes[group])
            else:
                entries = min(part or len(sizes[group]), len(sizes[group]) - sum(merging.parts[group].rest or []))
                merging.parts[group].rest = [*(merging.parts[group].rest or []), entries]
                merging.incremented(group, checkpoint, entries)
                written += entries
        for group in changes.keys() - images:
            merging.incremented(group, checkpoint, changes[group])
        for group in chosen.keys() - images:
            if sum(merging.parts[group].rest) == len(sizes[group]):
                merging.joined(group)
        per_checkpoint.append(written)
        imaged += written
    return imaged, per_checkpoint, merging


@given(
    st.lists(st.integers(0, 500), min_size=4, max_size=4), st.lists(st.integers(0, 3), max_size=200), st.integers(1, 50)
)
def test_images_cost_a_share_of_the_increments(counts: list[int], groups: list[int], changed: int) -> None:
    sizes = Sizes({group: range(count) for group, count in enumerate(counts)})
    imaged, _, _ = _run(sizes, [{group: min(changed, len(sizes[group]))} for group in groups])
    allowance = sum(max(min(changed, len(sizes[group])) / RATIO, sum(counts) / 16) for group in groups)
    assert imaged <= allowance


def test_steady_changes_are_merged_without_spikes() -> None:
    sizes = Sizes({group: range(8_000) for group in range(128)})
    _, per_checkpoint, merging = _run(sizes, [dict.fromkeys(range(128), 160)] * 600)
    steady = per_checkpoint[300:]
    assert sum(steady) / len(steady) <= 128 * 160 / RATIO * 1.01
    assert max(steady) <= 2 * 8_000
    assert min(merging.oldest.values()) > 600 - CYCLE_MAX


def test_large_key_groups_are_merged_in_parts() -> None:
    sizes = Sizes({group: range(80_000) for group in range(64)})
    _, per_checkpoint, merging = _run(sizes, [dict.fromkeys(range(64), 400)] * 600)
    assert max(per_checkpoint[300:]) <= 64 * 80_000 / CYCLE_MAX + PART_ENTRIES, "never a whole one"
    assert min(merging.oldest.values()) > 600 - 1.1 * CYCLE_MAX


def test_processes_that_live_shortly_write_no_parts() -> None:
    """Each would lose them."""
    sizes, credit = Sizes({group: range(80_000) for group in range(8)}), 0.0
    old = dict.fromkeys(sizes, 1)
    for checkpoint in range(100, 400, 2):
        merging = Merging(credit)
        merging.entries, merging.oldest = dict.fromkeys(sizes, 1_000), old.copy()
        for each in (checkpoint, checkpoint + 1):
            for group in (chosen := merging.choose(each, 10, sizes)):
                old[group] = each
            assert not any(chosen.values())
        credit = merging.credit
    assert min(old.values()) > 400 - 1.1 * CYCLE_MAX


def test_rare_changes_are_merged_by_age() -> None:
    sizes = Sizes({group: range(8_000) for group in range(128)})
    _, _, merging = _run(sizes, [{checkpoint * 37 % 128: 1} for checkpoint in range(2_000)])
    assert min(merging.oldest.values()) > 2_000 - 1.1 * CYCLE_MAX


def test_one_hot_key_costs_next_to_nothing() -> None:
    sizes = Sizes({group: range(8_000) for group in range(128)})
    imaged, _, _ = _run(sizes, [{5: 1}] * 2_000)
    assert imaged <= 8_000 * (2 * 2_000 / CYCLE_MAX + 1)

"""The contract of every state backend; see the package.

A checkpoint that is not sealed was aborted. A plain dict, changed by the same records, is the expected state.
"""

from __future__ import annotations

import copy
import sys
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import msgspec

from exactlyonce.pipeline.errors import InvariantViolation
from exactlyonce.pipeline.keys import key_group
from exactlyonce.state.backend import StateBackend, Table, TableSnapshot
from exactlyonce.state.chain import decode_index
from exactlyonce.state.errors import ApplyFailed, StateIncompatible, StateUnstorable
from exactlyonce.state.hash_map import HashMapBackend
from exactlyonce.testing.contract import refused
from exactlyonce.testing.state_contract.memory import MAX_PARALLELISM, OPERATOR, StateBlocks, Subtasks, key_of
from exactlyonce.testing.state_contract.timed import TimedTableContract

KEYS = range(60)
AT_BARRIER = "A snapshot is the state at its barrier, whatever records do after it: set the interval aside, or clone."
ALL_CHANGES = "A snapshot holds all changes since its base, of checkpoints that were aborted as well."
NEUTRAL = "Blocks are the same for every backend: sections of key groups, as `state.blocks` writes them."
FREEZE_BYTES_MAX = 64 * 1024
"""The memory that freezing may allocate, however many keys there are: none is copied."""
MANY = 20_000


class Cart(msgspec.Struct):
    """A state that is changed in place."""

    items: list[int]


def _fill(cart: Cart | None, item: int) -> tuple[Cart | None, Cart | None]:
    """Add in place; a negative item deletes the cart."""
    if item < 0:
        return None, None
    cart = cart or Cart([])
    cart.items.append(item)
    return cart, cart


class StateBackendContract(TimedTableContract):
    """See the package."""

    def backend(self) -> StateBackend:
        """A new backend, as in its own process."""
        raise NotImplementedError

    def subtasks(self, blocks: StateBlocks | None = None, type_: Any = int, **restored: Any) -> Subtasks:
        """The subtasks of an operator, each with a table of a new backend."""
        return Subtasks(self.backend(), blocks or StateBlocks(), type_, **restored)

    def table(self, type_: Any = int) -> Table[Any]:
        """An empty table."""
        return self.subtasks(type_=type_).tables[0]

    def restores(
        self, before: Subtasks, indexes: Sequence[bytes], checkpoint: int, expected: Mapping[int, Any], why: str,
        **restored: Any,
    ) -> Subtasks:  # fmt: skip
        """The subtasks of a new process; fail with *why* unless they hold *expected*."""
        __tracebackhide__ = True
        restored = {"parallelism": before.parallelism, **restored}
        after = self.subtasks(before.blocks, before.type, checkpoint=checkpoint, indexes=indexes, **restored)
        wanted = {key_of(number): state for number, state in expected.items()}
        _same(after.items(), wanted, why)
        return after

    # --- records ------------------------------------------------------------------------------------------------------

    def test_records_see_what_those_before_them_left(self) -> None:
        """Each record of a key sees the state that the one before it left, in one batch or in several."""
        table, a, b = self.table(), key_of(1), key_of(2)
        outputs = table.apply(_add, [a, b, a], [1, 10, 2]) + table.apply(_add, [b], [5])
        assert outputs == [1, 10, 3, 15], f"Records of a batch go through in order, one after another: {outputs}"
        assert (table.get(a), table.get(b), table.get(key_of(3))) == (3, 15, None)
        assert dict(table.items()) == {a: 3, b: 15}

    def test_none_deletes(self) -> None:
        """A key whose state became None is as if it had never been, within the batch and after a barrier."""
        table, key = self.table(), key_of(1)

        def until_three(count: int | None, _: Any) -> tuple[int | None, int | None]:
            count = (count or 0) + 1
            return (None, None) if count == 3 else (count, count)

        gone = "None deletes the key: the next record of it finds no state."
        assert table.apply(until_three, [key] * 4, range(4)) == [1, 2, None, 1], gone
        table.freeze(1, 0)
        assert table.apply(until_three, [key] * 2, range(2)) == [2, None], gone
        assert (table.get(key), dict(table.items())) == (None, {}), gone

    def test_reduce(self) -> None:
        """The first record of a key is its accumulator; records and earlier outputs do not change."""
        table, key = self.table(Cart), key_of(1)

        def join(cart: Cart, other: Cart) -> Cart:
            cart.items += other.items
            return cart

        records = [Cart([1]), Cart([2]), Cart([3])]
        outputs = table.reduce(join, [key] * 3, records)
        assert outputs == [Cart([1]), Cart([1, 2]), Cart([1, 2, 3])], (
            f"An accumulator that is changed in place is cloned for each output: {outputs}"
        )
        assert records == [Cart([1]), Cart([2]), Cart([3])], f"A record became the accumulator itself: {records}"

    def test_a_failing_function(self) -> None:
        """The error says which record of the batch failed; its cause is the function's error."""
        runs: Sequence[Callable[[list[bytes], list[int]], Any]] = (
            partial(self.table().apply, lambda _, record: (1 // record, record)),
            partial(self.table().reduce, lambda _, record: 1 // record),
        )
        for run in runs:
            failed = refused(partial(run, [key_of(1)] * 3, [1, 1, 0]), ApplyFailed, "What the function raised is lost.")
            assert failed.args == (2,), f"The third record failed, and the error says {failed}."
            assert isinstance(failed.__cause__, ZeroDivisionError), "What the function raised is the cause."

    def test_a_record_of_another_key_group(self) -> None:
        """A record sent to the wrong subtask is a defect, not a new key."""
        subtasks = self.subtasks(parallelism=2)
        wrong = next(table for table in subtasks.tables if table is not subtasks.table_of(key_of(1)))
        why = "The table took a record of a key group that is not its own: it would be lost at restore."
        refused(lambda: wrong.apply(_add, [key_of(1)], [1]), InvariantViolation, why)

    # --- snapshots ----------------------------------------------------------------------------------------------------

    def test_freezing_takes_constant_time(self) -> None:
        """Freezing copies nothing and costs no more for 20,000 keys than for 20."""
        costs = {count: self._cost_of_freezing(count) for count in (20, MANY)}
        slow = "The synchronous part of a snapshot is constant: records wait for it. Encode and copy in `encode`."
        assert costs[MANY][0] <= FREEZE_BYTES_MAX, f"{slow} Freezing {MANY} keys took {costs[MANY][0]} bytes."
        assert costs[MANY][1] <= costs[20][1] + 20, f"{slow} Calls made, by number of keys: {costs}."

    def _cost_of_freezing(self, count: int) -> tuple[int, int]:
        """(bytes allocated, functions called) by a freeze of *count* changed keys."""
        table, called = self.table(), 0
        table.apply(_add, [key_of(number) for number in range(count)], range(count))

        def counting(*_: Any) -> None:
            nonlocal called
            called += 1

        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        sys.setprofile(counting)
        try:
            table.freeze(1, 0)
        finally:
            sys.setprofile(None)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        return peak - before, called

    def test_encoding_goes_in_slices(self) -> None:
        """Records are processed between two slices of an encoding, so a large table has many."""
        table = self.table()
        table.apply(_add, [key_of(number) for number in range(MANY)], range(MANY))
        slices = sum(1 for _ in table.freeze(1, 0).encode())
        assert slices >= 20, f"{MANY} keys were encoded in {slices} slices: records wait for each of them."

    def test_a_snapshot_is_the_state_at_its_barrier(self) -> None:
        """Records that change, add or delete states after any slice do not affect the snapshot."""
        for type_, fn in ((int, _add_or_delete), (Cart, _fill)):
            steps = 1 + sum(1 for _ in self._begun(type_, fn).freeze(2, 1).encode())
            for instant in range(steps):
                self._disturbed(type_, fn, instant)

    def _begun(self, type_: Any, fn: Callable[..., Any], blocks: StateBlocks | None = None) -> Table[Any]:
        """A table with a sealed checkpoint 1 and later changes."""
        blocks = blocks or StateBlocks()
        table = self.subtasks(blocks, type_).tables[0]
        table.apply(fn, [key_of(number) for number in KEYS], [1] * len(KEYS))
        blocks.write(table.freeze(1, 0))
        table.apply(fn, [key_of(number) for number in range(12)], [2] * 10 + [-1] * 2)
        return table

    def _disturbed(self, type_: Any, fn: Callable[..., Any], instant: int) -> None:
        blocks = StateBlocks()
        table = self._begun(type_, fn, blocks)
        expected = copy.deepcopy(dict(table.items()))
        snapshot, refs = table.freeze(2, 1), []
        encoding = snapshot.encode()
        for _ in range(instant):
            block = next(encoding, None)
            refs += [blocks.put(block)] if block is not None else []
        table.apply(fn, [key_of(number) for number in (*KEYS, 90, 91)], [7] * 30 + [-1] * 30 + [7, 7])
        newest = copy.deepcopy(dict(table.items()))
        refs += [blocks.put(block) for block in encoding if block is not None]
        index = snapshot.seal(refs)
        restored = self.subtasks(blocks, type_, checkpoint=2, indexes=index)
        _same(restored.items(), expected, f"{AT_BARRIER}\nAfter slice {instant}:")
        assert dict(table.items()) == newest, "Encoding changed what records see."

    def test_several_snapshots_are_open(self) -> None:
        """Three snapshots that are encoded in turns are each the state at their own barrier."""
        for type_, fn in ((int, _add_or_delete), (Cart, _fill)):
            blocks = StateBlocks()
            table = self._begun(type_, fn, blocks)
            expected: dict[int, Any] = {}
            snapshots: list[TableSnapshot] = []
            for checkpoint in (2, 3, 4):
                expected[checkpoint] = copy.deepcopy(dict(table.items()))
                snapshots.append(table.freeze(checkpoint, 1))
                keys = [key_of(number) for number in range(checkpoint, 40)]
                table.apply(fn, keys, [checkpoint] * (len(keys) - 1) + [-1])
            indexes = _in_turns(blocks, snapshots)
            for checkpoint, index in indexes.items():
                restored = self.subtasks(blocks, type_, checkpoint=checkpoint, indexes=index)
                why = f"{AT_BARRIER}\nOf three that were open at once, checkpoint {checkpoint}:"
                _same(restored.items(), expected[checkpoint], why)

    def test_increments(self) -> None:
        """One changed key of many costs a small part of the first snapshot, after a restore too."""
        subtasks = self.subtasks()
        model = {number: number for number in range(5_000)}
        subtasks.put(model)
        indexes = subtasks.write(subtasks.freeze(1, 0))
        first = subtasks.blocks.size
        for checkpoint in (2, 3):
            subtasks.put({7: checkpoint})
            model[7] = checkpoint
            before = subtasks.blocks.size
            indexes = subtasks.write(subtasks.freeze(checkpoint, checkpoint - 1))
            cost = subtasks.blocks.size - before
            assert cost < first / 4, (
                f"One key of 5,000 had changed, and its snapshot took {cost} bytes, where all take {first}: a snapshot "
                f"is relative to its base, and refers to what the base has written."
            )
            subtasks = self.restores(subtasks, indexes, checkpoint, model, "An increment belongs to its image.")

    def test_a_checkpoint_that_is_aborted(self) -> None:
        """Checkpoints 2 and 3 are aborted, half encoded or not at all; 4, relative to 1, has their changes."""
        for encoded in (0, 1, 1_000):
            subtasks = self.subtasks()
            model: dict[int, Any] = dict.fromkeys(KEYS, 1)
            subtasks.put(model)
            subtasks.write(subtasks.freeze(1, 0))
            for checkpoint in (2, 3):
                changes = {checkpoint: checkpoint, 10 + checkpoint: None}
                subtasks.put(changes)
                model = _changed(model, changes)
                for snapshot in subtasks.freeze(checkpoint, 1):
                    for block in filter(None, islice(snapshot.encode(), encoded)):
                        subtasks.blocks.put(block)
            subtasks.put({20: 4})
            model[20] = 4
            indexes = subtasks.write(subtasks.freeze(4, 1))
            subtasks.put({21: 5})
            model[21] = 5
            self.restores(subtasks, indexes, 4, {**model, 21: 1}, ALL_CHANGES)
            indexes = subtasks.write(subtasks.freeze(5, 4))
            self.restores(subtasks, indexes, 5, model, ALL_CHANGES)

    def test_a_checkpoint_that_completes_late(self) -> None:
        """Checkpoint 3 is triggered on base 1 while 2 is in progress; 2 completes, then 3, both whole."""
        subtasks = self.subtasks()
        subtasks.put(dict.fromkeys(KEYS, 1))
        subtasks.write(subtasks.freeze(1, 0))
        subtasks.put({1: 2, 2: None})
        second, after_second = subtasks.freeze(2, 1), {**{number: 1 for number in KEYS if number != 2}, 1: 2}
        subtasks.put({2: 3, 3: 3})
        third = subtasks.freeze(3, 1)
        for checkpoint, frozen, model in ((2, second, after_second), (3, third, {**after_second, 2: 3, 3: 3})):
            self.restores(subtasks, subtasks.write(frozen), checkpoint, model, ALL_CHANGES)

    def test_a_savepoint(self) -> None:
        """A whole snapshot refers to no older block, and later checkpoints build on it."""
        subtasks = self.subtasks()
        model: dict[int, Any] = dict.fromkeys(KEYS, 1)
        subtasks.put(model)
        subtasks.write(subtasks.freeze(1, 0))
        for checkpoint, changes in ((2, {1: 2, 2: None, 900: 1}), (3, {3: None})):
            subtasks.put(changes)
            model = _changed(model, changes)
            frozen = subtasks.freeze(checkpoint, 1, whole=checkpoint == 3)
        subtasks.put({4: 7, 5: None})
        indexes = subtasks.write(frozen)
        stands_on = {block.checkpoint for snapshot in frozen for block in snapshot.chain.blocks}
        assert stands_on == {3}, f"What is written whole has no older block in its chain: {stands_on}"
        self.restores(subtasks, indexes, 3, model, ALL_CHANGES)
        later = subtasks.write(subtasks.freeze(4, 3))
        self.restores(subtasks, later, 4, _changed(model, {4: 7, 5: None}), ALL_CHANGES)

    def test_every_checkpoint_whole(self) -> None:
        """Checkpoints that are all written whole refer to no other, even if some were never completed."""
        subtasks = self.subtasks()
        model: dict[int, Any] = dict.fromkeys(KEYS, 1)
        subtasks.put(model)
        base, indexes = 0, []
        for checkpoint, changes in ((1, {}), (2, {1: 2, 900: 1}), (3, {2: None}), (4, {}), (5, {900: None, 3: 4})):
            subtasks.put(changes)
            model = _changed(model, changes)
            frozen = subtasks.freeze(checkpoint, base, whole=True)
            indexes = subtasks.write(frozen)
            stands_on = {block.checkpoint for snapshot in frozen for block in snapshot.chain.blocks}
            assert stands_on == {checkpoint}, f"Checkpoint {checkpoint} has older blocks in its chain: {stands_on}"
            base = checkpoint if checkpoint != 3 else base
        self.restores(subtasks, indexes, 5, model, ALL_CHANGES)

    def test_deleted_keys(self) -> None:
        """A deleted key does not return with an older block, and one that was set again is there."""
        subtasks = self.subtasks()
        model: dict[int, Any] = dict.fromkeys(KEYS, 1)
        subtasks.put(model)
        subtasks.write(subtasks.freeze(1, 0))
        back = "A key that was deleted came back from an older block: an increment names what was deleted."
        histories: Sequence[Mapping[int, Any]] = (
            {1: None, 2: None, 3: None, 70: 1}, {1: 5, 70: None, 71: None}, {2: 6, 1: None, 3: 1}, {3: None, 4: 8},
        )  # fmt: skip
        for checkpoint, changes in enumerate(histories, 2):
            subtasks.put(changes)
            model = _changed(model, changes)
            indexes = subtasks.write(subtasks.freeze(checkpoint, checkpoint - 1))
            subtasks = self.restores(subtasks, indexes, checkpoint, model, back)
        subtasks.put(dict.fromkeys(model))
        indexes = subtasks.write(subtasks.freeze(9, 5))
        self.restores(subtasks, indexes, 9, {}, "All keys were deleted, one by one.")

    def test_what_cannot_be_stored(self) -> None:
        """A state of another type fails its snapshot, naming the operator: it could not be restored."""
        table = self.table()
        table.apply(lambda _, record: (record, None), [key_of(1)], ["no number"])
        snapshot = table.freeze(1, 0)
        why = "A state that is not of the operator's type was stored: no restart could read it."
        error = refused(lambda: list(snapshot.encode()), StateUnstorable, why)
        assert OPERATOR in str(error), f"The error names the operator: {error}"

    def test_checkpoints_and_bases_only_grow(self) -> None:
        """A checkpoint frozen before, or a base that was never sealed or was superseded, is a defect."""
        subtasks = self.subtasks()
        for checkpoint in (1, 2):
            subtasks.write(subtasks.freeze(checkpoint, 0))
        subtasks.freeze(3, 2)
        for checkpoint, base in ((3, 2), (4, 1), (4, 3)):
            why = f"Checkpoint {checkpoint} on base {base} was frozen: what is it relative to?"
            refused(partial(subtasks.freeze, checkpoint, base), InvariantViolation, why)

    # --- restarts -----------------------------------------------------------------------------------------------------

    def test_other_parallelism(self) -> None:
        """State moves by key groups from any number of subtasks to any other, repeatedly."""
        subtasks, model = self.subtasks(), dict[int, Any]()
        for checkpoint, parallelism in enumerate((1, 3, 2, 8, 1), 1):
            changes = {number: checkpoint for number in KEYS if number % checkpoint == 0}
            subtasks.put(changes)
            model |= changes
            indexes = subtasks.write(subtasks.freeze(checkpoint, checkpoint - 1))
            why = f"{len(subtasks.tables)} subtasks wrote it, and {parallelism} restore it."
            subtasks = self.restores(subtasks, indexes, checkpoint, model, why, parallelism=parallelism)

    def test_some_key_groups(self) -> None:
        """A table restored in part reads the blocks of its key groups; its snapshot keeps references to the others."""
        subtasks = self.subtasks(parallelism=MAX_PARALLELISM)
        model: dict[int, Any] = dict.fromkeys(range(2000), 1)
        subtasks.put(model)
        indexes = subtasks.write(subtasks.freeze(1, 0))
        touched = key_group(key_of(5), MAX_PARALLELISM)
        mine = {n: 1 for n in model if key_group(key_of(n), MAX_PARALLELISM) == touched}
        subtasks.blocks.read.clear()
        partly = self.restores(
            subtasks, indexes, 1, mine, "Exactly the key groups that are asked for are there.", parallelism=1,
            touched={touched},
        )  # fmt: skip
        listed = {block.ref for part in indexes for block in decode_index(part).blocks}
        read, total = len(subtasks.blocks.read), len(listed)
        assert read < total, f"To have one key group of {MAX_PARALLELISM}, {read} of {total} blocks were read."
        partly.put({5: 2})
        indexes = partly.write(partly.freeze(2, 1))
        self.restores(partly, indexes, 2, {**model, 5: 2}, "What was not restored is carried over by reference.")

    def test_blocks_of_another_backend(self) -> None:
        """Increments of the hash map are restored, and the hash map restores this backend's."""
        mine, other = self.backend(), HashMapBackend()
        model: dict[int, Any] = dict.fromkeys(KEYS, 1)
        subtasks = Subtasks(other, StateBlocks())
        for checkpoint, (writer, reader) in enumerate(((other, mine), (mine, other), (other, mine), (mine, mine)), 1):
            assert subtasks.backend is writer
            changes = {checkpoint: checkpoint, 10 + checkpoint: None} if checkpoint > 1 else model
            subtasks.put(changes)
            model = _changed(model, changes)
            indexes = subtasks.write(subtasks.freeze(checkpoint, checkpoint - 1))
            subtasks = Subtasks(reader, subtasks.blocks, checkpoint=checkpoint, indexes=indexes)
            _same(subtasks.items(), {key_of(number): state for number, state in model.items()}, NEUTRAL)

    def test_state_of_another_type(self) -> None:
        """State that cannot be read as the declared type is refused."""
        subtasks = self.subtasks(type_=str)
        subtasks.put({1: "one"})
        indexes = subtasks.write(subtasks.freeze(1, 0))
        restored = partial(self.subtasks, subtasks.blocks, int, checkpoint=1, indexes=indexes)
        refused(lambda: restored().items(), StateIncompatible, "Texts were restored as numbers.")

    def test_nothing_is_stored(self) -> None:
        """A checkpoint without state has no index and is still a base."""
        subtasks = self.subtasks()
        indexes = subtasks.write(subtasks.freeze(1, 0))
        assert indexes == [], "Empty state has no index."
        after = self.restores(subtasks, indexes, 1, {}, "Nothing was stored.")
        after.put({1: 1})
        self.restores(after, after.write(after.freeze(2, 1)), 2, {1: 1}, ALL_CHANGES)


def _add(total: int | None, amount: int) -> tuple[int, int]:
    total = (total or 0) + amount
    return total, total


def _add_or_delete(total: int | None, amount: int) -> tuple[int | None, int | None]:
    return (None, None) if amount < 0 else _add(total, amount)


def _changed(model: Mapping[int, Any], changes: Mapping[int, Any]) -> dict[int, Any]:
    return {number: state for number, state in {**model, **changes}.items() if state is not None}


def _in_turns(blocks: StateBlocks, snapshots: Sequence[TableSnapshot]) -> dict[int, tuple[bytes, ...]]:
    """Encode the snapshots slice by slice in turns, the newest first; the indexes by checkpoint."""
    encodings = [(snapshot, snapshot.encode(), list[Any]()) for snapshot in snapshots]
    waiting = [*reversed(encodings)]
    end = object()
    while waiting:
        for encoding in [*waiting]:
            block: Any = next(encoding[1], end)
            if block is end:
                waiting.remove(encoding)
            elif block is not None:
                encoding[2].append(blocks.put(block))
    return {snapshot.checkpoint: snapshot.seal(refs) for snapshot, _, refs in encodings}


def _same(states: Mapping[bytes, Any], wanted: Mapping[bytes, Any], why: str) -> None:
    """Fail with *why* unless both are equal."""
    __tracebackhide__ = True
    missing = [(key, state) for key, state in wanted.items() if states.get(key) != state]
    added = [(key, state) for key, state in states.items() if wanted.get(key) != state]
    difference = f"Of {len(wanted)} keys it is to have {missing[:3]}, and has instead {added[:3]}."
    assert states == wanted, f"{why}\n{difference}"

"""The contract of the timed tables of a state backend; see the package.

A plain dict by (slot, number of the key), changed alike, is the expected state. A slot that has fired is gone there.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import msgspec

from exactlyonce.pipeline.errors import InvariantViolation
from exactlyonce.pipeline.event_time import NO_WATERMARK
from exactlyonce.pipeline.keys import key_group
from exactlyonce.state.backend import StateBackend, TimedTable
from exactlyonce.state.errors import ApplyFailed, StateIncompatible
from exactlyonce.state.hash_map import HashMapBackend
from exactlyonce.state.key_groups import subtask_of
from exactlyonce.testing.contract import refused
from exactlyonce.testing.state_contract.memory import MAX_PARALLELISM, StateBlocks, Subtasks, TimedSubtasks, key_of

FEW = range(20)
SLOTS = (-10_000, -1, 0, 9_999)
Model = dict[tuple[int, int], Any]
BACK = "A slot that was dropped came back from an older block: the index has its floor, which applies to every block."
ALL_CHANGES = "A snapshot holds all changes since its base, and is the state at its barrier."


class Visits(msgspec.Struct):
    """A state that is changed in place."""

    pages: list[int]


def _visit(visits: Visits | None, page: int) -> Visits:
    visits = visits or Visits([])
    visits.pages.append(page)
    return visits


def _add(total: int | None, amount: int) -> int:
    return (total or 0) + amount


class TimedTableContract:
    """See the package."""

    def backend(self) -> StateBackend:
        """A new backend, as in its own process."""
        raise NotImplementedError

    def timed(self, blocks: StateBlocks | None = None, type_: Any = int, **restored: Any) -> TimedSubtasks:
        """The subtasks of an operator, each with a timed table of a new backend."""
        return TimedSubtasks(self.backend(), blocks or StateBlocks(), type_, **restored)

    def timed_table(self, type_: Any = int) -> TimedTable[Any]:
        """An empty one."""
        return self.timed(type_=type_).tables[0]

    def continues(
        self, before: TimedSubtasks, indexes: Sequence[bytes], checkpoint: int, model: Model, why: str, **restored: Any
    ) -> TimedSubtasks:
        """The subtasks of a new process; fail with *why* unless they hold *model*, by every way of reading."""
        __tracebackhide__ = True
        restored = {"parallelism": before.parallelism, **restored}
        after = self.timed(before.blocks, before.type, checkpoint=checkpoint, indexes=indexes, **restored)
        _holds(after, model, why)
        return after

    # --- records ------------------------------------------------------------------------------------------------------

    def test_records_update_their_slots(self) -> None:
        """Each record sees the state that the one before it left in its slot, in one batch or in several."""
        table, a, b = self.timed_table(), key_of(1), key_of(2)
        table.update(_add, [9, 9, 19, 9], [a, b, a, a], [1, 10, 5, 2])
        table.update(_add, [9], [b], [5])
        states = {(slot, key): state for slot, key, state in table.items()}
        assert states == {(9, a): 3, (9, b): 15, (19, a): 5}, f"States are kept by slot and key, not {states}."
        assert (table.get(9, a), table.get(19, b)) == (3, None)
        assert table.get_all(9, [b, key_of(3), a, b]) == [15, None, 3, 15]
        assert [[*table.slots_of(key)] for key in (a, b, key_of(3))] == [[9, 19], [9], []]

    def test_records_that_become_the_state(self) -> None:
        """A record that is returned as the state does not change with it."""
        table, record = self.timed_table(Visits), Visits([1])
        table.update(lambda visits, other: visits or other, [9], [key_of(1)], [record])
        table.update(_visit, [9], [key_of(1)], [2])
        assert (record, table.get(9, key_of(1))) == (Visits([1]), Visits([1, 2])), "A record became the state itself."

    def test_a_failing_update(self) -> None:
        """The error says which record of the batch failed; its cause is the function's error."""
        run = partial(self.timed_table().update, lambda _, record: 1 // record, [9] * 3, [key_of(1)] * 3, [1, 1, 0])
        failed = refused(run, ApplyFailed, "What the function raised is lost.")
        assert failed.args == (2,), f"The third record failed, and the error says {failed}."
        assert isinstance(failed.__cause__, ZeroDivisionError), "What the function raised is the cause."

    def test_timed_records_of_another_key_group(self) -> None:
        """A record sent to the wrong subtask is a defect, whatever its slot."""
        subtasks = self.timed(parallelism=2)
        wrong = next(table for table in subtasks.tables if table is not subtasks.table_of(key_of(1)))
        why = "The table took a record of a key group that is not its own: it would be lost at restore."
        for slot in SLOTS:
            refused(partial(wrong.update, _add, [slot], [key_of(1)], [1]), InvariantViolation, why)

    def test_put_and_remove(self) -> None:
        """A removed state is as if it had never been, before and after a barrier; it may be put again."""
        table, key = self.timed_table(), key_of(1)
        for checkpoint in (1, 2):
            table.put(9, key, 5)
            table.put(9, key, None)
            table.put(29, key, None)
            assert (table.get(9, key), [*table.slots_of(key)], _states(table)) == (None, [], [])
            table.put(9, key, 6)
            table.put(19, key, 7)
            assert [*table.slots_of(key)] == [9, 19], f"States are in slots 9 and 19, not {table.slots_of(key)}."
            assert dict(_states(table)) == {(9, key): 6, (19, key): 7}
            table.freeze(checkpoint, 0)
            table.put(9, key, None)
            table.put(19, key, None)
            assert table.read(9, key_group(key, MAX_PARALLELISM)) == ([], []), "A removed state fired."

    def test_replacing_beside_a_snapshot(self) -> None:
        """States that are replaced together, or changed in place, leave those of an open snapshot as they were."""
        subtasks, slot = self.timed(type_=Visits), 9
        subtasks.put({(slot, number): Visits([number]) for number in FEW})
        model: Model = {(slot, number): Visits([number]) for number in FEW}
        snapshots = subtasks.freeze(1, 0)
        for number in FEW:
            key, table = key_of(number), subtasks.table_of(key_of(number))
            table.put_all(slot, {key: None if number % 3 == 0 else Visits([number, 1])})
            if number % 3:
                table.update(_visit, [slot], [key], [2])
        indexes = subtasks.write(snapshots)
        self.continues(subtasks, indexes, 1, model, "A snapshot is the state at its barrier.")
        new: Model = {(slot, number): Visits([number, 1, 2]) for number in FEW if number % 3}
        _holds(subtasks, new, "States are those that were put last.")

    # --- firing -------------------------------------------------------------------------------------------------------

    def test_slots_fire_in_order(self) -> None:
        """Slots, negative ones too, key groups and keys come in order, up to a limit; then they are gone."""
        subtasks = self.timed()
        model = {(slot, number): slot + number for slot in SLOTS for number in FEW}
        subtasks.put(dict(reversed(model.items())))
        table = subtasks.tables[0]
        assert table.slots(-10_001) == []
        assert table.slots(0) == [-10_000, -1, 0], f"Slots up to 0 are -10000, -1 and 0, not {table.slots(0)}."
        expected = sorted(
            (slot, key_group(key_of(number), MAX_PARALLELISM), key_of(number), state)
            for (slot, number), state in model.items()
        )
        due = [entry for entry in expected if entry[0] <= 0]
        assert subtasks.fire(0) == due, "The order of results is (slot, key group, key), whatever came first."
        assert subtasks.fire(0) == [], "A slot that was dropped fired again."
        assert subtasks.fire(9_999) == expected[len(due) :]
        assert (_states(table), [*table.slots_of(key_of(1))]) == ([], [])

    def test_a_drop_takes_earlier_slots(self) -> None:
        """All slots of the key group up to the given one go; other groups', and later ones, stay."""
        group = key_group(key_of(1), MAX_PARALLELISM)
        others = {number for number in FEW if key_group(key_of(number), MAX_PARALLELISM) != group}
        for takes in (False, True):
            subtasks = self.timed()
            model = {(slot, number): slot for slot in SLOTS for number in FEW}
            subtasks.put(model)
            if takes:
                keys = sorted(key_of(number) for number in FEW if number not in others)
                assert subtasks.tables[0].take(-1, group) == (keys, [-1] * len(keys)), "A slot is read as it is taken."
            else:
                subtasks.tables[0].drop(-1, [group])
            rest = {(slot, number): slot for slot, number in model if slot >= 0 or number in others}
            _holds(subtasks, rest, "The wrong states were dropped.")

    def test_a_state_in_a_dropped_slot(self) -> None:
        """It would be lost at the next restore, so it is a defect."""
        table = self.timed_table()
        table.put(9, key_of(1), 1)
        table.drop(9, [key_group(key_of(1), MAX_PARALLELISM)])
        why = "A state was put into a slot that was dropped: it would not be restored."
        for slot in (9, 8):
            refused(partial(table.update, _add, [slot], [key_of(1)], [1]), InvariantViolation, why)

    def test_watermarks(self) -> None:
        """A table's holds for all of its key groups. Each keeps it, without any state, at any parallelism."""
        subtasks, known = self.timed(parallelism=3), dict.fromkeys(range(MAX_PARALLELISM), NO_WATERMARK)
        for checkpoint, (watermarks, parallelism) in enumerate((((5, -10, 20), 2), ((7, 3), 1), ((6,), 8)), 1):
            for group in known:
                before = subtasks.tables[subtask_of(group, subtasks.parallelism, MAX_PARALLELISM)].watermark(group)
                assert before == known[group], f"Group {group} had the watermark {known[group]}, and has {before}."
                watermark = watermarks[subtask_of(group, subtasks.parallelism, MAX_PARALLELISM)]
                known[group] = max(known[group], watermark)
            for table, watermark in zip(subtasks.tables, watermarks, strict=True):
                table.advance(watermark)
                table.advance(-200)
            frozen = subtasks.freeze(checkpoint, checkpoint - 1)
            subtasks.tables[0].advance(999)
            indexes = subtasks.write(frozen)
            subtasks = self.continues(subtasks, indexes, checkpoint, {}, "Nothing is stored.", parallelism=parallelism)
        assert [table.watermark(group) for group, table in enumerate(subtasks.tables)] == list(known.values())

    def test_a_firing_that_was_under_way(self) -> None:
        """A key group keeps the slot and key that a firing was at, at any parallelism, until its watermark is there."""
        subtasks, group = self.timed(parallelism=3), key_group(key_of(1), MAX_PARALLELISM)
        table = subtasks.tables[subtask_of(group, 3, MAX_PARALLELISM)]
        table.advance(5)
        table.begin(group, 9, key_of(1))
        indexes = subtasks.write(subtasks.freeze(1, 0))
        subtasks = self.continues(subtasks, indexes, 1, {}, "Nothing is stored.", parallelism=1)
        (table,) = subtasks.tables
        assert (table.begun(group), table.watermark(group)) == ((9, key_of(1)), 5), "Where it was is in the index."
        assert {table.begun(other) for other in range(MAX_PARALLELISM) if other != group} == {None}
        table.advance(8)
        assert table.begun(group) == (9, key_of(1)), "The slot is not over."
        table.advance(9, (group,))
        assert (table.begun(group), table.watermark(group)) == (None, 9), "The slot is over in this group."
        other = (group + 1) % MAX_PARALLELISM
        assert table.watermark(other) == 8, "A watermark of one group is none of another."
        table.update(_add, [20], [key_of(1)], [1])
        table.drop(20, (group,))
        assert table.watermark(group) == 20, "What was dropped was due."

    # --- snapshots ----------------------------------------------------------------------------------------------------

    def test_dropped_slots_stay_away(self) -> None:
        """Older blocks bring none back: through increments, restarts at other parallelism, and savepoints."""
        subtasks, model, base = self.timed(), Model(), 0
        for checkpoint, parallelism in enumerate((1, 3, 2, 8, 1, 1), 1):
            changes = {(slot, number): checkpoint for slot in (checkpoint, 100) for number in FEW}
            changes |= {(checkpoint + 1, number): -checkpoint for number in range(0, 20, 3)}
            subtasks.put(changes)
            subtasks.fire(checkpoint - 1)
            model = {at: state for at, state in {**model, **changes}.items() if at[0] >= checkpoint}
            indexes = subtasks.write(subtasks.freeze(checkpoint, base, whole=checkpoint == 4))
            base = checkpoint
            subtasks = self.continues(subtasks, indexes, checkpoint, model, BACK, parallelism=parallelism)

    def test_a_drop_after_the_barrier(self) -> None:
        """A snapshot has the slots that fired after its barrier, after any slice; the next one does not."""
        for type_, fn in ((int, _add), (Visits, _visit)):
            instant, steps = 0, 1
            while instant < steps:
                steps = self._fired_after(type_, fn, instant)
                instant += 1 + steps // 12

    def _fired_after(self, type_: Any, fn: Any, instant: int) -> int:
        """The number of slices."""
        subtasks = self.timed(type_=type_)
        table = subtasks.tables[0]
        keys = [key_of(number) for number in FEW]
        for slot in (10, 20, 30):
            table.update(fn, [slot] * len(keys), keys, [1] * len(keys))
        subtasks.write(subtasks.freeze(1, 0))
        table.update(fn, [10] * 9 + [20] * 9, [*keys[:9], *keys[:9]], [2] * 18)
        table.put(20, keys[3], None)
        at_barrier = _model(subtasks)
        snapshot, refs, steps = table.freeze(2, 1), list[Any](), 0
        encoding = snapshot.encode()

        def encode(count: int | None) -> None:
            nonlocal steps
            for block in islice(encoding, count):
                steps += 1
                if block is not None:
                    refs.append(subtasks.blocks.put(block))

        encode(instant)
        subtasks.fire(10)
        table.update(fn, [20] * 20 + [40] * 20, [*keys, *keys], [7] * 40)
        encode(1)
        subtasks.fire(20)
        table.update(fn, [30] * 20, keys, [8] * 20)
        later = _model(subtasks)
        encode(None)
        indexes = [*snapshot.seal(refs)]
        self.continues(subtasks, indexes, 2, at_barrier, f"{ALL_CHANGES} Slots fired after slice {instant}.")
        _holds(subtasks, later, "Encoding changed what records see.")
        indexes = subtasks.write(subtasks.freeze(3, 2))
        self.continues(subtasks, indexes, 3, later, BACK)
        return steps

    def test_a_timed_checkpoint_that_is_aborted(self) -> None:
        """Checkpoints 2 and 3 are aborted, half encoded or not at all; 4 has their changes and drops."""
        for encoded in (0, 1, 1_000):
            subtasks = self.timed()
            model: Model = {(slot, number): 1 for slot in (10, 20, 30) for number in FEW}
            subtasks.put(model)
            subtasks.write(subtasks.freeze(1, 0))
            for checkpoint, floor in ((2, 10), (3, 12)):
                changes: Model = {(20, checkpoint): checkpoint, (30, checkpoint): None, (floor, 1): 5}
                changes[20 + checkpoint, 1] = 5
                subtasks.put({at: state for at, state in changes.items() if at[0] != 10})
                subtasks.fire(floor)
                for snapshot in subtasks.freeze(checkpoint, 1):
                    for block in filter(None, islice(snapshot.encode(), encoded)):
                        subtasks.blocks.put(block)
                changes |= {(20, 15): None, (40, checkpoint): 4}
                subtasks.put({at: state for at, state in changes.items() if at[0] > floor})
                model = {at: state for at, state in {**model, **changes}.items() if state and at[0] > floor}
            indexes = subtasks.write(subtasks.freeze(4, 1))
            subtasks = self.continues(subtasks, indexes, 4, model, ALL_CHANGES)
            subtasks.fire(20)
            model = {at: state for at, state in model.items() if at[0] > 20}
            self.continues(subtasks, subtasks.write(subtasks.freeze(5, 4)), 5, model, BACK)

    def test_a_drop_costs_no_tombstones(self) -> None:
        """The checkpoint after 5,000 states were dropped is a small part of the one with them."""
        subtasks = self.timed()
        table = subtasks.tables[0]
        keys = [key_of(number) for number in range(5_000)]
        table.update(_add, [10] * len(keys), keys, range(len(keys)))
        subtasks.write(subtasks.freeze(1, 0))
        first = subtasks.blocks.size
        subtasks.fire(10)
        indexes = subtasks.write(subtasks.freeze(2, 1))
        cost = subtasks.blocks.size - first + sum(map(len, indexes))
        assert cost < first / 20, f"Dropping a slot of 5,000 states took {cost} bytes, and writing them {first}."
        self.continues(subtasks, indexes, 2, {}, BACK)

    def test_timed_blocks_of_another_backend(self) -> None:
        """The hash map restores the blocks and times of this backend, and the other way round."""
        model, mine, other = Model(), self.backend(), HashMapBackend()
        blocks, indexes = StateBlocks(), list[bytes]()
        for checkpoint, backend in enumerate((other, mine, other, mine), 1):
            subtasks = TimedSubtasks(backend, blocks, checkpoint=checkpoint - 1, indexes=indexes)
            _holds(subtasks, model, "Blocks are the same for every backend.")
            changes = {(slot, number): checkpoint for slot in (checkpoint, 10, 20) for number in FEW}
            subtasks.put(changes)
            subtasks.fire(checkpoint)
            model = {at: state for at, state in {**model, **changes}.items() if at[0] > checkpoint}
            indexes = subtasks.write(subtasks.freeze(checkpoint, checkpoint - 1))

    def test_state_by_time_is_not_state_by_key(self) -> None:
        """An operator that kept state by key alone, or by time, is refused when it restores the other."""
        subtasks = self.timed()
        subtasks.put({(9, 1): 1})
        by_time, blocks = subtasks.write(subtasks.freeze(1, 0)), subtasks.blocks
        plainly = partial(Subtasks, self.backend(), blocks, checkpoint=1, indexes=by_time)
        refused(plainly, StateIncompatible, "Slots were restored as parts of keys.")
        plain = Subtasks(self.backend(), blocks)
        plain.put({1: 1})
        by_key = plain.write(plain.freeze(1, 0))
        refused(lambda: self.timed(blocks, checkpoint=1, indexes=by_key), StateIncompatible, "Keys became slots.")


def _states(table: TimedTable[Any]) -> list[tuple[tuple[int, bytes], Any]]:
    """The states as they would fire."""
    return [
        ((slot, key), state)
        for slot in table.slots(1 << 62)
        for group in table.groups(slot)
        for key, state in zip(*table.read(slot, group), strict=True)
    ]


def _model(subtasks: TimedSubtasks) -> Model:
    numbers = {key_of(number): number for number in FEW}
    return {(slot, numbers[key]): copy.deepcopy(state) for (slot, key), state in subtasks.items().items()}


def _holds(subtasks: TimedSubtasks, model: Mapping[tuple[int, int], Any], why: str) -> None:
    """Fail with *why* unless *subtasks* hold *model*, by every way of reading."""
    __tracebackhide__ = True
    wanted = {(slot, key_of(number)): state for (slot, number), state in model.items()}
    fires = dict(pair for table in subtasks.tables for pair in _states(table))
    for states in (fires, subtasks.items()):
        missing = [(at, state) for at, state in wanted.items() if states.get(at) != state]
        added = [(at, state) for at, state in states.items() if wanted.get(at) != state]
        assert states == wanted, f"{why}\nOf {len(wanted)} states it is to have {missing[:3]}, and has {added[:3]}."
    for number in FEW:
        slots = [*subtasks.table_of(key_of(number)).slots_of(key_of(number))]
        own = sorted(slot for slot, other in model if other == number)
        assert slots == own, f"{why}\nThe key has states in slots {own}, and slots_of says {slots}."
        present = subtasks.table_of(key_of(number)).present([key_of(number)])
        assert present == ({key_of(number)} if own else set()), f"{why}\nThe key is present or not: {present}."

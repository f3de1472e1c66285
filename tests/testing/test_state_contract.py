"""The contract of a state backend: two backends keep it; a test misses each rule that is left out."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import msgspec
import pytest

from exactlyonce.state import interval, snapshot, state_type
from exactlyonce.state.backend import StateBackend
from exactlyonce.state.errors import ApplyFailed
from exactlyonce.state.hash_map import HashMapBackend, KeyedTable
from exactlyonce.state.interval import Interval
from exactlyonce.state.key_groups import Merging
from exactlyonce.state.rocksdb import interval as tiered_interval
from exactlyonce.state.rocksdb import table as tiered_table
from exactlyonce.state.rocksdb.backend import RocksDBBackend
from exactlyonce.state.rocksdb.groups import TableGroups
from exactlyonce.state.rocksdb.memory import TableMemory
from exactlyonce.state.rocksdb.store import LocalStore
from exactlyonce.state.rocksdb.table import TieredTable
from exactlyonce.state.state_type import StateType
from exactlyonce.state.stored import StoredState
from exactlyonce.testing.state_contract import StateBackendContract
from tests.testing.conftest import Mutant


class TestHashMap(StateBackendContract):
    def backend(self) -> StateBackend:
        return HashMapBackend()


class TestHashMapInSmallSlices(TestHashMap):
    """It does so wherever its slices end."""

    @pytest.fixture(autouse=True)
    def _sizes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(interval, "SLICE_ENTRIES", 3)
        monkeypatch.setattr(interval, "_ENTRIES_AT_FIRST", 2)


class TestTiered(StateBackendContract):
    """It does so where nothing stays in memory, and every interval spills; wherever its slices end."""

    @pytest.fixture(autouse=True)
    def _sizes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = tmp_path
        monkeypatch.setattr(tiered_interval, "SLICE_ENTRIES", 3)
        monkeypatch.setattr(TableMemory, "limit", _nothing_stays)

    def backend(self) -> StateBackend:
        return RocksDBBackend(self.folder, 4 << 20)


class TieredInFoldersOfTheirOwn(TestTiered):
    """No backend finds the files of the one before it: each restores from blocks, however soon files were saved."""

    __test__ = False

    def backend(self) -> StateBackend:
        return RocksDBBackend(Path(mkdtemp(dir=self.folder)), 4 << 20)


def _nothing_stays(self: TableMemory) -> None:
    self.cached_max, self.changes_max = 5, 4


FREEZE, ENCODE = KeyedTable.freeze, StateType.encode
DELETE, READ, TABLE, APPLY = Interval._delete, StoredState.read, HashMapBackend.table, KeyedTable.apply


def _forgetful(self: Any, checkpoint: int, base: int, **how: bool) -> Any:
    self._history.intervals = []
    return FREEZE(self, checkpoint, base, **how)


def _looking_at_every_key(self: Any, *given: int, **how: bool) -> Any:
    assert sum(1 for _ in self.items()) >= 0
    return FREEZE(self, *given, **how)


def _uncloned(self: Any, keys: Any, *, replaced: bool) -> None:
    self._interval.before.update(zip(keys, map(self._states.get, keys), strict=True))


def _images_alone(self: Any, groups: Any) -> Any:
    return {group: each for group, each in READ(self, groups).items() if not each.increments}


def _located_anywhere(self: Any, *given: Any) -> Any:
    try:
        return APPLY(self, *given)
    except ApplyFailed as failed:
        raise ApplyFailed(0) from failed.__cause__


MUTANTS = {
    "freezing copies": Mutant(
        KeyedTable, "freeze", lambda self, *given, **how: (FREEZE(self, *given, **how), dict(self._states))[0],
        "freezing_takes_constant_time", "Freezing 20000 keys took"),
    "freezing looks at every key": Mutant(
        KeyedTable, "freeze", _looking_at_every_key,
        "freezing_takes_constant_time", "Calls made, by number of keys"),
    "all is encoded at once": Mutant(
        Interval, "advance", lambda self: deque(self._slices, maxlen=0), "encoding_goes_in_slices", "records wait"),
    "nothing is kept for an open interval": Mutant(
        KeyedTable, "_touch", lambda self, keys, **how: self._interval.changes(),
        "a_snapshot_is_the_state_at_its_barrier", "whatever records do after it"),
    "a state is not cloned":
        Mutant(KeyedTable, "_keep", _uncloned, "several_snapshots_are_open", "whatever records do after it"),
    "a deleted key is not written": Mutant(
        Interval, "_delete", lambda self, keys, deleted: DELETE(self, keys, defaultdict(list)),
        "deleted_keys", "came back from an older block|deleted, one by one"),
    "changes of an aborted checkpoint are lost": Mutant(
        KeyedTable, "freeze", _forgetful, "a_checkpoint_that_is_aborted", "of checkpoints that were aborted as well"),
    "a savepoint is an increment": Mutant(
        KeyedTable, "freeze", lambda self, *given, whole: FREEZE(self, *given), "a_savepoint", "has no older block"),
    "every snapshot is whole": Mutant(
        Merging, "choose", lambda self, checkpoint, changed, tables: dict.fromkeys(tables),
        "increments", "relative to its base"),
    "increments are not read":
        Mutant(StoredState, "read", _images_alone, "increments", "An increment belongs to its image"),
    "all key groups are read": Mutant(
        HashMapBackend, "table", lambda self, stored: TABLE(self, replace(stored, groups=range(8))),
        "some_key_groups", "Exactly the key groups that are asked for"),
    "any record is taken":
        Mutant(KeyedTable, "_touched", lambda self, added: None, "a_record_of_another_key_group", "lost at restore"),
    "any base will do": Mutant(
        snapshot, "require", lambda condition, why: None, "checkpoints_and_bases_only_grow", "what is it relative to?"),
    "states are not checked": Mutant(
        StateType, "encode", lambda self, states, **_: msgspec.msgpack.encode(states),
        "what_cannot_be_stored", "no restart could read it"),
    "blocks of its own": Mutant(
        StateType, "encode", lambda self, states, **_: ENCODE(self, states)[::-1],
        "blocks_of_another_backend", "is damaged"),
    "an error without its record": Mutant(KeyedTable, "apply", _located_anywhere, "a_failing_function", "the third"),
    "accumulators are shared": Mutant(state_type, "_mutable", lambda *_: False, "reduce", "cloned for each output"),
}  # fmt: skip


@pytest.mark.parametrize("rule", MUTANTS)
def test_a_rule_that_is_left_out_is_missed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[rule].is_missed_by(TestHashMap(), monkeypatch)


def _layers_forgotten(self: TieredTable[Any]) -> Iterator[dict[bytes, Any]]:
    return iter([self._interval.layers[-1]])


WRITE = LocalStore.write

TIERED_MUTANTS = {
    "states that are not settled are overlooked":
        Mutant(TieredTable, "_layers", _layers_forgotten, "a_snapshot_is_the_state_at_its_barrier", ""),
    "a state is not cloned": Mutant(
        TieredTable, "_protect", lambda self, keys: None, "several_snapshots_are_open", "whatever records do after it"),
    "a key group is taken for empty": Mutant(
        TableGroups, "read", lambda self, groups: self.unread.difference_update(list(groups)),
        "increments", "An increment belongs to its image"),
    "what has spilled is not encoded":
        Mutant(LocalStore, "changes", lambda self, *_: iter(()), "deleted_keys", "came back|came again"),
    "deleted keys stay in local files": Mutant(
        LocalStore, "write",
        lambda self, entries, interval: WRITE(self, [each for each in entries if each[2]], interval),
        "deleted_keys", "came back from an older block|deleted, one by one"),
    "any record is taken": Mutant(
        tiered_table, "require", lambda condition, why: None, "a_record_of_another_key_group", "lost at restore"),
}  # fmt: skip


@pytest.mark.parametrize("rule", TIERED_MUTANTS)
def test_a_rule_of_the_tiered_backend(rule: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = TieredInFoldersOfTheirOwn()
    small.folder = tmp_path
    monkeypatch.setattr(tiered_interval, "SLICE_ENTRIES", 3)
    monkeypatch.setattr(TableMemory, "limit", _nothing_stays)
    TIERED_MUTANTS[rule].is_missed_by(small, monkeypatch)

"""Blocks that nobody needs are found wherever checkpoints were kept, and never taken for more than is known."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from blank_manifest import blank_manifest

from exactlyonce.checkpoint.block_storage import Scanned
from exactlyonce.checkpoint.kept_blocks import BlockRetention
from exactlyonce.checkpoint.records.encoding import BlockKey
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import SAVEPOINT, BlockRef, Finalized, Incarnation, StoredBlock
from exactlyonce.checkpoint.records.storage_url import TOPIC
from exactlyonce.checkpoint.requests import FindReferences, Procedure, ScanBlocks
from exactlyonce.checkpoint.settings import CheckpointSettings

OLD, NEW = "s3://old", "s3://new"
AWAY, GONE = "it is away", "a block is gone"


def block(storage: str, number: int) -> StoredBlock:
    return StoredBlock(storage, BlockRef(1, 0, str(BlockKey(1, number, "totals", 0, 1, 0, "aa")), 1, b""))


def kept_in(*storages: str, savepoints: tuple[int, ...] = ()) -> History:
    history = History("orders")
    for number, storage in enumerate(storages, 1):
        history.admit(
            Incarnation(incarnation=number, host="h", process=1, started_at_ms=0, heartbeat_ms=0, storage=storage)
        )
        kind = SAVEPOINT if number in savepoints else "checkpoint"
        history.admit(
            blank_manifest(
                pipeline="orders", checkpoint=number, incarnation=number, kind=kind, base=number, previous=number - 1,
                block_partitions=2, block_end_offsets=(0, 7), storage=storage,
            )
        )  # fmt: skip
        history.admit(Finalized(number, number, 0, ()))
    return history


def moved(*, present: str = NEW) -> History:
    """Checkpoint 1 was kept in the old storage, checkpoint 2 is kept in *present*; incarnation 2 began in both."""
    return kept_in(OLD, present)


class Kept:
    """Blocks by storage, and the references of manifests; a storage may be away."""

    def __init__(self, lies: dict[str, list[StoredBlock]], needs: dict[int, list[StoredBlock]]) -> None:
        self.lies, self.needs, self.asked = lies, needs, list[ScanBlocks]()
        self.away: set[str] = set()
        self.away_for: dict[str, int] = {}
        """The number of questions that each storage does not answer yet."""
        self.missing: set[int] = set()
        """Checkpoints whose blocks are not found when they are asked for."""
        self.needed: dict[int, bool] = {}
        """Checkpoints whose blocks were asked for, and whether these are waited for."""

    def run(self, procedure: Procedure[Any]) -> Any:
        answer: Any = None
        while True:
            try:
                request = procedure.send(answer)
            except StopIteration as end:
                return end.value
            answer = self._answer(request)

    def _answer(self, request: Any) -> Any:
        if isinstance(request, FindReferences):
            self.needed[request.manifest.checkpoint] = request.needed
            if self._is_away(request.manifest.storage):
                return AWAY
            if request.manifest.checkpoint in self.missing:
                return GONE
            return frozenset(each.ref for each in self.needs[request.manifest.checkpoint])
        assert isinstance(request, ScanBlocks)
        self.asked.append(request)
        if self._is_away(request.storage):
            return AWAY
        return Scanned(tuple(each.ref for each in self.lies[request.storage]), (0, 9))

    def _is_away(self, storage: str) -> bool:
        left = self.away_for.get(storage, 0)
        self.away_for[storage] = left - 1
        return left > 0 or storage in self.away


def known(storage: str, *, num_retained: int = 2) -> BlockRetention:
    return BlockRetention(CheckpointSettings(num_retained=num_retained, storage=storage))


def test_orphans_go_wherever_checkpoints_were_kept() -> None:
    kept = Kept(
        {OLD: [block(OLD, 1), block(OLD, 8)], NEW: [block(NEW, 2), block(NEW, 9)]},
        {1: [block(OLD, 1)], 2: [block(NEW, 2)]},
    )
    assert set(kept.run(known(NEW).recover(moved(), 3))[1]) == {block(OLD, 8), block(NEW, 9)}
    dropped, blocks = kept.run(known(NEW, num_retained=1).recover(moved(), 3))
    assert dropped == (1,)
    assert set(blocks) == {block(OLD, 1), block(OLD, 8), block(NEW, 9)}


def test_a_storage_that_is_away_is_let_be_for_this_life() -> None:
    """The references of its checkpoint are unknown, so nothing of it is dropped, even after it comes back."""
    kept = Kept({OLD: [block(OLD, 1), block(OLD, 8)], NEW: [block(NEW, 2)]}, {1: [block(OLD, 1)], 2: [block(NEW, 2)]})
    kept.away.add(OLD)
    blocks = known(NEW)
    history = moved()
    assert kept.run(blocks.recover(history, 3)) == ((), ())
    assert blocks.unreachable == {OLD: AWAY}
    assert blocks.unrestorable == {1: AWAY}
    assert kept.needed == {1: False, 2: True}
    kept.away.clear()
    newest = history.latest
    assert newest is not None
    kept.run(blocks.begin_attempt(newest, 3, 1))
    assert kept.run(blocks.expire(newest)) == ((), ())
    assert {each.storage for each in kept.asked[1:]} == {NEW}


def test_a_storage_that_comes_back_between_two_questions_is_let_be() -> None:
    """The first manifest's references are unknown: a later one may share them."""
    whole, increment = block(OLD, 1), block(OLD, 2)
    kept = Kept(
        {OLD: [whole, increment], NEW: [block(NEW, 3)]}, {1: [whole], 2: [whole, increment], 3: [block(NEW, 3)]}
    )
    kept.away_for[OLD] = 2
    blocks, history = known(NEW, num_retained=1), kept_in(OLD, OLD, NEW, savepoints=(1,))
    assert kept.run(blocks.recover(history, 4)) == ((2,), ())
    assert blocks.unreachable == {OLD: AWAY}
    assert blocks.unrestorable == {1: AWAY, 2: AWAY}
    assert (2 in kept.needed, len([each for each in kept.asked if each.storage == OLD])) == (False, 1)


@pytest.mark.parametrize("shown", [False, True])
def test_what_is_missing_for_a_moment_is_kept_when_it_is_back(shown: bool) -> None:
    """A savepoint keeps every block that it may need, and none of a later checkpoint. An empty scan proves nothing."""
    whole, increment = block(OLD, 1), block(OLD, 2)
    needs = {2: [whole, increment], 3: [block(NEW, 3)]}
    kept = Kept({OLD: [increment] if shown else [], NEW: [block(NEW, 3)]}, needs)
    kept.missing.add(1)
    blocks, history = known(NEW, num_retained=1), kept_in(OLD, OLD, NEW, savepoints=(1,))
    assert kept.run(blocks.recover(history, 4)) == ((2,), (increment,) if shown else ())
    assert blocks.unreachable == ({} if shown else {OLD: GONE})
    assert blocks.unrestorable[1] == GONE


@pytest.mark.parametrize("storage", [TOPIC, NEW])
def test_a_damaged_savepoint_keeps_what_was_written_up_to_it(storage: str) -> None:
    """No checkpoint refers to blocks of a later one, so those expire. A released savepoint frees its own."""
    own, others = [block(storage, 1), block(storage, 2)], [block(storage, 3), block(storage, 4), block(storage, 8)]
    kept = Kept({storage: own + others}, {3: [block(storage, 3)], 4: [block(storage, 4)]})
    kept.missing.add(2)
    history = kept_in(storage, storage, storage, storage, savepoints=(2,))
    history.forget(history.keys_of(1))
    blocks = known(storage, num_retained=1)
    assert kept.run(blocks.recover(history, 5)) == ((3,), (block(storage, 3), block(storage, 8)))
    newest = history.latest
    assert newest is not None
    blocks.release(2)
    assert kept.run(blocks.expire(newest)) == ((2,), tuple(own))


def test_a_storage_that_was_left_and_is_taken_by_another_name() -> None:
    """Today's blocks show under the old name and are no orphans. Real orphans go under either name."""
    lies = [block(NEW, 3), block(NEW, 8)]
    kept = Kept({OLD: lies, TOPIC: [], NEW: lies}, {2: [], 3: [block(NEW, 3)]})
    history = kept_in(OLD, TOPIC, NEW)
    history.forget(history.keys_of(1))
    assert set(kept.run(known(NEW).recover(history, 4))[1]) == {block(OLD, 8), block(NEW, 8)}


def test_what_is_late_is_looked_for_behind_the_first_checkpoint_of_an_attempt() -> None:
    """A savepoint that is deleted while workers restore does not use up that look."""
    kept = Kept({OLD: [], NEW: [block(NEW, 2)]}, {1: [], 2: [block(NEW, 2)]})
    blocks, history = known(NEW), moved()
    newest = history.latest
    assert newest is not None
    kept.run(blocks.recover(history, 3))
    kept.run(blocks.begin_attempt(newest, 3, 1))
    assert kept.run(blocks.expire(newest)) == ((), ())
    kept.lies[NEW].append(block(NEW, 9))
    first = msgspec.structs.replace(newest, checkpoint=3, incarnation=3, attempt=1)
    blocks.completed(3, [block(NEW, 2).ref])
    assert kept.run(blocks.expire(first)) == ((1,), (block(NEW, 9),))
    asked = len(kept.asked)
    kept.run(blocks.expire(first))
    assert len(kept.asked) == asked


@pytest.mark.parametrize("present", [NEW, TOPIC])
def test_the_ends_that_are_noted_are_those_of_the_topic(present: str) -> None:
    """Blocks elsewhere say nothing about the topic: a pipeline that moves there looks from its old ends."""
    kept = Kept({OLD: [], NEW: [], TOPIC: []}, {1: [], 2: []})
    blocks = known(present)
    kept.run(blocks.recover(moved(present=present), 3))
    assert {each.start_offsets for each in kept.asked} == {(0, 7)}
    blocks.written(3, [block(present, 3).ref])
    noted = blocks.ends_to_note(3, 2, final=True)
    assert noted == ((0, 9) if present == TOPIC else (0, 7))

"""Blocks that nobody needs are found wherever checkpoints were kept, and never taken for more than is known."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from exactlyonce.checkpoint.orphans import KnownBlocks
from exactlyonce.checkpoint.records.encoding import BlockKey
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import BlockRef, Finalized, Incarnation, Manifest, StoredBlock
from exactlyonce.checkpoint.records.storage_url import TOPIC
from exactlyonce.checkpoint.requests import FindReferences, Procedure, ScanBlocks
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.checkpoint.store.storage import Scanned

OLD, NEW = "s3://old", "s3://new"
AWAY = "it is away"


def block(storage: str, number: int) -> StoredBlock:
    """A block of its own key, of incarnation 1."""
    return StoredBlock(storage, BlockRef(1, 0, str(BlockKey(1, number, "totals", 0, 1, 0, "aa")), 1, b""))


def moved(*, present: str = NEW) -> History:
    """Checkpoint 1 was kept in the old storage, checkpoint 2 is kept in *present*; incarnation 2 began in both."""
    history = History("orders")
    for number, storage in ((1, OLD), (2, present)):
        history.admit(
            Incarnation(incarnation=number, host="h", process=1, started_at_ms=0, heartbeat_ms=0, storage=storage)
        )
        history.admit(
            Manifest(
                pipeline="orders", checkpoint=number, incarnation=number, attempt=0, kind="checkpoint", base=number,
                previous=number - 1, triggered_at_ms=0, completed_at_ms=0, fingerprint="", max_parallelism=1,
                parallelism=1, block_partitions=2, block_end_offsets=(0, 7), written_bytes=0, offsets=(), operators=(),
                order_logs=(), committables=(), sinks=(), storage=storage,
            )
        )  # fmt: skip
        history.admit(Finalized(number, number, 0, ()))
    return history


class Kept:
    """What lies where, and what manifests stand on; a storage may be away."""

    def __init__(self, lies: dict[str, list[StoredBlock]], needs: dict[int, list[StoredBlock]]) -> None:
        self.lies, self.needs, self.asked = lies, needs, list[ScanBlocks]()
        self.away: set[str] = set()
        self.needed: dict[int, bool] = {}
        """By checkpoint whose blocks were asked for, whether these are waited for."""

    def run(self, procedure: Procedure[Any]) -> Any:
        """Answer what *procedure* asks."""
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
            away = request.manifest.storage in self.away
            return AWAY if away else frozenset(each.ref for each in self.needs[request.manifest.checkpoint])
        assert isinstance(request, ScanBlocks)
        self.asked.append(request)
        if request.storage in self.away:
            return AWAY
        return Scanned(tuple(each.ref for each in self.lies[request.storage]), (0, 9))


def known(storage: str, *, num_retained: int = 2) -> KnownBlocks:
    """Of an incarnation that keeps blocks there."""
    return KnownBlocks(CheckpointSettings(num_retained=num_retained, storage=storage))


def test_orphans_go_wherever_checkpoints_were_kept() -> None:
    """What no manifest stands on is dropped where it lies; what the older checkpoint stands on stays with it."""
    kept = Kept(
        {OLD: [block(OLD, 1), block(OLD, 8)], NEW: [block(NEW, 2), block(NEW, 9)]},
        {1: [block(OLD, 1)], 2: [block(NEW, 2)]},
    )
    assert set(kept.run(known(NEW).recover(moved(), 3))[1]) == {block(OLD, 8), block(NEW, 9)}
    dropped, blocks = kept.run(known(NEW, num_retained=1).recover(moved(), 3))
    assert dropped == (1,)
    assert set(blocks) == {block(OLD, 1), block(OLD, 8), block(NEW, 9)}


def test_a_storage_that_is_away_is_let_be_for_this_life() -> None:
    """What its checkpoint stands on is not known: though it comes back in the middle, nothing of it is dropped."""
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


def test_what_is_late_is_looked_for_behind_the_first_checkpoint_of_an_attempt() -> None:
    """Not before: a savepoint that is deleted while the workers restore their state uses up no look."""
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
    """Blocks elsewhere say nothing about them: a pipeline that comes to the topic, or back, looks from where it was."""
    kept = Kept({OLD: [], NEW: [], TOPIC: []}, {1: [], 2: []})
    blocks = known(present)
    kept.run(blocks.recover(moved(present=present), 3))
    assert {each.start_offsets for each in kept.asked} == {(0, 7)}
    blocks.written(3, [block(present, 3).ref])
    noted = blocks.ends_to_note(3, 2, final=True)
    assert noted == ((0, 9) if present == TOPIC else (0, 7))

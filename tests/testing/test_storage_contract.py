"""The contract of a block storage: one in memory keeps it; a test misses each rule that is left out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest

from exactlyonce.checkpoint.block_storage import BlockStorage, DamagedBlock, Scanned, Ticket
from exactlyonce.checkpoint.records.encoding import Block, BlockKey, DamagedRecord, decode, encode
from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.pipeline.errors import StorageUnavailable, require
from exactlyonce.testing.storage_contract import BlockStorageContract
from tests.testing.conftest import Mutant


class Shelf:
    """The place that all storages of a test share: blocks by key, each with the number under which it was put."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[int, bytes]] = {}
        self.numbers = count(1)
        self.away = False
        self.processes = count(1)

    def reach(self) -> None:
        if self.away:
            raise StorageUnavailable("The shelf is away.")

    def lay(self, key: str, value: bytes) -> int:
        self.values[key] = (next(self.numbers), value)
        return self.values[key][0]


class ShelfBlocks:
    """The `AttemptBlocks` of a process: what is sent is durable at the next poll, unless the shelf is away."""

    def __init__(self, shelf: Shelf, incarnation: int, attempt: int) -> None:
        self._shelf, self._life = shelf, (incarnation, attempt, f"p{next(shelf.processes)}")
        self._sent: dict[str, tuple[Ticket, bytes]] = {}
        self._keys: set[str] = set()

    @property
    def pending(self) -> int:
        return len(self._sent)

    @property
    def waiting(self) -> str:
        return "waiting for the shelf" if self._shelf.away and self._sent else ""

    def write(self, block: Block, key_group: int, part: int = 0) -> Ticket:
        incarnation, attempt, nonce = self._life
        key = str(BlockKey(incarnation, block.checkpoint, block.operator, key_group, part, attempt, nonce))
        require(key not in self._keys, f"{key} is new")
        value = encode(block)
        self._keys.add(key)
        ticket = Ticket(key, value)
        self._sent[key] = (ticket, value)
        return ticket

    def poll(self, timeout_s: float = 0.0) -> int:
        if self._shelf.away:
            return self.pending
        for key, (ticket, value) in self._sent.items():
            ticket.written(0, self._shelf.lay(key, value))
        self._sent.clear()
        return 0

    def wait(self, timeout_s: float, look: Callable[[], None] = lambda: None, *, left: int = 0) -> None:
        if self.poll() > left:
            look()
            raise StorageUnavailable("The shelf is away.")


class ShelfStorage:
    """A storage in memory: what is dropped goes once the transaction that drops it is durable."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf

    def check(self, *, in_use: bool = False) -> None:
        self.shelf.reach()

    def begin(self, incarnation: int, attempt: int) -> ShelfBlocks:
        self.shelf.reach()
        return ShelfBlocks(self.shelf, incarnation, attempt)

    def fetch(self, refs: Iterable[BlockRef]) -> Iterator[tuple[BlockRef, Block]]:
        for ref in dict.fromkeys(refs):
            self.shelf.reach()
            _, value = self.shelf.values.get(ref.key, (0, None))
            if value is None:
                raise DamagedBlock(f"Block {ref.key} is gone.", ref)
            self.verify(ref, value)
            try:
                yield ref, decode(value, Block)
            except DamagedRecord as error:
                raise DamagedBlock(f"Block {ref.key}: {error}", ref) from error

    def verify(self, ref: BlockRef, value: bytes) -> None:
        if (ref.size, ref.sha256) != (len(value), hashlib.sha256(value).digest()):
            raise DamagedBlock(f"Block {ref.key} is not what was written.", ref)

    def since(self, ends: Iterable[int]) -> Scanned:
        self.shelf.reach()
        (end,) = ends
        found = [
            BlockRef(0, number, key, len(value), hashlib.sha256(value).digest())
            for key, (number, value) in self.shelf.values.items()
            if number >= end
        ]
        return Scanned(tuple(found), (max([number for number, _ in self.shelf.values.values()], default=0) + 1,))

    def dropped(self, refs: Iterable[BlockRef]) -> None:
        self.shelf.reach()
        for each in refs:
            self.shelf.values.pop(each.key, None)

    def erase(self) -> None:
        self.shelf.values.clear()

    def close(self) -> None:
        """There is no connection."""


class TestShelf(BlockStorageContract):
    beginning = (0,)

    @pytest.fixture(autouse=True)
    def _shelf(self) -> None:
        self.shelf = Shelf()

    def storage(self) -> BlockStorage:
        return ShelfStorage(self.shelf)

    def laid(self, key: str, value: bytes) -> tuple[int, int]:
        return 0, self.shelf.lay(key, value)

    def lost(self, ref: BlockRef) -> BlockRef:
        del self.shelf.values[ref.key]
        return ref

    @contextmanager
    def away(self) -> Iterator[None]:
        self.shelf.away = True
        yield
        self.shelf.away = False


SINCE, BEGIN, FETCH = ShelfStorage.since, ShelfStorage.begin, ShelfStorage.fetch
WRITE, POLL, WAIT = ShelfBlocks.write, ShelfBlocks.poll, ShelfBlocks.wait


def _silently(self: Any, refs: Iterable[BlockRef]) -> Iterator[tuple[BlockRef, Block]]:
    there = [ref for ref in dict.fromkeys(refs) if ref.key in self.shelf.values]
    for ref in there:
        self.verify(ref, self.shelf.values[ref.key][1])
        yield ref, decode(self.shelf.values[ref.key][1], Block)


def _own_alone(self: Any, ends: Iterable[int]) -> Scanned:
    found = SINCE(self, ends)
    mine = tuple(each for each in found.blocks if each.key.startswith("block/1/"))
    return Scanned(mine, found.end_offsets)


def _again(self: Any, block: Block, key_group: int, part: int = 0) -> Ticket:
    self._keys.clear()
    return WRITE(self, block, key_group, part)


def _without_a_process(self: Any, incarnation: int, attempt: int) -> ShelfBlocks:
    blocks = BEGIN(self, incarnation, attempt)
    blocks._life = (incarnation, attempt, "p0")
    return blocks


def _failing(self: Any, timeout_s: float = 0.0) -> int:
    if self._shelf.away:
        for ticket, _ in self._sent.values():
            ticket.failed("The shelf is away.")
        self._sent.clear()
    return POLL(self, timeout_s)


def _unseeing(self: Any, timeout_s: float, look: Callable[[], None] = lambda: None, *, left: int = 0) -> None:
    WAIT(self, timeout_s, left=left)


def _for_all(self: Any, timeout_s: float, look: Callable[[], None] = lambda: None, *, left: int = 0) -> None:
    WAIT(self, timeout_s, look)


def _damaged_when_away(self: Any, refs: Iterable[BlockRef]) -> Iterator[tuple[BlockRef, Block]]:
    try:
        yield from FETCH(self, refs)
    except StorageUnavailable as error:
        raise DamagedBlock(str(error), next(iter(refs))) from error


def _nothing_when_away(self: Any, ends: Iterable[int]) -> Scanned:
    return Scanned((), tuple(ends)) if self.shelf.away else SINCE(self, ends)


MUTANTS = {
    "bytes are not compared": Mutant(
        ShelfStorage, "verify", lambda self, ref, value: None,
        "other_bytes_than_were_written", "names by their SHA-256"),
    "what is cut off is returned": Mutant(
        ShelfStorage, "verify", lambda self, ref, value: None, "a_block_that_was_cut_off", "names by their SHA-256"),
    "what is gone is left out":
        Mutant(ShelfStorage, "fetch", _silently, "a_block_that_is_gone", "would be missing in silence"),
    "a key may be put twice": Mutant(ShelfBlocks, "write", _again, "a_key_is_put_once", "A key was put twice"),
    "processes share keys":
        Mutant(ShelfStorage, "begin", _without_a_process, "two_processes_of_one_attempt", "is not what was written"),
    "others' orphans are not listed":
        Mutant(ShelfStorage, "since", _own_alone, "orphans_are_listed", "nobody remembers it"),
    "ends are not looked at":
        Mutant(ShelfStorage, "since", lambda self, ends: SINCE(self, (0,)), "orphans_are_listed", "is not asked for"),
    "ends say one too much": Mutant(
        ShelfStorage, "since", lambda self, ends: SINCE(self, [each + 1 for each in ends]), "ends_only_grow",
        "nobody remembers it"),
    "nothing is dropped":
        Mutant(ShelfStorage, "dropped", lambda self, refs: None, "what_is_dropped", "A dropped block is listed"),
    "nothing is erased":
        Mutant(ShelfStorage, "erase", lambda self: None, "erasing", "stay when the pipeline is forgotten"),
    "nobody is told what is waited for":
        Mutant(ShelfBlocks, "waiting", "", "a_storage_that_is_away_is_waited_for", "Nobody is told what is waited for"),
    "what is waited for is told for good": Mutant(
        ShelfBlocks, "waiting", "waiting for the shelf", "a_storage_that_is_away_is_waited_for",
        "Nothing is waited for any more"),
    "a block fails while the storage is away": Mutant(
        ShelfBlocks, "poll", _failing, "a_storage_that_is_away_is_waited_for", "is waited for, by whoever writes"),
    "nobody looks while it is waited for":
        Mutant(ShelfBlocks, "wait", _unseeing, "who_waits_looks_meanwhile", "looks whether it is fenced"),
    "what may be left is waited for":
        Mutant(ShelfBlocks, "wait", _for_all, "who_waits_looks_meanwhile", "A newer instance took over"),
    "what is away is damaged":
        Mutant(ShelfStorage, "fetch", _damaged_when_away, "reading_while_it_is_away", "neither gone nor damaged"),
    "nothing is listed while it is away":
        Mutant(ShelfStorage, "since", _nothing_when_away, "reading_while_it_is_away", "neither gone nor damaged"),
}  # fmt: skip


@pytest.mark.parametrize("rule", MUTANTS)
def test_a_rule_that_is_left_out_is_missed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    contract = TestShelf()
    contract.shelf, contract._to_close, contract.limit_s = Shelf(), [], 0.1
    MUTANTS[rule].is_missed_by(contract, monkeypatch)

"""Contract tests, to inherit from, for a block storage: the behaviour that checkpoints and restarts rely on.

Each test is a case, told in its docstring, that has lost a checkpoint or leaked blocks; its failure says what the
storage does wrong. A test has one place for blocks, empty at first, and any number of storages of it, each as in its
own process.

```python
from exactlyonce.testing.storage_contract import BlockStorageContract

class TestMyStorage(BlockStorageContract):
    beginning = (0,)

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path):
        self.folder = tmp_path

    def storage(self):
        return FolderStorage(self.folder)
```

May import what `testing` may import.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn

import msgspec

from exactlyonce.checkpoint.block_storage import AttemptBlocks, BlockStorage, DamagedBlock
from exactlyonce.checkpoint.records.encoding import Block, BlockKey, encode
from exactlyonce.checkpoint.records.manifest import BLOCK_SIZE_MAX, BlockRef
from exactlyonce.pipeline.errors import Fenced, InvariantViolation, StorageUnavailable
from exactlyonce.testing.cluster import LIMIT_S
from exactlyonce.testing.contract import Contract, refused

EXACTLY = "A reference is good for exactly the bytes that it names by their SHA-256; for anything else, DamagedBlock."
AWAY = "A storage that is away is waited for, by whoever writes the file, and by nobody else."
ORPHANS = "A block that is not listed, and that no manifest names, stays for good: nobody remembers it."


def block(body: bytes, checkpoint: int = 1) -> Block:
    """A block of operator `totals`."""
    return Block("totals", checkpoint, "state", "none", "contract", body)


def bytes_of(seed: object, size: int) -> bytes:
    """*size* incompressible bytes, unique for each *seed*."""
    return hashlib.shake_128(str(seed).encode()).digest(size)


class BlockStorageContract(Contract):
    """See the package."""

    beginning: Sequence[int]
    """The ends after which all blocks come: the argument of `since` in a pipeline without a checkpoint."""
    ordered = True
    """Whether the storage knows an order. One that does not lists everything, and its ends are zeros."""
    limit_s: float = LIMIT_S
    """The time in which a storage that is away must report it."""
    in_topic = False
    """Whether blocks are in the checkpoint topic and erased with it."""

    def storage(self) -> BlockStorage:
        """A new storage, as in its own process; all storages of one test have one place."""
        raise NotImplementedError

    def decided(self, refs: Sequence[BlockRef]) -> None:
        """The decision log's transaction that drops *refs*. Override it if that is what removes them."""

    def laid(self, key: str, value: bytes) -> tuple[int, int]:
        """Store bytes under the key of a block, as damage would; returns their (partition, offset). May be left out."""
        self.left_out("laid", "a block that was cut off")

    def lost(self, ref: BlockRef) -> BlockRef:
        """Remove a block by mistake; returns its reference, or one that never existed. May be left out."""
        self.left_out("lost", "a block that is gone")

    def away(self) -> AbstractContextManager[object]:
        """A context in which the storage does not answer. May be left out."""
        self.left_out("away", "a storage that is away")

    def opened(self) -> BlockStorage:
        """A new storage, closed when the test ends."""
        storage = self.storage()
        self._to_close.append(storage)
        return storage

    def put(self, bodies: Iterable[bytes], checkpoint: int = 1, blocks: AttemptBlocks | None = None) -> list[BlockRef]:
        """Put blocks with these bodies in key groups 0, 1, 2 and so on; returns their references."""
        blocks = blocks or self.opened().begin(1, 0)
        tickets = [blocks.write(block(body, checkpoint), group) for group, body in enumerate(bodies)]
        blocks.wait(LIMIT_S)
        refs = [ticket.ref for ticket in tickets]
        assert None not in refs, "After `wait` has returned every block is durable, and its ticket knows where it is."
        return [ref for ref in refs if ref is not None]

    def got(self, refs: Iterable[BlockRef], storage: BlockStorage | None = None) -> dict[str, bytes]:
        """Bodies by key; every reference is answered once."""
        bodies = [(ref.key, fetched.body) for ref, fetched in (storage or self.opened()).fetch(refs)]
        assert len(bodies) == len(dict(bodies)), "A block was given twice."
        return dict(bodies)

    def test_blocks_of_one_key_group_come_in_the_order_in_which_they_were_put(self) -> None:
        """Blocks of one key group, asked for in this order, come in it: staged rows are applied in this order."""
        storage = self.opened()
        blocks = storage.begin(1, 0)
        tickets = [blocks.write(block(b"%d" % number, 1), 3, part=number) for number in range(20)]
        blocks.wait(LIMIT_S)
        refs = [ticket.ref for ticket in tickets if ticket.ref is not None]
        bodies = [fetched.body for _, fetched in storage.fetch(refs)]
        assert bodies == [b"%d" % number for number in range(20)], f"They come in another order: {bodies}"

    def damaged(self, ref: BlockRef, others: Sequence[BlockRef], why: str) -> None:
        """Fetching *ref* fails and the error names it; the *others* are fetched."""
        storage = self.opened()
        error = refused(lambda: self.got([ref, *others], storage), DamagedBlock, why)
        assert isinstance(error, DamagedBlock)
        assert error.ref == ref, f"DamagedBlock names the block that is damaged, and not {error.ref}."
        assert ref.key in str(error), f"The message names the block: {error}"
        assert len(self.got(others, storage)) == len(others), "After a damaged block the others cannot be had any more."

    def listed(self, ends: Iterable[int]) -> set[BlockRef]:
        """The blocks after *ends*."""
        scanned = self.opened().since(ends)
        assert not scanned.unreadable, scanned.unreadable
        assert len({ref.key for ref in scanned.blocks}) == len(scanned.blocks), "A block is listed twice."
        return set(scanned.blocks)

    def ends(self) -> tuple[int, ...]:
        """The current ends: later blocks come after them."""
        ends = self.opened().since(self.beginning).end_offsets
        assert self.ordered or not any(ends), f"A storage that knows no order notes zeros, and not {ends}."
        return ends

    def dropped(self, refs: Sequence[BlockRef]) -> None:
        """Drop *refs* as a decision log and its engine do."""
        self.decided(refs)
        self.opened().dropped(refs)

    # --- put and get --------------------------------------------------------------------------------------------------

    def test_what_is_put_can_be_had(self) -> None:
        """Another process gets every block by its reference, in any order and any number of times."""
        bodies = [bytes_of(group, 3_000) for group in range(40)]
        refs = self.put(bodies)
        expected = {ref.key: body for ref, body in zip(refs, bodies, strict=True)}
        assert self.got([*reversed(refs), *refs[:5]]) == expected
        assert self.got(refs[::7]) == {ref.key: expected[ref.key] for ref in refs[::7]}
        assert self.got([]) == {}

    def test_a_reference(self) -> None:
        """A reference names the block's writer and checkpoint, and its bytes by size and SHA-256."""
        value = encode(block(b"body", 9))
        blocks = self.opened().begin(3, 7)
        ticket = blocks.write(block(b"body", 9), 5, part=2)
        blocks.wait(LIMIT_S)
        ref = ticket.ref
        assert ref is not None
        assert (ref.size, ref.sha256) == (len(value), hashlib.sha256(value).digest()), EXACTLY
        key = BlockKey.parse(ref.key)
        assert key is not None, f"Orphans are found by their keys, which are well-formed: {ref.key}"
        assert key == BlockKey(3, 9, "totals", 5, 2, 7, key.nonce)

    def test_putting_does_not_wait(self) -> None:
        """`write` returns at once, `poll` counts the pending blocks, and none is pending after `wait`."""
        blocks = self.opened().begin(1, 0)
        tickets = [blocks.write(block(bytes_of(group, 10_000)), group) for group in range(20)]
        assert blocks.pending <= 20
        blocks.wait(LIMIT_S)
        assert (blocks.pending, blocks.poll()) == (0, 0)
        assert all(ticket.resolved for ticket in tickets)

    def test_sizes(self) -> None:
        """Blocks of the largest size and empty ones are stored; a larger one is refused at once."""
        body = bytes(BLOCK_SIZE_MAX - len(encode(block(bytes(BLOCK_SIZE_MAX // 2)))) + BLOCK_SIZE_MAX // 2)
        refs = self.put([body, b""])
        assert refs[0].size == BLOCK_SIZE_MAX
        assert self.got(refs) == {refs[0].key: body, refs[1].key: b""}
        blocks = self.opened().begin(2, 0)
        refused(lambda: blocks.write(block(body + b"x"), 0), InvariantViolation, "A block over the limit was taken.")

    def test_a_key_is_put_once(self) -> None:
        """Putting one operator, checkpoint, key group and part twice is a defect: its reference would be ambiguous."""
        blocks = self.opened().begin(1, 0)
        first = blocks.write(block(b"first"), 3, part=1)
        again = partial(blocks.write, block(b"second"), 3, part=1)
        refused(again, InvariantViolation, "A key was put twice: what its reference names is not there any more.")
        blocks.wait(LIMIT_S)
        assert first.ref is not None
        assert self.got([first.ref]) == {first.key: b"first"}

    def test_two_processes_of_one_attempt(self) -> None:
        """A worker that was declared dead puts the same blocks as its replacement: each has its own."""
        zombie, worker = (self.put([name, name], blocks=self.opened().begin(1, 0)) for name in (b"zombie", b"worker"))
        assert self.got([*zombie, *worker]) == {
            **{ref.key: b"zombie" for ref in zombie}, **{ref.key: b"worker" for ref in worker},
        }  # fmt: skip

    def test_a_reader_goes_on(self) -> None:
        """A storage can be read again, after an abandoned read and after close."""
        refs = self.put(map(bytes_of, range(30), [20_000] * 30))
        storage = self.opened()
        for part in (refs[20:], refs[:4], refs[::3], refs):
            begun = iter(storage.fetch(refs))
            next(begun)
            del begun
            assert len(self.got(part, storage)) == len(part)
        storage.close()
        assert len(self.got(refs, storage)) == 30, "It connects again after it was closed."

    # --- damage -------------------------------------------------------------------------------------------------------

    def test_other_bytes_than_were_written(self) -> None:
        """A reference with another digest, size or key gets no block."""
        refs = self.put(map(bytes_of, range(8), [100] * 8))
        changes: Sequence[dict[str, Any]] = (
            {"sha256": bytes(32)}, {"size": 3}, {"key": refs[0].key.replace("/totals/", "/others/")},
        )  # fmt: skip
        for change in changes:
            self.damaged(msgspec.structs.replace(refs[0], **change), refs[1:], EXACTLY)

    def test_a_block_that_was_cut_off(self) -> None:
        """A truncated, empty or garbled value under a block's key is damage."""
        whole, *others = self.put([bytes_of("whole", 5_000), b"a", b"b"])
        value = encode(block(bytes_of("whole", 5_000)))
        key = whole.key[:-1] + ("0" if whole.key[-1] != "0" else "1")
        partition, offset = self.laid(key, value[:-1] + b"x")
        self.damaged(msgspec.structs.replace(whole, key=key, partition=partition, offset=offset), others, EXACTLY)
        for damage in (value[:-7], value[:1], b"", b"\xff" * len(value)):
            partition, offset = self.laid(key, damage)
            ref = msgspec.structs.replace(whole, key=key, partition=partition, offset=offset)
            self.damaged(ref, [whole, *others], EXACTLY)
            own = msgspec.structs.replace(ref, size=len(damage), sha256=hashlib.sha256(damage).digest())
            self.damaged(own, others, "Bytes that are no block are damage, also where the reference was made for them.")

    def test_a_block_that_is_gone(self) -> None:
        """A missing block is damage, reported soon: a restart would otherwise continue without state."""
        refs = self.put(map(bytes_of, range(6), [100] * 6))
        gone = self.lost(refs[0])
        self.damaged(gone, refs[1:], "A block that is gone is an error: its state would be missing in silence.")

    # --- list and drop ------------------------------------------------------------------------------------------------

    def test_orphans_are_listed(self) -> None:
        """Blocks put after the ends are listed, of any writer and checkpoint; earlier ones are not."""
        old = self.put([b"old"] * 8)
        ends = self.ends()
        before = set() if self.ordered else set(old)
        assert self.listed(ends) == before, "What was put before the ends that were noted is not asked for."
        orphans = self.put([b"killed"] * 8, checkpoint=2)
        orphans += self.put([b"zombie"] * 8, checkpoint=1, blocks=self.opened().begin(7, 3))
        assert self.listed(ends) == {*before, *orphans}, ORPHANS
        assert self.listed(self.beginning) == {*old, *orphans}, ORPHANS
        assert len(self.got(self.listed(ends))) == len(before) + 16, (
            "What is listed can be had by these very references."
        )

    def test_ends_only_grow(self) -> None:
        """Ends that a manifest has noted stay valid: later blocks come after them."""
        noted = [self.ends()]
        put: list[list[BlockRef]] = []
        for number in range(3):
            put.append(self.put([b"%d" % number] * 5, checkpoint=number + 1))
            noted.append(self.ends())
        for number, ends in enumerate(noted):
            wanted = {ref for refs in (put[number:] if self.ordered else put) for ref in refs}
            assert self.listed(ends) == wanted, f"{ORPHANS} Behind the ends noted before checkpoint {number + 1}."

    def test_what_is_dropped(self) -> None:
        """A dropped block is no longer listed, dropping it again is no error, and all others stay."""
        refs = self.put(map(bytes_of, range(10), [100] * 10))
        self.dropped(refs[:4])
        gone = "A dropped block is listed: it would be taken for an orphan, and dropped, at each start."
        assert self.listed(self.beginning) == set(refs[4:]), gone
        assert len(self.got(refs[4:])) == 6, "Dropping some blocks took others."
        self.dropped(refs[2:6])
        assert self.listed(self.beginning) == set(refs[6:]), gone
        assert len(self.got(refs[6:])) == 4

    def test_erasing(self) -> None:
        """A forgotten pipeline leaves no block outside of its topic; erasing twice is no error."""
        refs = self.put([b"state"] * 5)
        storage = self.opened()
        storage.erase()
        storage.erase()
        left = self.listed(self.beginning)
        stays = "Blocks outside of the topic stay when the pipeline is forgotten: nobody would ever remove them."
        assert left == (set(refs) if self.in_topic else set()), stays

    # --- away ---------------------------------------------------------------------------------------------------------

    def test_a_storage_that_is_away_is_waited_for(self) -> None:
        """A writer continues, is told what it waits for, and has its blocks durable once the storage is back."""
        blocks = self.opened().begin(1, 0)
        self.put([b"before"], blocks=blocks)
        with self.away():
            tickets = [blocks.write(block(b"%d" % group, 2), group) for group in range(6)]
            deadline = time.monotonic() + self.limit_s
            while not blocks.waiting:
                blocks.poll()
                assert time.monotonic() < deadline, f"{AWAY} Nobody is told what is waited for."
            assert blocks.poll() == 6, AWAY
            assert not any(ticket.resolved for ticket in tickets), AWAY
        blocks.wait(LIMIT_S)
        assert not blocks.waiting, f"Nothing is waited for any more, but it says: {blocks.waiting}"
        refs = [ticket.ref for ticket in tickets]
        assert len(self.got(ref for ref in refs if ref is not None)) == 6, AWAY

    def test_who_waits_looks_meanwhile(self) -> None:
        """A writer that is fenced while the storage is away stops waiting; `left` blocks may stay pending."""
        blocks = self.opened().begin(1, 0)
        self.put([b"before"], blocks=blocks)

        def look() -> NoReturn:
            raise Fenced("A newer instance took over.")

        with self.away():
            for group in range(3):
                blocks.write(block(b"state", 2), group)
            blocks.wait(LIMIT_S, look, left=3)
            why = "Who waits for a storage that is away looks whether it is fenced."
            refused(lambda: blocks.wait(LIMIT_S, look, left=2), Fenced, why)

    def test_reading_while_it_is_away(self) -> None:
        """A storage that is away raises `StorageUnavailable`, not damage; it returns the blocks once it is back."""
        refs = self.put([b"needed"] * 3)
        storage = self.opened()
        with self.away():
            unknown = "What is away is neither gone nor damaged: the checkpoint would be given up."
            refused(lambda: self.got(refs, storage), StorageUnavailable, unknown)
            refused(lambda: storage.since(self.beginning), StorageUnavailable, unknown)
        assert len(self.got(refs, storage)) == 3, AWAY

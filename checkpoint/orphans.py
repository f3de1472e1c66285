"""Orphans: the blocks of a pipeline that no manifest stands on, and that may go.

A worker that dies, a coordinator that dies between a manifest and its mark, a checkpoint that never completes: each
leaves blocks that nobody knows of any more. They are looked for where blocks are kept, in the topic itself or outside
of it, and the next transaction of the decision log that drops anything drops them.

Invariants: a checkpoint writes nothing before it is triggered, but for what sinks set aside, and that not before the
one before it is triggered. A trigger comes after the decision of the checkpoint's base, so that its blocks lie behind
all that was known at that decision. A manifest notes ends behind which all blocks lie that may be orphans once it is
finalized; an incarnation looks from there, and while the newest manifest is not finalized from the ends that the one
before it notes, for what older incarnations knew of orphans ended with them; the transaction that finalizes a
checkpoint drops all orphans that are known by then. Where checkpoints were moved to another storage, those that the
pipeline has left are looked at as well, as long as a manifest or an incarnation that is remembered names them; one that
cannot be looked at is let be for the rest of this life, for what manifests need of it is unknown then: it is asked
nothing more, and nothing of it is dropped, though it comes back between two questions. Whatever asks is a procedure
(see `requests`).
"""

from __future__ import annotations

from collections.abc import Iterable

from exactlyonce.checkpoint.decision import Dropped
from exactlyonce.checkpoint.leader_config import Retention
from exactlyonce.checkpoint.records.encoding import BlockKey
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import BlockRef, Manifest, StoredBlock
from exactlyonce.checkpoint.records.storage_url import TOPIC
from exactlyonce.checkpoint.requests import FindReferences, Procedure, ScanBlocks
from exactlyonce.checkpoint.retention import Ledger, all_that_may_be_of
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.pipeline.errors import Halt
from exactlyonce.pipeline.names import checkpoint_topic

Offsets = tuple[int, ...]
"""One for each partition of the checkpoint topic. They speak of blocks in the topic, wherever those of today are kept:
a storage outside of it knows no order, and all that lies there is looked at."""


class KnownBlocks(Retention):
    """The blocks that one incarnation of a coordinator knows of."""

    def __init__(self, settings: CheckpointSettings, *, staging: bool = False) -> None:
        """*staging*: sinks write blocks before the checkpoint that they belong to is triggered. All blocks of this
        incarnation lie in the storage that *settings* name."""
        self.ledger = Ledger(settings.num_retained)
        self.unrestorable: dict[int, str] = {}
        """Older checkpoints whose blocks are damaged, and how: nothing can be restored from them."""
        self.unreachable: dict[str, str] = {}
        """Storages that the pipeline has left and that cannot be looked at, and why: what lies there stays."""
        self.unreadable: dict[str, None] = {}
        """Places of the block partitions that cannot be read; what lies there is skipped and never dropped."""
        self._storage = settings.storage
        self._left: tuple[str, ...] = ()
        """Other storages, in which older incarnations may have kept blocks."""
        self._ahead = staging or settings.max_concurrent > 1
        self._ends: dict[int, Offsets] = {}
        """By completed checkpoint that may be a base, ends behind which everything lies that builds on it."""
        self._attempt = (0, 0)
        self._begun_at: Offsets = ()
        self._seen_to: Offsets = ()
        """Ends behind which nothing is known of, which only grow: what is written later lies there."""
        self._behind = -1
        """The newest checkpoint when the attempt began."""
        self._look_again = False
        self._own_too = False

    # --- before an attempt, while nobody writes blocks

    def recover(self, history: History, incarnation: int) -> Procedure[Dropped]:
        """What the retained manifests stand on stays, all other blocks that an incarnation may have left are orphans.

        What a damaged older checkpoint needs is unknown: until it expires, which a savepoint never does, it keeps all
        that was written for it or for one before it, and nothing of what came later. The
        newest one is what the pipeline goes on from: if that is damaged, `Halt`. Where it is the decision itself that
        is damaged, it is tombstoned as it expires. What zombies send yet is looked for as in `begin_attempt`, also
        after a clean end: those of incarnations before that one may live on.
        """
        newest = history.latest
        assert newest is not None
        self._left = tuple(each for each in history.storages if each != self._storage)
        beginning = (0,) * newest.block_partitions
        if unknown := history.damaged_checkpoints():
            everything = yield from self._everything(beginning)
            for checkpoint in unknown:
                self.ledger.completed(checkpoint, all_that_may_be_of(checkpoint, everything), known=False)
        for manifest in history.retained:
            found = yield from self._references(manifest, needed=manifest is newest)
            known = not isinstance(found, str)
            if isinstance(found, str):
                if manifest is newest:
                    raise beyond_repair(newest, found)
                self.unrestorable[manifest.checkpoint] = found
                there = yield from self._scanned(beginning, manifest.storage)
                if not there and manifest.storage in self._left:
                    self._leave(manifest.storage, found)
                blocks = all_that_may_be_of(manifest.checkpoint, there)
            else:
                blocks = {manifest.storage: list(found)}
            self.ledger.completed(manifest.checkpoint, blocks, keep=manifest.is_savepoint, known=known)
        yield from self._begin(newest, first_places(history), (incarnation, 0), late=True)
        return self.ledger.expire()

    def begin_attempt(self, newest: Manifest, incarnation: int, attempt: int, *, late: bool = True) -> Procedure[None]:
        """Look for what the attempt before has left behind *newest*.

        *late*: workers were killed, and what they had sent may yet arrive: it is looked for once more when the first
        checkpoint of this attempt is complete.
        """
        yield from self._begin(newest, newest.block_end_offsets, (incarnation, attempt), late=late)

    def _begin(self, newest: Manifest, start: Offsets, attempt: tuple[int, int], *, late: bool) -> Procedure[None]:
        self._begun_at = start
        self.ledger.written(newest.checkpoint, (yield from self._everything(start)))
        self._ends = {newest.checkpoint: self._begun_at}
        self._seen_to = self._begun_at
        self._attempt, self._behind, self._look_again, self._own_too = attempt, newest.checkpoint, late, False

    def _references(self, manifest: Manifest, *, needed: bool) -> Procedure[frozenset[BlockRef] | str]:
        """Every block that *manifest* stands on, or why that is not known; see `FindReferences`."""
        if not needed and manifest.storage in self.unreachable:
            return self.unreachable[manifest.storage]
        found: frozenset[BlockRef] | str = yield FindReferences(manifest, needed=needed)
        return found

    def _everything(self, start: Offsets) -> Procedure[list[StoredBlock]]:
        """All that lies in any storage; in the topic, behind *start*."""
        found: list[StoredBlock] = []
        for storage in (self._storage, *self._left):
            found += yield from self._scanned(start, storage)
        return found

    def _scanned(self, start: Offsets, storage: str) -> Procedure[list[StoredBlock]]:
        if storage in self.unreachable:
            return []
        scanned = yield ScanBlocks(start, storage)
        if isinstance(scanned, str):
            self._leave(storage, scanned)
            return []
        if storage == TOPIC:
            self._begun_at = scanned.end_offsets
        self.unreadable.update(dict.fromkeys(scanned.unreadable))
        return _stored(storage, scanned.blocks)

    def _leave(self, storage: str, why: str) -> None:
        """Let *storage* be: it cannot be looked at, or shows nothing though a manifest names what lies there."""
        self.unreachable.setdefault(storage, why)
        self.ledger.let_be(storage)

    # --- at a decision

    def written(self, checkpoint: int, blocks: Iterable[BlockRef]) -> None:
        """*blocks* were acknowledged for *checkpoint*, whether or not it ever completes."""
        refs = tuple(blocks)
        self.ledger.written(checkpoint, _stored(self._storage, refs))
        ends = list(self._seen_to)
        for each in refs if self._storage == TOPIC else ():
            ends[each.partition] = max(ends[each.partition], each.offset + 1)
        self._seen_to = tuple(ends)

    def completed(self, checkpoint: int, blocks: Iterable[BlockRef], *, keep: bool = False) -> None:
        """*checkpoint* is decided, and stands on *blocks*; *keep*: it is a savepoint, which never expires."""
        self.ledger.completed(checkpoint, {self._storage: blocks}, keep=keep)

    def release(self, checkpoint: int) -> None:
        """*checkpoint*, a savepoint, is wanted no more: it goes with the next that may."""
        self.ledger.release(checkpoint)

    def nothing_yet(self, ends: Offsets) -> None:
        """The pipeline is new: nobody has written a block behind *ends*, and nobody will in front of them."""
        self._seen_to = ends

    def ends_to_note(self, checkpoint: int, base: int, *, final: bool) -> Offsets:
        """The `Manifest.block_end_offsets` of *checkpoint*, which builds on *base*.

        A checkpoint that is in flight behind it, or was and is aborted, was triggered after *base*, or a newer one, was
        decided; so were those for which sinks have set something aside behind this one's barrier. All else is triggered
        later still, and lies behind all blocks that are known by now. The ends of the partitions may lie further on: to
        begin before them finds the same, and needs no question.
        """
        self._ends = {each: known for each, known in self._ends.items() if each >= base} | {checkpoint: self._seen_to}
        return self._ends[base] if self._ahead and not final else self._seen_to

    def expect_own_orphans(self) -> None:
        """Work of the present attempt was tried more than once: what its checkpoint does not name is orphaned."""
        self._look_again = self._own_too = True

    def expire(self, manifest: Manifest, pinned: Iterable[int] = ()) -> Procedure[Dropped]:
        """*manifest*, the newest that is known to the ledger, is durable: what nobody needs any more may go, in the
        transaction that finalizes it, or in a later one. *pinned* are checkpoints that something pending builds upon.

        The last look for what is late comes with the first checkpoint of the attempt: what arrives behind that is of a
        zombie.
        """
        if self._look_again and manifest.checkpoint > self._behind:
            own_too, ends = self._own_too, self._begun_at
            found = yield from self._everything(ends)
            self.ledger.written(manifest.checkpoint, (each for each in found if own_too or self._is_older(each.ref)))
            self._look_again = self._own_too = False
        return self.ledger.expire(pinned)

    def _is_older(self, block: BlockRef) -> bool:
        key = BlockKey.parse(block.key)
        return key is not None and (key.incarnation, key.attempt) < self._attempt


def first_places(history: History) -> Offsets:
    """Where orphans of older incarnations begin; there is a manifest."""
    newest = history.latest
    assert newest is not None
    known = newest if newest.checkpoint in history.finalized else history.manifests.get(newest.previous)
    return known.block_end_offsets if known is not None else (0,) * newest.block_partitions


def _stored(storage: str, refs: Iterable[BlockRef]) -> list[StoredBlock]:
    return [StoredBlock(storage, ref) for ref in refs]


def when_given_up(pipeline: str, savepoint: int) -> str:
    """What ends that a damaged *savepoint* keeps all that may be of it."""
    return (
        f"A savepoint never expires, and keeps what was written up to it: restore what is damaged from a backup; or, "
        f"once you have given it up, `exactlyonce savepoints delete {pipeline} {savepoint}`."
    )


def beyond_repair(manifest: Manifest, why: str) -> Halt:
    """The halt where the newest checkpoint, *manifest*, cannot be restored."""
    return Halt(
        f"The state of checkpoint {manifest.checkpoint} cannot be restored. {why}\n"
        f"  The output of that checkpoint is visible: an older one would write it again, so none is tried.\n"
        f"  Choices: restore {_place_of_blocks(manifest)} from a replica or backup and run "
        f"again; or `exactlyonce reset {manifest.pipeline}` and recompute from the input into new output topics."
    )


def _place_of_blocks(manifest: Manifest) -> str:
    return manifest.storage or f"the topic {checkpoint_topic(manifest.pipeline)}"

"""Orphans: blocks of a pipeline that no manifest refers to, and that may be dropped (docs/design/orphans.md).

They are searched for in every storage, and dropped by the next transaction of the decision log that drops anything.

Invariants: a checkpoint writes nothing before it is triggered, except staged rows, which it writes no earlier than the
trigger of the previous one. A trigger comes after the decision on the base, so its blocks lie after all blocks known at
that decision. A manifest notes ends after which all blocks lie that may be orphans once it is finalized. An incarnation
searches from there; while the newest manifest is not finalized, it searches from the ends in the previous one, since
the knowledge of older incarnations died with them. The transaction that finalizes a checkpoint drops all orphans known
by then. Former storages are searched as well, as long as a manifest or a remembered incarnation names them. A former
storage that cannot be read is left alone for the rest of this incarnation: it is asked nothing more, and nothing in it
is dropped, even if it comes back, since what manifests need there is unknown.
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
from exactlyonce.checkpoint.retention import Ledger, possible_needs
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.pipeline.errors import Halt
from exactlyonce.pipeline.names import checkpoint_topic

Offsets = tuple[int, ...]
"""One for each partition of the checkpoint topic. A storage outside of the topic has no order and is scanned whole."""


class KnownBlocks(Retention):
    """The blocks that one incarnation of a coordinator knows of."""

    def __init__(self, settings: CheckpointSettings, *, staging: bool = False) -> None:
        """*staging*: sinks write blocks before their checkpoint is triggered."""
        self.ledger = Ledger(settings.num_retained)
        self.unrestorable: dict[int, str] = {}
        """Older checkpoints that cannot be restored, each with the damage to its blocks."""
        self.unreachable: dict[str, str] = {}
        """Former storages that cannot be read, each with the reason; their blocks stay."""
        self.unreadable: dict[str, None] = {}
        """Damaged places of the block partitions; their blocks are skipped and never dropped."""
        self._storage = settings.storage
        self._former: tuple[str, ...] = ()
        """Other storages, in which older incarnations may have kept blocks."""
        self._ahead = staging or settings.max_concurrent > 1
        self._ends: dict[int, Offsets] = {}
        """Ends after which all blocks lie that build on a checkpoint, by checkpoint that may be a base."""
        self._attempt = (0, 0)
        self._begun_at: Offsets = ()
        self._seen_to: Offsets = ()
        """Ends after which no block is known. They only grow; later blocks lie after them."""
        self._newest_before = -1
        """The newest checkpoint when the attempt began."""
        self._search_again = False
        self._own_too = False

    # --- before an attempt, while nobody writes blocks

    def recover(self, history: History, incarnation: int) -> Procedure[Dropped]:
        """Keep the blocks that retained manifests refer to; all others that an incarnation may have left are orphans.

        A damaged older checkpoint keeps, until it expires, every block written for it or an earlier one. Raises Halt if
        the newest one is damaged. A damaged decision is tombstoned when it expires. Late blocks of zombies are searched
        for as in `begin_attempt`, also after a clean end: zombies of incarnations before that one may live on.
        """
        newest = history.latest
        assert newest is not None
        self._former = tuple(storage for storage in history.storages if storage != self._storage)
        beginning = (0,) * newest.block_partitions
        if unknown := history.damaged_checkpoints():
            everything = yield from self._scan_all(beginning)
            for checkpoint in unknown:
                self.ledger.completed(checkpoint, possible_needs(checkpoint, everything), known=False)
        for manifest in history.retained:
            references = yield from self._references(manifest, needed=manifest is newest)
            known = not isinstance(references, str)
            if isinstance(references, str):
                if manifest is newest:
                    raise beyond_repair(newest, references)
                self.unrestorable[manifest.checkpoint] = references
                stored = yield from self._scan(beginning, manifest.storage)
                if not stored and manifest.storage in self._former:
                    self._leave_alone(manifest.storage, references)
                blocks = possible_needs(manifest.checkpoint, stored)
            else:
                blocks = {manifest.storage: list(references)}
            self.ledger.completed(manifest.checkpoint, blocks, keep=manifest.is_savepoint, known=known)
        yield from self._begin(newest, first_places(history), (incarnation, 0), late=True)
        return self.ledger.expire()

    def begin_attempt(self, newest: Manifest, incarnation: int, attempt: int, *, late: bool = True) -> Procedure[None]:
        """Search for blocks that the previous attempt left after *newest*.

        *late*: its workers were killed, and blocks that they had sent may still arrive. So the search is repeated when
        the first checkpoint of this attempt is complete.
        """
        yield from self._begin(newest, newest.block_end_offsets, (incarnation, attempt), late=late)

    def _begin(self, newest: Manifest, start: Offsets, attempt: tuple[int, int], *, late: bool) -> Procedure[None]:
        self._begun_at = start
        self.ledger.written(newest.checkpoint, (yield from self._scan_all(start)))
        self._ends = {newest.checkpoint: self._begun_at}
        self._seen_to = self._begun_at
        self._attempt, self._newest_before, self._search_again, self._own_too = attempt, newest.checkpoint, late, False

    def _references(self, manifest: Manifest, *, needed: bool) -> Procedure[frozenset[BlockRef] | str]:
        """See `FindReferences`."""
        if not needed and manifest.storage in self.unreachable:
            return self.unreachable[manifest.storage]
        references: frozenset[BlockRef] | str = yield FindReferences(manifest, needed=needed)
        return references

    def _scan_all(self, start: Offsets) -> Procedure[list[StoredBlock]]:
        """All blocks in any storage; in the topic, those after *start*."""
        stored: list[StoredBlock] = []
        for storage in (self._storage, *self._former):
            stored += yield from self._scan(start, storage)
        return stored

    def _scan(self, start: Offsets, storage: str) -> Procedure[list[StoredBlock]]:
        if storage in self.unreachable:
            return []
        scanned = yield ScanBlocks(start, storage)
        if isinstance(scanned, str):
            self._leave_alone(storage, scanned)
            return []
        if storage == TOPIC:
            self._begun_at = scanned.end_offsets
        self.unreadable.update(dict.fromkeys(scanned.unreadable))
        return _stored(storage, scanned.blocks)

    def _leave_alone(self, storage: str, why: str) -> None:
        """*storage* cannot be read, or shows nothing though a manifest names blocks there."""
        self.unreachable.setdefault(storage, why)
        self.ledger.keep_all_of(storage)

    # --- at a decision

    def written(self, checkpoint: int, blocks: Iterable[BlockRef]) -> None:
        """*blocks* were acknowledged for *checkpoint*, whether or not it ever completes."""
        refs = tuple(blocks)
        self.ledger.written(checkpoint, _stored(self._storage, refs))
        ends = list(self._seen_to)
        for ref in refs if self._storage == TOPIC else ():
            ends[ref.partition] = max(ends[ref.partition], ref.offset + 1)
        self._seen_to = tuple(ends)

    def completed(self, checkpoint: int, blocks: Iterable[BlockRef], *, keep: bool = False) -> None:
        """*checkpoint* is decided, and refers to *blocks*; *keep*: it is a savepoint, which never expires."""
        self.ledger.completed(checkpoint, {self._storage: blocks}, keep=keep)

    def release(self, checkpoint: int) -> None:
        """Let *checkpoint*, a savepoint, expire."""
        self.ledger.release(checkpoint)

    def start_at(self, ends: Offsets) -> None:
        """The pipeline is new: nobody has written a block after *ends*, and nobody will before them."""
        self._seen_to = ends

    def ends_to_note(self, checkpoint: int, base: int, *, final: bool) -> Offsets:
        """The `Manifest.block_end_offsets` of *checkpoint*, which builds on *base*.

        Later checkpoints in flight, also aborted ones, and those with rows staged after this one's barrier, were
        triggered after the decision on *base* or a newer one. All others are triggered later still, and lie after all
        blocks known by now. The partitions may end further on: to begin earlier finds the same, and asks nobody.
        """
        known = {number: ends for number, ends in self._ends.items() if number >= base}
        self._ends = known | {checkpoint: self._seen_to}
        return self._ends[base] if self._ahead and not final else self._seen_to

    def expect_own_orphans(self) -> None:
        """The present attempt tried some work more than once: blocks that its checkpoint does not name are orphans."""
        self._search_again = self._own_too = True

    def expire(self, manifest: Manifest, pinned: Iterable[int] = ()) -> Procedure[Dropped]:
        """Drop everything that nobody needs now that *manifest*, the newest, is durable; see `Ledger.expire`.

        The last search for late blocks comes with the attempt's first checkpoint: whatever arrives after it is a
        zombie's.
        """
        if self._search_again and manifest.checkpoint > self._newest_before:
            own_too = self._own_too
            blocks = yield from self._scan_all(self._begun_at)
            late = (block for block in blocks if own_too or self._is_older(block.ref))
            self.ledger.written(manifest.checkpoint, late)
            self._search_again = self._own_too = False
        return self.ledger.expire(pinned)

    def _is_older(self, block: BlockRef) -> bool:
        key = BlockKey.parse(block.key)
        return key is not None and (key.incarnation, key.attempt) < self._attempt


def first_places(history: History) -> Offsets:
    """Offsets after which all orphans of older incarnations lie; *history* has a manifest."""
    assert history.latest is not None
    known = history.latest_finalized
    return known.block_end_offsets if known is not None else (0,) * history.latest.block_partitions


def _stored(storage: str, refs: Iterable[BlockRef]) -> list[StoredBlock]:
    return [StoredBlock(storage, ref) for ref in refs]


def when_given_up(pipeline: str, savepoint: int) -> str:
    """How to end that a damaged *savepoint* keeps every block that it may need."""
    return (
        f"A savepoint never expires, and keeps what was written up to it: restore what is damaged from a backup; or, "
        f"once you have given it up, `exactlyonce savepoints delete {pipeline} {savepoint}`."
    )


def beyond_repair(manifest: Manifest, why: str) -> Halt:
    """The halt where the newest checkpoint, *manifest*, cannot be restored."""
    place = manifest.storage or f"the topic {checkpoint_topic(manifest.pipeline)}"
    return Halt(
        f"The state of checkpoint {manifest.checkpoint} cannot be restored. {why}\n"
        f"  The output of that checkpoint is visible: an older one would write it again, so none is tried.\n"
        f"  Choices: restore {place} from a replica or backup and run "
        f"again; or `exactlyonce reset {manifest.pipeline}` and recompute from the input into new output topics."
    )

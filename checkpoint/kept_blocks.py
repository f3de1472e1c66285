"""The blocks that are kept: those that a manifest still needs; and orphans, which none does (docs/design/blocks.md).

Invariants of what is kept: a block is dropped only after the manifest that no longer needs it is durable, and never
while a retained manifest, a pending checkpoint's base or a savepoint refers to its key, in whatever storage: a storage
with two names shows each of its blocks under both. If the references of a checkpoint cannot be read, every block that
it may need stays: no checkpoint needs a block that was written for a later one.

Orphans are searched for in every storage, and dropped by the next transaction of the decision log that drops anything.
Invariants of the search: a checkpoint writes nothing before it is triggered, except staged rows, which it writes no
earlier than the trigger of the previous one. A trigger comes after the decision on the base, so its blocks lie after
all blocks known at that decision. A manifest notes ends after which all blocks lie that may be orphans once it is
finalized. An incarnation searches from there; while the newest manifest is not finalized, it searches from the ends in
the previous one, since the knowledge of older incarnations died with them. The transaction that finalizes a checkpoint
drops all orphans known by then. Former storages are searched as well, as long as a manifest or a remembered incarnation
names them. A former storage that cannot be read is left alone for the rest of this incarnation: it is asked nothing
more, and nothing in it is dropped, even if it comes back, since what manifests need there is unknown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter

from exactlyonce.checkpoint.decision import Dropped
from exactlyonce.checkpoint.records.encoding import BlockKey
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import BlockRef, Manifest, StoredBlock
from exactlyonce.checkpoint.records.storage_url import TOPIC
from exactlyonce.checkpoint.requests import FindReferences, Procedure, ScanBlocks
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.pipeline.errors import Halt
from exactlyonce.pipeline.names import checkpoint_topic


class Retention:
    """The rule for which checkpoints and blocks are dropped; this one drops none, and there are no blocks."""

    def recover(self, history: History, incarnation: int) -> Procedure[Dropped]:
        """The manifests and blocks of older incarnations that may be dropped."""
        yield from ()
        return (), ()

    def begin_attempt(self, newest: Manifest, incarnation: int, attempt: int, *, late: bool) -> Procedure[None]:
        """Search for blocks that the previous attempt left after *newest*."""
        yield from ()

    def start_at(self, ends: tuple[int, ...]) -> None:
        """The pipeline is new, and its block partitions end there."""

    def ends_to_note(self, checkpoint: int, base: int, *, final: bool) -> tuple[int, ...]:
        """The `Manifest.block_end_offsets` of *checkpoint*."""
        return ()

    def written(self, checkpoint: int, blocks: Iterable[BlockRef]) -> None:
        """*blocks* were written for *checkpoint*."""

    def completed(self, checkpoint: int, blocks: Iterable[BlockRef], *, keep: bool = False) -> None:
        """*checkpoint* is decided, and refers to *blocks*; *keep*: it is a savepoint, which never expires."""

    def release(self, checkpoint: int) -> None:
        """Let *checkpoint*, a savepoint, expire."""

    def expire(self, manifest: Manifest, pinned: Iterable[int]) -> Procedure[Dropped]:
        """The manifests and blocks to drop in the transaction that finalizes *manifest*."""
        yield from ()
        return (), ()


_key: Callable[[BlockRef], str] = attrgetter("key")
"""Unique among all blocks of the pipeline, in any storage."""
_place: Callable[[BlockRef], tuple[int, int, str]] = attrgetter("partition", "offset", "key")


def by_storage(blocks: Iterable[StoredBlock]) -> dict[str, list[BlockRef]]:
    refs = defaultdict[str, list[BlockRef]](list)
    for storage, ref in blocks:
        refs[storage].append(ref)
    return refs


def may_need(checkpoint: int, key: str) -> bool:
    """Whether *checkpoint* may need the block *key*: only if it was written for that checkpoint or an earlier one.

    Staged rows have the number after the last barrier that their subtask knew of.
    """
    parsed = BlockKey.parse(key)
    return parsed is None or parsed.checkpoint <= checkpoint


def possible_needs(checkpoint: int, blocks: Iterable[StoredBlock]) -> dict[str, list[BlockRef]]:
    """The *blocks* that *checkpoint* may need, by storage."""
    return by_storage(block for block in blocks if may_need(checkpoint, block.ref.key))


class BlockUse:
    """Blocks by the manifests that refer to them, and blocks that were written but belong to none yet.

    A large state has tens of thousands, and each checkpoint names nearly all of them again before it is finalized:
    nothing is done with them one by one.
    """

    def __init__(self, num_retained: int) -> None:
        self.num_retained = num_retained
        self._needs: dict[int, dict[str, dict[str, BlockRef]]] = {}
        """By checkpoint and storage."""
        self._kept: set[int] = set()
        self._released: set[int] = set()
        self._unknown: set[int] = set()
        """Checkpoints that may need more blocks than `_needs` has."""
        self._untouched: set[str] = set()
        """Storages from which nothing is dropped."""
        self._unclaimed = defaultdict[str, dict[str, tuple[int, BlockRef]]](dict)
        """By storage."""

    @property
    def retained(self) -> list[int]:
        """The checkpoints whose manifests are in the topic, oldest first."""
        return sorted(self._needs)

    def written(self, checkpoint: int, blocks: Iterable[StoredBlock]) -> None:
        """*blocks* were written for *checkpoint*, whether or not it ever completes."""
        for storage, ref in blocks:
            self._unclaimed[storage].setdefault(_key(ref), (checkpoint, ref))

    def completed(
        self, checkpoint: int, blocks: Mapping[str, Iterable[BlockRef]], *, keep: bool = False, known: bool = True
    ) -> None:
        """The manifest of *checkpoint* is durable and refers to *blocks*, by storage; *keep* for a savepoint.

        Unless its references are *known*, it also needs every other block that it `may_need`.
        """
        needs = {storage: tuple(refs) for storage, refs in blocks.items()}
        self._needs[checkpoint] = {
            storage: dict(zip(map(_key, refs), refs, strict=True)) for storage, refs in needs.items()
        }
        if keep:
            self._kept.add(checkpoint)
        (self._unknown.discard if known else self._unknown.add)(checkpoint)

    def keep_all_of(self, storage: str) -> None:
        """Drop nothing from *storage* any more: the blocks that are needed there cannot be listed."""
        self._untouched.add(storage)

    def release(self, checkpoint: int) -> None:
        """Let a savepoint expire once it is neither the newest checkpoint nor pinned."""
        self._kept.discard(checkpoint)
        self._released.add(checkpoint)

    def expire(self, pinned: Iterable[int] = ()) -> tuple[tuple[int, ...], tuple[StoredBlock, ...]]:
        """Forget, and return for tombstoning, the manifests beyond `num_retained` and the blocks nobody needs.

        The newest checkpoint stays, and so do savepoints, which do not count, and *pinned* checkpoints, which are bases
        of pending ones.
        """
        latest = max(self._needs, default=0)
        ordinary = [checkpoint for checkpoint in self.retained if checkpoint not in self._kept | self._released]
        recent = {*ordinary[-self.num_retained :], *self.retained[-1:], *self._kept, *pinned}
        dropped = [checkpoint for checkpoint in self.retained if checkpoint not in recent]
        candidates = defaultdict[str, dict[str, BlockRef]](dict)
        for storage, unclaimed in self._unclaimed.items():
            candidates[storage] = {key: ref for key, (written, ref) in unclaimed.items() if written <= latest}
        for checkpoint in dropped:
            for storage, needs in self._needs.pop(checkpoint).items():
                candidates[storage] |= needs
        self._unknown.difference_update(dropped)
        return tuple(dropped), tuple(
            StoredBlock(storage, ref)
            for storage, refs in sorted(candidates.items())
            if storage not in self._untouched
            for ref in sorted((refs[key] for key in self._dead(storage, refs)), key=_place)
        )

    def _dead(self, storage: str, candidates: Mapping[str, BlockRef]) -> Iterable[str]:
        """Take *candidates* out of the unclaimed blocks, and return those that nobody needs."""
        unclaimed = self._unclaimed[storage]
        for key in unclaimed.keys() & candidates.keys():
            del unclaimed[key]
        dead: Iterable[str] = candidates
        for needs in reversed(self._needs.values()):  # the newest leaves few to ask the others, savepoints too, about
            for needed in needs.values():
                dead = [key for key in dead if key not in needed]
        held = self._held(dead)
        unclaimed.update((key, (0, candidates[key])) for key in held)  # until it is known, or its manifest goes
        return [key for key in dead if key not in held] if held else dead

    def _held(self, keys: Iterable[str]) -> set[str]:
        """The *keys* that a checkpoint with unknown references may need."""
        if not self._unknown:
            return set()
        newest = max(self._unknown)
        return {key for key in keys if may_need(newest, key)}


Offsets = tuple[int, ...]
"""One for each partition of the checkpoint topic. A storage outside of the topic has no order and is scanned whole."""


class BlockRetention(Retention):
    """The blocks that one incarnation of a coordinator knows of."""

    def __init__(self, settings: CheckpointSettings, *, staging: bool = False) -> None:
        """*staging*: sinks write blocks before their checkpoint is triggered."""
        self.use = BlockUse(settings.num_retained)
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
                self.use.completed(checkpoint, possible_needs(checkpoint, everything), known=False)
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
            self.use.completed(manifest.checkpoint, blocks, keep=manifest.is_savepoint, known=known)
        yield from self._begin(newest, first_places(history), (incarnation, 0), late=True)
        return self.use.expire()

    def begin_attempt(self, newest: Manifest, incarnation: int, attempt: int, *, late: bool = True) -> Procedure[None]:
        """Search for blocks that the previous attempt left after *newest*.

        *late*: its workers were killed, and blocks that they had sent may still arrive. So the search is repeated when
        the first checkpoint of this attempt is complete.
        """
        yield from self._begin(newest, newest.block_end_offsets, (incarnation, attempt), late=late)

    def _begin(self, newest: Manifest, start: Offsets, attempt: tuple[int, int], *, late: bool) -> Procedure[None]:
        self._begun_at = start
        self.use.written(newest.checkpoint, (yield from self._scan_all(start)))
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
        self.use.keep_all_of(storage)

    # --- at a decision

    def written(self, checkpoint: int, blocks: Iterable[BlockRef]) -> None:
        """*blocks* were acknowledged for *checkpoint*, whether or not it ever completes."""
        refs = tuple(blocks)
        self.use.written(checkpoint, _stored(self._storage, refs))
        ends = list(self._seen_to)
        for ref in refs if self._storage == TOPIC else ():
            ends[ref.partition] = max(ends[ref.partition], ref.offset + 1)
        self._seen_to = tuple(ends)

    def completed(self, checkpoint: int, blocks: Iterable[BlockRef], *, keep: bool = False) -> None:
        """*checkpoint* is decided, and refers to *blocks*; *keep*: it is a savepoint, which never expires."""
        self.use.completed(checkpoint, {self._storage: blocks}, keep=keep)

    def release(self, checkpoint: int) -> None:
        """Let *checkpoint*, a savepoint, expire."""
        self.use.release(checkpoint)

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
        """Drop everything that nobody needs now that *manifest*, the newest, is durable; see `BlockUse.expire`.

        The last search for late blocks comes with the attempt's first checkpoint: whatever arrives after it is a
        zombie's.
        """
        if self._search_again and manifest.checkpoint > self._newest_before:
            own_too = self._own_too
            blocks = yield from self._scan_all(self._begun_at)
            late = (block for block in blocks if own_too or self._is_older(block.ref))
            self.use.written(manifest.checkpoint, late)
            self._search_again = self._own_too = False
        return self.use.expire(pinned)

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

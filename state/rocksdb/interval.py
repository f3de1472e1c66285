"""The changes between two barriers in the tiered table, and their way into local files and blocks.

Changes lie in layers, and records change only the last one. All are unsettled until they are written to the local
store, oldest first, and no interval settles anything before the previous one has settled all. So once an interval has
settled, the store is the state at its barrier, and images are read from a view of that moment. An interval whose
changes outgrow memory spills: closed layers are settled before the barrier, and noted in the store as well, where its
increments are then read from. Intervals are encoded in order, each once, in slices.

An interval's blocks may be needed until a later checkpoint is a base, and its images may be larger than memory. So,
beyond `KEPT_BYTES`, blocks are released, and encoded again when they are needed. Sections that were read from the store
are read from the same view once more, and so give the same bytes. Blocks with changes from memory are kept.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain, compress, groupby, islice
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

from exactlyonce.pipeline.errors import require
from exactlyonce.state.blocks import (
    IMAGE,
    INCREMENT,
    BlockEncoder,
    BlockHeader,
    EncodedBlock,
    EncodedKeys,
    encode_keys,
    end_of_parts,
)
from exactlyonce.state.rocksdb.files import LocalFiles
from exactlyonce.state.rocksdb.groups import TableGroups
from exactlyonce.state.rocksdb.memory import TableMemory
from exactlyonce.state.rocksdb.store import SLICE_BYTES, Entry, LocalStore
from exactlyonce.state.slots import KeyLayout, TableTimes
from exactlyonce.state.snapshot import BlockSequence
from exactlyonce.state.state_type import StateType, joined

KEPT_BYTES = 4 << 20
"""The most that an interval keeps of blocks that can be encoded again."""
_SECTION_TARGET = 128 * 1024


class SectionSource(NamedTuple):
    """The entries of one key group that make up its sections."""

    slices: Iterator[list[Entry]]
    expected: int
    """About how many entries there are."""
    in_store: bool = True
    """Whether they are read from the store, and can be read again."""
    interval: int | None = None
    """The interval that noted them as its changes; None: they are the key group's states."""


class _SectionOrigin(NamedTuple):
    """The place in the store from which a section was read."""

    first_key: bytes
    interval: int | None


class _Released(NamedTuple):
    """A block that is no longer in memory."""

    header: BlockHeader
    origins: tuple[_SectionOrigin, ...]


class IntervalBlocks:
    """Cuts entries into sections, packs them into blocks, and has these by number."""

    def __init__(
        self, store: LocalStore, view: Any, state_type: StateType[Any], layout: KeyLayout, checkpoint: int
    ) -> None:
        """Sections are read again from *view*."""
        self.entries_written = 0
        self._store, self._view = store, view
        self._layout = layout
        self._format = state_type.operator, checkpoint, state_type.version
        self._encoder = BlockEncoder(*self._format)
        self._bytes_per_entry = 0.0
        self._origins: list[_SectionOrigin | None] = []
        """The origins of the sections in the unfinished block."""
        self._blocks: list[EncodedBlock | _Released] = []
        self._kept: deque[tuple[int, _Released]] = deque()
        """The blocks in memory that can be encoded again, oldest first."""
        self._kept_bytes = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, number: int) -> EncodedBlock:
        block = self._blocks[number]
        return block if isinstance(block, EncodedBlock) else self._encoded_again(block)

    def write(self, group: int, kind: int, source: SectionSource) -> Iterator[None]:
        """Write all of *source*, in slices; at least one section, since an image may be empty."""
        self._keep(self._encoder.begin_group(int(source.expected * self._bytes_per_entry)))
        for entries in chain([next(source.slices, [])], source.slices):
            self._write_section(group, kind, entries, source)
            yield

    def _write_section(self, group: int, kind: int, entries: list[Entry], source: SectionSource) -> None:
        """Write *entries* as a section, or as several if they are large."""
        (keys, states), count = self._encoded_section(entries), len(entries)
        size = len(keys.body) + len(states)
        if size > _SECTION_TARGET and count > 1:
            self._write_section(group, kind, entries[: count // 2], source)
            self._write_section(group, kind, entries[count // 2 :], source)
            return
        self._bytes_per_entry = size / max(1, count)
        self.entries_written += count
        self._keep(self._encoder.add(group, kind, keys, states, count))
        first_key = entries[0][0] if entries else b""
        self._origins.append(_SectionOrigin(first_key, source.interval) if source.in_store else None)

    def end(self) -> None:
        """Finish the last block."""
        self._keep(self._encoder.flush())
        if all(isinstance(block, EncodedBlock) for block in self._blocks):
            self._view = None  # a view that is kept would keep deleted files on the disk

    def end_parts(self, group: int, since: int) -> None:
        """All parts of *group* are written, the first by checkpoint *since*."""
        operator, _, version = self._format
        self._blocks.append(end_of_parts(operator, since, version, group))

    def _keep(self, finished: EncodedBlock | None) -> None:
        if finished is None:
            return
        origins = tuple(origin for origin in self._origins if origin is not None)
        if len(origins) == len(finished.header.sections):
            self._kept.append((len(self._blocks), _Released(finished.header, origins)))
            self._kept_bytes += len(finished.body)
        self._origins.clear()
        self._blocks.append(finished)
        while self._kept_bytes > KEPT_BYTES:
            number, released = self._kept.popleft()
            self._kept_bytes -= len(self[number].body)
            self._blocks[number] = released

    def _encoded_again(self, released: _Released) -> EncodedBlock:
        encoder = BlockEncoder(*self._format)
        for section, origin in zip(released.header.sections, released.origins, strict=True):
            entries = self._store.entries(self._view, section.group, origin.interval, origin.first_key)
            present = (entry for entry in entries if entry[1] or section.kind != IMAGE)
            encoded = self._encoded_section(list(islice(present, section.entries)))
            require(encoder.add(section.group, section.kind, *encoded, section.entries) is None, "they fit one block")
        block = encoder.flush()
        require(block is not None and block.header == released.header, "a view shows the same whenever it is read")
        assert block is not None
        return block

    def _encoded_section(self, entries: list[Entry]) -> tuple[EncodedKeys, bytes]:
        keys, packed = [key for key, state in entries if state], [state for _, state in entries if state]
        deleted = [key for key, state in entries if not state] if len(keys) < len(entries) else []
        return encode_keys(keys, deleted, self._layout.own(keys)), joined(packed)


S = TypeVar("S")

SLICE_ENTRIES = 1024
_ENTRIES_AT_FIRST = 64
_DONE = object()


@dataclass
class TableResources(Generic[S]):
    """The parts of a table that its intervals share."""

    files: LocalFiles
    state_type: StateType[S]
    groups: TableGroups
    layout: KeyLayout
    memory: TableMemory
    times: TableTimes | None = None
    new_layer: Callable[[], dict[bytes, S | None]] = dict
    """Makes the dict for a layer."""
    first_places: dict[int, bytes] = field(default_factory=dict)
    """By key group, where the places begin that the store has not dropped."""
    slice_entries: int = _ENTRIES_AT_FIRST
    """How many entries make a slice of `SLICE_BYTES`, judging by the last ones."""


class TieredInterval(Generic[S]):
    """The changes from one barrier to the next; None stands for a deleted key."""

    def __init__(self, table: TableResources[S], number: int) -> None:
        self.checkpoint = 0
        """The checkpoint at whose barrier it ends; 0 before that."""
        self.layers: list[dict[bytes, S | None]] = [table.new_layer()]
        """Those that are not settled, oldest first."""
        self.settled = False
        self.blocks: BlockSequence = ()
        self.encoded = False
        self.credit = 0.0
        """The credit of merging after this interval's images."""
        self.number = number
        self.spilled = 0
        """Changes that were noted in the store."""
        self.dropped: set[int] = set()
        """Key groups whose slots were dropped."""
        self._first_places: dict[int, bytes] = {}
        """By key group, where the places begin that are there at the barrier."""
        self._table = table
        self._spilling: Iterator[None] = iter(())
        self._dealt: dict[int, list[Entry]] = defaultdict(list)
        """Its changes, packed, by key group; none if it spills."""
        self._view: Any = None
        self._whole = False

    @property
    def unsettled(self) -> int:
        """How many changes are only in memory."""
        return sum(map(len, self.layers))

    def freeze(self, checkpoint: int, *, whole: bool = False) -> TieredInterval[S]:
        """The barrier of *checkpoint* is here; returns the next interval. *whole*: every key group gets an image."""
        self.checkpoint, self._whole = checkpoint, whole
        if self._table.times is not None:
            self._first_places = {group: self._table.times.first_place(group) for group in self._table.times.floors}
        self._slices = self._encode()
        return TieredInterval(self._table, self.number + 1)

    def advance(self) -> None:
        """Settle or encode one slice more. Raises `DiskFull`, and may be called again after it."""
        self._table.files.store.require_room()
        if next(self._slices, _DONE) is _DONE:
            require(self.encoded, "an interval whose encoding failed is not encoded further")

    def spill(self) -> None:
        """Settle a slice of this interval, before its barrier; all older intervals are settled."""
        if next(self._spilling, _DONE) is _DONE:
            self.spilled += len(self.layers[-1])
            self.layers.append(self._table.new_layer())
            self._spilling = self._settle_oldest(noted=True)

    def _encode(self) -> Iterator[None]:
        groups, files = self._table.groups, self._table.files
        while self._whole and groups.unread:  # none of these has changed: what was stored is the state at the barrier
            groups.read([min(groups.unread)])
            yield
        changed, read = self.unsettled + self.spilled, groups.counts.keys() - groups.unread
        yield from self._settle()
        self._view = files.store.view()
        self.blocks = self._writer = IntervalBlocks(
            files.store, self._view, self._table.state_type, self._table.layout, self.checkpoint
        )
        if self.spilled:  # else a process that takes the files would find it among the changes of its own intervals
            files.store.forget(self.number)
        if not groups.unread:
            files.save(self.checkpoint)
        self.settled = True
        yield  # settling goes no further: what follows is right only once older intervals are encoded
        chosen = self._choose(changed, read)
        if self._whole:  # a key group without a block is in the changes alone, and gets an image there
            chosen = groups.merging.whole(groups.written)
        emptied = {group for group in self.dropped & groups.written if not groups.counts.get(group)}
        chosen |= groups.merging.whole(emptied)
        images = chosen.keys() - groups.merging.parts.keys()
        for group, entries in sorted(chosen.items()):
            yield from self._image(group) if group in images else self._part(group, entries)
        for group, changes in self._changes():
            if group not in images:
                yield from self._increment(group, changes)
            groups.written.add(group)
        self._writer.end()
        for group in chosen.keys() - images:
            if groups.merging.parts[group].complete:
                self._writer.end_parts(group, groups.merging.joined(group))
        self._view = None
        self._dealt.clear()
        files.describe(self.checkpoint, groups.counts, groups.merging)
        self.encoded = True

    def _choose(self, changed: int, read: Collection[int]) -> dict[int, int | None]:
        """The key groups to write whole for the sake of short chains, among those that were *read* at the barrier."""
        groups = self._table.groups
        groups.merging.share = max(1, len(read)) / max(1, len(groups.all))
        chosen = groups.merging.choose(self.checkpoint, changed, {group: range(groups.counts[group]) for group in read})
        self.credit = groups.merging.credit
        return chosen

    def _settle(self) -> Iterator[None]:
        yield from self._spilling
        while self.layers:
            yield from self._settle_oldest(noted=bool(self.spilled))
        starts = self._table.first_places
        self._table.files.wait()
        for group in sorted(self.dropped):
            self._table.files.store.drop(group, starts.get(group, b""), self._first_places[group])
            starts[group] = self._first_places[group]
        yield

    def _settle_oldest(self, *, noted: bool) -> Iterator[None]:
        """Write the oldest layer to the store, in slices; lookups use the layer until all of it is written."""
        table, counts = self._table, self._table.groups.counts
        table.files.wait()
        items = iter(self.layers[0].items())
        while some := list(islice(items, min(SLICE_ENTRIES, table.slice_entries))):
            groups = table.layout.groups([key for key, _ in some])
            if self.dropped:
                kept = [key >= self._first_place(group) for (key, _), group in zip(some, groups, strict=True)]
                some, groups = list(compress(some, kept)), list(compress(groups, kept))
                if not some:
                    yield
                    continue
            packed = iter(table.state_type.pack([state for _, state in some if state is not None]))
            entries = [
                (group, key, b"" if state is None else next(packed))
                for group, (key, state) in zip(groups, some, strict=True)
            ]
            table.files.store.write(entries, self.number if noted else None)
            self._weigh(some, entries)
            for group, key, state in entries:
                if not state:
                    counts[group] = max(0, counts.get(group, 0) - 1)
                if not noted:
                    self._dealt[group].append((key, state))
            yield
        self.layers.pop(0)

    def _weigh(self, some: list[tuple[bytes, S | None]], entries: list[tuple[int, bytes, bytes]]) -> None:
        size = sum(len(key) + len(packed) for _, key, packed in entries)
        self._table.slice_entries = max(1, SLICE_BYTES * len(entries) // max(1, size))
        states = zip((state for _, state in some), (packed for _, _, packed in entries), strict=True)
        self._table.memory.note_large(states, len(entries))

    def _changes(self) -> Iterator[tuple[int, SectionSource]]:
        """The changes of the interval by key group, in order."""
        if not self.spilled:
            for group, dealt in sorted(self._dealt.items()):
                yield group, SectionSource(_slices(dealt), len(dealt), in_store=False)
            return
        noted = self._table.files.store.changes(self._view, self.number, SLICE_ENTRIES)
        for group, same in groupby(noted, key=itemgetter(0)):
            slices = self._present(group, (entries for _, entries in same))
            yield group, SectionSource(slices, 0, interval=self.number)

    def _first_place(self, group: int) -> bytes:
        """Where the places of *group* begin that are there at the barrier, as far as it is known."""
        if self.checkpoint or self._table.times is None:
            return self._first_places.get(group, b"")
        return self._table.times.first_place(group)

    def _present(self, group: int, slices: Iterator[list[Entry]]) -> Iterator[list[Entry]]:
        """*slices* of *group* without places that were dropped: noted changes, or a key group read meanwhile."""
        first = self._first_places.get(group, b"")
        return (
            filter(None, ([entry for entry in entries if entry[0] >= first] for entries in slices)) if first else slices
        )

    def _image(self, group: int) -> Iterator[None]:
        """Write the whole of *group* as it was at the barrier."""
        groups, before = self._table.groups, self._writer.entries_written
        groups.merging.imaged(group)
        slices = self._present(group, self._table.files.store.group(self._view, group, SLICE_ENTRIES))
        yield from self._writer.write(group, IMAGE, SectionSource(slices, groups.counts.get(group, 0)))
        groups.counts[group] = self._writer.entries_written - before

    def _part(self, group: int, entries: int | None) -> Iterator[None]:
        """Write *entries* more of *group*, or a few more than that, None: all that is left, as they were at the
        barrier."""
        groups, before = self._table.groups, self._writer.entries_written
        parts = groups.merging.parts[group]
        left = self._table.files.store.group(self._view, group, SLICE_ENTRIES, parts.rest or b"")

        def some() -> Iterator[list[Entry]]:
            for slice_ in left:
                parts.rest = slice_[-1][0] + b"\0"
                yield slice_
                if entries is not None and self._writer.entries_written - before >= entries:
                    return
            parts.complete = True

        yield from self._writer.write(group, INCREMENT, SectionSource(self._present(group, some()), entries or 0))
        groups.merging.incremented(group, self.checkpoint, self._writer.entries_written - before)

    def _increment(self, group: int, changes: SectionSource) -> Iterator[None]:
        """Write *changes* of *group*; as an image, if the group has no older block."""
        groups, before = self._table.groups, self._writer.entries_written
        if group in groups.written:
            yield from self._writer.write(group, INCREMENT, changes)
            groups.merging.incremented(group, self.checkpoint, self._writer.entries_written - before)
        else:
            present = ([entry for entry in entries if entry[1]] for entries in changes.slices)
            yield from self._writer.write(group, IMAGE, changes._replace(slices=present))
            groups.merging.imaged(group)


def _slices(entries: list[Entry]) -> Iterator[list[Entry]]:
    """Slices of `SLICE_ENTRIES` entries, and some `SLICE_BYTES`, at most."""
    some, size = list[Entry](), 0
    for entry in entries:
        some.append(entry)
        size += len(entry[0]) + len(entry[1])
        if len(some) == SLICE_ENTRIES or size >= SLICE_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some

"""The changes between two barriers in the tiered table, and their way into local files and blocks.

Changes lie in layers, of which records change the last one alone; all are `unsettled` until they are written to the
local store, oldest first, and no interval settles anything before the one before it has settled all. So the store, once
an interval has settled, is the state at its barrier, and a view of it then is what images are read from. An interval
whose changes outgrow memory spills: closed layers are settled before the barrier, and noted in the store as well, where
its increments are then read from. Intervals are encoded in order, each once, in slices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import Any, Generic, TypeVar

from exactlyonce.pipeline.errors import require
from exactlyonce.pipeline.keys import key_groups
from exactlyonce.state.blocks import IMAGE, INCREMENT
from exactlyonce.state.merging import Merging
from exactlyonce.state.snapshot import BlockSequence
from exactlyonce.state.state_type import StateType
from exactlyonce.state.tiered.files import LocalFiles
from exactlyonce.state.tiered.interval_blocks import IntervalBlocks, SectionOrigin, encoded_section
from exactlyonce.state.tiered.memory import EntryBytes
from exactlyonce.state.tiered.store import SLICE_BYTES, Entry, LocalStore

S = TypeVar("S")

SLICE_ENTRIES = 1024
_ENTRIES_AT_FIRST = 64
_SECTION_TARGET = 128 * 1024
_DONE = object()
OriginOf = Callable[[bytes], SectionOrigin | None]
"""Where entries were read, by the first key."""


@dataclass
class Shelf(Generic[S]):
    """What the intervals of a table share with it."""

    store: LocalStore
    files: LocalFiles
    state_type: StateType[S]
    groups: tuple[int, ...]
    max_parallelism: int
    merging: Merging
    counts: dict[int, int]
    """By key group that was read, about how many keys it has: right when it gets an image."""
    unread: set[int]
    """Key groups whose state lies in blocks alone."""
    read: Callable[[Iterable[int]], None]
    """Reads key groups that are not."""
    written: set[int] = field(default_factory=set)
    """Key groups of which there may be older blocks."""
    weights: EntryBytes = field(default_factory=EntryBytes)
    slice_entries: int = _ENTRIES_AT_FIRST
    """How many make a slice of `SLICE_BYTES`, as the last ones were."""

    def known(self) -> dict[str, Any]:
        """What a saved database keeps of this; see `files.Marker`."""
        return {
            "operator": self.state_type.operator,
            "groups": self.groups,
            "max_parallelism": self.max_parallelism,
            "schema": self.state_type.form,
            "counts": dict(self.counts),
            "entries": dict(self.merging.entries),
            "oldest": dict(self.merging.oldest),
        }


class TieredInterval(Generic[S]):
    """The changes from one barrier to the next; None stands for a deleted key."""

    def __init__(self, shelf: Shelf[S], number: int) -> None:
        self.checkpoint = 0
        """The checkpoint at whose barrier it ends; 0 before that."""
        self.layers: list[dict[bytes, S | None]] = [{}]
        """Oldest first. What is settled is not here any more."""
        self.settled = False
        self.blocks: BlockSequence = ()
        self.encoded = False
        self.credit = 0.0
        """What merging had left after this interval's images."""
        self.number = number
        self.spilled = 0
        """Changes that were noted in the store."""
        self._shelf = shelf
        self._spilling: Iterator[None] = iter(())
        self._dealt: dict[int, list[Entry]] = defaultdict(list)
        """Of an interval that does not spill: by key group, its changes, packed."""
        self._view: Any = None
        self._whole = False

    @property
    def unsettled(self) -> int:
        """How many changes are only in memory."""
        return sum(map(len, self.layers))

    def freeze(self, checkpoint: int, *, whole: bool = False) -> TieredInterval[S]:
        """The barrier of *checkpoint* is here; returns the next interval. *whole*: every key group gets an image."""
        self.checkpoint, self._whole = checkpoint, whole
        self._slices = self._encode()
        return TieredInterval(self._shelf, self.number + 1)

    def advance(self) -> None:
        """Settle or encode one slice more. Raises `DiskFull`, and may be called again after it."""
        self._shelf.store.require_room()
        if next(self._slices, _DONE) is _DONE:
            require(self.encoded, "an interval whose encoding failed is not encoded further")

    def spill(self) -> None:
        """Settle a slice of what the interval holds, which has no barrier yet, and all before it is settled."""
        if next(self._spilling, _DONE) is _DONE:
            self.spilled += len(self.layers[-1])
            self.layers.append({})
            self._spilling = self._settle_oldest(noted=True)

    def _encode(self) -> Iterator[None]:
        shelf = self._shelf
        while self._whole and shelf.unread:  # none of these has changed: what was stored is the state at the barrier
            shelf.read([min(shelf.unread)])
            yield
        merged = self._choose()
        yield from self._settle()
        self._view = shelf.store.view()
        self._writer = IntervalBlocks(shelf.store, self._view, shelf.state_type, self.checkpoint)
        self.blocks = self._writer
        if self.spilled:  # else a process that takes the files would find it among the changes of its own intervals
            shelf.store.forget(self.number)
        if not shelf.unread:
            shelf.files.save(self.checkpoint)
        self.settled = True
        yield  # whoever only settles goes no further: what `written` says is true once older intervals are encoded
        if self._whole:  # what has no block yet is in the changes alone, and gets an image there
            merged = set(shelf.written)
        for group in sorted(merged):
            yield from self._image(group)
        for group, slices, expected in self._changes():
            if group not in merged:
                yield from self._increment(group, slices, expected)
            shelf.written.add(group)
        self._writer.end()
        self._view = None
        self._dealt.clear()
        shelf.files.describe(self.checkpoint, shelf.known())
        self.encoded = True

    def _choose(self) -> set[int]:
        """The key groups to write whole for the sake of short chains, of those that were read."""
        shelf = self._shelf
        shelf.merging.share = max(1, len(shelf.groups) - len(shelf.unread)) / len(shelf.groups)
        sizes = {group: range(count) for group, count in shelf.counts.items() if group not in shelf.unread}
        merged = shelf.merging.choose(self.checkpoint, self.unsettled + self.spilled, sizes)
        self.credit = shelf.merging.credit
        return merged

    def _settle(self) -> Iterator[None]:
        yield from self._spilling
        while self.layers:
            yield from self._settle_oldest(noted=bool(self.spilled))

    def _settle_oldest(self, *, noted: bool) -> Iterator[None]:
        """Write the oldest layer to the store, in slices; its keys are looked for in it until all are written."""
        shelf = self._shelf
        shelf.files.wait()
        items = iter(self.layers[0].items())
        while some := list(islice(items, min(SLICE_ENTRIES, shelf.slice_entries))):
            groups = key_groups([key for key, _ in some], shelf.max_parallelism)
            packed = iter(shelf.state_type.pack([state for _, state in some if state is not None]))
            entries = [
                (group, key, b"" if state is None else next(packed))
                for group, (key, state) in zip(groups, some, strict=True)
            ]
            shelf.store.write(entries, self.number if noted else None)
            self._weigh(some, entries)
            for group, key, each in entries:
                if not each:
                    shelf.counts[group] = max(0, shelf.counts.get(group, 0) - 1)
                if not noted:
                    self._dealt[group].append((key, each))
            yield
        self.layers.pop(0)

    def _weigh(self, some: list[tuple[bytes, S | None]], entries: list[tuple[int, bytes, bytes]]) -> None:
        shelf, size = self._shelf, sum(len(key) + len(each) for _, key, each in entries)
        shelf.slice_entries = max(1, SLICE_BYTES * len(entries) // max(1, size))
        states = zip((state for _, state in some), (each for _, _, each in entries), strict=True)
        shelf.weights.passed(states, len(entries))

    def _changes(self) -> Iterator[tuple[int, Iterator[list[Entry]], int]]:
        """By key group, in order, the changes of the interval, in slices, and how many they are, or 0."""
        if not self.spilled:
            for group, dealt in sorted(self._dealt.items()):
                yield group, _slices(dealt), len(dealt)
            return
        noted = self._shelf.store.changes(self._view, self.number, SLICE_ENTRIES)
        for group, same in groupby(noted, key=itemgetter(0)):
            yield group, (some for _, some in same), 0

    def _image(self, group: int) -> Iterator[None]:
        """Write the whole of *group* as it was at the barrier."""
        shelf, before = self._shelf, self._written
        shelf.merging.imaged(group)
        slices = shelf.store.group(self._view, group, SLICE_ENTRIES)
        yield from self._sections(group, IMAGE, slices, shelf.counts.get(group, 0), _in_group)
        shelf.counts[group] = self._written - before

    def _increment(self, group: int, slices: Iterator[list[Entry]], expected: int) -> Iterator[None]:
        """Write what changed in *group*; as an image, if there is nothing before it."""
        shelf, before = self._shelf, self._written
        origin = self._noted if self.spilled else _in_memory
        if group in shelf.written:
            yield from self._sections(group, INCREMENT, slices, expected, origin)
            shelf.merging.incremented(group, self.checkpoint, self._written - before)
        else:
            present = ([entry for entry in some if entry[1]] for some in slices)
            yield from self._sections(group, IMAGE, present, expected, origin)
            shelf.merging.imaged(group)

    _written = 0
    """Entries in sections so far."""
    _bytes_per_entry = 0.0

    def _sections(
        self, group: int, kind: int, slices: Iterator[list[Entry]], expected: int, origin: OriginOf
    ) -> Iterator[None]:
        """Write all of *slices*, about so many entries as *expected*; one section at least: an image may be empty."""
        self._writer.begin_group(int(expected * self._bytes_per_entry))
        for some in chain([next(slices, [])], slices):
            self._section(group, kind, some, origin)
            yield

    def _section(self, group: int, kind: int, entries: list[Entry], origin: OriginOf) -> None:
        """Write *entries* as a section, or as several, where they are large."""
        encoded, count = encoded_section(entries), len(entries)
        keys, states = encoded
        size = len(keys.body) + len(states)
        if size > _SECTION_TARGET and count > 1:
            self._section(group, kind, entries[: count // 2], origin)
            self._section(group, kind, entries[count // 2 :], origin)
            return
        self._bytes_per_entry = size / max(1, count)
        self._written += count
        self._writer.add(group, kind, encoded, count, origin(entries[0][0] if entries else b""))

    def _noted(self, first: bytes) -> SectionOrigin:
        return SectionOrigin(first, self.number)


def _slices(entries: list[Entry]) -> Iterator[list[Entry]]:
    """All of them, so many at a time and some `SLICE_BYTES` at most."""
    some, size = list[Entry](), 0
    for entry in entries:
        some.append(entry)
        size += len(entry[0]) + len(entry[1])
        if len(some) == SLICE_ENTRIES or size >= SLICE_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def _in_group(first: bytes) -> SectionOrigin:
    return SectionOrigin(first, None)


def _in_memory(first: bytes) -> None:
    return None

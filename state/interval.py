"""The changes between two barriers, and their way into blocks.

From its barrier on, no record changes an interval. `advance` works through it in slices of `SLICE_ENTRIES` entries at
most: it distributes the changes by key group, then encodes group by group, images first. Images also need unchanged
states, and read them from the table. So while an interval is `open`, the next one keeps in `before` the states at the
barrier of keys that records change. Intervals are encoded in order, each once; a later checkpoint that needs the same
changes sends the same blocks again.

A state of the wrong type, or one that its type does not hold whole, would only be noticed by a restore. So states are
decoded again and compared: all of the first interval, later those of some key groups, which take turns, and always
those of a class that none was read back as (`SectionWriter`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, compress, islice, repeat
from operator import length_hint, not_
from types import NoneType
from typing import Generic, TypeVar

from exactlyonce.pipeline.errors import require
from exactlyonce.state.batches import append_each, exhaust
from exactlyonce.state.blocks import IMAGE, INCREMENT, BlockEncoder, EncodedBlock, encode_keys, end_of_parts
from exactlyonce.state.key_groups import Merging
from exactlyonce.state.slots import KeyLayout
from exactlyonce.state.state_type import StateType

S = TypeVar("S")

SLICE_ENTRIES = 2048
PART_ENTRIES = 170_000
"""A dict copies its contents when it grows, while records wait: past 2^18 * 2/3 entries it is not let grow."""
CHECKED_ENTRIES = 2048
"""After its first checkpoint, a table decodes about so many states of each again: checking takes seven times as long as
encoding, or more."""
_SECTION_TARGET = 128 * 1024
_ENTRIES_AT_FIRST = 64
_DONE = object()
T = TypeVar("T")
ByGroup = defaultdict[int, list[T]]


@dataclass
class TableContents(Generic[S]):
    """The parts of a hash map that its intervals share."""

    states: dict[bytes, S | None]
    keys: Mapping[int, dict[bytes, None]]
    layout: KeyLayout
    state_type: StateType[S]
    merging: Merging


class Interval(Generic[S]):
    """The changes from one barrier to the next; None stands for a deleted key."""

    def __init__(self, table: TableContents[S], *, first: bool = True) -> None:
        """*first*: of its table, in this process. All its states are decoded again, to see that they can be."""
        self.checkpoint = 0
        """The checkpoint at whose barrier it ends; 0 before that."""
        self.before: dict[bytes, S | None] = {}
        self.added = ByGroup[bytes](list)
        """The keys that records have added to the table."""
        self.forgotten = ByGroup[Collection[bytes]](list)
        """Keys that were forgotten without a trace: no block names them as deleted."""
        self.open = True
        """Whether encoding still reads states that records may change."""
        self.encoded = False
        self.credit = 0.0
        """The credit of merging after this interval's images."""
        self._parts: list[dict[bytes, S | None]] = [{}]
        """The changes that are not distributed yet. If several parts have a key, the last one counts."""
        self._dropped: set[bytes] = set()
        self._next: Interval[S] | None = None
        self._table = table
        self._first = first
        self._whole = False

    @property
    def blocks(self) -> list[EncodedBlock]:
        """After its barrier: the blocks that are finished."""
        return self._writer.blocks

    def changes(self) -> dict[bytes, S | None]:
        """The dict for the changes of a batch."""
        if len(self._parts[-1]) > PART_ENTRIES:
            self._parts.append({})
        return self._parts[-1]

    def forget(self, group: int, keys: Collection[bytes]) -> None:
        """Nothing of *keys* is to be written: the index says that they are gone."""
        for part in self._parts:
            exhaust(map(part.pop, keys, repeat(None)))
        self.forgotten[group].append(keys)

    def _has_changed(self, key: bytes) -> bool:
        """Whether a record has changed the state of *key*; until the changes are distributed."""
        return any(key in part for part in self._parts)

    def freeze(self, checkpoint: int, *, whole: bool = False) -> Interval[S]:
        """The barrier of *checkpoint* is here; returns the next interval. *whole*: every key group gets an image."""
        self.checkpoint, self._whole = checkpoint, whole
        self._writer = SectionWriter(self._table.state_type, checkpoint, self._table.layout)
        self._slices = self._encode()
        self._next = Interval(self._table, first=False)
        return self._next

    def advance(self) -> None:
        if next(self._slices, _DONE) is _DONE:
            require(self.encoded, "an interval whose encoding failed is not encoded further")

    def _encode(self) -> Iterator[None]:
        changed = sum(map(len, self._parts))
        table_keys, merging = self._table.keys, self._table.merging
        keys, states, deleted = yield from self._deal()
        yield from self._take_in()
        emptied = yield from self._take_out()
        if self._whole:
            chosen = merging.whole(table_keys)
        else:
            chosen = merging.choose(self.checkpoint, changed, table_keys) | merging.whole(emptied)
        self.credit = merging.credit
        if not self._first:
            written = changed + sum(part or len(table_keys[group]) for group, part in chosen.items())
            self._writer.check_turns = max(1, written // CHECKED_ENTRIES)
        images = chosen.keys() - merging.parts.keys()
        for group, entries in sorted(chosen.items()):
            yield from self._image(group) if group in images else self._part(group, entries)
        self._writer.flush()
        self.open = self._table.state_type.mutable
        for group in sorted((keys.keys() | deleted.keys()) - images):
            yield from self._increment(group, keys[group], states[group], deleted[group])
        self._writer.flush()
        self.open = False
        for group in chosen.keys() - images:
            if merging.parts[group].complete:
                self._writer.end_parts(group, merging.joined(group))
        yield from self._forget()
        self.encoded = True

    def _deal(self) -> Generator[None, None, tuple[ByGroup[bytes], ByGroup[S], ByGroup[bytes]]]:
        """The changed keys and their states, and the deleted keys."""
        keys, states, deleted = ByGroup[bytes](list), ByGroup[S](list), ByGroup[bytes](list)
        for some, some_states in self._newest():
            groups = self._table.layout.groups(some)
            if NoneType in set(map(type, some_states)):
                present = [state is not None for state in some_states]
                self._delete(compress(zip(some, groups, strict=True), map(not_, present)), deleted)
                some, groups = list(compress(some, present)), list(compress(groups, present))
                some_states = list(compress(some_states, present))
            append_each(keys, groups, some)
            append_each(states, groups, some_states)
            yield
        while self._parts:
            self._parts.pop()  # not all at once: that takes time, too
            yield
        return keys, states, deleted

    def _newest(self) -> Iterator[tuple[list[bytes], list[S | None]]]:
        """The changed keys and their newest states, in slices."""
        for number, part in enumerate(self._parts):
            more, more_states, later = iter(part), iter(part.values()), self._parts[number + 1 :]
            while some := list(islice(more, SLICE_ENTRIES)):
                some_states = list(islice(more_states, SLICE_ENTRIES))
                for other in later:
                    newest = [key not in other for key in some]
                    some, some_states = list(compress(some, newest)), list(compress(some_states, newest))
                yield some, some_states

    def _delete(self, keys: Iterable[tuple[bytes, int]], deleted: ByGroup[bytes]) -> None:
        """Remove keys from the table, unless a later interval has changed them; note those in older blocks."""
        table = self._table
        for key, group in keys:
            if key in table.keys[group]:
                deleted[group].append(key)
            if not any(later._has_changed(key) for later in self._later()):
                table.states.pop(key, None)
                table.keys[group].pop(key, None)
                self._dropped.add(key)

    def _take_in(self) -> Iterator[None]:
        """Add new keys that are not deleted again to the keys of the table."""
        for group, added in self.added.items():
            for start in range(0, len(added), SLICE_ENTRIES):
                some = [key for key in added[start : start + SLICE_ENTRIES] if key not in self._dropped]
                self._table.keys[group].update(dict.fromkeys(some))
                yield
        self.added.clear()

    def _take_out(self) -> Generator[None, None, set[int]]:
        """Remove forgotten keys from the keys of the table; the key groups that have none left."""
        emptied = set[int]()
        for group, parts in self.forgotten.items():
            keys, gone = self._table.keys[group], chain.from_iterable(parts)
            while some := list(islice(gone, SLICE_ENTRIES)):
                exhaust(map(keys.pop, some, repeat(None)))
                yield
            if not keys:
                emptied.add(group)
        self.forgotten.clear()
        return emptied

    def _later(self) -> Iterator[Interval[S]]:
        """The intervals after this one, the current one included."""
        later = self._next
        while later is not None:
            yield later
            later = later._next

    def _image(self, group: int) -> Iterator[None]:
        """Write the whole of *group* as it was at the barrier."""
        self._table.merging.imaged(group)
        keys, left = iter(self._table.keys[group]), len(self._table.keys[group])
        self._writer.begin_group(left)
        while True:
            some = list(islice(keys, self._writer.entries_per_section))
            left -= len(some)
            self._writer.add(group, IMAGE, *self._at_barrier(some), [])
            yield
            if not left:
                return

    def _part(self, group: int, entries: int | None) -> Iterator[None]:
        """Write *entries* more of *group*, None: all that is left, as they were at the barrier."""
        merging = self._table.merging
        parts = merging.parts[group]
        if parts.rest is None:
            parts.rest = iter([*self._table.keys[group]])
        left = length_hint(parts.rest) if entries is None else entries
        self._writer.begin_group(left)
        while some := list(islice(parts.rest, min(left, self._writer.entries_per_section))):
            left -= len(some)
            keys, states = self._at_barrier(some)
            self._writer.add(group, INCREMENT, keys, states, [])
            merging.incremented(group, self.checkpoint, len(keys))
            yield
        parts.complete = not length_hint(parts.rest)

    def _at_barrier(self, keys: list[bytes]) -> tuple[list[bytes], list[S]]:
        """The *keys* with a state at the barrier, and the states: the newest, unless a later interval has one."""
        newest: list[S | None] = list(map(self._table.states.get, keys))
        for later in reversed([*self._later()]):
            newest = list(map(later.before.get, keys, newest))
        states = [state for state in newest if state is not None]
        if len(states) < len(keys):
            keys = [key for key, state in zip(keys, newest, strict=True) if state is not None]
        return keys, states

    def _increment(self, group: int, keys: list[bytes], states: list[S], deleted: list[bytes]) -> Iterator[None]:
        """Write the changes in *group*; as an image, if they are all of it, and no part of it is written."""
        all_of_it = len(keys) == len(self._table.keys[group]) and group not in self._table.merging.parts
        kind = IMAGE if all_of_it else INCREMENT
        if kind == IMAGE:
            self._table.merging.imaged(group)
            deleted = []
        else:
            self._table.merging.incremented(group, self.checkpoint, len(keys) + len(deleted))
        more, more_states, more_deleted, left = iter(keys), iter(states), iter(deleted), len(keys) + len(deleted)
        self._writer.begin_group(left)
        while True:
            limit = self._writer.entries_per_section
            some, some_states = list(islice(more, limit)), list(islice(more_states, limit))
            some_deleted = list(islice(more_deleted, limit - len(some)))
            left -= len(some) + len(some_deleted)
            self._writer.add(group, kind, some, some_states, some_deleted)
            yield
            if not left:
                return

    def _forget(self) -> Iterator[None]:
        """Drop, in slices too, the states that the next interval kept for this one."""
        before = next(self._later()).before
        while before:
            for _ in range(min(SLICE_ENTRIES, len(before))):
                before.popitem()
            yield


class SectionWriter(Generic[S]):
    """Cuts the states of key groups into sections, and packs these into blocks."""

    def __init__(self, state_type: StateType[S], checkpoint: int, layout: KeyLayout) -> None:
        self.blocks: list[EncodedBlock] = []
        self.check_turns = 1
        """The states of a key group are decoded again in one of so many checkpoints."""
        self._state_type = state_type
        self._checkpoint, self._layout = checkpoint, layout
        self._encoder = BlockEncoder(state_type.operator, checkpoint, state_type.version)
        self._bytes_per_entry = 0.0

    @property
    def entries_per_section(self) -> int:
        if not self._bytes_per_entry:
            return _ENTRIES_AT_FIRST
        return max(1, min(SLICE_ENTRIES, int(_SECTION_TARGET / self._bytes_per_entry)))

    def begin_group(self, entries: int) -> None:
        self._keep(self._encoder.begin_group(int(entries * self._bytes_per_entry)))

    def add(self, group: int, kind: int, keys: list[bytes], states: list[S], deleted: list[bytes]) -> None:
        """Add a section, or several where it is too large for one."""
        encoded_keys = encode_keys(keys, deleted, self._layout.own(keys))
        encoded_states = self._state_type.encode(states, checked=(group + self._checkpoint) % self.check_turns == 0)
        size, entries = len(encoded_keys.body) + len(encoded_states), len(keys) + len(deleted)
        self._bytes_per_entry = size / max(1, entries)
        if size > _SECTION_TARGET and entries > 1:
            middle = entries // 2
            beyond = max(0, middle - len(keys))
            self.add(group, kind, keys[:middle], states[:middle], deleted[:beyond])
            self.add(group, kind, keys[middle:], states[middle:], deleted[beyond:])
        else:
            self._keep(self._encoder.add(group, kind, encoded_keys, encoded_states, entries))

    def flush(self) -> None:
        self._keep(self._encoder.flush())

    def end_parts(self, group: int, since: int) -> None:
        """All parts of *group* are written, the first by checkpoint *since*."""
        self.blocks.append(end_of_parts(self._state_type.operator, since, self._state_type.version, group))

    def _keep(self, finished: EncodedBlock | None) -> None:
        if finished is not None:
            self.blocks.append(finished)

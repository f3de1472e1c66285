"""The stored state of one operator for one subtask: key groups that are read from blocks, some or all, in any order.

Only the blocks of wanted key groups are fetched, and only their wanted sections decoded. A group is its newest image
and the increments after it, in the order of their checkpoints. Any backend reads the blocks of any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, repeat
from typing import Any, Generic, NamedTuple, TypeVar, cast

from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.state.batches import exhaust
from exactlyonce.state.blocks import IMAGE, BlockDecoder, Section
from exactlyonce.state.chain import Chain, ChainBlock
from exactlyonce.state.errors import DamagedState
from exactlyonce.state.key_groups import mask_of
from exactlyonce.state.slots import KeyLayout, TableTimes
from exactlyonce.state.state_type import RawState, StateType, damaged_block, raw_states

S = TypeVar("S")
T = TypeVar("T")

RAW_BYTES = 64 << 20
"""The most that stays decompressed between key groups; beyond it a block is decompressed again for each group."""

Decode = Callable[[memoryview, Any, int], list[T]]
"""Given encoded states, their schema and their version, decodes them."""
Fetch = Callable[[list[BlockRef]], Iterable[tuple[BlockRef, bytes]]]
"""Given references, yields each with its block, in any order."""


@dataclass
class GroupState(Generic[S]):
    """The state of one key group, as it was read."""

    states: dict[bytes, S] = field(default_factory=dict)
    increments: list[tuple[int, int]] = field(default_factory=list)
    """(checkpoint, entries) of every section after its newest image, oldest first."""


@dataclass(frozen=True, kw_only=True)
class StoredState(Generic[S]):
    """The state of *operator* at *checkpoint*, of which nothing has been read yet; *type* is the type of a state."""

    operator: str
    type: Any
    groups: Sequence[int]
    """The key groups of the table. The chain may hold more: those are carried over unread."""
    max_parallelism: int
    checkpoint: int = 0
    chain: Chain = field(default_factory=Chain)
    schema: Any = None
    """The schema of the states in the blocks; None without states."""
    version: int = 1
    """The newest version of the states."""
    credit: float = 0.0
    """`Merging.credit` at the checkpoint."""
    share: float = 1.0
    """The share of the subtask's key groups that are in `groups`."""
    anew: bool = False
    """Whether the table's first snapshot must write all state: its blocks cannot be in a chain with these."""
    digest: bytes = b""
    """The digest of the indexes, which identifies the state. Empty without state."""
    times: TableTimes | None = None
    """The times of a timed table, which keeps them up to date: nothing is read that they have forgotten."""
    fetch: Fetch = lambda refs: ()

    @property
    def layout(self) -> KeyLayout:
        return KeyLayout(self.max_parallelism, self.times is not None)

    @property
    def present(self) -> set[int]:
        """The `groups` with any state."""
        mask = 0
        for _, some in self.chain.needed(mask_of(self.groups)):
            mask |= some
        return {group for group in self.groups if mask >> group & 1}

    def size(self, groups: Iterable[int]) -> int:
        """The bytes of the blocks of *groups*."""
        return sum(block.ref.size for block, _ in self.chain.needed(mask_of(groups)))

    def together(self, groups: Iterable[int], bytes_max: float) -> tuple[int, ...]:
        """The first of *groups*, and as many more as need at most *bytes_max* of blocks beyond the first one's."""
        some, blocks, bytes_left = list[int](), set[BlockRef](), bytes_max
        for group in sorted(groups):
            own = {block.ref for block, _ in self.chain.needed(1 << group)} - blocks
            bytes_left -= sum(ref.size for ref in own) if some else 0
            if bytes_left < 0:
                break
            some.append(group)
            blocks |= own
        return tuple(some)

    def read(self, groups: Iterable[int]) -> dict[int, GroupState[S]]:
        """The state of the *groups* that have any. Raises `DamagedState` or `StateIncompatible`."""
        state_type: StateType[S] = StateType(self.operator, self.type)
        return dict(filter(None, self._decoded(groups, self._migrating(state_type, state_type.decode))))

    def reading(self, groups: Iterable[int]) -> Iterator[tuple[int, GroupState[bytes]] | None]:
        """`read`, group by group, with each state as `StateType.pack` has it; None after a slice of work."""
        state_type: StateType[S] = StateType(self.operator, self.type)
        return self._decoded(groups, self._migrating(state_type, state_type.split))

    def reading_raw(self, groups: Iterable[int]) -> Iterator[tuple[int, GroupState[RawState]]]:
        """`read`, group by group, with each state as the msgpack that was written, whatever its type."""

        return filter(None, self._decoded(groups, self._raw))

    def reading_changes(self, groups: Iterable[int]) -> Iterator[tuple[int, Mapping[bytes, RawState | None]]]:
        """`reading_raw` where all blocks are increments: of each key what came of it, None: it was deleted."""
        found = filter(None, self._decoded(groups, self._raw, deleted_too=True))
        return ((group, read.states) for group, read in found)

    def _raw(self, encoded: memoryview, written: Any, version: int) -> list[Any]:
        return raw_states(self.operator, encoded, version)

    def _migrating(self, state_type: StateType[S], decode: Decode[T]) -> Decode[T]:
        """*decode*, only for states with migrations to the newest version."""

        def decoded(encoded: memoryview, written: Any, version: int) -> list[T]:
            state_type.require_migrations(version, self.version)
            return decode(encoded, written, version)

        return decoded

    def _decoded(
        self, groups: Iterable[int], decode: Decode[T], *, deleted_too: bool = False
    ) -> Iterator[tuple[int, GroupState[T]] | None]:
        wanted = list(self.chain.needed(mask_of(groups)))
        readers: dict[BlockRef, BlockDecoder] = {}
        for ref, body in self.fetch([block.ref for block, _ in wanted]):
            readers[ref] = BlockDecoder(body)
            yield None
        parts = _parts(_required(self.operator, wanted, readers))
        written = self.schema
        for read in _decode(
            self.operator, parts, lambda encoded, version: decode(encoded, written, version), deleted_too=deleted_too
        ):
            if read is not None and self.times is not None and (first := self.times.first_place(read[0])):
                read[1].states = {place: state for place, state in read[1].states.items() if place >= first}
            yield read


class _Part(NamedTuple):
    section: Section
    number: int
    reader: BlockDecoder


def _required(
    operator: str, wanted: Sequence[tuple[ChainBlock, int]], readers: Mapping[BlockRef, BlockDecoder]
) -> list[tuple[BlockDecoder, int]]:
    """The blocks with the key groups to take from each, in the same order, checked against the index."""
    if missing := [block.ref.key for block, _ in wanted if block.ref not in readers]:
        raise DamagedState(f"{len(missing)} blocks of operator {operator!r} are missing, the first is {missing[0]}.")
    for block, groups in wanted:
        header = readers[block.ref].header
        indexed = (operator, block.checkpoint, groups, block.images & groups)
        if (header.operator, header.checkpoint, header.groups & groups, header.images & groups) != indexed:
            raise DamagedState(
                f"Block {block.ref.key} does not hold that state of operator {operator!r} which its index says."
            )
    return [(readers[block.ref], groups) for block, groups in wanted]


def _parts(blocks: Iterable[tuple[BlockDecoder, int]]) -> list[_Part]:
    """The sections that make up the state, group by group and each oldest first, as *blocks* are."""
    parts = [
        _Part(section, number, reader)
        for reader, groups in blocks
        for number, section in enumerate(reader.header.sections)
        if groups >> section.group & 1
    ]
    return sorted(parts, key=lambda part: part.section.group)


def _decode(
    operator: str, parts: Sequence[_Part], decode: Callable[[memoryview, int], list[T]], *, deleted_too: bool
) -> Iterator[tuple[int, GroupState[T]] | None]:
    """With *deleted_too*, a key whose state was deleted has the state None."""
    remaining, held_bytes = Counter(part.reader for part in parts), 0
    for number, same in groupby(parts, key=lambda part: part.section.group):
        group = GroupState[T]()
        for part in same:
            held_bytes += 0 if part.reader.held else part.reader.raw_bytes
            keys, deleted, encoded = part.reader.section(part.number)
            states = decode(encoded, part.reader.header.version)
            if len(states) != len(keys):
                raise damaged_block(operator, f"it holds {len(keys)} keys and {len(states)} states")
            group.states.update(zip(keys, states, strict=True))
            if deleted_too:
                group.states.update(dict.fromkeys(deleted, cast("T", None)))
            else:
                exhaust(map(group.states.pop, deleted, repeat(None)))
            if part.section.kind != IMAGE:
                group.increments.append((part.reader.header.checkpoint, part.section.entries))
            remaining[part.reader] -= 1
            if not remaining[part.reader] or held_bytes > RAW_BYTES:
                part.reader.release()
                held_bytes -= part.reader.raw_bytes
            yield None
        yield number, group

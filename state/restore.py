"""State from the blocks of any number of old subtasks, for any parallelism.

Only blocks that hold wanted key groups are fetched, and only their wanted sections decoded. A group is its newest image
and the increments after it, in the order of their checkpoints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from exactlyonce.checkpoint.manifest import BlockRef
from exactlyonce.state.blocks import IMAGE, BlockReader, Section
from exactlyonce.state.chain import Chain, ChainBlock, Index, decode_index
from exactlyonce.state.errors import DamagedState, StateIncompatible
from exactlyonce.state.merging import Merging
from exactlyonce.state.state_type import StateType
from exactlyonce.state.table import Contents, KeyedTable

Fetch = Callable[[list[BlockRef]], Iterable[tuple[BlockRef, bytes]]]


class _Part(NamedTuple):
    """A section that belongs to the state."""

    group: int
    checkpoint: int
    section: Section
    number: int
    reader: BlockReader


def restore(
    operator: str,
    type_: Any,
    groups: range,
    max_parallelism: int,
    checkpoint: int,
    index_blocks: Sequence[bytes],
    fetch: Fetch,
) -> KeyedTable[Any]:
    """The table of *groups* at *checkpoint*, given all parts of the indexes of all old subtasks.

    *fetch* is given the references of the blocks that are needed and yields each with its body, in any order. Raises
    `StateIncompatible` or `DamagedState`.
    """
    state_type: StateType[Any] = StateType(operator, type_)
    indexes = [decode_index(body) for body in index_blocks]
    for index in indexes:
        _check(index, state_type, max_parallelism, checkpoint)
    wanted = _wanted(indexes, groups)
    readers = _read(operator, checkpoint, wanted, fetch)
    blocks = [
        ChainBlock(ref, reader.header.checkpoint, reader.header.groups & wanted[ref]) for ref, reader in readers.items()
    ]
    blocks.sort(key=lambda block: block.checkpoint)
    images = {
        group: block.checkpoint for block in blocks for group in readers[block.ref].header.images & block.groups
    }
    chain = Chain(blocks, images)
    parts = _parts(chain, readers)
    contents = Contents(checkpoint, _decode(parts, state_type, indexes), chain, _merging(parts))
    return KeyedTable(operator, type_, groups, max_parallelism, contents)


def _check(index: Index, state_type: StateType[Any], max_parallelism: int, checkpoint: int) -> None:
    if (index.operator, index.checkpoint) != (state_type.operator, checkpoint):
        raise DamagedState(
            f"The index of operator {state_type.operator!r} at checkpoint {checkpoint} turned out to be that of"
            f" operator {index.operator!r} at checkpoint {index.checkpoint}."
        )
    if index.max_parallelism != max_parallelism:
        raise StateIncompatible(
            f"The checkpoint's state of operator {index.operator!r} is laid out for max_parallelism"
            f" {index.max_parallelism}, the pipeline asks for {max_parallelism}. It is fixed for the life of a"
            f" pipeline: set it to {index.max_parallelism}."
        )
    state_type.require_readable(index.schema)


def _wanted(indexes: Iterable[Index], groups: range) -> dict[BlockRef, frozenset[int]]:
    """The blocks to read, and which groups to take from each: only those for which its index lists it."""
    wanted: dict[BlockRef, frozenset[int]] = {}
    for index in indexes:
        for entry in index.entries:
            if some := frozenset(groups) & frozenset(range(entry.first_group, entry.last_group + 1)):
                wanted[entry.ref] = wanted.get(entry.ref, frozenset()) | some
    return wanted


def _read(
    operator: str, checkpoint: int, wanted: dict[BlockRef, frozenset[int]], fetch: Fetch
) -> dict[BlockRef, BlockReader]:
    readers = {}
    for ref, body in fetch(list(wanted)):
        reader = readers[ref] = BlockReader(body)
        if reader.header.operator != operator or not 0 < reader.header.checkpoint <= checkpoint:
            raise DamagedState(f"Block {ref.key} does not hold state of operator {operator!r} up to {checkpoint}.")
    if missing := [ref.key for ref in wanted if ref not in readers]:
        raise DamagedState(f"{len(missing)} blocks of operator {operator!r} are missing, the first is {missing[0]}.")
    return readers


def _parts(chain: Chain, readers: dict[BlockRef, BlockReader]) -> list[_Part]:
    """The sections that make up the state, group by group and each oldest first, as the chain is."""
    parts = [
        _Part(section.group, block.checkpoint, section, number, readers[block.ref])
        for block in chain.blocks
        for number, section in enumerate(readers[block.ref].header.sections)
        if section.group in block.groups and block.checkpoint >= chain.images.get(section.group, 0)
    ]
    return sorted(parts, key=lambda part: part.group)


def _decode(
    parts: Sequence[_Part], state_type: StateType[Any], indexes: Sequence[Index]
) -> dict[int, dict[bytes, Any]]:
    tables: dict[int, dict[bytes, Any]] = {}
    remaining = Counter(part.reader for part in parts)
    for part in parts:
        keys, deleted, encoded = part.reader.section(part.number)
        states = state_type.decode(encoded, indexes[0].schema)
        if len(states) != len(keys):
            raise state_type.damaged(f"it holds {len(keys)} keys and {len(states)} states")
        table = tables.setdefault(part.group, {})
        table.update(zip(keys, states, strict=True))
        for key in deleted:
            table.pop(key, None)
        remaining[part.reader] -= 1
        if not remaining[part.reader]:
            part.reader.release()
    return tables


def _merging(parts: Iterable[_Part]) -> Merging:
    merging = Merging()
    for part in parts:
        if part.section.kind != IMAGE:
            merging.incremented(part.group, part.checkpoint, part.section.entries)
    return merging

"""State from the blocks of any number of old subtasks, for any parallelism, and for some key groups or all.

Only blocks that wanted key groups need are fetched, and only their wanted sections decoded; all others stay in the
chain, unread. A group is its newest image and the increments after it, in the order of their checkpoints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.pipeline.errors import require
from exactlyonce.state.blocks import IMAGE, BlockDecoder, Section
from exactlyonce.state.chain import Chain, ChainBlock
from exactlyonce.state.errors import DamagedState, StateIncompatible
from exactlyonce.state.index import IndexHead, decode_index
from exactlyonce.state.key_groups import mask_of
from exactlyonce.state.merging import Merging
from exactlyonce.state.state_type import StateType
from exactlyonce.state.table import Contents, KeyedTable

Fetch = Callable[[list[BlockRef]], Iterable[tuple[BlockRef, bytes]]]


class _Part(NamedTuple):
    """A section that belongs to the state."""

    section: Section
    number: int
    reader: BlockDecoder


def restore(
    operator: str,
    type_: Any,
    groups: range,
    max_parallelism: int,
    checkpoint: int,
    index_blocks: Sequence[bytes],
    fetch: Fetch,
    touched: Collection[int] | None = None,
) -> KeyedTable[Any]:
    """The table of *groups* at *checkpoint*, given all parts of the indexes of the old subtasks that had any of them.

    With *touched*, only these of *groups* are read. The table refuses records of the others, and its snapshots carry
    their blocks over. *fetch* is given the references of the blocks that are needed and yields each with its body, in
    any order. Raises `StateIncompatible` or `DamagedState`.
    """
    restored = groups if touched is None else sorted(touched)
    require(set(restored) <= set(groups), f"of the key groups {groups} only those are touched that are among them")
    state_type: StateType[Any] = StateType(operator, type_)
    indexes = [decode_index(body) for body in index_blocks]
    for index in indexes:
        _check(index.head, state_type, max_parallelism, checkpoint)
    chain = Chain.of((block for index in indexes for block in index.blocks), mask_of(groups))
    parts = _parts(_read(operator, list(chain.needed(mask_of(restored))), fetch))
    credit = max((index.head.credit for index in indexes), default=0.0)
    merging = Merging(credit, max(1, len(restored)) / max(1, len(groups)))
    for part in parts:
        if part.section.kind != IMAGE:
            merging.incremented(part.section.group, part.reader.header.checkpoint, part.section.entries)
    schema = indexes[0].head.schema if indexes else None
    contents = Contents(checkpoint, _decode(parts, state_type, schema), chain, merging)
    return KeyedTable(operator, type_, restored, max_parallelism, contents)


def _check(head: IndexHead, state_type: StateType[Any], max_parallelism: int, checkpoint: int) -> None:
    if (head.operator, head.checkpoint) != (state_type.operator, checkpoint):
        raise DamagedState(
            f"The index of operator {state_type.operator!r} at checkpoint {checkpoint} turned out to be that of"
            f" operator {head.operator!r} at checkpoint {head.checkpoint}."
        )
    if head.max_parallelism != max_parallelism:
        raise StateIncompatible(
            f"The checkpoint's state of operator {head.operator!r} is laid out for max_parallelism"
            f" {head.max_parallelism}, the pipeline asks for {max_parallelism}. It never changes for a"
            f" pipeline: set it to {head.max_parallelism}."
        )
    state_type.require_readable(head.schema)


def _read(operator: str, wanted: Sequence[tuple[ChainBlock, int]], fetch: Fetch) -> list[tuple[BlockDecoder, int]]:
    """Blocks with what to take from each, in the same order. What the index says of them must be true."""
    readers = {ref: BlockDecoder(body) for ref, body in fetch([block.ref for block, _ in wanted])}
    if missing := [block.ref.key for block, _ in wanted if block.ref not in readers]:
        raise DamagedState(f"{len(missing)} blocks of operator {operator!r} are missing, the first is {missing[0]}.")
    for block, groups in wanted:
        header = readers[block.ref].header
        said = (operator, block.checkpoint, groups, block.images & groups)
        if (header.operator, header.checkpoint, header.groups & groups, header.images & groups) != said:
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


def _decode(parts: Sequence[_Part], state_type: StateType[Any], schema: Any) -> dict[int, dict[bytes, Any]]:
    tables: dict[int, dict[bytes, Any]] = {}
    remaining = Counter(part.reader for part in parts)
    for part in parts:
        keys, deleted, encoded = part.reader.section(part.number)
        states = state_type.decode(encoded, schema)
        if len(states) != len(keys):
            raise state_type.damaged(f"it holds {len(keys)} keys and {len(states)} states")
        table = tables.setdefault(part.section.group, {})
        table.update(zip(keys, states, strict=True))
        for key in deleted:
            table.pop(key, None)
        remaining[part.reader] -= 1
        if not remaining[part.reader]:
            part.reader.release()
    return tables

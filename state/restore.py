"""State from the blocks of any number of old subtasks, for any parallelism, for some key groups or all, in any backend.

Only the indexes are read here; a backend reads the blocks that it wants (`stored`). All others stay in the chain.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from exactlyonce.pipeline.errors import require
from exactlyonce.state.backend import StateBackend, Table, TimedTable
from exactlyonce.state.chain import Chain
from exactlyonce.state.errors import DamagedState, StateIncompatible
from exactlyonce.state.index import IndexHead, decode_index, index_digest
from exactlyonce.state.key_groups import mask_of
from exactlyonce.state.slots import TableTimes
from exactlyonce.state.state_type import StateType
from exactlyonce.state.stored import Fetch, StoredState


def restore(
    operator: str,
    type_: Any,
    groups: range,
    max_parallelism: int,
    checkpoint: int,
    index_blocks: Sequence[bytes],
    fetch: Fetch,
    touched: Collection[int] | None = None,
    *,
    backend: StateBackend,
) -> Table[Any]:
    """The table of *groups* at *checkpoint*, given all parts of the indexes of the old subtasks that had any of them.

    With *touched*, only these of *groups* are read, unless all must be written anew. The table refuses records of the
    others, and its snapshots carry their blocks over. *fetch* is given the references of needed blocks and yields each
    with its body, in any order. Raises `StateIncompatible` or `DamagedState`.
    """
    known = touched is None or set(touched) <= set(groups)
    require(known, f"of the key groups {groups} only those are touched that are among them")
    state = _stored(operator, type_, groups, max_parallelism, checkpoint, index_blocks, fetch, touched)
    return backend.table(state)


def restore_timed(
    operator: str,
    type_: Any,
    groups: range,
    max_parallelism: int,
    checkpoint: int,
    index_blocks: Sequence[bytes],
    fetch: Fetch,
    *,
    meaning: str = "",
    by_key: bool = False,
    backend: StateBackend,
) -> TimedTable[Any]:
    """`restore` of a timed table. Slots end in every key group, whether records touch it or not, so all are read.

    *meaning* is that of its slots. Raises `StateIncompatible` if the slots that are there have another.
    """
    state = _stored(
        operator, type_, groups, max_parallelism, checkpoint, index_blocks, fetch, timed=True, meaning=meaning
    )
    return backend.timed_table(state, by_key=by_key)


def _stored(
    operator: str,
    type_: Any,
    groups: range,
    max_parallelism: int,
    checkpoint: int,
    index_blocks: Sequence[bytes],
    fetch: Fetch,
    touched: Collection[int] | None = None,
    *,
    timed: bool = False,
    meaning: str = "",
) -> StoredState[Any]:
    state_type: StateType[Any] = StateType(operator, type_)
    indexes = [decode_index(body) for body in index_blocks]
    for index in indexes:
        _check(index.head, state_type, max_parallelism, checkpoint, timed=timed)
    times = [index.head.times for index in indexes if index.head.times is not None]
    for was in times:
        if was.meaning != meaning:
            raise StateIncompatible(
                f"The checkpoint's state of operator {operator!r} is of {was.meaning}, and the pipeline now has"
                f" {meaning}: records of the one cannot be told apart for the other. Give the operator a new id, by"
                f" which it begins empty; or start over with `exactlyonce reset`."
            )
    anew = not all(state_type.may_share_chain(index.head.schema, index.head.version) for index in indexes)
    restored = groups if touched is None or anew else sorted(touched)
    return StoredState(
        operator=operator,
        type=type_,
        groups=restored,
        max_parallelism=max_parallelism,
        checkpoint=checkpoint,
        chain=Chain.of((block for index in indexes for block in index.blocks), mask_of(groups)),
        schema=indexes[0].head.schema if indexes else None,
        version=max((index.head.version for index in indexes), default=1),
        credit=max((index.head.credit for index in indexes), default=0.0),
        share=max(1, len(restored)) / max(1, len(groups)),
        digest=index_digest(index_blocks) if index_blocks else b"",
        anew=anew,
        times=TableTimes.of(times, groups, meaning) if timed else None,
        fetch=fetch,
    )


def _check(head: IndexHead, state_type: StateType[Any], max_parallelism: int, checkpoint: int, *, timed: bool) -> None:
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
    if (head.times is not None) != timed:
        was, now = ("by time" if by_time else "by key alone" for by_time in (not timed, timed))
        raise StateIncompatible(
            f"The checkpoint's state of operator {head.operator!r} is kept {was}, and the pipeline now keeps it {now}."
            f" Give the operator a new id, by which it begins empty; or start over with `exactlyonce reset`."
        )
    state_type.require_keys(head.keys)
    state_type.require_readable(head.schema, head.version)

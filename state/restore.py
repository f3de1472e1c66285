"""State from the blocks of any number of old subtasks, for any parallelism, for some key groups or all, in any backend.

Only the indexes are read here; a backend reads the blocks that it wants (`stored`). All others stay in the chain.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from exactlyonce.pipeline.errors import require
from exactlyonce.state.backend import StateBackend, Table, TimedTable
from exactlyonce.state.chain import Chain
from exactlyonce.state.errors import BEGIN_EMPTY, DamagedState, StateIncompatible
from exactlyonce.state.index import IndexHead, decode_index, index_digest
from exactlyonce.state.key_groups import mask_of
from exactlyonce.state.slots import TableTimes
from exactlyonce.state.state_type import StateType
from exactlyonce.state.stored import Fetch, StoredState


@dataclass(frozen=True, kw_only=True)
class CheckpointedState:
    """The state of *operator* for some key groups at a checkpoint; a table of it is made by any backend."""

    operator: str
    type: Any
    """The type of a state."""
    groups: range
    max_parallelism: int
    checkpoint: int = 0
    indexes: Sequence[bytes] = ()
    """All parts of the indexes of the old subtasks that had any of `groups`."""
    fetch: Fetch = lambda refs: ()
    """Given the references of needed blocks, yields each with its body, in any order."""

    def table(self, backend: StateBackend, touched: Collection[int] | None = None) -> Table[Any]:
        """The table of `groups`.

        With *touched*, only these of them are read, unless all must be written anew. The table refuses records of the
        others, and its snapshots carry their blocks over. Raises `StateIncompatible` or `DamagedState`.
        """
        known = touched is None or set(touched) <= set(self.groups)
        require(known, f"of the key groups {self.groups} only those are touched that are among them")
        return backend.table(self._stored(touched))

    def timed_table(self, backend: StateBackend, *, meaning: str = "", by_key: bool = False) -> TimedTable[Any]:
        """The timed table of `groups`. Slots end in every one, whether records touch it or not, so all are read.

        *meaning* is that of its slots. Raises `StateIncompatible`, also for slots of another one, or `DamagedState`.
        """
        return backend.timed_table(self._stored(meaning=meaning), by_key=by_key)

    def _stored(self, touched: Collection[int] | None = None, *, meaning: str | None = None) -> StoredState[Any]:
        """*meaning* None: it is not timed."""
        groups, state_type = self.groups, StateType[Any](self.operator, self.type)
        indexes = [decode_index(body) for body in self.indexes]
        for index in indexes:
            self._check(index.head, state_type, meaning)
        times = [index.head.times for index in indexes if index.head.times is not None]
        anew = not all(state_type.may_share_chain(index.head.schema, index.head.version) for index in indexes)
        restored = groups if touched is None or anew else sorted(touched)
        return StoredState(
            operator=self.operator,
            type=self.type,
            groups=restored,
            max_parallelism=self.max_parallelism,
            checkpoint=self.checkpoint,
            chain=Chain.of((block for index in indexes for block in index.blocks), mask_of(groups)),
            schema=indexes[0].head.schema if indexes else None,
            version=max((index.head.version for index in indexes), default=1),
            credit=max((index.head.credit for index in indexes), default=0.0),
            share=max(1, len(restored)) / max(1, len(groups)),
            digest=index_digest(self.indexes) if self.indexes else b"",
            anew=anew,
            times=None if meaning is None else TableTimes.of(times, groups, meaning),
            fetch=self.fetch,
        )

    def _check(self, head: IndexHead, state_type: StateType[Any], meaning: str | None) -> None:
        if (head.operator, head.checkpoint) != (self.operator, self.checkpoint):
            raise DamagedState(
                f"The index of operator {self.operator!r} at checkpoint {self.checkpoint} turned out to be that of"
                f" operator {head.operator!r} at checkpoint {head.checkpoint}."
            )
        if head.max_parallelism != self.max_parallelism:
            raise StateIncompatible(
                f"The checkpoint's state of operator {head.operator!r} is laid out for max_parallelism"
                f" {head.max_parallelism}, the pipeline asks for {self.max_parallelism}. It never changes for a"
                f" pipeline: set it to {head.max_parallelism}."
            )
        require_meaning(self.operator, None if head.times is None else head.times.meaning, meaning)
        state_type.require_keys(head.keys)
        state_type.require_readable(head.schema, head.version)


def require_meaning(operator: str, was: str | None, now: str | None) -> None:
    """Raise `StateIncompatible` unless slots of meaning *was* can be read as *now*; None: states by key alone."""
    if was == now or (was is not None and now is not None and now.startswith(f"{was} of=")):  # first without aggregates
        return
    before_ms, now_ms = map(_ttl_ms, (was, now))
    if before_ms is not None and now_ms is not None:
        if now_ms <= before_ms:
            return
        raise StateIncompatible(
            f"The checkpoint's state of operator {operator!r} is kept for ttl={before_ms} ms, and the pipeline now has "
            f"ttl={now_ms} ms: which of it is left for that long depends on the run. Keep ttl={before_ms}ms, or a "
            f"shorter one. {BEGIN_EMPTY}."
        )
    if was is None or now is None:
        kept, keeps = ("by key alone" if meaning is None else "by time" for meaning in (was, now))
        raise StateIncompatible(
            f"The checkpoint's state of operator {operator!r} is kept {kept}, and the pipeline now keeps it {keeps}. "
            f"{BEGIN_EMPTY}."
        )
    raise StateIncompatible(
        f"The checkpoint's state of operator {operator!r} is of {was}, and the pipeline now has {now}: records of the "
        f"one cannot be told apart for the other. {BEGIN_EMPTY}."
    )


def _ttl_ms(meaning: str | None) -> int | None:
    """The time to live in *meaning*; None: it is none of states that expire."""
    name, _, ttl = (meaning or "").partition("=")
    return int(ttl) if name == "ttl" else None

"""A batch of records on states in a dict: the loop of every table whose newest states are Python objects.

Invariant: before the loop, `_touch` has put the existing states of the batch's keys into `_states`; the loop leaves
each new state there and in the interval's changes; after it, `_touched` may take states out again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from exactlyonce.pipeline.errors import USERS_ERRORS
from exactlyonce.state.errors import ApplyFailed
from exactlyonce.state.state_type import StateType

S = TypeVar("S")
R = TypeVar("R")
O = TypeVar("O")  # noqa: E741 - the output


class StatesTable(Generic[S]):
    """The common part of tables, which differ in where states come from, and where changes go."""

    state_type: StateType[S]
    _states: dict[bytes, S | None]
    """None: there is no state."""

    @property
    def full(self) -> str:
        """See `Table.full`."""
        return ""

    def fetch(self) -> bool:
        """See `Table.fetch`."""
        return False

    def _touch(self, keys: Sequence[bytes]) -> dict[bytes, S | None]:
        """Load the states of *keys*; returns the dict for the changes of the current interval."""
        raise NotImplementedError

    def _touched(self, added: int) -> None:
        """After the batch, which has *added* keys at the end of `_states`."""
        raise NotImplementedError


class BatchTable(StatesTable[S]):
    """The loops of a `Table`."""

    def apply(
        self, fn: Callable[[S | None, R], tuple[S | None, O]], keys: Sequence[bytes], records: Sequence[R]
    ) -> list[O]:
        """The outputs of ``fn(state or None, record) -> (state, output)``; the state None deletes the key.

        Raises `ApplyFailed` if *fn* raises. Later records never change an output or a record: if one may hold a part of
        the state, or is the state, a clone is kept.
        """
        changes, states = self._touch(keys), self._states
        get, count = states.get, len(states)
        outputs: list[O] = []
        append = outputs.append
        try:
            if self.state_type.mutable:
                clone: Callable[[Any], Any] = self.state_type.clone
                shares, known = self.state_type.shares, self.state_type.sharing.get
                for key, record in zip(keys, records, strict=True):
                    state, output = fn(get(key), record)
                    shared = known(type(output))
                    if shared is None:
                        shared = shares(output)
                    kept = clone(state) if (shared or state is record) and state is not None else state
                    states[key] = changes[key] = kept
                    append(output)
            else:
                for key, record in zip(keys, records, strict=True):
                    state, output = fn(get(key), record)
                    states[key] = changes[key] = state
                    append(output)
        except USERS_ERRORS as error:
            raise ApplyFailed(len(outputs)) from error
        self._touched(len(states) - count)
        return outputs

    def reduce(self, fn: Callable[[S, S], S], keys: Sequence[bytes], records: Sequence[S]) -> list[S]:
        """The accumulators after each record: the first record of a key, then ``fn(accumulator, record)``.

        Raises `ApplyFailed` if *fn* raises. Mutable ones are clones: *fn* may change its accumulator in place, and may
        return the record.
        """
        changes, states = self._touch(keys), self._states
        get, count = states.get, len(states)
        outputs: list[S] = []
        append = outputs.append
        try:
            if self.state_type.mutable:
                clone = self.state_type.clone
                for key, record in zip(keys, records, strict=True):
                    before = get(key)
                    state = record if before is None else fn(before, record)
                    states[key] = changes[key] = clone(state)
                    append(state)
            else:
                for key, record in zip(keys, records, strict=True):
                    before = get(key)
                    states[key] = changes[key] = state = record if before is None else fn(before, record)
                    append(state)
        except USERS_ERRORS as error:
            raise ApplyFailed(len(outputs)) from error
        self._touched(len(states) - count)
        return outputs

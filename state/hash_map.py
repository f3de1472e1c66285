"""The backend that keeps all states in memory: a dict for each table."""

from __future__ import annotations

from typing import TypeVar

from exactlyonce.state.backend import Table
from exactlyonce.state.merging import Merging
from exactlyonce.state.stored import StoredState
from exactlyonce.state.table import Contents, KeyedTable

S = TypeVar("S")


class HashMapBackend:
    """A `StateBackend`: what is stored is read at once."""

    def table(self, stored: StoredState[S]) -> Table[S]:
        """The table, with the states of all its key groups."""
        merging = Merging(stored.credit, stored.share)
        tables: dict[int, dict[bytes, S]] = {}
        for group, read in stored.read(stored.groups).items():
            tables[group] = read.states
            for checkpoint, entries in read.increments:
                merging.incremented(group, checkpoint, entries)
        contents = Contents(stored.checkpoint, tables, stored.chain, merging, stored.anew)
        return KeyedTable(stored.operator, stored.type, stored.groups, stored.max_parallelism, contents)

    def close(self) -> None:
        """Memory goes with the process."""

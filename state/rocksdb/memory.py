"""The memory of a worker's tables: RocksDB's share of the budget, and how many entries a table may hold.

RocksDB gets one block cache for all tables, against which write buffers, indexes and filters are counted. The tables
share what RocksDB and the process leave. The size of an entry is the mean of samples, and of all large ones, since a
few of them are in no sample. If the process becomes larger than the budget all the same, the tables' share shrinks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from itertools import islice
from statistics import median
from typing import Any

import msgspec
from rocksdict import Cache, WriteBufferManager

from exactlyonce.pipeline.sizes import shown_bytes

MEMORY_MIN = 1 << 20
"""No budget is less."""
CACHE_SHARE = 0.2
BUFFERS_SHARE = 0.1
"""The share of the budget, within the cache's."""
TABLES_SHARE_MIN = 0.25
"""The share of the budget that tables get, however large the process is."""
OTHERS_BYTES = 48 << 20
"""Taken by clients and batches once records flow."""
SAMPLE = 32
SAMPLE_DEPTH = 6
LARGE_BYTES = 4 * 1024
"""A packed state that takes more is weighed by itself."""
CACHED_SHARE = 0.375
"""The share of a table's memory that the newer states in its cache may take, and the older ones."""
CHANGES_SHARE = 0.25
"""Likewise, layers that are not settled."""
TOGETHER_SHARE = 0.25
"""The share of a table's cached states that one batch may want at once; a larger batch is applied in parts."""
TOGETHER_MIN, TOGETHER_AT_FIRST = 16, 64
"""The second before the size of a state is known."""
FETCHED_SHARE = 1 / 32
"""The share of a table's memory for blocks that are read together."""
_SAMPLES_REMEMBERED = 8
_ENTRIES_REMEMBERED = 10_000
_ENTRY_BYTES_AT_FIRST = 250.0
_PAGE = os.sysconf("SC_PAGESIZE")


class Memory:
    """The budget of one worker, in bytes."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = max(MEMORY_MIN, budget_bytes)
        self.buffer_bytes = int(self.budget_bytes * BUFFERS_SHARE)
        self.cache = Cache(int(self.budget_bytes * CACHE_SHARE))
        self.buffers = WriteBufferManager.new_write_buffer_manager_with_cache(self.buffer_bytes, False, self.cache)
        left = self.budget_bytes * (1 - CACHE_SHARE) - resident_bytes() - OTHERS_BYTES
        self._for_tables = max(self.budget_bytes * TABLES_SHARE_MIN, left)
        self.tables = 0

    def __str__(self) -> str:
        return shown_bytes(self.budget_bytes)

    @property
    def table_bytes(self) -> int:
        """The share of one table."""
        return int(self._for_tables / max(1, self.tables))

    def look(self) -> None:
        """Give tables less if the process has become larger than the budget."""
        resident = resident_bytes()
        if resident > self.budget_bytes:
            least = self.budget_bytes * TABLES_SHARE_MIN
            self._for_tables = max(least, self._for_tables * self.budget_bytes / resident)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE


class TableMemory:
    """One table's share of the budget, in entries: by what one takes on average, with its share of the dict."""

    def __init__(self, worker: Memory) -> None:
        self._worker = worker
        worker.tables += 1
        self._sampled = _ENTRY_BYTES_AT_FIRST
        self._typical = 0.0
        self._samples = 0
        self._large = 0.0
        """Bytes in large states, for each recent entry that was packed or unpacked."""
        self._entries = 0
        self.limit()

    def limit(self) -> None:
        """Compute how many entries may be cached, and how many changes may be unsettled."""
        entries = self._worker.table_bytes / self.entry_bytes
        self.cached_max = max(1, int(entries * CACHED_SHARE))
        self.changes_max = max(1, int(entries * CHANGES_SHARE))

    @property
    def entry_bytes(self) -> float:
        """The mean size of an entry; one at least."""
        return max(1.0, self._sampled, self._typical + self._large)

    @property
    def together_max(self) -> int:
        """How many keys one call may look up."""
        return max(TOGETHER_MIN, int(self.cached_max * TOGETHER_SHARE)) if self._samples else TOGETHER_AT_FIRST

    @property
    def fetched_bytes(self) -> float:
        """How many bytes of blocks may be read together."""
        return self._worker.table_bytes * FETCHED_SHARE

    def weigh(self, states: dict[bytes, Any]) -> None:
        """Sample the newest of *states*, if there are any, and compute the limits anew."""
        some = list(islice(reversed(states.items()), SAMPLE))
        if not some:
            return
        share = sys.getsizeof(states) / len(states)
        sizes = [sys.getsizeof(key) + size_of(state) for key, state in some]
        self._samples = min(self._samples + 1, _SAMPLES_REMEMBERED)
        self._sampled += (share + sum(sizes) / len(sizes) - self._sampled) / self._samples
        self._typical = share + min(median(sizes), LARGE_BYTES)
        self._worker.look()
        self.limit()

    def note_large(self, states: Iterable[tuple[Any, bytes]], entries: int) -> None:
        """Count the large ones of *states*, each with its packed form, when *entries* were packed or unpacked."""
        large = sum(size_of(state) for state, packed in states if len(packed) > LARGE_BYTES)
        self._entries = min(self._entries + entries, max(entries, _ENTRIES_REMEMBERED))
        self._large += (large - self._large * entries) / max(1, self._entries)


def size_of(value: Any, depth: int = SAMPLE_DEPTH) -> int:
    """The approximate size of *value* with everything it holds; shared objects count each time."""
    size = sys.getsizeof(value)
    if depth == 0:
        return size
    held: Iterable[Any] = ()
    if isinstance(value, dict):
        held = [*value, *value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        held = value
    elif isinstance(value, msgspec.Struct):
        held = [getattr(value, name) for name in value.__struct_fields__]
    elif hasattr(value, "__dict__"):
        held = [value.__dict__]
    count = len(list(held)) if not isinstance(held, list | tuple) else len(held)
    if count > SAMPLE:  # of a large container, some stand for all
        return size + count * sum(size_of(inner, depth - 1) for inner in islice(held, SAMPLE)) // SAMPLE
    return size + sum(size_of(inner, depth - 1) for inner in held)

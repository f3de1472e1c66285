"""The memory of a worker's tables: what RocksDB may take of the budget, and how many entries a table may hold.

A share of the budget is RocksDB's: one block cache for all tables, against which write buffers, indexes and filters are
counted. Of the rest, the process itself takes some; what remains is shared by the tables. The size of an entry
is the mean of samples, and of all that are large, for few of them are in no sample. Where the process turns out larger
than the budget all the same, the tables' share shrinks.
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
"""Of the budget; within the cache's."""
TABLES_SHARE_MIN = 0.25
"""Of the budget; tables get so much, however large the process is."""
OTHERS_BYTES = 48 << 20
"""What clients and batches take once records flow."""
SAMPLE = 32
SAMPLE_DEPTH = 6
LARGE_BYTES = 4 * 1024
"""Of a packed state: each that takes more is weighed by itself."""
_SAMPLES_REMEMBERED = 8
_ENTRIES_REMEMBERED = 10_000
_ENTRY_BYTES_AT_FIRST = 250.0
_PAGE = os.sysconf("SC_PAGESIZE")


class Memory:
    """The budget of one worker, in bytes; `entries` asks what a table may hold of it."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = max(MEMORY_MIN, budget_bytes)
        self.buffer_bytes = int(self.budget_bytes * BUFFERS_SHARE)
        self.cache = Cache(int(self.budget_bytes * CACHE_SHARE))
        self.buffers = WriteBufferManager.new_write_buffer_manager_with_cache(self.buffer_bytes, False, self.cache)
        left = self.budget_bytes * (1 - CACHE_SHARE) - resident_bytes() - OTHERS_BYTES
        self._for_tables = max(self.budget_bytes * TABLES_SHARE_MIN, left)
        self._tables = 0

    def __str__(self) -> str:
        return shown_bytes(self.budget_bytes)

    def joined(self) -> None:
        """One table more shares it."""
        self._tables += 1

    @property
    def table_bytes(self) -> int:
        """What one table may take."""
        return int(self._for_tables / max(1, self._tables))

    def look(self) -> None:
        """Give tables less if the process has become larger than the budget."""
        resident = resident_bytes()
        if resident > self.budget_bytes:
            least = self.budget_bytes * TABLES_SHARE_MIN
            self._for_tables = max(least, self._for_tables * self.budget_bytes / resident)


def resident_bytes() -> int:
    """What this process takes of the machine's memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE


class EntryBytes:
    """What an entry of a table takes, on average, with its share of the dict."""

    def __init__(self) -> None:
        self._sampled = _ENTRY_BYTES_AT_FIRST
        self._typical = 0.0
        self._samples = 0
        self._large = 0.0
        """Bytes in large states, for each entry that was packed or unpacked of late."""
        self._entries = 0

    @property
    def mean(self) -> float:
        """In bytes; one at least."""
        return max(1.0, self._sampled, self._typical + self._large)

    def sample(self, states: dict[bytes, Any]) -> None:
        """Look at the newest of *states*."""
        some = list(islice(reversed(states.items()), SAMPLE))
        if not some:
            return
        share = sys.getsizeof(states) / len(states)
        sizes = [sys.getsizeof(key) + size_of(state) for key, state in some]
        self._samples = min(self._samples + 1, _SAMPLES_REMEMBERED)
        self._sampled += (share + sum(sizes) / len(sizes) - self._sampled) / self._samples
        self._typical = share + min(median(sizes), LARGE_BYTES)

    def passed(self, states: Iterable[tuple[Any, bytes]], entries: int) -> None:
        """*entries* were packed or unpacked; of *states*, each with how it is packed, those that are large count."""
        large = sum(size_of(state) for state, packed in states if len(packed) > LARGE_BYTES)
        self._entries = min(self._entries + entries, max(entries, _ENTRIES_REMEMBERED))
        self._large += (large - self._large * entries) / max(1, self._entries)


def size_of(value: Any, depth: int = SAMPLE_DEPTH) -> int:
    """About what *value* takes, with what it holds. What is shared counts each time."""
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
        return size + count * sum(size_of(each, depth - 1) for each in islice(held, SAMPLE)) // SAMPLE
    return size + sum(size_of(each, depth - 1) for each in held)

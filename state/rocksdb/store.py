"""RocksDB as the lower tier: packed states by key group and key, and the changes of intervals that outgrow memory.

Nothing is lost with it, so it has no write-ahead log. A state lies under its key group (2 bytes, big-endian) and key. A
change lies under `_CHANGES`, which is no key group, the number of its interval, key group and key. So the changes of
one interval come in the order of key groups, and a later change of a key replaces an earlier one. An empty value there
is a deletion: no packed state is empty.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, cast

from rocksdict import (
    BlockBasedIndexType,
    BlockBasedOptions,
    Checkpoint,
    DBCompressionType,
    IngestExternalFileOptions,
    Options,
    Rdict,
    RdictIter,
    SstFileWriter,
    WriteBatch,
    WriteOptions,
)

from exactlyonce.pipeline.errors import ExactlyOnceError
from exactlyonce.pipeline.sizes import shown_bytes
from exactlyonce.state.errors import SnapshotDeclined
from exactlyonce.state.rocksdb.memory import Memory
from exactlyonce.state.slots import SLOT_BYTES

_CHANGES = 0xFFFF
_BLOCK_BYTES = 4 * 1024
_BUFFER_BYTES_MIN, _BUFFER_BYTES_MAX = 64 * 1024, 64 << 20
_RESERVE_MIN = 8 << 20
LOOK_INTERVAL_S = 0.02
"""Between two looks at a disk that had room: a small part of the reserve is written meanwhile."""
_PREFIXES = [group.to_bytes(2, "big") for group in range(_CHANGES)]
"""By key group."""
_interval = struct.Struct(">HQ").pack
_group_of = struct.Struct(">H").unpack_from
_CHANGE_PREFIX = 10
_LEVEL_0_FILES = 8
"""So many are merged at once with all of level 1: twice as many halve the work."""
_LEVEL_1_BYTES, _FILE_BYTES = 64 << 20, 8 << 20
"""Lower levels are merged file by file. By RocksDB's default, 256 MB, most of a state of a gigabyte was level 1."""
LOADED_ENTRIES = 4096
"""Entries in a slice of `load`."""
SLICE_BYTES = 1 << 20
"""About the most that is read of a view at once."""
AGAIN_ENTRIES = 64
"""Entries read at once to encode a block again."""
Entry = tuple[bytes, bytes]
"""A key and its packed state; empty: deleted."""


class DiskFull(SnapshotDeclined):
    """There is no room for local files; the work that needs it waits."""


class LocalFilesFailed(ExactlyOnceError):
    """RocksDB could not read or write its files. The job restarts, and reads blocks instead of them."""


class LocalStore:
    """An open database in a folder of its own; only one process has it open."""

    def __init__(self, path: Path, memory: Memory) -> None:
        self.path = path
        self._buffer_bytes = max(_BUFFER_BYTES_MIN, min(_BUFFER_BYTES_MAX, memory.buffer_bytes // 2))
        self.reserve_bytes = max(_RESERVE_MIN, 4 * self._buffer_bytes)
        """The free space needed before more is written: RocksDB writes in the background."""
        self._options = _options(memory, self._buffer_bytes)
        self._look_at_s = 0.0
        self._ingested = 0
        self.failed: Callable[[], None] = _nothing
        """Called before `LocalFilesFailed` is raised."""
        with self._asked():
            self._db = Rdict(str(path), self._options)
            unlogged = WriteOptions()
            unlogged.disable_wal = True  # type: ignore[method-assign,assignment]  # its stub calls it a method
            self._db.set_write_options(unlogged)

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """Convert any error of RocksDB: rocksdict has no class for them."""
        try:
            yield
        except Exception as error:
            self.failed()
            raise LocalFilesFailed(
                f"RocksDB failed on its local files in {self.path.parent}: {error}. Nothing is lost: they are not used "
                f"again, and state is read from its checkpoint. If the disk is full, make room there, or choose "
                f"another folder with --state-folder."
            ) from error

    def no_room(self) -> str:
        """Why nothing should be written now; empty if there is room."""
        now_s = time.monotonic()
        if now_s < self._look_at_s:
            return ""
        with self._asked():
            stat = os.statvfs(self.path)
        free = stat.f_bavail * stat.f_frsize
        if free >= self.reserve_bytes:
            self._look_at_s = now_s + LOOK_INTERVAL_S
            return ""
        return (
            f"the disk of {self.path.parent} has {shown_bytes(free)} left, and local files of state take "
            f"{shown_bytes(self.reserve_bytes)} more: make room there, it goes on by itself then; or stop, and run "
            f"again with another --state-folder"
        )

    def require_room(self) -> None:
        """Raise `DiskFull` unless there is room."""
        if why := self.no_room():
            raise DiskFull(f"State is kept in local files, and {why}.")

    def get(self, keys: Sequence[bytes], groups: Sequence[int]) -> list[bytes | None]:
        """The packed state of each of *keys*, which are in *groups*."""
        with self._asked():
            wanted: list[Any] = [_PREFIXES[group] + key for group, key in zip(groups, keys, strict=True)]
            return cast("list[bytes | None]", self._db.get(wanted))

    def write(self, entries: Iterable[tuple[int, bytes, bytes]], interval: int | None) -> None:
        """Put (key group, key, packed state or empty); with *interval*, note them as its changes, too."""
        batch = WriteBatch(raw_mode=True)
        put, delete = batch.put, batch.delete
        noted = None if interval is None else _interval(_CHANGES, interval)
        for group, key, packed in entries:
            place = _PREFIXES[group] + key
            if packed:
                put(place, packed)
            else:
                delete(place)
            if noted is not None:
                put(noted + place, packed)
        with self._asked():
            self._db.write(batch)

    def load(self, group: int, states: Mapping[bytes, bytes]) -> Iterator[None]:
        """Put the packed states of a new key group, in slices; lookups find them all at one moment."""
        if not states:
            return
        prefix, path = _PREFIXES[group], self.path.parent / f"group-{self._ingested}.sst"
        self._ingested += 1
        moved = IngestExternalFileOptions()
        moved.set_move_files(True)
        with self._asked():
            writer = SstFileWriter(self._options)
            writer.open(str(path))
            for number, (key, packed) in enumerate(sorted(states.items())):
                writer[prefix + key] = packed
                if number % LOADED_ENTRIES == LOADED_ENTRIES - 1:
                    yield
            writer.finish()
            self._db.ingest_external_file([str(path)], moved)
        path.unlink(missing_ok=True)

    def view(self) -> RdictIter:
        """The present contents, for one reader at a time, in constant time. It holds memory and files while it lives.

        A snapshot of rocksdict's would not do: its iterators see the contents when they are made (0.3.29).
        """
        with self._asked():
            return self._db.iter()

    def group(self, view: RdictIter, group: int, slice_entries: int, first: bytes = b"") -> Iterator[list[Entry]]:
        """The entries of a key group from the key *first* on, in order, in slices."""
        for some in self._slices(view, _PREFIXES[group], slice_entries, first):
            yield [(place[2:], packed) for place, packed in some]

    def changes(self, view: RdictIter, interval: int, slice_entries: int) -> Iterator[tuple[int, list[Entry]]]:
        """The noted changes of *interval*, in the order of key groups, in slices of one key group."""
        for some in self._slices(view, _interval(_CHANGES, interval), slice_entries):
            for group, same in groupby(some, key=_group_of_change):
                yield group, [(place[_CHANGE_PREFIX + 2 :], packed) for place, packed in same]

    def entries(self, view: RdictIter, group: int, interval: int | None, first: bytes) -> Iterator[Entry]:
        """The entries of a key group from the key *first* on; with *interval*, its noted changes."""
        prefix = _PREFIXES[group] if interval is None else _interval(_CHANGES, interval) + _PREFIXES[group]
        for some in self._slices(view, prefix, AGAIN_ENTRIES, first):
            yield from ((place[len(prefix) :], packed) for place, packed in some)

    def _slices(self, view: RdictIter, prefix: bytes, count: int, first: bytes = b"") -> Iterator[list[Entry]]:
        """All entries with *prefix*, in slices of *count*, and about `SLICE_BYTES`, at most.

        Between two slices the view may be read elsewhere.
        """
        place = prefix + first
        while True:
            with self._asked():
                some = _from(view, prefix, place, count)
            if not some:
                return
            yield some
            place = some[-1][0] + b"\0"

    def slot(self, group: int, slot: bytes, slice_entries: int) -> Iterator[list[Entry]]:
        """The newest entries of a key group that begin with *slot*, in order, in slices."""
        for some in self._slices(self.view(), _PREFIXES[group] + slot, slice_entries):
            yield [(place[2:], packed) for place, packed in some]

    def slots(self, group: int) -> Iterator[bytes]:
        """The slots of the places in a key group, packed, in order: one look for each."""
        view, prefix, place = self.view(), _PREFIXES[group], _PREFIXES[group]
        while True:
            with self._asked():
                some = _from(view, prefix, place, 1)
            if not some:
                return
            place = some[0][0][: 2 + SLOT_BYTES]
            yield place[2:]
            if (beyond := int.from_bytes(place[2:]) + 1) >> 8 * SLOT_BYTES:
                return
            place = prefix + beyond.to_bytes(SLOT_BYTES)

    def drop(self, group: int, start: bytes, end: bytes) -> None:
        """Delete the entries of a key group from *start* up to *end*."""
        with self._asked():
            self._db.delete_range(_PREFIXES[group] + start, _PREFIXES[group] + end)

    def forget(self, interval: int) -> None:
        """Delete the noted changes of *interval*."""
        with self._asked():
            self._db.delete_range(_interval(_CHANGES, interval), _interval(_CHANGES, interval + 1))

    def save(self, path: Path) -> None:
        """Make *path* a folder with the present contents, by links to files that never change."""
        with self._asked():
            Checkpoint(self._db).create_checkpoint(str(path))

    def close(self) -> None:
        self._db.close()


def _from(view: RdictIter, prefix: bytes, place: bytes, count: int) -> list[Entry]:
    """The next entries with *prefix* from *place* on. At a damaged block a view just ends; its status tells."""
    cursor, some, size = cast("Any", view), list[Entry](), 0
    cursor.seek(place)
    while len(some) < count and size < SLICE_BYTES and cursor.valid() and (key := cursor.key()).startswith(prefix):
        value = cursor.value()
        some.append((key, value))
        size += len(value)
        cursor.next()
    cursor.status()
    return some


def _group_of_change(entry: Entry) -> int:
    return int(_group_of(entry[0], _CHANGE_PREFIX)[0])


def _options(memory: Memory, buffer_bytes: int) -> Options:
    """Options that count all memory of RocksDB against one cache."""
    tables = BlockBasedOptions()
    tables.set_block_cache(memory.cache)
    tables.set_block_size(_BLOCK_BYTES)
    tables.set_bloom_filter(10, False)
    tables.set_index_type(BlockBasedIndexType.two_level_index_search())  # those of a file are not read as one
    tables.set_partition_filters(True)
    tables.set_pin_top_level_index_and_filter(True)
    tables.set_cache_index_and_filter_blocks(True)
    tables.set_pin_l0_filter_and_index_blocks_in_cache(True)
    options = Options(raw_mode=True)  # else it pickles
    options.create_if_missing(True)
    options.set_block_based_table_factory(tables)
    options.set_write_buffer_manager(memory.buffers)
    options.set_write_buffer_size(buffer_bytes)
    options.set_max_write_buffer_number(3)
    options.set_level_zero_file_num_compaction_trigger(_LEVEL_0_FILES)
    options.set_max_bytes_for_level_base(_LEVEL_1_BYTES)
    options.set_target_file_size_base(_FILE_BYTES)
    options.set_max_background_jobs(2)
    options.set_compression_type(DBCompressionType.lz4())
    options.set_keep_log_file_num(1)
    options.set_max_log_file_size(1 << 20)
    options.set_stats_dump_period_sec(0)
    return options


def _nothing() -> None:
    """The default for `LocalStore.failed`."""

"""The state of an operator in the blocks of a checkpoint, read without the pipeline's code.

Invariant: nothing is changed. The index describes keys and states, so they are decoded without their types; missing
blocks of a checkpoint that has expired meanwhile are an error.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import reduce
from itertools import pairwise
from operator import attrgetter, or_
from typing import Any, NamedTuple

import msgspec

from exactlyonce.checkpoint.block_storage import Blocks
from exactlyonce.checkpoint.records.manifest import BlockRef, Manifest, OperatorSnapshot
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.key_types import described_forms
from exactlyonce.pipeline.keys import canonical_key, key_group
from exactlyonce.pipeline.versions import KEPT_BY_AVRO, is_by_avro
from exactlyonce.state.chain import Chain, Index, IndexHead, decode_index
from exactlyonce.state.key_groups import mask_of
from exactlyonce.state.slots import TableTimes, key_of, packed_slot, unpacked_slot
from exactlyonce.state.stored import StoredState

READ_BYTES = 32 << 20
"""The size of blocks read at once, because the state may be larger than memory."""
SHARES = 16
"""The shares of the key groups, sorted one after the other where several subtasks have state of one group."""


class KeptEntry(NamedTuple):
    group: int
    key: bytes
    """Canonical (`pipeline.keys`)."""
    state: bytes
    """In msgpack."""
    version: int
    slot: int | None = None
    """In a timed table, that of the state (`state.slots`)."""

    @property
    def place(self) -> bytes:
        """The key in the blocks."""
        return self.key if self.slot is None else packed_slot(self.slot) + self.key


def portions(
    entries: Iterable[KeptEntry], bytes_max: int, count_max: int | None = None, *, by_version: bool = False
) -> Iterator[list[KeptEntry]]:
    """*entries* in lists of about *bytes_max* bytes, or of *count_max*; *by_version*: in lists of one version each.

    In a checkpoint that is no savepoint, each state may have another version than the next.
    """
    open_lists: defaultdict[int, list[KeptEntry]] = defaultdict(list)
    sizes = Counter[int]()
    for entry in entries:
        version = entry.version if by_version else 0
        portion = open_lists[version]
        portion.append(entry)
        sizes[version] += len(entry.key) + len(entry.state)
        if sizes[version] >= bytes_max or len(portion) == count_max:
            yield portion
            del open_lists[version], sizes[version]
    yield from open_lists.values()


class SavedTimes(msgspec.Struct, frozen=True):
    """The times of a timed table."""

    meaning: str
    """See `GroupTimes.meaning`."""
    watermarks: dict[int, int]
    """The last one by key group; other groups had none."""
    begun: dict[int, tuple[int, bytes]] = {}
    """See `GroupTimes.begun`; by key group."""


class KeptState:
    """The state of one operator at the checkpoint of *manifest*."""

    def __init__(self, manifest: Manifest, snapshot: OperatorSnapshot, blocks: Blocks) -> None:
        self.operator = snapshot.operator
        self._manifest, self._snapshot, self._blocks = manifest, snapshot, blocks

    def head(self) -> IndexHead | None:
        """The description of all states in the index; None where there is no state."""
        return next((decode_index(body).head for parts in self._snapshot.index for body in self._bodies(parts)), None)

    def times(self) -> SavedTimes | None:
        """Those of a timed table. ConfigError where subtasks, which share key groups, had other ones."""
        watermarks: dict[int, int] = {}
        begun: dict[int, tuple[int, bytes]] = {}
        meaning: str | None = None
        for indexes in self._indexes().values():
            if (times := indexes[0].head.times) is None:
                continue
            meaning = times.meaning
            begun |= {group: (slot, key) for group, slot, key in times.begun}
            for group, watermark in zip(times.groups, times.watermarks, strict=True):
                if watermarks.setdefault(group, watermark) != watermark:
                    raise ConfigError(
                        f"Operator {self.operator!r} is keyed by the source's partitions, and its subtasks were at "
                        f"different times: in one table, some of its windows would be lost or come again. Only a run "
                        f"with parallelism {self._snapshot.parallelism}, as before, goes on with them."
                    )
        return None if meaning is None else SavedTimes(meaning, watermarks, begun)

    def keys(self) -> Any:
        """The schema of the keys, noted or derived from the forms of all keys; None: unknown."""
        indexes = [index for own in self._indexes().values() for index in own]
        if noted := next((index.head.keys for index in indexes if index.head.keys is not None), None):
            return noted
        forms = [block.key_forms for index in indexes for block in index.blocks]
        return described_forms(reduce(or_, forms)) if forms and all(forms) else None

    def parts(self) -> dict[int, list[int]]:
        """The key groups with state of each old subtask. State placed by a source's partitions overlaps in groups."""
        return {subtask: self._present(indexes) for subtask, indexes in self._indexes().items()}

    def entries(self, groups: Iterable[int] | None = None, *, subtask: int | None = None) -> Iterator[KeptEntry]:
        """The states, by key group: all, or those of the key *groups* or of an old *subtask* alone."""
        key_groups = range(self._manifest.max_parallelism)
        wanted = set(key_groups if groups is None else groups)
        by_subtask = self._indexes(subtask)
        chosen = {number: sorted(wanted & {*self._present(indexes)}) for number, indexes in by_subtask.items()}
        if all(before[-1] < after[0] for before, after in pairwise(filter(None, chosen.values()))):
            for number, own in chosen.items():
                yield from self._of(by_subtask[number], own)
            return
        size = -(-len(key_groups) // SHARES)
        for start in range(0, len(key_groups), size):
            share = [
                entry
                for number, own in chosen.items()
                for entry in self._of(by_subtask[number], [group for group in own if start <= group < start + size])
            ]
            yield from sorted(share, key=attrgetter("group"))

    def _indexes(self, only: int | None = None) -> dict[int, list[Index]]:
        """The parts of each old subtask's index."""
        return {
            subtask: [decode_index(body) for body in self._bodies(parts)]
            for subtask, parts in enumerate(self._snapshot.index)
            if parts and only in (None, subtask)
        }

    def _present(self, indexes: Iterable[Index]) -> list[int]:
        """The key groups with state in the chain of a subtask."""
        mask = 0
        for index in indexes:
            for block in index.blocks:
                mask |= block.groups
        return [group for group in range(self._manifest.max_parallelism) if mask >> group & 1]

    def _of(self, indexes: Sequence[Index], groups: list[int]) -> Iterator[KeptEntry]:
        if not groups:
            return
        times = indexes[0].head.times
        stored: StoredState[Any] = StoredState(
            operator=self.operator,
            type=Any,
            groups=groups,
            max_parallelism=self._manifest.max_parallelism,
            checkpoint=self._manifest.checkpoint,
            chain=Chain.of((block for index in indexes for block in index.blocks), mask_of(groups)),
            schema=indexes[0].head.schema,
            times=None if times is None else TableTimes.of([times], groups),
            fetch=lambda refs: ((ref, block.body) for ref, block in self._blocks.fetch(refs)),
        )
        while groups:
            portion = stored.together(groups, READ_BYTES)
            for group, raw_states in stored.reading_raw(portion):
                for key, raw in raw_states.states.items():
                    own, slot = (key, None) if times is None else (key_of(key), unpacked_slot(key))
                    yield KeptEntry(group, own, raw.msgpack, raw.version, slot)
            groups = groups[len(portion) :]

    def _bodies(self, parts: tuple[BlockRef, ...]) -> Iterator[bytes]:
        return (block.body for _, block in self._blocks.fetch(parts))

    def of_key(self, text: str) -> Iterator[KeptEntry]:
        """The states of `possible_keys` by *text*."""
        keys = possible_keys(text)
        groups = {key_group(key, self._manifest.max_parallelism) for key in keys}
        return (entry for entry in self.entries(groups) if entry.key in keys)


def possible_keys(text: str) -> set[bytes]:
    """The canonical keys that *text* may mean: the word itself, and the JSON value that it spells.

    >>> sorted(possible_keys("7"))
    [b'\\x07', b'\\xa17']
    """
    try:
        keys = {canonical_key(text)}
    except UnicodeEncodeError:
        raise ConfigError("The key is no UTF-8, and no state has such a key. Write it as UTF-8.") from None
    # it is a word, or a value that is nobody's key
    with suppress(msgspec.DecodeError, TypeError, OverflowError, RecursionError):
        keys.add(canonical_key(msgspec.json.decode(text)))
    return keys


def kept_state(manifest: Manifest, operator: str, blocks: Blocks) -> KeptState:
    """The state of *operator*; ConfigError, with the existing ones, if the checkpoint has no such operator."""
    for snapshot in manifest.operators:
        if snapshot.operator == operator:
            return KeptState(manifest, snapshot, blocks)
    known = ", ".join(snapshot.operator for snapshot in manifest.operators) or "none: the pipeline keeps no state"
    raise ConfigError(
        f"Checkpoint {manifest.checkpoint} has no state of an operator {operator!r}. Its operators with state are: "
        f"{known}."
    )


def decoded(encoded: bytes, schema: Any = None) -> Any:
    """The value of msgpack *encoded*; with its *schema*, fields written by position get names.

    ConfigError for a dict whose keys are records.

    >>> decoded(b"\\x92\\x01\\x02", {"record": "Pair", "fields": [["a", "int"], ["b", "int"]], "array": True})
    {'a': 1, 'b': 2}
    """
    try:
        return named(msgspec.msgpack.decode(encoded), schema)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"A state has a dict whose keys are records, which the types of the pipeline alone can read ({error}). "
            f"Keys that are written by position (array_like=True), texts and tuples can be shown."
        ) from None


def named(value: Any, schema: Any) -> Any:
    """*value*, with the names of fields that were written by position."""
    if not isinstance(schema, dict):
        return value
    if is_by_avro(schema):
        raise ConfigError(f"The state {KEPT_BY_AVRO}")
    if "optional" in schema:
        return named(value, schema["optional"])
    if "union" in schema:
        members = [member for member in schema["union"] if member != "null"]
        return named(value, members[0]) if len(members) == 1 and value is not None else value
    if "fields" in schema and isinstance(value, list):
        fields = by_position(value, schema)
        return {name: named(field, type_) for field, (name, type_) in zip(fields, schema["fields"], strict=False)}
    if "fields" in schema and isinstance(value, dict):
        types = dict(schema["fields"])
        return {name: named(field, types.get(name)) for name, field in value.items()}
    if "dict" in schema and isinstance(value, dict):
        return {key: named(item, schema["dict"][1]) for key, item in value.items()}
    for sequence in ("list", "set"):
        if sequence in schema and isinstance(value, list):
            return [named(item, schema[sequence]) for item in value]
    if "tuple" in schema and isinstance(value, list):
        return [named(item, type_) for item, type_ in zip(value, schema["tuple"], strict=True)]
    return value


def by_position(value: Sequence[Any], schema: Any) -> Sequence[Any]:
    """The fields of a record that was written as a list, without its tag."""
    return value[1:] if "tag" in schema else value

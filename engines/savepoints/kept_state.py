"""The state of an operator at a checkpoint, as it lies in blocks: read without the pipeline's code.

Invariant: nothing is changed and nobody disturbed. An index says how the states were written, so that keys and states
are decoded without their types; blocks of a checkpoint that has expired meanwhile are missing, which is an error.
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
from exactlyonce.pipeline.avro import avro_of, plain_values
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.key_types import described_forms
from exactlyonce.pipeline.keys import canonical_key, key_group
from exactlyonce.state.chain import Chain
from exactlyonce.state.index import Index, IndexHead, decode_index
from exactlyonce.state.key_groups import mask_of
from exactlyonce.state.stored import StoredState

READ_BYTES = 32 << 20
"""Of blocks that are read together with those of one key group: the state may be larger than memory."""
SHARES = 16
"""Of the key groups, which are put in order one after the other where several subtasks have some of one."""


class KeptEntry(NamedTuple):
    """The state of one key."""

    group: int
    key: bytes
    """Canonical (`pipeline.keys`)."""
    state: bytes
    """As msgpack; of a state by an Avro schema, the byte string that has it."""
    version: int
    """Of the state: `pipeline.versions`."""


def portions(
    entries: Iterable[KeptEntry], bytes_max: int, count_max: int | None = None, *, by_version: bool = False
) -> Iterator[list[KeptEntry]]:
    """*entries*, in lists that end once they have so many bytes, or are so many; *by_version*: each of one version, in
    their order, for of a checkpoint that is no savepoint any state may be of another than the next."""
    begun: defaultdict[int, list[KeptEntry]] = defaultdict(list)
    sizes = Counter[int]()
    for entry in entries:
        kind = entry.version if by_version else 0
        some = begun[kind]
        some.append(entry)
        sizes[kind] += len(entry.key) + len(entry.state)
        if sizes[kind] >= bytes_max or len(some) == count_max:
            yield some
            del begun[kind], sizes[kind]
    yield from begun.values()


class KeptState:
    """The state of one operator at the checkpoint of *manifest*."""

    def __init__(self, manifest: Manifest, snapshot: OperatorSnapshot, blocks: Blocks) -> None:
        self.operator = snapshot.operator
        self._manifest, self._snapshot, self._blocks = manifest, snapshot, blocks

    def head(self) -> IndexHead | None:
        """What the index says of all states; None where there is no state."""
        return next((decode_index(body).head for parts in self._snapshot.index for body in self._bodies(parts)), None)

    def keys(self) -> Any:
        """The schema of the keys: that of their type where it is noted, or of what all of them are; None: unknown."""
        indexes = [each for own in self._indexes().values() for each in own]
        if noted := next((each.head.keys for each in indexes if each.head.keys is not None), None):
            return noted
        forms = [block.key_forms for each in indexes for block in each.blocks]
        return described_forms(reduce(or_, forms)) if forms and all(forms) else None

    def parts(self) -> dict[int, list[int]]:
        """By old subtask, the key groups of which it has any state. Where the source's partitions say which subtask has
        the state of a key, several have some of one group."""
        return {subtask: self._present(indexes) for subtask, indexes in self._indexes().items()}

    def entries(self, groups: Iterable[int] | None = None, *, subtask: int | None = None) -> Iterator[KeptEntry]:
        """All states, or those of the key *groups* or of an old *subtask* alone, by key group."""
        wanted = range(self._manifest.max_parallelism) if groups is None else groups
        found = self._indexes(subtask)
        chosen = {each: sorted(set(wanted) & {*self._present(indexes)}) for each, indexes in found.items()}
        if all(before[-1] < after[0] for before, after in pairwise(filter(None, chosen.values()))):
            for each, own in chosen.items():
                yield from self._of(found[each], own)
            return
        for share in self._shares():
            some = [
                entry
                for each, own in chosen.items()
                for entry in self._of(found[each], [group for group in own if group in share])
            ]
            yield from sorted(some, key=attrgetter("group"))

    def _shares(self) -> Iterator[range]:
        """All key groups, some at a time."""
        size = -(-self._manifest.max_parallelism // SHARES)
        return (range(start, start + size) for start in range(0, self._manifest.max_parallelism, size))

    def _indexes(self, only: int | None = None) -> dict[int, list[Index]]:
        """By old subtask, the parts of its index, of those that have one."""
        return {
            subtask: [decode_index(body) for body in self._bodies(parts)]
            for subtask, parts in enumerate(self._snapshot.index)
            if parts and only in (None, subtask)
        }

    def _present(self, indexes: Iterable[Index]) -> list[int]:
        """The key groups that the chain of a subtask is for, as far as they have state."""
        mask = 0
        for index in indexes:
            for block in index.blocks:
                mask |= block.groups
        return [group for group in range(self._manifest.max_parallelism) if mask >> group & 1]

    def _of(self, indexes: Sequence[Index], groups: list[int]) -> Iterator[KeptEntry]:
        if not groups:
            return
        stored: StoredState[Any] = StoredState(
            operator=self.operator,
            type=Any,
            groups=groups,
            max_parallelism=self._manifest.max_parallelism,
            checkpoint=self._manifest.checkpoint,
            chain=Chain.of((block for index in indexes for block in index.blocks), mask_of(groups)),
            schema=indexes[0].head.schema,
            fetch=lambda refs: ((ref, block.body) for ref, block in self._blocks.fetch(refs)),
        )
        while groups:
            some = stored.together(groups, READ_BYTES)
            for group, found in stored.reading_raw(some):
                yield from (KeptEntry(group, key, raw.msgpack, raw.version) for key, raw in found.states.items())
            groups = groups[len(some) :]

    def _bodies(self, parts: tuple[BlockRef, ...]) -> Iterator[bytes]:
        return (block.body for _, block in self._blocks.fetch(parts))

    def of_key(self, text: str) -> Iterator[KeptEntry]:
        """The states of `keys_meant` by *text*."""
        keys = keys_meant(text)
        groups = {key_group(key, self._manifest.max_parallelism) for key in keys}
        return (entry for entry in self.entries(groups) if entry.key in keys)


def keys_meant(text: str) -> set[bytes]:
    """The canonical keys that a person may mean by *text*: the word itself, and the JSON value that it spells.

    >>> sorted(keys_meant("7"))
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
    """The state of *operator*; ConfigError, with those that there are, if the checkpoint has none of it."""
    for snapshot in manifest.operators:
        if snapshot.operator == operator:
            return KeptState(manifest, snapshot, blocks)
    known = ", ".join(each.operator for each in manifest.operators) or "none: the pipeline keeps no state"
    raise ConfigError(
        f"Checkpoint {manifest.checkpoint} has no state of an operator {operator!r}. Its operators with state are: "
        f"{known}."
    )


def decoded(encoded: bytes, schema: Any = None) -> Any:
    """The value that msgpack *encoded* stands for; with its *schema*, records whose fields were written by position
    have their names, and Avro is read. ConfigError where it has a dict whose keys are records.

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
    """What msgpack holds, with the names of fields that were written by position, or by an Avro schema."""
    if not isinstance(schema, dict):
        return value
    if (avro := avro_of(schema)) is not None:
        return plain_values(avro)(value)
    if "optional" in schema:
        return named(value, schema["optional"])
    if "union" in schema:
        others = [each for each in schema["union"] if each != "null"]
        return named(value, others[0]) if len(others) == 1 and value is not None else value
    if "fields" in schema and isinstance(value, list):
        fields = by_position(value, schema)
        return {name: named(each, of) for each, (name, of) in zip(fields, schema["fields"], strict=False)}
    if "fields" in schema and isinstance(value, dict):
        types = dict(schema["fields"])
        return {name: named(each, types.get(name)) for name, each in value.items()}
    if "dict" in schema and isinstance(value, dict):
        return {key: named(each, schema["dict"][1]) for key, each in value.items()}
    for sequence in ("list", "set"):
        if sequence in schema and isinstance(value, list):
            return [named(each, schema[sequence]) for each in value]
    if "tuple" in schema and isinstance(value, list):
        return [named(each, of) for each, of in zip(value, schema["tuple"], strict=True)]
    return value


def by_position(value: Sequence[Any], schema: Any) -> Sequence[Any]:
    """The fields of a record that was written as a list: a tag stands in front of them."""
    return value[1:] if "tag" in schema else value

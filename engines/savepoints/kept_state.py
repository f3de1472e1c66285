"""The state of an operator at a checkpoint, as it lies in blocks: read without the pipeline's code.

Invariant: nothing is changed and nobody disturbed. An index says how the states were written, so that keys and states
are decoded without their types; blocks of a checkpoint that has expired meanwhile are missing, which is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from exactlyonce.checkpoint.records.manifest import BlockRef, Manifest, OperatorSnapshot
from exactlyonce.checkpoint.store.storage import Blocks
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.keys import canonical_key, key_group
from exactlyonce.state.chain import Chain
from exactlyonce.state.index import IndexHead, decode_index
from exactlyonce.state.key_groups import group_range, mask_of
from exactlyonce.state.stored import StoredState


class KeptEntry(NamedTuple):
    """The state of one key."""

    group: int
    key: bytes
    """Canonical (`pipeline.keys`)."""
    state: bytes
    """As msgpack."""
    version: int
    """Of the state: `pipeline.versions`."""


class KeptState:
    """The state of one operator at the checkpoint of *manifest*."""

    def __init__(self, manifest: Manifest, snapshot: OperatorSnapshot, blocks: Blocks) -> None:
        self.operator = snapshot.operator
        self._manifest, self._snapshot, self._blocks = manifest, snapshot, blocks

    def head(self) -> IndexHead | None:
        """What the index says of all states; None where there is no state."""
        return next((decode_index(body).head for parts in self._snapshot.index for body in self._bodies(parts)), None)

    def entries(self, groups: Iterable[int] | None = None) -> Iterator[KeptEntry]:
        """All states, or those of the key *groups*, by old subtask and key group."""
        wanted = None if groups is None else set(groups)
        for subtask, parts in enumerate(self._snapshot.index):
            own = group_range(subtask, self._snapshot.parallelism, self._manifest.max_parallelism)
            chosen = [group for group in own if wanted is None or group in wanted]
            if parts and chosen:
                yield from self._of(parts, chosen)

    def _of(self, parts: tuple[BlockRef, ...], groups: list[int]) -> Iterator[KeptEntry]:
        indexes = [decode_index(body) for body in self._bodies(parts)]
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
        for group, found in sorted(stored.read_raw(groups).items()):
            yield from (KeptEntry(group, key, raw.msgpack, raw.version) for key, raw in found.states.items())

    def _bodies(self, parts: tuple[BlockRef, ...]) -> Iterator[bytes]:
        return (block.body for _, block in self._blocks.fetch(parts))

    def of_key(self, text: str) -> Iterator[KeptEntry]:
        """The states of the keys that a person may mean by *text*: the word itself, and the JSON value it spells."""
        keys = {canonical_key(text)}
        with suppress(msgspec.DecodeError, TypeError, OverflowError):  # it is a word, or a value that is nobody's key
            keys.add(canonical_key(msgspec.json.decode(text)))
        groups = {key_group(key, self._manifest.max_parallelism) for key in keys}
        return (entry for entry in self.entries(groups) if entry.key in keys)


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
    have their names.

    >>> decoded(b"\\x92\\x01\\x02", {"record": "Pair", "fields": [["a", "int"], ["b", "int"]], "array": True})
    {'a': 1, 'b': 2}
    """
    return _named(msgspec.msgpack.decode(encoded), schema)


def _named(value: Any, schema: Any) -> Any:
    if not isinstance(schema, dict):
        return value
    if "optional" in schema:
        return _named(value, schema["optional"])
    if "union" in schema:
        others = [each for each in schema["union"] if each != "null"]
        return _named(value, others[0]) if len(others) == 1 and value is not None else value
    if "fields" in schema and isinstance(value, list) and schema.get("array"):
        return {name: _named(each, of) for each, (name, of) in zip(value, schema["fields"], strict=False)}
    if "fields" in schema and isinstance(value, dict):
        types = dict(schema["fields"])
        return {name: _named(each, types.get(name)) for name, each in value.items()}
    if "dict" in schema and isinstance(value, dict):
        return {key: _named(each, schema["dict"][1]) for key, each in value.items()}
    for sequence in ("list", "set"):
        if sequence in schema and isinstance(value, list):
            return [_named(each, schema[sequence]) for each in value]
    if "tuple" in schema and isinstance(value, list):
        return [_named(each, of) for each, of in zip(value, schema["tuple"], strict=True)]
    return value

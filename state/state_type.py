"""The type of an operator's state: its encoding, its clones, and the older states that it can be restored from.

States are msgpack arrays by their type, fields by their names. Everything that a checked `encode` returns, `decode`
accepts: a snapshot that cannot be restored would only be noticed when it is needed. If the version changes, a table's
first snapshot writes the state whole. So all states of a checkpoint are of one version, and once it is taken no older
one is read any more. The same holds if fields are dropped, so that they do not come back with newer code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from operator import methodcaller
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from exactlyonce.pipeline.errors import users_errors
from exactlyonce.pipeline.keys import holds_keys
from exactlyonce.pipeline.lossy import lossy
from exactlyonce.pipeline.schema_evolution import changed, has_default, lost, unfit
from exactlyonce.pipeline.shape import Form, Shape, UnsupportedType, described_shape, shape_of
from exactlyonce.pipeline.versions import KEPT_BY_AVRO, MigrationStep, VersionedState, is_by_avro
from exactlyonce.state.errors import BEGIN_EMPTY, UNDECODABLE, DamagedState, StateIncompatible, StateUnstorable

S = TypeVar("S")

_encode = msgspec.msgpack.Encoder().encode
_raw = msgspec.msgpack.Decoder(list[msgspec.Raw])
_NOT_OF_TYPE = (TypeError, ValueError, OverflowError, RecursionError)
"""Errors of encoding and decoding values of another type."""
_FIT = "Keep every old field under its name and give new ones a default"


class RawState(NamedTuple):
    version: int
    msgpack: bytes


class StateType(Generic[S]):
    """Encodes, decodes and clones the states of one operator; *type_* is their type, or a `VersionedState`."""

    def __init__(self, operator: str, type_: Any) -> None:
        self._versioned = type_ if isinstance(type_, VersionedState) else VersionedState(type_)
        type_ = self._versioned.type
        self.operator = operator
        self.version = self._versioned.version
        self.name, self.drops_fields = self._versioned.name, self._versioned.drops_fields
        self.schema, self.keys = self._versioned.schema, self._versioned.keys
        self._decode: Callable[[bytes | memoryview], list[S]] = msgspec.msgpack.Decoder(list[type_]).decode
        self._decode_one: Callable[[bytes], S] = msgspec.msgpack.Decoder(type_).decode
        shape = shape_of(type_)
        self._changes = lossy(type_)
        self._parts = _mutable_parts(shape)
        self.mutable = self._parts != frozenset()
        self._dropped: tuple[Any, list[str]] | None = None
        """A schema, and its `dropped`."""
        self._described = described_shape(self.schema)
        self._old: tuple[Any, Shape] | None = None
        """Likewise, and its shape."""
        self.sharing: dict[type, bool] = {}
        """Results of `shares` by class."""
        self._decoded_classes: set[type] = set()
        """The classes of states that were checked, as they were decoded."""
        self.clone: Callable[[S], S] = _flat_clone(shape) or self._clone_by_codec

    @property
    def form(self) -> Any:
        """Version and schema: packed states of equal forms are read the same way."""
        return [self.version, self.schema]

    def may_share_chain(self, written: Any, version: int) -> bool:
        """Whether blocks with states of schema *written* and of *version* may be in a chain with today's.

        States of an older version would be misread by code without its migrations, and dropped fields would not be
        gone.
        """
        return [version, written] == self.form or (version == self.version and not self.dropped(written, version))

    def dropped(self, written: Any, version: int) -> list[str]:
        """Paths of the fields in states of schema *written* and of *version* that today's states lack.

        They may be dropped if they have their defaults, or by `VersionedState.drops_fields`.
        """
        if version != self.version or written == self.schema:
            return []
        if self._dropped is None or self._dropped[0] is not written:
            self._dropped = written, lost(written, self.schema, self.name)
        return self._dropped[1]

    def changed(self, packed: bytes | memoryview, written: Any) -> list[str]:
        """The `dropped` fields without their defaults in a state of schema *written*, *packed* in msgpack.

        All of them, if only the state's type could read it.
        """
        try:
            if self._old is None or self._old[0] is not written:
                self._old = written, described_shape(written)
            return changed(msgspec.msgpack.decode(packed), self._old[1], self._described, self.name)
        except (msgspec.DecodeError, TypeError):
            return self.dropped(written, self.version)

    def shares(self, output: Any) -> bool:
        """Whether *output* may be, or hold, a mutable part of a state, judging by the classes of both."""
        kind = type(output)
        if kind is tuple:
            return any(map(self.shares, output))
        if kind not in self.sharing:
            own, parts = self._parts, _parts_of(kind)
            self.sharing[kind] = own is None or parts is None or not own.isdisjoint(parts)
        return self.sharing[kind]

    def encode(self, states: Sequence[S], *, checked: bool = True) -> bytes:
        """*states* as msgpack. Raises `StateUnstorable` for a value that cannot be encoded; if *checked*, also for one
        that cannot be decoded again unchanged. States are always checked if the class of one is none that such states
        were decoded as: a derived class would lose its own fields every time."""
        if checked or not self._decoded_classes.issuperset(map(type, states)):
            encoded, decoded = self._encoded(states)
            self._decoded_classes.update(map(type, decoded))
            return encoded
        try:
            return _encode(states)
        except _NOT_OF_TYPE as error:
            raise self._unstorable(error) from error

    def _encoded(self, states: Sequence[S]) -> tuple[bytes, list[S]]:
        """*states* as msgpack, and decoded again."""
        try:
            encoded = _encode(states)
            decoded = self._decode(encoded)
        except _NOT_OF_TYPE as error:
            raise self._unstorable(error) from error
        changed = next(filter(None, map(self._changes, states)), "")
        if changed := changed or _changed(states, encoded, decoded):
            raise StateUnstorable(
                f"A state of operator {self.operator!r} would not come back from a checkpoint as it was: {changed}. "
                f"Its function returned it as {self._versioned.declared_name}: declare a type by state= that says all "
                f"of it, or return what this type can hold."
            )
        return encoded, decoded

    def _unstorable(self, error: Exception) -> StateUnstorable:
        name = self._versioned.declared_name
        return StateUnstorable(
            f"A state of operator {self.operator!r} is not a valid {name}: {error}. Its function returned this state: "
            f"return {name}, or declare another type by state=."
        )

    def pack(self, states: Sequence[S]) -> list[bytes]:
        """Each of *states* by itself; `joined`, they equal the result of `encode`. Raises like `encode`."""
        self.encode(states)
        return list(map(_encode, states))

    def unpack(self, packed: bytes) -> S:
        """One state. Raises like `decode`."""
        try:
            return self._decode_one(packed)
        except UNDECODABLE:
            return self.decode(joined([packed]), self.schema)[0]

    def split(self, encoded: bytes | memoryview, written: Any, version: int) -> list[bytes]:
        """The states of `decode`, packed as states of this type. Raises like `decode`."""
        states, same = self.decode(encoded, written, version), (written, version) == (self.schema, self.version)
        return list(map(bytes, _raw.decode(encoded))) if same else self.pack(states)

    def decode(self, encoded: bytes | memoryview, written: Any, version: int | None = None) -> list[S]:
        """The states in *encoded*, of schema *written* and of *version*, by default the present one."""
        version = self.version if version is None else version
        self._require_known(written, version)
        same = (written, version) == (self.schema, self.version)
        try:
            if steps := self._versioned.steps(version):
                return self._decode(self._migrated(encoded, steps))
            if not same and not self.drops_fields and self.dropped(written, version):
                self._require_defaults(encoded, written)
            return self._decode(encoded)
        except UNDECODABLE as error:
            if same or not isinstance(error, msgspec.ValidationError):
                raise damaged_block(self.operator, str(error)) from error
            raise self._incompatible(written, str(error)) from error

    def _migrated(self, encoded: bytes | memoryview, steps: Sequence[MigrationStep]) -> bytes:
        """The states in *encoded* after *steps*, as msgpack of today's type."""
        states: list[Any] = _raw.decode(encoded)
        for step, taken, migration in steps:
            try:
                states = [_encode(migration(msgspec.msgpack.decode(state, type=taken))) for state in states]
            except users_errors() as error:
                raise StateIncompatible(
                    f"The migration of version {step} of the state of operator {self.operator!r} failed: "
                    f"{type(error).__name__}: {error}. Nothing was changed: correct it, and run again."
                ) from error
        return _encode(list(map(msgspec.Raw, states)))

    def _require_defaults(self, encoded: bytes | memoryview, written: Any) -> None:
        states = _raw.decode(encoded)
        kept = [paths for state in states if (paths := self.changed(memoryview(state), written))]
        if kept:
            raise self.would_drop({path for paths in kept for path in paths}, f"{len(kept)} of some {len(states)} keys")

    def would_drop(self, paths: Iterable[str], keys: str) -> StateIncompatible:
        """The error for fields at *paths* whose values in so many *keys*, in words, are not their defaults."""
        return StateIncompatible(
            f"The checkpoint's state of operator {self.operator!r} has fields that {self.name} does not have: "
            f"{', '.join(sorted(paths))}. In {keys} they do not have their defaults, and would be lost. Run the code "
            f"that wrote them; or give them up by --allow-dropped-fields; or raise state_version, with a migration."
        )

    def _require_known(self, written: Any, version: int) -> None:
        if is_by_avro(written):
            raise StateIncompatible(f"The checkpoint's state of operator {self.operator!r} {KEPT_BY_AVRO}")
        if version > self.version:
            raise StateIncompatible(
                f"The checkpoint's state of operator {self.operator!r} is of version {version}, and the pipeline knows "
                f"version {self.version}. Run the code that wrote it, or a newer one."
            )

    def require_readable(self, written: Any, version: int | None = None) -> None:
        """Raise `StateIncompatible` if states of schema *written* cannot be read, or a field would be dropped silently.

        States of an older *version* may lose fields by migration. `decode` checks the defaults of other `dropped` ones.
        """
        version = self.version if version is None else version
        self._require_known(written, version)
        steps = self._versioned.steps(version)
        if version == self.version:
            may_go = has_default if not self.drops_fields else lambda field: True
            if gone := lost(written, self.schema, self.name, may_go):
                raise self._incompatible(written, f"{', '.join(gone)} would be lost")
        if not steps and (missing := unfit(written, self.schema, self.name)):
            raise self._incompatible(written, "; ".join(missing))

    def has_keys(self, written: Any) -> bool:
        """Whether the operator still has keys of schema *written*, as far as both are known."""
        return holds_keys(self.keys, written)

    def require_keys(self, written: Any) -> None:
        """Raise `StateIncompatible` unless `has_keys`: states under other keys would never be found."""
        if not self.has_keys(written):
            old, new = (msgspec.json.encode(schema).decode() for schema in (written, self.keys))
            raise StateIncompatible(
                f"The checkpoint's state of operator {self.operator!r} has keys of type {old}, and key_by gives keys of"
                f" type {new} now, which would not find it. Let the function of key_by return the old type; if both are"
                f" written alike, run it once without the annotation of that function. {BEGIN_EMPTY}."
            )

    def require_migrations(self, version: int, newest: int) -> None:
        """Raise `StateIncompatible` unless migrations lead from *version* to *newest*, the checkpoint's version.

        Older releases did not write all states at a new version, and left no record of a version without migration.
        """
        if gone := sorted(set(range(version, newest)) - self._versioned.migrations.keys()):
            raise StateIncompatible(
                f"The checkpoint's state of operator {self.operator!r} is of version {newest}, and some of it, which "
                f"no record has changed since, is of version {version}, which cannot be read any more: the pipeline has"
                f" no migration of version {', '.join(map(str, gone))}. Put it back into migrations=; where there was"
                f" none, because the states mean the same, one that returns what it is given. It may go once the"
                f" pipeline has gone on from a savepoint, in which all states are of one version."
            )

    def _incompatible(self, written: Any, why: str) -> StateIncompatible:
        old, new = (msgspec.json.encode(schema).decode() for schema in (written, self.schema))
        return StateIncompatible(
            f"The checkpoint's state of operator {self.operator!r} cannot be read as {self.name}: {why}. It was written"
            f" as {old}; the pipeline now declares {new}. {_FIT}; or raise state_version, with a migration where that"
            " does not tell how; or start over with `exactlyonce reset`."
        )

    def _clone_by_codec(self, state: S) -> S:
        return self._encoded([state])[1][0]


def raw_states(operator: str, encoded: bytes | memoryview, version: int) -> list[RawState]:
    """The states in *encoded*, of *version*: each as its own msgpack, whatever its type."""
    try:
        return [RawState(version, bytes(state)) for state in _raw.decode(encoded)]
    except UNDECODABLE as error:
        raise damaged_block(operator, str(error)) from error


def damaged_block(operator: str, why: str) -> DamagedState:
    return DamagedState(f"A block with state of operator {operator!r} is damaged: {why}.")


def joined(packed: Sequence[bytes]) -> bytes:
    """The msgpack array of *packed* states.

    >>> joined([b"\\x01", b"\\xa1x"])
    b'\\x92\\x01\\xa1x'
    """
    return array_head(len(packed)) + b"".join(packed)


def array_head(count: int) -> bytes:
    """The first bytes of the msgpack array of *count* items."""
    if count < 16:
        return bytes((0x90 | count,))
    if count < 1 << 16:
        return b"\xdc" + count.to_bytes(2, "big")
    return b"\xdd" + count.to_bytes(4, "big")


def _changed(states: Sequence[Any], encoded: bytes, decoded: list[Any]) -> str:
    """The difference between *states* and *decoded*; empty if there is none."""
    if _encode(decoded) == encoded:
        return ""
    try:
        return _difference(*map(_comparable, (states, decoded)))
    except TypeError:  # a dict has keys that are records
        return "" if decoded == list(states) else "some of it is lost"


def _comparable(states: Sequence[Any]) -> Any:
    """The fields of *states*, whether their types compare them or not; sets are ordered."""
    return msgspec.to_builtins(states, builtin_types=(bytes, Decimal), order="deterministic")


def _difference(one: Any, other: Any, path: str = "") -> str:
    """The first difference of two values from `_comparable`, as text; NaNs are equal, except in a set."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        inner = ((f"{path}.{name}" if path else f"{name}", one[name], other[name]) for name in one)
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        inner = ((path, *pair) for pair in zip(one, other, strict=True))
    elif one == other or (one != one and other != other):
        return ""
    else:
        return f"{f'field {path!r}' if path else 'the value'} is {one!r:.100}, and is read as {other!r:.100}"
    return next(filter(None, (_difference(was, now, at) for at, was, now in inner)), "")


def _mutable(shape: Shape) -> bool:
    """Whether a value can change in place; True if that is unknown."""
    return _mutable_parts(shape) != frozenset()


def _mutable_parts(shape: Shape, seen: frozenset[Shape] = frozenset()) -> frozenset[type] | None:
    """The classes of the mutable parts of a value; None: unknown."""
    inner = (*shape.parts, *(field.shape for field in shape.fields))
    match shape.form:
        case Form.ANY | Form.OTHER:
            return None
        case Form.RECORD if shape in seen:
            return frozenset()
        case Form.RECORD:
            seen |= {shape}
            own = set() if shape.is_frozen else {shape.cls}
        case Form.DICT | Form.LIST | Form.SET | Form.BYTES:
            own = {shape.type} - _IMMUTABLE
        case _:
            own = set()
    for part in inner:
        parts = _mutable_parts(part, seen)
        if parts is None:
            return None
        own |= parts
    return frozenset(own)


_IMMUTABLE = {bytes, tuple, frozenset}


def _parts_of(class_: type) -> frozenset[type] | None:
    """The classes of the mutable parts of a value of *class_*; None: unknown."""
    try:
        return _mutable_parts(shape_of(class_))
    except UnsupportedType:  # msgspec does not know it, or not yet
        return None


def _flat_clone(shape: Shape) -> Callable[[Any], Any] | None:
    """A quick copy, if the type is a container of immutable values; keys of a dict do not change."""
    if shape.type in (list, set, dict) and not _mutable(shape.parts[-1]):
        return methodcaller("copy")
    if shape.is_struct and not any(_mutable(field.shape) for field in shape.fields):
        return methodcaller("__copy__")
    return None


def json_text(value: Any) -> str:
    """A msgpack value, a state or a key, as JSON for people and for text columns, with nothing left out. A dict stays
    an object; a key without a JSON name, as a tuple, is named by its own JSON text.

    >>> json_text({"sum": 3, 7: 1}), json_text({("ann", 1): [3], None: []})
    ('{"sum":3,"7":1}', '{"[\\\\"ann\\\\",1]":[3],"null":[]}')
    """
    try:
        return msgspec.json.encode(value).decode()
    except TypeError:  # of one of its keys, wherever that is
        return msgspec.json.encode(_named(value)).decode()


def _named(value: Any) -> Any:
    """*value*, with a text in place of every key without a JSON name."""
    if isinstance(value, dict):
        return {_name(key): _named(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_named(inner) for inner in value]
    return value


def _name(key: Any) -> Any:
    return json_text(key) if key is None or isinstance(key, bool | list | tuple) else key

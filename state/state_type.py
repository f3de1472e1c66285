"""The type of an operator's state: how it is encoded, whether it must be cloned, and what it can be restored from.

Everything that `encode` returns, `decode` accepts: encoding checks values against the type, since a snapshot that
cannot be restored would only be noticed when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import methodcaller
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import inspect

from exactlyonce.pipeline.schema import describe, type_name
from exactlyonce.state.errors import UNDECODABLE, DamagedState, StateIncompatible, StateUnstorable

S = TypeVar("S")

_encode = msgspec.msgpack.Encoder().encode
_raw = msgspec.msgpack.Decoder(list[msgspec.Raw])
_IMMUTABLE = (
    inspect.NoneType,
    inspect.BoolType,
    inspect.IntType,
    inspect.FloatType,
    inspect.StrType,
    inspect.BytesType,
    inspect.DateTimeType,
    inspect.DateType,
    inspect.TimeType,
    inspect.TimeDeltaType,
    inspect.UUIDType,
    inspect.DecimalType,
    inspect.EnumType,
    inspect.LiteralType,
)


class StateType(Generic[S]):
    """Encodes, decodes and clones the states of one operator."""

    def __init__(self, operator: str, type_: Any) -> None:
        self.operator = operator
        self.name = type_name(type_)
        self.schema = describe(type_)
        self._decoder: msgspec.msgpack.Decoder[list[S]] = msgspec.msgpack.Decoder(list[type_])
        self._one: msgspec.msgpack.Decoder[S] = msgspec.msgpack.Decoder(type_)
        info = inspect.type_info(type_)
        self.mutable = _mutable(info)
        self.clone: Callable[[S], S] = _flat_clone(info) or self._clone_by_codec

    def encode(self, states: Sequence[S]) -> bytes:
        """*states* as msgpack. Raises `StateUnstorable` for a value that could not be decoded again."""
        try:
            encoded = _encode(states)
            self._decoder.decode(encoded)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise StateUnstorable(
                f"A state of operator {self.operator!r} is not a valid {self.name}: {error}. Its function returned this"
                f" state: return {self.name}, or declare another type by state=."
            ) from error
        return encoded

    def pack(self, states: Sequence[S]) -> list[bytes]:
        """Each of *states* by itself; `joined`, they are what `encode` returns. Raises `StateUnstorable` likewise."""
        self.encode(states)
        return list(map(_encode, states))

    def unpack(self, packed: bytes) -> S:
        """One state. Raises what `decode` raises."""
        try:
            return self._one.decode(packed)
        except UNDECODABLE:
            return self.decode(joined([packed]), self.schema)[0]

    def split(self, encoded: bytes | memoryview, written: Any) -> list[bytes]:
        """What `decode` returns, packed as states of this type. Raises what `decode` raises."""
        states = self.decode(encoded, written)
        return list(map(bytes, _raw.decode(encoded))) if written == self.schema else self.pack(states)

    def decode(self, encoded: bytes | memoryview, written: Any) -> list[S]:
        """The states in *encoded*, whose schema was *written*."""
        try:
            return self._decoder.decode(encoded)
        except msgspec.ValidationError as error:
            if written == self.schema:
                raise self.damaged(str(error)) from error
            raise self._incompatible(written, str(error)) from error
        except UNDECODABLE as error:
            raise self.damaged(str(error)) from error

    def require_readable(self, written: Any) -> None:
        """Raise `StateIncompatible` if reading states of schema *written* would drop a field of theirs silently."""
        if lost := _lost(written, self.schema, self.name):
            raise self._incompatible(written, f"{', '.join(lost)} would be lost")

    def damaged(self, why: str) -> DamagedState:
        """The error for bytes of this operator's state that are not what was written."""
        return DamagedState(f"A block with state of operator {self.operator!r} is damaged: {why}.")

    def _incompatible(self, written: Any, why: str) -> StateIncompatible:
        old, new = (msgspec.json.encode(schema).decode() for schema in (written, self.schema))
        return StateIncompatible(
            f"The checkpoint's state of operator {self.operator!r} cannot be read as {self.name}: {why}. It was written"
            f" as {old}; the pipeline now declares {new}. Keep every old field under its name and give new ones a"
            " default; or start over with `exactlyonce reset`."
        )

    def _clone_by_codec(self, state: S) -> S:
        return self._decoder.decode(self.encode([state]))[0]


def joined(packed: Sequence[bytes]) -> bytes:
    """The msgpack array of states that are packed.

    >>> joined([b"\\x01", b"\\xa1x"])
    b'\\x92\\x01\\xa1x'
    """
    count = len(packed)
    if count < 16:
        head = bytes((0x90 | count,))
    elif count < 1 << 16:
        head = b"\xdc" + count.to_bytes(2, "big")
    else:
        head = b"\xdd" + count.to_bytes(4, "big")
    return head + b"".join(packed)


def _mutable(info: inspect.Type, seen: frozenset[type] = frozenset()) -> bool:
    """Whether a value of this type can change in place. What is not known to be immutable can."""
    if isinstance(info, _IMMUTABLE):
        return False
    if isinstance(info, inspect.Metadata):
        return _mutable(info.type, seen)
    if isinstance(info, inspect.UnionType):
        return any(_mutable(member, seen) for member in info.types)
    if isinstance(info, inspect.TupleType):
        return any(_mutable(item, seen) for item in info.item_types)
    if isinstance(info, inspect.FrozenSetType | inspect.VarTupleType):
        return _mutable(info.item_type, seen)
    if isinstance(info, inspect.StructType | inspect.DataclassType | inspect.NamedTupleType):
        if info.cls in seen:
            return False
        return not _frozen(info) or any(_mutable(field.type, seen | {info.cls}) for field in info.fields)
    return True


def _frozen(info: inspect.StructType | inspect.DataclassType | inspect.NamedTupleType) -> bool:
    if isinstance(info, inspect.StructType):
        return info.cls.__struct_config__.frozen
    if isinstance(info, inspect.DataclassType):
        return bool(getattr(info.cls, "__dataclass_params__").frozen)  # noqa: B009 - not on the type that mypy sees
    return True


def _flat_clone(info: inspect.Type) -> Callable[[Any], Any] | None:
    """A quick way to copy a container of immutable values, if that is what the type is."""
    if isinstance(info, inspect.ListType) and not _mutable(info.item_type):
        return methodcaller("copy")
    if isinstance(info, inspect.SetType) and not _mutable(info.item_type):
        return methodcaller("copy")
    if isinstance(info, inspect.DictType) and not _mutable(info.value_type):
        return methodcaller("copy")
    if isinstance(info, inspect.StructType) and not any(_mutable(field.type) for field in info.fields):
        return methodcaller("__copy__")
    return None


def _lost(old: Any, new: Any, path: str) -> list[str]:
    """Paths of the fields in schema *old* for which *new* has no place. All other differences decoding judges."""
    old, new = (each.get("optional", each) if isinstance(each, dict) else each for each in (old, new))
    if isinstance(old, list) and isinstance(new, list):
        return [lost for each, other in _pairs(old, new) for lost in _lost(each, other, path)]
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return []
    if not ("fields" in old and "fields" in new):
        return [lost for name in old.keys() & new.keys() for lost in _lost(old[name], new[name], path)]
    names, fields = [name for name, _ in old["fields"]], dict(new["fields"])
    if old.get("array") and names != list(fields)[: len(names)]:
        return [f"{path} (its fields are stored by position)"]
    return [
        lost
        for name, schema in old["fields"]
        for lost in (_lost(schema, fields[name], f"{path}.{name}") if name in fields else [f"{path}.{name}"])
    ]


def _pairs(old: list[Any], new: list[Any]) -> list[tuple[Any, Any]]:
    """Members of two unions, or items of two tuples: records by their names, others by their places."""
    records = {each["record"]: each for each in new if isinstance(each, dict) and "record" in each}
    names = [each.get("record") if isinstance(each, dict) else None for each in old]
    return [
        (each, records[name]) if name in records else (each, other)
        for name, each, other in zip(names, old, [*new, *[None] * len(old)], strict=False)
    ]

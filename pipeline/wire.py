"""The form that records have between processes and in captures of in-flight records.

A type that msgspec can decode is its own form. In a union of classes that it cannot tell apart, for they have no tags,
each record travels with the name of its class: the form is a tagged union of envelopes, which schemas describe as they
describe any other type. State, keys and sinks have no such form: others read what these write.

Invariant: the class of a record decides, exactly. A record of any other class is an error, and never read as a member.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType
from typing import Any

import msgspec
from msgspec import inspect

from exactlyonce.pipeline import hints, schema

_RECORDS = (inspect.StructType, inspect.DataclassType, inspect.NamedTupleType)


@dataclass(frozen=True)
class Wire:
    """The form of the records of one type."""

    type: Any
    """As msgpack is decoded."""
    wrap: Callable[[list[Any]], list[Any]] | None = None
    """Makes the form of records; TypeError for one of a class that is no member. None: they have it already."""
    unwrap: Callable[[list[Any]], list[Any]] | None = None
    """Makes records of the form again."""


def wire_of(type_: Any) -> Wire:
    """The form of records of *type_*; that of a type that cannot be encoded is the type itself.

    >>> class Order(msgspec.Struct):
    ...     id: int
    >>> class Refund(msgspec.Struct):
    ...     id: int
    >>> wire = wire_of(Order | Refund)
    >>> msgspec.msgpack.decode(msgspec.msgpack.encode(wire.wrap([Refund(7)])))
    [['Refund', {'id': 7}]]
    """
    classes = apart(type_)
    if not classes:
        return Wire(type_)
    envelopes: dict[type, Callable[[Any], Any]] = {class_: _envelope(class_, of) for class_, of in classes.items()}
    wire_type = hints.union([*envelopes.values(), *([NoneType] if hints.admits_none(type_) else [])])
    if hints.admits_none(type_):
        envelopes[NoneType] = _itself

    def wrap(records: list[Any]) -> list[Any]:
        try:
            return [envelopes[type(record)](record) for record in records]
        except KeyError as error:
            names = ", ".join(sorted(class_.__name__ for class_ in envelopes))
            raise TypeError(f"a {error.args[0].__name__} is of none of its classes, {names}") from None

    def unwrap(wrapped: list[Any]) -> list[Any]:
        return [each if each is None else each.record for each in wrapped]

    return Wire(wire_type, wrap, unwrap)


def apart(type_: Any) -> dict[type, Any]:
    """By class, the members of a union that only their classes tell apart; empty: msgspec does, or nothing can."""
    members = [member for member in hints.members(type_) if member is not NoneType]
    if len(members) < 2 or _is_decodable(type_) or not all(map(_is_decodable, members)):
        return {}
    infos = [inspect.type_info(member) for member in members]
    if not all(isinstance(info, _RECORDS) for info in infos):
        return {}
    classes = {schema.record_class(info): member for info, member in zip(infos, members, strict=True)}
    return classes if len({class_.__name__ for class_ in classes}) == len(members) else {}


def describe(type_: Any) -> Any:
    """The schema of the form; raises `UnsupportedType` where there is none."""
    return schema.describe(wire_of(type_).type)


def _is_decodable(type_: Any) -> bool:
    try:
        msgspec.msgpack.Decoder(type_)
    except (TypeError, NameError, AttributeError):
        return False
    return True


def _envelope(class_: type, of: Any) -> type:
    name = class_.__name__
    return msgspec.defstruct(f"Untagged{name}", [("record", of)], tag=name, array_like=True)


def _itself(record: Any) -> Any:
    return record

"""Records: a value with its key and place, and the wire form of any, between processes and where they are kept in
flight.

A type that msgspec can decode is its own form. For a union of classes without tags, which msgspec cannot tell apart,
the form is a tagged union of envelopes, with the name of each record's class. State, keys and sinks have no such form:
other programs read them. Invariant: the exact class of a record decides. A record of another class is an error, and
never read as a member.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from types import NoneType
from typing import Any, Generic, TypeVar

import msgspec

from exactlyonce.pipeline import hints, shape
from exactlyonce.pipeline.errors import InvariantViolation
from exactlyonce.pipeline.shape import Form, shape_of

T = TypeVar("T")


class Record(msgspec.Struct, Generic[T], frozen=True, gc=False):
    """A value with its key and place; a Kafka sink writes the value under this key with these headers.

    ``Record(key="ann", value=None)`` is a tombstone for "ann". For output, key and value are enough.
    """

    value: T
    key: Any = None
    """bytes, or a value of the source's `key=`; None for a null key."""
    timestamp_ms: int | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    topic: str = ""
    partition: int = -1
    offset: int = -1


key_of_message: Callable[[Any], Any] = attrgetter("key")
"""The key of a `Record`: the key of the rows of a table."""


def key_before(record: Any) -> Any:
    """The key that *record* has already: the function of a KEY_BY that keeps keys, which never calls it."""
    raise InvariantViolation(f"a key is kept, not made of {record!r}")


@dataclass(frozen=True)
class Wire:
    """The wire form of the records of one type."""

    type: Any
    """The type that msgpack is decoded to."""
    wrap: Callable[[list[Any]], list[Any]] | None = None
    """Converts records to the form; TypeError for one of another class. None: they have it already."""
    unwrap: Callable[[list[Any]], list[Any]] | None = None
    """Converts the form to records."""


def wire_of(type_: Any) -> Wire:
    """The wire form of *type_*; a type that cannot be encoded is its own.

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
        envelopes[NoneType] = lambda record: record

    def wrap(records: list[Any]) -> list[Any]:
        try:
            return [envelopes[type(record)](record) for record in records]
        except KeyError as error:
            names = ", ".join(sorted(class_.__name__ for class_ in envelopes))
            raise TypeError(f"a {error.args[0].__name__} is none of its classes, {names}") from None

    def unwrap(wrapped: list[Any]) -> list[Any]:
        return [envelope if envelope is None else envelope.record for envelope in wrapped]

    return Wire(wire_type, wrap, unwrap)


def apart(type_: Any) -> dict[type, Any]:
    """The members by class of a union that only the classes tell apart; empty: msgspec does, or nothing can."""
    members = [member for member in hints.members(type_) if member is not NoneType]
    if len(members) < 2 or _is_decodable(type_) or not all(map(_is_decodable, members)):
        return {}
    records = [shape_of(member) for member in members]
    if any(record.form is not Form.RECORD or record.is_mapping for record in records):
        return {}
    classes = {record.cls: member for record, member in zip(records, members, strict=True)}
    return classes if len({class_.__name__ for class_ in classes}) == len(members) else {}


def wire_schema(type_: Any) -> Any:
    """The schema of the form; raises `UnsupportedType` if there is none."""
    return shape.describe(wire_of(type_).type)


def _is_decodable(type_: Any) -> bool:
    try:
        msgspec.msgpack.Decoder(type_)
    except (TypeError, NameError, AttributeError):
        return False
    return True


def _envelope(class_: type, of: Any) -> type:
    name = class_.__name__
    return msgspec.defstruct(f"Untagged{name}", [("record", of)], tag=name, array_like=True)

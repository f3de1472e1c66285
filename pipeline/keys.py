"""The canonical encoding of keys, which alone determines a key's group, on every machine and in every version.

`canonical_key` is msgpack with sorted sets and dicts, so 1, "1", True and 1.0 are four keys. Values with the same
msgpack are one key: a tuple and a list, an enum and its value, a UUID and its text. 0.0 and -0.0 are two. Key groups
are Kafka's murmur2 of these bytes. Refused with TypeError or OverflowError: integers beyond 64 bits, dicts with keys
other than strings, sets that cannot be sorted. `explained_key` is slower by a call, and its errors are for people.

The types of keys are compared by their schemas from `shape.describe`: whether keys of one are keys of another. The
bytes of a key alone find its state. They have no names of classes, but the order of fields; an enum is its value, and a
NamedTuple a tuple. A number and its text are two keys. Unknown types are compatible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from operator import itemgetter
from struct import unpack
from typing import Any

import msgspec

from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.shape import Form, Shape, UnsupportedType, describe, described_shape

canonical_key: Callable[[object], bytes] = msgspec.msgpack.Encoder(order="deterministic").encode

_MADE_OF = (
    "None, bools, numbers (integers of 64 bits), text, bytes, times, enums, UUIDs, and tuples, lists, records, sets "
    "with items that can be sorted, and dicts with text as keys"
)


def explained_key(value: object) -> bytes:
    """`canonical_key` of *value*. Raises a TypeError that says what has one."""
    try:
        return canonical_key(value)
    except (TypeError, OverflowError) as error:
        name = type(value).__name__
        raise TypeError(f"a {name} like this has no canonical encoding: make it of {_MADE_OF} ({error})") from None


_SEED = 0x9747B28C
_M = 0x5BD1E995


def key_groups(keys: Sequence[bytes], max_parallelism: int) -> list[int]:
    """The key group of each canonical key: ``(murmur2(key) & 0x7fffffff) % max_parallelism``, as Kafka's partitioner.

    >>> key_groups([canonical_key("ann"), canonical_key("bob")], 128)
    [123, 79]
    """
    lengths = list(map(len, keys))
    if len(set(lengths)) == 1:
        return _key_groups(keys, lengths[0], max_parallelism)
    places_by_length: dict[int, list[int]] = {}
    for place, length in enumerate(lengths):
        places_by_length.setdefault(length, []).append(place)
    groups = [0] * len(keys)
    for length, places in places_by_length.items():
        some = _key_groups([keys[place] for place in places], length, max_parallelism)
        for place, group in zip(places, some, strict=True):
            groups[place] = group
    return groups


def key_group(key: bytes, max_parallelism: int) -> int:
    """The key group of one canonical key; `key_groups` is far cheaper for many."""
    return key_groups((key,), max_parallelism)[0]


def _key_groups(keys: Sequence[bytes], length: int, max_parallelism: int) -> list[int]:
    """`key_groups` of keys of one length. The usual 128 groups need the lowest byte of a hash only."""
    hashes = _murmur2_positive(keys, length)
    if (lowest := _lowest_bits(max_parallelism)) is not None:
        return list(hashes[::8].translate(lowest))
    return [hash_ % max_parallelism for hash_ in unpack(f"<{len(keys)}Q", hashes)]


@lru_cache
def _lowest_bits(count: int) -> bytes | None:
    """Each byte modulo *count*, if that is the remainder of any number with that lowest byte."""
    return bytes(byte % count for byte in range(256)) if 256 % count == 0 else None


def _murmur2_positive(keys: Sequence[bytes], length: int) -> bytes:
    """murmur2 & 0x7fffffff of keys of one length, all at once, each little-endian in 64 bits.

    Key *i* has the 64 bits from 64 * i of one long integer. A product of two 32-bit numbers fits into 64 bits, so lanes
    never touch. The mask removes the bits of the next lane that a right shift brings in.
    """
    count = len(keys)
    ones = int.from_bytes(b"\1\0\0\0\0\0\0\0" * count, "little")
    mask = ones * 0xFFFFFFFF
    joined = b"".join(keys)
    h = ones * (_SEED ^ length)
    tail = length & ~3
    for start in range(0, tail, 4):
        k = _lanes(joined, length, start, start + 4) * _M & mask
        k ^= k >> 24 & mask
        h = (h * _M & mask) ^ (k * _M & mask)
    if tail < length:
        h = (h ^ _lanes(joined, length, tail, length)) * _M & mask
    h = (h ^ (h >> 13 & mask)) * _M & mask
    return ((h ^ h >> 15) & ones * 0x7FFFFFFF).to_bytes(8 * count, "little")


def _lanes(joined: bytes, length: int, start: int, end: int) -> int:
    """The bytes [start, end) of every key as a little-endian number in its lane."""
    lanes = bytearray(len(joined) // length * 8)
    for place, offset in enumerate(range(start, end)):
        lanes[place::8] = joined[offset::length]
    return int.from_bytes(lanes, "little")


# --- types of keys ----------------------------------------------------------------------------------------------------

_NAMES = {type(None): "null"}
_FORMS = ("str", "int", "float", "bool", "bytes", "null")
_OTHER = 1 << len(_FORMS)
_LOOKED_AT = 1 << 7
_HEADS = {
    "str": (*range(0xA0, 0xC0), 0xD9, 0xDA, 0xDB),
    "int": (*range(0x80), *range(0xCC, 0xD4), *range(0xE0, 0x100)),
    "float": (0xCA, 0xCB),
    "bool": (0xC2, 0xC3),
    "bytes": (0xC4, 0xC5, 0xC6),
    "null": (0xC0,),
}
"""The first bytes of msgpack by form."""
_FORM_OF_HEAD = [
    next((1 << place for place, form in enumerate(_FORMS) if head in _HEADS[form]), _OTHER) for head in range(256)
]
_head = itemgetter(0)


def _written(*forms: str) -> int:
    return sum(1 << _FORMS.index(form) if form in _FORMS else _OTHER for form in forms)


_WRITTEN = {
    **{form: _written(form.value) for form in (Form.NULL, Form.BOOL, Form.INT, Form.STR, Form.BYTES)},
    **dict.fromkeys((Form.DATE, Form.TIME, Form.TIMEDELTA, Form.UUID, Form.DECIMAL), _written("str")),
    **dict.fromkeys((Form.DICT, Form.TUPLE, Form.LIST, Form.SET, Form.RECORD), _OTHER),
    Form.FLOAT: _written("float", "int"),  # an int is a float to a type checker
    Form.DATETIME: _written("str", "other"),  # the second with a time zone
}
"""The bits of the forms of canonical keys, by the form of their type; another one may have any."""


def key_schema(type_: Any) -> Any:
    """The schema of keys of *type_*; None if it is unknown or cannot be described."""
    try:
        return None if type_ is None or type_ is UNKNOWN else describe(type_)
    except UnsupportedType:
        return None


def key_forms_of(keys: Iterable[bytes]) -> int:
    """The forms of canonical *keys*, as the bits of a byte other than 0, which may be joined by ``|``.

    >>> described_forms(key_forms_of([b"\\x07"])), described_forms(key_forms_of([b"\\xa17"]))
    ('int', 'str')
    """
    forms = _LOOKED_AT
    for head in set(map(_head, keys)):
        forms |= _FORM_OF_HEAD[head]
    return forms


def described_forms(forms: int) -> Any:
    """The schema of keys from their *forms* alone; None if they have no common type, and for 0: keys not looked at."""
    if forms & _OTHER:
        return None
    schemas = [form for place, form in enumerate(_FORMS) if forms >> place & 1]
    if len(schemas) == 2 and "null" in schemas:
        return {"union": schemas}
    return schemas[0] if len(schemas) == 1 else None


def heads_of(schema: Any) -> list[bool] | None:
    """Whether a byte may begin a canonical key of *schema*, by byte; None: every byte may.

    >>> heads = heads_of("uuid")
    >>> heads[canonical_key("text")[0]], heads[canonical_key(b"bytes")[0]]
    (True, False)
    """
    forms = 0
    for member in () if schema is None else _members(described_shape(schema)):
        forms |= _WRITTEN.get(member.form, 0) or ~0
    return [bool(forms & form) for form in _FORM_OF_HEAD] if forms > 0 else None


def holds_keys(new: Any, old: Any) -> bool:
    """Whether keys of schema *old* may be keys of *new*; a schema None is unknown.

    >>> holds_keys("int", "str"), holds_keys({"union": ["str", "null"]}, "str")
    (False, True)
    >>> holds_keys("str", {"enum": "E", "values": ["a"]})
    True
    """
    if new is None or old is None:
        return True
    return _holds(described_shape(new), described_shape(old), set())


def _holds(new: Shape, old: Shape, compared: set[tuple[Shape, Shape]]) -> bool:
    """Likewise; *compared* are pairs that are alike, or being compared: records may be recursive."""
    return all(any(_like(one, other, compared) for other in _members(new)) for one in _members(old))


def _members(shape: Shape) -> Iterator[Shape]:
    """The alternatives of a shape; the forms of literal values."""
    for member in shape.members:
        yield from (Shape(Form(_NAMES.get(type(value), type(value).__name__)), None) for value in member.values)
        if not member.values:
            yield member


def _like(old: Shape, new: Shape, compared: set[tuple[Shape, Shape]]) -> bool:
    """Whether keys of *old* may be keys of *new*; neither is a union."""
    if Form.ANY in (old.form, new.form) or old == new or (old, new) in compared:
        return True
    if not (_is_tuple(old) and _is_tuple(new)) and (old.form is not new.form or _layout(old) != _layout(new)):
        return False
    olds, news = _parts(old), _parts(new)
    compared.add((old, new))
    if len(olds) == len(news) and all(_holds(now, was, compared) for was, now in zip(olds, news, strict=True)):
        return True
    compared.discard((old, new))
    return False


def _is_tuple(shape: Shape) -> bool:
    """Whether it is a tuple, or a record written as one."""
    return shape.form is Form.TUPLE or (shape.is_array and shape.tag is None)


def _parts(shape: Shape) -> list[Shape]:
    return [*shape.parts, *(field.shape for field in shape.fields)]


def _layout(shape: Shape) -> Any:
    """The bytes' layout of a record: fields, omitted defaults, whether it is an array, the tag."""
    fields = [(field.name, field.default if field.is_omitted else None) for field in shape.fields]
    return [fields, shape.is_array, shape.tag]

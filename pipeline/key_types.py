"""The compatibility of key types, by their schemas from `shape.describe`: whether keys of one are keys of another.

Invariant: the bytes of a key alone, from `keys.canonical_key`, find its state. They have no names of classes, but the
order of fields; an enum is its value, and a NamedTuple a tuple. A number and its text are two keys. Unknown types are
compatible.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any

from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.shape import Form, Shape, UnsupportedType, describe, described_shape

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


def described(type_: Any) -> Any:
    """The schema of keys of *type_*; None if it is unknown or cannot be described."""
    try:
        return None if type_ is None or type_ is UNKNOWN else describe(type_)
    except UnsupportedType:
        return None


def forms_of(keys: Iterable[bytes]) -> int:
    """The forms of canonical *keys*, as the bits of a byte other than 0, which may be joined by ``|``.

    >>> described_forms(forms_of([b"\\x07"])), described_forms(forms_of([b"\\xa17"]))
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


def holds(new: Any, old: Any) -> bool:
    """Whether keys of schema *old* may be keys of *new*; a schema None is unknown.

    >>> holds("int", "str"), holds({"union": ["str", "null"]}, "str"), holds("str", {"enum": "E", "values": ["a"]})
    (False, True, True)
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

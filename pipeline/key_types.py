"""The compatibility of key types, by their schemas from `shape.describe`: whether keys of one are keys of another.

Invariant: the bytes of a key alone, from `keys.canonical_key`, find its state. They have no names of classes, but the
order of fields; an enum is its value, and a NamedTuple a tuple. A number and its text are two keys. Unknown types are
compatible.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from typing import Any

from exactlyonce.pipeline import shape
from exactlyonce.pipeline.hints import UNKNOWN

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
        return None if type_ is None or type_ is UNKNOWN else shape.describe(type_)
    except shape.UnsupportedType:
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
    return all(any(_like(one, other) for other in _members(new)) for one in _members(old))


def _members(of: Any) -> list[Any]:
    """The alternatives of a schema, without unions; the types of literal values."""
    if isinstance(of, dict):
        if "optional" in of:
            return _members(of["optional"])
        if "union" in of:
            return [leaf for member in of["union"] for leaf in _members(member)]
        if values := of.get("values", of.get("literal")):
            return sorted({_NAMES.get(type(value), type(value).__name__) for value in values})
    return [of]


def _like(old: Any, new: Any) -> bool:
    """Whether keys of *old* may be keys of *new*; neither is a union."""
    if "any" in (old, new) or old == new:
        return True
    if isinstance(old, str) or isinstance(new, str):
        return False
    old, new = _items(old), _items(new)
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(holds, new, old))
    if "fields" in old and "fields" in new:
        return _layout(old) == _layout(new) and all(holds(of, dict(old["fields"])[name]) for name, of in new["fields"])
    form = next((form for form in ("list", "set", "dict") if form in old and form in new), None)
    if form is None:
        return False
    return all(map(holds, new[form], old[form])) if form == "dict" else holds(new[form], old[form])


def _items(of: Any) -> Any:
    """The schemas of the items of a tuple, or of a record written as one; else *of*."""
    if isinstance(of, dict) and of.get("array") and "tag" not in of:
        return [item for _, item in of["fields"]]
    return of["tuple"] if isinstance(of, dict) and "tuple" in of else of


def _layout(record: Any) -> Any:
    """The bytes' layout of a record: fields, omitted defaults, whether it is an array, the tag."""
    fields = [(name, of.get("omitted") if isinstance(of, dict) else None) for name, of in record["fields"]]
    return [fields, record.get("array"), record.get("tag")]

"""The types of keys: whether all keys of one type are keys of another, by their schemas, `schema.describe`'s.

Invariant: a key finds its state by its bytes alone, which `keys.canonical_key` writes: names of classes are not in
them, the order of fields is, an enum is its value, and a NamedTuple a tuple. Nothing else is taken for the same: a
number and its text are two keys. What is not known of a type says nothing against it.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from typing import Any

from exactlyonce.pipeline import schema
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
"""What msgpack of each form begins with."""
_FORM_OF_HEAD = [
    next((1 << place for place, form in enumerate(_FORMS) if head in _HEADS[form]), _OTHER) for head in range(256)
]
_head = itemgetter(0)


def described(type_: Any) -> Any:
    """The schema of keys of *type_*; None where that is unknown, or none that can be described."""
    try:
        return None if type_ is None or type_ is UNKNOWN else schema.describe(type_)
    except schema.UnsupportedType:
        return None


def forms_of(keys: Iterable[bytes]) -> int:
    """The forms that canonical *keys* have, as the bits of a byte, which is not 0: of several keys joined by ``|``.

    >>> described_forms(forms_of([b"\\x07"])), described_forms(forms_of([b"\\xa17"]))
    ('int', 'str')
    """
    forms = _LOOKED_AT
    for head in set(map(_head, keys)):
        forms |= _FORM_OF_HEAD[head]
    return forms


def described_forms(forms: int) -> Any:
    """The schema of keys of which nothing but their *forms* is known; None where these have no type in common, and for
    0, which is of keys that were not looked at."""
    if forms & _OTHER:
        return None
    found = [form for place, form in enumerate(_FORMS) if forms >> place & 1]
    if len(found) == 2 and "null" in found:
        return {"union": found}
    return found[0] if len(found) == 1 else None


def holds(new: Any, old: Any) -> bool:
    """Whether each key of schema *old* may be one of *new*; None: unknown.

    >>> holds("int", "str"), holds({"union": ["str", "null"]}, "str"), holds("str", {"enum": "E", "values": ["a"]})
    (False, True, True)
    """
    if new is None or old is None:
        return True
    return all(any(_like(one, other) for other in _members(new)) for one in _members(old))


def _members(of: Any) -> list[Any]:
    """The schemas of which a key has one, none a union; of values their types."""
    if isinstance(of, dict):
        if "optional" in of:
            return _members(of["optional"])
        if "union" in of:
            return [each for member in of["union"] for each in _members(member)]
        if values := of.get("values", of.get("literal")):
            return sorted({_NAMES.get(type(each), type(each).__name__) for each in values})
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
    form = next((each for each in ("list", "set", "dict") if each in old and each in new), None)
    if form is None:
        return False
    return all(map(holds, new[form], old[form])) if form == "dict" else holds(new[form], old[form])


def _items(of: Any) -> Any:
    """The schemas of the items of a tuple, or of what is written as one; else *of*."""
    if isinstance(of, dict) and of.get("array") and "tag" not in of:
        return [each for _, each in of["fields"]]
    return of["tuple"] if isinstance(of, dict) and "tuple" in of else of


def _layout(record: Any) -> Any:
    """What two records need in common: the fields, what is left out of them in the bytes, whether they have names
    there, the tag."""
    fields = [(name, of.get("omitted") if isinstance(of, dict) else None) for name, of in record["fields"]]
    return [fields, record.get("array"), record.get("tag")]

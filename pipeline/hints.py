"""The types that a user's function declares, as far as they can be known without calling it.

A type is `UNKNOWN` rather than guessed: an absent annotation, `Any`, `object`, a type variable, a name that does not
resolve. Names are looked up in the function's module, then among the locals of the frame that builds the pipeline, so
that classes defined inside a function count.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Mapping
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin


class Unknown:
    """The type of what nothing is known about."""

    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = Unknown()


def declared(function: Callable[..., Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """Resolved annotations by parameter name and "return"; those that do not resolve are absent."""
    try:
        annotations = getattr(function, "__annotations__", {})
    except NameError:  # Python 3.14 evaluates all of them at this moment
        return {}
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    scope = getattr(function, "__globals__", {})
    resolved = {name: _resolve(annotation, scope, names) for name, annotation in annotations.items()}
    return {name: type_ for name, type_ in resolved.items() if type_ is not UNKNOWN}


def _resolve(annotation: Any, scope: dict[str, Any], names: Mapping[str, Any]) -> Any:
    holder = SimpleNamespace(__annotations__={"it": annotation})
    for local in ({}, dict(names)):
        try:
            return known(typing.get_type_hints(holder, scope, local, include_extras=True)["it"])
        except Exception:  # any code may stand in an annotation, and may fail in any way
            continue
    return UNKNOWN


def known(type_: Any) -> Any:
    """The type, or UNKNOWN if it says nothing about the values."""
    generic = not isinstance(type_, type) and bool(getattr(type_, "__parameters__", ()))
    return UNKNOWN if type_ in (Any, object) or isinstance(type_, TypeVar) or generic else type_


def union(types: Iterable[Any]) -> Any:
    """The union of all, UNKNOWN if one of them or all of them are missing."""
    members = list(dict.fromkeys(types))
    return UNKNOWN if not members or UNKNOWN in members else Union[tuple(members)]  # noqa: UP007 - made at run time


def members(type_: Any) -> tuple[Any, ...]:
    """The alternatives of a union; a type that is none is its only one."""
    return get_args(type_) if get_origin(type_) in (Union, UnionType) else (type_,)


def admits_none(type_: Any) -> bool:
    """Whether None is one of the values."""
    return NoneType in members(type_) or type_ is None


def without_none(type_: Any) -> Any:
    """The type of the values other than None; UNKNOWN if there are none."""
    return union(member for member in members(type_) if member is not NoneType)


def element(type_: Any) -> Any:
    """What iterating over a value gives: `Order` for `list[Order]` and `Iterator[Order]`."""
    origin, args = get_origin(type_), get_args(type_)
    if origin is tuple and args[-1:] != (...,):
        return union(args)
    if isinstance(origin, type) and issubclass(origin, Iterable) and not issubclass(origin, Mapping) and args:
        return known(args[0])
    return UNKNOWN


def pair(type_: Any) -> tuple[Any, Any]:
    """The first and second of the returned tuple, also where it is a union of tuples."""
    returned = [get_args(member) if get_origin(member) is tuple else () for member in members(type_)]
    if any(len(items) != 2 or ... in items for items in returned):
        return UNKNOWN, UNKNOWN
    firsts, seconds = zip(*returned, strict=True)
    return union(map(known, firsts)), union(map(known, seconds))

"""The annotated types of a user's function.

A type is `UNKNOWN`, never guessed, for a missing annotation, `Any`, `object`, a type variable, or an unresolved name.
Names are resolved in the function's module, then among the locals of the frame that builds the pipeline.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Mapping
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin


class Unknown:
    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = Unknown()


def declared(function: Callable[..., Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """The resolved annotations by parameter name and "return", without those that do not resolve."""
    try:
        annotations = getattr(function, "__annotations__", {})
    except NameError:  # Python 3.14 evaluates all of them here
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
        except Exception:  # an annotation may be any code
            continue
    return UNKNOWN


def known(type_: Any) -> Any:
    """The type, or UNKNOWN if it tells nothing about the values."""
    generic = not isinstance(type_, type) and bool(getattr(type_, "__parameters__", ()))
    return UNKNOWN if type_ in (Any, object) or isinstance(type_, TypeVar) or generic else type_


def union(types: Iterable[Any]) -> Any:
    """The union of all; UNKNOWN if it is empty or one of them is unknown."""
    members = list(dict.fromkeys(types))
    return UNKNOWN if not members or UNKNOWN in members else Union[tuple(members)]  # noqa: UP007 - made at run time


def members(type_: Any) -> tuple[Any, ...]:
    """The members of a union; any other type is its only one."""
    return get_args(type_) if get_origin(type_) in (Union, UnionType) else (type_,)


def admits_none(type_: Any) -> bool:
    return NoneType in members(type_) or type_ is None


def without_none(type_: Any) -> Any:
    """The type of the values other than None; UNKNOWN if there are none."""
    return union(member for member in members(type_) if member is not NoneType)


def element(type_: Any) -> Any:
    """The type of an item: `Order` for `list[Order]` and `Iterator[Order]`."""
    origin, args = get_origin(type_), get_args(type_)
    if origin is tuple and args[-1:] != (...,):
        return union(args)
    if isinstance(origin, type) and issubclass(origin, Iterable) and not issubclass(origin, Mapping) and args:
        return known(args[0])
    return UNKNOWN


def pair(type_: Any) -> tuple[Any, Any]:
    """The types of both items of a pair, also of a union of pairs."""
    returned = [get_args(member) if get_origin(member) is tuple else () for member in members(type_)]
    if any(len(items) != 2 or ... in items for items in returned):
        return UNKNOWN, UNKNOWN
    firsts, seconds = zip(*returned, strict=True)
    return union(map(known, firsts)), union(map(known, seconds))

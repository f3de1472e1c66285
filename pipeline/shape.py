"""Schemas: the wire format of a type, as JSON that is equal exactly if the bytes mean the same.

A schema has the names of classes and fields, their order, optional fields, omitted defaults, and tags. It has no module
names, docstrings or validation limits, and other defaults only on request. Raises `UnsupportedType` for a type that
msgspec cannot encode and decode.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import inspect

from exactlyonce.pipeline.errors import GraphError

_SCALARS: dict[type[inspect.Type], str] = {
    inspect.AnyType: "any",
    inspect.NoneType: "null",
    inspect.BoolType: "bool",
    inspect.IntType: "int",
    inspect.FloatType: "float",
    inspect.StrType: "str",
    inspect.BytesType: "bytes",
    inspect.ByteArrayType: "bytes",
    inspect.MemoryViewType: "bytes",
    inspect.DateTimeType: "datetime",
    inspect.DateType: "date",
    inspect.TimeType: "time",
    inspect.TimeDeltaType: "timedelta",
    inspect.UUIDType: "uuid",
    inspect.DecimalType: "decimal",
}
_RECORDS = (inspect.StructType, inspect.DataclassType, inspect.NamedTupleType, inspect.TypedDictType)


class UnsupportedType(GraphError):
    """A type that no codec can write. The message names it, and alternatives."""


def describe(type_: Any, *, defaults: bool = False) -> Any:
    """The schema of a type, as JSON values; with *defaults*, for `default_of`.

    >>> describe(dict[str, int | None])
    {'dict': ['str', {'union': ['int', 'null']}]}
    """
    try:
        info = inspect.type_info(type_)
        msgspec.msgpack.Decoder(type_)
    except (TypeError, NameError, AttributeError) as error:
        raise UnsupportedType(f"{type_name(type_)} cannot be encoded: {error}{_tag_it(str(error))}") from None
    return _describe(info, set(), defaults)


def _tag_it(error: str) -> str:
    """The remedy for a union of records that msgspec cannot tell apart."""
    if "must be tagged" in error or "more than one dict-like type" in error:
        return ". Give each of them a tag, as class Order(msgspec.Struct, tag=True)"
    return ""


def default_of(field: Any) -> Any:
    """The default in the schema of a field, in builtin types; `msgspec.NODEFAULT` if it has none."""
    if not isinstance(field, dict):
        return msgspec.NODEFAULT
    return field.get("omitted", field.get("default", msgspec.NODEFAULT))


def builtins_of(value: Any) -> Any:
    """*value* in builtin types, as of `default_of`. Raises TypeError for other types.

    >>> builtins_of({1: [2.5, b"x"]})
    {'1': [2.5, 'eA==']}
    """
    return msgspec.to_builtins(value, str_keys=True, order="deterministic")


def type_name(type_: Any) -> str:
    """A type without its modules, for people."""
    written = type_.__name__ if isinstance(type_, type) and not hasattr(type_, "__args__") else str(type_)
    return re.sub(r"(?:\w+\.|<locals>\.)+(?=\w)", "", written)


def _describe(info: inspect.Type, seen: set[Any], defaults: bool) -> Any:
    if scalar := _SCALARS.get(type(info)):
        return scalar
    if isinstance(info, _RECORDS):
        return _describe_record(info, seen, defaults)
    if isinstance(info, inspect.UnionType):
        return {"union": [_describe(member, seen, defaults) for member in info.types]}
    if isinstance(info, inspect.DictType):
        return {"dict": [_describe(info.key_type, seen, defaults), _describe(info.value_type, seen, defaults)]}
    if isinstance(info, inspect.TupleType):
        return {"tuple": [_describe(item, seen, defaults) for item in info.item_types]}
    if isinstance(info, inspect.SetType | inspect.FrozenSetType):
        return {"set": _describe(info.item_type, seen, defaults)}
    if isinstance(info, inspect.CollectionType):
        return {"list": _describe(info.item_type, seen, defaults)}
    if isinstance(info, inspect.EnumType):
        return {"enum": info.cls.__name__, "values": [member.value for member in info.cls]}
    if isinstance(info, inspect.LiteralType):
        return {"literal": list(info.values)}
    if isinstance(info, inspect.Metadata):
        return _describe(info.type, seen, defaults)
    name = type_name(getattr(info, "cls", type(info)))
    fix = "use a msgspec Struct, a dataclass, a TypedDict, a NamedTuple, or builtin types"
    raise UnsupportedType(f"{name} cannot be encoded: {fix}")


def _describe_record(info: Any, seen: set[Any], defaults: bool) -> Any:
    name = getattr(info.cls, "__name__", str(info.cls))
    if info.cls in seen:
        return {"record": name}
    seen.add(info.cls)
    omits = isinstance(info, inspect.StructType) and record_class(info).__struct_config__.omit_defaults
    fields = {field.encode_name: _describe_field(field, seen, omits, defaults) for field in info.fields}
    described = {"record": name, "fields": [[field, schema] for field, schema in fields.items()]}
    if isinstance(info, inspect.NamedTupleType):
        described |= {"array": True}
    if isinstance(info, inspect.StructType):
        described |= {"array": True} if info.array_like else {}
        described |= {"tag": [info.tag_field, info.tag]} if info.tag is not None else {}
    return described


def _describe_field(field: inspect.Field, seen: set[Any], omits: bool, defaults: bool) -> Any:
    """The schema of a field; with its default if its class *omits* defaults from the bytes."""
    schema = _describe(field.type, seen, defaults)
    if field.required:
        return schema
    default: Any = field.default_factory() if field.default_factory in (list, dict, set) else field.default
    if omits and default is not msgspec.NODEFAULT:
        return {"optional": schema, "omitted": builtins_of(default)}
    noted = _noted(default) if defaults else msgspec.NODEFAULT
    return {"optional": schema} | ({} if noted is msgspec.NODEFAULT else {"default": noted})


def _noted(default: Any) -> Any:
    """*default* as checkpoints and exports return it; NODEFAULT if they cannot, as for NaN in JSON."""
    try:
        noted = msgspec.msgpack.decode(msgspec.msgpack.encode(builtins_of(default)))
        same = msgspec.json.decode(msgspec.json.encode(noted)) == noted
    except (TypeError, ValueError, OverflowError, RecursionError):
        return msgspec.NODEFAULT
    return noted if same else msgspec.NODEFAULT


def record_class(info: Any) -> Any:
    """The class of records, without type arguments."""
    return getattr(info.cls, "__origin__", info.cls)

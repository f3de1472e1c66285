"""The shape of a type: what its values are made of, for every target that writes or reads them.

`shape_of` visits a Python type once; each target, as Avro or the columns of a table, is a table of rules over `Form`.
`describe` is the first of them: the wire format as JSON, equal exactly if the bytes mean the same. It has the names of
classes and fields, their order, optional fields, omitted defaults, and tags; no module names, docstrings or validation
limits, and other defaults only on request.

Invariant: a shape has no metadata. A record's fields are visited when they are asked for, since records may be
recursive; shapes of one class are equal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import starmap
from operator import attrgetter, itemgetter
from typing import Any

import msgspec
from msgspec import inspect

from exactlyonce.pipeline.errors import GraphError


class UnsupportedType(GraphError):
    """A type that no codec can write. The message names it, and alternatives."""


class Form(Enum):
    """The form of values, as `describe` writes it."""

    ANY = "any"
    NULL = "null"
    BOOL = "bool"
    INT = "int"
    FLOAT = "float"
    STR = "str"
    BYTES = "bytes"
    """Also bytearray and memoryview: see `Shape.type`."""
    DATETIME = "datetime"
    DATE = "date"
    TIME = "time"
    TIMEDELTA = "timedelta"
    UUID = "uuid"
    DECIMAL = "decimal"
    ENUM = "enum"
    LITERAL = "literal"
    UNION = "union"
    DICT = "dict"
    TUPLE = "tuple"
    """A tuple of so many items; other tuples are lists."""
    LIST = "list"
    SET = "set"
    RECORD = "record"
    """A Struct, dataclass, NamedTuple or TypedDict."""
    OTHER = "other"
    """A class that msgspec does not know."""


_FORMS: Mapping[type[inspect.Type], tuple[Form, Any]] = {
    inspect.AnyType: (Form.ANY, Any),
    inspect.NoneType: (Form.NULL, type(None)),
    inspect.BoolType: (Form.BOOL, bool),
    inspect.IntType: (Form.INT, int),
    inspect.FloatType: (Form.FLOAT, float),
    inspect.StrType: (Form.STR, str),
    inspect.BytesType: (Form.BYTES, bytes),
    inspect.ByteArrayType: (Form.BYTES, bytearray),
    inspect.MemoryViewType: (Form.BYTES, memoryview),
    inspect.DateTimeType: (Form.DATETIME, None),
    inspect.DateType: (Form.DATE, None),
    inspect.TimeType: (Form.TIME, None),
    inspect.TimeDeltaType: (Form.TIMEDELTA, None),
    inspect.UUIDType: (Form.UUID, None),
    inspect.DecimalType: (Form.DECIMAL, None),
    inspect.EnumType: (Form.ENUM, None),
    inspect.LiteralType: (Form.LITERAL, None),
    inspect.UnionType: (Form.UNION, None),
    inspect.DictType: (Form.DICT, dict),
    inspect.TupleType: (Form.TUPLE, tuple),
    inspect.ListType: (Form.LIST, list),
    inspect.VarTupleType: (Form.LIST, tuple),
    inspect.SetType: (Form.SET, set),
    inspect.FrozenSetType: (Form.SET, frozenset),
    inspect.StructType: (Form.RECORD, None),
    inspect.DataclassType: (Form.RECORD, None),
    inspect.NamedTupleType: (Form.RECORD, None),
    inspect.TypedDictType: (Form.RECORD, None),
}
"""By msgspec's kind: the form, and the class of the values where the kind alone tells it."""
_NUMBERS = {Form.INT, Form.FLOAT}


@dataclass(frozen=True)
class Shape:
    """The values of one type."""

    form: Form
    type: Any
    """The class of a record with its type arguments, an enum, or the class of collections and bytes; else None."""
    parts: tuple[Shape, ...] = ()
    """The members of a union, the items of a tuple, key and value of a dict, the item of a list or set."""
    values: tuple[Any, ...] = field(default=(), hash=False)
    """Of an enum or a literal."""
    tz: bool | None = None
    """Whether datetimes must have a time zone, or none; None: either."""
    tag: tuple[str, str | int] | None = field(default=None, compare=False)
    """The field that tells a record from others of a union, and its value."""
    is_array: bool = field(default=False, compare=False)
    """Whether a record is written by position."""
    _fields: Callable[[], Iterable[Field]] = field(default=tuple, compare=False, repr=False)
    _info: Any = field(default=None, compare=False, repr=False)

    @cached_property
    def fields(self) -> tuple[Field, ...]:
        """The fields of a record, in their order."""
        return tuple(self._fields())

    @property
    def cls(self) -> Any:
        """The class of a record's values, without type arguments; a dict for a TypedDict."""
        return dict if self.is_mapping else getattr(self.type, "__origin__", self.type)

    @property
    def is_mapping(self) -> bool:
        """Whether it is a TypedDict."""
        return isinstance(self._info, inspect.TypedDictType)

    @property
    def is_struct(self) -> bool:
        """Whether it is a msgspec Struct."""
        return isinstance(self._info, inspect.StructType)

    @property
    def is_frozen(self) -> bool:
        """Whether a record's fields cannot be set."""
        if self.is_struct:
            return bool(self.cls.__struct_config__.frozen)
        return issubclass(self.cls, tuple) or (not self.is_mapping and self.cls.__dataclass_params__.frozen)

    @property
    def is_constrained(self) -> bool:
        """Whether a scalar has limits, as the largest number."""
        return bool(self._info != type(self._info)())

    @property
    def members(self) -> tuple[Shape, ...]:
        """The members of a union, also of one within it; any other shape is its only one."""
        return tuple(leaf for part in self.parts for leaf in part.members) if self.form is Form.UNION else (self,)

    @property
    def nullable(self) -> bool:
        """Whether None, or any value, is among the values."""
        return None in self.values or any(member.form in (Form.ANY, Form.NULL) for member in self.members)

    @property
    def without_none(self) -> Shape:
        """The only member beside None; the shape itself if there are others."""
        others = [member for member in self.members if member.form is not Form.NULL]
        return others[0] if len(others) == 1 else self

    @property
    def scalar(self) -> Form | None:
        """The form of scalars, for an enum or literals the form of their values; None for any other shape."""
        if self.form in (Form.ENUM, Form.LITERAL):
            classes = {type(value) for value in self.values if value is not None}
            return Form.STR if classes <= {str} else Form.INT if classes == {int} else None
        if self.form is Form.UNION and {member.scalar for member in self.members} == _NUMBERS:
            return Form.FLOAT
        return self.form if self.form in SCALARS else None


@dataclass(frozen=True)
class Field:
    """A field of a record."""

    name: str
    """On the wire."""
    attribute: str
    """In Python."""
    shape: Shape
    required: bool
    default: Any
    """`msgspec.NODEFAULT` if there is none, or a function makes it."""
    is_omitted: bool
    """Whether the bytes lack the field if it has its default."""
    get: Callable[[Any], Any]
    """Gets it of a record; None if an optional one is missing in a dict."""
    may_be_unchanged: bool = False
    """Whether its default is `pipeline.changes.UNCHANGED`, for which the bytes lack it."""


SCALARS = frozenset({
    Form.BOOL, Form.INT, Form.FLOAT, Form.STR, Form.BYTES, Form.DATETIME, Form.DATE, Form.TIME, Form.TIMEDELTA,
    Form.UUID, Form.DECIMAL,
})  # fmt: skip


def shape_of(type_: Any) -> Shape:
    """The shape of *type_*. Raises `UnsupportedType` for a type that msgspec cannot look into.

    >>> shape_of(dict[str, int | None]).parts[1].without_none.form
    <Form.INT: 'int'>
    """
    try:
        return _visit(inspect.type_info(type_))
    except (TypeError, NameError, AttributeError) as error:
        raise _cannot_be_encoded(type_, error) from None


def record_fields(type_: Any) -> tuple[Field, ...]:
    """The fields of a record's type; of any other type none."""
    try:
        return shape_of(type_).fields
    except UnsupportedType:
        return ()


def _visit(info: Any) -> Shape:
    if isinstance(info, inspect.Metadata):
        return _visit(info.type)
    form, class_ = _FORMS.get(type(info), (Form.OTHER, type(info)))
    match form:
        case Form.RECORD:
            return _record(info)
        case Form.OTHER:
            return Shape(form, getattr(info, "cls", class_))
        case Form.ENUM:
            return Shape(form, info.cls, values=tuple(member.value for member in info.cls))
        case Form.LITERAL:
            return Shape(form, class_, values=tuple(info.values))
        case Form.UNION:
            return Shape(form, class_, tuple(map(_visit, info.types)))
        case Form.DICT:
            return Shape(form, class_, (_visit(info.key_type), _visit(info.value_type)))
        case Form.TUPLE:
            return Shape(form, class_, tuple(map(_visit, info.item_types)))
        case Form.LIST | Form.SET:
            return Shape(form, class_, (_visit(info.item_type),))
    return Shape(form, class_, tz=info.tz if form is Form.DATETIME else None, _info=info)


def _record(info: Any) -> Shape:
    is_struct, is_mapping = isinstance(info, inspect.StructType), isinstance(info, inspect.TypedDictType)
    omits = is_struct and getattr(info.cls, "__origin__", info.cls).__struct_config__.omit_defaults

    def read(field: inspect.Field) -> Field:
        get: Callable[[Any], Any] = attrgetter(field.name)
        if is_mapping:
            get = itemgetter(field.name) if field.required else lambda record: record.get(field.name)
        factory = field.default_factory
        default = factory() if factory in (list, dict, set) else field.default
        omitted = omits and default is not msgspec.NODEFAULT
        unchanged = not (field.required or is_mapping) and (default, factory) == (msgspec.NODEFAULT, msgspec.NODEFAULT)
        return Field(
            field.encode_name, field.name, _visit(field.type), field.required, default, omitted, get, unchanged
        )  # fmt: skip

    return Shape(
        Form.RECORD,
        info.cls,
        tag=(info.tag_field, info.tag) if is_struct and info.tag is not None else None,
        is_array=isinstance(info, inspect.NamedTupleType) or (is_struct and info.array_like),
        _fields=lambda: map(read, info.fields),
        _info=info,
    )


def _cannot_be_encoded(type_: Any, error: Exception) -> UnsupportedType:
    return UnsupportedType(f"{type_name(type_)} cannot be encoded: {error}{_tag_it(str(error))}")


def _tag_it(error: str) -> str:
    """The remedy for a union of records that msgspec cannot tell apart."""
    if "must be tagged" in error or "more than one dict-like type" in error:
        return ". Give each of them a tag, as class Order(msgspec.Struct, tag=True)"
    return ""


def type_name(type_: Any) -> str:
    """A type without its modules, for people."""
    written = type_.__name__ if isinstance(type_, type) and not hasattr(type_, "__args__") else str(type_)
    return re.sub(r"(?:\w+\.|<locals>\.)+(?=\w)", "", written)


# --- as JSON ----------------------------------------------------------------------------------------------------------


def describe(type_: Any, *, defaults: bool = False) -> Any:
    """The schema of a type, as JSON values; with *defaults*, of all fields. Raises `UnsupportedType`.

    >>> describe(dict[str, int | None])
    {'dict': ['str', {'union': ['int', 'null']}]}
    """
    shape = shape_of(type_)
    try:
        msgspec.msgpack.Decoder(type_)
    except (TypeError, NameError, AttributeError) as error:
        raise _cannot_be_encoded(type_, error) from None
    return _describe(shape, set(), defaults)


def builtins_of(value: Any) -> Any:
    """*value* in builtin types, as the defaults in a schema. Raises TypeError for other types.

    >>> builtins_of({1: [2.5, b"x"]})
    {'1': [2.5, 'eA==']}
    """
    return msgspec.to_builtins(value, str_keys=True, order="deterministic")


def _describe(shape: Shape, seen: set[Shape], defaults: bool) -> Any:
    form = shape.form.value
    match shape.form:
        case Form.RECORD:
            return _describe_record(shape, seen, defaults)
        case Form.UNION | Form.DICT | Form.TUPLE:
            return {form: [_describe(part, seen, defaults) for part in shape.parts]}
        case Form.LIST | Form.SET:
            return {form: _describe(shape.parts[0], seen, defaults)}
        case Form.ENUM:
            return {form: shape.type.__name__, "values": list(shape.values)}
        case Form.LITERAL:
            return {form: list(shape.values)}
        case Form.OTHER:
            fix = "use a msgspec Struct, a dataclass, a TypedDict, a NamedTuple, or builtin types"
            raise UnsupportedType(f"{type_name(shape.type)} cannot be encoded: {fix}")
    return form


def _describe_record(shape: Shape, seen: set[Shape], defaults: bool) -> Any:
    name = getattr(shape.type, "__name__", str(shape.type))
    if shape in seen:
        return {"record": name}
    seen.add(shape)
    described = {
        "record": name,
        "fields": [[part.name, _describe_field(part, seen, defaults)] for part in shape.fields],
    }
    array = {"array": True} if shape.is_array else {}
    return described | array | ({} if shape.tag is None else {"tag": list(shape.tag)})


def _describe_field(field: Field, seen: set[Shape], defaults: bool) -> Any:
    """The schema of a field; with its default if the bytes may lack it."""
    schema = _describe(field.shape, seen, defaults)
    if field.required:
        return schema
    if field.is_omitted:
        return {"optional": schema, "omitted": builtins_of(field.default)}
    noted = _noted(field.default) if defaults else msgspec.NODEFAULT
    return {"optional": schema} | ({} if noted is msgspec.NODEFAULT else {"default": noted})


def _noted(default: Any) -> Any:
    """*default* as checkpoints and exports return it; NODEFAULT if they cannot, as for NaN in JSON."""
    try:
        noted = msgspec.msgpack.decode(msgspec.msgpack.encode(builtins_of(default)))
        same = msgspec.json.decode(msgspec.json.encode(noted)) == noted
    except (TypeError, ValueError, OverflowError, RecursionError):
        return msgspec.NODEFAULT
    return noted if same else msgspec.NODEFAULT


def described_shape(schema: Any) -> Shape:
    """The shape in a schema from `describe`, as checkpoints keep it: a class has its name alone, and defaults are in
    builtin types.

    A schema describes a record once, and names it elsewhere: records of one name are members of a union there.

    >>> described_shape({"record": "Total", "fields": [["sum", {"optional": "int", "default": 0}]]}).fields[0].default
    0
    """
    return _Described(schema).shape(schema)


class _Described:
    def __init__(self, schema: Any) -> None:
        self._records: dict[str, list[Shape]] = {}
        """By name, all in the schema."""
        self._shapes: dict[int, Shape] = {}
        """The records by the identity of their schema."""
        self._find(schema)

    def _find(self, schema: Any) -> None:
        if isinstance(schema, list):
            parts = schema
        else:
            parts = [schema[form] for form in _NESTING if form in schema] if isinstance(schema, dict) else []
        for part in parts:
            self._find(part)
        if isinstance(schema, dict) and "fields" in schema:
            record = Shape(
                Form.RECORD,
                type(schema["record"], (), {}),
                tag=tuple(schema["tag"]) if "tag" in schema else None,
                is_array=schema.get("array", False),
                _fields=lambda: starmap(self._field, schema["fields"]),
            )
            self._records.setdefault(schema["record"], []).append(record)
            self._shapes[id(schema)] = record

    def shape(self, schema: Any) -> Shape:
        if isinstance(schema, str):
            return Shape(Form(schema), None)
        form = next((form for form in _DESCRIBED if form.value in schema), None)
        if form is None:  # a state that an older release kept otherwise
            return Shape(Form.OTHER, None)
        inner = schema[form.value]
        match form:
            case Form.RECORD if "fields" in schema:
                return self._shapes[id(schema)]
            case Form.RECORD:
                records = self._records.get(inner, ())
                return records[0] if len(records) == 1 else Shape(Form.UNION, None, tuple(records))
            case Form.UNION | Form.DICT | Form.TUPLE:
                return Shape(form, None, tuple(map(self.shape, inner)))
            case Form.LIST | Form.SET:
                return Shape(form, None, (self.shape(inner),))
        return Shape(form, None, values=tuple(inner if form is Form.LITERAL else schema["values"]))

    def _field(self, name: str, schema: Any) -> Field:
        optional = schema if isinstance(schema, dict) and "optional" in schema else {"optional": schema}
        default = optional.get("omitted", optional.get("default", msgspec.NODEFAULT))
        return Field(
            name, name, self.shape(optional["optional"]), optional is not schema, default, "omitted" in optional,
            itemgetter(name),
        )  # fmt: skip


_NESTING = ("optional", "fields", "union", "dict", "tuple", "list", "set")
_DESCRIBED = (Form.RECORD, Form.UNION, Form.DICT, Form.TUPLE, Form.LIST, Form.SET, Form.ENUM, Form.LITERAL)

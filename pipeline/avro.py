"""Avro by fastavro: one record per value, without the container's header; a type as an Avro schema.

The encoder and the decoder of plain records are compiled once for a type and its schema. A record is plain if it is a
`msgspec.Struct` of numbers, texts, bytes and booleans, or None. fastavro takes two microseconds for one, most of them
for look-ups in the schema. Invariants: the code has constants and positions in it, and nothing of a schema or a type,
not even a name. Whatever does not fit, a value or its bytes, is left to fastavro, so errors are its own.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar
from uuid import UUID

import fastavro
import msgspec
from fastavro.read import SchemaResolutionError
from fastavro.schema import SchemaParseException

from exactlyonce.pipeline.registry import Ids, PublishedSchema, SchemaCodec, Subjects, registry_of
from exactlyonce.pipeline.shape import Field, Form, Shape, UnsupportedType, shape_of, type_name

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")

FASTAVRO_TYPES = (bytes, datetime, date, time, Decimal, UUID)
_WRONG_SCHEMA = (
    SchemaParseException,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""The exceptions of msgspec and fastavro for an invalid schema."""
_SCALARS: Mapping[Form, Any] = {
    Form.NULL: "null",
    Form.BOOL: "boolean",
    Form.INT: "long",
    Form.FLOAT: "double",
    Form.STR: "string",
    Form.DATE: {"type": "int", "logicalType": "date"},
    Form.TIME: {"type": "long", "logicalType": "time-micros"},
    Form.UUID: {"type": "string", "logicalType": "uuid"},
}


class AvroCodec(SchemaCodec[T]):
    """Avro, as ``AvroCodec(Order)``: the schema is derived from the type, unless *schema* gives one.

    - *registry*: a schema registry, as a URL or as the settings of Confluent's client. A value begins with the id of
      its schema, by which it is read; a sink writes the id of this schema, which must be registered.
    - *subjects*: the subject of a sink's schema: "topic" (`<topic>-value`), "record" or "topic-record".
    - *register*: whether a sink registers its schema.
    - *ids*: where a sink writes the schema's id: "prefix", before the value, or "header", as Confluent's
      HeaderSchemaIdSerializer: its GUID, in `__value_schema_id` or `__key_schema_id`. Both are read.
    - *schema_id* is for topics shared with users of a registry that is not at hand: every value begins with a zero byte
      and this id in four bytes. A value with another id is an error.
    """

    kind: ClassVar[str] = "AVRO"

    def __init__(
        self,
        type_: TypeForm[T],
        schema: dict[str, Any] | None = None,
        schema_id: int | None = None,
        *,
        registry: str | Mapping[str, Any] | None = None,
        subjects: Subjects = "topic",
        register: bool = False,
        ids: Ids = "prefix",
    ) -> None:
        self.schema_id = schema_id
        self.registry = registry_of(registry, subjects, register, ids, schema_id)
        given = avro_schema(type_) if schema is None else schema
        try:
            self.schema: Any = _as_stored(given)
            parsed = fastavro.parse_schema(self.schema)
        except _WRONG_SCHEMA as error:
            raise UnsupportedType(f"{type_name(type_)}: the Avro schema is wrong: {error}") from None
        narrow = _has_int(parsed)
        header = b"" if schema_id is None else b"\0" + schema_id.to_bytes(4, "big")
        to_builtins, convert = msgspec.to_builtins, msgspec.convert

        def write(value: T) -> bytes:
            plain = to_builtins(value, builtin_types=FASTAVRO_TYPES)
            written = encoded(plain, parsed)
            if narrow:
                _require_valid(plain, parsed)
            return header + written

        def decode(data: bytes) -> T:
            if not data.startswith(header):
                raise ValueError(f"it begins with {data[:5]!r}, but schema id {schema_id} is {header!r}")
            value: T = convert(_read(data[len(header) :], parsed), type_)
            return value

        def decoder_from(written: Any) -> Callable[[bytes], T]:
            writer = fastavro.parse_schema(written)

            def resolve(data: bytes) -> T:
                # Written again: fastavro gives the schema's own objects for defaults, and integers as they were
                value: T = convert(_read(encoded(_read(data, writer, parsed), parsed), parsed), type_)
                return value

            return resolve

        self.decoder_from = decoder_from
        """The decoder of values of another schema, without a schema id, by Avro's resolution."""
        fast = compiled(type_, parsed, header, write, decode)
        super().__init__("avro", type_, *(fast or (write, decode)))

    @property
    def published(self) -> PublishedSchema:
        return PublishedSchema(self.kind, json.dumps(self.schema))

    @property
    def record_name(self) -> str:
        parsed: Any = fastavro.parse_schema(self.schema)
        name: str = parsed["name"] if isinstance(parsed, dict) and "name" in parsed else schema_kind(parsed)
        return name

    def decoder_of(self, writer: PublishedSchema) -> Callable[[bytes], T]:
        try:
            written, own = _self_contained(writer), _self_contained(self.published)
        except _WRONG_SCHEMA as error:
            raise ValueError(f"its Avro schema cannot be read: {error}") from None
        if problem := _name_problem(written, own):
            raise ValueError(problem)
        return self.decode if written == own else self.decoder_from(written)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "schema": self.schema}


def schema_kind(schema: Any) -> str:
    """The kind of a schema without a name.

    >>> schema_kind("string"), schema_kind({"type": "array", "items": "long"})
    ('string', 'array')
    """
    return "union" if isinstance(schema, list) else str(schema["type"] if isinstance(schema, dict) else schema)


def _name_problem(written: Any, read: Any) -> str | None:
    """The problem of two records whose names differ without their namespace, which Avro compares."""
    if not (isinstance(written, dict) and isinstance(read, dict) and written["type"] == read["type"] == "record"):
        return None
    was, aliases = written["name"].rpartition(".")[2], [read["name"], *read.get("aliases", ())]
    if was in (alias.rpartition(".")[2] for alias in aliases):
        return None
    return f"it is a {written['name']}, and {read['name']} is read: give schema= with that name, or with it as an alias"


def _self_contained(schema: PublishedSchema) -> Any:
    """*schema* with full names and without docs, with each schema that it refers to where it is first used."""
    named: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    for text in dict.fromkeys(_referred(schema)):
        part: Any = fastavro.parse_schema(json.loads(text), named)
        parts[part["name"]] = part
    return _inlined(fastavro.parse_schema(json.loads(schema.text), named), parts)


def _referred(schema: PublishedSchema) -> Iterator[str]:
    """The texts of the schemas that *schema* refers to, each after those that it refers to itself."""
    for reference in schema.references:
        yield from _referred(reference.schema)
        yield reference.schema.text


def _inlined(schema: Any, parts: dict[str, Any]) -> Any:
    """A parsed schema with *parts* in place of the first use of their names. It takes parts out."""
    if isinstance(schema, str):
        return _inlined(parts.pop(schema), parts) if schema in parts else schema
    if isinstance(schema, list):
        return [_inlined(member, parts) for member in schema]
    inlined = {name: value for name, value in schema.items() if name != "doc" and not name.startswith("__")}
    for name in ("type", "items", "values"):
        if name in inlined:
            inlined[name] = _inlined(inlined[name], parts)
    if "fields" in inlined:
        inlined["fields"] = [_inlined(field, parts) for field in inlined["fields"]]
    return inlined


def _as_stored(schema: Any) -> Any:
    """A copy of *schema* as checkpoints return it, with lists for tuples."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(schema))


def encoded(value: Any, schema: Any) -> bytes:
    """*value* by *schema*, which is parsed. Raises TypeError or ValueError if it does not fit."""
    out = BytesIO()
    try:
        fastavro.schemaless_writer(out, schema, value, disable_tuple_notation=True)
    except (ArithmeticError, AttributeError, LookupError) as error:
        raise ValueError(f"it does not fit the schema: {error}") from None
    return out.getvalue()


def _has_int(schema: Any) -> bool:
    """Whether an integer of a parsed *schema* has 32 bits.

    >>> _has_int({"type": "record", "name": "R", "fields": [{"name": "n", "type": ["null", "int"]}]})
    True
    >>> _has_int({"type": "array", "items": "long"}), _has_int({"type": "int", "logicalType": "date"})
    (False, False)
    """
    if isinstance(schema, list):
        return any(map(_has_int, schema))
    if isinstance(schema, dict):
        parts = [schema.get(part) for part in ("type", "items", "values")]
        parts += [field["type"] for field in schema.get("fields", ())]
        return "logicalType" not in schema and any(map(_has_int, parts))
    return bool(schema == "int")


def _require_valid(value: Any, schema: Any) -> None:
    """Raise ValueError unless *value* fits *schema*. fastavro would write more than 32 bits into an int."""
    try:
        fastavro.validation.validate(value, schema, disable_tuple_notation=True)  # type: ignore[call-arg]  # not in stubs
    except fastavro.validation.ValidationError as error:
        raise ValueError(f"it does not fit the schema: {error.errors[0]}") from None


def _read(data: bytes, writer: Any, reader: Any = None) -> Any:
    """The value written by schema *writer*, resolved to *reader*. Raises ValueError."""
    source = BytesIO(data)
    try:
        read = fastavro.schemaless_reader(source, writer, reader)
    except (EOFError, IndexError, SchemaResolutionError) as error:
        raise ValueError(f"the bytes do not fit the schema: {str(error) or 'they end too early'}") from None
    if source.read(1):
        raise ValueError("bytes are left over: was it written with another schema, or with a schema id?")
    return read


def avro_schema(type_: Any) -> Any:
    """The Avro schema of a type. Raises `UnsupportedType` for a type without a single Avro form.

    >>> avro_schema(list[int | None])
    {'type': 'array', 'items': ['long', 'null']}
    """
    try:
        return _schema(shape_of(type_), set())
    except _NoForm as error:
        raise UnsupportedType(f"{type_name(type_)} has no Avro schema of its own, give one: {error}") from None


class _NoForm(Exception):
    """The message names the part of the type and the reason."""


def _schema(shape: Shape, named: set[str]) -> Any:
    match shape.form:
        case Form.RECORD:
            return _record(shape, named)
        case Form.UNION:
            if sum(member.is_struct for member in shape.parts) > 1:
                raise _NoForm("Avro would guess among several records in a union")
            return [_schema(member, named) for member in shape.parts]
        case Form.DICT if shape.parts[0].form is Form.STR:
            return {"type": "map", "values": _schema(shape.parts[1], named)}
        case Form.LIST | Form.SET:
            return {"type": "array", "items": _schema(shape.parts[0], named)}
        case Form.ENUM | Form.LITERAL:
            return "string" if isinstance(shape.values[0], str) else "long"
        case Form.BYTES if shape.type is bytes:
            return "bytes"
        case Form.DATETIME if shape.tz is not None:
            return {"type": "long", "logicalType": "timestamp-micros" if shape.tz else "local-timestamp-micros"}
        case Form.DATETIME:
            raise _NoForm("a datetime may have a time zone or none: make it Annotated[datetime, msgspec.Meta(tz=True)]")
        case form if form in _SCALARS:
            return _SCALARS[form]
    name = type_name(shape.type) if shape.form in (Form.BYTES, Form.OTHER) else shape.form.value
    raise _NoForm(f"{name} could be written in several ways, or in none")


def _record(shape: Shape, named: set[str]) -> Any:
    name = re.sub(r"\W", "_", type_name(shape.type))
    if shape.is_array:
        raise _NoForm(f"{name} is written by position, and Avro's records have names")
    if name in named:
        return name
    named.add(name)
    tag = [] if shape.tag is None else [{"name": shape.tag[0], "type": "string"}]
    return {"type": "record", "name": name, "fields": tag + [_field(field, named) for field in shape.fields]}


def _field(field: Field, named: set[str]) -> dict[str, Any]:
    schema = _schema(field.shape, named)
    if isinstance(schema, list) and field.default is None:
        schema = ["null", *(member for member in schema if member != "null")]  # a default is of the first member
    written = {"name": field.name, "type": schema}
    if field.default is None or (isinstance(field.default, bool | int | float | str) and not isinstance(schema, list)):
        written["default"] = field.default
    return written


# --- plain records ----------------------------------------------------------------------------------------------------

_AVRO_TYPES: Mapping[Any, tuple[str, ...]] = {
    int: ("long", "int"),
    str: ("string",),
    bytes: ("bytes",),
    bool: ("boolean",),
    float: ("double",),
}
"""By the class of a field's values."""
_TABLE_BITS = 14
_LONG_BYTES_MAX = 10
"""The last of them has one bit of the 64."""


class _PlainField(NamedTuple):
    avro: str
    python: type
    null: int | None
    """The place of null in its union; None: it is no union."""


def compiled(
    type_: Any, schema: Any, header: bytes, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]
) -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]] | None:
    """*encode* and *decode*, faster; None: *type_* by *schema*, which is parsed, is no plain record.

    *header* precedes every value.
    """
    fields = _plain_fields(type_, schema)
    if fields is None:
        return None
    double, (last, more) = struct.Struct("<d"), _tables()
    namespace: dict[str, Any] = {
        "Record": type_, "names": type_.__struct_fields__, "astuple": msgspec.structs.astuple, "header": header,
        "encode_any": encode, "decode_any": decode, "double_at": double.unpack_from, "bytes_of_double": double.pack,
        "last": last, "more": more, **{f"type{number}": field.python for number, field in enumerate(fields)},
    }  # fmt: skip
    lines = [*_encoder_code(fields), *_decoder_code(fields, len(header), positional=_is_positional(type_))]
    exec("\n".join(lines), namespace)
    return namespace["encode"], namespace["decode"]


# --- what is plain ----------------------------------------------------------------------------------------------------


def _plain_fields(type_: Any, schema: Any) -> list[_PlainField] | None:
    if not (
        isinstance(type_, type) and issubclass(type_, msgspec.Struct) and type_.__init__ is msgspec.Struct.__init__
    ):
        return None
    try:
        shape = shape_of(type_)
    except UnsupportedType:
        return None
    if shape.tag is not None or shape.is_array or any(field.is_omitted for field in shape.fields):
        return None
    if not isinstance(schema, dict) or schema.get("type") != "record":
        return None
    if [field.name for field in shape.fields] != [field["name"] for field in schema["fields"]]:
        return None
    fields = [
        _plain_field(field.shape, read["type"]) for field, read in zip(shape.fields, schema["fields"], strict=True)
    ]
    return [field for field in fields if field is not None] if None not in fields else None


def _plain_field(shape: Shape, schema: Any) -> _PlainField | None:
    null = None
    if len(shape.members) == 2 and isinstance(schema, list) and len(schema) == 2 and "null" in schema:
        null = schema.index("null")
        shape, schema = shape.without_none, schema[1 - null]
    if schema not in _AVRO_TYPES.get(shape.type, ()) or shape.is_constrained:
        return None
    return _PlainField(schema, shape.type, null)


def _is_positional(type_: Any) -> bool:
    return bool(type_.__match_args__ == type_.__struct_fields__)


# --- encoding ---------------------------------------------------------------------------------------------------------


def _encoder_code(fields: list[_PlainField]) -> Iterator[str]:
    values = "".join(f"v{number}, " for number in range(len(fields)))
    yield "def encode(value):"
    yield "    try:"
    yield "        if type(value) is Record:"
    yield f"            {values}= astuple(value)" if fields else "            pass"
    parts = ["header"]
    for number, field in enumerate(fields):
        v = f"v{number}"
        check = f"type({v}) is not type{number}"
        if field.null is not None:
            check = f"{v} is not None and {check}"
        yield f"            if {check}: return encode_any(value)"
        lines, part = _writing_code(v, field.avro)
        if field.null is None:
            yield from (f"            {line}" for line in lines)
            parts.append(part)
            continue
        present, absent = bytes([2 * (1 - field.null)]), bytes([2 * field.null])
        yield f"            if {v} is None: p{number} = {absent!r}"
        yield "            else:"
        yield from (f"                {line}" for line in lines)
        yield f"                p{number} = {present!r} + {part}"
        parts.append(f"p{number}")
    yield f"            return {' + '.join(parts)}"
    yield "    except Exception: pass"
    yield "    return encode_any(value)"


def _writing_code(v: str, avro: str) -> tuple[list[str], str]:
    """The lines before, and the expression of the bytes of the variable *v*."""
    if avro in ("int", "long"):
        zigzag, bits = f"{v} = {v} << 1 if {v} >= 0 else ~({v} << 1)", 32 if avro == "int" else 64
        return [zigzag, f"if {v} >> {bits}: return encode_any(value)"], f"({_unsigned(v)})"
    if avro == "boolean":
        return [], rf"(b'\1' if {v} else b'\0')"
    if avro == "double":
        return [], f"bytes_of_double({v})"
    length = f"n{v}"
    lines = [f"{v} = {v}.encode()"] if avro == "string" else []
    return [*lines, f"{length} = len({v}) << 1"], f"({_unsigned(length)}) + {v}"


def _unsigned(v: str) -> str:
    """The expression of the bytes of *v*, which has no sign and up to 64 bits."""
    bits, low = _TABLE_BITS, (1 << _TABLE_BITS) - 1
    cases, before = [], ""
    for shift in range(0, 64, bits):
        rest = f"{v} >> {shift}" if shift else v
        cases.append(f"{before}last[{rest}]" + (f" if {v} < {1 << shift + bits}" if shift + bits < 64 else ""))
        before += f"more[{rest} & {low}] + "
    return " else ".join(cases)


@cache
def _tables() -> tuple[list[bytes], list[bytes]]:
    """The last bytes of a number, by its last 14 bits; and two that others follow."""
    numbers = range(1 << _TABLE_BITS)
    last = [bytes([number]) if number < 128 else bytes([number & 127 | 128, number >> 7]) for number in numbers]
    return last, [bytes([number & 127 | 128, number >> 7 | 128]) for number in numbers]


# --- decoding ---------------------------------------------------------------------------------------------------------


def _decoder_code(fields: list[_PlainField], start: int, *, positional: bool) -> Iterator[str]:
    yield "def decode(data):"
    yield "    try:"
    yield f"        i = {start}"
    if start:
        yield "        if not data.startswith(header): return decode_any(data)"
    for number, field in enumerate(fields):
        v = f"v{number}"
        lines = _reading_code(v, field.avro)
        if field.null is None:
            yield from (f"        {line}" for line in lines)
            continue
        yield f"        if data[i] == {2 * field.null}: {v} = None; i += 1"
        yield f"        elif data[i] == {2 * (1 - field.null)}:"
        yield "            i += 1"
        yield from (f"            {line}" for line in lines)
        yield "        else: return decode_any(data)"
    values = "".join(f"v{number}, " for number in range(len(fields)))
    made = f"Record({values})" if positional else f"Record(**dict(zip(names, ({values}))))"
    yield f"        if i == len(data): return {made}"
    yield "    except Exception: pass"
    yield "    return decode_any(data)"


def _reading_code(v: str, avro: str) -> Iterator[str]:
    if avro == "boolean":
        yield f"{v} = data[i]"
        yield f"if {v} > 1: return decode_any(data)"
        yield f"{v} = {v} == 1; i += 1"
    elif avro == "double":
        yield f"{v}, = double_at(data, i); i += 8"
    elif avro in ("int", "long"):
        yield from _unsigned_code(v)
        yield f"{v} = ~({v} >> 1) if {v} & 1 else {v} >> 1"
    else:
        yield from _unsigned_code("n")
        yield "if n & 1: return decode_any(data)"
        yield "n = i + (n >> 1)"
        yield f"{v} = data[i:n]{'.decode()' if avro == 'string' else ''}; i = n"


def _unsigned_code(v: str) -> Iterator[str]:
    """A number without a sign: each byte but the last has its highest bit set, and seven bits of the number."""
    yield f"{v} = data[i]"
    yield f"if {v} < 128: i += 1"
    yield "else:"
    indent, terms, marks = "    ", "", 128
    for place in range(1, _LONG_BYTES_MAX):
        terms += f" + (b{place} << {7 * place})"
        yield f"{indent}b{place} = data[i + {place}]"
        limit = 128 if place < _LONG_BYTES_MAX - 1 else 2
        yield f"{indent}if b{place} < {limit}: {v} += {terms.removeprefix(' + ')} - {marks}; i += {place + 1}"
        yield f"{indent}else:"
        marks += 128 << 7 * place
        indent += "    "
    yield f"{indent}return decode_any(data)"

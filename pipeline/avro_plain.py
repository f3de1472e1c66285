"""The encoder and the decoder of plain records in Avro, compiled once for a type and its schema.

A record is plain if it is a `msgspec.Struct` of numbers, texts, bytes and booleans, or None. fastavro takes two
microseconds for one, most of them for look-ups in the schema.

Invariants: the code has constants and positions in it, and nothing of a schema or a type, not even a name. Whatever
does not fit, a value or its bytes, is left to the functions that were given, so errors are theirs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import msgspec

from exactlyonce.pipeline.shape import Shape, UnsupportedType, shape_of

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


class _Field(NamedTuple):
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
    fields = _fields(type_, schema)
    if fields is None:
        return None
    double, (last, more) = struct.Struct("<d"), _tables()
    namespace: dict[str, Any] = {
        "Record": type_, "names": type_.__struct_fields__, "astuple": msgspec.structs.astuple, "header": header,
        "encode_any": encode, "decode_any": decode, "double_at": double.unpack_from, "bytes_of_double": double.pack,
        "last": last, "more": more, **{f"type{number}": field.python for number, field in enumerate(fields)},
    }  # fmt: skip
    lines = [*_encoder(fields), *_decoder(fields, len(header), positional=_is_positional(type_))]
    exec("\n".join(lines), namespace)
    return namespace["encode"], namespace["decode"]


# --- what is plain ----------------------------------------------------------------------------------------------------


def _fields(type_: Any, schema: Any) -> list[_Field] | None:
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
    fields = [_field(field.shape, read["type"]) for field, read in zip(shape.fields, schema["fields"], strict=True)]
    return [field for field in fields if field is not None] if None not in fields else None


def _field(shape: Shape, schema: Any) -> _Field | None:
    null = None
    if len(shape.members) == 2 and isinstance(schema, list) and len(schema) == 2 and "null" in schema:
        null = schema.index("null")
        shape, schema = shape.without_none, schema[1 - null]
    if schema not in _AVRO_TYPES.get(shape.type, ()) or shape.is_constrained:
        return None
    return _Field(schema, shape.type, null)


def _is_positional(type_: Any) -> bool:
    return bool(type_.__match_args__ == type_.__struct_fields__)


# --- encoding ---------------------------------------------------------------------------------------------------------


def _encoder(fields: list[_Field]) -> Iterator[str]:
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
        lines, part = _written(v, field.avro)
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


def _written(v: str, avro: str) -> tuple[list[str], str]:
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


def _decoder(fields: list[_Field], start: int, *, positional: bool) -> Iterator[str]:
    yield "def decode(data):"
    yield "    try:"
    yield f"        i = {start}"
    if start:
        yield "        if not data.startswith(header): return decode_any(data)"
    for number, field in enumerate(fields):
        v = f"v{number}"
        lines = _read(v, field.avro)
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


def _read(v: str, avro: str) -> Iterator[str]:
    if avro == "boolean":
        yield f"{v} = data[i]"
        yield f"if {v} > 1: return decode_any(data)"
        yield f"{v} = {v} == 1; i += 1"
    elif avro == "double":
        yield f"{v}, = double_at(data, i); i += 8"
    elif avro in ("int", "long"):
        yield from _unsigned_read(v)
        yield f"{v} = ~({v} >> 1) if {v} & 1 else {v} >> 1"
    else:
        yield from _unsigned_read("n")
        yield "if n & 1: return decode_any(data)"
        yield "n = i + (n >> 1)"
        yield f"{v} = data[i:n]{'.decode()' if avro == 'string' else ''}; i = n"


def _unsigned_read(v: str) -> Iterator[str]:
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

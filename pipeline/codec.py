"""Codecs turn values into bytes and back.

`encode` and `decode` may be mapped over a batch: they are msgspec's own methods where possible, with no Python frame
per record. Both raise with a message that names the field.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import msgspec

from exactlyonce.pipeline import hints, shape

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")


class Ignored(ValueError):
    """Raised by `decode` of a record that is to be left out in silence, whatever on_error= is."""


@dataclass(frozen=True, eq=False)
class Codec(Generic[T]):
    """An encoding of values of one type. One of your own: ``Codec("csv", Row, encode=to_csv, decode=from_csv)``.

    `decode` raises ValueError for bytes that it cannot read, and both raise OSError or `Unavailable` for an outage.
    """

    name: str
    type: Any
    encode: Callable[[T], bytes]
    decode: Callable[[bytes], T]
    ignores_null: ClassVar[bool] = False
    """Whether a null value of Kafka is left out in silence."""

    def describe(self) -> dict[str, Any]:
        """The name and schema, as JSON values in manifests."""
        try:
            described = shape.describe(self.type)
        except shape.UnsupportedType:  # only this codec can describe the type
            described = shape.type_name(self.type)
        return {"codec": self.name, "schema": described}


class JsonCodec(Codec[T]):
    """JSON, checked against the type: a missing or wrong field is an error that names it.

    >>> JsonCodec(dict[str, int]).encode({"a": 1})
    b'{"a":1}'
    """

    def __init__(self, type_: TypeForm[T]) -> None:
        described = msgspec.json.encode(shape.describe(type_))
        has_floats = b'"float"' in described or b'"any"' in described
        super().__init__("json", type_, _finite if has_floats else _encode_json, msgspec.json.Decoder(type_).decode)


_encode_json = msgspec.json.Encoder().encode


def _finite(value: Any) -> bytes:
    encoded = _encode_json(value)
    require_finite(value, encoded)
    return encoded


def require_finite(value: Any, encoded: bytes) -> None:
    """Raise ValueError if a float in *value* became null in *encoded*, for want of a number in JSON.

    >>> require_finite([1.5, float("nan")], b"[1.5,null]")
    Traceback (most recent call last):
        ...
    ValueError: it holds nan, for which JSON has no number
    """
    if b"null" not in encoded:
        return
    with suppress(OverflowError):  # of an int beyond 64 bits
        if not _NOT_FINITE.search(_encode_msgpack(value)):
            return
    _refuse_nan(msgspec.to_builtins(value, builtin_types=(bytes, Decimal, msgspec.Raw)))


_encode_msgpack = msgspec.msgpack.Encoder().encode
_NOT_FINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")
"""The first bytes of a NaN or an infinity in MessagePack: a quick test, with false positives."""


def _refuse_nan(value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"it holds {value!r}, for which JSON has no number")
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple | set | frozenset):
        return
    for item in value:
        _refuse_nan(item)


class BytesCodec(Codec[bytes]):
    """Bytes as they are."""

    def __init__(self) -> None:
        super().__init__("bytes", bytes, b"".__add__, b"".__add__)  # the same object again; refuses all but bytes


class StrCodec(Codec[str]):
    """Text in UTF-8."""

    def __init__(self) -> None:
        super().__init__("str", str, str.encode, bytes.decode)


def codec_for(type_: TypeForm[T] | Codec[T]) -> Codec[Any]:
    """The codec for a type: bytes as they are, text in UTF-8, all else JSON. A codec is its own."""
    if isinstance(type_, Codec):
        return type_
    plain = hints.without_none(type_)
    if plain is bytes:
        return BytesCodec()
    return StrCodec() if plain is str else JsonCodec(type_)

"""The values of a stream as sinks encode them; those of `Record` without their keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, get_args, get_origin

from exactlyonce.pipeline import hints, shape
from exactlyonce.pipeline.codec import Codec
from exactlyonce.pipeline.records import Record


def holds_records(type_: Any) -> bool:
    """Whether a stream of the type has records with keys."""
    return type_ is Record or get_origin(type_) is Record


def value_type(type_: Any) -> Any:
    """The type of the values of a stream of *type_*.

    >>> value_type(Record[int]), value_type(int)
    (<class 'int'>, <class 'int'>)
    """
    return (get_args(type_) or (Any,))[0] if holds_records(type_) else type_


def codec_problems(codec: Callable[[Any], Codec[Any]], type_: Any) -> Iterator[str]:
    """The reasons why a stream of *type_* cannot be encoded by *codec*, which makes the codec for a type."""
    try:
        encoded = hints.without_none(codec(type_).type)
    except shape.UnsupportedType as error:
        yield str(error)
        return
    held = hints.without_none(value_type(type_))
    if isinstance(encoded, type) and isinstance(held, type) and encoded not in held.__mro__:
        yield f"value= encodes {shape.type_name(encoded)}, and the stream is of {shape.type_name(held)}"

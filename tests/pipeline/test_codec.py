"""Codecs: what one writes, the same one reads."""

from __future__ import annotations

import enum
from datetime import date, datetime, timezone
from decimal import Decimal
from typing import Any, NamedTuple, TypedDict
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactlyonce.pipeline.codec import BytesCodec, Codec, JsonCodec, StrCodec, codec_for
from exactlyonce.pipeline.records import Record
from exactlyonce.pipeline.shape import UnsupportedType


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Place(NamedTuple):
    x: int
    y: float


class Note(TypedDict):
    text: str


class Thing(msgspec.Struct):
    id: int
    colour: Colour
    place: Place
    notes: list[Note]
    day: date
    at: datetime
    price: Decimal
    key: UUID
    raw: bytes
    parts: dict[str, int | None]
    parent: Thing | None = None


things: st.SearchStrategy[Thing] = st.builds(
    Thing, id=st.integers(-(2**63), 2**63 - 1), colour=st.sampled_from(Colour),
    place=st.builds(Place, st.integers(-5, 5), st.floats(allow_nan=False, allow_infinity=False)),
    notes=st.lists(st.fixed_dictionaries({"text": st.text()}), max_size=2),
    at=st.datetimes(timezones=st.just(timezone.utc)),
    price=st.decimals(allow_nan=False, allow_infinity=False, places=2), raw=st.binary(), parent=st.none(),
)  # fmt: skip


@given(things, st.none() | things)
def test_json_gives_back_every_supported_type(thing: Thing, parent: Thing | None) -> None:
    codec = JsonCodec(Thing)
    thing.parent = parent
    assert codec.decode(codec.encode(thing)) == thing


def test_json_names_the_field_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"Expected `int \| null`, got `str` - at `\$\[0\]\.parts"):
        JsonCodec(list[Thing]).decode(b'[{"id": 1, "parts": {"a": "x"}, "colour": "red", "place": [1, "x"]}]')
    with pytest.raises(ValueError, match="missing required field `id`"):
        JsonCodec(Thing).decode(b"{}")


@given(st.binary())
def test_bytes_pass_as_the_same_object(data: bytes) -> None:
    codec = BytesCodec()
    assert codec.decode(data) is data
    assert codec.encode(data) is data
    with pytest.raises(TypeError):
        codec.encode("text")  # type: ignore[arg-type]  # it is wrong on purpose


@given(st.text(st.characters(codec="utf-8")))
def test_text_is_utf_8(text: str) -> None:
    codec = StrCodec()
    assert codec.decode(codec.encode(text)) == text
    with pytest.raises(UnicodeDecodeError):
        codec.decode(b"\xff")


@pytest.mark.parametrize(
    ("type_", "name"),
    [(bytes, "bytes"), (bytes | None, "bytes"), (str, "str"), (int, "json"), (Thing, "json"), (Thing | None, "json")],
)
def test_the_codec_of_a_type(type_: Any, name: str) -> None:
    assert codec_for(type_).name == name


def test_a_codec_of_ones_own_is_its_own_codec() -> None:
    class Row:
        pass

    codec = Codec("rows", Row, encode=lambda row: b"row", decode=lambda data: Row())
    assert codec_for(codec) is codec
    assert codec.describe() == {"codec": "rows", "schema": "Row"}


@pytest.mark.parametrize("type_", [complex, object(), list[complex], dict[str, type]])
def test_json_refuses_what_it_cannot_write(type_: Any) -> None:
    with pytest.raises(UnsupportedType):
        JsonCodec(type_)


class Reading(msgspec.Struct):
    at: str | None
    parts: dict[str, tuple[float, ...]]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_json_has_not_is_refused(number: float) -> None:
    """A number without a JSON form would be written as null, which is another value, at any depth. None stays null."""
    assert JsonCodec(Reading).encode(Reading(None, {"x": (1.5,)})) == b'{"at":null,"parts":{"x":[1.5]}}'
    assert JsonCodec(Any).encode([msgspec.Raw(b"null"), None]) == b"[null,null]"
    cases: list[tuple[Codec[Any], Any]] = [
        (JsonCodec(Reading), Reading("noon", {"x": (1.5, number)})),
        (JsonCodec(Any), {"x": [number]}),
    ]
    for codec, value in cases:
        with pytest.raises(ValueError, match=rf"it holds {number}, for which JSON has no number"):
            codec.encode(value)


def test_a_number_that_json_has_not_beside_what_messagepack_has_not() -> None:
    """Such numbers are looked for in MessagePack, which has no int of more than 64 bits."""
    assert JsonCodec(Any).encode([1 << 70, None]) == b"[1180591620717411303424,null]"
    with pytest.raises(ValueError, match="it holds nan"):
        JsonCodec(Any).encode([1 << 70, float("nan")])


keys = st.none() | st.binary() | st.text() | st.integers(-(2**63), 2**63 - 1) | st.booleans()
headers = st.lists(st.tuples(st.text(), st.none() | st.binary())).map(tuple)


@given(keys, headers, st.none() | st.builds(Reading, st.text(), st.just({"x": (1.5,)})))
def test_a_record_crosses_a_shuffle_unchanged(
    key: object, headers: tuple[tuple[str, bytes | None], ...], value: Reading | None
) -> None:
    record = Record(value, key, 123, headers, "orders", 2, 17)
    decoder = msgspec.msgpack.Decoder(Record[Reading | None])
    assert decoder.decode(msgspec.msgpack.encode(record)) == record

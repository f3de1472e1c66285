"""The encoder: how values are written, and what it refuses, by name. No server is needed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timezone
from decimal import Decimal
from enum import Enum
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis_rows import Total, key_of, store_of

from exactlyonce import Record
from exactlyonce.sinks.redis.rows import Parts

URL = "redis://nowhere.invalid"


def rows_of(type_: Any, records: list[Any], **options: Any) -> list[bytes]:
    encoded: list[bytes] = store_of(URL, type_, **options).encoder().encode(records)
    return encoded


def arguments_of(type_: Any, record: Any, **options: Any) -> list[bytes]:
    """The argument of the script for one record, after the index of its key."""
    kind = options.get("kind", "string")
    part = Parts(rows_of(type_, [record], **{"key": lambda _: "k", **options}), kind, 10).current()
    sent = b"".join(part.arguments)
    found = []
    while sent:
        length, _, sent = sent[1:].partition(b"\r\n")
        found.append(sent[: int(length)])
        sent = sent[int(length) + 2 :]
    assert len(found) == part.argument_count
    return found if kind == "string" else found[1:]


class Colour(Enum):
    RED = "red"


class Everything(msgspec.Struct, kw_only=True):
    text: str = "ä"
    blob: bytes = b"\x00\xff"
    count: int = -(2**70)
    ratio: float = 0.5
    flag: bool = True
    nothing: int | None = None
    colour: Colour = Colour.RED
    price: Decimal = Decimal("1.10")
    id: UUID = UUID(int=7)
    at: datetime = datetime(2024, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
    several: tuple[int, ...] = (1, 2)
    inner: Total = msgspec.field(default_factory=lambda: Total("ann", 1))
    unset: int | msgspec.UnsetType = msgspec.UNSET
    renamed: int = msgspec.field(default=1, name="other-name")


WRITTEN = {
    b"text": "ä".encode(), b"blob": b"\x00\xff", b"count": b"-1180591620717411303424", b"ratio": b"0.5",
    b"flag": b"true", b"colour": b"red", b"price": b"1.10", b"id": b"00000000-0000-0000-0000-000000000007",
    b"at": b"2024-01-02T03:04:05Z", b"several": b"[1,2]", b"inner": b'{"customer":"ann","sum":1,"note":null}',
    b"other-name": b"1",
}  # fmt: skip


def test_fields_are_written_as_text() -> None:
    count, *rest = arguments_of(Everything, Everything(), kind="hash")
    fields = dict(zip(rest[:-2:2], rest[1:-2:2], strict=True))
    assert fields == WRITTEN
    assert (int(count), rest[-2:]) == (2 * len(WRITTEN), [b"1", b"nothing"])
    count, *rest = arguments_of(Everything, Everything(), kind="stream")
    assert dict(zip(rest[::2], rest[1::2], strict=True)) == WRITTEN


def test_defaults_are_written() -> None:
    """JSON would omit them, but the hash may hold another value."""

    class Omitting(msgspec.Struct, omit_defaults=True, tag="it", tag_field="type"):
        a: int = 1

    assert arguments_of(Omitting, Omitting(), kind="hash") == [b"4", b"type", b"it", b"a", b"1", b"0"]


@dataclass
class Plain:
    a: int


class Tuple(NamedTuple):
    a: int


@pytest.mark.parametrize("record", [Plain(1), Tuple(1), {"a": 1}], ids=str)
def test_records_of_all_kinds_have_fields(record: Any) -> None:
    type_ = dict[str, int] if isinstance(record, dict) else type(record)
    assert arguments_of(type_, record, kind="hash") == [b"2", b"a", b"1", b"0"]


def test_none_deletes_a_key() -> None:
    assert arguments_of(Total | None, None) == []
    assert arguments_of(Total | None, None, kind="hash") == [b"-1"]
    with pytest.raises(ValueError, match="value: None cannot be written to a stream"):
        arguments_of(Total | None, None, kind="stream")


@pytest.mark.parametrize(
    ("key", "written"), [("ä", "ä".encode()), (b"\xff", b"\xff"), (7, b"7"), (("a", 1), b'["a",1]')]
)
def test_keys_are_text_or_bytes_or_json(key: object, written: bytes) -> None:
    for type_, key_of_it in ((int, lambda _: key), (Record[int], None)):
        record: Any = 1 if type_ is int else Record(1, key)
        part = Parts(rows_of(type_, [record], key=key_of_it), "string", 10).current()
        assert part.keys == [written]


class Refused(NamedTuple):
    message: str
    type: Any
    record: Any
    options: dict[str, Any] = {}  # noqa: RUF012 - read only


wrong: Any = Total
"""It takes what its types forbid."""
REFUSED = [
    Refused("key: it is None", Record[int], Record(1), {"key": None}),
    Refused("key: it has '\\\\ud800' at 1", str, "a", {"key": lambda _: "a\ud800"}),
    Refused("key: .* begins with exactlyonce_ledger:", str, "a", {"key": lambda _: "exactlyonce_ledger:shop:x"}),
    Refused("value: it has '\\\\ud800' at 0", str, "\ud800", {"key": lambda _: "k"}),
    Refused("note: it has '\\\\udfff' at 2", Total, Total("a", 1, "no\udfff"), {"kind": "hash"}),
    Refused("sum: it holds nan, for which JSON", Total, wrong("a", math.nan), {"kind": "hash"}),
    Refused("sum: it holds -inf, for which JSON", Total, wrong("a", -math.inf), {"kind": "stream"}),
    Refused("note: it holds inf, for which JSON", Total, wrong("a", 1, {"x": [math.inf]}), {"kind": "hash"}),
    Refused("key: it holds nan, for which JSON", str, "a", {"key": lambda _: ("a", math.nan)}),
    Refused("note: .*unsupported", Total, wrong("a", 1, object()), {"kind": "hash"}),
    Refused("1: the name of a field is text, not int", dict, {1: 2}, {"kind": "hash", "key": str}),
    Refused("int has no fields", Total, 3, {"kind": "hash", "key": str}),
    Refused("1 to 3,000 fields, not 0", dict[str, int], {}, {"kind": "stream", "key": str}),
    Refused(
        "not 3,001", dict[str, int], dict.fromkeys(map(str, range(3001)), 1), {"kind": "stream", "key": lambda _: "k"}
    ),
    Refused("lacks the hash tag {shop}", Total, Total("a", 1), {"hash_tag": "shop"}),
    Refused("lacks the hash tag {shop}", str, "a", {"hash_tag": "shop", "key": lambda _: "{}{shop}"}),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.message)
def test_what_the_server_could_not_take_is_refused(case: Refused) -> None:
    with pytest.raises((ValueError, TypeError), match=case.message):
        rows_of(case.type, [case.record], **{"key": key_of if case.type is Total else str, **case.options})


@given(
    st.lists(st.tuples(st.binary(max_size=5), st.binary(max_size=9) | st.none()), max_size=30),
    st.integers(1, 7), st.integers(1, 9), st.integers(0, 30),
)  # fmt: skip
def test_parts(rows: list[tuple[bytes, bytes | None]], rows_max: int, chunk_rows: int, applied: int) -> None:
    encoded = rows_of(Record[bytes], [Record(value, key) for key, value in rows], key=None)
    chunks = [b"".join(encoded[at : at + chunk_rows]) for at in range(0, len(encoded), chunk_rows)]
    parts, found, first = Parts(chunks, "string", rows_max), dict[bytes, bool](), min(applied, len(rows))
    parts.advance(first)
    while True:
        part = parts.current()
        assert (part.first, part.rows <= rows_max) == (first, True)
        found |= {key: number < part.argument_count for number, key in enumerate(part.keys)}
        first = part.after
        if part.is_last:
            break
        parts.advance(first)
    assert first == len(rows)
    assert found == {key: value is not None for key, value in rows[min(applied, len(rows)) :]}

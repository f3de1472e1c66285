"""Records with their coordinates."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from exactlyonce.pipeline.records import Record


class Order(msgspec.Struct):
    id: int


keys = st.none() | st.binary() | st.text() | st.integers(-(2**63), 2**63 - 1) | st.booleans()
headers = st.lists(st.tuples(st.text(), st.none() | st.binary())).map(tuple)


@given(keys, headers, st.none() | st.builds(Order, st.integers(0, 9)))
def test_a_record_crosses_a_shuffle_unchanged(
    key: object, headers: tuple[tuple[str, bytes | None], ...], value: Order | None
) -> None:
    """Encoded and decoded by its type, a record has the same typed value, key, headers and coordinates."""
    record = Record(value, key, 123, headers, "orders", 2, 17)
    decoder = msgspec.msgpack.Decoder(Record[Order | None])
    assert decoder.decode(msgspec.msgpack.encode(record)) == record

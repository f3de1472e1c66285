"""Records that cross from worker to worker come out as they went in; one that cannot is named."""

from __future__ import annotations

import msgspec
import pytest

from exactlyonce.engines.batch_codec import BatchCodec, Coordinates
from exactlyonce.engines.operators import Batch
from exactlyonce.pipeline.errors import RecordError


class Price(msgspec.Struct):
    """A record with a float."""

    amount: float


def batch(*records: object) -> Batch:
    origins = [Coordinates("prices", 3, offset) for offset in range(len(records))]
    return Batch(list(records), origins, [b"k"] * len(records))


def test_a_batch_comes_out_as_it_went_in() -> None:
    """Records, keys and coordinates are those that were sent; an int in a float field has become a float."""
    codec = BatchCodec(Price)
    decoded = codec.decode(codec.encode(batch(Price(1.5), Price(2))))
    assert decoded.records == [Price(1.5), Price(2.0)]
    assert type(decoded.records[1].amount) is float
    assert decoded.keys == [b"k", b"k"]
    assert decoded.origins == [Coordinates("prices", 3, 0), Coordinates("prices", 3, 1)]


def test_a_record_of_another_type_is_named() -> None:
    """The message has the type, the field and the coordinates of the record that does not fit."""
    codec = BatchCodec(Price)
    frame = codec.encode(batch(Price(1.0), Price("dear")))  # type: ignore[arg-type]  # what a checker would refuse
    with pytest.raises(RecordError, match=r"no.* valid Price: .*got `str`.*\$\.amount.*prices\[3\] offset 1"):
        codec.decode(frame)


def test_a_record_that_cannot_be_encoded_is_named() -> None:
    """So has that of a record which no encoding exists for."""
    with pytest.raises(RecordError, match=r"prices\[3\] offset 1"):
        BatchCodec(Price).encode(batch(Price(1.0), object()))

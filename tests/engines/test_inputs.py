"""Records cross between workers unchanged, one that cannot is named; a few records of a source gather."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import pytest

from exactlyonce.engines.local.inputs import Slices, SourceInput, SourceTrigger
from exactlyonce.engines.local.pace import GATHER_S, slice_pace
from exactlyonce.engines.runtime.activity import Activity
from exactlyonce.engines.runtime.batch import Batch
from exactlyonce.engines.runtime.batch_codec import BatchCodec, Coordinates
from exactlyonce.engines.runtime.signals import Barrier
from exactlyonce.engines.runtime.source_decoder import SourceDecoder
from exactlyonce.pipeline.errors import RecordError

if TYPE_CHECKING:
    from exactlyonce.checkpoint.records.manifest import SourceOffset
    from exactlyonce.connectors.source import Readable, SourceReader


class Price(msgspec.Struct):
    amount: float


def batch(*records: object) -> Batch:
    origins = [Coordinates("prices", 3, offset) for offset in range(len(records))]
    return Batch(list(records), origins, [b"k"] * len(records))


def test_a_batch_comes_out_as_it_went_in() -> None:
    codec = BatchCodec(Price)
    decoded = codec.decode(codec.encode(batch(Price(1.5), Price(2))))
    assert decoded.records == [Price(1.5), Price(2.0)]
    assert type(decoded.records[1].amount) is float
    assert decoded.keys == [b"k", b"k"]
    assert list(decoded.origins) == [Coordinates("prices", 3, 0), Coordinates("prices", 3, 1)]


def test_a_record_of_another_type_is_named() -> None:
    codec = BatchCodec(Price)
    frame = codec.encode(batch(Price(1.0), Price("dear")))  # type: ignore[arg-type]  # what a checker would refuse
    with pytest.raises(RecordError, match=r"no.* valid Price: .*got `str`.*\$\.amount.*prices\[3\] offset 1"):
        codec.decode(frame)


def test_a_record_that_cannot_be_encoded_is_named() -> None:
    with pytest.raises(RecordError, match=r"prices\[3\] offset 1"):
        BatchCodec(Price).encode(batch(Price(1.0), object()))


def test_coordinates_are_made_where_they_are_looked_at() -> None:
    codec = BatchCodec(Price)
    decoded = codec.decode(codec.encode(batch(*(Price(n) for n in range(5)))))
    part = decoded.part(1, 4)
    assert (len(part.origins), part.origins[0], part.origins[-1]) == (
        3, Coordinates("prices", 3, 1), Coordinates("prices", 3, 3)
    )  # fmt: skip
    again = codec.decode(codec.encode(part))
    assert list(again.origins) == [Coordinates("prices", 3, offset) for offset in (1, 2, 3)]
    with pytest.raises(IndexError):
        part.origins[3]


class Few:
    idle = False

    def __init__(self, has: int, clock: Callable[[], float]) -> None:
        self.has, self.asked, self._clock = has, list[float](), clock

    def poll(self, records_max: int, timeout_s: float) -> list[Any]:
        self.asked.append(self._clock())
        return [Line(n) for n in range(min(self.has, records_max))]

    def positions(self) -> tuple[SourceOffset, ...]:
        return ()


class Line(NamedTuple):
    n: int


class Numbers:
    on_error = "fail"

    def decoder(self) -> Any:
        return SimpleNamespace(parts=lambda lines: [each.n for each in lines], decode=lambda n: n)


def source(has: int) -> tuple[SourceInput, Few, list[float]]:
    now = [100.0]
    reader = Few(has, lambda: now[0])
    decoder = SourceDecoder("in", cast("Readable", Numbers()))
    slices = Slices(slice_pace(), lambda: now[0])
    read = SourceInput("in", cast("SourceReader", reader), decoder, lambda _: None, Activity(), slices)
    return read, reader, now


def test_few_records_of_a_source_gather() -> None:
    read, reader, now = source(has=3)
    assert isinstance(read.next(1_000), Batch)
    assert read.next(1_000) is None
    now[0] += GATHER_S
    assert isinstance(read.next(1_000), Batch)
    assert reader.asked == [100.0, 100.0 + GATHER_S]
    reader.has = 0
    for _ in range(3):
        now[0] += GATHER_S * 0.6
        assert read.next(1_000) is None
    assert len(reader.asked) == 3, "one that has nothing is not asked all the time, either"


def test_a_source_with_a_whole_batch_is_asked_again_at_once() -> None:
    read, reader, _ = source(has=1_000_000)
    for _ in range(3):
        assert isinstance(read.next(10), Batch)
    assert len(reader.asked) == 3


def test_a_barrier_does_not_wait_for_records_to_gather() -> None:
    read, reader, _ = source(has=3)
    read.next(1_000)
    read.triggers.append(SourceTrigger(Barrier(7, 6), False, ()))
    assert read.next(1_000) == Barrier(7, 6)
    assert len(reader.asked) == 1

"""Batches that users' functions end, keep something of, or return odd things for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, get_args

import msgspec
import pytest

from exactlyonce.connectors.kafka.partitioning import PARTITIONERS
from exactlyonce.engines.runtime.activity import CHUNK_RECORDS
from exactlyonce.engines.runtime.batch import Batch, BatchCodec, Coordinates
from exactlyonce.engines.runtime.faults import DeadLetterOutput, Notes, record_error
from exactlyonce.engines.runtime.operators import (
    Filter,
    FlatMap,
    KeyBy,
    KeyPlaces,
    Map,
    Peek,
    Split,
    Stateful,
    listeners,
)
from exactlyonce.pipeline.errors import RecordError
from exactlyonce.pipeline.functions import Output
from exactlyonce.pipeline.keys import canonical_key
from exactlyonce.pipeline.lossy import in_utc
from exactlyonce.pipeline.stream import Partitioner
from exactlyonce.state.hash_map import KeyedTable
from exactlyonce.state.stored import StoredState

ANN = canonical_key("ann")
COUNT = 3 * CHUNK_RECORDS


class Basket(msgspec.Struct):
    items: list[int]


class Shown(msgspec.Struct):
    items: list[int]


class Sale(msgspec.Struct):
    at: datetime


class Mute(Exception):
    def __str__(self) -> str:
        raise KeyError


def batch_of(records: list[Any]) -> Batch:
    return Batch(records, [Coordinates("t", 0, offset) for offset in range(len(records))], [ANN] * len(records))


def pushed(operator: Any, *batches: list[Any]) -> list[Any]:
    found: list[Any] = []
    operator.downstream.append(lambda batch: found.extend(msgspec.to_builtins(batch.records)))
    for records in batches:
        operator(batch_of(records))
    return found


def stateful(fn: Callable[..., Any], type_: Any = Basket, *, flat: bool = False, reduces: bool = False) -> Stateful:
    return Stateful(
        "op",
        fn,
        KeyedTable(StoredState(operator="op", type=type_, groups=range(16), max_parallelism=16)),
        flat,
        reduces,
    )


def nothing_at(offset: int) -> Callable[..., Any]:
    return lambda *arguments: next(each for each in arguments if isinstance(each, int) and each != offset)


@pytest.mark.parametrize("offset", [0, 7, CHUNK_RECORDS - 1, CHUNK_RECORDS, COUNT - 1])
@pytest.mark.parametrize(
    "make",
    [
        lambda fn: Map("op", fn),
        lambda fn: Filter("op", fn),
        lambda fn: FlatMap("op", lambda record: [fn(record)]),
        lambda fn: Peek("op", fn),
        lambda fn: KeyBy("op", fn),
        lambda fn: Split("op", lambda record, emit: emit(fn(record))),
        lambda fn: stateful(lambda state, record: (None, fn(record))),
        lambda fn: stateful(lambda state, record: (None, [fn(record)]), flat=True),
    ],
    ids=["map", "filter", "flat_map", "peek", "key_by", "split", "stateful_map", "stateful_flat_map"],
)
def test_a_function_that_finds_nothing_cuts_nothing_short(make: Any, offset: int) -> None:
    """StopIteration is an error of its record, and no end of the batch."""
    with pytest.raises(RecordError, match=rf"'op' raised StopIteration.* on the record at t\[0\] offset {offset}\."):
        pushed(make(nothing_at(offset)), list(range(COUNT)))


def no_pair(basket: Basket | None, item: int) -> int:
    return item


@pytest.mark.parametrize("flat", [False, True])
def test_a_function_that_returns_no_pair_is_named_with_its_line(flat: bool) -> None:
    place = rf"test_users_functions.py:{no_pair.__code__.co_firstlineno} in no_pair"
    said = rf"cannot unpack .*: it must return a pair, the state and the output \({place}\), on the record at t\[0\]"
    with pytest.raises(RecordError, match=said):
        pushed(stateful(no_pair, flat=flat), [1])


@pytest.mark.parametrize(
    "make", [lambda fn: Map("op", fn), lambda fn: stateful(lambda state, record: (None, fn(record)))]
)
def test_what_asyncio_cancels_is_an_error_of_the_record(make: Any) -> None:
    """`CancelledError` is no `Exception`: the worker would end without a word, again and again."""
    with pytest.raises(RecordError, match=r"'op' raised CancelledError: gone .* offset 1\."):
        pushed(make(lambda record: record if not record else cancelled()), [0, 1])


def cancelled() -> None:
    raise asyncio.CancelledError("gone")


def generated(state: Basket | None, record: int) -> tuple[Basket, Iterator[int]]:
    return Basket([record]), (each for each in (record, record))


def test_outputs_of_a_key_may_be_generated() -> None:
    assert pushed(stateful(generated, flat=True), [1, 2]) == [1, 1, 2, 2]
    for outputs in (None, 5):
        with pytest.raises(RecordError, match=r"is not iterable.* offset 0"):
            pushed(stateful(lambda state, record, given=outputs: (None, given), flat=True), [1])


def test_any_error_has_a_text() -> None:
    assert "it cannot say what: its text raised KeyError" in str(record_error("Operator 'op'", "op", None, Mute()))
    assert "ValueError: say what, on a record. The job" in str(record_error("op", "op", None, ValueError("say what.")))
    said = str(record_error("Operator 'op'", "op", None, ValueError("caf\udce9")))
    assert said.encode()
    assert "caf\\udce9" in said


def added(basket: Basket | None, item: int) -> Basket:
    basket = basket or Basket([])
    basket.items.append(item)
    return basket


def cleared(basket: Basket | None, item: int) -> tuple[Basket, list[int]]:
    basket = basket or Basket([])
    basket.items.clear()
    basket.items.append(item)
    return basket, basket.items


GROWN = [[1], [1, 2], [1, 2, 3]]


@pytest.mark.parametrize("batches", [[[1, 2, 3]], [[1], [2], [3]]], ids=["one batch", "three"])
@pytest.mark.parametrize(
    ("fn", "flat", "expected"),
    [
        (lambda state, item: ((state := added(state, item)), state), False, [{"items": each} for each in GROWN]),
        (lambda state, item: ((state := added(state, item)), Shown(state.items)), False, [{"items": x} for x in GROWN]),
        (lambda state, item: ((state := added(state, item)), state.items), False, GROWN),
        (lambda state, item: ((state := added(state, item)), (1, state)), False, [(1, {"items": x}) for x in GROWN]),
        (
            lambda state, item: ((state := added(state, item)), {"of": state}),
            False,
            [{"of": {"items": x}} for x in GROWN],
        ),
        (lambda state, item: ((state := added(state, item)), [state]), True, [{"items": each} for each in GROWN]),
        (cleared, True, [1, 2, 3]),
        (lambda state, item: ((state := added(state, item)), len(state.items)), False, [1, 2, 3]),
    ],
    ids=["the state", "a part", "its list", "in a tuple", "in a dict", "flat", "cleared", "a number"],
)
def test_outputs_stay_what_they_were(fn: Any, flat: bool, expected: Any, batches: list[list[int]]) -> None:
    operator, kept = stateful(fn, flat=flat), list[Any]()
    operator.downstream.append(lambda batch: kept.extend(batch.records))
    assert pushed(operator, *batches) == expected
    assert msgspec.to_builtins(kept) == expected


LATE = Output("late", Any)


def sided(fn: Callable[..., Any], type_: Any = Basket, *, flat: bool = False) -> tuple[Stateful, list[Batch]]:
    operator, late = stateful(fn, type_, flat=flat), list[Batch]()
    listeners(operator, LATE.name).append(late.append)
    return operator, late


@pytest.mark.parametrize("flat", [False, True])
def test_a_function_with_state_emits_to_a_side_output(flat: bool) -> None:
    """Each emitted record has the origin of the record that the function got, also beyond a chunk."""

    def odd_apart(count: int | None, number: int, emit: Any) -> tuple[int, Any]:
        if number % 2:
            emit(number, LATE)
            emit(-number, LATE)
        return (count or 0) + 1, [count] if flat else count

    operator, late = sided(odd_apart, int, flat=flat)
    assert pushed(operator, list(range(COUNT))) == [None, *range(1, COUNT)]
    (batch,) = late
    assert batch.records == [each for number in range(1, COUNT, 2) for each in (number, -number)]
    assert [origin.offset() for origin in batch.origins] == [abs(each) for each in batch.records]


@pytest.mark.parametrize("batches", [[[1, 2, 3]], [[1], [2], [3]]], ids=["one batch", "three"])
def test_what_goes_to_a_side_output_stays_what_it_was(batches: list[list[int]]) -> None:
    """Later records of the key do not change a part of the state that was emitted."""

    def emitting(state: Basket | None, item: int, emit: Any) -> tuple[Basket, int]:
        state = added(state, item)
        emit(state.items, LATE)
        return state, item

    operator, late = sided(emitting)
    assert pushed(operator, *batches) == [1, 2, 3]
    assert [record for batch in late for record in batch.records] == GROWN


def splitting(output: Any) -> Split:
    return Split("op", lambda record, emit: emit(record, output if record else LATE))


def folding(output: Any) -> Stateful:
    return stateful(lambda state, record, emit: (None, emit(record, output if record else LATE)))


@pytest.mark.parametrize(
    ("failing", "said"),
    [
        (splitting("late"), "got 'late', and outputs= declares late"),
        (splitting(Output("other", int)), "got 'other', and outputs= declares late"),
        (folding(Output("other", int)), "got 'other', and outputs= declares late"),
        (folding(None), r"emit\(value\) names no output \(late\): return what goes to the main one"),
    ],
)
def test_an_output_that_cannot_be_emitted_to_is_an_error_of_the_record(failing: Any, said: str) -> None:
    late: list[Batch] = []
    listeners(failing, LATE.name).append(late.append)
    with pytest.raises(RecordError, match=rf"raised TypeError: .*{said}.* offset 1\."):
        pushed(failing, [0, 1])
    assert not late, "what was emitted for the record before is not sent either"


def test_a_record_that_becomes_a_state_stays_what_it_was() -> None:
    """Another branch of the stream may keep the record."""

    def first_then_added(state: Basket | None, record: Basket) -> tuple[Basket, None]:
        if state is not None:
            state.items += record.items
        return state or record, None

    records = [Basket([1]), Basket([2]), Basket([3])]
    one = stateful(first_then_added)
    one(batch_of(records))
    assert records == [Basket([1]), Basket([2]), Basket([3])]
    assert one.table.get(ANN) == Basket([1, 2, 3])
    larger = stateful(lambda kept, record: max(kept, record, key=lambda each: each.items), reduces=True)
    pushed(larger, records)
    kept: Any = larger.table.get(ANN)
    kept.items.append(4)
    assert records == [Basket([1]), Basket([2]), Basket([3])]


@pytest.mark.parametrize("is_lettered", [False, True])
def test_a_key_without_an_encoding_is_refused_with_what_has_one(is_lettered: bool) -> None:
    letters: list[Any] = []
    key_by = KeyBy("key", lambda number: {1: number} if number == 2 else number)
    if is_lettered:
        key_by.dead_letters = DeadLetterOutput("p", "key", "operator", Notes())
        key_by.dead_letters.listeners.append(lambda batch: letters.extend(batch.records))
        assert pushed(key_by, [1, 2, 3]) == [1, 3]
        said = str(letters[0].headers)
    else:
        with pytest.raises(RecordError) as raised:
            pushed(key_by, [1, 2, 3])
        said = str(raised.value)
        assert "Operator 'key' raised TypeError: a dict like this" in said
        assert "on the record at t[0] offset 1." in said
    assert "make it of None, bools, numbers" in said
    assert "dicts with text as keys" in said


@pytest.mark.parametrize("partitioner", get_args(Partitioner))
def test_a_key_that_belongs_to_another_subtask_is_refused(partitioner: str) -> None:
    """Sources give partition *p* to subtask ``p % parallelism``, and a partitioner gives a key one partition."""
    messages: dict[Any, bytes] = {"ann": b"ann", "bob": b"bob", 12: b"12", b"\xff\x01": b"\xff\x01", "é": b"\xc3\xa9"}
    owners = {key: (PARTITIONERS[partitioner](message, 6) or 0) % 3 for key, message in messages.items()}
    for subtask in range(3):
        key_by = KeyBy("key", lambda key: key, places=KeyPlaces(partitioner, 6, 3, subtask))
        own = [key for key, owner in owners.items() if owner == subtask]
        assert len(pushed(key_by, own)) == len(own)
        others = [key for key in messages if key not in own]
        said = (
            f"'key' has partitioned=, and the record at t[0] offset {len(own)} has the key {others[0]!r}, which belongs"
        )
        with pytest.raises(RecordError) as refused:
            pushed(key_by, own + others)
        assert str(refused.value).startswith(said)


@pytest.mark.parametrize("key", [None, True, 1.5, ["ann"]])
def test_a_key_that_has_no_partition_of_its_own_is_refused(key: Any) -> None:
    key_by = KeyBy("key", lambda number: key, places=KeyPlaces("murmur2_random", 4, 2, 0))
    with pytest.raises(RecordError, match="which belongs to no partition, by murmur2_random"):
        pushed(key_by, [1])


def test_points_in_time_are_in_utc_behind_a_key() -> None:
    sale = Sale(datetime.fromisoformat("2026-07-01T00:30:00+02:00"))
    shuffle = BatchCodec(Sale)
    (shuffled,) = shuffle.decode(shuffle.encode(batch_of([sale]))).records
    found: list[Any] = []
    key_by = KeyBy("key", lambda sale: sale.at.date().isoformat(), in_utc(Sale))
    key_by.downstream.append(found.append)
    key_by(batch_of([sale]))
    assert found[0].keys == [canonical_key("2026-07-01")], "the key is of the record as it was"
    (record,) = found[0].records
    assert (record.at.isoformat(), shuffled.at.isoformat()) == ("2026-06-30T22:30:00+00:00",) * 2
    assert in_utc(Basket) is None

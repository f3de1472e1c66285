"""`map_batches` on its own: calls, rows, what records keep, failures down to the record that causes them."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from exactlyonce import Context, DeadLetters, EventTime, KafkaSink, KafkaSource, Operator, Pipeline, Stream, Tumbling
from exactlyonce.engines.runtime.batch import Batch, Coordinates
from exactlyonce.engines.runtime.batch_mapper import BatchMapper
from exactlyonce.engines.runtime.faults import DeadLetterOutput, Notes
from exactlyonce.engines.runtime.order_log import Answers
from exactlyonce.errors import ConfigError, GraphError, RecordError, Unavailable, UserError
from exactlyonce.pipeline.event_time import NO_FLOOR
from exactlyonce.pipeline.graph import Kind, Node
from exactlyonce.pipeline.map_batches import BatchCalls
from exactlyonce.testing import assert_exactly_once
from exactlyonce.testing.scripted import CRASH


class Order(msgspec.Struct):
    id: int
    total: float


class Scored(msgspec.Struct):
    id: int
    score: float


def score(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.record_batch({"id": batch["id"], "score": pc.multiply(batch["total"], 2.0)})


def orders(ids: Iterable[int]) -> list[Order]:
    return [Order(id, id / 4) for id in ids]


def scored(ids: Iterable[int]) -> list[Scored]:
    return [Scored(id, id / 2) for id in ids]


class Mapped:
    """The operator with *fn*, and what it gives."""

    def __init__(
        self, fn: Callable[[Any], Any], *, dead: bool = False, max_rows: int = 4_096, taken: Any = Order,
        given: Any = Scored, asks_alone: bool = False,
    ) -> None:  # fmt: skip
        self.calls: list[int] = []
        """The rows of each."""

        def called(batch: Any) -> Any:
            self.calls.append(batch.num_rows)
            return fn(batch)

        node = Node("score", Kind.MAP_BATCHES, type=given, batch_calls=BatchCalls(max_rows))
        answers = Answers()
        answers.asks_alone = asks_alone
        self.operator = BatchMapper.made(node, called, taken, answers)
        self.batches: list[Batch] = []
        self.operator.downstream.append(self.batches.append)
        self.letters: list[Any] = []
        if dead:
            self.operator.dead_letters = DeadLetterOutput("p", "score", "operator", Notes())
            self.operator.dead_letters.listeners.append(lambda batch: self.letters.extend(batch.records))

    def __call__(self, records: list[Any]) -> list[Any]:
        """The outputs for *records*, at offsets from 0 on."""
        self.operator(Batch(records, [Coordinates("in", 0, offset) for offset in range(len(records))]))
        return [record for batch in self.batches for record in batch.records]

    @property
    def dead(self) -> list[tuple[int, str, str]]:
        """The offset, the error and its text of each letter."""
        headers = [{name: (value or b"").decode() for name, value in letter.headers} for letter in self.letters]
        names = ("dead-letter.offset", "dead-letter.error", "dead-letter.message")
        return [(int(header[names[0]]), header[names[1]], header[names[2]]) for header in headers]


# --- calls and rows ---------------------------------------------------------------------------------------------------


def test_a_function_gets_the_records_of_a_batch_in_calls_of_max_rows() -> None:
    mapped = Mapped(score, max_rows=40)
    assert mapped(orders(range(100))) == scored(range(100))
    assert (mapped.calls, len(mapped.batches)) == ([40, 40, 20], 1)


def explode(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Nothing of order 0, order 1 once, order 2 twice, and so on."""
    ids = batch["id"].to_pylist()
    rows = [row for row, id in enumerate(ids) for _ in range(id % 4)]
    return pa.record_batch({"row": rows, "id": [ids[row] for row in rows], "score": [float(row) for row in rows]})


def test_rows_keep_what_belongs_to_the_record_that_they_stem_from() -> None:
    """Its place, its time and its floor, also in the second call."""
    mapped = Mapped(explode, max_rows=3)
    places = [Coordinates("in", 0, offset) for offset in range(5)]
    mapped.operator(
        Batch(orders(range(5)), places, times=[*range(50, 55)], floors=[NO_FLOOR, 51, 52, NO_FLOOR, NO_FLOOR])
    )
    (batch,) = mapped.batches
    assert [record.id for record in batch.records] == [1, 2, 2, 3, 3, 3]
    assert [origin.offset() for origin in batch.origins] == [1, 2, 2, 3, 3, 3]
    assert (batch.times, batch.floors) == ([51, 52, 52, 53, 53, 53], [51, 52, 52, NO_FLOOR, NO_FLOOR, NO_FLOOR])


def test_records_without_fields_are_one_column() -> None:
    def halved(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch({"value": pc.divide(batch["value"], 2.0)})

    assert Mapped(halved, taken=int, given=float)([1, 2, 3]) == [0.5, 1.0, 1.5]


def test_pandas_polars_and_numpy_go_by_arrow() -> None:
    import numpy as np

    def by_pandas(batch: pa.RecordBatch) -> Any:
        frame = batch.to_pandas()
        return frame.assign(score=frame.total * 2)[["id", "score"]]

    def by_numpy(batch: pa.RecordBatch) -> Any:
        return pa.record_batch({"id": batch["id"], "score": np.multiply(batch["total"], np.float32(2))})

    assert Mapped(by_pandas)(orders(range(9))) == scored(range(9))
    assert Mapped(by_numpy)(orders(range(9))) == scored(range(9))
    polars = pytest.importorskip("polars", reason="polars NOT TESTED: it is missing")

    def by_polars(batch: pa.RecordBatch) -> Any:
        return polars.from_arrow(batch).select("id", score=polars.col("total") * 2)

    assert Mapped(by_polars)(orders(range(9))) == scored(range(9))


# --- failures ---------------------------------------------------------------------------------------------------------


def refusing(*bad: int, score: Callable[[Any], Any] = score) -> Callable[[Any], Any]:
    def refuse(batch: pa.RecordBatch) -> Any:
        if found := {*bad} & {*batch["id"].to_pylist()}:
            raise ValueError(f"{min(found)} is refused")
        return score(batch)

    return refuse


def test_a_batch_is_halved_down_to_the_records_that_make_it_fail() -> None:
    """Those beside come out once and in order; the calls are few."""
    bad = (0, 517, 1023)
    mapped = Mapped(refusing(*bad), dead=True)
    assert mapped(orders(range(1024))) == scored(id for id in range(1024) if id not in bad)
    assert mapped.dead == [(id, "ValueError", f"{id} is refused") for id in bad]
    assert [origin.offset() for origin in mapped.batches[0].origins] == [i for i in range(1024) if i not in bad]
    assert [letter.value for letter in mapped.letters] == [msgspec.json.encode(order) for order in orders(bad)]
    assert len(mapped.calls) <= 1 + 2 * 10 * len(bad)


def test_a_batch_whose_records_all_fail_has_no_outputs() -> None:
    mapped = Mapped(refusing(*range(8)), dead=True)
    assert (mapped(orders(range(8))), len(mapped.dead), len(mapped.calls)) == ([], 8, 15)


def test_without_dead_letters_the_first_record_that_fails_is_named() -> None:
    mapped = Mapped(refusing(300, 700))
    with pytest.raises(
        RecordError, match=r"'score' raised ValueError: 300 is refused \(test_map.* offset 300\. "
    ) as raised:
        mapped(orders(range(1000)))
    assert (raised.value.facts["operator"], raised.value.facts["offset"]) == ("score", 300)
    assert "--skip in:0:300" in str(raised.value)
    assert (mapped.batches, len(mapped.calls) <= 1 + 2 * 10) == ([], True)


def dropping(*bad: int) -> Callable[[Any], Any]:
    return lambda batch: score(batch.filter(pa.array([id not in bad for id in batch["id"].to_pylist()])))


def retyping(*bad: int) -> Callable[[Any], Any]:
    def retype(batch: pa.RecordBatch) -> Any:
        right, is_bad = score(batch), {*bad} & {*batch["id"].to_pylist()}
        return right.set_column(1, "score", pc.cast(right["score"], "string")) if is_bad else right

    return retype


def misplacing(*bad: int) -> Callable[[Any], Any]:
    def misplace(batch: pa.RecordBatch) -> Any:
        shift = batch.num_rows if {*bad} & {*batch["id"].to_pylist()} else 0
        return score(batch).append_column("row", pa.array(range(shift, shift + batch.num_rows)))

    return misplace


@pytest.mark.parametrize(
    ("fn", "difference"),
    [
        (dropping(5), "rows: 1 given, 0 returned, without a column `row` that names the record each is of"),
        (retyping(5), "column `score`: double wanted, string given"),
        (misplacing(5), "column `row`: 0 to 0 wanted, 1 given"),
    ],
)
def test_a_batch_that_is_not_as_declared_is_halved_as_well(fn: Callable[[Any], Any], difference: str) -> None:
    mapped = Mapped(fn, dead=True)
    assert mapped(orders(range(9))) == scored(id for id in range(9) if id != 5)
    assert mapped.dead == [(5, "BatchMismatch", difference)]
    with pytest.raises(RecordError) as raised:
        Mapped(fn)(orders(range(9)))
    assert str(raised.value) == (
        f"Operator 'score' gave another batch than schema= says: {difference}. That was for the record at in[0] offset "
        f"5. The job has stopped before it; nothing is lost. Fix the function, and run again; or leave the record out: "
        f"--skip in:0:5."
    )


def test_a_value_that_is_not_of_its_type_is_the_fault_of_its_record() -> None:
    class Positive(msgspec.Struct):
        id: int
        score: float

        def __post_init__(self) -> None:
            if self.score > 3:
                raise ValueError("it is above 3")

    mapped = Mapped(score, dead=True, given=Positive)
    assert len(mapped(orders(range(9)))) == 7
    assert mapped.dead == [(id, "BatchMismatch", "a value that is not of its type: it is above 3") for id in (7, 8)]


def test_a_record_that_is_no_row_is_a_dead_letter_as_well() -> None:
    mapped, large = Mapped(score, dead=True), 2**64
    assert mapped([*orders(range(3)), Order(large, 1.0), *orders([4])]) == scored([0, 1, 2, 4])
    assert mapped.dead == [(3, "ValueError", "id: a number is larger than 64 bits")]
    with pytest.raises(RecordError, match="raised ValueError: id: a number is larger than 64 bits, on the record"):
        Mapped(score)([Order(large, 1.0)])


@pytest.mark.parametrize("dead", [True, False])
def test_a_function_of_the_whole_batch_is_refused(dead: bool) -> None:
    """Each record alone would come out, as a sum of itself."""

    def summed(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch({"id": [0], "score": [pc.sum(batch["total"]).as_py()]})

    with pytest.raises(RecordError, match=r"rows: 2 given, 1 returned.* a call for 2 records.*depend on others"):
        Mapped(summed, dead=dead)(orders(range(8)))


def test_a_batch_that_is_too_large_for_the_function_comes_out_in_parts() -> None:
    def small(batch: pa.RecordBatch) -> Any:
        if batch.num_rows > 3:
            raise MemoryError
        return score(batch)

    mapped = Mapped(small)
    assert mapped(orders(range(8))) == scored(range(8))
    assert mapped.calls == [8, 4, 2, 2, 4, 2, 2]


@pytest.mark.parametrize("error", [TimeoutError("no answer"), Unavailable("it restarts")])
def test_an_outage_is_not_halved_and_makes_no_dead_letter(error: Exception) -> None:
    """Once restarts have not helped, the record is named that makes the call one."""

    def away(batch: pa.RecordBatch) -> Any:
        if 5 in batch["id"].to_pylist():
            raise error
        return score(batch)

    mapped = Mapped(away, dead=True)
    with pytest.raises(Unavailable, match=r"on a call for 8 records, of which .*in\[0\] offset 0 is the first"):
        mapped(orders(range(8)))
    assert (mapped.calls, mapped.letters, mapped.batches) == ([8], [], [])
    with pytest.raises(Unavailable, match=r"on the record at in\[0\] offset 5\. That is an outage"):
        Mapped(away, asks_alone=True)(orders(range(8)))


def test_an_error_that_is_no_record_s_ends_the_job_at_once() -> None:
    def wrong(batch: pa.RecordBatch) -> Any:
        raise ConfigError("no model there")

    mapped = Mapped(wrong, dead=True)
    with pytest.raises(UserError, match=r"^no model there$"):
        mapped(orders(range(8)))
    assert mapped.calls == [8]


def test_an_exit_of_the_function_names_its_record() -> None:
    def exits(batch: pa.RecordBatch) -> Any:
        return score(batch) if 5 not in batch["id"].to_pylist() else sys.exit(1)

    with pytest.raises(RecordError, match=r"SystemExit: 1.*offset 5"):
        Mapped(exits, dead=True)(orders(range(8)))


# --- pipelines --------------------------------------------------------------------------------------------------------


class Model(Operator):
    """A model that is loaded on the worker."""

    loads = 0

    def __init__(self, factor: float = 2.0) -> None:
        self.factor = factor

    def open(self, context: Context) -> None:
        Model.loads += 1
        self.loaded = True

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        assert self.loaded
        return pa.record_batch({"id": batch["id"], "score": pc.multiply(batch["total"], self.factor)})


def scores_by(fn: Any, schema: Any = Scored, **options: Any) -> Pipeline:
    pipeline = Pipeline("scores")
    orders = pipeline.source("orders", KafkaSource("orders", value=Order))
    orders.map_batches(fn, schema=schema, id="score", **options).sink("out", KafkaSink("scores"))
    return pipeline


@pytest.mark.parametrize("model", [Model, functools.partial(Model, 2.0), lambda: Model(2.0), score])
def test_crashes_leave_each_record_its_rows(model: Any) -> None:
    """A class is made and opened on the worker, as for `map`."""
    inputs = {"orders": [*orders(range(5)), CRASH, *orders(range(5, 8))]}
    assert_exactly_once(scores_by(model), inputs, {"out": scored(range(8))}, crashes_max=6)


def test_crashes_leave_rows_and_letters_that_a_column_and_a_failure_give() -> None:
    pipeline = scores_by(refusing(6, score=explode), on_error=DeadLetters("dead"))
    inputs = {"orders": [*orders(range(5)), CRASH, *orders(range(5, 8))]}
    ids = [id for id in (1, 2, 3, 5, 7) for _ in range(id % 4)]

    def check(outputs: list[Any]) -> None:
        assert sorted(output.id for output in outputs) == ids

    dead = [json.dumps({"id": 6, "total": 1.5}, separators=(",", ":")).encode()]
    assert_exactly_once(pipeline, inputs, {"out": check, "dead": dead}, crashes_max=6)


class Tick(msgspec.Struct):
    at: int
    number: int


def test_windows_after_it_go_by_the_time_of_the_record() -> None:
    def twice(batch: pa.RecordBatch) -> pa.RecordBatch:
        rows = [row for row in range(batch.num_rows) for _ in range(2)]
        return batch.take(pa.array(rows)).append_column("row", pa.array(rows))

    def add(count: int, tick: Tick) -> int:
        return count + tick.number

    pipeline = Pipeline("windows")
    ticks = pipeline.source("ticks", KafkaSource("ticks", value=Tick, time=EventTime("at")))
    windows = ticks.map_batches(twice, schema=Tick).key_by(lambda tick: "all").window(Tumbling("1s"))
    sums = windows.fold("sum", int, add, state=int).map(lambda window: window.value, output=int)
    sums.sink("out", KafkaSink("sums"))
    inputs = {"ticks": [Tick(at, 1) for at in (100, 500, 1_100, 2_500, 9_000)]}
    assert_exactly_once(pipeline, inputs, {"out": [4, 2, 2, 2]}, crashes_max=4)


def test_a_schema_of_pyarrow_gives_dicts() -> None:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), ("score", pa.float64())])
    pipeline = scores_by(score, schema)
    assert "score   map_batches       <- orders  4,096 rows a call  : Row" in pipeline.build().explain()
    assert_exactly_once(pipeline, {"orders": orders([1])}, {"out": [{"id": 1, "score": 0.5}]}, crashes_max=2)


class Rowed(msgspec.Struct):
    row: int


class Span(msgspec.Struct):
    either: int | str


def test_mistakes_are_told_before_the_run() -> None:
    pipeline = Pipeline("wrong")
    source = pipeline.source("orders", KafkaSource("orders", value=Order))

    def add(stream: Stream[Any], fn: Any = score, schema: Any = Scored, **options: Any) -> None:
        stream.map_batches(fn, schema=schema, **options).sink(f"out-{len(lines)}", KafkaSink("out"))
        lines.append("")

    lines: list[str] = []
    add(source, max_rows=0)
    add(source, schema=Rowed)
    add(source, schema=Span)
    add(source, schema=pa.schema([("a", pa.duration("s"))]))
    add(source, schema=None)
    add(source, fn=lambda: 3)
    add(source, fn=Model())
    add(source.map(lambda order: order))
    add(source.map(lambda order: Rowed(1), output=Rowed))
    with pytest.raises(GraphError) as raised:
        pipeline.build()
    for problem in (
        "max_rows=0 must be 1 or more",
        "schema= has the columns, and one is named 'row', as the column that says which record a row stems from",
        "schema= has the columns, and either has values of several types",
        "schema= cannot be the outputs': column 'a' is duration[s], which no field of a record can be",
        "schema= must be the type of the outputs, as a Struct, or a pyarrow.Schema",
        "Model has open(), so an instance cannot be passed: pass the class, Model",
        "the type of the records is unknown, and map_batches makes columns of their fields. They come from 'map-after",
        "the records are columns of a batch, and one is named 'row'",
    ):
        assert problem in str(raised.value)
    with pytest.raises(GraphError, match=r"map_in_pandas is map_batches\(fn, schema=...\), of Arrow batches, here"):
        getattr(source, "map_in_pandas")  # noqa: B009 - a type checker knows that there is none


def test_without_pyarrow_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"map_batches needs pyarrow, .* Run: pip install '"):
        scores_by(score)

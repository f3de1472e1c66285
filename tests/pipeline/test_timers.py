"""Handlers of keyed streams: how they are read, and each mistake with its remedy."""

from __future__ import annotations

from collections.abc import Callable, Generator
from datetime import datetime, timezone
from typing import Any

import msgspec
import pytest

from exactlyonce import Emit, EventTime, Output, Pipeline, Timers
from exactlyonce.connectors import KafkaSource
from exactlyonce.pipeline.errors import GraphError
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.sinks import KafkaSink


class Click(msgspec.Struct):
    user: str
    at: int


class Counts:
    def on_record(self, key: str, count: int | None, click: Click, timers: Timers, emit: Emit[str]) -> int:
        return 1

    def on_time(self, key: str, count: int | None, at: datetime, timers: Timers, emit: Emit[str]) -> None:
        emit(key)


class Both:
    def on_left(self, key: str, count: int | None, click: Click, timers: Timers, emit: Emit[str]) -> int:
        return 1

    def on_right(self, key: str, count: int | None, name: str, timers: Timers, emit: Emit[int]) -> int:
        return 2


class Stateless:
    def on_record(self, key: str, state: None, click: Click, timers: Timers, emit: Emit[str]) -> None:
        emit(key)


def counts() -> Counts:
    return Counts()


def graph(handler: Any, time: Any = "at", **options: Any) -> LogicalGraph:
    pipeline = Pipeline("timed")
    clicks = pipeline.source("clicks", KafkaSource("clicks", value=Click, time=time)).key_by(lambda click: click.user)
    clicks.process("p", handler, **options).sink("out", KafkaSink("out"))
    return pipeline.build()


@pytest.mark.parametrize("handler", [Counts, counts, Stateless])
def test_types_come_from_on_record(handler: Callable[[], Any]) -> None:
    node = graph(handler).node("p")
    kept = "Optional[int]" if handler is not Stateless else "NoneType"
    assert node.type is str
    assert node.kept.name == f"tuple[{kept}, bool, list[tuple[str, int, int, Click]]]"
    assert node.meaning == "process=time"
    assert graph(handler, None, order="arrival").node("p").kept.name == f"tuple[{kept}, bool]"


def test_a_timer_is_set_by_a_datetime_or_ms_and_not_without_a_time() -> None:
    timers = Timers()
    timers.event.now_ms = 5
    timers.event.set(datetime(1970, 1, 1, tzinfo=timezone.utc))
    timers.event.set(7)
    timers.event.delete(7)
    assert timers.event.changes == {0: True, 7: False}
    for at, problem in ((datetime.min, "a timer's time .* has no time zone"), (1.5, "a timer's time 1.5"),
                        (10**18, "after the year 9999")):  # fmt: skip
        with pytest.raises(ValueError, match=problem):
            timers.event.set(at)  # type: ignore[arg-type]  # the mistake
    with pytest.raises(TypeError, match=r"the handler has no on_clock\(\)"):
        timers.clock.set(5)


class TakesTooFew(Counts):
    def on_time(self, key: str, count: int | None) -> None:  # type: ignore[override]  # the mistake
        pass


class Yields(Counts):
    def on_record(self, *given: Any) -> Generator[int, None, None]:  # type: ignore[override]  # the mistake
        yield 1


class NoState:
    def on_record(self, key: str, state: Any, click: Click, timers: Timers, emit: Emit[str]) -> Any: ...


@pytest.mark.parametrize(
    ("handler", "options", "problem"),
    [
        (5, {}, r"expected a class with on_record\(self, key, state, record, timers, emit\), got 5"),
        (Click, {}, r"expected a class with on_record"),
        (TakesTooFew, {}, r"TakesTooFew.on_time\(key.*\) -> .* must take \(key, state, at, timers, emit\)"),
        (Yields, {"state": int}, r"Yields.on_record is a generator: call emit\(value\), and return the state"),
        (NoState, {}, r"the type of the state is unknown: annotate it"),
        (Counts, {"order": "none"}, "order='none' must be one of 'time', 'arrival'"),
        (Counts, {"late": Output("late", int)}, "late records are Click, and 'late' is declared with int"),
        (Counts, {"time": None}, r"keyed_process goes by event time, .* 'clicks' have none: give the source time="),
    ],
)
def test_a_mistake_is_named_with_its_remedy(handler: Any, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(GraphError, match=problem):
        graph(handler, **options)


def both(handler: Any, *times: Any, **options: Any) -> LogicalGraph:
    pipeline = Pipeline("timed")
    clicks_time, names_time = times or ("at", len)
    clicks = pipeline.source("clicks", KafkaSource("clicks", value=Click, time=clicks_time)).key_by(lambda of: of.user)
    names = pipeline.source("names", KafkaSource("names", value=str, time=names_time)).key_by(str)
    clicks.co_process("p", names, handler, **options).sink("out", KafkaSink("out"))
    return pipeline.build()


def test_a_handler_of_two_inputs_has_one_state_and_may_give_either_type() -> None:
    node = both(Both).node("p")
    assert (node.type, node.meaning, len(node.inputs)) == (str | int, "co_process=time", 2)
    assert (
        node.kept.name
        == "tuple[Optional[int], bool, list[tuple[str, int, int, Click]], list[tuple[str, int, int, str]]]"
    )
    assert both(Both, None, None, order="arrival").node("p").kept.name == "tuple[Optional[int], bool]"


class TwoStates(Both):
    def on_right(self, key: str, count: str | None, name: str, timers: Timers, emit: Emit[int]) -> str:  # type: ignore[override]  # the mistake
        return ""


class OnTime(Both):
    def on_time(self, key: str, count: int | None, at: datetime, timers: Timers, emit: Emit[str]) -> None: ...


@pytest.mark.parametrize(
    ("handler", "times", "options", "problem"),
    [
        (
            Counts,
            (),
            {},
            r"expected a class with on_left\(self, .*\) and on_right\(self, key, state, record, timers, emit\)",
        ),
        (
            TwoStates,
            (),
            {},
            "TwoStates.on_left and TwoStates.on_right take state of two types, int and str: annotate one",
        ),
        (Both, ("at", None), {}, "co_process goes by event time, .* 'names' have none"),
        (OnTime, ("at", None), {"order": "arrival"}, "no timer would ever go off. Give the source time="),
        (Both, (), {"late_right": Output("late", Click)}, "late records are str, and 'late' is declared with Click"),
    ],
)
def test_a_mistake_of_two_inputs_is_named_with_its_remedy(
    handler: Any, times: Any, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(GraphError, match=problem):
        both(handler, *times, **options)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"within": "0s"}, "within= must be above 0"),
        ({"within": "soon"}, "within is 'soon'"),
        ({"within": "1h", "order": "none"}, "order='none' must be one of 'time', 'arrival'"),
        ({"within": "1h", "late": Output("late", int)}, "late records are Click, and 'late' is declared with int"),
        ({"ttl": "0s"}, "ttl= must be above 0"),
        (
            {"ttl": "1s"},
            r"ttl='1s' is shorter than disorder='2s' of source 'clicks': .* Raise ttl=, or lower disorder=",
        ),
        ({"ttl": "9s", "source": {"time": None}}, "reduce goes by event time, .* 'clicks' have none: give the source"),
        ({"count": 0}, "a batch of 0 records: give a whole number above 0"),
        ({"count": 5, "timeout": "0s"}, "timeout= must be above 0"),
        ({"count": 5, "timeout": "soon"}, "timeout is 'soon'"),
    ],
)
def test_other_options_that_make_no_sense_are_mistakes(options: dict[str, Any], problem: str) -> None:
    pipeline = Pipeline("timed")
    source = KafkaSource(
        "clicks", value=Click, **({"time": EventTime("at", disorder="2s")} | options.pop("source", {}))
    )
    clicks = pipeline.source("clicks", source).key_by(lambda click: click.user)
    if "ttl" in options:
        clicks.reduce("last", lambda one, other: other, **options).sink("out", KafkaSink("last"))
    elif "count" in options:
        clicks.batches("batches", **options).sink("out", KafkaSink("batches"))
    else:
        clicks.deduplicate("once", **options).sink("out", KafkaSink("out"))
    with pytest.raises(GraphError, match=problem):
        pipeline.build()

"""`assert_exactly_once` passes right pipelines, and finds wrong ones with the crash that shows it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

import msgspec
import pytest

from exactlyonce import Count, DeadLetters, EventTime, Pipeline, Record, Tumbling
from exactlyonce.connectors import FileSource, KafkaSource
from exactlyonce.pipeline.errors import ConfigError, ExactlyOnceError, GraphError
from exactlyonce.sinks import KafkaSink, RedisSink
from exactlyonce.testing import assert_exactly_once
from exactlyonce.testing.scripted import CRASH


class Order(msgspec.Struct):
    customer: str
    total: int


class Total(msgspec.Struct):
    customer: str
    sum: int


def add(total: int | None, order: Order) -> tuple[int, Total]:
    total = (total or 0) + order.total
    return total, Total(order.customer, total)


def order_totals(**sink: Any) -> Pipeline:
    pipeline = Pipeline("order-totals")
    totals = (
        pipeline.source("orders", KafkaSource("orders", value=Order, on_error=DeadLetters("bad")))
        .filter(lambda order: order.total > 0)
        .key_by(lambda order: order.customer)
        .stateful_map("totals", add)
    )
    totals.sink("out", KafkaSink("order-totals", key=lambda total: total.customer, **sink))
    return pipeline


ORDERS = [Order("ann", 3), Order("bob", 5), Order("ann", -1), Order("ann", 4)]
TOTALS = [Total("ann", 3), Total("bob", 5), Total("ann", 7)]
FEW = 12
"""So many crashes where one finds the mistake, or none is needed."""


@pytest.mark.exhaustive(but=["some"])
@pytest.mark.parametrize("crashes_max", [pytest.param(20, id="some"), pytest.param(None, id="every")])
def test_a_right_pipeline_passes_every_crash(crashes_max: int | None) -> None:
    script = [*ORDERS[:2], CRASH, *ORDERS[2:], b"{}"]
    assert_exactly_once(order_totals(), {"orders": script}, {"out": TOTALS, "bad": [b"{}"]}, crashes_max=crashes_max)


def test_records_have_keys_times_and_headers() -> None:
    pipeline = Pipeline("copies")
    source = pipeline.source("in", KafkaSource.records("in", value=int, key=str))

    def stamped(record: Record[int]) -> Record[str | None]:
        headers = [name for name, _ in record.headers]
        return Record(f"{record.value} {record.timestamp_ms} {headers}" if record.value else None, record.key)

    source.map(stamped).sink("out", KafkaSink("out", partition=lambda record: len(record.key) % 4))
    records = [Record(1, "a", timestamp_ms=70, headers=(("h", b""),)), Record(0, "bb")]
    wanted = [Record(b"1 70 ['h']", "a"), Record(None, "bb")]
    assert_exactly_once(pipeline, {"in": records}, {"out": wanted}, crashes_max=FEW)


def test_rows_of_other_stores_are_kept_in_memory() -> None:
    pipeline = Pipeline("rows")
    orders = pipeline.source("orders", KafkaSource("orders", value=Order))
    orders.sink("rows", RedisSink("redis://nowhere", key=lambda order: order.customer, kind="stream"))
    assert_exactly_once(pipeline, {"orders": ORDERS}, {"rows": ORDERS}, crashes_max=FEW)


def test_a_function_may_judge_the_output() -> None:
    def check(totals: list[Total]) -> None:
        assert max(total.sum for total in totals) == 7

    assert_exactly_once(order_totals(), {"orders": ORDERS}, {"out": check}, crashes_max=FEW)
    with pytest.raises(AssertionError, match=r"^Without any crash: sink 'out': "):
        assert_exactly_once(order_totals(), {"orders": ORDERS[:1]}, {"out": check})


# --- mistakes -------------------------------------------------------------------------------------------------------

_numbers = itertools.count()


def globally_numbered(order: Order) -> Order:
    return Order(order.customer, next(_numbers))


def timed(order: Order) -> Order:
    return Order(order.customer, time.monotonic_ns())


class FirstOnly:
    """Lets the first order of each customer pass, and forgets with its process which these were."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __call__(self, order: Order) -> Iterator[Order]:
        if order.customer not in self.seen:
            self.seen.add(order.customer)
            yield order


class Numbered:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, order: Order) -> Order:
        self.count += 1
        return Order(order.customer, self.count)


def mapped(function: Callable[[Order], Order]) -> Pipeline:
    pipeline = Pipeline("mapped")
    orders = pipeline.source("orders", KafkaSource("orders", value=Order))
    orders.map(function, output=Order).sink("out", KafkaSink("out"))
    return pipeline


def first_orders() -> Pipeline:
    pipeline = Pipeline("first-orders")
    orders = pipeline.source("orders", KafkaSource("orders", value=Order))
    orders.flat_map(FirstOnly, output=Order).sink("out", KafkaSink("out"))
    return pipeline


IMPURE = r"(?s)^A second run, without any crash either, gives something else.* out: lost: .* out: unexpected: "
KILLED = r"(?s)^Not exactly once: (worker \d|the coordinator) is killed when it .*\(records read: orders: \d\)"
MISTAKES = {
    "a global counter": (lambda: mapped(globally_numbered), IMPURE),
    "a clock": (lambda: mapped(timed), IMPURE),
    "a counter in a process": (lambda: mapped(Numbered()), rf"{KILLED}.* out: (lost|doubled|unexpected): "),
    "what a process has seen": (first_orders, rf'{KILLED}.* out: unexpected: {{"customer":"ann","total":\d}}'),
}


@pytest.mark.exhaustive(but=["a counter in a process"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_function_that_keeps_something_aside_is_found(mistake: str) -> None:
    pipeline, message = MISTAKES[mistake]
    orders = [Order("ann", 3), *(Order("ann", total) for total in range(4, 9))]
    with pytest.raises(AssertionError, match=message):
        assert_exactly_once(pipeline, {"orders": orders})


def test_a_side_effect_written_twice_is_found() -> None:
    mails: list[str] = []

    def mail(order: Order) -> None:
        mails.append(order.customer)

    pipeline = Pipeline("mails")
    pipeline.source("orders", KafkaSource("orders", value=Order)).peek(mail).sink("out", KafkaSink("out"))
    assert_exactly_once(pipeline, {"orders": ORDERS}, crashes_max=FEW)
    with pytest.raises(
        AssertionError, match=rf"{KILLED}\n  side effect mails: doubled: '(ann|bob)' \(\d times instead"
    ):
        assert_exactly_once(pipeline, {"orders": ORDERS}, side_effects={"mails": lambda: mails})


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "lost": ({"out": [*TOTALS, Total("cy", 1)]}, r'out: lost: {"customer":"cy","sum":1}$'),
    "doubled": ({"out": TOTALS[1:]}, r'out: unexpected: {"customer":"ann","sum":3}$'),
    "topic": ({"order-totals": TOTALS, "bad": [b"?"]}, r"orders-dead-letters: lost: \?$"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_expectation_is_told_without_a_crash(wrong: str) -> None:
    expected, message = WRONG[wrong]
    with pytest.raises(AssertionError, match=rf"(?s)^Wrong without any crash\n  .*{message}"):
        assert_exactly_once(order_totals(), {"orders": ORDERS}, expected)


def test_an_error_of_the_pipeline_ends_the_test() -> None:
    def fails(order: Order) -> Order:
        raise ValueError("no order is good enough")

    with pytest.raises(ExactlyOnceError, match="no order is good enough"):
        assert_exactly_once(mapped(fails), {"orders": ORDERS})


def test_what_cannot_be_exactly_once_is_refused() -> None:
    with pytest.raises(GraphError, match=r"sink 'out' has delivery='at_least_once', which loses or doubles by choice"):
        assert_exactly_once(order_totals(delivery="at_least_once"), {"orders": ORDERS})
    files = Pipeline("files")
    files.source("orders", FileSource("/data/orders", value=Order)).sink("out", KafkaSink("out"))
    with pytest.raises(GraphError, match=r"source 'orders' reads no topic of the one cluster that this test has"):
        assert_exactly_once(files, {"orders": ORDERS})
    with pytest.raises(ConfigError, match=r"The pipeline has no source 'payments': name one of orders\."):
        assert_exactly_once(order_totals(), {"payments": ORDERS})


class Visit(msgspec.Struct):
    page: str
    at: datetime


def at(second: int) -> datetime:
    return datetime(2026, 11, 20, 12, 0, second, tzinfo=timezone.utc)


VISITS = [Visit("home", at(1)), Visit("shop", at(4)), Visit("home", at(7)), Visit("home", at(13))]


def counted(time: Any = "at", **source: Any) -> Pipeline:
    pipeline = Pipeline("visits")
    visits = pipeline.source("visits", KafkaSource("visits", value=Visit, time=time, **source))
    counts = visits.key_by(lambda visit: visit.page).window(Tumbling("10s")).aggregate("counts", Count())
    counts.map(lambda count: f"{count.key} {count.value}", output=str).sink("out", KafkaSink("out"))
    return pipeline


def test_windows_of_event_time_close_at_the_end_of_the_inputs() -> None:
    """Messages have the times of their records, unless a record says another."""
    wanted = ["home 2", "shop 1"]
    assert_exactly_once(counted(), {"visits": VISITS}, {"out": [*wanted, "home 1"]}, crashes_max=5)
    assert_exactly_once(counted(), {"visits": VISITS}, {"out": wanted}, crashes_max=0, drain=False)
    ahead = Record(Visit("home", at(59)), None, timestamp_ms=1)
    skipping = counted(EventTime("at", on_error="skip"))
    assert_exactly_once(skipping, {"visits": [*VISITS, ahead]}, {"out": [*wanted, "home 1"]}, crashes_max=0)
    undecoded = counted(on_error="skip")
    assert_exactly_once(undecoded, {"visits": [b"{}", None, *VISITS]}, {"out": [*wanted, "home 1"]}, crashes_max=0)


def test_a_failure_shows_the_line_of_the_test_and_the_cause_alone() -> None:
    """No line of the simulation comes between them."""
    ahead = Record(VISITS[0], None, timestamp_ms=1)
    with pytest.raises(ExactlyOnceError, match="after the timestamp of its message") as failed:
        assert_exactly_once(counted(), {"visits": [ahead]})
    assert "testing/simulation" not in str(failed.getrepr())
    places = [str(frame.path) for frame in failed.traceback.filter(failed)]
    assert places == [__file__]

"""A user's code that mypy and pyright, both strict, must accept, and the types that they must infer. Never run."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

import msgspec
from typing_extensions import Unpack, assert_type

from exactlyonce import (
    AvroCodec,
    Change,
    Context,
    Count,
    Emit,
    Enriched,
    EventTime,
    Feedback,
    Joined,
    KeyedStream,
    Max,
    Operator,
    Output,
    Pair,
    Pipeline,
    Record,
    RunResult,
    RunSettings,
    SideEmit,
    Stream,
    Sum,
    Table,
    Timers,
    Tumbling,
    Windowed,
    run,
)
from exactlyonce.connectors import (
    FileSource,
    GeneratorSource,
    IterableSource,
    KafkaSource,
    OpenSplit,
    PostgresChanges,
    PostgresMessages,
    PostgresTableSource,
    SourceOffset,
    SplitSource,
)
from exactlyonce.sinks import (
    DeltaSink,
    DuckDBSink,
    FileSink,
    HttpSink,
    IcebergSink,
    KafkaSink,
    MySQLSink,
    PostgresSink,
    PrintSink,
    RedisSink,
)


class Order(msgspec.Struct):
    id: int
    customer: str
    total: int
    ts: int


class Total(msgspec.Struct):
    customer: str
    sum: int


def add(total: int | None, order: Order) -> tuple[int, Total]:
    total = (total or 0) + order.total
    return total, Total(order.customer, total)


def window_total(window: Windowed[str, list[Order]]) -> Iterator[Total]:
    yield Total(window.key, sum(order.total for order in window.value))


def forget(total: int | None, order: Order) -> tuple[int | None, Total | None]:
    return None, None


def split(total: int | None, order: Order) -> tuple[int | None, list[Total]]:
    return total, []


def larger(left: Order, right: Order) -> Order:
    return max(left, right, key=lambda order: order.total)


def words(text: str) -> Iterator[str]:
    yield from text.split()


class Enrich(Operator):
    def __init__(self, path: str = "names.db") -> None:
        self.path = path

    def open(self, context: Context) -> None:
        self.names: dict[str, str] = {context.operator: self.path}

    def __call__(self, order: Order) -> Total:
        return Total(self.names[order.customer], order.total)


class Remember:
    def __call__(self, state: list[int] | None, order: Order) -> tuple[list[int], int]:
        return [*(state or []), order.id], order.id


pipeline = Pipeline("order-totals")
orders = pipeline.source("orders", KafkaSource("orders", value=Order))
assert_type(orders, Stream[Order])

# the program of the documentation
(
    orders.filter(lambda order: order.total > 0)
    .key_by(lambda order: order.customer)
    .stateful_map("totals", add)
    .sink("out", KafkaSink("order-totals", key=lambda total: total.customer))
)

# each operator
by_customer = orders.key_by(lambda order: order.customer)
assert_type(orders.map(lambda order: order.total, output=int), Stream[int])
outbox = PostgresMessages("orders", dsn="env:SHOP_DSN", value=Order)
assert_type(pipeline.source("outbox", outbox), Stream[Order])
captured = PostgresChanges("orders", dsn="env:SHOP_DSN", key="id", value=Order)
assert_type(pipeline.source("captured", captured), Stream[Change[Order]])
assert_type(orders.map(Enrich), Stream[Total])
assert_type(orders.map(functools.partial(Enrich, "other.db")), Stream[Total])
assert_type(orders.flat_map(lambda order: [order.id, order.ts], output=int), Stream[int])
assert_type(orders.map(lambda order: order.customer, output=str).flat_map(words), Stream[str])
assert_type(orders.peek().peek(lambda order: print(order.id)), Stream[Order])
windows = by_customer.window(Tumbling("1h"))
assert_type(windows.aggregate("u", Count(), early="1m", lateness="1h"), Stream[Windowed[str, int]])
assert_type(windows.aggregate("w", Total, customer=Max("customer"), sum=Sum("total")), Stream[Windowed[str, Total]])
assert_type(windows.aggregate("x", {"n": Count()}), Stream[Windowed[str, Any]])
assert_type(windows.apply("v", window_total), Stream[Total])
assert_type(by_customer.stateful_map("a", add), Stream[Total])
assert_type(by_customer.stateful_map("b", forget), Stream[Total | None])
assert_type(by_customer.stateful_map("c", Remember), Stream[int])
assert_type(
    by_customer.stateful_map("d", lambda n, order: ((n or 0) + 1, order.id), state=int, output=int), Stream[int]
)
assert_type(by_customer.stateful_flat_map("e", split), Stream[Total])
assert_type(by_customer.reduce("f", larger), Stream[Order])
assert_type(orders.union(orders), Stream[Order])
assert_type(orders.union(orders.map(Enrich)), Stream[Order | Total])

# sources and sinks
assert_type(pipeline.source("raw", KafkaSource("raw", value=bytes)), Stream[bytes])
nullable: Stream[Order | None] = pipeline.source("nullable", KafkaSource("n", value=Order | None))
assert_type(pipeline.source("avro", KafkaSource("avro", value=AvroCodec(Order))), Stream[Order])
assert_type(pipeline.source("lists", KafkaSource("lists", value=list[Order])), Stream[list[Order]])
with_metadata = pipeline.source("m", KafkaSource.records("m", value=Order, key=str, on_error="skip"))
assert_type(with_metadata, Stream[Record[Order]])
assert_type(pipeline.source("files", FileSource.records("/in", value=Order, watch="1m")), Stream[Record[Order]])
pipeline.source("since", KafkaSource("since", value=Order, start=datetime(2026, 1, 1, tzinfo=timezone.utc)))
pipeline.source("from", KafkaSource("from", value=Order, start={0: 17}))
with_metadata.sink("copy", KafkaSink("copy"))
with_metadata.map(lambda record: record.value.total, output=int).sink("print", PrintSink("total: "))
orders.sink("avro-out", KafkaSink("avro-out", value=AvroCodec(Order), headers=lambda order: [("v", b"1")]))

# several outputs
late = Output("late", Order)


def route(order: Order, emit: Emit[int]) -> None:
    if order.ts < 0:
        emit(order, late)
    else:
        emit(order.id)


routed = orders.split(route, outputs=[late])
assert_type(routed, Stream[int])
assert_type(routed.side(late), Stream[Order])


def remember(count: int | None, order: Order, emit: SideEmit) -> tuple[int, Total]:
    emit(order, late)
    return 1, Total(order.customer, order.total)


def remember_all(count: int | None, order: Order, emit: SideEmit) -> tuple[int, list[Total]]:
    total, emitted = remember(count, order, emit)
    return total, [emitted]


class Remind:
    def __call__(self, count: int | None, order: Order, emit: SideEmit) -> tuple[int, str]:
        return 1, order.customer


remembered = by_customer.stateful_map("remember", remember, outputs=[late])
assert_type(remembered, Stream[Total])
assert_type(remembered.side(late), Stream[Order])
assert_type(by_customer.stateful_flat_map("remember-all", remember_all, outputs=[late]), Stream[Total])
assert_type(by_customer.stateful_map("remind", Remind, outputs=[late]), Stream[str])

# loops
loop = pipeline.feedback("loop", Order)
assert_type(loop, Feedback[Order])
assert_type(orders.union(loop), Stream[Order])
orders.union(loop).filter(lambda order: order.total > 0).feed(loop)
assert_type(pipeline.feedback("either", Order | Total, pause="1s"), Feedback[Order | Total])


# timers
class Remembers:
    def on_record(self, key: str, last: int | None, order: Order, timers: Timers, emit: Emit[Total]) -> int:
        timers.event.set(timers.event.now)
        return order.id

    def on_time(self, key: str, last: int | None, at: datetime, timers: Timers, emit: Emit[Total]) -> None:
        emit(Total(key, last or 0))


assert_type(by_customer.process("handled", Remembers, late=late), Stream[Total])
assert_type(by_customer.process("arrived", functools.partial(Remembers), order="arrival"), Stream[Total])
assert_type(by_customer.in_order("in-order", late=late), Stream[Order])
assert_type(by_customer.deduplicate("once", within="1h", order="arrival"), Stream[Order])
assert_type(by_customer.batches("batches", 100, timeout="5s"), Stream[list[Order]])
assert_type(by_customer.reduce("last", lambda one, other: other, ttl="7d"), Stream[Order])

# joins
late_totals = Output("late-totals", Total)
by_name = orders.map(Enrich).key_by(lambda total: total.customer)
within = ("-5m", "1h")
assert_type(by_customer.join("inner", by_name, within=within), Stream[Joined[str, Order, Total]])
assert_type(by_customer.join("left", by_name, within=within, how="left"), Stream[Joined[str, Order, Total | None]])
assert_type(by_customer.join("right", by_name, within=within, how="right"), Stream[Joined[str, Order | None, Total]])
full = by_customer.join("full", by_name, within=within, how="full", late=late, late_right=late_totals)
assert_type(full, Stream[Joined[str, Order | None, Total | None]])
assert_type(full.side(late_totals), Stream[Total])


class Compares:
    def on_left(self, key: str, last: int | None, order: Order, timers: Timers, emit: Emit[Total]) -> int:
        return order.id

    def on_right(self, key: str, last: int | None, total: Total, timers: Timers, emit: Emit[Total]) -> None:
        emit(total)


assert_type(by_customer.co_process("both", by_name, Compares, late_right=late_totals), Stream[Total])
assert_type(by_customer.co_process("by-arrival", by_name, functools.partial(Compares), order="arrival"), Stream[Total])
day = Tumbling("1d")
assert_type(by_customer.join("day", by_name, window=day), Stream[Windowed[str, Pair[Order, Total]]])
days = by_customer.join("days", by_name, window=day, how="full", late=late, late_right=late_totals)
assert_type(days, Stream[Windowed[str, Pair[Order | None, Total | None]]])
totals_of = pipeline.table("totals-of", KafkaSource.records("totals-of", key=str, value=Total))
assert_type(totals_of, Table[Any, Total])
assert_type(by_customer.as_of("as-of", totals_of, keep="7d"), Stream[Joined[str, Order, Total | None]])
assert_type(by_customer.as_of("as-of-stream", by_name, how="inner"), Stream[Joined[str, Order, Total]])
assert_type(by_customer.lookup("lookup", totals_of), Stream[Joined[str, Order, Total | None]])
assert_type(by_customer.lookup("lookup-inner", totals_of, how="inner", ttl="7d"), Stream[Joined[str, Order, Total]])
orders_by_id = pipeline.table("orders-by-id", KafkaSource.records("orders-by-id", key=int, value=Order))
with_total = orders_by_id.join_table("with-total", totals_of, by=lambda order: order.customer, how="left")
assert_type(with_total, Table[Any, Joined[Any, Order, Total | None]])
assert_type(with_total.changes(), Stream[Record[Joined[Any, Order, Total | None] | None]])
with_totals = orders_by_id.join_table("with-totals", totals_of, by=lambda order: order.customer or None)
assert_type(with_totals, Table[Any, Joined[Any, Order, Total]])

# broadcasts


def with_limits(order: Order, totals: Mapping[Any, Total]) -> Total:
    return totals.get(order.customer, Total(order.customer, 0))


class Limits:
    def __call__(self, order: Order, totals: Mapping[Any, Total]) -> int:
        return len(totals)


assert_type(orders.with_broadcast("limits", totals_of, with_limits), Stream[Total])
assert_type(orders.with_broadcast("limits-of", totals_of, lambda order, totals: len(totals), output=int), Stream[int])
assert_type(orders.with_broadcast("class", totals_of, Limits), Stream[int])
assert_type(by_customer.with_broadcast("keyed", totals_of, with_limits), KeyedStream[str, Total])
assert_type(by_customer.with_broadcast("keyed-class", totals_of, Limits), KeyedStream[str, int])

# enrich


async def fetch(some: list[Order]) -> list[Total]:
    return [Total(order.customer, 1) for order in some]


class Client:
    async def __call__(self, some: list[Order]) -> tuple[int, ...]:
        return tuple(order.id for order in some)


assert_type(orders.enrich("fetched", fetch, batch=10, in_flight=20, timeout="1s"), Stream[Enriched[Order, Total]])
assert_type(orders.enrich("client", Client), Stream[Enriched[Order, int]])
assert_type(orders.enrich("partial", functools.partial(Client), output=int), Stream[Enriched[Order, int]])

# map_batches


def of_batch(batch: Any) -> Any:
    return batch


class BatchModel(Operator):
    def __init__(self, factor: int = 2) -> None:
        self.factor = factor

    def __call__(self, batch: Any) -> Any:
        return batch


assert_type(orders.map_batches(of_batch, schema=Total), Stream[Total])
assert_type(orders.map_batches(BatchModel, schema=Total, max_rows=10), Stream[Total])
assert_type(orders.map_batches(functools.partial(BatchModel, 3), schema=int, id="model"), Stream[int])

# event time
in_time = EventTime("placed", disorder="5s", idle=None)
assert_type(pipeline.source("t1", KafkaSource("t", value=Order, time=in_time)), Stream[Order])
assert_type(pipeline.source("t2", KafkaSource("t", value=Order, time=EventTime("id", disorder="5s"))), Stream[Order])
assert_type(in_time, EventTime[object])
assert_type(KafkaSource("t", value=Order, time=EventTime(lambda order: order.id)), KafkaSource[Order])
placed = KafkaSource.records("t", value=Order, time=EventTime(lambda record: record.value.id))
assert_type(placed, KafkaSource[Record[Order]])
in_time_windows = windows.aggregate("timed-anew", Count()).with_time("start", disorder=timedelta(hours=1))
assert_type(in_time_windows, Stream[Windowed[str, int]])
assert_type(orders.with_time(lambda order: order.ts, disorder="1h", id="placed"), Stream[Order])
# run

assert_type(pipeline.run(), RunResult | None)
assert_type(pipeline.run(until="latest", min_pause=timedelta(seconds=1), state_memory=1 << 30), RunResult | None)
assert_type(run("orders:pipeline", parallelism=2, restart={"strategy": "none"}, on_event=print), RunResult | None)


def on_event(event: dict[str, Any]) -> None: ...


def configured(**settings: Unpack[RunSettings]) -> RunResult | None:
    return run(pipeline, log_level="warning", on_event=on_event) or pipeline.run(**settings)


# other sources
assert_type(pipeline.source("files", FileSource("/data", value=Order, files="*.csv", format="csv")), Stream[Order])
table_source = PostgresTableSource("orders", dsn="env:SHOP_DSN", key="id", value=Order)
assert_type(pipeline.source("table", table_source), Stream[Order])
assert_type(pipeline.source("items", IterableSource([Order(1, "ann", 2, 3)], value=Order)), Stream[Order])
assert_type(pipeline.source("numbers", IterableSource([1, 2], value=int)), Stream[int])


def make(number: int) -> Order:
    return Order(number, "ann", 1, number)


assert_type(pipeline.source("made", GeneratorSource(make, rate=100)), Stream[Order])
perhaps: Stream[int | None] = pipeline.source("perhaps", IterableSource([1, None], value=int | None))

# other sinks
orders.sink("pg", PostgresSink("orders", dsn="env:SHOP_DSN", mode="upsert", key=("id",), create=True))
orders.sink("my", MySQLSink("orders", dsn="env:SHOP_DSN"))
orders.sink("redis", RedisSink("env:CACHE", key=lambda order: f"order:{order.id}"))
orders.sink("lines", FileSink("/data/out", format="parquet", roll_interval="1m", roll_bytes=1 << 26))
orders.sink("delta", DeltaSink("/data/delta", create=True))
orders.sink("duck", DuckDBSink("shop.duckdb", table="orders", mode="upsert", key="id"))
orders.sink("hook", HttpSink("https://shop.example/hook", key=lambda order: order.id, timeout=timedelta(seconds=5)))
orders.sink("ice", IcebergSink("shop.orders", catalog={"type": "rest"}, create=True))
orders.map(Enrich).sink("wide", PrintSink())

# durations and sizes

second = timedelta(seconds=1)
by_customer.window(Tumbling(second, offset=timedelta(0))).aggregate("timed", Count(), early=second, lateness="1m")
by_customer.join("timed-join", by_name, within=(-second, "1m"))
by_customer.batches("timed-batches", 3, timeout=second)
FileSink[Total]("/totals", roll_bytes="64mb", roll_interval=second)


# sources of one's own
class OpenShop(OpenSplit):
    def __init__(self, path: str, position: SourceOffset) -> None:
        self.path, self.name, self.next = path, position.identity, position.offset

    def read(self, records_max: int) -> list[bytes]:
        return [] if self.ended else [b"{}"] * records_max


@dataclass(frozen=True, eq=False)
class Journal(SplitSource[Order]):
    path: str
    grows = True

    @property
    def type(self) -> Any:
        return Order

    @property
    def place(self) -> str:
        return f"journal:{self.path}"

    def find_splits(self) -> list[str]:
        return ["amsterdam"]

    def open_split(self, position: SourceOffset) -> OpenShop:
        return OpenShop(self.path, position)


journal = Journal("orders.db", time=EventTime("ts", disorder=timedelta(seconds=5), idle=None), on_error="skip")
assert_type(pipeline.source("journal", journal), Stream[Order])

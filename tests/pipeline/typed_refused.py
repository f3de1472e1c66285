"""A user's code that mypy and pyright, both strict, must refuse, line by line. Never run.

Each wrong use has a comment with the error of each: one that ignores nothing is an error, too.
"""

# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false, reportUnknownVariableType=false
# what is unknown follows from the errors below

from __future__ import annotations

from datetime import datetime

import msgspec

from exactlyonce import Emit, EventTime, KafkaSink, KafkaSource, Output, Pipeline, SideEmit, Sum, Timers, Tumbling, run
from exactlyonce.connectors import FileSource, GeneratorSource, PostgresTableSource
from exactlyonce.sinks import PostgresSink, PrintSink, RedisSink


class Order(msgspec.Struct):
    id: int
    customer: str


class Total(msgspec.Struct):
    sum: int


def add(total: int | None, order: Order) -> tuple[int, Total]:
    return 1, Total(1)


def never_none(total: int, order: Order) -> tuple[int, Total]:
    return total, Total(total)


def of_total(total: Total) -> int:
    return total.sum


pipeline = Pipeline("wrong")
orders = pipeline.source("orders", KafkaSource("orders", value=Order))
totals = orders.key_by(lambda order: order.customer).stateful_map("totals", add)

orders.stateful_map("unkeyed", add)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
orders.process("route", len)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
orders.key_by(lambda order: order.customer).map(of_total)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
orders.map(of_total)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
orders.filter(lambda order: order.price > 0)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
totals.key_by(lambda total: total.sum).stateful_map("other", add)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
orders.key_by(lambda order: order.id).stateful_map("none", never_none)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
orders.key_by(lambda order: order.id).reduce("reduce", lambda left, right: left.id)  # type: ignore[arg-type, return-value]  # pyright: ignore[reportArgumentType, reportCallIssue]
totals.sink("key", KafkaSink("out", key=lambda total: total.customer))  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
orders.sink("total-sink", KafkaSink("out", key=of_total))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
orders.sink(PrintSink())  # type: ignore[call-arg, arg-type]  # pyright: ignore[reportCallIssue]
KafkaSource("t", value=Order, key=str)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
KafkaSource("t", value=Order, start="latets")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
pipeline.source("s", KafkaSink("t"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

late = Output("late", Order)


def route(order: Order, emit: Emit[int]) -> None:
    emit("text")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    emit(5, late)  # type: ignore[misc]  # pyright: ignore[reportArgumentType]


orders.split("route", route)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]


def count_all(count: int | None, order: Order, emit: SideEmit) -> tuple[int, int]:
    emit(order)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    emit(5, late)  # type: ignore[misc]  # pyright: ignore[reportArgumentType]
    return 1, order.id


orders.key_by(lambda order: order.id).stateful_map("count", count_all)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]


loop = pipeline.feedback("loop", Order)
totals.feed(loop)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
orders.feed(orders)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
loop.map(of_total)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]

by_id = orders.key_by(lambda order: order.id)
by_id.join("keys", totals.key_by(lambda total: "a"), within=("0s", "1s"))  # type: ignore[arg-type, return-value]  # pyright: ignore[reportArgumentType]
by_id.join("neither", by_id)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
by_id.join("how", by_id, within=("0s", "1s"), how="outer")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
by_id.as_of("unkeyed", orders)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
by_id.join("table", pipeline.table("t", KafkaSource.records("t", value=Order)), within=("0s", "1s"))  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
orders_by_id = pipeline.table("by-id", KafkaSource.records("t", value=Order))
orders_by_id.join_table("stream", by_id, by=lambda order: order.customer)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
orders_by_id.join_table("row", orders_by_id, by=lambda order: order.missing)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
orders.with_broadcast("stream", by_id, lambda order, rows: order)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
orders.with_broadcast("row", orders_by_id, lambda order: order)  # type: ignore[arg-type, misc]  # pyright: ignore[reportArgumentType, reportCallIssue]
pipeline.table("values", KafkaSource("t", value=Order))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def of_totals(some: list[Total]) -> list[int]:
    return []


def at_once(some: list[Order]) -> list[int]:
    return []


orders.enrich("others", of_totals)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
orders.enrich("plain", at_once)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]

orders.map_batches(lambda batch: batch)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
orders.map_batches(1, schema=Total)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]

pipeline.run(paralelism=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
pipeline.run(parallelism="2")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
pipeline.run(checkpoint_interval=5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
pipeline.run(until="never")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
pipeline.run(restart={"strategy": "no"})  # type: ignore[typeddict-item]  # pyright: ignore[reportArgumentType]


# sources and sinks
pipeline.source("table", PostgresTableSource("orders", dsn="env:SHOP_DSN", key=1, value=Order))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
pipeline.source("files", FileSource("/data", value=Order, watch=10))  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
pipeline.source("made", GeneratorSource(of_total))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
orders.sink("redis", RedisSink("env:CACHE", key=of_total))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
orders.sink("upserted", PostgresSink("orders", dsn="env:SHOP_DSN", mode="replace"))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportUnknownArgumentType]
totals.sink("headers", KafkaSink("out", headers=lambda total: {"sum": total.sum}))  # type: ignore[arg-type, return-value]  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue, reportUnknownArgumentType]

# windows and timers
by_id.window("1h")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
by_id.window(Tumbling("1h", every="1m"))  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
by_id.window(Tumbling("1h")).aggregate("sums", Sum(of_total))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
by_id.window(Tumbling("1h")).reduce("late", lambda left, right: right, lateness=60)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]


class Reminds:
    def on_record(self, key: str, state: int | None, order: Order, timers: Timers, emit: Emit[int]) -> int:
        emit(order)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
        return timers.event.now  # type: ignore[return-value]  # pyright: ignore[reportReturnType]

    def on_time(self, key: str, state: int | None, at: datetime, timers: Timers, emit: Emit[int]) -> None:
        timers.event.set(5)


by_id.process("reminds", Reminds)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
by_id.batches("batches", "100")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
by_id.deduplicate("once", within=60)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

run(orders)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Pipeline(5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

# event time
KafkaSource("t", value=Order, time=EventTime("id", disorder=5))  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
KafkaSource("t", value=Order, disorder="5s")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
EventTime("id", on_error="drop")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
EventTime("id", lateness="5s")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
orders.with_time(lambda order: order.placed)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
orders.with_time("id", disorder=5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
orders.with_time("id", late=late)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
KafkaSource("t", value=Order, metadata=True)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
pipeline.source("r", KafkaSource.records("t", value=Order)).map(of_total)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
pipeline.source("f", FileSource.records("/data", value=Order)).filter(lambda record: record.total > 0)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]

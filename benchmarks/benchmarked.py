"""The pipelines that the benchmarks run; `by_hand.py` does the same without the engine."""

import asyncio
import time
from datetime import datetime
from hashlib import sha256
from typing import Any, Literal

import msgspec
from orders import CHEAP, Order, Payment, Priced, Total

from exactlyonce import (
    AvroCodec,
    Count,
    Emit,
    Enriched,
    EventTime,
    Hopping,
    Joined,
    Pipeline,
    ProtobufCodec,
    Session,
    Timers,
    Tumbling,
    Windowed,
)
from exactlyonce.connectors import FileSource, KafkaSource, PostgresChanges
from exactlyonce.pipeline.sink import Sink
from exactlyonce.pipeline.source import Source
from exactlyonce.pipeline.stream import Stream
from exactlyonce.sinks import DeltaSink, DuckDBSink, IcebergSink, KafkaSink, MySQLSink, PostgresSink, RedisSink


def passing(name: str, source: str, sink: str) -> Pipeline:
    """Bytes as they are."""
    pipeline = Pipeline(name)
    pipeline.source("in", KafkaSource(source, value=bytes)).sink("out", KafkaSink(sink))
    return pipeline


def price(order: Order) -> Priced:
    """The order in another unit."""
    return Priced(order.id, order.customer, order.total * 100)


def mapping(name: str, source: str, sink: str) -> Pipeline:
    """A filter and a map."""
    pipeline = Pipeline(name)
    (
        pipeline.source("in", KafkaSource(source, value=Order))
        .filter(lambda order: order.total >= CHEAP)
        .map(price)
        .sink("out", KafkaSink(sink, key=lambda priced: priced.customer))
    )
    return pipeline


def signed(order: Order) -> Priced:
    """The order with a number that takes some ten microseconds."""
    digest = order.customer.encode()
    for _ in range(20):
        digest = sha256(digest).digest()
    return Priced(order.id, order.customer, order.total + digest[0])


def signing(name: str, source: str, sink: str) -> Pipeline:
    """A map that takes longer than the reading."""
    pipeline = Pipeline(name)
    orders = pipeline.source("in", KafkaSource(source, value=Order))
    orders.map(signed).sink("out", KafkaSink(sink, key=lambda priced: priced.customer))
    return pipeline


def add(total: int | None, order: Order) -> tuple[int, Total]:
    """The running total."""
    total = (total or 0) + order.total
    return total, Total(order.customer, total, order.ts)


def _totals(
    name: str, orders: Source[Order], sink: str, function: Any = add, value: AvroCodec[Any] | None = None
) -> Pipeline:
    pipeline = Pipeline(name)
    totals = pipeline.source("in", orders).key_by(lambda order: order.customer).stateful_map("totals", function)
    totals.sink("out", KafkaSink(sink, value=value, key=lambda total: total.customer))
    return pipeline


def totals(name: str, source: str, sink: str) -> Pipeline:
    """A running total per customer."""
    return _totals(name, KafkaSource(source, value=Order), sink)


def file_totals(name: str, folder: str, sink: str) -> Pipeline:
    """A running total per customer, of the orders in the files of a folder."""
    return _totals(name, FileSource(folder, value=Order), sink)


def avro_totals(name: str, source: str, sink: str, registry: str) -> Pipeline:
    """`totals`, in Avro with a schema registry."""
    orders = KafkaSource(source, value=AvroCodec(Order, registry=registry))
    return _totals(name, orders, sink, value=avro_of(Total, registry))


def avro_of(type_: type[Any], registry: str) -> AvroCodec[Any]:
    """The codec that writes Avro."""
    return AvroCodec(type_, registry=registry, register=True)


def protobuf_totals(name: str, source: str, sink: str, registry: str) -> Pipeline:
    """`totals`, in Protobuf with a schema registry: messages are mapped to records that go to other processes."""
    from messages import OrderMessage, message_of, order_of

    pipeline = Pipeline(name)
    (
        pipeline.source("in", KafkaSource(source, value=ProtobufCodec(OrderMessage, registry=registry)))
        .map(order_of)
        .key_by(lambda order: order.customer)
        .stateful_map("totals", add)
        .map(message_of)
        .sink("out", KafkaSink(sink, value=protobuf_of(registry), key=lambda total: total.customer))
    )
    return pipeline


def protobuf_of(registry: str) -> ProtobufCodec[Any]:
    """The codec that writes Protobuf."""
    from messages import TotalMessage

    return ProtobufCodec(TotalMessage, registry=registry, register=True)


def event_ms(order: Order | Payment) -> int:
    """The event time of an order or a payment: its number, less up to 1.5 s."""
    return order.id + 2_000 - order.id * 7_919 % 1_500


def _timed(name: str, source: str) -> tuple[Pipeline, Stream[Order]]:
    """Orders with their event times."""
    pipeline = Pipeline(name)
    timed = KafkaSource(source, value=Order, time=EventTime(event_ms, disorder="2s", ahead=None))
    return pipeline, pipeline.source("in", timed)


def counted(count: int, order: Order) -> int:
    """One more."""
    return count + 1


def windowed(name: str, source: str, sink: str, window: str) -> Pipeline:
    """The number of orders per customer in windows of event time."""
    windows: dict[str, Tumbling | Hopping | Session] = {
        "tumbling": Tumbling("10s"), "folded": Tumbling("10s"), "hopping": Hopping("60s", every="5s"),
        "session": Session("3s"),
    }  # fmt: skip
    pipeline, orders = _timed(name, source)
    chosen = orders.key_by(lambda order: order.customer).window(windows[window])
    counts: Any = chosen.fold("counts", int, counted) if window == "folded" else chosen.aggregate("counts", Count())
    counts.sink("out", KafkaSink(sink, key=lambda count: count.key))
    return pipeline


class Counted(msgspec.Struct, frozen=True):
    """The number of a customer's orders in a window that begins at `start`, in ms."""

    customer: str
    start: int
    count: int


def as_counted(window: Windowed[str, int]) -> Counted:
    """The window as other systems write it."""
    return Counted(window.key, int(window.start.timestamp()) * 1000, window.value)


def counts(name: str, source: str, sink: str) -> Pipeline:
    """The number of orders per customer in windows of 10 s, in the form that other systems write, too."""
    pipeline, orders = _timed(name, source)
    windows = orders.key_by(lambda order: order.customer).window(Tumbling("10s")).aggregate("counts", Count())
    windows.map(as_counted).sink("out", KafkaSink(sink, key=lambda counted: counted.customer))
    return pipeline


class Paid(msgspec.Struct, frozen=True):
    """An order with its payment."""

    order: int
    customer: str
    total: int
    amount: int


def as_paid(joined: Joined[int, Order, Payment]) -> Paid:
    """Both as other systems write them."""
    return Paid(joined.key, joined.left.customer, joined.left.total, joined.right.amount)


def payments(name: str, source: str, sink: str) -> Pipeline:
    """Orders joined with their payments of the next 5 s; *source* names both topics."""
    pipeline = Pipeline(name)
    topics = source.split(",")
    by_number = EventTime(event_ms, disorder="2s", ahead=None)
    orders = pipeline.source("orders", KafkaSource(topics[0], value=Order, time=by_number))
    payments = pipeline.source("payments", KafkaSource(topics[1], value=Payment, time=by_number))
    paid = orders.key_by(lambda order: order.id).join(
        "paid", payments.key_by(lambda payment: payment.order), within=("0s", "5s")
    )
    paid.map(as_paid).sink("out", KafkaSink(sink, key=lambda paid: paid.customer))
    return pipeline


def once(name: str, source: str, sink: str) -> Pipeline:
    """Each order once, without those that come again within an hour."""
    pipeline, orders = _timed(name, source)
    first = orders.key_by(lambda order: order.id).deduplicate("once", within="1h", order="arrival")
    first.sink("out", KafkaSink(sink, key=lambda order: order.customer))
    return pipeline


def rounds(name: str, source: str, sink: str, orders: str) -> Pipeline:
    """The number of orders per customer in windows that end at once: one window has all of *orders* orders."""
    pipeline, count = Pipeline(name), int(orders)
    numbered = KafkaSource(source, value=Order, time=EventTime(lambda order: order.id // count * 10_000, ahead=None))
    counts = pipeline.source("in", numbered).key_by(lambda order: order.customer).window(Tumbling("10s"))
    counts.aggregate("counts", Count()).sink("out", KafkaSink(sink, key=lambda count: count.key))
    return pipeline


def quiet(name: str, source: str, sink: str, idle: str) -> Pipeline:
    """The number of orders per customer in windows of a second that close once no order has come for *idle*."""
    pipeline = Pipeline(name)
    orders = KafkaSource(
        source, value=Order, time=EventTime(lambda order: order.ts // 1000, disorder="1s", idle=idle, ahead=None)
    )
    counts = pipeline.source("in", orders).key_by(lambda order: order.customer).window(Tumbling("1s"))
    counts.aggregate("counts", Count()).sink("out", KafkaSink(sink, key=lambda count: count.key))
    return pipeline


IDS = 1_000_000


def deduplicated(name: str, source: str, sink: str, order: Literal["time", "arrival"] = "time") -> Pipeline:
    """The first order of each of many ids."""
    pipeline, orders = _timed(name, source)
    once = orders.key_by(lambda order: order.id % IDS).deduplicate("once", within="1h", order=order)
    once.sink("out", KafkaSink(sink, key=lambda order: order.customer))
    return pipeline


def joined(name: str, source: str, sink: str, kind: str) -> Pipeline:
    """Orders as of one in ten of them, the versions; or the even ones with the odd ones of the next two, so that each
    has one partner."""
    pipeline, orders = _timed(name, source)
    if kind == "as-of":
        versions = orders.filter(lambda order: order.id % 11 == 0).key_by(lambda order: order.customer)
        lefts = orders.filter(lambda order: order.id % 11 != 0).key_by(lambda order: order.customer)
        results: Any = lefts.as_of("joined", versions)
    else:
        evens = orders.filter(lambda order: order.id % 2 == 0).key_by(lambda order: order.id // 2)
        odds = orders.filter(lambda order: order.id % 2 == 1).key_by(lambda order: order.id // 2)
        results = evens.join("joined", odds, within=("-2s", "2s"))
    results.sink("out", KafkaSink(sink, key=lambda joined: joined.key))
    return pipeline


class Named(msgspec.Struct):
    """A customer."""

    name: str


def customer_of(order: Order) -> str:
    """The key of the customer."""
    return order.customer


def named(name: str, source: str, sink: str, customers: str) -> Pipeline:
    """A table of orders with their customers, of another table."""
    pipeline = Pipeline(name)
    orders = pipeline.table("orders", KafkaSource.records(source, key=str, value=Order))
    rows = pipeline.table("customers", KafkaSource.records(customers, key=str, value=Named))
    orders.join_table("named", rows, by=customer_of).changes().sink("out", KafkaSink(sink))
    return pipeline


class Quiet:
    """Tells of a customer with no order for a second."""

    def on_record(self, key: str, latest: int | None, order: Order, timers: Timers, emit: Emit[Total]) -> int:
        timers.event.set(event_ms(order) + 1_000)
        return max(latest or 0, event_ms(order))

    def on_time(self, key: str, latest: int | None, at: datetime, timers: Timers, emit: Emit[Total]) -> int | None:
        if latest is not None and timers.event.now_ms == latest + 1_000:
            emit(Total(key, latest, 0))
        return latest


def paired(name: str, source: str, sink: str) -> Pipeline:
    """Orders joined with their partners, as `joined` does, and customers without an order for a second by timers."""
    pipeline, orders = _timed(name, source)
    evens = orders.filter(lambda order: order.id % 2 == 0).key_by(lambda order: order.id // 2)
    odds = orders.filter(lambda order: order.id % 2 == 1).key_by(lambda order: order.id // 2)
    evens.join("joined", odds, within=("-2s", "2s")).sink("out", KafkaSink(sink, key=lambda joined: joined.key))
    quiet = orders.key_by(lambda order: order.customer).process("quiet", Quiet)
    quiet.sink("quiet-out", KafkaSink(sink, key=lambda total: total.customer))
    return pipeline


ANSWER_S = 0.02
IN_FLIGHT = 200


async def prices(orders: list[Order]) -> list[int]:
    """The answers of a service that takes some time for them."""
    await asyncio.sleep(ANSWER_S)
    return [order.total * 100 for order in orders]


def priced(asked: Enriched[Order, int]) -> Priced:
    """The order with its price."""
    return Priced(asked.record.id, asked.record.customer, asked.answer)


def enriched(name: str, source: str, sink: str, batch: str) -> Pipeline:
    """Orders with their prices by a service, *batch* of them a call."""
    pipeline = Pipeline(name)
    orders = pipeline.source("in", KafkaSource(source, value=Order))
    (
        orders.enrich("prices", prices, batch=int(batch), in_flight=IN_FLIGHT)
        .map(priced)
        .sink("out", KafkaSink(sink, key=lambda priced: priced.customer))
    )
    return pipeline


def same(order: Order) -> Order:
    """The record as it is."""
    return order


def same_records(name: str, source: str, sink: str) -> Pipeline:
    """A map that does nothing."""
    pipeline = Pipeline(name)
    orders = pipeline.source("in", KafkaSource(source, value=Order))
    orders.map(same).sink("out", KafkaSink(sink, key=lambda order: order.customer))
    return pipeline


def same_batch(batch: Any) -> Any:
    """The batch as it is."""
    return batch


def same_batches(name: str, source: str, sink: str) -> Pipeline:
    """A map of Arrow batches that does nothing."""
    pipeline = Pipeline(name)
    orders = pipeline.source("in", KafkaSource(source, value=Order))
    orders.map_batches(same_batch, schema=Order).sink("out", KafkaSink(sink, key=lambda order: order.customer))
    return pipeline


SLOW_S = 0.001


def add_slowly(total: int | None, order: Order) -> tuple[int, Total]:
    """The running total, as slow as a request for each record would make it."""
    time.sleep(SLOW_S)
    return add(total, order)


def slow_totals(name: str, source: str, sink: str) -> Pipeline:
    """`totals`, slow after its shuffle."""
    return _totals(name, KafkaSource(source, value=Order), sink, add_slowly)


def after_shuffles(name: str, source: str, sink: str, shuffles: int, ms: float) -> Pipeline:
    """Counts after *shuffles* shuffles, of which the last takes *ms* for each record."""

    def count(seen: int | None, order: Order) -> tuple[int, Order]:
        return (seen or 0) + 1, order

    def count_slowly(seen: int | None, order: Order) -> tuple[int, Order]:
        time.sleep(ms / 1000)
        return count(seen, order)

    pipeline = Pipeline(name)
    orders = pipeline.source("in", KafkaSource(source, value=Order))
    for number in range(1, shuffles):
        orders = orders.key_by(lambda order: order.customer).stateful_map(f"count-{number}", count)
    slow = orders.key_by(lambda order: order.customer).stateful_map("slow", count_slowly)
    slow.sink("out", KafkaSink(sink, key=lambda order: order.customer))
    return pipeline


def pad(value: bytes) -> bytes:
    """*value* in 1,000 bytes."""
    return value.ljust(1_000)


def padded(name: str, source: str, sink: str) -> Pipeline:
    """Bytes, padded."""
    pipeline = Pipeline(name)
    pipeline.source("in", KafkaSource(source, value=bytes)).map(pad).sink("out", KafkaSink(sink))
    return pipeline


def _stored(name: str, source: str, sink: Sink[Order]) -> Pipeline:
    pipeline = Pipeline(name)
    pipeline.source("in", KafkaSource(source, value=Order)).sink("out", sink)
    return pipeline


def to_postgres(name: str, source: str, place: str) -> Pipeline:
    """Orders as rows of a table."""
    return _stored(name, source, PostgresSink("orders", dsn=place))


def to_duckdb(name: str, source: str, place: str) -> Pipeline:
    """Orders as rows of a table in the file *place*."""
    return _stored(name, source, DuckDBSink(place, table="orders"))


def captured(
    name: str, dsn: str, table: str, slot: str, snapshot: Literal["pages", "never"], sink: str
) -> Pipeline:  # fmt: skip
    """The changes of a table of orders, by their keys."""
    pipeline = Pipeline(name)
    changes = PostgresChanges(table, dsn=dsn, key="id", value=Order, slot=slot, snapshot=snapshot)
    pipeline.source("in", changes).sink("out", KafkaSink(sink))
    return pipeline


def to_mariadb(name: str, source: str, place: str) -> Pipeline:
    """Orders as rows of a table."""
    return _stored(name, source, MySQLSink("orders", dsn=place))


def to_redis(name: str, source: str, place: str) -> Pipeline:
    """Each order as JSON under a key of its own."""
    return _stored(name, source, RedisSink(place, key=lambda order: f"order:{order.id}"))


def to_delta(name: str, source: str, place: str) -> Pipeline:
    """Orders as rows of a table in a folder."""
    return _stored(name, source, DeltaSink(f"{place}/orders", create=True))


def to_iceberg(name: str, source: str, place: str) -> Pipeline:
    """Orders as rows of a table whose catalog is beside it."""
    return _stored(name, source, IcebergSink("shop.orders", catalog=iceberg_properties(place), create=True))


def iceberg_properties(place: str) -> dict[str, str]:
    """A catalog in a folder."""
    return {"type": "sql", "uri": f"sqlite:///{place}/catalog.db", "warehouse": f"file://{place}"}


class Profile(msgspec.Struct, frozen=True):
    """A state of some size."""

    sum: int
    orders: int
    address: str


def add_to_profile(profile: Profile | None, order: Order) -> tuple[Profile, Total]:
    """The running total, in a larger state."""
    street = f"Street of the Long Names {order.id % 997}, {order.id:08d} Upper and Lower Riverside"
    profile = profile or Profile(0, 0, f"{order.customer}, {street}")
    profile = Profile(profile.sum + order.total, profile.orders + 1, profile.address)
    return profile, Total(order.customer, profile.sum, order.ts)


def profiles(name: str, source: str, sink: str) -> Pipeline:
    """A running total per customer, whose state is larger than a number."""
    return _totals(name, KafkaSource(source, value=Order), sink, add_to_profile)

"""Pipelines that bounded work is tested with; units import this module by its name."""

import os

import msgspec
from pipelines import LATE, Order, Total, Unopened, add, copied, everything, reading, reading_two, split, summed

from exactlyonce import DeadLetters, Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.pipeline.functions import Context
from exactlyonce.sinks import KafkaSink


class Round(msgspec.Struct):
    id: int
    bucket: int
    number: int


def count(seen: int | None, total: Total) -> tuple[int, Round]:
    number = (seen or 0) + 1
    return number, Round(total.id, total.id % 7, number)


def broad(name: str) -> Pipeline:
    """Two sources, a union, two shuffles, three sinks: copies, running totals, and the totals numbered by bucket."""
    pipeline, orders = reading_two(name)
    copied(orders, name)
    (
        summed(orders, name)
        .key_by(lambda total: total.id % 7)
        .stateful_map("rounds", count)
        .sink("rounds-out", KafkaSink(f"{name}-rounds", key=lambda each: str(each.bucket)))
    )
    return pipeline


def every(name: str) -> Pipeline:
    """Every operator there is, three sources, a union, two shuffles in a row, side outputs, seven sinks."""
    pipeline = everything(name, os.devnull)
    (
        pipeline.source("again", KafkaSource(f"{name}-again", value=Order))
        .filter(lambda order: order.total % 3 != 0)
        .key_by(lambda order: order.id % 11)
        .stateful_map("by-id", add)
        .key_by(lambda total: total.customer)
        .stateful_map("updates", count)
        .sink("updates-out", KafkaSink(f"{name}-updates", key=lambda each: str(each.bucket)))
    )
    return pipeline


def doubled(order: Order) -> Order:
    order.total *= 2
    return order


def changing(name: str) -> Pipeline:
    """Running totals, and beside them a branch that changes its records in place."""
    pipeline, orders = reading(name, "left")
    summed(orders, name)
    copied(orders.map(doubled), name)
    return pipeline


class Closing:
    def __call__(self, order: Order) -> Order:
        if order.total < 0:
            raise ValueError("negative")
        return order

    def close(self) -> None:
        raise RuntimeError("connection already closed")


def closing(name: str) -> Pipeline:
    pipeline, orders = reading(name, "left")
    copied(orders.map(Closing, id="copy"), name)
    return pipeline


def alike(name: str) -> Pipeline:
    """Two shuffles whose operators' ids have the same letters, one after the other."""
    pipeline, orders = reading(name, "left")
    by_customer = orders.key_by(lambda order: order.customer, id="by").stateful_map("customer-totals", add)
    by_customer.sink("out", KafkaSink(f"{name}-out", key=lambda total: total.customer))
    by_id = orders.key_by(lambda order: order.id % 7, id="by-customer").stateful_map("totals", add)
    by_id.sink("copies", KafkaSink(f"{name}-copies", key=lambda total: total.customer))
    return pipeline


def narrow(name: str, max_parallelism: int = 2) -> Pipeline:
    """Running totals whose keys are divided into two groups only."""
    pipeline, orders = reading_two(name, max_parallelism=max_parallelism)
    summed(orders, name)
    return pipeline


def fine(name: str) -> Pipeline:
    """Running totals whose keys are divided into more groups than a manifest has room for subtasks."""
    return narrow(name, max_parallelism=16_384)


def chained(state: int | None, order: Order) -> tuple[int, Total]:
    """A number that tells in which order the orders of a customer came."""
    number = ((state or 0) * 31 + order.id) % (1 << 61)
    return number, Total(order.id, order.customer, number)


def unless_refused(order: Order) -> Order:
    if order.total % 13 == 0:
        raise ValueError("refused")
    return order


def customer_of(order: Order) -> str | None:
    return order.customer


def some_customer_of(order: Order) -> str | None:
    return order.customer if order.id % 7 else None


def wide(name: str, source: str, keys: str = "all", on_error: str = "skip") -> Pipeline:
    """One source, for splits of its partitions: copies and dead letters in its task, and a chain after a shuffle.

    *keys*: the copies that have one, all, some or none. *on_error*: that of the source, "skip" or "letters".
    """
    letters, key = DeadLetters(f"{name}-letters"), {"all": customer_of, "some": some_customer_of, "none": None}[keys]
    pipeline = Pipeline(name)
    read = KafkaSource(source, value=Order, on_error=letters if on_error == "letters" else "skip")
    orders = pipeline.source("orders", read)
    good = orders.map(unless_refused, id="refusing", on_error=letters)
    good.sink("copies", KafkaSink(f"{name}-copies", key=key))
    chains = good.key_by(lambda order: order.customer).stateful_map("chain", chained)
    chains.sink("out", KafkaSink(f"{name}-out", key=lambda total: total.customer))
    return pipeline


def rejoined(name: str) -> Pipeline:
    """A stream that parts and meets itself again, so that the order of its records depends on what came together."""
    pipeline, orders = reading(name)
    both = orders.split(split, id="split", outputs=[LATE])
    meeting = both.map(lambda order: order, id="same", output=Order).union(both.side(LATE), orders)
    meeting.sink("met", KafkaSink(f"{name}-met"))
    meeting.key_by(lambda order: order.customer).stateful_map("chain", chained).sink("out", KafkaSink(f"{name}-out"))
    return pipeline


class Opened:
    count = 0

    def open(self, context: Context) -> None:
        Opened.count += 1

    def close(self) -> None:
        Opened.count -= 1

    def __call__(self, order: Order) -> Order:
        return order


def half_opened(name: str) -> Pipeline:
    pipeline, orders = reading(name)
    opened = orders.map(Opened, id="first", output=Order).map(Unopened, id="second", output=Order)
    opened.sink("out", KafkaSink(f"{name}-out"))
    return pipeline

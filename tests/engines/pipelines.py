"""Pipelines that the tests run as `exactlyonce run pipelines:...`; every worker imports this module."""

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from exactlyonce import Context, DeadLetters, Emit, Output, Pipeline, SideEmit, Stream
from exactlyonce.connectors import Cluster, KafkaSource
from exactlyonce.pipeline.stream import Partitioner
from exactlyonce.sinks import KafkaSink


class Order(msgspec.Struct):
    id: int
    customer: str
    total: int


class Total(msgspec.Struct):
    id: int
    customer: str
    sum: int


def add(total: int | None, order: Order) -> tuple[int, Total]:
    total = (total or 0) + order.total
    return total, Total(order.id, order.customer, total)


Prepare = Callable[[Stream[Order]], Stream[Order]]
Fold = Callable[[int | None, Order], tuple[int, Total]]


def _by_customer(total: Total) -> str:
    return total.customer


def _customer(order: Order) -> str:
    return order.customer


def reading(name: str, id: str = "orders") -> tuple[Pipeline, Stream[Order]]:
    """A pipeline, and the orders of topic NAME-in."""
    pipeline = Pipeline(name)
    return pipeline, pipeline.source(id, KafkaSource(f"{name}-in", value=Order))


def reading_two(name: str, **options: Any) -> tuple[Pipeline, Stream[Order]]:
    """A pipeline, and the orders of topics NAME-in and NAME-more, united."""
    pipeline = Pipeline(name, **options)
    left, right = (
        pipeline.source(id, KafkaSource(f"{name}-{topic}", value=Order))
        for id, topic in (("left", "in"), ("right", "more"))
    )
    return pipeline, left.union(right)


def copied(orders: Stream[Order], name: str) -> None:
    """Write every order to NAME-copies."""
    orders.sink("copies", KafkaSink(f"{name}-copies", key=lambda order: str(order.id)))


def summed(orders: Stream[Order], name: str, sink: str = "out") -> Stream[Total]:
    """The running totals of *orders*, which go to NAME-out."""
    totals = orders.key_by(lambda order: order.customer).stateful_map("totals", add)
    totals.sink(sink, KafkaSink(f"{name}-out", key=_by_customer))
    return totals


def copied_and_summed(name: str, folder: str = "", sink: str = "out") -> tuple[Pipeline, Stream[Total]]:
    """A pipeline from NAME-in to NAME-copies and NAME-out, and its totals; *folder*: workers stop, see `stopper`."""
    pipeline, orders = reading(name)
    if folder:
        orders = orders.map(stopper(folder), id="stop")
    copied(orders, name)
    return pipeline, summed(orders, name, sink)


def _totals(
    name: str,
    prepare: Prepare = lambda orders: orders,
    fold: Fold = add,
    *,
    operator: str = "totals",
    partitioned: bool | Partitioner = False,
    on_error: Literal["fail", "skip"] = "fail",
    create_partitions: int | None = 4,
) -> Pipeline:
    """Topic NAME-in, as *prepare* leaves it, through a running total to NAME-out."""
    pipeline = Pipeline(name)
    orders = prepare(pipeline.source("orders", KafkaSource(f"{name}-in", value=Order, on_error=on_error)))
    keyed = orders.key_by(lambda order: order.customer, partitioned=partitioned)
    sink = KafkaSink[Total](f"{name}-out", key=_by_customer, create_partitions=create_partitions)
    keyed.stateful_map(operator, fold).sink("out", sink)
    return pipeline


def _slowly(pause_s: float) -> Fold:
    def add_slowly(total: int | None, order: Order) -> tuple[int, Total]:
        time.sleep(pause_s)  # a slow user function
        return add(total, order)

    return add_slowly


def linear(name: str) -> Pipeline:
    """Topic NAME-in through a running total to NAME-out."""
    return _totals(name, lambda orders: orders.filter(lambda order: order.total > 0))


def strict(name: str) -> Pipeline:
    return _totals(name, create_partitions=None)


def skipping(name: str) -> Pipeline:
    return _totals(name, on_error="skip")


class Running(msgspec.Struct):
    """A state that functions change in place."""

    sum: int = 0


def lettered(name: str, max_per_checkpoint: str = "") -> Pipeline:
    """Every part of it fails on some orders, which go to NAME-dead; whatever is killed, once."""

    def checked(order: Order) -> Order:
        return order if order.total % 5 else [order][order.total]

    def summed(state: Running | None, order: Order) -> tuple[Running, Total]:
        state = state or Running()
        state.sum += order.total
        if order.total % 7 == 0:
            raise ArithmeticError(f"{order.total} for {object()}")
        return state, Total(order.id, order.customer, state.sum)

    def key(total: Total) -> str:
        return {0: "even", 1: "odd"}[total.id % 11]

    dead = DeadLetters(f"{name}-dead", max_per_checkpoint=int(max_per_checkpoint) if max_per_checkpoint else None)
    pipeline = Pipeline(name)
    orders = pipeline.source("orders", KafkaSource(f"{name}-in", value=Order, on_error=dead))
    totals = orders.map(checked, id="checked", on_error=dead).key_by(_customer)
    folded = totals.stateful_map("totals", summed, on_error=dead)
    folded.sink("out", KafkaSink(f"{name}-out", key=key), on_error=dead)
    return pipeline


def tallied(name: str, code: Literal["before", "after", "counting"]) -> Pipeline:
    """A sum for each customer. Code *after* the one *before* knows a count too, and *counting* code changes it."""
    count = [("count", int, 0)] if code != "before" else []
    tally: Any = msgspec.defstruct("Tally", [("sum", int), *count])

    def fold(state: Any, order: Order) -> tuple[Any, Total]:
        sum = (state.sum if state else 0) + order.total
        return tally(sum, *([1] if code == "counting" else [])), Total(order.id, order.customer, sum)

    pipeline, orders = reading(name)
    totals = orders.key_by(_customer).stateful_map("totals", fold, state=tally, output=Total)
    totals.sink("out", KafkaSink(f"{name}-out", create_partitions=1))
    return pipeline


def renamed(name: str) -> Pipeline:
    return _totals(name, operator="sums")


def partitioned(name: str) -> Pipeline:
    """`linear` without a shuffle: the input is partitioned by customer already."""
    return _totals(name, partitioned="consistent_random")


def misplaced(name: str) -> Pipeline:
    """`partitioned`, by a partitioner that is not the one of the input."""
    return _totals(name, partitioned=True)


def raising(name: str) -> Pipeline:
    def fail(total: int | None, order: Order) -> tuple[int, Total]:
        return add(total, order) if order.id != 42 else (1 // 0, Total(0, "", 0))

    return _totals(name, fold=fail)


def slow(name: str, pause_ms: int) -> Pipeline:
    def waited(order: Order) -> Order:
        time.sleep(pause_ms / 1000)  # a slow user function
        return order

    return _totals(name, lambda orders: orders.map(waited))


def slow_behind_a_shuffle(name: str, pause_ms: int) -> Pipeline:
    return _totals(name, fold=_slowly(pause_ms / 1000))


def stopper(folder: str) -> Callable[[Order], Order]:
    """A worker stops itself at orders 3500, 4500, ..., once each; a file of that name in *folder* has its pid."""

    def stop(order: Order) -> Order:
        marker = Path(folder) / str(order.id)
        if order.id >= 3500 and order.id % 1000 == 500 and not marker.exists():
            marker.with_suffix(".new").write_text(str(os.getpid()))
            marker.with_suffix(".new").rename(marker)
            os.kill(os.getpid(), signal.SIGSTOP)
        return order

    return stop


def stopping(name: str, folder: str) -> Pipeline:
    return _totals(name, lambda orders: orders.map(stopper(folder)))


def stuck(name: str, folder: str) -> Pipeline:
    """`linear`, whose map waits at order 100 for as long as there is a file FOLDER/wait."""

    def wait(order: Order) -> Order:
        while order.id == 100 and (Path(folder) / "wait").exists():
            time.sleep(0.05)  # a call that does not come back
        return order

    return _totals(name, lambda orders: orders.map(wait, id="enrich"))


class Hanging:
    """An operator whose `open` does not return while there is a file FOLDER/wait; worker 1 alone if there are two."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def open(self, context: Context) -> None:
        while context.subtask == context.parallelism - 1 and (self.folder / "wait").exists():
            time.sleep(0.05)  # a server that does not answer

    def __call__(self, order: Order) -> Order:
        return order


def hanging(name: str, folder: str) -> Pipeline:
    return _totals(name, lambda orders: orders.map(partial(Hanging, folder), id="enrich"))


def diamond(name: str) -> Pipeline:
    pipeline, orders = reading_two(name)
    copied(orders, name)
    summed(orders, name)
    return pipeline


def _copied(name: str, function: Any, **options: Any) -> Pipeline:
    pipeline, orders = reading(name)
    orders.map(function, **options).sink("out", KafkaSink(f"{name}-out"))
    return pipeline


def exiting(name: str) -> Pipeline:
    return _copied(name, lambda order: order if order.id != 42 else sys.exit("enough"), id="copy", output=Order)


class Unopened:
    def open(self, context: Context) -> None:
        raise OSError("no database today")

    def __call__(self, order: Order) -> Order:
        return order


def unopened(name: str) -> Pipeline:
    return _copied(name, Unopened, id="enrich", output=Order)


class Tagged(msgspec.Struct):
    id: int
    tag: str


class Tagger:
    def __init__(self, log: str) -> None:
        self.log = Path(log)

    def open(self, context: Context) -> None:
        self.write(f"open {context.operator} {context.subtask}/{context.parallelism}")

    def __call__(self, order: Order) -> Tagged:
        return Tagged(order.id, f"c-{order.customer}")

    def close(self) -> None:
        self.write("close")

    def write(self, line: str) -> None:
        with self.log.open("a") as file:
            file.write(line + "\n")


class Pair(msgspec.Struct):
    customer: str
    largest: int


LATE = Output("late", Order)


def split(order: Order, emit: Emit[Order]) -> None:
    if order.id % 2:
        emit(order, LATE)
    else:
        emit(order)


THIRD = Output("third", Order)


def twice(count: int | None, order: Order, emit: SideEmit) -> tuple[int | None, list[str]]:
    """Every customer's third order ends its state; each order gives its number, and once more for the third."""
    number = (count or 0) + 1
    if number == 3:
        emit(order, THIRD)
    return (None if number == 3 else number), [f"{order.id}:{number}"] * (2 if number == 3 else 1)


def everything(name: str, log: str) -> Pipeline:
    pipeline = Pipeline(name)
    seen: list[int] = []
    records = pipeline.source("orders", KafkaSource.records(f"{name}-in", value=Order, key=str))
    orders = records.map(lambda record: record.value, output=Order).peek(lambda order: seen.append(order.id))
    tagger = partial(Tagger, log)
    orders.map(tagger, id="tag").sink("tags", KafkaSink(f"{name}-tags", key=lambda tagged: tagged.tag))
    records.sink("echo", KafkaSink(f"{name}-echo"))
    both = orders.split(split, id="split", outputs=[LATE])
    both.side(LATE).sink("late", KafkaSink(f"{name}-late", key=lambda order: str(order.id)))
    numbers = (
        both.union(pipeline.source("more", KafkaSource(f"{name}-more", value=Order)))
        .flat_map(lambda order: [order, order], output=Order)
        .key_by(lambda order: order.customer)
        .stateful_flat_map("twice", twice, outputs=[THIRD])
    )
    numbers.sink("numbers", KafkaSink(f"{name}-numbers"))
    numbers.side(THIRD).sink("third", KafkaSink(f"{name}-third", key=lambda order: order.customer))
    (
        orders.map(lambda order: Pair(order.customer, order.total), output=Pair)
        .key_by(lambda pair: pair.customer)
        .reduce("maximum", lambda a, b: a if a.largest >= b.largest else b)
        .sink("largest", KafkaSink(f"{name}-largest", key=lambda pair: pair.customer))
    )
    return pipeline


def starting(name: str, start: str) -> Pipeline:
    """Bytes through, from a start position; "offsets" is offset 60 of partition 0."""
    pipeline = Pipeline(name)
    position: Any = {0: 60} if start == "offsets" else start
    source = KafkaSource(f"{name}-in", value=bytes, start=position)
    pipeline.source("orders", source).sink("out", KafkaSink(f"{name}-out"))
    return pipeline


def moved_over(name: str, group: str) -> Pipeline:
    """Copies of orders, from the offsets of a consumer group on."""
    pipeline = Pipeline(name)
    orders = pipeline.source("orders", KafkaSource(f"{name}-in", value=Order, start_group=group))
    orders.sink("copies-out", KafkaSink(f"{name}-copies", key=_customer))
    return pipeline


def several_topics(name: str) -> Pipeline:
    """Copies of the orders of two topics, with even and with odd ids in topics of their own."""
    pipeline = Pipeline(name)
    orders = pipeline.source("orders", KafkaSource([f"{name}-in", f"{name}-in.more"], value=Order))
    chosen = [f"{name}-even", f"{name}-odd.ids"]
    orders.sink("copies", KafkaSink(lambda order: chosen[order.id % 2], topics=chosen, key=_customer))
    return pipeline


class Odd(msgspec.Struct):
    """Fields of an order, so that only the class says what it is."""

    id: int
    customer: str
    total: int


def odd(order: Order) -> Odd:
    return Odd(order.id, order.customer, order.total)


def untagged(name: str, pause_ms: int) -> Pipeline:
    """Orders of two classes without tags, dealt by customer to a running total that knows each class by its number."""
    pipeline, orders = reading(name)

    def add_slowly(total: int | None, order: Order | Odd) -> tuple[int, Total]:
        if isinstance(order, Odd) != bool(order.id % 2):
            raise ValueError(f"{order} is of another class than it was")
        time.sleep(pause_ms / 1000)
        total = (total or 0) + order.total
        return total, Total(order.id, order.customer, total)

    odds = orders.filter(lambda order: order.id % 2).map(odd)
    both = orders.filter(lambda order: not order.id % 2).union(odds).key_by(lambda order: order.customer)
    both.stateful_map("totals", add_slowly).sink("out", KafkaSink(f"{name}-out", key=_by_customer))
    return pipeline


def two_shuffles(name: str, pause_ms: int) -> Pipeline:
    """NAME-in and NAME-more united, dealt by id, then by customer to a running total with a pause at every record."""
    pipeline, orders = reading_two(name)

    def passed(count: int | None, order: Order) -> tuple[int, Order]:
        return (count or 0) + 1, order

    dealt = orders.key_by(lambda order: order.id % 7).stateful_map("passed", passed)
    totals = dealt.key_by(lambda order: order.customer).stateful_map("totals", _slowly(pause_ms / 1000))
    totals.sink("out", KafkaSink(f"{name}-out", key=_by_customer))
    return pipeline


def parting(name: str, pause_ms: int) -> Pipeline:
    """NAME-in parts, is dealt by customer on both ways, and meets again behind a running total on one of them."""
    pipeline, orders = reading(name)

    def seen(count: int | None, order: Order) -> tuple[int, Total]:
        return (count or 0) + 1, Total(order.id, f"seen {order.customer}", (count or 0) + 1)

    totals = orders.key_by(lambda order: order.customer).stateful_map("totals", _slowly(pause_ms / 1000))
    counts = orders.key_by(lambda order: order.customer).stateful_map("counts", seen)
    totals.sink("out", KafkaSink(f"{name}-out", key=_by_customer))
    totals.union(counts).sink("both", KafkaSink(f"{name}-both", key=_by_customer))
    return pipeline


def slices(name: str) -> Pipeline:
    """Slow operators after a shuffle, whose slices decide the order of the output: a stream parts and meets."""
    pipeline, left = reading(name)
    keyed = left.union(pipeline.source("more", KafkaSource(f"{name}-more", value=Order))).key_by(
        lambda order: order.customer
    )
    totals = keyed.stateful_map("totals", _slowly(0.004))
    copies = totals.map(lambda total: Total(-total.id, total.customer, total.sum), output=Total)
    totals.union(copies).sink("out", KafkaSink(f"{name}-out", key=_by_customer))
    return pipeline


def enriched(name: str) -> Pipeline:
    pipeline, read = reading(name)
    counted = read.key_by(lambda order: order.customer).stateful_map("totals", add)
    read.map(lambda order: Total(order.id, order.customer, order.total), output=Total).union(counted).sink(
        "out", KafkaSink(f"{name}-out")
    )
    return pipeline


def other_cluster(name: str, servers: str = "env:EU_SERVERS") -> Pipeline:
    """The totals of NAME-in in another cluster."""
    pipeline = Pipeline(name)
    eu = Cluster("eu", {"bootstrap.servers": servers})
    summed(pipeline.source("orders", KafkaSource(f"{name}-in", value=Order, cluster=eu)), name)
    return pipeline

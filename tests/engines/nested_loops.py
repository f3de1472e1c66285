"""A pipeline with a loop in a loop, which the tests run as `exactlyonce run nested_loops:pipeline`."""

import msgspec

from exactlyonce import Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import KafkaSink


class Order(msgspec.Struct):
    id: int


class Round(msgspec.Struct):
    """An order on its way, with the rounds that it has made; of the inner loop, since the last of the outer one."""

    id: int
    outer: int = 0
    inner: int = 0
    firsts: int = 0
    seconds: int = 0
    """How often the operators of the two loops have counted it."""


def begin(order: Order) -> Round:
    return Round(order.id)


def count_first(count: int | None, each: Round) -> tuple[int, Round]:
    total = (count or 0) + 1
    return total, msgspec.structs.replace(each, firsts=total)


def count_second(count: int | None, each: Round) -> tuple[int, Round]:
    total = (count or 0) + 1
    return total, msgspec.structs.replace(each, seconds=total)


def rounds(id: int) -> tuple[int, int]:
    """How often an order goes round the outer loop, and each time round the inner one."""
    return id % 4, id % 3


def goes_near(each: Round) -> bool:
    return each.inner < rounds(each.id)[1]


def goes_far(each: Round) -> bool:
    return not goes_near(each) and each.outer < rounds(each.id)[0]


def near(each: Round) -> Round:
    return msgspec.structs.replace(each, inner=each.inner + 1)


def far(each: Round) -> Round:
    return msgspec.structs.replace(each, outer=each.outer + 1, inner=0)


def pipeline(name: str, pause: str) -> Pipeline:
    """Topic NAME-in to NAME-out; *pause* is that of each round."""
    pipeline = Pipeline(name)
    outer = pipeline.feedback("outer", Round, pause=pause)
    inner = pipeline.feedback("inner", Round, pause=pause)
    orders = pipeline.source("orders", KafkaSource(f"{name}-in", value=Order)).map(begin)
    firsts = orders.union(outer).key_by(lambda each: each.id).stateful_map("firsts", count_first)
    seconds = firsts.union(inner).key_by(lambda each: each.id).stateful_map("seconds", count_second)
    seconds.filter(goes_near).map(near).feed(inner)
    seconds.filter(goes_far).map(far).feed(outer)
    done = seconds.filter(lambda each: not goes_near(each) and not goes_far(each))
    done.sink("out", KafkaSink(f"{name}-out", key=lambda each: str(each.id)))
    return pipeline

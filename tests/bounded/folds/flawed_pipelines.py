"""A pipeline that does wrong by one output of each kind if the environment says so; else it is `diamond`."""

import os

import msgspec
from pipelines import Total, add, reading_two

from exactlyonce import Pipeline
from exactlyonce.sinks import KafkaSink

FLAWED = "EXACTLYONCE_TEST_FLAWED"
DROPPED, DOUBLED, CHANGED, MOVED = 101, 202, 303, 404
"""The ids of the orders whose update it does wrong by."""


class Flawed:
    """Drops, doubles and changes one update each, and moves one behind the next of its customer."""

    def __init__(self) -> None:
        self._held: Total | None = None

    def __call__(self, total: Total) -> list[Total]:
        if os.environ.get(FLAWED) != "1":
            return [total]
        match total.id:
            case 101:
                return []
            case 202:
                return [total, total]
            case 303:
                return [msgspec.structs.replace(total, sum=-1)]
            case 404:
                self._held = total
                return []
        if self._held is not None and self._held.customer == total.customer:
            held, self._held = self._held, None
            return [total, held]
        return [total]


def flawed(name: str) -> Pipeline:
    """Two sources, a union, a shuffle; copies without a key, and running totals with one wrong of each kind."""
    pipeline, orders = reading_two(name)
    orders.sink("copies", KafkaSink(f"{name}-copies"))
    (
        orders.key_by(lambda order: order.customer)
        .stateful_map("totals", add)
        .flat_map(Flawed, output=Total)
        .sink("out", KafkaSink(f"{name}-out", key=lambda total: total.customer))
    )
    return pipeline

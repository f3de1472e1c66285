"""Orders whose charging may fail, tried again after growing pauses: 1, 2, 4 ... rounds of a loop that rests a while.

    exactlyonce run retry:pipeline --bootstrap-servers 127.0.0.1:9092

A pause is counted in rounds, not read from a clock, so a replay gives the same. Waiting orders are in every checkpoint:
after a crash none is tried too often, or forgotten.
"""

from __future__ import annotations

import msgspec

from exactlyonce import Emit, KafkaSink, KafkaSource, Output, Pipeline

TRIES_MAX = 5


class Order(msgspec.Struct):
    """To be charged."""

    id: int
    total: int


class Attempt(msgspec.Struct):
    """An order, the number of tries so far, and of rounds still to wait."""

    order: Order
    tries: int = 0
    rest: int = 0


class Charged(msgspec.Struct):
    """The result of an order."""

    order: int
    tries: int


again = Output("again", Attempt)
given_up = Output("given_up", Charged)


def is_accepted(attempt: Attempt) -> bool:
    """Stands for an unreliable service: here an order needs its id modulo 7 tries, and one more."""
    return attempt.tries >= attempt.order.id % 7


def charge(attempt: Attempt, emit: Emit[Charged]) -> None:
    """Try, or wait one round more."""
    tries = attempt.tries + 1
    if attempt.rest:
        emit(Attempt(attempt.order, attempt.tries, attempt.rest - 1), again)
    elif is_accepted(attempt):
        emit(Charged(attempt.order.id, tries))
    elif tries == TRIES_MAX:
        emit(Charged(attempt.order.id, tries), given_up)
    else:
        emit(Attempt(attempt.order, tries, 2 ** (tries - 1) - 1), again)


def pipeline(name: str = "retry", pause: str = "200ms") -> Pipeline:
    """Topic NAME-orders to NAME-charged and NAME-given-up; *pause* is for one round."""
    pipeline = Pipeline(name)
    retries = pipeline.feedback("retry", Attempt, pause=pause)
    orders = pipeline.source("orders", KafkaSource(f"{name}-orders", value=Order)).map(Attempt)
    charged = orders.union(retries).split(charge, id="charge", outputs=[again, given_up])
    charged.side(again).feed(retries)
    charged.sink("charged", KafkaSink(f"{name}-charged", key=lambda charged: str(charged.order)))
    charged.side(given_up).sink("given-up", KafkaSink(f"{name}-given-up", key=lambda charged: str(charged.order)))
    return pipeline

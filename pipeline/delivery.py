"""The delivery of a sink: the effect of a failure on an output. Names only; sinks implement them.

- exactly once: every output is in the store once, after its checkpoint was decided;
- at least once: none is missing; output since the last checkpoint is repeated;
- at most once, to Kafka alone: none comes twice; output not yet written when its checkpoint was decided may be missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, get_args

Delivery = Literal["exactly_once", "at_least_once", "at_most_once"]
StoreDelivery = Literal["exactly_once", "at_least_once"]
"""Of a sink that is no topic of Kafka."""

EXACTLY_ONCE: Final = "exactly_once"
AT_LEAST_ONCE: Final = "at_least_once"
AT_MOST_ONCE: Final = "at_most_once"


def delivery_problems(delivery: object, *, to_kafka: bool) -> Iterator[str]:
    """The mistake in a value, with its remedy.

    >>> list(delivery_problems("at_most_once", to_kafka=True)), list(delivery_problems("once", to_kafka=False))
    ([], ["delivery='once' must be one of 'exactly_once', 'at_least_once'"])
    """
    choices = get_args(Delivery if to_kafka else StoreDelivery)
    if delivery == AT_MOST_ONCE and not to_kafka:
        yield (
            f"delivery={delivery!r} is for Kafka alone: take 'exactly_once', by which nothing comes twice either, and "
            f"nothing is lost"
        )
    elif delivery not in choices:
        yield f"delivery={delivery!r} must be one of {', '.join(map(repr, choices))}"

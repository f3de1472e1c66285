"""The delivery of a sink: the effect of a failure on an output. Names only; sinks implement them.

- exactly once: every output is in the store once, after its checkpoint was decided;
- at least once: none is missing; output since the last checkpoint is repeated;
- at most once: none comes twice; output not yet written when its checkpoint was decided may be missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, get_args

Delivery = Literal["exactly_once", "at_least_once", "at_most_once"]

EXACTLY_ONCE: Final = "exactly_once"
AT_LEAST_ONCE: Final = "at_least_once"
AT_MOST_ONCE: Final = "at_most_once"


def delivery_problems(delivery: object) -> Iterator[str]:
    """The mistake in a value, with its remedy.

    >>> list(delivery_problems("at_least_once")), list(delivery_problems("once"))
    ([], ["delivery='once' must be one of 'exactly_once', 'at_least_once', 'at_most_once'"])
    """
    if delivery not in get_args(Delivery):
        yield f"delivery={delivery!r} must be one of {', '.join(map(repr, get_args(Delivery)))}"

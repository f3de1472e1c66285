"""The delivery of a sink: what a failure does to an output. Words only; sinks give them their meaning.

- exactly once: every output is in the store once, after its checkpoint was decided;
- at least once: none is missing; what was written since the last checkpoint comes again;
- at most once: none comes twice; what was not written yet when its checkpoint was decided may be missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, get_args

Delivery = Literal["exactly_once", "at_least_once", "at_most_once"]

EXACTLY_ONCE: Final = "exactly_once"
AT_LEAST_ONCE: Final = "at_least_once"
AT_MOST_ONCE: Final = "at_most_once"


def delivery_problems(delivery: object) -> Iterator[str]:
    """What is wrong with a value, as a sentence that says how to fix it.

    >>> list(delivery_problems("at_least_once")), list(delivery_problems("once"))
    ([], ["delivery='once' must be one of 'exactly_once', 'at_least_once', 'at_most_once'"])
    """
    if delivery not in get_args(Delivery):
        yield f"delivery={delivery!r} must be one of {', '.join(map(repr, get_args(Delivery)))}"

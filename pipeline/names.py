"""The rules for names of pipelines, operators and topics, and the names of settings in errors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

NAME_LENGTH_MAX = 100
"""The limit for pipelines and operators. Topic names end at 249, and `<pipeline>.checkpoints` is one."""

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_PATTERN = re.compile(r"[*+?^$|()\[\]{}\\]")
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")


def name_problem(name: object) -> str | None:
    """The mistake in the name of a pipeline, an operator or an output; else None."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return f"{name!r} must be made of letters, digits, _ and -"
    return f"{name!r} is longer than {NAME_LENGTH_MAX} characters" if len(name) > NAME_LENGTH_MAX else None


def topic_problem(topic: object) -> str | None:
    """The mistake in the name of a topic; else None."""
    if isinstance(topic, str) and _TOPIC.fullmatch(topic) and topic not in (".", ".."):
        return None
    hint = ""
    if isinstance(topic, str) and _PATTERN.search(topic):
        hint = ": a pattern is no name; a source takes it as pattern=, a sink takes a list of topics"
    return f"topic {topic!r} must be 1 to 249 letters, digits, ., _ and -{hint}"


def as_name(text: str) -> str:
    """A name of an operator made of *text*, say a topic, whose dots no name may have.

    >>> as_name("replay-orders.dead")
    'replay-orders_dead'
    """
    return re.sub(r"[^A-Za-z0-9_-]", "_", text)


def shared_name_problem(topics: Iterable[str]) -> str | None:
    """The mistake if two of *topics* would give a source or sink of theirs the same name.

    >>> shared_name_problem(["orders.eu", "orders-eu"])
    >>> (shared_name_problem(["orders.eu", "orders_eu"]) or "").partition(",")[0]
    "the topics 'orders.eu' and 'orders_eu' would have the same id"
    """
    by_name: dict[str, str] = {}
    for topic in topics:
        other = by_name.setdefault(as_name(topic), topic)
        if other != topic:
            return (
                f"the topics {other!r} and {topic!r} would have the same id, since a dot becomes an underscore there: "
                f"give one of them a source or sink of its own"
            )
    return None


def checkpoint_topic(pipeline: str) -> str:
    return f"{pipeline}.checkpoints"


def setting(name: str) -> str:
    """The name of a setting in errors: as in Python, and as on the command line if that differs.

    >>> setting("store_timeout"), setting("parallelism")
    ('store_timeout (--store-timeout)', 'parallelism')
    """
    option = name.replace("_", "-")
    return name if option == name else f"{name} (--{option})"


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of *names* that is most like *name*, if one is.

    >>> nearest("paralelism", ["parallelism", "until"]), nearest("colour", ["parallelism", "until"])
    ('parallelism', None)
    """
    return next(iter(get_close_matches(name, [*names], 1)), None)

"""The join of two tables by a foreign key: its three steps, what each keeps, and what they send to one another.

    left rows -> Subscribing -- Subscription, by foreign key --> Answering <- right rows
                      |                                              |
                  RowVersion, by left key                      Answer, by left key
                      +----------------> Resolving <-----------------+

Each change of a left row has a version, a number of its key group that only grows. `Resolving` hears of the versions of
a key group in their order. So an answer counts if it is of the present version of its row, waits if its version was not
heard of, and is out of date else, also if the row is gone: nothing is kept of deleted rows.

Rows and foreign keys travel as canonical keys. See docs/design/foreign-keys.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, TypeVar, get_args
from zlib import crc32

import msgspec

from exactlyonce.pipeline import hints
from exactlyonce.pipeline.event_time import END_OF_TIME
from exactlyonce.pipeline.hints import UNKNOWN
from exactlyonce.pipeline.joins import Enrichment, Joined
from exactlyonce.pipeline.records import Record
from exactlyonce.pipeline.timed import Timed

L = TypeVar("L")
R = TypeVar("R")

ROW_VERSIONS = "row-versions"
"""The side output of `Subscribing`."""


class Subscription(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A left row refers to a foreign key from a version on, or no longer."""

    row: bytes
    version: int
    foreign_key: bytes
    ends: bool = False


class RowVersion(msgspec.Struct, Generic[L], frozen=True, array_like=True, gc=False):
    """A version of a left row."""

    row: bytes
    version: int
    left: L | None
    """None: it is deleted."""
    has_partner: bool
    """Whether an answer of this version comes."""


class Answer(msgspec.Struct, Generic[R], frozen=True, array_like=True, gc=False):
    """The right row of a left one; of one version of a left row come as many as the right row has changes, and one."""

    row: bytes
    version: int
    right: R | None
    """None: there is none."""


key_of_row: Callable[[Any], bytes] = attrgetter("row")
"""The key of a message to the owner of a left row: it is canonical already."""
key_of_subscription: Callable[[Any], bytes] = attrgetter("foreign_key")
"""Likewise, to the owner of a foreign key."""
CANONICAL_KEYS = key_of_row, key_of_subscription
"""The functions of KEY_BY that give canonical keys."""


def row_type(changelog: Any) -> Any:
    """The type of the rows of a table, from the type of its records."""
    args = get_args(changelog)
    return hints.without_none(args[0]) if args else UNKNOWN


def result_type(how: str, key: Any, left: Any, right: Any) -> Any:
    """The type of the records of the result: of its changes by left key."""
    if UNKNOWN in (left, right):
        return UNKNOWN
    right = hints.union([*hints.members(right), type(None)]) if how == "left" else right
    joined: Any = Joined[Any if key is UNKNOWN else key, left, right]  # type: ignore[misc]  # made here
    return Record[joined | None]


ROWS, COUNTS, EARLY = END_OF_TIME, END_OF_TIME - 1, END_OF_TIME - 2
"""The slots of `Subscribing` and `Resolving`: of rows; of the number of versions of a key group, under one of its keys;
and of answers that came before their version."""
RIGHT = 0
"""The slot of `Answering` that has the right rows. Those after it are buckets of subscriptions."""
BUCKET_ROWS = 32
"""The subscriptions of a foreign key have a bucket for so many of them."""


@dataclass(frozen=True)
class TableJoin(Timed):
    """A step of the join. Its slots are no times: it waits for no watermark, and nothing of it expires."""

    goes_by_time = needs_times = False

    @property
    def problems(self) -> list[str]:
        return []


@dataclass(frozen=True)
class Subscribing(TableJoin):
    """The first step, by left key. It keeps the foreign key of each row that has one."""

    right_key: Any = UNKNOWN
    """The type of the keys of the right table."""
    of_several_keys = True

    def kept_state(self) -> Any:
        """The type of a state: a canonical key; or a count."""
        return bytes | int

    def describe(self) -> dict[str, Any]:
        return {"join_table": "subscribe"}

    def __str__(self) -> str:
        return "subscribes by foreign key"


@dataclass(frozen=True)
class Answering(TableJoin):
    """The second step, by foreign key. It keeps right rows, and the subscriptions of each key.

    These lie in buckets, so that one that comes or goes writes a few others at a barrier, and not those of its key. A
    bucket is found by linear hashing: one more is made by dividing one.
    """

    by_key = True

    def kept_state(self, right: Any) -> Any:
        """The type of a state: the right row; or the versions of the subscribed rows of a bucket, and in the first one
        of several the number of those in all."""
        if right is UNKNOWN:
            return UNKNOWN
        return tuple[hints.union((right, type(None))), dict[bytes, int], int]  # type: ignore[misc]  # made here

    def describe(self) -> dict[str, Any]:
        return {"join_table": "answer"}

    def __str__(self) -> str:
        return "answers by foreign key"


def bucket_of(row: bytes, count: int) -> int:
    """The slot of the subscription of *row* among *count* buckets.

    >>> [bucket_of(b"row", count) for count in (1, 2, 3, 4)]
    [1, 2, 2, 4]
    """
    mask = (1 << (count - 1).bit_length()) - 1
    number = crc32(row) & mask
    return 1 + (number if number < count else number & mask >> 1)


def parent_of(bucket: int) -> int:
    """The bucket that is divided to make *bucket*, which is the last one then.

    >>> [parent_of(bucket) for bucket in (2, 3, 4, 5, 6)]
    [1, 1, 2, 1, 2]
    """
    return 1 + (bucket - 1 & (1 << (bucket - 1).bit_length() - 1) - 1)


@dataclass(frozen=True)
class Resolving(TableJoin):
    """The third step, by left key. It keeps left rows that may have a result, and answers that came early."""

    how: Enrichment | Any
    of_several_keys = True

    @property
    def problems(self) -> list[str]:
        """The mistakes, each with its remedy."""
        names = get_args(Enrichment)
        return [] if self.how in names else [f"how={self.how!r} must be one of {', '.join(map(repr, names))}"]

    def kept_state(self, left: Any, right: Any) -> Any:
        """The type of a state: (version, left row, right row of an early answer, whether a result stands)."""
        if UNKNOWN in (left, right):
            return UNKNOWN
        left, right = (hints.union((row, type(None))) for row in (left, right))
        return tuple[int, left, right, bool]

    def describe(self) -> dict[str, Any]:
        return {"join_table": "resolve", "how": self.how}

    def __str__(self) -> str:
        return f"{self.how} by foreign key"


def is_table_join(meaning: str) -> bool:
    """Whether *meaning*, as of `Node.meaning`, is that of a step."""
    return meaning.startswith("join_table=")


def shown_state(meaning: str, slot: int, state: Any) -> Any:
    """The *state* of a step in *slot*, as plain values, for people; None: it is a count, which is none of a key.

    >>> shown_state("join_table=subscribe", ROWS, b"\\xa3ann")
    {'foreign_key': 'ann'}
    """
    if slot == COUNTS:
        return None
    if meaning.startswith("join_table=subscribe"):
        return {"foreign_key": msgspec.msgpack.decode(state)}
    if meaning.startswith("join_table=answer"):
        right, rows, _ = state
        return {"right": right} if slot == RIGHT else {"rows": [*map(msgspec.msgpack.decode, rows)]}
    version, left, right, stands = state
    if slot == EARLY:
        return {"version": version, "early": right}
    return {"version": version, "left": left, "has_result": stands}

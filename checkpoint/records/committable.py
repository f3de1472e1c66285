"""Committables and the names of transactions.

A transactional id names exactly one attempt of one sink subtask of one pipeline, is parsed whole, and is not used
again before the checkpoint that used it is finalized. A committable names exactly one transaction: its producer id and
epoch were read before its first record was produced.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

_ID = r"[A-Za-z0-9_-]+"
_ATTEMPT = rf"\d+(?:-{_ID})?"
_PATTERN = re.compile(rf"eo:({_ID}):({_ID}):(\d+):(\d+)\.({_ATTEMPT}):({_ID})\Z", re.ASCII)


class TransactionalId(msgspec.Struct, frozen=True):
    """`eo:<pipeline>:<sink>:<subtask>:<incarnation>.<attempt>:<slot>`."""

    pipeline: str
    sink: str
    subtask: int
    incarnation: int
    attempt: str
    """The number of the attempt; more may follow after a hyphen."""
    slot: str

    def __str__(self) -> str:
        return f"eo:{self.pipeline}:{self.sink}:{self.subtask}:{self.incarnation}.{self.attempt}:{self.slot}"

    @property
    def written_in(self) -> tuple[int, int]:
        """Incarnation and number of the attempt: a later one is greater."""
        return self.incarnation, int(self.attempt.split("-")[0])

    @classmethod
    def parse(cls, text: str) -> TransactionalId | None:
        """The id that *text* spells whole, or None: then it is not ours and must not be touched.

        >>> TransactionalId.parse("eo:totals:out:0:3.1:2").incarnation
        3
        >>> TransactionalId.parse("eo:totals:coordinator") is None
        True
        """
        match = _PATTERN.match(text)
        if match is None:
            return None
        pipeline, sink, subtask, incarnation, attempt, slot = match.groups()
        return cls(pipeline, sink, int(subtask), int(incarnation), attempt, slot)


def coordinator_id(pipeline: str) -> str:
    """The transactional id whose initialisation fences every older coordinator of *pipeline*."""
    return f"eo:{pipeline}:coordinator"


def erased_id(pipeline: str, incarnation: int) -> str:
    """The transactional id that marks everything of *pipeline* up to *incarnation* as deleted on purpose.

    The broker keeps it as long as the ids that tell a lost checkpoint topic from a new pipeline.
    """
    return f"eo:{pipeline}:erased:{incarnation}"


def erased_incarnation(pipeline: str, transactional_id: str) -> int:
    """The incarnation in an `erased_id`; 0 in any other id.

    >>> erased_incarnation("totals", "eo:totals:erased:7")
    7
    """
    number = transactional_id.removeprefix(f"eo:{pipeline}:erased:")
    return int(number) if number.isdecimal() else 0


def transaction_prefix(pipeline: str) -> str:
    """The prefix of all transactional ids of *pipeline*; for listing, then parse each whole."""
    return f"eo:{pipeline}:"


class Written(msgspec.Struct, frozen=True, gc=False):
    """The records that a transaction wrote to one partition, in the broker's own words."""

    topic: str
    partition: int
    first_offset: int
    count: int


class Precommit(msgspec.Struct, frozen=True, kw_only=True):
    """A transaction that a sink subtask has flushed for a checkpoint, as the sink knows it."""

    transactional_id: str
    producer_id: int
    epoch: int
    sink: str
    subtask: int
    checkpoint: int
    records: int
    open_ms: int
    """How long it had been open when it was acknowledged."""


class Committable(msgspec.Struct, frozen=True, kw_only=True):
    """Enough to commit, from any process, what a sink pre-committed for a checkpoint."""

    transactional_id: str
    producer_id: int
    epoch: int
    transaction_version: int
    cluster_id: str
    sink: str
    subtask: int
    checkpoint: int
    """The checkpoint at whose barrier it was flushed; the manifest that carries it may be a later one."""
    written: tuple[Written, ...]

    @property
    def writer(self) -> tuple[str, int]:
        """The sink subtask that wrote it: its transactions are ordered by their checkpoints."""
        return self.sink, self.subtask

    def within(self, other: Committable) -> Committable:
        """The part of it that is in the partitions of *other*."""
        places = {(written.topic, written.partition) for written in other.written}
        written = tuple(one for one in self.written if (one.topic, one.partition) in places)
        return msgspec.structs.replace(self, written=written)

    @property
    def records(self) -> int:
        """The number of its records."""
        return sum(written.count for written in self.written)

    @property
    def counts(self) -> dict[tuple[str, int], int]:
        """The number of its records by (topic, partition)."""
        return {(written.topic, written.partition): written.count for written in self.written}


def shares(committables: Iterable[Committable]) -> dict[str, range]:
    """The share of each committable in the output of its sink subtask over an interval, by transactional id.

    *committables* are all of the interval, also those carried from aborted checkpoints. The output of a sink subtask is
    their concatenation in the order of their checkpoints.

    >>> def made(checkpoint, count):
    ...     return Committable(
    ...         transactional_id=f"t{checkpoint}", producer_id=0, epoch=0, transaction_version=2, cluster_id="",
    ...         sink="out", subtask=0, checkpoint=checkpoint, written=(Written("a", 0, 0, count),),
    ...     )
    >>> shares([made(7, 3), made(6, 2)])
    {'t6': range(0, 2), 't7': range(2, 5)}
    """
    ranges: dict[str, range] = {}
    ends: dict[tuple[str, int], int] = {}
    for committable in sorted(committables, key=lambda committable: committable.checkpoint):
        start = ends.get(committable.writer, 0)
        ends[committable.writer] = start + committable.records
        ranges[committable.transactional_id] = range(start, ends[committable.writer])
    return ranges

"""The requests that the protocol's procedures yield, and whoever performs them answers.

A procedure is a generator: it yields a request, is sent the answer, and returns a result. It does no I/O itself, so the
same lines run against a real broker, the in-memory one, and a simulator that crashes between any two of them. Whoever
drives a procedure answers each request as its docstring says, or throws the error into it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from exactlyonce.checkpoint.records.committable import Committable
from exactlyonce.checkpoint.records.manifest import BlockRef, Finalized, Manifest, Repair

R = TypeVar("R")


@dataclass(frozen=True)
class Ending:
    """One transaction to be ended."""

    transactional_id: str
    producer_id: int
    epoch: int


@dataclass(frozen=True)
class DescribeTransactions:
    """-> dict[str, TransactionState | None]; None: the broker does not know the id."""

    transactional_ids: tuple[str, ...]


@dataclass(frozen=True)
class DescribeProducers:
    """-> list[ProducerState] of the (topic, partition)s."""

    partitions: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class ListTransactions:
    """-> list[ListedTransaction] whose id begins with *prefix*, from every broker, or an error."""

    prefix: str


@dataclass(frozen=True)
class EndTransactions:
    """-> list[EndAnswer], one for each ending."""

    endings: tuple[Ending, ...]
    commit: bool


@dataclass(frozen=True)
class RewriteMarkers:
    """-> None. Ends what *partitions* show as open of a complete transaction, by one without records; tried once.

    Raises Halt where that is impossible, because the id has expired or has got another producer id.
    """

    transactional_id: str
    producer_id: int
    partitions: tuple[tuple[str, int], ...]
    commit: bool


@dataclass(frozen=True)
class Append:
    """-> Outcome of one transaction of the decision log, with all of *records* and tombstones or none of them."""

    records: tuple[Manifest | Finalized | Repair, ...]
    manifests_dropped: tuple[int, ...] = ()
    blocks_dropped: tuple[BlockRef, ...] = ()


@dataclass(frozen=True)
class BlockEndOffsets:
    """-> tuple[int, ...]: end offset of every partition of the checkpoint topic."""


@dataclass(frozen=True)
class ScanBlocks:
    """-> Scanned: the blocks that are not tombstoned from *start_offsets* on, one for each partition of the topic."""

    start_offsets: tuple[int, ...]


@dataclass(frozen=True)
class Scanned:
    """What a scan of the block partitions has found."""

    blocks: tuple[BlockRef, ...]
    end_offsets: tuple[int, ...]
    """How far it went."""
    unreadable: tuple[str, ...] = ()
    """Damaged places, which it has skipped."""


@dataclass(frozen=True)
class FindReferences:
    """-> frozenset[BlockRef]: every block that *manifest* stands on; or str: what of it is missing or damaged."""

    manifest: Manifest


@dataclass(frozen=True)
class Look:
    """-> Fate of the committable's records, once the last stable offset has passed the first of them."""

    committable: Committable


@dataclass(frozen=True)
class CopyTransaction:
    """-> Committable like *committable* of a new transaction that holds the same records, verbatim; or str: why not."""

    committable: Committable
    transactional_id: str


@dataclass(frozen=True)
class ReplayTransaction:
    """-> Committable like *committable* of a new transaction that holds what its sink subtask writes when the interval
    of *manifest* is replayed from its base; or str: why not.

    *committable* is one of the manifest's, or what of it is in some partitions.
    """

    manifest: Manifest
    committable: Committable
    transactional_id: str


@dataclass(frozen=True)
class Pause:
    """-> None, after *duration_ms*."""

    duration_ms: int


Request = (
    DescribeTransactions
    | DescribeProducers
    | ListTransactions
    | EndTransactions
    | RewriteMarkers
    | Append
    | BlockEndOffsets
    | ScanBlocks
    | FindReferences
    | Look
    | CopyTransaction
    | ReplayTransaction
    | Pause
)
Procedure = Generator[Request, Any, R]


def drive(procedure: Procedure[R], perform: Callable[[Request], Any]) -> R:
    """Run *procedure* to its end, answering each request by *perform*; errors are thrown into it."""
    try:
        request = next(procedure)
        while True:
            try:
                answer = perform(request)
            except Exception as error:
                request = procedure.throw(error)
            else:
                request = procedure.send(answer)
    except StopIteration as end:
        result: R = end.value
        return result

"""The requests that the protocol's procedures yield, and whoever performs them answers.

A procedure is a generator: it yields a request, is sent the answer, and returns a result. It does no I/O itself, so the
same lines run against a real broker, the in-memory one, and a simulator that crashes between any two of them. Whoever
drives a procedure answers each request as its docstring says, or throws the error into it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeVar

import msgspec

from exactlyonce.checkpoint.clock import Clock
from exactlyonce.checkpoint.records.committable import Committable
from exactlyonce.checkpoint.records.manifest import Finalized, Manifest, Repair, StoreCommittable, StoredBlock
from exactlyonce.checkpoint.records.storage_url import TOPIC
from exactlyonce.checkpoint.transactions.broker_answers import Producer
from exactlyonce.pipeline.errors import BrokerUnavailable

R = TypeVar("R")
Y = TypeVar("Y")

RETRY_PAUSE_FIRST_MS, RETRY_PAUSE_LONGEST_MS = 5, 1_000


class Ending(msgspec.Struct, frozen=True):
    """One transaction to be ended."""

    transactional_id: str
    producer_id: int
    epoch: int


class DescribeTransactions(msgspec.Struct, frozen=True):
    """-> dict[str, TransactionState | None]; None: the broker does not know the id."""

    transactional_ids: tuple[str, ...]


class DescribeProducers(msgspec.Struct, frozen=True):
    """-> list[ProducerState] of the (topic, partition)s."""

    partitions: tuple[tuple[str, int], ...]


class ListTransactions(msgspec.Struct, frozen=True):
    """-> list[ListedTransaction] whose id begins with *prefix*, from every broker, or an error."""

    prefix: str


class EndTransactions(msgspec.Struct, frozen=True):
    """-> list[EndAnswer], one for each ending."""

    endings: tuple[Ending, ...]
    commit: bool


class RewriteMarkers(msgspec.Struct, frozen=True):
    """-> None. Ends what *partitions* show as open of a complete transaction, by one without records; tried once.

    Nothing is done where the id is past *epoch*: then *commit* is no longer what is right for it.
    """

    transactional_id: str
    producer_id: int
    partitions: tuple[tuple[str, int], ...]
    commit: bool
    epoch: int


class Append(msgspec.Struct, frozen=True):
    """-> Outcome of one transaction of the decision log, with all of *records* and tombstones or none of them.

    `DecisionLog.recording` answers it, by the requests that such a transaction takes.
    """

    records: tuple[Manifest | Finalized | Repair, ...]
    manifests_dropped: tuple[int, ...] = ()
    blocks_dropped: tuple[StoredBlock, ...] = ()


class Appended(msgspec.Struct, frozen=True):
    """-> None. *records* are durable now: for whoever watches."""

    records: tuple[Manifest | Finalized | Repair, ...]


class RemoveBlocks(msgspec.Struct, frozen=True):
    """-> None. The transaction that drops *blocks*, outside of the topic, is durable; what stays is an orphan."""

    blocks: tuple[StoredBlock, ...]


class ScanBlocks(msgspec.Struct, frozen=True):
    """-> Scanned: the blocks that are not tombstoned from *start_offsets* on, one for each partition of the topic; all
    that a *storage* outside of it has; or str: why one that the pipeline has left cannot be looked at."""

    start_offsets: tuple[int, ...]
    storage: str = TOPIC


class FindReferences(msgspec.Struct, frozen=True):
    """-> frozenset[BlockRef]: every block that *manifest* stands on; or str: what of it is missing, damaged or away.

    Of one that is *needed* they are waited for, wherever they are."""

    manifest: Manifest
    needed: bool = False


class Look(msgspec.Struct, frozen=True):
    """-> Fate of the committable's records, once the last stable offset has passed the first of them."""

    committable: Committable


class CopyTransaction(msgspec.Struct, frozen=True):
    """-> Committable like *committable* of a new transaction that holds the same records, verbatim; or str: why not."""

    committable: Committable
    transactional_id: str


class ReplayTransaction(msgspec.Struct, frozen=True):
    """-> Committable like *committable*, which is one of *manifest* or what of it is in some partitions, of a new
    transaction that holds what its sink subtask writes when the interval is replayed from its base; or str: why not."""

    manifest: Manifest
    committable: Committable
    transactional_id: str


# --- what a leader asks of stores with a ledger; `StoreUnavailable`: nothing follows from it, it is to be asked again


class FenceStore(NamedTuple):
    """-> dict[int, int]: by subtask, the checkpoint in the ledger of *sink*. From now on nobody of an older incarnation
    commits there. `ForeignLedger`, here and in `CommitStaged`, where another checkpoint topic than *origin* has begun
    it."""

    sink: str
    incarnation: int
    origin: str


class CleanStore(NamedTuple):
    """-> None. What attempts before (*incarnation*, *attempt*) have set aside, and nobody has committed, goes."""

    sink: str
    incarnation: int
    attempt: int


class CommitStaged(NamedTuple):
    """-> bool: whether any of it was committed now, with its ledger. `LedgerBehind` if that lacks what came before."""

    committables: tuple[StoreCommittable, ...]
    """Of one sink at one checkpoint, oldest first: all of them if its store commits them at once, else one."""
    incarnation: int
    origin: str


# --- what a leader asks of the topics that its pipeline reads and writes


class StartOffsets(msgspec.Struct, frozen=True):
    """-> tuple[SourceOffset, ...]: where a pipeline without a checkpoint begins to read."""


class RestoreSavepoint(msgspec.Struct, frozen=True):
    """-> Restored: the states of the savepoint that the run begins from, written as blocks of *checkpoint*."""

    checkpoint: int
    incarnation: int


class CheckContinuity(msgspec.Struct, frozen=True):
    """-> None. Raises unless the pipeline can go on from *manifest*: its operators, and all input that lies behind."""

    manifest: Manifest


class LookAtInputs(msgspec.Struct, frozen=True):
    """-> None. Raises Halt if an input is not the one that is read any more; takes note of partitions that were added.
    *newest* is the newest manifest."""

    newest: Manifest


class GoOnFrom(msgspec.Struct, frozen=True):
    """-> None. *manifest* is the newest now: what is read next begins where it ends. Raises where that cannot be."""

    manifest: Manifest


class CreateOutputs(msgspec.Struct, frozen=True):
    """-> None. Creates the outputs that there are not; Halt if *newest* shows that they were written to."""

    newest: Manifest | None


class LookAtTopics(msgspec.Struct, frozen=True):
    """-> None. As `LookAtInputs`, and of outputs alike: raises Halt if one is not the one that is written to any more,
    and counts its partitions. One question is of them all."""

    newest: Manifest


Outputs = tuple[tuple[str, str, int], ...]
"""(sink id, topic, partitions) of every output."""


class KnownOutputs(msgspec.Struct, frozen=True):
    """-> Outputs, as they were last looked at."""


class Reached(msgspec.Struct, frozen=True):
    """-> None. A named place of the protocol, for whoever makes processes die there."""

    place: str


# --- the decision log, and who writes it: each is asked once and answered once, or raises `BrokerUnavailable`


class Write(NamedTuple):
    """A record to be written; a value of None is a tombstone."""

    partition: int
    key: str
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()


class DecisionBatch(NamedTuple):
    """Records of one partition that go there together, or not at all."""

    partition: int
    sequence: int
    """Of the first record; the broker takes a batch of the same sequences once."""
    writes: tuple[Write, ...]


class InitTransactions(msgspec.Struct, frozen=True, kw_only=True):
    """-> Answered, with the producer of the first transaction. Fences who had the id, aborts what it had open."""

    transactional_id: str
    transaction_timeout_ms: int
    wait_ms: int


class ProduceBatches(msgspec.Struct, frozen=True, kw_only=True):
    """-> dict[int, Answered] by partition, of *batches*, one for each partition at most."""

    transactional_id: str
    producer: Producer
    batches: tuple[DecisionBatch, ...]
    timestamp_ms: int
    wait_ms: int


class EndTransaction(msgspec.Struct, frozen=True, kw_only=True):
    """-> Answered, with the producer of the next transaction: ending one raises the epoch."""

    transactional_id: str
    producer: Producer
    commit: bool
    wait_ms: int


class LookOnce(msgspec.Struct, frozen=True):
    """-> dict[int, Fate | None] by partition of the checkpoint topic: what readers see of what *producer* wrote there.

    None: they do not get as far yet.
    """

    producer: Producer
    offsets: tuple[tuple[int, int], ...]
    """(partition, offset)"""
    wait_ms: int = 0
    """How long the brokers may wait for readers to get there, before they answer that they have not."""


class LogEnds(msgspec.Struct, frozen=True):
    """-> Ends of the decision log."""


class Ends(NamedTuple):
    """How far a partition goes."""

    stable: int
    """How far readers of what is committed get."""
    end: int


class ReadLog(msgspec.Struct, frozen=True):
    """-> LogRead: the committed decisions below offset *end*."""

    end: int


class DecisionRecord(NamedTuple):
    """A record of the decision log, as it was found."""

    key: bytes | None
    value: bytes | None
    digest: bytes | None
    """The SHA-256 that was written beside the value."""


class Unreadable(NamedTuple):
    """Offsets of the decision log that a damaged batch takes, from *first* up to, not including, *behind*."""

    first: int
    behind: int


class LogRead(NamedTuple):
    """The readable and unreadable items of the decision log, in the order of the offsets."""

    start: int
    """The first offset that was not removed."""
    items: tuple[DecisionRecord | Unreadable, ...]


class FirstOffsets(msgspec.Struct, frozen=True):
    """-> tuple[int, ...]: the first offset of every partition of the checkpoint topic; None: that topic is gone."""


class Together(msgspec.Struct, frozen=True):
    """-> tuple[Answer, ...] to *requests*, in their order. None needs another's answer: all go out at once.

    It is answered when all are; what one of them raises is its answer. See `concurrently`.
    """

    requests: tuple[Request, ...]


class Answer(msgspec.Struct, frozen=True):
    """Of one of several requests: *value*, or the *error* to be thrown."""

    value: Any = None
    error: Exception | None = None


class Pause(msgspec.Struct, frozen=True):
    """-> None, after *duration_ms*."""

    duration_ms: int


OfLog = InitTransactions | ProduceBatches | EndTransaction | LookOnce | LogEnds | ReadLog | FirstOffsets
OfBlocks = RemoveBlocks | ScanBlocks | FindReferences
Request = (
    DescribeTransactions
    | DescribeProducers
    | ListTransactions
    | EndTransactions
    | RewriteMarkers
    | Append
    | Appended
    | OfBlocks
    | Look
    | CopyTransaction
    | ReplayTransaction
    | FenceStore
    | CleanStore
    | CommitStaged
    | StartOffsets
    | RestoreSavepoint
    | CheckContinuity
    | LookAtInputs
    | GoOnFrom
    | CreateOutputs
    | LookAtTopics
    | KnownOutputs
    | Reached
    | OfLog
    | Together
    | Pause
)
Procedure = Generator[Request, Any, R]


def answered(request: Request, perform: Callable[[Request], Any]) -> Answer:
    """The answer of *perform* to one of several requests, or the error that it raised."""
    try:
        return Answer(perform(request))
    except Exception as error:
        return Answer(error=error)


def concurrently(*procedures: Procedure[Any]) -> Procedure[tuple[Any, ...]]:
    """The results of all *procedures*, which must not depend on each other's effects.

    In each round one request of each goes out, together. What one raises is raised once all have ended, so that nothing
    is under way any more; if several do, it is what the first of them in their order has raised.
    """
    results: list[Any] = [None] * len(procedures)
    errors: dict[int, Exception] = {}
    answers = dict.fromkeys(range(len(procedures)), Answer())
    while answers:
        asked: dict[int, Request] = {}
        for number, answer in answers.items():
            procedure = procedures[number]
            try:
                asked[number] = procedure.throw(answer.error) if answer.error else procedure.send(answer.value)
            except StopIteration as end:
                results[number] = end.value
            except Exception as error:
                errors[number] = error
        given: tuple[Answer, ...] = (yield Together(tuple(asked.values()))) if asked else ()
        answers = dict(zip(asked, given, strict=True))
    if errors:
        raise errors[min(errors)]
    return tuple(results)


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


def relayed(procedure: Procedure[R], answer: Callable[[Request], Generator[Y, Any, Any]]) -> Generator[Y, Any, R]:
    """*procedure*, each of whose requests *answer* answers, which may yield, too; errors are thrown into it."""
    try:
        request = next(procedure)
        while True:
            try:
                result = yield from answer(request)
            except Exception as error:
                request = procedure.throw(error)
            else:
                request = procedure.send(result)
    except StopIteration as end:
        found: R = end.value
        return found


def retrying(attempt: Callable[[int], Procedure[R]], clock: Clock, deadline_ms: int) -> Procedure[R]:
    """The result of *attempt*, made again while it raises `BrokerUnavailable`, with growing pauses, until the time is
    over; it is told how many milliseconds are left. There is one attempt at least."""
    pause_ms = RETRY_PAUSE_FIRST_MS
    while True:
        try:
            return (yield from attempt(max(0, deadline_ms - clock.monotonic_ms())))
        except BrokerUnavailable:
            left_ms = deadline_ms - clock.monotonic_ms()
            if left_ms <= 0:
                raise
        yield Pause(min(pause_ms, left_ms))
        pause_ms = min(2 * pause_ms, RETRY_PAUSE_LONGEST_MS)

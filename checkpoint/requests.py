"""The requests that the protocol's procedures yield.

A procedure is a generator: it yields a request, is sent the answer, and returns a result. It does no I/O itself, so the
same lines run against a real broker, the in-memory one, and a simulator that crashes between any two of them. The
driver of a procedure answers each request as its docstring says, or throws the error into it.

The answer comes from the first that has one: `decision_log.recording` for `Append`; then what an engine has added to
`engines.connections.Connections.answers`, for inputs, stores and outputs; then `engines.connections.Performer`. In the
simulator the broker model stands in its place.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeVar

import msgspec

from exactlyonce.checkpoint.clock import Clock
from exactlyonce.checkpoint.records.manifest import (
    Committable,
    Finalized,
    Manifest,
    Output,
    Repair,
    StoreCommittable,
    StoredBlock,
)
from exactlyonce.checkpoint.records.storage_url import TOPIC
from exactlyonce.pipeline.errors import BrokerUnavailable
from exactlyonce.pipeline.retries import OF_BROKER


class EndAnswer(enum.Enum):
    COMPLETED = "completed"
    """0: it is, or it had been, ended as asked."""
    BUSY = "busy"
    """Markers are being written, or the transaction coordinator moves: retry."""
    REFUSED = "refused"
    """INVALID_TXN_STATE: it was ended the other way. To a commit with records: the broker aborted them."""
    UNKNOWN = "unknown"
    """Fenced, unknown id or unknown producer: the records themselves must be looked at."""


class Fate(enum.Enum):
    """The verdict that a transaction's first record shows once the last stable offset has passed it."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    GONE = "gone"


class Outcome(enum.Enum):
    """The end of a transaction of the decision log."""

    DONE = "done"
    NOT_WRITTEN = "not written"
    UNKNOWN = "unknown"


class Producer(NamedTuple):
    """The identity that the broker knows the writer of a transactional id by, in one transaction."""

    producer_id: int
    epoch: int


class WriteAnswer(enum.Enum):
    """A broker's answer to the writer of a transactional id: to its initialisation, a batch, the end it asked for."""

    DONE = "done"
    """It is, or had been, done as asked."""
    BUSY = "busy"
    """Not now, or by another broker: retry."""
    FENCED = "fenced"
    """The id has moved on: a newer writer has it, or the broker ended the transaction."""
    ABORTABLE = "abortable"
    """This transaction has failed; a new one may succeed."""
    REFUSED = "refused"
    """Any transaction would fail: the record is wrong, or the right to write it is missing."""
    TOPIC_DELETED = "deleted"
    TOPIC_MADE_ANEW = "deleted and created again"
    """Since this writer first asked for the topic."""


class Answered(NamedTuple):
    answer: WriteAnswer
    text: str = ""
    """The broker's own words, unless it is `DONE`."""
    producer: Producer | None = None
    """The producer of the next transaction, after an initialisation or an end that is `DONE`."""
    first_offset: int = -1
    """The first offset of a batch that is `DONE`."""


class TxnState:
    """The states of a transactional id, as brokers name them. A newer broker may have others."""

    EMPTY = "Empty"
    ONGOING = "Ongoing"
    PREPARE_COMMIT = "PrepareCommit"
    PREPARE_ABORT = "PrepareAbort"
    PREPARE_EPOCH_FENCE = "PrepareEpochFence"
    COMPLETE_COMMIT = "CompleteCommit"
    COMPLETE_ABORT = "CompleteAbort"
    DEAD = "Dead"
    OPEN = (ONGOING, PREPARE_COMMIT, PREPARE_ABORT, PREPARE_EPOCH_FENCE)
    """A transaction under the id holds readers back."""
    ENDED = (COMPLETE_COMMIT, COMPLETE_ABORT, DEAD)
    CLOSED = (EMPTY, *ENDED)
    """The transaction under the id is over, even if its markers were lost."""


class TransactionState(msgspec.Struct, frozen=True):
    """A transactional id as DescribeTransactions shows it. No proof of what happened in the past."""

    transactional_id: str
    state: str
    """See `TxnState`."""
    producer_id: int
    epoch: int
    timeout_ms: int
    start_time_ms: int
    partitions: tuple[tuple[str, int], ...]


class ListedTransaction(msgspec.Struct, frozen=True):
    """A transactional id as ListTransactions shows it."""

    transactional_id: str
    producer_id: int
    state: str


class ProducerState(msgspec.Struct, frozen=True):
    """A producer active on a partition, as DescribeProducers shows it."""

    topic: str
    partition: int
    producer_id: int
    epoch: int
    last_sequence: int
    last_timestamp_ms: int
    transaction_start_offset: int | None


R = TypeVar("R")
Y = TypeVar("Y")


class Request(msgspec.Struct, frozen=True):
    """The base of all requests."""


class Ending(msgspec.Struct, frozen=True):
    """One transaction to be ended."""

    transactional_id: str
    producer_id: int
    epoch: int


class DescribeTransactions(Request, frozen=True):
    """-> dict[str, TransactionState | None]; None: the broker does not know the id."""

    transactional_ids: tuple[str, ...]


class DescribeProducers(Request, frozen=True):
    """-> list[ProducerState] of the (topic, partition)s."""

    partitions: tuple[tuple[str, int], ...]


class ListTransactions(Request, frozen=True):
    """-> list[ListedTransaction] whose id begins with *prefix*, from every broker, or an error."""

    prefix: str


class EndTransactions(Request, frozen=True):
    """-> list[EndAnswer], one for each ending."""

    endings: tuple[Ending, ...]
    commit: bool


class RewriteMarkers(Request, frozen=True):
    """-> None. Ends a complete transaction that *partitions* show as open, by one without records; tried once.

    Nothing is done if the id is past *epoch*: *commit* may be wrong for a later transaction.
    """

    transactional_id: str
    producer_id: int
    partitions: tuple[tuple[str, int], ...]
    commit: bool
    epoch: int


class Append(Request, frozen=True):
    """-> Outcome of one transaction of the decision log, with all of *records* and tombstones or none of them.

    `DecisionLog.recording` answers it.
    """

    records: tuple[Manifest | Finalized | Repair, ...]
    manifests_dropped: tuple[int, ...] = ()
    blocks_dropped: tuple[StoredBlock, ...] = ()


class Appended(Request, frozen=True):
    """-> None. *records* are durable now: for observers."""

    records: tuple[Manifest | Finalized | Repair, ...]


class RemoveBlocks(Request, frozen=True):
    """-> None. A durable transaction drops *blocks*, outside of the topic; any that stay are orphans."""

    blocks: tuple[StoredBlock, ...]


class ScanBlocks(Request, frozen=True):
    """-> Scanned: the blocks in the topic from *start_offsets* on that are not tombstoned, or all blocks of another
    *storage*; or str: why a former storage cannot be read."""

    start_offsets: tuple[int, ...]
    storage: str = TOPIC


class FindReferences(Request, frozen=True):
    """-> frozenset[BlockRef]: every block that *manifest* needs; or str: why they are unknown (missing, damaged, away).

    If *needed*, a storage that is away is waited for.
    """

    manifest: Manifest
    needed: bool = False


class Look(Request, frozen=True):
    """-> Fate of the committable's records, once the last stable offset has passed the first one."""

    committable: Committable


class CopyTransaction(Request, frozen=True):
    """-> Committable of a new transaction with the same records as *committable*, verbatim; or str: why not."""

    committable: Committable
    transactional_id: str


class ReplayTransaction(Request, frozen=True):
    """-> Committable of a new transaction with the output of *committable*, from a replay of the interval of
    *manifest*; or str: why not. *committable* may be only some partitions of one in *manifest*."""

    manifest: Manifest
    committable: Committable
    transactional_id: str


# --- requests to stores with a ledger; `StoreUnavailable` proves nothing, and the request is repeated


class FenceStore(Request, frozen=True):
    """-> dict[int, int]: by subtask, the checkpoint in the ledger of *sink*. From now on no older incarnation commits
    there. Here and in `CommitStaged`, `ForeignLedger` if it was begun for another checkpoint topic than *origin*."""

    sink: str
    incarnation: int
    origin: str


class CleanStore(Request, frozen=True):
    """-> None. Removes uncommitted output that attempts before (*incarnation*, *attempt*) have staged."""

    sink: str
    incarnation: int
    attempt: int


class CommitStaged(Request, frozen=True):
    """-> bool: whether any of it was committed now, with its ledger. `LedgerBehind` if that lacks earlier commits."""

    committables: tuple[StoreCommittable, ...]
    """All of one sink at one checkpoint, oldest first, if its store commits them at once; else one."""
    incarnation: int
    origin: str


# --- requests about the topics that a pipeline reads and writes


class StartOffsets(Request, frozen=True):
    """-> tuple[SourceOffset, ...]: the start of a pipeline without a checkpoint."""


class RestoreSavepoint(Request, frozen=True):
    """-> Restored: the run's savepoint, its states written as blocks of *checkpoint*."""

    checkpoint: int
    incarnation: int


class CheckContinuity(Request, frozen=True):
    """-> None. Raises unless the pipeline can continue from *manifest*: its operators fit, and its input is there."""

    manifest: Manifest


class LookAtInputs(Request, frozen=True):
    """-> None. Raises Halt if an input topic was replaced; notes added partitions. *newest* is the newest manifest."""

    newest: Manifest


class CheckRemoteInputs(Request, frozen=True):
    """-> None. `LookAtInputs`, of topics in other clusters. `BrokerUnavailable` soon, for a heartbeat may be due."""

    newest: Manifest


class SetPosition(Request, frozen=True):
    """-> None. *manifest* is the newest now, and reading continues at its end. Raises if that cannot be."""

    manifest: Manifest


class CreateOutputs(Request, frozen=True):
    """-> None. Creates missing outputs; Halt if *newest* shows that they, or topics in their place, were written to."""

    newest: Manifest | None


class LookAtTopics(Request, frozen=True):
    """-> None. `LookAtInputs`, and the same for outputs, whose partitions are counted: in one request."""

    newest: Manifest


Outputs = tuple[Output, ...]
"""The topic of every sink that writes to one."""


class KnownOutputs(Request, frozen=True):
    """-> Outputs, by the last look."""


class Reached(Request, frozen=True):
    """-> None. A named place of the protocol, at which tests kill processes."""

    place: str


# --- the decision log and its writer: each is asked once and answered once, or raises `BrokerUnavailable`


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
    """The first record's; the broker takes a batch with the same sequences once."""
    writes: tuple[Write, ...]


class InitTransactions(Request, frozen=True, kw_only=True):
    """-> Answered, with the producer of the first transaction. Fences older producers, aborts their transaction."""

    transactional_id: str
    transaction_timeout_ms: int
    wait_ms: int


class ProduceBatches(Request, frozen=True, kw_only=True):
    """-> dict[int, Answered] by partition; *batches* has one for each partition at most."""

    transactional_id: str
    producer: Producer
    batches: tuple[DecisionBatch, ...]
    timestamp_ms: int
    wait_ms: int


class EndTransaction(Request, frozen=True, kw_only=True):
    """-> Answered, with the producer of the next transaction: the end of one raises the epoch."""

    transactional_id: str
    producer: Producer
    commit: bool
    wait_ms: int


class LookOnce(Request, frozen=True):
    """-> dict[int, Fate | None] by partition of the checkpoint topic: the fate of the records of *producer* there.

    None: readers do not get as far yet.
    """

    producer: Producer
    offsets: tuple[tuple[int, int], ...]
    """(partition, offset)"""
    wait_ms: int = 0
    """How long the brokers may wait for readers to get there before they answer."""


class LogEnds(Request, frozen=True):
    """-> Ends of the decision log."""


class Ends(NamedTuple):
    stable: int
    """The end for read_committed readers."""
    end: int


class ReadLog(Request, frozen=True):
    """-> LogRead: the committed decisions below offset *end*."""

    end: int


class DecisionRecord(NamedTuple):
    key: bytes | None
    value: bytes | None
    digest: bytes | None
    """The SHA-256 written with the value."""


class Unreadable(NamedTuple):
    """A damaged batch of the decision log, from offset *first* up to, not including, *behind*."""

    first: int
    behind: int


class LogRead(NamedTuple):
    """The readable and unreadable items of the decision log, in the order of the offsets."""

    start: int
    """The first offset that was not removed."""
    items: tuple[DecisionRecord | Unreadable, ...]


class FirstOffsets(Request, frozen=True):
    """-> tuple[int, ...]: the first offset of every partition of the checkpoint topic; None: that topic is gone."""


class Together(Request, frozen=True):
    """-> tuple[Answer, ...] to *requests*, in their order. They are independent, and go out at once.

    It is answered when all are; an error is an answer. See `concurrently`.
    """

    requests: tuple[Request, ...]


class Answer(msgspec.Struct, frozen=True):
    value: Any = None
    error: Exception | None = None


class Pause(Request, frozen=True):
    """-> None, after *duration_ms*."""

    duration_ms: int


Procedure = Generator[Request, Any, R]


def answered(request: Request, perform: Callable[[Request], Any]) -> Answer:
    """The answer of *perform* to one of several requests, or the error that it raised."""
    try:
        return Answer(perform(request))
    except Exception as error:
        return Answer(error=error)


def concurrently(*procedures: Procedure[Any]) -> Procedure[tuple[Any, ...]]:
    """The results of all *procedures*, which must not depend on each other's effects.

    In each round one request of each goes out, together. An error is raised once all have ended, so that nothing is
    under way any more; of several errors, the one of the first procedure.
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
        together: tuple[Answer, ...] = (yield Together(tuple(asked.values()))) if asked else ()
        answers = dict(zip(asked, together, strict=True))
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
    """*procedure* with each of its requests answered by *answer*, which may yield, too; errors are thrown into it."""
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
        returned: R = end.value
        return returned


def retrying(attempt: Callable[[int], Procedure[R]], clock: Clock, deadline_ms: int) -> Procedure[R]:
    """The result of *attempt*, retried with growing pauses while it raises `BrokerUnavailable`, until the deadline.

    *attempt* is given the milliseconds that are left. There is one attempt at least.
    """
    pauses = iter(OF_BROKER)
    while True:
        try:
            return (yield from attempt(max(0, deadline_ms - clock.monotonic_ms())))
        except BrokerUnavailable:
            left_ms = deadline_ms - clock.monotonic_ms()
            if left_ms <= 0:
                raise
        yield Pause(min(next(pauses), left_ms))

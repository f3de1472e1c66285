"""The contract of a broker with those who end others' transactions; each test runs on the model and a real broker.

The expected answers keep both from drifting: a change of Kafka fails the real half, a defect of the model the other.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import pytest
from broker_histories import (
    Add,
    AddPartitions,
    CreateTopic,
    DeleteRecords,
    DeleteTopic,
    Describe,
    End,
    Fence,
    Init,
    Kill,
    Listed,
    Produce,
    Producers,
    Read,
    Stage,
    Step,
    play,
)
from real_broker import RealBroker

from exactlyonce.testing import BrokerModel, Error, Produced
from exactlyonce.testing.broker.transaction_coordinator import EPOCH_LAST
from exactlyonce.testing.cluster import LIMIT_S

OPEN: Sequence[Step] = (CreateTopic("t", 2), Init("a"), Produce("a", "t", 0, ["x", "y"]))
"""Producer a (p0, epoch 0) has two records in an open transaction."""

VISIBLE = [(0, None, "x"), (1, None, "y")]
AGAIN = Produce("a", "t", 0, ["x", "y"], sequence=0)
OUT_OF_RANGE: object = ("OFFSET_OUT_OF_RANGE", (-1, -1, -1), [])
COMMIT, ABORT = End("a", commit=True), End("a", commit=False)
ONGOING, PRODUCED = ("Ongoing", "p0", 0, 60_000, True, [("t", 0)]), Produce("a", "t", 0, ["x"])
ANSWERS: dict[str, tuple[Sequence[Step], list[Any]]] = {
    "an open transaction is seen by nobody but read_uncommitted": (
        (*OPEN, Read("t", 0), Read("t", 0, committed=False), Describe("a")),
        [("NONE", (0, 0, 2), []), ("NONE", (0, 0, 2), VISIBLE), ONGOING]),
    "anybody who knows id, producer id and epoch commits for a killed producer; the epoch grows by one": (
        (*OPEN, Kill("a"), COMMIT, Read("t", 0), Describe("a")),
        ["NONE", ("NONE", (0, 3, 3), VISIBLE), ("CompleteCommit", "p0", 1, 60_000, True, [])]),
    "a commit fences the producer that opened it": (
        (*OPEN, COMMIT, Produce("a", "t", 0, ["z"]), Produce("a", "t", 0, ["z"], added=True),
         Produce("a", "t", 1, ["z"])),
        [("INVALID_PRODUCER_EPOCH", -1)] * 3),
    "the same commit again is answered alike": ((*OPEN, COMMIT, COMMIT, COMMIT), ["NONE"] * 3),
    "the same abort again is answered alike": ((*OPEN, ABORT, ABORT, ABORT), ["NONE"] * 3),
    "an abort after a commit is refused": (
        (*OPEN, COMMIT, ABORT, Read("t", 0)), ["NONE", "INVALID_TXN_STATE", ("NONE", (0, 3, 3), VISIBLE)]),
    "a commit after an abort is refused": (
        (*OPEN, ABORT, COMMIT, Read("t", 0)), ["NONE", "INVALID_TXN_STATE", ("NONE", (0, 3, 3), [])]),
    "aborted records stay readable to read_uncommitted, as a copy repair needs it": (
        (*OPEN, ABORT, Read("t", 0), Read("t", 0, committed=False)),
        [("NONE", (0, 3, 3), []), ("NONE", (0, 3, 3), VISIBLE)]),
    "a transaction without records cannot be committed": (
        (Init("a"), COMMIT, Describe("a")), ["INVALID_TXN_STATE", ("Empty", "p0", 0, 60_000, False, [])]),
    "a transaction marks its partitions with or without records": (
        (CreateTopic("t"), Init("a"), Add("a", "t", 0), Add("a", "none", 0), Describe("a"), COMMIT, Read("t", 0),
         Add("a", "t", 0)),
        ["NONE", "UNKNOWN_TOPIC_OR_PARTITION", ONGOING, "NONE", ("NONE", (0, 1, 1), []), "INVALID_PRODUCER_EPOCH"]),
    "a new producer fences every ending of the old one": (
        (*OPEN, COMMIT, Init("a"), End("a", commit=True, life=0), End("a", commit=False, life=0)),
        ["PRODUCER_FENCED"] * 2),
    "a new producer aborts what is open": (
        (*OPEN, Init("a"), End("a", commit=True, life=0), Read("t", 0), Read("t", 0, committed=False)),
        [("NONE", "p0", 2), "PRODUCER_FENCED", ("NONE", (0, 3, 3), []), ("NONE", (0, 3, 3), VISIBLE)]),
    "an abort of an idle id fences its producer": (
        (CreateTopic("t"), Init("a"), Fence("a"), Produce("a", "t", 0, ["z"]), Describe("a")),
        ["NONE", ("INVALID_PRODUCER_EPOCH", -1), ("CompleteAbort", "p0", 1, 60_000, True, [])]),
    "an abort at the next epoch hides that there was a commit: CompleteAbort, though the records are visible": (
        (*OPEN, COMMIT, Fence("a"), Describe("a"), Read("t", 0), COMMIT),
        ["NONE", ("CompleteAbort", "p0", 2, 60_000, True, []), ("NONE", (0, 3, 3), VISIBLE), "PRODUCER_FENCED"]),
    "ends at the next epoch": (
        (*OPEN, COMMIT, End("a", commit=True, epochs_later=1),
         *(End("a", commit=commit, epochs_later=epochs) for epochs in (-1, 2) for commit in (True, False))),
        ["INVALID_TXN_STATE", *["PRODUCER_FENCED"] * 4]),
    "an open transaction ends only at its own epoch": (
        (*OPEN, End("a", commit=True, epochs_later=1), End("a", commit=True, epochs_later=-1), Init("b"),
         End("a", commit=True, of="b"), Describe("a")),
        ["PRODUCER_FENCED", "PRODUCER_FENCED", ("NONE", "p1", 0), "INVALID_PRODUCER_ID_MAPPING", ONGOING]),
    "DescribeProducers counts the records of a transaction": (
        (*OPEN, Produce("a", "t", 1, ["z"]), Produce("a", "t", 0, ["w"]), Producers("t", 0), Producers("t", 1), COMMIT,
         Producers("t", 0)),
        [[("p0", 0, 2, 0)], [("p0", 0, 0, 0)], "NONE", [("p0", 1, -1, None)]]),
    "the oldest open transaction holds back everybody": (
        (*OPEN, Init("b"), Produce("b", "t", 0, ["b"]), End("b", commit=True), Read("t", 0), ABORT, Read("t", 0)),
        [("NONE", (0, 0, 4), []), "NONE", ("NONE", (0, 5, 5), [(2, None, "b")])]),
    "a batch that is sent again is not appended again": (
        (*OPEN, AGAIN, Produce("a", "t", 0, ["z"], sequence=3), Produce("a", "t", 0, ["z"]), AGAIN),
        [("NONE", 0), ("OUT_OF_ORDER_SEQUENCE_NUMBER", -1), ("NONE", 2), ("NONE", 0)]),
    "only five batches are remembered": (
        (*OPEN, *(Produce("a", "t", 0, [f"{number}"]) for number in range(5)), AGAIN),
        [("OUT_OF_ORDER_SEQUENCE_NUMBER", -1)]),
    "a known producer begins at zero, and an unknown one anywhere": (
        (*OPEN, COMMIT, Init("a"), Produce("a", "t", 0, ["z"], sequence=4), Init("b"),
         Produce("b", "t", 0, ["z"], sequence=4), Producers("t", 0)),
        [("OUT_OF_ORDER_SEQUENCE_NUMBER", -1), ("NONE", "p1", 0), ("NONE", 3),
         [("p0", 1, -1, None), ("p1", 0, 4, 3)]]),
    "a batch that was refused holds back the later ones": (
        (CreateTopic("t"), Init("a"), Produce("a", "t", 0, ["x"], added=True), Produce("a", "t", 0, ["y"], sequence=5),
         PRODUCED, Produce("a", "t", 0, ["y"])),
        [("INVALID_TXN_STATE", -1), ("OUT_OF_ORDER_SEQUENCE_NUMBER", -1), ("NONE", 0), ("NONE", 1)]),
    "a partition must have been added": (
        (*OPEN, Produce("a", "t", 1, ["z"], added=True)), [("INVALID_TXN_STATE", -1)]),
    "records of idempotent producers are visible at once": (
        (CreateTopic("t"), Init("i", transactional=False), Produce("i", "t", 0, ["x"]),
         Produce("i", "t", 0, ["x"], sequence=0), Read("t", 0), Producers("t", 0)),
        [("NONE", 0), ("NONE", 0), ("NONE", (0, 1, 1), [(0, None, "x")]), [("p0", 0, 0, None)]]),
    "the transaction timeout is bounded": (
        (Init("a", timeout_ms=0), Init("a", timeout_ms=15 * 60_000 + 1), Describe("a")),
        [*[("INVALID_TRANSACTION_TIMEOUT", "none", -1)] * 2, "none"]),
    "a listing shows ids in every state": (
        (*OPEN, Init("b"), Init("c"), Produce("c", "t", 0, ["z"]), End("c", commit=True), Listed()),
        [[("a", "p0", "Ongoing"), ("b", "p1", "Empty"), ("c", "p2", "CompleteCommit")]]),
    "retention is not held back by an open transaction; below the log's start and above its end nothing is fetched": (
        (*OPEN, DeleteRecords("t", 0, 1), Read("t", 0), Read("t", 0, offset=1),
         Read("t", 0, offset=1, committed=False), Read("t", 0, offset=9), DeleteRecords("t", 0, 9),
         DeleteRecords("t", 0, -1), COMMIT, Read("t", 0, offset=2)),
        ["NONE", OUT_OF_RANGE, ("NONE", (1, 1, 2), []), ("NONE", (1, 1, 2), VISIBLE[1:]), OUT_OF_RANGE,
         "OFFSET_OUT_OF_RANGE", "NONE", "NONE", ("NONE", (2, 3, 3), [])]),
    "a topic that was made anew has another id, and no old records": (
        (*OPEN, DeleteTopic("t"), CreateTopic("t", 1), Read("t", 0), Read("t", 1), Producers("t", 0),
         DeleteTopic("none")),
        [("NONE", "none"), ("NONE", "t1"), ("NONE", (0, 0, 0), []), ("UNKNOWN_TOPIC_OR_PARTITION", (-1, -1, -1), []),
         [], ("UNKNOWN_TOPIC_OR_PARTITION", "none")]),
    "a transaction outlives its topic": (
        (*OPEN, DeleteTopic("t"), Describe("a"), Produce("a", "t", 0, ["z"]), COMMIT, Producers("t", 0)),
        [ONGOING, ("UNKNOWN_TOPIC_OR_PARTITION", -1), "NONE", "none"]),
    "a transaction is marked in a topic that was made anew": (
        (CreateTopic("t"), Init("a"), PRODUCED, DeleteTopic("t"), CreateTopic("t"), COMMIT, Read("t", 0)),
        [("NONE", (0, 1, 1), [])]),
    "partitions can only be added": (
        (*OPEN, AddPartitions("t", 3), AddPartitions("t", 2), Read("t", 2), Produce("a", "t", 2, ["z"]),
         CreateTopic("t")),
        ["NONE", "INVALID_PARTITIONS", ("NONE", (0, 0, 0), []), ("NONE", 0), ("TOPIC_ALREADY_EXISTS", "t0")]),
    "a compacted topic takes no record without a key": (
        (CreateTopic("c", compact=True), *OPEN, Produce("a", "c", 0, ["z"]), Produce("a", "c", 0, [("k", "z")])),
        [("INVALID_RECORD", -1), ("NONE", 0)]),
}  # fmt: skip
"""Truths with a history that shows them, and the answers of its last steps."""


@pytest.mark.parametrize("truth", ANSWERS)
def test_an_answer(truth: str, stage: Stage) -> None:
    history, seen = ANSWERS[truth]
    assert play(history, stage)[-len(seen) :] == seen


def test_an_unknown_id(stage: Stage) -> None:
    """EndTxn and AddPartitionsToTxn answer INVALID_PRODUCER_ID_MAPPING."""
    name = stage.name("nobody")
    play([CreateTopic("t")], stage)
    assert stage.broker.end_txn(name, 1, 0, commit=True) is Error.INVALID_PRODUCER_ID_MAPPING
    assert stage.broker.produce(name, 1, 0, stage.name("t"), 0, [(None, b"x")]).error is (
        Error.INVALID_PRODUCER_ID_MAPPING
    )
    assert play([Describe("nobody"), Fence("nobody"), Listed()], stage) == ["none", "none", []]


def rush(stage: Stage, late: str) -> tuple[Error, Error, Error, Produced]:
    """Commit producer a's transaction, then, before its markers can be written, all that comes too late."""
    producer_id, epoch = stage.lives["a"][-1]
    producer, place = (stage.name("a"), producer_id, epoch), (stage.name("t"), 0, [(None, late.encode())])
    if isinstance(stage.broker, RealBroker):
        return stage.broker.commit_in_a_rush(*producer, *place)
    ends = [stage.broker.end_txn(*producer, commit) for commit in (True, True, False)]
    return ends[0], ends[1], ends[2], stage.broker.produce(*producer, *place, added=True)


def test_what_comes_before_the_markers(stage: Stage) -> None:
    play(OPEN[:1], stage)
    deadline = time.monotonic() + LIMIT_S
    for attempt in itertools.count():  # a real broker's markers may be quicker than we are
        assert time.monotonic() < deadline, "the markers were always quicker"
        play([Init("a"), Produce("a", "t", 0, ["x"])], stage)
        first, again, abort, late = rush(stage, f"late {attempt}")
        assert first is Error.NONE
        if again is abort is Error.CONCURRENT_TRANSACTIONS and late.error is Error.NONE:
            break
    play([End("a", commit=True)], stage)
    _, _, records = play([Read("t", 0)], stage)[0]
    assert [value for _, _, value in records][-2:] == ["x", f"late {attempt}"]


def climb(stage: Stage, producer: str, epoch: int) -> None:
    play([Init(producer)], stage)
    steps = epoch - stage.lives[producer][-1][1]
    if isinstance(stage.broker, RealBroker):
        stage.broker.use_up_epochs(stage.name(producer), steps - 1)
    else:
        assert isinstance(stage.broker, BrokerModel)
        stage.broker._coordinator.transactions[stage.name(producer)].epoch += steps - 1
    play([Init(producer)], stage)
    assert stage.lives[producer][-1][1] == epoch


@pytest.mark.exhaustive(but=["model-True-CompleteCommit", "model-False-CompleteAbort"])
@pytest.mark.parametrize(("commit", "state"), [(True, "CompleteCommit"), (False, "CompleteAbort")])
def test_at_the_last_epoch_an_end_gives_a_new_producer_id(stage: Stage, commit: bool, state: str) -> None:
    play([CreateTopic("t", 1)], stage)
    climb(stage, "a", EPOCH_LAST)
    end = End("a", commit=commit)
    other = End("a", commit=not commit)
    assert play([Produce("a", "t", 0, ["x"]), end, Describe("a"), end, other, Producers("t", 0)], stage)[1:] == [
        "NONE",
        (state, "p1", 0, 60_000, True, []),
        "NONE",
        "INVALID_TXN_STATE",
        [("p0", 32_767, -1, None)],
    ]
    assert play([Init("a"), End("a", commit=commit, life=-2), Produce("a", "t", 0, ["z"], life=-2)], stage) == [
        ("NONE", "p1", 1),
        "INVALID_PRODUCER_ID_MAPPING",
        ("INVALID_PRODUCER_ID_MAPPING", -1),
    ]

"""The contract of a broker with whoever ends transactions for others: each test runs on the model and a real broker.

The answers are written down here, so that neither of the two can drift: a change of Kafka's behaviour fails the real
half, a defect of the model the other.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import pytest

from exactlyonce.testing import BrokerModel, Error, Produced
from exactlyonce.testing.broker.histories import (
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
from exactlyonce.testing.broker.real_broker import RealBroker
from exactlyonce.testing.broker.transaction_coordinator import EPOCH_LAST
from exactlyonce.testing.cluster import LIMIT_S

OPEN: Sequence[Step] = (CreateTopic("t", 2), Init("a"), Produce("a", "t", 0, ["x", "y"]))
"""Producer a (p0, epoch 0) has two records in an open transaction."""

VISIBLE = [(0, None, "x"), (1, None, "y")]


def seen(stage: Stage, *history: Step) -> list[Any]:
    play(OPEN, stage)
    return play(history, stage)


def test_an_open_transaction_is_seen_by_nobody_but_read_uncommitted(stage: Stage) -> None:
    assert seen(stage, Read("t", 0), Read("t", 0, committed=False), Describe("a")) == [
        ("NONE", (0, 0, 2), []),
        ("NONE", (0, 0, 2), VISIBLE),
        ("Ongoing", "p0", 0, 60_000, True, [("t", 0)]),
    ]


def test_commit_from_elsewhere_makes_a_killed_producers_records_visible(stage: Stage) -> None:
    """EndTxn(commit) by anybody who knows id, producer id and epoch commits; the epoch grows by one."""
    assert seen(stage, Kill("a"), End("a", commit=True), Read("t", 0), Describe("a"))[1:] == [
        "NONE",
        ("NONE", (0, 3, 3), VISIBLE),
        ("CompleteCommit", "p0", 1, 60_000, True, []),
    ]


def test_commit_fences_the_producer_that_opened_it(stage: Stage) -> None:
    zombie = (Produce("a", "t", 0, ["z"]), Produce("a", "t", 0, ["z"], added=True), Produce("a", "t", 1, ["z"]))
    assert seen(stage, End("a", commit=True), *zombie)[1:] == [("INVALID_PRODUCER_EPOCH", -1)] * 3


def test_the_same_end_again_is_answered_alike(stage: Stage) -> None:
    assert seen(stage, *[End("a", commit=True)] * 3) == ["NONE"] * 3
    assert play([Init("a"), Produce("a", "t", 0, ["x"]), *[End("a", commit=False)] * 3], stage)[2:] == ["NONE"] * 3


def test_the_other_end_is_refused(stage: Stage) -> None:
    assert seen(stage, End("a", commit=True), End("a", commit=False), Read("t", 0))[1:] == [
        "INVALID_TXN_STATE",
        ("NONE", (0, 3, 3), VISIBLE),
    ]
    aborted = play([Init("a"), Produce("a", "t", 1, ["z"]), End("a", commit=False), End("a", commit=True)], stage)
    assert aborted[2:] == ["NONE", "INVALID_TXN_STATE"]
    assert play([Read("t", 1)], stage) == [("NONE", (0, 2, 2), [])]


def test_aborted_records_stay_readable_to_read_uncommitted(stage: Stage) -> None:
    """An abort hides records from read_committed readers only: a copy repair can still read them."""
    assert seen(stage, End("a", commit=False), Read("t", 0), Read("t", 0, committed=False))[1:] == [
        ("NONE", (0, 3, 3), []),
        ("NONE", (0, 3, 3), VISIBLE),
    ]


def test_a_transaction_without_records_cannot_be_committed(stage: Stage) -> None:
    assert play([Init("a"), End("a", commit=True), Describe("a")], stage)[1:] == [
        "INVALID_TXN_STATE",
        ("Empty", "p0", 0, 60_000, False, []),
    ]


def test_a_transaction_marks_its_partitions_with_or_without_records(stage: Stage) -> None:
    added = (Add("a", "t", 0), Add("a", "none", 0), Describe("a"))
    ended = (End("a", commit=True), Read("t", 0), Add("a", "t", 0))
    assert play([CreateTopic("t"), Init("a"), *added, *ended], stage)[2:] == [
        "NONE",
        "UNKNOWN_TOPIC_OR_PARTITION",
        ("Ongoing", "p0", 0, 60_000, True, [("t", 0)]),
        "NONE",
        ("NONE", (0, 1, 1), []),
        "INVALID_PRODUCER_EPOCH",
    ]


def test_a_new_producer_fences_every_ending_of_the_old_one(stage: Stage) -> None:
    ends = (End("a", commit=True, life=0), End("a", commit=False, life=0))
    assert seen(stage, End("a", commit=True), Init("a"), *ends)[2:] == ["PRODUCER_FENCED"] * 2


def test_a_new_producer_aborts_what_is_open(stage: Stage) -> None:
    assert seen(stage, Init("a"), End("a", commit=True, life=0), Read("t", 0), Read("t", 0, committed=False)) == [
        ("NONE", "p0", 2),
        "PRODUCER_FENCED",
        ("NONE", (0, 3, 3), []),
        ("NONE", (0, 3, 3), VISIBLE),
    ]


def test_abort_of_an_idle_id_fences_its_producer(stage: Stage) -> None:
    assert play([CreateTopic("t"), Init("a"), Fence("a"), Produce("a", "t", 0, ["z"]), Describe("a")], stage)[2:] == [
        "NONE",
        ("INVALID_PRODUCER_EPOCH", -1),
        ("CompleteAbort", "p0", 1, 60_000, True, []),
    ]


def test_abort_at_the_next_epoch_hides_that_there_was_a_commit(stage: Stage) -> None:
    """DescribeTransactions proves nothing about the past: CompleteAbort is shown, though the records are visible."""
    assert seen(stage, End("a", commit=True), Fence("a"), Describe("a"), Read("t", 0), End("a", commit=True))[1:] == [
        "NONE",
        ("CompleteAbort", "p0", 2, 60_000, True, []),
        ("NONE", (0, 3, 3), VISIBLE),
        "PRODUCER_FENCED",
    ]


def test_ends_at_the_next_epoch(stage: Stage) -> None:
    later = [End("a", commit=commit, epochs_later=epochs) for epochs in (-1, 2) for commit in (True, False)]
    assert seen(stage, End("a", commit=True), End("a", commit=True, epochs_later=1), *later)[1:] == [
        "INVALID_TXN_STATE",
        *["PRODUCER_FENCED"] * 4,
    ]


def test_an_open_transaction_ends_only_at_its_own_epoch(stage: Stage) -> None:
    wrong = (End("a", commit=True, epochs_later=1), End("a", commit=True, epochs_later=-1), Init("b"))
    assert seen(stage, *wrong, End("a", commit=True, of="b"), Describe("a")) == [
        "PRODUCER_FENCED",
        "PRODUCER_FENCED",
        ("NONE", "p1", 0),
        "INVALID_PRODUCER_ID_MAPPING",
        ("Ongoing", "p0", 0, 60_000, True, [("t", 0)]),
    ]


def test_an_unknown_id(stage: Stage) -> None:
    """What the broker does not know is INVALID_PRODUCER_ID_MAPPING to EndTxn and to AddPartitionsToTxn."""
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


def test_describe_producers_counts_the_records_of_a_transaction(stage: Stage) -> None:
    more = (Produce("a", "t", 1, ["z"]), Produce("a", "t", 0, ["w"]))
    assert seen(stage, *more, Producers("t", 0), Producers("t", 1), End("a", commit=True), Producers("t", 0))[2:] == [
        [("p0", 0, 2, 0)],
        [("p0", 0, 0, 0)],
        "NONE",
        [("p0", 1, -1, None)],
    ]


def test_the_oldest_open_transaction_holds_back_everybody(stage: Stage) -> None:
    b = (Init("b"), Produce("b", "t", 0, ["b"]), End("b", commit=True))
    assert seen(stage, *b, Read("t", 0), End("a", commit=False), Read("t", 0))[3:] == [
        ("NONE", (0, 0, 4), []),
        "NONE",
        ("NONE", (0, 5, 5), [(2, None, "b")]),
    ]


def test_a_batch_sent_again_is_not_appended_again(stage: Stage) -> None:
    again = Produce("a", "t", 0, ["x", "y"], sequence=0)
    assert seen(stage, again, Produce("a", "t", 0, ["z"], sequence=3), Produce("a", "t", 0, ["z"]), again) == [
        ("NONE", 0),
        ("OUT_OF_ORDER_SEQUENCE_NUMBER", -1),
        ("NONE", 2),
        ("NONE", 0),
    ]


def test_only_five_batches_are_remembered(stage: Stage) -> None:
    more = [Produce("a", "t", 0, [f"{number}"]) for number in range(5)]
    assert seen(stage, *more, Produce("a", "t", 0, ["x", "y"], sequence=0))[-1] == ("OUT_OF_ORDER_SEQUENCE_NUMBER", -1)


def test_an_unknown_producer_may_begin_anywhere_but_a_known_one_at_zero(stage: Stage) -> None:
    fresh = (End("a", commit=True), Init("a"), Produce("a", "t", 0, ["z"], sequence=4))
    assert seen(stage, *fresh)[-1] == ("OUT_OF_ORDER_SEQUENCE_NUMBER", -1)
    assert play([Init("b"), Produce("b", "t", 0, ["z"], sequence=4), Producers("t", 0)], stage)[1:] == [
        ("NONE", 3),
        [("p0", 1, -1, None), ("p1", 0, 4, 3)],
    ]


def test_a_batch_that_was_refused_holds_back_the_later_ones(stage: Stage) -> None:
    refused = (CreateTopic("t"), Init("a"), Produce("a", "t", 0, ["x"], added=True))
    later = (Produce("a", "t", 0, ["y"], sequence=5), Produce("a", "t", 0, ["x"]), Produce("a", "t", 0, ["y"]))
    assert play([*refused, *later], stage)[2:] == [
        ("INVALID_TXN_STATE", -1),
        ("OUT_OF_ORDER_SEQUENCE_NUMBER", -1),
        ("NONE", 0),
        ("NONE", 1),
    ]


def test_a_partition_must_have_been_added(stage: Stage) -> None:
    assert seen(stage, Produce("a", "t", 1, ["z"], added=True)) == [("INVALID_TXN_STATE", -1)]


def test_idempotent_producers_are_visible_at_once(stage: Stage) -> None:
    history = (CreateTopic("t"), Init("i", transactional=False), Produce("i", "t", 0, ["x"]))
    again = (Produce("i", "t", 0, ["x"], sequence=0), Read("t", 0), Producers("t", 0))
    assert play([*history, *again], stage)[2:] == [
        ("NONE", 0),
        ("NONE", 0),
        ("NONE", (0, 1, 1), [(0, None, "x")]),
        [("p0", 0, 0, None)],
    ]


def test_the_transaction_timeout_is_bounded(stage: Stage) -> None:
    too_long = Init("a", timeout_ms=15 * 60_000 + 1)
    refused = ("INVALID_TRANSACTION_TIMEOUT", "none", -1)
    assert play([Init("a", timeout_ms=0), too_long, Describe("a")], stage) == [refused, refused, "none"]


def test_listing_shows_ids_in_every_state(stage: Stage) -> None:
    assert seen(stage, Init("b"), Init("c"), Produce("c", "t", 0, ["z"]), End("c", commit=True), Listed())[-1] == [
        ("a", "p0", "Ongoing"),
        ("b", "p1", "Empty"),
        ("c", "p2", "CompleteCommit"),
    ]


def test_retention(stage: Stage) -> None:
    """Below the log's start a fetch is OFFSET_OUT_OF_RANGE; an open transaction does not hold retention back."""
    gone = (DeleteRecords("t", 0, 1), Read("t", 0), Read("t", 0, offset=1), Read("t", 0, offset=1, committed=False))
    out_of_range: object = ("OFFSET_OUT_OF_RANGE", (-1, -1, -1), [])
    assert seen(stage, *gone, Read("t", 0, offset=9), DeleteRecords("t", 0, 9), DeleteRecords("t", 0, -1)) == [
        "NONE",
        out_of_range,
        ("NONE", (1, 1, 2), []),
        ("NONE", (1, 1, 2), VISIBLE[1:]),
        out_of_range,
        "OFFSET_OUT_OF_RANGE",
        "NONE",
    ]
    assert play([End("a", commit=True), Read("t", 0, offset=2)], stage) == ["NONE", ("NONE", (2, 3, 3), [])]


def test_a_topic_made_anew_has_another_id_and_takes_no_old_records(stage: Stage) -> None:
    anew = (DeleteTopic("t"), CreateTopic("t", 1), Read("t", 0), Read("t", 1), Producers("t", 0), DeleteTopic("none"))
    assert seen(stage, *anew) == [
        ("NONE", "none"),
        ("NONE", "t1"),
        ("NONE", (0, 0, 0), []),
        ("UNKNOWN_TOPIC_OR_PARTITION", (-1, -1, -1), []),
        [],
        ("UNKNOWN_TOPIC_OR_PARTITION", "none"),
    ]


def test_a_transaction_outlives_its_topic(stage: Stage) -> None:
    gone = (DeleteTopic("t"), Describe("a"), Produce("a", "t", 0, ["z"]), End("a", commit=True), Producers("t", 0))
    assert seen(stage, *gone)[1:] == [
        ("Ongoing", "p0", 0, 60_000, True, [("t", 0)]),
        ("UNKNOWN_TOPIC_OR_PARTITION", -1),
        "NONE",
        "none",
    ]
    anew = (CreateTopic("t"), Init("a"), Produce("a", "t", 0, ["x"]), DeleteTopic("t"), CreateTopic("t"))
    assert play([*anew, End("a", commit=True), Read("t", 0)], stage)[-1] == ("NONE", (0, 1, 1), [])


def test_partitions_can_only_be_added(stage: Stage) -> None:
    grow = (AddPartitions("t", 3), AddPartitions("t", 2), Read("t", 2), Produce("a", "t", 2, ["z"]), CreateTopic("t"))
    assert seen(stage, *grow) == [
        "NONE",
        "INVALID_PARTITIONS",
        ("NONE", (0, 0, 0), []),
        ("NONE", 0),
        ("TOPIC_ALREADY_EXISTS", "t0"),
    ]


def test_a_compacted_topic_takes_no_record_without_key(stage: Stage) -> None:
    keyed = (CreateTopic("c", compact=True), Produce("a", "c", 0, ["z"]), Produce("a", "c", 0, [("k", "z")]))
    assert seen(stage, *keyed)[1:] == [("INVALID_RECORD", -1), ("NONE", 0)]


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


@pytest.mark.slow
@pytest.mark.exhaustive(but=["model"])
def test_epochs_run_out_under_every_operation(stage: Stage) -> None:
    """Init over an open transaction, init of an idle id and a fence all pass from epoch 32766 to a new producer id."""
    play([CreateTopic("t", 1)], stage)
    climb(stage, "a", EPOCH_LAST)
    assert play([Init("a")], stage) == [("NONE", "p1", 0)]
    climb(stage, "a", EPOCH_LAST)
    assert play([Produce("a", "t", 0, ["x"]), Init("a"), End("a", commit=True, life=-2)], stage)[1:] == [
        ("NONE", "p2", 1),
        "INVALID_PRODUCER_ID_MAPPING",
    ]
    climb(stage, "a", EPOCH_LAST)
    assert play([Fence("a"), Describe("a")], stage) == ["NONE", ("CompleteAbort", "p3", 0, 60_000, True, [])]
    climb(stage, "a", EPOCH_LAST - 1)
    ends = (End("a", commit=True), Fence("a"), Describe("a"), End("a", commit=True))
    assert play([Produce("a", "t", 0, ["x"]), *ends], stage)[1:] == [
        "NONE",
        "NONE",
        ("CompleteAbort", "p4", 0, 60_000, True, []),
        "INVALID_PRODUCER_ID_MAPPING",
    ]

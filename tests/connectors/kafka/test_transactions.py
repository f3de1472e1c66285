"""The broker's answers about transactions, row by row; and a fence holds."""

from __future__ import annotations

import itertools
import re
from typing import Any

import msgspec
import pytest
from confluent_kafka import KafkaException, Producer
from waiting import until

from exactlyonce.checkpoint.requests import EndAnswer, Ending, ListedTransaction, TransactionState
from exactlyonce.pipeline.errors import TopicError
from exactlyonce.testing.cluster import LIMIT_S

VALUES = [b"%03d" % number for number in range(100)]
FENCED = re.compile("fenced|epoch|not currently assigned")
EPOCH_LAST = 32_766
"""The last epoch that a transaction is opened with; the broker keeps 32,767 for fencing."""


def settled(cluster: Any, transactional_id: str) -> TransactionState:
    """The state once all markers are written: the end is answered before they are."""
    until(lambda: not cluster.state(transactional_id).state.startswith("Prepare"))
    state: TransactionState = cluster.state(transactional_id)
    return state


def end(cluster: Any, state: TransactionState, *, commit: bool) -> EndAnswer:
    answer: EndAnswer = cluster.transactions.end_until_answered(
        state.transactional_id, state.producer_id, state.epoch, commit=commit
    )
    return answer


DONE, REFUSED, UNKNOWN = EndAnswer.COMPLETED, EndAnswer.REFUSED, EndAnswer.UNKNOWN
ROWS = [  # what was done with an id, the end that is asked for then, the answer, and whether the records are visible
    ("open", "commit", DONE, True),
    ("open", "abort", DONE, False),
    ("open commit", "commit", DONE, True),  # however long ago
    ("open commit", "abort", REFUSED, True),
    ("open abort", "commit", REFUSED, False),
    ("take", "commit", REFUSED, False),  # a transaction without records does not exist at the broker
    ("open take", "commit", UNKNOWN, False),
    ("open take", "abort", UNKNOWN, False),
    ("open commit take", "commit", UNKNOWN, True),  # it does not mean aborted
    ("open commit take", "abort", UNKNOWN, True),
    ("open commit abort-next", "commit", UNKNOWN, True),  # though the id shows CompleteAbort
    ("take", "abort", DONE, False),
    ("open commit", "abort-next", DONE, True),
    ("", "commit", UNKNOWN, False),
    ("", "abort", UNKNOWN, False),
]
NEVER_USED = TransactionState("", "", 1, 0, 0, 0, ())


class TestTheTableOfAnswers:
    """The rows of the table in `connectors/kafka/transactions.py`."""

    @pytest.mark.parametrize(("before", "asked", "answer", "visible"), ROWS, ids=[f"{r[0]}-{r[1]}" for r in ROWS])
    def test_a_row(self, cluster: Any, topic: str, before: str, asked: str, answer: EndAnswer, visible: bool) -> None:
        """An end that is carried out raises the epoch by one, once; an answer without one changes nothing."""
        found: TransactionState | None = None
        for step in before.split():
            if step == "open":
                cluster.open(topic, topic, VALUES)
            elif step == "take":
                cluster.producer(topic)
            else:
                self.ends(cluster, topic, step, found or NEVER_USED)
            found = found or cluster.state(topic)
        shown = None if found is None else settled(cluster, topic)
        assert self.ends(cluster, topic, asked, found or NEVER_USED) is answer
        if shown is None:
            assert cluster.transactions.describe([topic]) == {topic: None}
        else:
            now, repeated = settled(cluster, topic), asked == before.split()[-1]
            changed = answer is DONE and not repeated
            assert (now.producer_id, now.epoch) == (shown.producer_id, shown.epoch + changed)
            verdict = "CompleteCommit" if asked == "commit" else "CompleteAbort"
            assert now.state == (verdict if changed else shown.state)
        assert cluster.visible(topic) == (VALUES if visible else [])

    @staticmethod
    def ends(cluster: Any, topic: str, how: str, opened: TransactionState) -> EndAnswer:
        """The answer to an end of what was *opened*; of what the id has come to since, where it is the next one."""
        state = settled(cluster, topic) if how == "abort-next" else opened
        state = msgspec.structs.replace(state, transactional_id=topic)
        return end(cluster, state, commit=how == "commit")

    @pytest.mark.parametrize(("id_ahead", "epoch_ahead"), [(1_000_000, 0), (0, 1)])
    def test_what_is_not_the_transactions(self, cluster: Any, topic: str, id_ahead: int, epoch_ahead: int) -> None:
        cluster.open(topic, topic, VALUES)
        opened = cluster.state(topic)
        wrong = opened.producer_id + id_ahead, opened.epoch + epoch_ahead
        assert cluster.transactions.end(topic, *wrong, commit=True) is EndAnswer.UNKNOWN
        assert cluster.state(topic) == opened


class TestDescribing:
    def test_producers_of_a_missing_topic(self, cluster: Any, topic: str) -> None:
        with pytest.raises(TopicError, match=f"{topic}-missing"):
            cluster.transactions.producers([(f"{topic}-missing", 0)])
        with pytest.raises(TopicError, match=f"partition 7 of|{topic}-7"):
            cluster.transactions.producers([(topic, 7)])

    def test_nothing_asked_nothing_answered(self, cluster: Any) -> None:
        assert cluster.transactions.describe([]) == {}
        assert cluster.transactions.producers([]) == []
        assert cluster.transactions.end_all([], commit=True) == []

    def test_list_takes_the_prefix_literally(self, cluster: Any, topic: str) -> None:
        cluster.open(f"{topic}.a:open", topic, VALUES)
        cluster.producer(f"{topic}.a:empty")
        cluster.producer(f"{topic}-a:other")
        shown = {each.transactional_id: each.state for each in cluster.transactions.list(f"{topic}.a:")}
        assert shown == {f"{topic}.a:open": "Ongoing", f"{topic}.a:empty": "Empty"}

    def test_the_cluster(self, cluster: Any) -> None:
        assert len(cluster.transactions.cluster_id()) > 10
        assert cluster.transactions.max_timeout_ms() >= 60_000
        assert cluster.transactions.transaction_version() >= 2

    def test_endings_are_answered_in_order(self, cluster: Any, topic: str) -> None:
        for slot in range(8):
            cluster.open(f"{topic}-{slot}", topic, VALUES)
        opened = [cluster.state(f"{topic}-{slot}") for slot in range(8)]
        endings = [Ending(each.transactional_id, each.producer_id, each.epoch) for each in opened]
        endings.insert(3, Ending(f"{topic}-never", 1, 0))
        answers = cluster.transactions.end_all(endings, commit=True)
        assert answers == [EndAnswer.COMPLETED] * 3 + [EndAnswer.UNKNOWN] + [EndAnswer.COMPLETED] * 5
        assert len(cluster.visible(topic)) == 8 * len(VALUES)


def listed(transactional_id: str) -> list[ListedTransaction]:
    return [ListedTransaction(transactional_id, -1, "")]


def write_on(zombie: Producer, topic: str) -> None:
    """Go on as a producer that has not heard that it is fenced."""
    zombie.produce(topic, b"late", partition=0)
    zombie.flush(LIMIT_S)
    zombie.commit_transaction(LIMIT_S)


class TestFencing:
    """`abort_listed` leaves no producer that can still write."""

    @pytest.mark.parametrize("at", ["idle", "writing", "committed"])
    def test_a_zombie(self, cluster: Any, topic: str, at: str) -> None:
        zombie = cluster.producer(topic) if at == "idle" else cluster.open(topic, topic, VALUES)
        if at == "committed":
            zombie.commit_transaction(LIMIT_S)
        cluster.transactions.abort_listed(cluster.transactions.list(topic))
        if at != "writing":
            zombie.begin_transaction()
        with pytest.raises(KafkaException, match=FENCED):
            write_on(zombie, topic)
        assert cluster.visible(topic) == (VALUES if at == "committed" else [])

    def test_twice_and_never_used(self, cluster: Any, topic: str) -> None:
        cluster.open(topic, topic, VALUES)
        for _ in range(3):
            cluster.transactions.abort_listed(listed(topic) + listed(f"{topic}-never"))
        assert cluster.visible(topic) == []


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_last_epochs(cluster: Any, topic: str) -> None:
    """A commit at the last epoch is as repeatable as ever, though the id continues under another producer id."""
    idle, written = f"{topic}-idle", f"{topic}-written"
    for transactional_id in (idle, written):
        cluster.producer(transactional_id)
    raise_epochs(cluster, [idle, written], EPOCH_LAST - 1)

    cluster.producer(idle)
    before = cluster.state(idle)
    assert (before.state, before.epoch) == ("Empty", EPOCH_LAST)
    assert end(cluster, before, commit=False) is EndAnswer.COMPLETED
    after = settled(cluster, idle)
    assert after.producer_id != before.producer_id
    assert after.epoch == 0

    zombie = cluster.open(written, topic, VALUES)
    before = cluster.state(written)
    assert before.epoch == EPOCH_LAST
    for _ in range(3):
        assert end(cluster, before, commit=True) is EndAnswer.COMPLETED
        assert end(cluster, before, commit=False) is EndAnswer.REFUSED
    assert cluster.visible(topic) == VALUES
    after = settled(cluster, written)
    assert after.producer_id != before.producer_id
    assert after.epoch == 0
    with pytest.raises(KafkaException, match=FENCED):
        zombie.commit_transaction(LIMIT_S)
    cluster.transactions.abort_listed(listed(written))
    assert end(cluster, before, commit=True) is EndAnswer.UNKNOWN
    assert cluster.visible(topic) == VALUES


def raise_epochs(cluster: Any, transactional_ids: list[str], epoch: int) -> None:
    """Raise the epochs of idle ids, which are alike, by aborting them over and over."""
    states = [cluster.state(each) for each in transactional_ids]
    for number in range(states[0].epoch, epoch):
        remaining = [Ending(each.transactional_id, each.producer_id, number) for each in states]
        while remaining:
            answers = cluster.transactions.end_all(remaining, commit=False)
            assert set(answers) <= {EndAnswer.COMPLETED, EndAnswer.BUSY}
            busy = [answer is EndAnswer.BUSY for answer in answers]
            remaining = list(itertools.compress(remaining, busy))

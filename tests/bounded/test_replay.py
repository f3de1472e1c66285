"""Recomputed outputs: their shares, where they go, whether their counts agree, and a commit that fails."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException
from manifests import committable as committed
from manifests import manifest

from exactlyonce.checkpoint.records.manifest import Committable, Output
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.bounded.recompute import topic_of
from exactlyonce.engines.bounded.replay_repair import mismatch, placed, places_of, share_of
from exactlyonce.engines.bounded.reproduce import ReplayedCount, _commit, agree
from exactlyonce.engines.bounded.unit.staging import OutputBatch, RecomputedOutput, flat
from exactlyonce.pipeline.errors import BrokerUnavailable
from exactlyonce.sinks.kafka.open_transaction import OpenTransaction


def committable(name: str, checkpoint: int = 7, **counts: int) -> Committable:
    """`p1=4` is four records in partition 1."""
    places: dict[str, Any] = {place: (0, count) for place, count in counts.items()}
    return committed(name, checkpoint=checkpoint, **places)


def outputs(keys: Iterable[str]) -> list[RecomputedOutput]:
    """A key that is a digit names its partition; "-" is none. Values number them."""
    found = [None if key == "-" else key.encode() for key in keys]
    return [RecomputedOutput(key, b"%d" % place, None, None) for place, key in enumerate(found)]


def digit(key: bytes | None, count: int) -> int | None:
    return None if key is None else int(key) % count


def test_each_transaction_gets_its_share_in_the_order_of_the_checkpoints() -> None:
    first, second = committable("a", 6, p0=1, p1=2), committable("b", p1=1, p2=1)
    decided = manifest(committables=(second, first), sinks=(Output("out", "t", 3),))
    everything = outputs("01112")
    assert list(share_of(decided, first, everything)) == everything[:3]
    assert list(share_of(decided, second, everything)) == everything[3:]
    assert topic_of(decided, "out") == ("t", 3)


def test_records_of_a_sink_that_chooses_partitions_go_there_whatever_their_keys() -> None:
    """So records without a key can be written again where only some partitions have lost theirs."""
    whole = committable("a", p0=2, p1=1, p2=1)
    everything = [output._replace(partition=place) for output, place in zip(outputs("-1-0"), (0, 2, 1, 0), strict=True)]
    places = places_of(everything, digit, 3)
    assert places == [0, 2, 1, 0]
    lost = whole.within(committable("b", p1=1))
    assert mismatch(whole, lost, "t", places) == ""
    assert [(place, output.value) for place, output in placed(lost, "t", everything, places)] == [(1, b"2")]
    assert "1 instead of 0" in mismatch(committable("a", p0=3, p1=1), lost, "t", places)


def test_records_with_keys_go_where_the_partitioner_says_and_others_fill_the_counts() -> None:
    whole = committable("a", p0=2, p1=3)
    everything = outputs("0-1-1")
    places = places_of(everything, digit, 3)
    assert places == [0, None, 1, None, 1]
    assert mismatch(whole, whole, "t", places) == ""
    found = [(partition, output.value) for partition, output in placed(whole, "t", everything, places)]
    assert found == [(0, b"0"), (0, b"1"), (1, b"2"), (1, b"3"), (1, b"4")]


def test_only_what_went_to_lost_partitions_is_produced() -> None:
    whole = committable("a", p0=2, p1=3)
    everything = outputs("01011")
    lost = whole.within(committable("b", p1=3))
    places = places_of(everything, digit, 3)
    assert mismatch(whole, lost, "t", places) == ""
    assert [output.value for _, output in placed(lost, "t", everything, places)] == [b"1", b"3", b"4"]


@pytest.mark.parametrize(
    ("keys", "lost", "why"),
    [
        ("01", {"p0": 2, "p1": 1}, "2 records instead of 3"),
        ("0011", {"p0": 2, "p1": 1}, r"t\[1\] 2 instead of 1"),
        ("002", {"p0": 2, "p1": 1}, r"t\[2\] 1 instead of 0"),
        ("0--1", {"p0": 2, "p1": 1}, "4 records instead of 3"),
        ("0-1", {"p1": 1}, "only some partitions have lost theirs"),
    ],
)
def test_what_cannot_be_what_was_lost_is_refused(keys: str, lost: dict[str, int], why: str) -> None:
    whole = committable("a", p0=2, p1=1)
    places = places_of(outputs(keys), digit, 3)
    assert re.search(why, mismatch(whole, whole.within(committable("b", **lost)), "t", places))


def test_batches_are_taken_apart() -> None:
    batches = [
        OutputBatch([b"1", None], None, None, None),
        OutputBatch([b"2"], [b"k"], [[("h", b"x")]], [("in", 0, 5)]),
    ]
    assert list(flat(batches)) == [
        RecomputedOutput(None, b"1", None, None),
        RecomputedOutput(None, None, None, None),
        RecomputedOutput(b"k", b"2", [("h", b"x")], ("in", 0, 5)),
    ]


def test_counts_agree_if_what_is_dealt_out_at_random_fills_the_rest() -> None:
    def of(*replayed: tuple[int | None, int, int | None]) -> list[ReplayedCount]:
        return [ReplayedCount("out", "t", partition, count, decided) for partition, count, decided in replayed]

    assert agree(of((0, 3, 3), (1, 2, 2)))
    assert agree(of((0, 1, 3), (1, 2, 2), (None, 2, None)))
    assert not agree(of((0, 3, 3), (1, 1, 2)))
    assert not agree(of((0, 4, 3), (1, 1, 2)))
    assert not agree(of((0, 1, 3), (1, 2, 2), (None, 3, None)))


class Failing:
    def __init__(self, error: KafkaError) -> None:
        self.error = error

    def commit(self) -> None:
        raise KafkaException(self.error)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KafkaError(KafkaError._TIMED_OUT, "no answer", retriable=True), "all or none, is unknown"),
        (KafkaError(KafkaError._FENCED, "fenced", fatal=True), "all or none, is unknown"),
        (KafkaError(KafkaError._INCONSISTENT, "not delivered", txn_requires_abort=True), "Nothing of it is visible"),
    ],
    ids=["no answer", "fenced", "refused"],
)
def test_a_commit_that_fails(error: KafkaError, said: str) -> None:
    """The broker may have committed, unless the error asks for an abort: that came instead of the commit."""
    with pytest.raises(BrokerUnavailable, match=said):
        _commit(ClientConfig({"bootstrap.servers": "nobody:9092"}), cast(OpenTransaction, Failing(error)), "again")

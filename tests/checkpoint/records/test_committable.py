"""Committables and the names of transactions."""

from __future__ import annotations

import pytest
from blank_manifest import blank_committable

from exactlyonce.checkpoint.records.manifest import TransactionalId, Written, coordinator_id, transaction_prefix

OURS = TransactionalId("a-b_C", "out", 3, 12, "4", "repair-7-1")


def test_a_name_is_spelled_and_parsed_alike() -> None:
    assert str(OURS) == "eo:a-b_C:out:3:12.4:repair-7-1"
    assert TransactionalId.parse(str(OURS)) == OURS


def test_more_may_follow_the_number_of_an_attempt() -> None:
    name = TransactionalId.parse("eo:a:out:0:1.2-7-stage_3:0")
    assert name is not None
    assert name.attempt == "2-7-stage_3"


@pytest.mark.parametrize(
    "text",
    [
        "", "eo:a:coordinator", "eo:a:out:0:1.0", "eo:a:out:0:1.0:0:0", "eo:a:out:0:1.0:0\n", " eo:a:out:0:1.0:0",
        "eo::out:0:1.0:0", "eo:a:out:x:1.0:0", "eo:a:out:-1:1.0:0", "eo:a:out:0:x.0:0", "eo:a:out:0:1.:0",
        "eo:a:out:0:1.x:0", "eo:a:out:0:1.0x:0", "eo:a:out:0:1.0-:0", "eo:a:out:0:10:0", "eo:a b:out:0:1.0:0",
        "eo:a:out:٣:1.0:0", "EO:a:out:0:1.0:0",
    ],
)  # fmt: skip
def test_what_is_not_whole_is_none_of_ours(text: str) -> None:
    assert TransactionalId.parse(text) is None


def test_the_prefix_of_one_pipeline_is_not_that_of_another() -> None:
    assert str(OURS).startswith(transaction_prefix("a-b_C"))
    assert not str(OURS).startswith(transaction_prefix("a"))
    assert not str(OURS).startswith(transaction_prefix("a-b"))


def test_the_coordinators_id_is_listed_with_its_pipeline_but_is_no_sinks_id() -> None:
    assert coordinator_id("a").startswith(transaction_prefix("a"))
    assert TransactionalId.parse(coordinator_id("a")) is None


def test_a_committable_within_another_is_what_both_have_partitions_of() -> None:
    """Only the partitions count: first offsets and counts are one's own."""
    whole = blank_committable(written=(Written("t", 0, 5, 2), Written("t", 1, 7, 3)))
    other = blank_committable(producer_id=9, epoch=4, written=(Written("t", 1, 90, 3), Written("u", 0, 1, 1)))
    assert whole.within(other).written == (Written("t", 1, 7, 3),)
    assert whole.within(whole) == whole

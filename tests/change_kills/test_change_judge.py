"""The judge of captured changes finds what is lost, doubled, out of order or torn, and nothing else."""

from __future__ import annotations

import pytest
from change_judge import MUTANTS, Audited, Said, judge, mutated, newest

AUDIT = [
    Audited(1, "a", 1, 10, 100),
    Audited(2, "b", 2, 10, 100),
    Audited(3, "c", 3, 10, 100),
    Audited(4, "a", 4, 5, 101),
    Audited(5, "b", 5, 15, 101),
    Audited(8, "b", None, 0, 102),
    Audited(9, "a", 6, 20, 102),
    Audited(10, "b", 7, 0, 103),
    Audited(11, "a", 8, 15, 104),
    Audited(12, "b", 9, 5, 104),
]
"""Pages were read before number 7: that of a and c between transactions 100 and 101, that of b after 101."""
MESSAGES = [
    Said("a", 1, "read"),
    Said("c", 3, "read"),
    Said("a", 4, "update", 20),
    Said("b", 5, "read"),
    Said("b", None, "delete", 30),
    Said("a", 6, "update", 30),
    Said("b", 7, "insert", 40),
    Said("a", 8, "update", 50),
    Said("b", 9, "update", 50),
]


def judged(messages: list[Said], total: int | None = 30) -> list[str]:
    return judge(AUDIT, messages, 7, total)


def test_each_change_once_after_a_page() -> None:
    assert judged(MESSAGES) == []
    assert newest(MESSAGES) == {"a": 8, "b": 9, "c": 3}


@pytest.mark.parametrize("place", range(len(MESSAGES)))
@pytest.mark.parametrize("fault", ["lost", "doubled"])
def test_any_message_that_is_lost_or_doubled(place: int, fault: str) -> None:
    times = 0 if fault == "lost" else 2
    assert judged([*MESSAGES[:place], *times * [MESSAGES[place]], *MESSAGES[place + 1 :]]) != []


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants(mutant: str) -> None:
    assert judged(mutated(MESSAGES, mutant)) != []


def test_two_changes_of_a_key_in_the_wrong_order() -> None:
    swapped = [*MESSAGES[:5], MESSAGES[7], MESSAGES[6], MESSAGES[5], MESSAGES[8]]
    assert "key a: out of order: [1, 4, 8, 6] and not [1, 4, 6, 8]" in judged(swapped)


def test_a_transaction_in_parts() -> None:
    """Each key has its changes in order, and yet others come between those of one transaction."""
    torn = [*MESSAGES[:4], MESSAGES[4], MESSAGES[6], MESSAGES[5], *MESSAGES[7:]]
    found = judged(torn, total=None)
    assert found == [
        "the change of a to 6, committed at 30, comes after 40",
        "transaction 102 comes in parts, with others between them",
    ]


def test_a_sum_that_is_not_constant() -> None:
    assert judged(MESSAGES, total=31)[0] == "after transaction 102 the sum is 30 and not 31"


def test_a_row_that_was_rolled_back() -> None:
    assert judged([*MESSAGES, Said("d", 10, "insert", 60)]) == [
        "key d begins with 10, which is no state of it: [10] of []"
    ]


def test_what_was_committed_after_the_pages_is_left_to_none() -> None:
    """A page may hold what was committed before it was read, and nothing later."""
    later = [said for said in MESSAGES if said.key != "b" or said.version in (7, 9)]
    assert judged(later)[0] == "key b lacks [None], committed after all pages were read"

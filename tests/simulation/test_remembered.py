"""Remembered answers of pure functions: never those of another function than the one that ships now."""

from __future__ import annotations

from unittest.mock import Mock, patch

from mutants import MUTANTS, planted
from remembered import forget, remembered

from exactlyonce.checkpoint.records import history
from exactlyonce.checkpoint.records.encoding import DecisionKey


def parsed() -> DecisionKey | None:
    return DecisionKey.parse("manifest/7")


def test_an_answer_is_remembered_within_and_not_after() -> None:
    """A planted defect may lie in what a remembered function calls."""
    forget()
    with remembered():
        before = parsed()
        assert parsed() is before
        with planted(next(iter(MUTANTS))):
            within = parsed()
        after = parsed()
    assert before is not within
    assert within is not after
    assert parsed() is not after
    assert before == within == after


def test_a_function_in_which_a_defect_is_planted_is_asked_each_time() -> None:
    with patch.object(history, "_checked", planted_function := Mock()), remembered():
        assert history._checked is planted_function

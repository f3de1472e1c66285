"""Remembered answers of pure functions: never those of another function than the one that ships now."""

from __future__ import annotations

from unittest.mock import Mock, patch

from mutants import MUTANTS, planted
from remembered import forget, remembered

from exactlyonce.checkpoint.records import history
from exactlyonce.checkpoint.records.encoding import DecisionKey


def test_an_answer_is_remembered_within_and_not_behind() -> None:
    """Within `remembered` the same bytes give the same object; behind it the shipped function is there again."""
    forget()
    with remembered():
        assert DecisionKey.parse("manifest/7") is DecisionKey.parse("manifest/7")
    assert DecisionKey.parse("manifest/7") is not DecisionKey.parse("manifest/7")


def test_a_function_in_which_a_defect_is_planted_is_asked_each_time() -> None:
    """What somebody has patched before stays as it is."""
    with patch.object(history, "_checked", planted_function := Mock()), remembered():
        assert history._checked is planted_function


def test_nothing_is_remembered_from_before_a_defect_is_planted() -> None:
    """It may lie in what a remembered function calls; and it is gone behind it."""
    with remembered():
        before = DecisionKey.parse("manifest/7")
        with planted(next(iter(MUTANTS))):
            within = DecisionKey.parse("manifest/7")
        behind = DecisionKey.parse("manifest/7")
    assert before is not within
    assert within is not behind
    assert before == within == behind

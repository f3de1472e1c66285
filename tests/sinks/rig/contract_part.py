"""A part of a contract, for a class whose other tests would show again what a class beside it shows."""

from __future__ import annotations

from collections.abc import Callable

OF_KEYS = (
    "test_the_last_of_a_key_counts", "test_a_thousand_rows_of_many_keys", "test_awkward_rows", "test_a_lost_answer",
    "test_writing_without_the_ledger", "test_a_process_that_dies_within_an_apply", "test_readers_never_see_a_part",
    "test_a_fence_while_a_zombie_applies",
)  # fmt: skip
"""Tests of a store whose rows replace each other: the ledger is that of rows that are added."""
OF_COMMITS = (
    "test_rows_are_seen_from_their_commit_on", "test_a_lost_answer", "test_many_checkpoints_and_incarnations",
    "test_all_of_a_checkpoint_in_one_call", "test_a_zombie_of_an_older_incarnation",
    "test_a_ledger_that_nobody_has_begun", "test_commits_at_once_in_threads", "test_a_store_that_is_away",
    "test_secrets_show_nowhere",
)  # fmt: skip
"""Tests of the same sink at another place, or in another mode: its commits."""


def only(*names: str) -> Callable[[type], type]:
    """A decorator that leaves a class of a contract *names*, and the tests that it has of its own."""

    def part(kind: type) -> type:
        inherited = {name for name in dir(kind) if name.startswith("test_")} - vars(kind).keys()
        assert inherited >= {*names} - vars(kind).keys(), {*names} - inherited
        for name in inherited - {*names}:
            setattr(kind, name, None)
        return kind

    return part

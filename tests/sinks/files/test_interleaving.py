"""A commit that is interrupted, or is interleaved with another coordinator, at each call on the file system."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from exactlyonce.pipeline.errors import Fenced, StoreUnavailable
from exactlyonce.sinks.files.committer import SHARDS_KEPT
from exactlyonce.sinks.files.layout import SHARD
from exactlyonce.testing.sink_contract.hooks import ORIGIN

STEPS = {"open", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.link", "os.rmdir"}


class Stepper:
    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.number = self.left = 0
        self.action: Callable[[], object] | None = None
        sys.addaudithook(self._heard)

    def _heard(self, event: str, arguments: Any) -> None:
        if self.action is None or event not in STEPS or threading.get_ident() != self.thread:
            return
        self.left -= 1
        if self.left < 0:
            action, self.action = self.action, None
            action()

    def run(self, number: int, action: Callable[[], object], function: Callable[[], object]) -> bool:
        self.left, self.action = number, action
        try:
            function()
        finally:
            reached, self.action = self.action is None, None
        return reached


_STEPPER = Stepper()  # a hook cannot be taken away: there is one


@pytest.fixture
def stepper() -> Stepper:
    return _STEPPER


@pytest.fixture(autouse=True)
def disk_is_quick(monkeypatch):
    """Do not wait for the disk: it is processes that end here, not machines."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Crash(BaseException):
    """The process is gone: no handler of errors takes it."""


@pytest.fixture
def decided(make_target, totals, stage):
    """Makes a target with a committable of two files that was decided, and one behind it that may be."""

    def make() -> Any:
        target = make_target(roll_bytes=1 << 10)
        target.led(1)
        opened = target.open()
        for part in (totals(*range(60)), totals(*range(60, 80))):
            opened.writer.write(opened.encoder.encode(part))
        first = stage(opened, 1, []).staged.committable
        return target, first

    return make


def as_new_leader(target, committable, totals) -> Callable[[], None]:
    def run() -> None:
        committer = target.led(2)
        committer.commit([committable], 2, ORIGIN)
        committer.clean(2, 1)
        assert committer.commit([target.staged(2, totals(80), 1, incarnation=2)], 2, ORIGIN)

    return run


@pytest.mark.exhaustive(but=["renameat2-commit", "link-commit", "renameat2-fence"])
@pytest.mark.parametrize("action", ["commit", "fence"])
def test_a_zombie_is_overtaken_at_any_step(decided, totals, stepper, renaming, action) -> None:
    for step in range(200):
        target, committable = decided()
        zombie = target.led(1)
        calls = {"commit": partial(zombie.commit, [committable], 1, ORIGIN), "fence": partial(target.led, 1)}
        overtaken = as_new_leader(target, committable, totals)
        reached = True
        try:
            reached = stepper.run(step, overtaken, calls[action])
        except Fenced:
            pass
        except StoreUnavailable:  # what it was writing was cleaned away: it asks again
            with pytest.raises(Fenced):
                calls[action]()
        if not reached:
            assert step > 5
            return
        assert target.cents() == list(range(81)), step
        assert [(each["checkpoint"], each["rows"]) for each in target.entries()] == [(1, 80), (2, 1)]
    raise AssertionError("a commit has an end")


FAR = SHARD * (SHARDS_KEPT + 1)
"""A checkpoint at whose entry that of checkpoint 1 goes."""


@pytest.mark.exhaustive
def test_a_zombie_makes_an_entry_that_is_gone(make_target, totals, stepper, renaming) -> None:
    """Rows come once; the position is the new leader's."""
    made_again = 0
    for step in range(200):
        target = make_target()
        zombie = target.led(1)
        committable = target.staged(1, totals(*range(20)))

        def overtaken(target=target, committable=committable) -> None:
            committer = target.led(2)
            committer.commit([committable], 2, ORIGIN)
            committer.clean(2, 1)
            for path in target.published():
                path.rename(target.root.parent / path.name)  # hidden, as from a reader that has taken it
            assert committer.commit([target.staged(FAR, totals(20), 1, incarnation=2)], 2, ORIGIN)
            assert [each["checkpoint"] for each in target.entries()] == [FAR]

        try:
            reached = stepper.run(step, overtaken, partial(zombie.commit, [committable], 1, ORIGIN))
        except (Fenced, StoreUnavailable):
            reached = True
        if not reached:
            break
        taken = [path.read_text().splitlines() for path in target.root.parent.glob("part-*")]
        seen = sorted(target.cents() + [json.loads(line)["cents"] for lines in taken for line in lines])
        assert seen == list(range(21)), step
        made_again += [each["checkpoint"] for each in target.entries()] == [1, FAR]
        committer = target.committer()
        assert committer.fence(3, ORIGIN) == {0: FAR}
        assert committer.commit([target.staged(FAR + 1, totals(21), FAR, incarnation=3)], 3, ORIGIN)
        assert [each["checkpoint"] for each in target.entries()] == [FAR, FAR + 1], step
    else:
        raise AssertionError("a commit has an end")
    assert made_again


def test_the_ledger_does_not_grow_without_end(make_target, totals) -> None:
    target = make_target()
    committer, previous = target.led(1), 0
    other = target.staged(1, totals(0), subtask=1)
    assert committer.commit([other], 1, ORIGIN)
    first = target.staged(1, totals(1))
    for number in range(1, 2 * SHARDS_KEPT):
        checkpoint = number * SHARD
        staged = first if number == 1 else target.staged(checkpoint, totals(number), previous)
        assert committer.commit([staged], 1, ORIGIN)
        previous = staged.checkpoint
    entries = [(each["subtask"], each["checkpoint"] // SHARD) for each in target.entries()]
    assert entries == [*((0, number) for number in range(SHARDS_KEPT, 2 * SHARDS_KEPT)), (1, 0)]
    assert not committer.commit([first], 1, ORIGIN)
    assert committer.fence(2, ORIGIN) == {0: previous, 1: 1}


@pytest.mark.exhaustive(but=["link"])
def test_a_zombie_commits_within_a_new_leaders_work(decided, totals, stepper, renaming) -> None:
    outcomes = set()
    for step in range(300):
        target, committable = decided()
        zombie = target.led(1)

        def late(zombie=zombie, committable=committable) -> None:
            try:
                outcomes.add(zombie.commit([committable], 1, ORIGIN))
            except Fenced:
                outcomes.add("fenced")

        reached = stepper.run(step, late, as_new_leader(target, committable, totals))
        assert target.cents() == list(range(81)), step
        if not reached:
            break
    assert {True, "fenced"} <= outcomes


def test_a_crash_at_any_step_is_finished(decided, totals, stepper, renaming) -> None:
    for step in range(200):
        target, committable = decided()
        committer = target.led(1)
        try:
            reached = stepper.run(step, _crash, partial(committer.commit, [committable], 1, ORIGIN))
        except Crash:
            reached = True
        as_new_leader(target, committable, totals)()
        assert target.cents() == list(range(81)), step
        if not reached:
            return
    raise AssertionError("a commit has an end")


def _crash() -> None:
    raise Crash

"""The soak counts the faults that met something, and judges how lives end. Lives are small programs here."""

from __future__ import annotations

import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import soak_faults
import soak_lives
from soak_faults import Faults
from soak_lives import Life, Lives

RUNS = "print(json.dumps({'event': 'running', 'at_ms': 0}), file=sys.stderr, flush=True); signal.pause()"
FULL = "print('No space left on device (os error 28)', file=sys.stderr, flush=True); signal.pause()"


class ScriptedLives(Lives):
    """The next life is the next of *programs*; the last one lives again and again."""

    def __init__(self, folder: Path, programs: list[str], action: str = "") -> None:
        self.found: list[str] = []
        self.programs, self.action = programs, action
        super().__init__(cast(Any, None), "scripted", folder, random.Random(1), lambda kind, how: None, self._find_one)

    def _find_one(self, kind: str, where: str, text: str) -> None:
        self.found.append(f"{kind} {where}: {text}")

    def _start(self, *arguments: str) -> Life:
        self.count += 1
        program = self.programs.pop(0) if len(self.programs) > 1 else self.programs[0]
        fired = self._folder / f"fired-{self.count}"
        text = f"import json, os, pathlib, signal, sys\nfired = pathlib.Path({str(fired)!r})\n{program}"
        log = self._folder / f"life-{self.count}.log"
        return Life([sys.executable, "-S", "-c", text], {}, log, fired, self.action)

    def await_end(self) -> None:
        """Of the first life that is judged."""
        self.pause(60, until=lambda: bool(self.codes))


Make = Callable[..., ScriptedLives]


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Make]:
    """`lives("a program", "the next")`, with `action=` at a step."""
    opened: list[ScriptedLives] = []

    def begin(*programs: str, action: str = "") -> ScriptedLives:
        opened.append(ScriptedLives(tmp_path, [*programs], action))
        return opened[-1]

    yield begin
    for each in opened:
        each.close()


def faults(lives: Lives, noted: Counter[str], **servers: Any) -> Faults:
    """Those of *servers*, counted in *noted*."""
    fakes = cast(Any, SimpleNamespace(movable_clock=None, **servers))
    return Faults(fakes, lives, cast(Any, None), random.Random(1), lambda kind, how: noted.update([kind]))


def test_a_run_that_always_ends_is_not_started_for_ever(lives: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its code has a supervisor start it again."""
    monkeypatch.setattr(soak_lives, "FINISH_LIMIT_S", 0)
    ends = lives("sys.exit(8)")
    ends.finish()
    assert [finding[:45] for finding in ends.found] == ["stalled the run: its lives end with 8 after a"]


@pytest.mark.parametrize("ends_first", [False, True])
def test_a_run_that_comes_to_the_end(lives: Make, ends_first: bool) -> None:
    ends = lives(*(["sys.exit(8)"] if ends_first else []), "sys.exit(0)")
    ends.finish()
    assert ends.found == []


SIGKILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("step", "action", "is_ours"),
    [
        ("coordinator-decided", "kill", True), ("store-committed", "kill", True), ("worker-flushed", "kill", False),
        ("coordinator-decided", "stop", False), ("", "kill", False), ("", "", False),
    ],
)  # fmt: skip
def test_a_sigkill_of_somebody_else_is_found(lives: Make, step: str, action: str, is_ours: bool) -> None:
    """One at a step of the run's own process is ours."""
    killed = lives(*[f"(fired / {step!r}).touch(); {SIGKILL}" if step else SIGKILL], action=action)
    killed.await_end()
    assert [finding[:41] for finding in killed.found[:1]] == (
        [] if is_ours else ["ended the run: life 1 ended with code -9:"]
    )


def test_a_sigkill_of_the_soak_is_its_own(lives: Make) -> None:
    killed = lives("signal.pause()")
    killed.pause(60, until=lambda: killed.pid is not None)
    assert killed.kill()
    assert (killed.found, killed.codes) == ([], Counter({-signal.SIGKILL: 1}))


@pytest.mark.parametrize(("other", "counts"), [(RUNS, 1), ("sys.exit(4)", 0)])
def test_another_run_takes_over_once_it_runs(lives: Make, other: str, counts: int) -> None:
    both = lives(RUNS, other)
    both.pause(60, until=lambda: both._current is not None and both._current.is_running)
    noted: Counter[str] = Counter()
    faults(both, noted, lake_disk=None)._taken_over()
    assert noted["taken_over"] == counts


class FullDisk:
    def fill(self) -> bool:
        return True

    def free(self) -> None:
        pass


@pytest.mark.parametrize(("program", "met_s", "counts"), [(FULL, 60, 1), ("signal.pause()", 0.1, 0)])
def test_a_full_disk_of_the_lake_counts_once_a_run_says_so(
    lives: Make, monkeypatch: pytest.MonkeyPatch, program: str, met_s: float, counts: int
) -> None:
    monkeypatch.setattr(soak_faults, "MET_S", met_s)
    noted: Counter[str] = Counter()
    faults(lives(program), noted, lake_disk=FullDisk())._lake_disk()
    assert noted["lake_disk"] == counts


@pytest.mark.parametrize("ends", [True, False])
def test_a_full_disk_of_the_broker_counts_once_it_has_ended(
    lives: Make, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    idle = lives("signal.pause()")
    monkeypatch.setattr(idle, "pause", lambda seconds, until: until())
    broker = SimpleNamespace(status=lambda: SimpleNamespace(running=not ends), kill=lambda: None, start=lambda: None)
    noted: Counter[str] = Counter()
    faults(idle, noted, lake_disk=FullDisk(), broker_disk=FullDisk(), broker=broker)._broker_disk()
    assert noted["broker_disk"] == ends

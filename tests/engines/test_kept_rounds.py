"""A campaign of rounds goes on where it was; rounds without a run."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from kept_rounds import Result, parser_of_rounds, play_rounds
from killed_runs import Failed, KilledRuns


class Round(KilledRuns):
    """Is wrong if it is played with a mutant; fails if its number is 3, and is interrupted if it is 5."""

    def __init__(self, broker: Any, number: int, evidence: Path) -> None:
        super().__init__("round", broker, evidence, "nobody", seed=1, number=number, env={}, params={})

    def play(self, mutant: str = "") -> list[str]:
        if self.number == 3:
            raise Failed("the run ended")
        if self.number == 5:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        return [mutant] if mutant else []


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[int]]]:
    """`play("--only", "2", rounds=3)` plays rounds until there are so many; the numbers of all, and the exit code."""
    was = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("kept_rounds.product_commit", lambda root: "11111111")

    def rounds_played(*arguments: str, rounds: int) -> list[int]:
        numbers: list[int] = []
        monkeypatch.setattr("sys.argv", ["rounds", *arguments])
        options = parser_of_rounds("rounds", ["lose"]).parse_args()

        def shown(results: list[Result]) -> str:
            numbers.extend(result["round"] for result in results)
            return "shown"

        code = play_rounds(
            options, tmp_path / "rounds", nullcontext, Round, variant=options.mutant,
            is_enough=lambda results: len(results) >= rounds, shown=shown,
        )  # fmt: skip
        return [*numbers, code]

    yield rounds_played
    signal.signal(signal.SIGTERM, was)


def kept(folder: Path) -> list[int]:
    return [json.loads(line)["round"] for line in (folder / "rounds" / "1.jsonl").read_text().splitlines()]


def test_a_campaign_goes_on_where_it_was(play: Callable[..., list[int]], tmp_path: Path) -> None:
    assert play(rounds=1) == [0, 0]
    assert play(rounds=3) == [0, 1, 2, 0]
    assert play(rounds=3) == [0, 1, 2, 0]
    assert kept(tmp_path) == [0, 1, 2]


def test_rounds_of_other_code_do_not_count(
    play: Callable[..., list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do those of code that is not committed; each campaign begins with round 0."""
    play(rounds=2)
    for commit, again in (("22222222", [0]), ("22222222-dirty", [0, 1]), ("22222222-dirty", [0, 1]), ("22222222", [1])):
        before = kept(tmp_path)
        monkeypatch.setattr("kept_rounds.product_commit", lambda root, commit=commit: commit)
        assert play(rounds=again[-1] + 1) == [*range(again[-1] + 1), 0]
        assert kept(tmp_path) == [*before, *again]
    monkeypatch.setattr("kept_rounds.product_commit", lambda root: "11111111")
    before = kept(tmp_path)
    assert play(rounds=2) == [0, 1, 0]
    assert kept(tmp_path) == before


def test_a_round_that_is_wrong_is_the_last(play: Callable[..., list[int]], tmp_path: Path) -> None:
    assert play(rounds=9) == [0, 1, 2, 3, 1]
    assert kept(tmp_path) == [0, 1, 2, 3]
    wrong = json.loads((tmp_path / "rounds" / "1-3" / "round.json").read_text())["wrong"]
    assert wrong == ["Failed: the run ended"]


def test_a_round_that_is_asked_for_is_not_kept(play: Callable[..., list[int]], tmp_path: Path) -> None:
    play(rounds=1)
    assert play("--only", "7", rounds=3) == [7, 0]
    assert play("--mutant", "lose", rounds=3) == [0, 1]
    assert kept(tmp_path) == [0]
    assert (tmp_path / "rounds" / "1-0-lose" / "round.json").exists()


def test_a_round_that_is_interrupted_is_not_kept(
    play: Callable[..., list[int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play(rounds=1)
    file = tmp_path / "rounds" / "1.jsonl"
    file.write_text(file.read_text() * 5)
    assert play(rounds=6) == [*[0] * 5, 1]
    assert capsys.readouterr().out.count("interrupted") == 1
    assert len(kept(tmp_path)) == 5

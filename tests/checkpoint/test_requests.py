"""Procedures that go on side by side, and requests that go out together."""

from __future__ import annotations

from typing import Any

import pytest

from exactlyonce.checkpoint.requests import (
    Answer,
    LogEnds,
    Pause,
    Procedure,
    Request,
    Together,
    answered,
    concurrently,
    drive,
)
from exactlyonce.pipeline.errors import BrokerUnavailable


def pausing(*durations_ms: int) -> Procedure[list[int]]:
    found = []
    for each in durations_ms:
        found.append((yield Pause(each)))
    return found


class Doubling:
    """Answers a pause by twice its duration; *broken* ones by an error. Notes what went out together."""

    def __init__(self, *broken: int) -> None:
        self.broken = broken
        self.rounds: list[list[int]] = []

    def __call__(self, request: Request) -> Any:
        assert isinstance(request, Together)
        pauses = [each for each in request.requests if isinstance(each, Pause)]
        self.rounds.append([each.duration_ms for each in pauses])
        return tuple(answered(each, self.single) for each in pauses)

    def single(self, request: Request) -> int:
        assert isinstance(request, Pause)
        if request.duration_ms in self.broken:
            raise BrokerUnavailable(f"no answer to {request.duration_ms}")
        return 2 * request.duration_ms


def test_one_request_of_each_procedure_goes_out_in_a_round() -> None:
    world = Doubling()
    assert drive(concurrently(pausing(1, 2, 3), pausing(), pausing(4)), world) == ([2, 4, 6], [], [8])
    assert world.rounds == [[1, 4], [2], [3]]


def test_an_error_is_raised_once_all_have_ended() -> None:
    world = Doubling(1)
    with pytest.raises(BrokerUnavailable, match="no answer to 1"):
        drive(concurrently(pausing(1, 2), pausing(4, 5, 6)), world)
    assert world.rounds == [[1, 4], [5], [6]]


def test_an_error_goes_into_the_procedure_that_asked() -> None:
    def trying_again() -> Procedure[str]:
        try:
            yield Pause(1)
        except BrokerUnavailable:
            yield Pause(7)
            return "again"
        return "at once"

    world = Doubling(1)
    assert drive(concurrently(trying_again(), pausing(4, 5)), world) == ("again", [8, 10])
    assert world.rounds == [[1, 4], [7, 5]]


def test_what_is_no_error_is_never_an_answer() -> None:
    def interrupted(_: Request) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answered(LogEnds(), interrupted)
    assert answered(LogEnds(), lambda _: (1, 2)) == Answer((1, 2))

"""A store that takes long answers in time that it is at it, and does each request once, one after the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from exactlyonce.checkpoint import requests as ask
from exactlyonce.checkpoint.commits.stores import UnderWay
from exactlyonce.engines.external_checks import stores
from exactlyonce.engines.external_checks.stores import BackgroundStores, Stores
from exactlyonce.pipeline.errors import StoreUnavailable
from exactlyonce.testing.cluster import LIMIT_S

FIRST, SECOND = ask.FenceStore("db", 1, "topic"), ask.CleanStore("db", 1, 0)


class Held:
    def __init__(self) -> None:
        self.asked: list[ask.Request] = []
        self.threads: set[int] = set()
        self.begun, self.ends = threading.Event(), threading.Event()
        self.raises: Exception | None = None
        self.closed = False

    def __call__(self, request: ask.Request) -> str:
        self.asked.append(request)
        self.threads.add(threading.get_ident())
        self.begun.set()
        assert self.ends.wait(LIMIT_S)
        if self.raises is not None:
            raise self.raises
        return f"answer {len(self.asked)}"

    def failure(self, request: ask.Request) -> str:
        return ""

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        self.closed = True


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    monkeypatch.setattr(stores, "LOOK_INTERVAL_S", 0.01)
    return Held()


def in_background(held: Held) -> BackgroundStores:
    return BackgroundStores(cast(Stores, held))


@pytest.fixture
def background(held: Held) -> Iterator[BackgroundStores]:
    yield (opened := in_background(held))
    held.ends.set()
    opened.close()


def answer(background: BackgroundStores, request: ask.Request) -> Any:
    while isinstance(reply := background(request), UnderWay):
        continue
    return reply


def test_who_asks_again_gets_the_answer(held: Held, background: BackgroundStores) -> None:
    taken = [background(FIRST) for _ in range(3)]
    assert all(isinstance(reply, UnderWay) for reply in taken)
    assert taken == sorted(taken)
    held.ends.set()
    assert (answer(background, FIRST), held.asked) == ("answer 1", [FIRST])
    assert (answer(background, FIRST), held.asked) == ("answer 2", [FIRST, FIRST])


def test_what_it_raises_is_raised(held: Held, background: BackgroundStores) -> None:
    held.raises = StoreUnavailable("away.")
    held.ends.set()
    with pytest.raises(StoreUnavailable, match=r"away\."):
        answer(background, FIRST)
    held.raises = None
    assert answer(background, FIRST) == "answer 2"


def test_another_request_waits_for_the_end_of_the_first(held: Held, background: BackgroundStores) -> None:
    assert isinstance(background(FIRST), UnderWay)
    assert isinstance(background(SECOND), UnderWay)
    assert held.begun.wait(LIMIT_S)
    assert held.asked == [FIRST]
    held.ends.set()
    assert (answer(background, SECOND), held.asked) == ("answer 2", [FIRST, SECOND])
    assert len(held.threads) == 1


def test_the_end_waits_for_what_is_under_way(held: Held) -> None:
    """A connection is closed by its user alone, after its use."""
    background = in_background(held)
    assert isinstance(background(FIRST), UnderWay)
    closing = threading.Thread(target=background.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive()
    assert not held.closed
    held.ends.set()
    closing.join(LIMIT_S)
    assert held.closed
    assert len(held.threads) == 1


def test_other_requests_are_not_its(held: Held, background: BackgroundStores) -> None:
    assert background(ask.Reached("store-committed")) is NotImplemented
    assert held.asked == []

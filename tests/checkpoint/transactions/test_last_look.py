"""The last look before a fence, at a real broker: it sees whoever is beginning, and fences nobody."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from exactlyonce.checkpoint import succession as last_look
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.requests import Outcome, Pause, Procedure, Request, relayed
from exactlyonce.testing.clock import SimulatedClock
from tests.connectors.kafka.checkpoint_topic.conftest import Store


def looked(store: Store, meanwhile: Callable[[], Any]) -> History:
    """The history that is found; *meanwhile* runs whenever the look waits. Only pauses take time."""
    log, clock = store.log(), SimulatedClock()

    def answered(request: Request) -> Procedure[Any]:
        if isinstance(request, Pause):
            clock.advance(request.duration_ms)
            meanwhile()
        return (yield request)

    return log.do(relayed(last_look.last_look(store.pipeline, log.peek_at_stable, clock), answered))


def test_one_that_is_beginning(store: Store) -> None:
    store.living()
    other = store.opened()
    begun: list[int] = []

    def begin() -> None:
        if not begun:
            begun.append(other.do(other.begin("there", 2)).incarnation)

    found = looked(store, begin)
    assert (begun, found.incarnation_latest) == ([2], 2)
    assert other.beaten() is Outcome.DONE


def test_nobody_who_begins(store: Store) -> None:
    assert looked(store, pytest.fail).incarnation_latest == 0
    one = store.living()
    assert looked(store, pytest.fail).incarnation_latest == 1
    assert one.beaten() is Outcome.DONE


def test_one_that_died_while_it_began(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_look, "BEGINNING_TIMEOUT_MS", 300)
    store.living()
    store.opened()
    waited: list[None] = []
    assert looked(store, lambda: waited.append(None)).incarnation_latest == 1
    assert waited

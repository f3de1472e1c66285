"""The wait of a run for another one that leads. It looks at the decision log, and neither fences nor writes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from exactlyonce.checkpoint.succession import LOOK_PAUSE_MS, Awaited, Succession
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import LogFollower
from exactlyonce.engines.processes import is_known_dead
from exactlyonce.pipeline.errors import BrokerUnavailable

_PAUSE_S = 0.1
"""How soon a run sees that its turn has come."""


def wait_for_turn(
    config: Mapping[str, Any],
    pipeline: str,
    succession: Succession,
    asked: threading.Event,
    awaits: Callable[[Awaited], None],
    note: Callable[[str], None],
) -> bool:
    """Return True once *succession* lets the run begin; False as soon as it is *asked* to end.

    *awaits* is told of each incarnation that is waited for; *note*, once an outage, of a broker that is away. The looks
    have a thread of their own, which is left behind where one hangs.
    """
    ended, turn = threading.Event(), Future[None]()

    def watch() -> None:
        try:
            _watch(LogFollower(config, pipeline), succession, ended, awaits, note)
            turn.set_result(None)
        except BaseException as error:
            turn.set_exception(error)

    threading.Thread(target=watch, name="standby", daemon=True).start()
    try:
        while not asked.wait(_PAUSE_S):
            if turn.done():
                turn.result()
                return True
        return False
    finally:
        ended.set()


def _watch(
    follower: LogFollower,
    succession: Succession,
    ended: threading.Event,
    awaits: Callable[[Awaited], None],
    note: Callable[[str], None],
) -> None:
    told, is_away = 0, False
    while not ended.is_set():
        try:
            awaited = succession.awaited(follower.look(), is_known_dead)
        except BrokerUnavailable as error:
            if not is_away:
                note(f"{error} This run looks again until one answers: it waits for another one that leads.")
            is_away = True
        else:
            is_away = False
            if awaited is None:
                return
            if awaited.incarnation.incarnation != told:
                told = awaited.incarnation.incarnation
                awaits(awaited)
        ended.wait(LOOK_PAUSE_MS / 1000)

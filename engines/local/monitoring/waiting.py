"""The waiting output of a run for its page: looked at when the page asks for it, once a second at most."""

from __future__ import annotations

import threading
from typing import Any

from exactlyonce.checkpoint.clock import Clock
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import LogFollower
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.pending_output import WaitingLook, WaitingOutput
from exactlyonce.pipeline.errors import ExactlyOnceError

LOOK_INTERVAL_MS = 1_000
TIMEOUT_MS = 5_000


class WaitingNow:
    """Looks from a thread of its own, so that nobody waits for it: an answer has what was seen last."""

    def __init__(self, config: ClientConfig, pipeline: str, clock: Clock) -> None:
        self._log, self._waiting = LogFollower(config, pipeline), WaitingLook(config, pipeline, TIMEOUT_MS)
        self._clock = clock
        self._lock = threading.Lock()
        self._due_ms = 0
        self._thread: threading.Thread | None = None
        self._seen: list[WaitingOutput] = []

    def figures(self) -> list[dict[str, Any]]:
        """See `WaitingOutput.figures`. From any thread."""
        with self._lock:
            if self._clock.monotonic_ms() >= self._due_ms and (self._thread is None or not self._thread.is_alive()):
                self._due_ms = self._clock.monotonic_ms() + LOOK_INTERVAL_MS
                self._thread = threading.Thread(target=self._look, name="waiting output", daemon=True)
                self._thread.start()
            return [output.figures(self._clock.now_ms()) for output in self._seen]

    def close(self) -> None:
        """Nobody asks any more."""
        if self._thread is not None:
            self._thread.join()
        self._log.close()
        self._waiting.close()

    def _look(self) -> None:
        try:
            seen = self._waiting.look(self._log.look())
        except ExactlyOnceError:  # a broker is away; the run itself says so
            seen = []
        with self._lock:
            self._seen = seen

"""The watch over a worker's loop: a thread beside it that tells what the loop is in while it does not come round.

Invariant: it touches nothing of the worker's; it reads two attributes of `Activity` and sends over the connection,
which any thread may do. It ends with the worker.
"""

from __future__ import annotations

import threading
from types import TracebackType

from exactlyonce.engines.local.messages import Connection, Occupied
from exactlyonce.engines.runtime.activity import Activity

WATCH_INTERVAL_S = 1.0
"""How often it looks, and how long a turn may take before it tells."""


class Watch:
    """As a context: watches from its beginning to its end."""

    def __init__(self, subtask: int, activity: Activity, connection: Connection) -> None:
        self._subtask, self._activity, self._connection = subtask, activity, connection
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(WATCH_INTERVAL_S):
            now = self._activity.now_s()
            if now - self._activity.turned_s > WATCH_INTERVAL_S:
                place = self._activity.current
                self._connection.send(Occupied(self._subtask, str(place), now - place.since_s))

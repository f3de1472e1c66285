"""The watchdog of an attempt's workers: their places and their silence explain why a checkpoint is late.

Invariant: only the newest message of a worker counts, and progress ends what it was in. Pure: the time is an argument,
in monotonic seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

from exactlyonce.engines.local.messages import Occupied, Progress

HANGING_S = 1.0
"""A worker hangs after so long in one place, or in silence."""
NOTED_S = 10.0
"""The time in one place after which a note says so, once."""
SLOW_MS, SLOW_SHARE = 1.0, 0.5
"""An operator is slow if a record takes so long, and if it takes this share of its worker's time."""


@dataclass
class _Worker:
    heard_s: float
    ready: bool = False
    occupied: Occupied | None = None
    progress: Progress | None = None
    noted: set[str] = field(default_factory=set)


class WorkerWatchdog:
    """Hears of every start and message of the workers."""

    def __init__(self) -> None:
        self._workers: dict[int, _Worker] = {}

    def started(self, workers: int, now_s: float) -> None:
        self._workers = {subtask: _Worker(now_s) for subtask in range(workers)}

    def ready(self, subtask: int) -> None:
        self._workers[subtask].ready, self._workers[subtask].occupied = True, None

    def heard(self, subtask: int, message: object, now_s: float) -> str:
        """Hear any message of a worker. Returns a note for a person, or nothing."""
        worker = self._workers[subtask]
        worker.heard_s = now_s
        if isinstance(message, Progress):
            worker.progress, worker.occupied = message, None
        elif isinstance(message, Occupied):
            worker.occupied = message
            if message.occupied_s >= NOTED_S and message.place not in worker.noted:
                worker.noted.add(message.place)
                return f"{self._place(subtask, now_s)}: its checkpoints wait for it"
        return ""

    def hanging(self, now_s: float) -> str:
        """The workers that are not ready, hang, or are silent."""
        return "; ".join(
            self._place(subtask, now_s) for subtask, worker in self._workers.items()
            if not worker.ready or _silent_s(worker, now_s) >= HANGING_S
            or (worker.occupied and worker.occupied.occupied_s >= HANGING_S)
        )  # fmt: skip

    def slow(self) -> str:
        """The slow operators, and the reasons why sinks wait."""
        reports = [worker.progress for worker in self._workers.values() if worker.progress is not None]
        operators = (
            f"operator {report.busiest!r} takes {report.busiest_ms:,.0f} ms a record ({report.busiest_share:.0%} of "
            f"the time of worker {report.subtask})"
            for report in reports
            if report.busiest_ms >= SLOW_MS and report.busiest_share >= SLOW_SHARE
        )
        return "; ".join(chain(operators, *(report.held_up for report in reports)))

    def _place(self, subtask: int, now_s: float) -> str:
        worker = self._workers[subtask]
        silent_s = _silent_s(worker, now_s)
        if worker.occupied is None:
            ready = "" if worker.ready else " and is not ready"
            return f"worker {subtask} has said nothing for {silent_s:.0f} s{ready}"
        stopped = f", and has said nothing for {silent_s:.0f} s" if silent_s >= HANGING_S else ""
        return f"worker {subtask} has been in {worker.occupied.place} for {worker.occupied.occupied_s:.0f} s{stopped}"


def _silent_s(worker: _Worker, now_s: float) -> float:
    return now_s - worker.heard_s

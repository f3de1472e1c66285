"""Constant load: the costs of records, and the judge of the records that wait.

Records of one step keep their worker busy, the broker limits the bytes a second of each subtask of a sink, and a
service called in a loop is away for a while; a random stream of its own draws all of it. Records are counted outside of
the product: in the functions of steps and at the broker. Without failures each checkpoint completes within
`COMPLETES_MS`, and hardly more records wait at a place than have left it lately in half a second (in a second before a
sink). An attempt begins after another only if something was crashed.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from topologies import Input, Step, load_for
from watched import demand

from exactlyonce.checkpoint.coordinator import JobState

if TYPE_CHECKING:
    from world import World

    from exactlyonce.testing.simulation.world import Attempt, Process

RECORD_MS = (0, 1, 2, 5, 10, 20, 50)
"""The cost of a record at a step of the topology."""
BYTES_PER_S = (0, 0, 50_000, 20_000, 5_000)
"""The rate of a subtask of a sink; 0: the broker takes what there is."""
MUTED_MS = (0, 0, 500)
"""A quota lets so much pass at once, and then nothing for as long."""
LASTS_MS = 8_000
"""Two subtasks take about as long for the input."""
RECORDS_MIN, RECORDS_MAX = 400, 2_400
RECORD_BYTES = 130
AWAY_MIN_MS, AWAY_MAX_MS = 4_000, 12_000
CHANNEL_MS, SINK_MS = 500, 1_000
"""So long it takes what waits before a step, or before the broker, to leave, about."""
COMPLETES_MS = 3_000
"""The limit from its trigger on: a barrier waits behind three shuffles and before a sink, and each time for the end of
a slice. That makes 20 checkpoints a minute at least. Bursts may wait for one more in each of these places."""
LATELY_MS = 3_000
"""What has left a place in any stretch of so long, while a called service answered, may wait there."""
FEW = 30
"""So many more may wait before a step, in all subtasks together: to begin with, and in slices and batches."""


class Load:
    def __init__(self, world: World, seed: int) -> None:
        self._world, topology = world, world.topology
        self._rng = rng = random.Random(f"load of {seed}")
        self._slow = rng.choice(topology.of("branch", "count", "tally", "called")).id
        self._record_ms, self._bytes_per_s = rng.choice(RECORD_MS), rng.choice(BYTES_PER_S)
        self._muted_ms = rng.choice(MUTED_MS)
        begin_ms = rng.randint(300, 1_500)
        self._away_ms = range(begin_ms, begin_ms + rng.randint(AWAY_MIN_MS, AWAY_MAX_MS))
        """When the service is."""
        self._owed_ms: Counter[int] = Counter()
        """The time for which the broker has yet to mute each worker."""
        places = topology.of("count", "tally", "called", "sink")
        self._before = {step.id: self._counted_before(step) for step in places}
        """The step from which records come, by the step before which they wait."""
        self._stretch_ms = {step.id: SINK_MS if step.kind == "sink" else CHANNEL_MS for step in places}
        self._attempt: Attempt | None = None
        self._left: Counter[str] = Counter()
        """The records that have gone on from each step in this attempt."""
        self._lately: dict[str, deque[int]] = {step: deque() for step in self._before}
        """The times of those of the last stretch, by step."""
        self._peaks: dict[str, deque[tuple[int, int]]] = {step: deque() for step in self._before}
        """When so many had left within a stretch, by step, falling: those after which as many have are left out."""
        self._attempts = 0
        self._working: Process | None = None
        self._finished, self._due_ms = 0, 0
        """How many checkpoints are, and when the next should be triggered."""

    def _counted_before(self, step: Step) -> str:
        before = next(each for each in self._world.topology.steps if each.id == step.inputs[0])
        return self._counted_before(before) if before.kind == "union" else before.id

    def inputs(self) -> dict[str, Input]:
        per_s = [1_000 / self._record_ms] if self._record_ms else []
        per_s += [self._bytes_per_s / RECORD_BYTES] if self._bytes_per_s else []
        records = int(2 * min(per_s, default=0) * LASTS_MS / 1_000)
        return load_for(self._world.topology, self._rng, max(RECORDS_MIN, min(records, RECORDS_MAX)))

    # --- what it costs ------------------------------------------------------------------------------------------

    def begins_turn(self, process: Process) -> None:
        """Functions are called by its loop from now on."""
        self._working = process

    def calls(self, step: str) -> bool:
        """A record has come to *step*, and takes its time there; whether the service that is called has answered."""
        process = self._working
        assert process is not None, "functions are called in a turn of a worker"
        if step == self._slow:
            process.busy_ms += self._record_ms
        answered = step != "called" or self._world.clock.monotonic_ms() not in self._away_ms
        if answered:
            self.leaves(step, process.attempt)
        self._world.seen["called in vain"] += not answered
        return answered

    def muted_ms(self, worker: int, batch: list[tuple[Any, Any]]) -> int:
        """How long the broker lets *worker* wait before it takes *batch*."""
        if not self._bytes_per_s:
            return 0
        size = sum(len(key or b"") + len(value or b"") for key, value in batch)
        self._owed_ms[worker] += 1_000 * size // self._bytes_per_s
        if self._owed_ms[worker] < self._muted_ms:
            return 0
        self._world.seen["sender muted"] += 1
        return self._owed_ms.pop(worker)

    # --- what waits for it --------------------------------------------------------------------------------------

    def begins(self, attempt: Attempt) -> None:
        """Count the records of *attempt* from now on, and of no other."""
        self._attempt, self._left = attempt, Counter()
        self._attempts += 1

    def leaves(self, step: str, attempt: Attempt) -> None:
        """A record goes on from *step*; if that is a sink, the broker has taken it."""
        if attempt is not self._attempt:
            return
        self._left[step] += 1
        if (lately := self._lately.get(step)) is not None:
            now_ms = self._world.clock.monotonic_ms()
            lately.append(now_ms)
            while lately[0] <= now_ms - self._stretch_ms[step]:
                lately.popleft()
            peaks = self._peaks[step]
            while peaks and peaks[-1][1] <= len(lately):
                peaks.pop()
            peaks.append((self._answered_ms(), len(lately)))

    def _answered_ms(self) -> int:
        """The time without that for which the called service was away: what waits for it cannot leave then."""
        now_ms, away_ms = self._world.clock.monotonic_ms(), self._away_ms
        called = bool(self._world.topology.of("called"))
        return now_ms - max(0, min(now_ms, away_ms.stop) - away_ms.start) * called

    def _most(self, step: str) -> int:
        """The most records that have left *step* in any one stretch lately."""
        peaks, since_ms = self._peaks[step], self._answered_ms() - LATELY_MS
        while peaks and peaks[0][0] < since_ms:
            peaks.popleft()
        return peaks[0][1] if peaks else 0

    def judge(self) -> None:
        crashed = self._world.seen["worker crashed"] + self._world.seen["coordinator crashed"]
        demand(self._attempts <= 1 + crashed, f"attempt {self._attempts} begins, and {crashed} crashes were caused")
        coordinator = self._world.coordinator
        calm = coordinator is not None and coordinator.core.state is JobState.RUNNING
        if coordinator is None or not calm:
            self._due_ms = self._world.clock.monotonic_ms() + self._world.settings.interval_ms
            return
        self._judge_checkpoints([each.triggered_ms for each in coordinator.core.attempt.in_flight])
        for step, before in self._before.items():
            waiting, most = self._left[before] - self._left[step], self._most(step)
            what = f"{waiting} records wait before {step}, and {most} at most leave it in {self._stretch_ms[step]} ms"
            demand(waiting <= FEW + most, what)

    def _judge_checkpoints(self, triggered_ms: list[int]) -> None:
        now_ms, oracle = self._world.clock.monotonic_ms(), self._world.oracle
        finished = len(oracle.manifests) - (oracle.unfinalized is not None)
        if finished > self._finished:
            self._finished, self._due_ms = finished, now_ms + self._world.settings.interval_ms
        awaited_ms = now_ms - min([self._due_ms, *triggered_ms])
        within_ms = COMPLETES_MS + len(self._before) * (self._muted_ms if self._bytes_per_s else 0)
        demand(awaited_ms <= within_ms, f"no checkpoint completes within {within_ms} ms, and nothing has failed")

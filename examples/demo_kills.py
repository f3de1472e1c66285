"""The demo's running job, and who kills it: SIGKILL at random instants, from a seed that is printed.

Invariants: a kill counts only with a checkpoint since the last one and records in flight, by the broker's own count;
each role is killed in turn; whatever was killed is started again, by the coordinator or here.
"""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.pipeline.errors import ExactlyOnceError

STEPS = ("triggered", "acknowledged", "decided", "finalized")
RETRY_S = 600.0


class Job:
    """`exactlyonce run` as a process, started again whenever it was killed; what it says of itself is followed."""

    def __init__(self, servers: str, parallelism: int, num_retained: int) -> None:
        self.command = [
            sys.executable, "-m", "exactlyonce.cli.main", "run", "flights:pipeline", "--bootstrap-servers", servers,
            "--checkpoint-interval", "500ms", "--parallelism", str(parallelism), "--num-retained", str(num_retained),
            "--json", "--verbose",
        ]  # fmt: skip
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()
        self.workers: list[int] = []
        self.began_at: int | None = None
        """The checkpoint that the first of its incarnations went on from."""
        self.step = "starting"
        self.lag = 0
        self.finalized = 0
        self.since_deployed = 0
        """Checkpoints of the processes that run now."""
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command, cwd=Path(__file__).parent, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        self.follower = threading.Thread(target=self._follow, args=(self.process,), daemon=True)
        self.follower.start()

    def _follow(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            try:
                event = json.loads(line)
            except ValueError:
                print(f"    {line.rstrip()}", flush=True)
                continue
            self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        if event["event"] == "checkpoint":
            self.lag = event["lag"]
            self.finalized += 1
            self.since_deployed += 1
            self.step = f"between checkpoints, after {event['checkpoint']}"
        elif event["event"] == "started" and self.began_at is None:
            self.began_at = event["checkpoint"]
        elif event["event"] == "step":
            if event["step"] == "deployed":
                self.workers, self.since_deployed = event["workers"], 0
            self.step = event["step"] + (f" {event['checkpoint']}" if "checkpoint" in event else "")
            self.events.put(event)
        elif event["event"] == "failed":
            print(f"    {event['text']}", flush=True)

    def kill(self, role: str) -> None:
        """SIGKILL; the coordinator is started again, which does the same for a worker."""
        pid = self.process.pid if role == "coordinator" else self.workers[int(role.split()[1])]
        self.workers = []
        os.kill(pid, signal.SIGKILL)

    def restart(self) -> None:
        self.process.wait()
        self.follower.join()
        self.step = "starting"
        self.start()

    def catch_up(self) -> None:
        """Wait until all that was fed is in a checkpoint, or the limit is over."""
        seen, deadline = self.finalized, time.monotonic() + RETRY_S
        while (self.finalized < seen + 2 or self.lag) and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)  # the job catches up

    def stop(self) -> int:
        """Ask for a clean stop; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(RETRY_S)


class Killer:
    """SIGKILL at random instants, for each role at least once, a checkpoint since the last one, records in flight."""

    def __init__(
        self,
        job: Job,
        servers: str,
        output: Sequence[tuple[str, int]],
        *,
        kills: int,
        seed: int,
        seconds: float,
        parallelism: int,
    ) -> None:
        self.job, self.kills, self.random = job, kills, random.Random(seed)
        self.transactions = Transactions(ClientConfig({"bootstrap.servers": servers}))
        self.output = output
        self.began, self.pause = time.monotonic(), seconds / (kills + 1)
        roles = ["coordinator", *(f"worker {i}" for i in range(parallelism))]
        self.roles = [roles[i % len(roles)] for i in range(kills)]
        self.random.shuffle(self.roles)

    def run(self, fed: threading.Event) -> int:
        """Kill until the number is reached; how many were. One that found nothing in flight does not count."""
        killed = 0
        while killed < self.kills and self._await_instant(fed, killed):
            killed += self._kill(killed + 1, self.roles[killed])
        return killed

    def open_transactions(self, prefix: str) -> int:
        """How many transactions of ids with this beginning are open."""
        return sum(each.state == "Ongoing" for each in self.transactions.list(prefix))

    def _await_instant(self, fed: threading.Event, number: int) -> bool:
        """A random instant: any, or right behind a step of the protocol, whichever the dice say."""
        due = self.began + self.pause * (number + self.random.uniform(0.4, 1.0))
        step = self.random.choice([None, *STEPS])
        while not fed.is_set():
            if self.job.process.poll() is not None:
                raise ExactlyOnceError(f"the job ended by itself, with exit code {self.job.process.returncode}")
            ready = self.job.workers and self.job.since_deployed
            if ready and time.monotonic() >= due and (step is None or self._meets(step)):
                time.sleep(self.random.uniform(0, 0.01))  # a random instant
                return True
            time.sleep(0.002)  # looking for the instant
        return False

    def _meets(self, step: str) -> bool:
        while not self.job.events.empty():
            self.job.events.get()
        try:
            return bool(self.job.events.get(timeout=2.0)["step"] == step)
        except queue.Empty:
            return False

    def _kill(self, number: int, role: str) -> bool:
        """Whether it counts."""
        job = self.job
        step, checkpoints = job.step, job.since_deployed
        job.kill(role)
        transactions, records = self._in_flight()
        flight = f"{records:,} records in {transactions} open transactions" if records else "nothing, does not count"
        found = f"at: {step:<32}  checkpoints: {checkpoints:<3}  in flight: {flight}"
        print(f"  kill {number}/{self.kills}  {role:<11}  {found}", flush=True)
        if role == "coordinator":
            job.restart()
        return records > 0

    def _in_flight(self) -> tuple[int, int]:
        """Open transactions of the output, and what the broker has in them: no reader sees it yet."""
        writing = [
            each for each in self.transactions.producers(self.output) if each.transaction_start_offset is not None
        ]
        return len({each.producer_id for each in writing}), sum(each.last_sequence + 1 for each in writing)

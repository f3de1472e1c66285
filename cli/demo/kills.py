"""A running job, and its killer: SIGKILL at random instants, from a printed seed.

Invariants: a kill counts only with a checkpoint since the last one and records in flight, by the broker's own count;
each role is killed in turn; a killed process is started again, by the coordinator or here.
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

from exactlyonce.checkpoint.requests import TxnState
from exactlyonce.cli.demo.feeding import Feeder
from exactlyonce.connectors.embedded.programs import dying_with_parent
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.pipeline.errors import ExactlyOnceError

STEPS = ("triggered", "acknowledged", "decided", "finalized")
RETRY_S = 600.0


class Job:
    """`exactlyonce run` as a process, started again whenever it was killed, and its events."""

    def __init__(self, servers: str, pipeline: Sequence[str], folder: Path | None, *options: str) -> None:
        """*pipeline*: `module:attribute`, and its parameters; its module is found from *folder*."""
        self.command = [
            sys.executable, "-m", "exactlyonce.cli.main", "run", *pipeline, "--bootstrap-servers", servers,
            "--checkpoint-interval", "500ms", *options, "--json", "--verbose",
        ]  # fmt: skip
        self.folder = folder
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()
        self.workers: list[int] = []
        self.began_at: int | None = None
        """The checkpoint from which its first incarnation went on."""
        self.step = "starting"
        self.lag = 0
        self.finalized = 0
        self.since_deployed = 0
        """Checkpoints of the present processes."""
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            dying_with_parent(self.command), cwd=self.folder, stderr=subprocess.PIPE, text=True, start_new_session=True
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
        """Kill a process. `restart` starts the coordinator again, which does so for a worker."""
        pid = self.process.pid if role == "coordinator" else self.workers[int(role.split()[1])]
        self.workers = []
        os.kill(pid, signal.SIGKILL)

    def restart(self) -> None:
        self.process.wait()
        self.follower.join()
        self.step = "starting"
        self.start()

    def catch_up(self) -> None:
        """Wait until the whole input is in a checkpoint, or the limit is over."""
        seen, deadline = self.finalized, time.monotonic() + RETRY_S
        while (self.finalized < seen + 2 or self.lag) and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)  # the job catches up

    def stop(self) -> int:
        """Ask for a clean stop; -> the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(RETRY_S)

    def end(self) -> None:
        """Kill what still runs; nothing does after `stop`."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Killer:
    """Kills each role at random instants, with a checkpoint since the last kill, and records in flight."""

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

    def stream(self, feeder: Feeder, prefix: str) -> bool:
        """Feed, kill, then stop the job; -> whether all kills counted and nothing is left of them.

        *prefix* begins the names of the job's transactions.
        """
        try:
            feeder.start()
            killed = self._kill_all(feeder.done)
            feeder.enough.set()
            print("  the rest of the input, and a clean stop", flush=True)
            feeder.done.wait()
            self.job.catch_up()
            code = self.job.stop()
        finally:
            self.job.end()
        left_open = sum(transaction.state == TxnState.ONGOING for transaction in self.transactions.list(prefix))
        print(f"  {killed} of {self.kills} kills; clean stop with exit code {code}; {self.job.finalized} checkpoints")
        print(f"  it began at checkpoint {self.job.began_at}; open transactions it left: {left_open}", flush=True)
        return code == 0 and killed == self.kills and not left_open

    def _kill_all(self, fed: threading.Event) -> int:
        """Kill until the number is reached; -> the number of kills that count."""
        killed = 0
        while killed < self.kills and self._await_instant(fed, killed):
            killed += self._kill(killed + 1, self.roles[killed])
        return killed

    def _await_instant(self, fed: threading.Event, number: int) -> bool:
        """Wait for a random instant, at any time or right after a step of the protocol; False: the input has ended."""
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
        """Kill once; -> whether it counts."""
        job = self.job
        step, checkpoints = job.step, job.since_deployed
        job.kill(role)
        transactions, records = self._in_flight()
        flight = f"{records:,} records in {transactions} open transactions" if records else "nothing, does not count"
        state = f"at: {step:<32}  checkpoints: {checkpoints:<3}  in flight: {flight}"
        print(f"  kill {number}/{self.kills}  {role:<11}  {state}", flush=True)
        if role == "coordinator":
            job.restart()
        return records > 0

    def _in_flight(self) -> tuple[int, int]:
        """Open transactions of the output, and their records in the broker, which no reader sees yet."""
        producers = self.transactions.producers(self.output)
        writing = [producer for producer in producers if producer.transaction_start_offset is not None]
        ids = {producer.producer_id for producer in writing}
        return len(ids), sum(producer.last_sequence + 1 for producer in writing)

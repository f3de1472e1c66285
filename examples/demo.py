"""The main job under fire: real flights through `flights.py` while its processes die by SIGKILL, then an exact count.

    python examples/demo.py [--kills 7] [--seed N] [--seconds 42] [--parallelism 2] [--bootstrap-servers HOST:PORT]

Half of the flights are history, which Spark computes; the rest is streamed, from exactly there. `demo_count.py`, which
has no line of the engine, counts the output; then Spark computes the expected output again, and compares.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # its stubs hide it
from demo_count import Row, delay, flights, verdict
from demo_kills import Job, Killer
from demo_spark import audit, backfill

from exactlyonce.connectors.embedded.broker import EmbeddedBroker
from exactlyonce.connectors.embedded.progress import told_on
from exactlyonce.engines.spark.session import require_java
from exactlyonce.pipeline.errors import ExactlyOnceError

INPUT, OUTPUT, PIPELINE = "flights", "flight-totals", "flights"
PARTITIONS = 4
TAPER_S = 100.0
RETAINED = 20
"""Checkpoints that are kept for the audit."""


def say(text: str = "") -> None:
    print(text, flush=True)


def feed(servers: str, rows: Sequence[Row], seconds: float = 0.0, enough: threading.Event | None = None) -> None:
    """Produce the flights at an even pace; until *enough* is set, the last tenth of them ever more slowly.

    So the input lasts until the last kill, however slow the machine is.
    """
    safe = {"enable.idempotence": True, "max.in.flight": 1}
    producer = Producer({"bootstrap.servers": servers, **safe, "linger.ms": 10, "log_level": 3})
    began, total = time.monotonic(), len(rows)
    for number, row in enumerate(rows):
        value = {"carrier": row["carrier"], "hour": int(float(row["hour"])), "dep_delay": delay(row)}
        while len(producer) > 50_000:
            producer.poll(0.1)
        producer.produce(INPUT, json.dumps(value), row["carrier"])
        if number % 200 == 0:
            producer.poll(0)
            ahead = began + seconds * number / total - time.monotonic()
            if ahead > 0:
                time.sleep(ahead)  # the pace of the input is the point
        if enough is not None and number > total * 0.9:
            producer.poll(0)
            enough.wait(TAPER_S / (total - number))  # until it is set
    producer.flush()


class Feeder(threading.Thread):
    """Feeds in the background."""

    def __init__(self, servers: str, rows: Sequence[Row], seconds: float) -> None:
        super().__init__(daemon=True)
        self.servers, self.rows, self.seconds = servers, rows, seconds
        self.enough, self.done = threading.Event(), threading.Event()

    def run(self) -> None:
        feed(self.servers, self.rows, self.seconds, self.enough)
        self.done.set()


def create_topics(servers: str) -> None:
    admin = AdminClient({"bootstrap.servers": servers})
    for name, future in admin.create_topics([NewTopic(t, PARTITIONS, 1) for t in (INPUT, OUTPUT)]).items():
        error = future.exception()
        if error is not None:
            sys.exit(f"Topic {name} could not be created: {error}. The demo needs a cluster without it.")


def stream(servers: str, rows: Sequence[Row], checkpoint: int, arguments: argparse.Namespace) -> bool:
    """Run the job over the streamed input, and kill it; -> whether it went on at *checkpoint* and ended cleanly."""
    job = Job(servers, arguments.parallelism, RETAINED)
    feeder = Feeder(servers, rows, arguments.seconds)
    feeder.start()
    output = [(OUTPUT, partition) for partition in range(PARTITIONS)]
    killer = Killer(
        job, servers, output, kills=arguments.kills, seed=arguments.seed, seconds=arguments.seconds,
        parallelism=arguments.parallelism,
    )  # fmt: skip
    killed = killer.run(feeder.done)
    feeder.enough.set()
    say("  the rest of the input, and a clean stop")
    feeder.done.wait()
    job.catch_up()
    code, left_open = job.stop(), killer.open_transactions(f"eo:{PIPELINE}:")
    say(f"  {killed} of {arguments.kills} kills; clean stop with exit code {code}; {job.finalized} checkpoints")
    say(f"  it began at checkpoint {job.began_at}; open transactions it left: {left_open}")
    return job.began_at == checkpoint and code == 0 and killed == arguments.kills and not left_open


def play(servers: str, arguments: argparse.Namespace) -> bool:
    say("Reading the flights.")
    rows = flights()
    half = len(rows) // 2
    create_topics(servers)
    say()
    say(f"History: {half:,} flights, computed by Spark (exactlyonce backfill)")
    feed(servers, rows[:half])
    say("  it is in the topic; Spark starts, which takes some twenty seconds")
    checkpoint = backfill(servers, half)
    say()
    say(
        f"Live, from there on (exactlyonce run): {len(rows) - half:,} flights in {arguments.seconds:g} s, "
        f"parallelism {arguments.parallelism}, seed {arguments.seed}"
    )
    streamed = stream(servers, rows[half:], checkpoint, arguments)
    say()
    say("Counted by a plain read_committed consumer:")
    counted = verdict(servers, OUTPUT, rows)
    say()
    say("Computed again by Spark, and compared (exactlyonce audit):")
    return audit(servers) and counted and streamed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=7)
    parser.add_argument("--seed", type=int, default=None, help="of the instants and roles; printed, to play it again")
    parser.add_argument("--seconds", type=float, default=42.0, help="how long the input of the stream lasts")
    parser.add_argument("--parallelism", type=int, default=2)
    parser.add_argument("--bootstrap-servers", help="an existing cluster; otherwise one is started for the demo")
    arguments = parser.parse_args()
    if arguments.seed is None:
        arguments.seed = int.from_bytes(os.urandom(3), "big")
    require_java()
    if arguments.bootstrap_servers:
        good = play(arguments.bootstrap_servers, arguments)
    else:
        with tempfile.TemporaryDirectory(prefix="exactlyonce-demo-") as folder:
            broker = EmbeddedBroker(Path(folder), port=0)
            broker.start(told_on(sys.stdout))
            try:
                good = play(broker.bootstrap_servers, arguments)
            finally:
                broker.stop()
    say()
    say("EXACTLY ONCE" if good else "NOT EXACTLY ONCE")
    return 0 if good else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that its processes are stopped
    try:
        sys.exit(main())
    except ExactlyOnceError as error:
        sys.exit(f"demo: {error}")

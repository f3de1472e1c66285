"""The main job under fire: real flights through `flights.py` while its processes die by SIGKILL, then an exact count.

    python examples/demo.py [--kills 7] [--seed N] [--seconds 42] [--parallelism 2] [--bootstrap-servers HOST:PORT]

Half of the flights are history, which Spark computes; the rest is streamed, from exactly there. `cli/demo/count.py`,
which has no line of the engine, counts the output; then Spark computes the expected output again, and compares.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

from demo_count import expected_updates, flights, read_update
from demo_spark import audit, backfill

from exactlyonce.cli.demo.count import verdict
from exactlyonce.cli.demo.feeding import Feeder, Records, create_topics, feed
from exactlyonce.cli.demo.kills import Job, Killer
from exactlyonce.connectors.embedded.broker import EmbeddedBroker
from exactlyonce.connectors.embedded.progress import told_on
from exactlyonce.engines.spark.session import require_java
from exactlyonce.errors import ExactlyOnceError

INPUT, OUTPUT, PIPELINE = "flights", "flight-totals", "flights"
PARTITIONS = 4
RETAINED = 20
"""Checkpoints that are kept for the audit."""


def say(text: str = "") -> None:
    print(text, flush=True)


def stream(servers: str, records: Records, checkpoint: int, arguments: argparse.Namespace) -> bool:
    """Run the job over the streamed input, and kill it; -> whether it went on at *checkpoint* and ended cleanly."""
    options = "--parallelism", str(arguments.parallelism), "--num-retained", str(RETAINED)
    job = Job(servers, [f"{PIPELINE}:pipeline"], Path(__file__).parent, *options)
    killer = Killer(
        job, servers, [(OUTPUT, partition) for partition in range(PARTITIONS)], kills=arguments.kills,
        seed=arguments.seed, seconds=arguments.seconds, parallelism=arguments.parallelism,
    )  # fmt: skip
    clean = killer.stream(Feeder(servers, INPUT, records, arguments.seconds), f"eo:{PIPELINE}:")
    return clean and job.began_at == checkpoint


def play(servers: str, arguments: argparse.Namespace) -> bool:
    say("Reading the flights.")
    records = flights()
    half = len(records) // 2
    create_topics(servers, [INPUT, OUTPUT], PARTITIONS)
    say()
    say(f"History: {half:,} flights, computed by Spark (exactlyonce backfill)")
    feed(servers, INPUT, records[:half])
    say("  it is in the topic; Spark starts, which takes some twenty seconds")
    checkpoint = backfill(servers, half)
    say()
    say(
        f"Live, from there on (exactlyonce run): {len(records) - half:,} flights in {arguments.seconds:g} s, "
        f"parallelism {arguments.parallelism}, seed {arguments.seed}"
    )
    streamed = stream(servers, records[half:], checkpoint, arguments)
    say()
    say("Counted by a plain read_committed consumer:")
    counted = verdict(servers, OUTPUT, expected_updates(records), read_update)
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

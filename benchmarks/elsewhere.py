"""The running total on Kafka Streams and on Quix Streams, exactly once, beside ours: records a second of each.

Each runs as a whole process on the same topics, with commits every 500 ms, one thread, and totals in memory (those of
Quix on disk, its only way). All are measured from outside: the growth of the visible records, from the first commit to
the last. The output of each is counted. Downloads the others once.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
import uuid
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench import Bench
from cluster import PARTITIONS, QUIET
from confluent_kafka import Consumer, TopicPartition
from figures import Figure
from job import Failed, Job

from exactlyonce.connectors.embedded.jars import cache_dir

HERE = Path(__file__).parent / "others"
LIMIT_S = 900.0
LOOK_INTERVAL_S = 0.02
SETTLED_S = 2.0
"""Silence that counts as the end: longer than a commit interval."""
QUIX = "quixstreams==3.28.1"

Command = list[str]


def streams(servers: str, source: str, sink: str, folder: str) -> Command:
    """Kafka Streams, whose one file the JDK compiles as it starts."""
    jars = cache_dir() / "kafka-streams-4.3.1"
    if not jars.exists():
        if not shutil.which("mvn") or not shutil.which("javac"):
            raise Failed("Kafka Streams is downloaded by Maven and compiled by a JDK: install both.")
        with tempfile.TemporaryDirectory() as part:
            shutil.copy(HERE / "pom.xml", part)
            goal = ("dependency:copy-dependencies", f"-DoutputDirectory={part}/jars")
            subprocess.run(["mvn", "--batch-mode", "--quiet", *goal], cwd=part, check=True)
            shutil.move(f"{part}/jars", jars)
    return ["java", "-Xmx1g", "-cp", f"{jars}/*", str(HERE / "Totals.java"), servers, source, sink, folder]


def quix(servers: str, source: str, sink: str, folder: str) -> Command:
    """Quix Streams, in an environment of its own."""
    home = cache_dir() / QUIX
    if not (home / "installed").exists():
        venv.create(home, clear=True, with_pip=True)
        subprocess.run([home / "bin" / "pip", "install", "--quiet", QUIX], check=True)
        (home / "installed").touch()
    return [str(home / "bin" / "python"), str(HERE / "quix_totals.py"), servers, source, sink, folder]


@contextmanager
def running(command: Command) -> Iterator[Callable[[], str | None]]:
    """*command* as a process that is killed in the end; the function returns its output if it has ended before."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)

        def failure() -> str | None:
            if process.poll() is None:
                return None
            output.seek(0)
            return f"{command[0]} ended with {process.returncode}: {output.read()[-2000:]}"

        try:
            yield failure
        finally:
            process.kill()
            process.wait()


def growth(
    bench: Bench, sink: str, records: int, failure: Callable[[], str | None], isolation: str = "read_committed"
) -> float:
    """Records a second of *sink* from the first commit to the last, until readers see *records* and no more come.

    Measured by offsets, so markers are counted with records: a few for each commit. With "read_uncommitted" as
    *isolation* it is from the first write to the last.
    """
    consumer = Consumer(
        {"bootstrap.servers": bench.cluster.servers, "group.id": "look", "isolation.level": isolation, **QUIET}
    )
    partitions = [TopicPartition(sink, partition) for partition in range(PARTITIONS)]
    seen: list[tuple[float, int]] = []
    deadline = time.monotonic() + LIMIT_S
    while not seen or seen[-1][1] < records or time.monotonic() < seen[-1][0] + SETTLED_S:
        if ended := failure():
            raise Failed(ended)
        if time.monotonic() > deadline:
            raise Failed(f"{sink} has {seen[-1][1] if seen else 0} of {records} records after {LIMIT_S:.0f} s")
        visible = sum(consumer.get_watermark_offsets(partition)[1] for partition in partitions)
        if visible > (seen[-1][1] if seen else 0):
            seen.append((time.monotonic(), visible))
        time.sleep(LOOK_INTERVAL_S)
    consumer.close()
    if len(seen) < 3:
        raise Failed(f"{records} records are too few for three commits")
    (first_s, first), (last_s, last) = seen[0], seen[-1]
    return (last - first) / (last_s - first_s)


def measured(bench: Bench, name: str, source: str, records: int) -> float:
    """Records a second of *name*: ours, or another."""
    sink = f"{name}-{uuid.uuid4().hex[:8]}"
    bench.cluster.create(sink)
    try:
        if name == "ours":
            with Job(bench.cluster.servers, "totals", name=sink, source=source, sink=sink) as job:
                rate = growth(bench, sink, records, job.failure)
        else:
            command = {"streams": streams, "quix": quix}[name]
            with (
                tempfile.TemporaryDirectory(prefix="exactlyonce-bench-") as folder,
                running(command(bench.cluster.servers, source, sink, folder)) as failure,
            ):
                rate = growth(bench, sink, records, failure)
        if (written := bench.cluster.digest(sink).records) != records:
            raise Failed(f"{name} wrote {written} of {records} records")
        return rate
    finally:
        bench.cluster.delete(sink)


def scenario(bench: Bench) -> Iterator[Figure]:
    """Ours against the others, round by round; a slower one gets less to do."""
    ours = bench.size(3_000_000, 1_500_000)
    for name, title, records in (("streams", "Kafka Streams", ours), ("quix", "Quix Streams", ours // 15)):
        ratios, details = [], []
        for number in range(bench.rounds or bench.size(2, 1)):
            rates = {}
            for runner, count in sorted({"ours": ours, name: records}.items(), reverse=number % 2 == 1):
                rates[runner] = measured(bench, runner, bench.input(count, 1_000), count)
            ratios.append(rates["ours"] / rates[name])
            details.append(f"{rates['ours']:,.0f} against {rates[name]:,.0f}")
            bench.say(f"round {number + 1}: {details[-1]} records/s: {ratios[-1]:.1f}")
        yield Figure(f"running total against {title}", min(ratios), detail=f"{'; '.join(details)} records/s")

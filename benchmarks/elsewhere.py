"""The running total and a tumbling count on Kafka Streams, Quix Streams and Bytewax, beside ours.

Each runs as a whole process on the same topics, with commits every 500 ms, one thread, and state in memory (that of
Quix on disk, its only way). All are exactly once, but for Bytewax, whose sink is at least once. All are measured from
outside: the growth of the visible records, from the first commit to the last. Each output is compared with what it
must be. Windows give final results, and the input ends with orders that end all windows before them. Downloads the
others once.
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
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench import Bench
from cluster import PARTITIONS, QUIET
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from figures import Figure
from job import Failed, Job
from work import Work, counts, totals

from exactlyonce.connectors.embedded.jars import cache_dir

HERE = Path(__file__).parent / "others"
LIMIT_S = 900.0
LOOK_INTERVAL_S = 0.02
SETTLED_S = 2.0
"""Silence that counts as the end: longer than a commit interval."""


def java() -> list[str]:
    """Java with Kafka Streams, which compiles a program of one file as it starts."""
    jars = cache_dir() / "kafka-streams-4.3.1"
    if not jars.exists():
        if not shutil.which("mvn") or not shutil.which("javac"):
            raise Failed("Kafka Streams is downloaded by Maven and compiled by a JDK: install both.")
        with tempfile.TemporaryDirectory() as part:
            shutil.copy(HERE / "pom.xml", part)
            goal = ("dependency:copy-dependencies", f"-DoutputDirectory={part}/jars")
            subprocess.run(["mvn", "--batch-mode", "--quiet", *goal], cwd=part, check=True)
            shutil.move(f"{part}/jars", jars)
    return ["java", "-Xmx1g", "-cp", f"{jars}/*"]


def python(*packages: str) -> list[str]:
    """Python in an environment of its own with *packages*."""
    home = cache_dir() / packages[0]
    if not (home / "installed").exists():
        venv.create(home, clear=True, with_pip=True)
        subprocess.run([home / "bin" / "pip", "install", "--quiet", *packages], check=True)
        (home / "installed").touch()
    return [str(home / "bin" / "python")]


class System(NamedTuple):
    """Another system, whose program takes a pipeline, servers, input, output and a folder for state."""

    title: str
    interpreter: Callable[[], list[str]]
    """Installs it the first time."""
    program: str
    """The file of its pipelines."""
    guarantee: str
    share: int
    """It gets one order in so many, for it is slower."""


SYSTEMS = {
    "streams": System("Kafka Streams", java, "streams_pipelines.java", "exactly once", 1),
    "quix": System("Quix Streams", partial(python, "quixstreams==3.28.1"), "quix_pipelines.py", "exactly once", 15),
    "bytewax": System(
        "Bytewax",
        partial(python, "bytewax==0.21.1", "confluent-kafka", "orjson"),
        "bytewax_pipelines.py",
        "at least once",
        10,
    ),
}


@contextmanager
def running(command: list[str]) -> Iterator[Callable[[], str | None]]:
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
        visible = sum(end_of(consumer, partition) for partition in partitions)
        if visible > (seen[-1][1] if seen else 0):
            seen.append((time.monotonic(), visible))
        time.sleep(LOOK_INTERVAL_S)
    consumer.close()
    if len(seen) < 3:
        raise Failed(f"{records} records are too few for three commits")
    (first_s, first), (last_s, last) = seen[0], seen[-1]
    return (last - first) / (last_s - first_s)


def end_of(consumer: Consumer, partition: TopicPartition) -> int:
    """Its end for *consumer*; 0 while its broker does not lead it yet, as just after its topic was made."""
    try:
        return int(consumer.get_watermark_offsets(partition)[1])
    except KafkaException as error:
        if error.args[0].code() != KafkaError.NOT_LEADER_FOR_PARTITION:
            raise
        return 0


def measured(bench: Bench, name: str, work: Work) -> float:
    """Records a second of *name*: ours, or another."""
    sink = f"{name}-{uuid.uuid4().hex[:8]}"
    bench.cluster.create(sink)
    results = work.expected.records
    if name == "ours":
        with Job(bench.cluster.servers, work.pipeline, name=sink, source=work.source, sink=sink) as job:
            rate = growth(bench, sink, results, job.failure)
    else:
        system = SYSTEMS[name]
        with tempfile.TemporaryDirectory(prefix="exactlyonce-bench-") as folder:
            arguments = (str(HERE / system.program), work.pipeline, bench.cluster.servers, work.source, sink, folder)
            with running([*system.interpreter(), *arguments]) as failure:
                rate = growth(bench, sink, results, failure)
    if (written := bench.cluster.digest(sink)) != work.expected:
        raise Failed(f"{name} wrote {written} instead of {work.expected}")
    bench.cluster.delete(sink)
    return rate * work.records / results


def scenario(bench: Bench) -> Iterator[Figure]:
    """Ours against the others, round by round; a slower one gets less to do."""
    records = bench.size(3_000_000, 600_000)
    for title, make in (("running total", totals), ("tumbling count", counts)):
        shares = {"ours": 1, **{name: system.share for name, system in SYSTEMS.items()}}
        works = {share: make(bench, records // share) for share in sorted(set(shares.values()))}
        rates: dict[str, list[float]] = {name: [] for name in shares}
        for number in range(bench.rounds or bench.size(2, 1)):
            for name in shares if number % 2 == 0 else reversed(shares):
                rates[name].append(measured(bench, name, works[shares[name]]))
            text = ", ".join(f"{name} {of[-1]:,.0f}" for name, of in rates.items())
            bench.say(f"{title}, round {number + 1}: {text} records/s")
        for name, system in SYSTEMS.items():
            ratios = [our / other for our, other in zip(rates["ours"], rates[name], strict=True)]
            detail = f"{median(rates['ours']):,.0f} against {median(rates[name]):,.0f} records/s, {len(ratios)} rounds"
            yield Figure(f"{title} against {system.title}, {system.guarantee}", median(ratios), detail=detail)
        bench.cluster.delete(*(work.source for work in works.values()))

"""`make bench`, as far as it is cheap: that every figure comes out, not how good it is."""

from __future__ import annotations

import json
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster, OwnCluster

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FIGURES = {
    "totals": {"running total, 1,000 keys, ratio": "", "running total, 1,000 keys, longest gap": "ms"},
    "visibility": {
        "p50 visibility minus the interval": "ms",
        "p99 visibility minus the interval": "ms",
        "duration of its checkpoints": "ms",
        **{
            f"visibility of a checkpoint's oldest record, {stage}": "ms"
            for stage in (
                *("fed", "fetched", "triggered late", "processed", "flushed"),
                *("decided", "committed", "read", "drained", "counted"),
            )
        },
    },
    "unaligned": {
        "unaligned checkpoints under back-pressure, times sooner": "",
        "unaligned checkpoints without back-pressure, ratio": "",
    },
    "liveness": {
        "checkpoints a minute, slow records after shuffles": "",
        "checkpoints a minute, sinks with a quota": "",
    },
    "event-time": {
        f"{window}, against the running total": ""
        for window in (
            *("tumbling count", "tumbling fold of a user's function"),
            *("hopping count of 60 s every 5 s", "session count", "deduplication of 1,000,000 ids"),
            "deduplication of 1,000,000 ids by arrival",
            *("as-of join of 10 records with 1 version", "interval join with 1 match each"),
        )
    },
    "event-time-extremes": {
        "longest gap between batches, 250,000 windows end at once": "ms",
        "windows a second, 250,000 end at once": "",
        "checkpoint of 250,000 expired windows, bytes against writing them": "",
        "p99 visibility of the last window after idle, minus the interval": "ms",
        "order log of a tumbling count, per record": "B",
    },
    "enrich": {f"enrich by a service of 20 ms, 200 records in flight, {batch} a call, ratio": "" for batch in (50, 1)},
    "map-batches": {"map_batches of the same, against map": ""},
    "gap": {"longest gap between batches, 250,000 keys": "ms"},
    "parquet": {"records to Parquet files, against pyarrow": ""},
    "memory": {"resident memory, checkpoint 60 against 30": ""},
    "redis": {
        "Kafka to Redis, ratio": "",
        "commits to Redis, against the plain way": "",
        "commit of a checkpoint to Redis, p99": "ms",
    },
}
"""Name and unit of every figure, by scenario."""


RUNNER = """\
import os, signal, sys
from job import Job
servers, topic = sys.argv[1:]
job = Job(servers, "totals", name=topic, source=topic, sink=topic + "-out")
job.next_checkpoint()
job.process.send_signal(signal.SIGSTOP)
os.kill(os.getpid(), signal.SIGTERM)
"""


WORKS = """\
import sys
from bench import Bench
from cluster import Cluster
from elsewhere import WORKS
from job import Job
cluster = Cluster(sys.argv[1])
try:
    for make in WORKS.values():
        work, sink = make(Bench(cluster, True, 1), 20_000), cluster.pipeline()
        cluster.create(sink)
        with Job(cluster.servers, work.pipeline, "--until", "latest", name=sink, source=work.source, sink=sink) as job:
            job.finish()
        written = cluster.digest(sink)
        if written != work.expected:
            sys.exit(f"{work}: {written}")
finally:
    cluster.clear()
"""
BUSY = """\
import subprocess, sys, time
from elsewhere import processor_s
burn = "import time; began = time.process_time()\\nwhile time.process_time() < 0.5: pass\\nprint(flush=True); input()"
parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
    process.stdout.readline()
    print(processor_s(process.pid))
    process.communicate(b"\\n")
"""


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("scenario", FIGURES)
def test_every_figure_is_there(scenario: str, stoppable: OwnCluster, tmp_path: Path) -> None:
    """A cheap scenario ends well, which it does not when an output is wrong, and leaves the cluster as it was."""
    if scenario == "redis" and shutil.which("redis-server") is None:
        pytest.skip("there is no redis-server here")
    before = set(stoppable.admin().list_topics(timeout=LIMIT_S).topics)
    file = tmp_path / "figures.json"
    options = ("--quick", "--bootstrap-servers", stoppable.bootstrap_servers, "--json", str(file))
    command = [sys.executable, "run.py", scenario, *options]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    figures = {figure["name"]: figure for figure in json.loads(file.read_text())}
    assert {name: figure["unit"] for name, figure in figures.items()} == FIGURES[scenario]
    assert all(figure["value"] > 0 for name, figure in figures.items() if "minus" not in name)
    bounds = runpy.run_path(str(BENCHMARKS / "figures.py"))["BOUNDS"]
    judged = {name for name, figure in figures.items() if figure.get("verdict") in ("pass*", "pass", "short")}
    assert judged == figures.keys() & bounds.keys()
    assert all(f"\n{name}  " in done.stdout for name in figures)
    after = set(stoppable.admin().list_topics(timeout=LIMIT_S).topics)
    assert not [topic for topic in after - before if not topic.startswith("__")]


@pytest.mark.exhaustive
def test_a_job_ends_with_its_runner(kafka: KafkaCluster, topic_name: str) -> None:
    """The job, which is stopped and cannot end by itself, holds the pipe of the runner's output open while it lives."""
    for topic in (topic_name, f"{topic_name}-out"):
        kafka.create_topic(topic, partitions=1)
    command = [sys.executable, "-c", RUNNER, kafka.bootstrap_servers, topic_name]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == -signal.SIGTERM, done.stderr


@pytest.mark.exhaustive
def test_what_all_systems_must_write(kafka: KafkaCluster) -> None:
    """Our pipelines write what the comparison with other systems expects of each."""
    command = [sys.executable, "-c", WORKS, kafka.bootstrap_servers]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr


def test_processor_time_has_that_of_descendants() -> None:
    """A process that does nothing itself has the processor time of its child, which is busy for half a second."""
    done = subprocess.run([sys.executable, "-c", BUSY], cwd=BENCHMARKS, capture_output=True, text=True, timeout=LIMIT_S)
    assert float(done.stdout) >= 0.5, done.stderr


def test_the_page_has_the_limits_of_the_code(table: Callable[..., list[dict[str, str]]]) -> None:
    """The targets on the page are those in the table of `make bench`."""
    rows = table("docs/benchmarks.md", "figure", "required", "measured")
    documented = {row["figure"]: float(row["required"].split()[-1]) for row in rows}
    bounds = runpy.run_path(str(BENCHMARKS / "figures.py"))["BOUNDS"]
    assert documented == {name: bounds[name].required for name in documented}

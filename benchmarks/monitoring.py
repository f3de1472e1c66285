"""The cost of `--ui` and `--metrics` while somebody looks, the answers of `/live`, and the starts of commands."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from urllib.request import urlopen

from bench import Bench
from figures import Figure
from job import Failed, Job
from throughput import rate_of

from exactlyonce.connectors.embedded.broker import HOST, free_port

HERE = Path(__file__).parent
LOOK_S = 1.0
"""A browser with the page open asks so often; a scraper rarely does."""
PROBES = 100


def scenario(bench: Bench) -> Iterator[Figure]:
    """Runs with and without, in turns; then a run with a stopped worker; then commands."""
    yield _cost(bench)
    yield _liveness(bench)
    yield from _starts(bench)


def _cost(bench: Bench) -> Figure:
    records, rounds = bench.size(3_000_000, 1_000_000), bench.rounds or bench.size(6, 1)
    source, ratios = bench.input(records, 1_000), []
    for number in range(rounds):
        rates = {}
        for watched in (False, True) if number % 2 else (True, False):
            sink, address = f"watched-{uuid.uuid4().hex[:8]}", f"{HOST}:{free_port()}"
            bench.cluster.create(sink)
            options = ("--until", "latest", *(("--ui", address, "--metrics", address) if watched else ()))
            with (
                Job(bench.cluster.servers, "totals", *options, name=sink, source=source, sink=sink) as job,
                _looking(address if watched else None),
            ):
                rates[watched] = rate_of(job.finish(), records)
            bench.cluster.delete(sink)
        ratios.append(rates[True] / rates[False])
        bench.say(
            f"round {number + 1}: {rates[True]:,.0f} records/s watched, {rates[False]:,.0f} not: {ratios[-1]:.3f}"
        )
    return Figure("running total with --ui and --metrics, ratio", median(ratios), detail=f"{rounds} rounds")


@contextmanager
def _looking(address: str | None) -> Iterator[None]:
    """Ask for the page's state and the metrics every second in the block."""
    over = threading.Event()

    def look() -> None:
        while address is not None and not over.wait(LOOK_S):
            for path in ("state.json", "metrics"):
                with suppress(OSError):  # it does not listen yet, or not any more
                    urlopen(f"http://{address}/{path}", timeout=10).read()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _liveness(bench: Bench) -> Figure:
    """The slowest answer while a worker is stopped, and the others read a backlog."""
    source, address = bench.input(bench.size(3_000_000, 1_000_000), 1_000), f"{HOST}:{free_port()}"
    sink = f"stopped-{uuid.uuid4().hex[:8]}"
    bench.cluster.create(sink)
    options = ("--parallelism", "2", "--metrics", address)
    took_ms = []
    with Job(bench.cluster.servers, "totals", *options, name=sink, source=source, sink=sink) as job:
        job.next_checkpoint(1)
        children = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGSTOP)
        for _ in range(PROBES):
            began = time.monotonic()
            with urlopen(f"http://{address}/live", timeout=10) as answer:
                if answer.status != 200:
                    raise Failed(f"/live answers {answer.status} while a worker is stopped")
            took_ms.append((time.monotonic() - began) * 1000)
            time.sleep(0.05)
        os.kill(int(children[0]), signal.SIGKILL)
    bench.cluster.delete(sink)
    detail = f"median {median(took_ms):.1f} ms of {PROBES}"
    return Figure("slowest answer of /live while a worker is stopped", max(took_ms), "ms", detail)


def _starts(bench: Bench) -> Iterator[Figure]:
    """The least processor time of a whole process."""
    pipeline = ("benchmarked:totals", "--param", "name=t", "--param", "source=s", "--param", "sink=k")
    source = bench.input(bench.size(3_000_000, 1_000_000), 1_000)
    sink = f"listed-{uuid.uuid4().hex[:8]}"
    bench.cluster.create(sink)
    with Job(bench.cluster.servers, "totals", "--until", "latest", name=sink, source=source, sink=sink) as job:
        job.finish()
    listing = ("checkpoints", sink, "--bootstrap-servers", bench.cluster.servers)
    for title, command in (("--help", ("--help",)), ("explain", ("explain", *pipeline)), ("checkpoints", listing)):
        yield Figure(f"processor time of `{title}`", min(_processor_s(*command) for _ in range(bench.size(10, 3))), "s")
    bench.cluster.delete(sink)


def _processor_s(*command: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "exactlyonce.cli.main", *command], cwd=HERE, check=True, stdout=subprocess.DEVNULL
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

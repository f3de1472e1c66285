"""Runs with state in local files: switched to and from at any checkpoint, killed anywhere, with a disk that is full."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from running import QUICK, assert_totals, orders

from exactlyonce.testing.cluster import KafkaCluster

pytestmark = pytest.mark.broker

CUSTOMERS = 900


def tiered(folder: Path) -> tuple[str, ...]:
    """With next to no memory for states."""
    return ("--state-backend", "rocksdb", "--state-memory", "1mb", "--state-folder", str(folder))


def feed(kafka: KafkaCluster, topic: str, first: int, count: int = 4_000) -> list[tuple[str, str]]:
    """Some more orders of many customers."""
    fed = orders(count, customers=CUSTOMERS, first=first)
    kafka.produce(f"{topic}-in", fed)
    return fed


@pytest.mark.slow
@pytest.mark.exhaustive
def test_switched_at_any_checkpoint(kafka: KafkaCluster, topic_name: str, run: Any, tmp_path: Path) -> None:
    """Killed again and again, and run on with the other backend, another parallelism or both, totals are exact."""
    kafka.create_topic(f"{topic_name}-in", 3)
    fed: list[tuple[str, str]] = []
    backends = {"rocksdb": tiered(tmp_path), "hashmap": ()}
    for backend, parallelism in (("hashmap", 1), ("rocksdb", 2), ("rocksdb", 2), ("rocksdb", 1), ("hashmap", 2)):
        arguments = (*QUICK, "--param", f"name={topic_name}", "--parallelism", str(parallelism), *backends[backend])
        job = run("pipelines:linear", *arguments)
        fed += feed(kafka, topic_name, len(fed))
        job.await_checkpoint()
        fed += feed(kafka, topic_name, len(fed))
        job.await_checkpoint()
        job.kill()
    last = run("pipelines:linear", *QUICK, "--param", f"name={topic_name}", "--until", "latest", *tiered(tmp_path))
    assert last.wait() == 0, last.said
    assert_totals(kafka, f"{topic_name}-out", fed)


STEPS = ["worker-restored", "worker-frozen", "worker-blocks", "worker-acknowledged", "worker-finalized",
         "coordinator-decided", "coordinator-finalized"]  # fmt: skip


@pytest.mark.exhaustive(but=["worker-blocks"])
@pytest.mark.parametrize("name", STEPS)
def test_killed_at_a_step(
    name: str, kafka: KafkaCluster, topic_name: str, run: Callable[..., Any], failpoint: Any, tmp_path: Path
) -> None:
    """A process is killed at the step, its successor takes the local files again: the totals are exact."""
    kafka.create_topic(f"{topic_name}-in", 3)
    fed = feed(kafka, topic_name, 0, 8_000)
    env, codes = failpoint(name), list[int]()
    while 0 not in codes:
        assert len(codes) < 5, codes
        arguments = (*QUICK, "--param", f"name={topic_name}", "--until", "latest", *tiered(tmp_path / "state"))
        job = run("pipelines:linear", *arguments, env=env)
        codes.append(job.wait())
        assert codes[-1] in (0, -9), job.said
    assert (tmp_path / "fired" / name).exists(), "the planned kill happened"
    assert_totals(kafka, f"{topic_name}-out", fed)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 40 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(disk: Path) -> Path:
    """A file that leaves 2 MB."""
    stat = os.statvfs(disk)
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(stat.f_bavail * stat.f_frsize - (2 << 20)))
    return ballast


def noted(text: str) -> Callable[[dict[str, Any]], bool]:
    """Whether an event is a note that says so."""
    return lambda event: event["event"] == "note" and text in event["text"]


def test_a_disk_that_is_full(kafka: KafkaCluster, topic_name: str, run: Any, small_disk: Path) -> None:
    """It pauses the job, which says which folder is full and takes no checkpoint, and goes on when there is room."""
    kafka.create_topic(f"{topic_name}-in", 3)
    fed = feed(kafka, topic_name, 0)
    job = run("pipelines:linear", *QUICK, "--param", f"name={topic_name}", *tiered(small_disk))
    job.await_checkpoint()
    ballast = fill(small_disk)
    paused = job.await_event(noted("paused"))
    assert f"the disk of {small_disk}" in paused["text"]
    assert "make room there" in paused["text"]
    fed += feed(kafka, topic_name, len(fed))
    ballast.unlink()
    job.await_event(noted("goes on"))
    job.await_checkpoint()
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 0, job.said
    assert "restarting" not in job.said, job.said
    assert_totals(kafka, f"{topic_name}-out", fed)


@pytest.mark.exhaustive
def test_a_disk_that_is_full_at_the_start(kafka: KafkaCluster, topic_name: str, run: Any, small_disk: Path) -> None:
    """Nothing is read until there is room; then the job goes on from where it was."""
    kafka.create_topic(f"{topic_name}-in", 3)
    fed = feed(kafka, topic_name, 0)
    arguments = (*QUICK, "--param", f"name={topic_name}", *tiered(small_disk))
    assert run("pipelines:linear", *arguments, "--until", "latest").wait() == 0
    fed += feed(kafka, topic_name, len(fed))
    ballast = fill(small_disk)
    job = run("pipelines:linear", *arguments, "--until", "latest")
    job.await_event(noted("paused"))
    ballast.unlink()
    assert job.wait() == 0, job.said
    assert_totals(kafka, f"{topic_name}-out", fed)

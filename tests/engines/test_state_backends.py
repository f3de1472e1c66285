"""Runs with state in local files: switched to and from at any checkpoint, killed anywhere, with a disk that is full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from running import Job, stop
from test_kill_matrix import run_to_the_end

CUSTOMERS = 900


def tiered(folder: Path) -> tuple[str, ...]:
    return ("--state-backend", "rocksdb", "--state-memory", "1mb", "--state-folder", str(folder))


def feed(job: Job, count: int = 4_000) -> None:
    job.feed(count, customers=CUSTOMERS)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_switched_at_any_checkpoint(job_of: Callable[..., Job], tmp_path: Path) -> None:
    job = job_of("linear")
    backends = {"rocksdb": tiered(tmp_path), "hashmap": ()}
    for backend, parallelism in (("hashmap", 1), ("rocksdb", 2), ("rocksdb", 2), ("rocksdb", 1), ("hashmap", 2)):
        run = job.start("--parallelism", str(parallelism), *backends[backend])
        for _ in range(2):
            feed(job)
            run.await_checkpoint()
        run.kill()
    job.finish_here(*tiered(tmp_path))
    job.assert_totals()


@pytest.mark.exhaustive(but=["worker-blocks"])
@pytest.mark.parametrize("name", ["worker-restored", "worker-blocks"])
def test_killed_at_a_step(name: str, job_of: Callable[..., Job], failpoint: Any, tmp_path: Path) -> None:
    job = job_of("linear")
    feed(job)
    run_to_the_end(job, *tiered(tmp_path / "state"), env=failpoint(name))
    job.assert_totals()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
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
    stat = os.statvfs(disk)
    ballast = disk / "ballast"
    ballast.write_bytes(bytes(stat.f_bavail * stat.f_frsize - (2 << 20)))
    return ballast


def noted(text: str) -> Callable[[dict[str, Any]], bool]:
    return lambda event: event["event"] == "note" and text in event["text"]


@pytest.mark.exhaustive
def test_a_disk_that_is_full(job_of: Callable[..., Job], small_disk: Path) -> None:
    job = job_of("linear", *tiered(small_disk))
    feed(job)
    run = job.start("--inline")
    run.await_checkpoint()
    ballast = fill(small_disk)
    paused = run.await_event(noted("paused"))
    assert f"the disk of {small_disk}" in paused["text"]
    assert "make room there" in paused["text"]
    feed(job)
    ballast.unlink()
    run.await_event(noted("goes on"))
    run.await_checkpoint()
    stop(run)
    assert "restarting" not in run.said, run.said
    job.finish_here()  # what it had not read when it was stopped
    job.assert_totals()


@pytest.mark.exhaustive
def test_a_disk_that_is_full_at_the_start(job_of: Callable[..., Job], small_disk: Path) -> None:
    job = job_of("linear", *tiered(small_disk))
    feed(job)
    job.finish_here()
    feed(job)
    ballast = fill(small_disk)
    run = job.start("--until", "latest")
    run.await_event(noted("paused"))
    ballast.unlink()
    assert run.wait() == 0, run.said
    job.assert_totals()

"""Fixtures of the engine's tests: a pipeline's topics and its runs, all ended with the test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.checkpoint.store.files.local import LocalFolder
from exactlyonce.checkpoint.store.files.storage import FileStorage

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def run(kafka: Any) -> Iterator[Callable[..., Any]]:
    """`run("pipelines:linear", "--param", ...)` starts `exactlyonce run` on the cluster; killed when the test ends."""
    from running import Run

    runs: list[Any] = []

    def start(target: str, *arguments: str, **options: Any) -> Any:
        runs.append(Run(options.pop("servers", kafka.bootstrap_servers), target, *arguments, **options))
        return runs[-1]

    yield start
    for each in runs:
        if each.process.poll() is None:
            each.kill()


@pytest.fixture
def job_of(run: Callable[..., Any], kafka: Any, topic_name: str) -> Callable[..., Any]:
    """`job_of("linear", "--parallelism", "2")`: the pipeline of the test, on another *cluster* if given."""
    from running import Job

    def made(target: str, *arguments: str, cluster: Any = None, **options: Any) -> Job:
        return Job(run, cluster or kafka, topic_name, target, *arguments, **options)

    return made


@pytest.fixture
def failpoint(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """`failpoint("worker-frozen")` is the environment that arms it; the file in tmp_path/fired shows that it fired."""
    fired = tmp_path / "fired"
    fired.mkdir(exist_ok=True)

    def arm(name: str, action: str = "kill", nth: int = 1) -> dict[str, str]:
        return {"EXACTLYONCE_FAILPOINTS": f"{name}={action}@{nth}", "EXACTLYONCE_FAILPOINTS_FIRED": str(fired)}

    return arm


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[FileStorage]:
    with closing(FileStorage(LocalFolder(tmp_path, "blocks"))) as storage:
        storage.check()
        yield storage


@pytest.fixture
def manifest_of() -> Callable[..., Manifest]:
    """`manifest_of("totals", order_logs=...)` is checkpoint 7 of a pipeline, which holds nothing but what is given."""

    def made(pipeline: str, **fields: Any) -> Manifest:
        empty = Manifest(
            pipeline=pipeline, checkpoint=7, incarnation=1, attempt=0, kind="checkpoint", base=6, previous=6,
            triggered_at_ms=0, completed_at_ms=0, fingerprint="", max_parallelism=128, parallelism=1,
            block_partitions=5, block_end_offsets=(0,) * 5, written_bytes=0, offsets=(), operators=(), order_logs=(),
            committables=(), sinks=(),
        )  # fmt: skip
        return msgspec.structs.replace(empty, **fields)

    return made

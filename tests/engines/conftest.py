"""Fixtures of the engine's tests: a pipeline's topics and its runs, all ended with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from exactlyonce.connectors.block_files import FileStorage
from exactlyonce.connectors.filestore.local import LocalStore


@pytest.fixture
def job_of(run: Callable[..., Any], kafka: Any, topic_name: str) -> Callable[..., Any]:
    """`job_of("linear", "--parallelism", "2")`: the pipeline of the test, on another *cluster* if given."""
    from running import Job

    def made(target: str, *arguments: str, cluster: Any = None, **options: Any) -> Job:
        return Job(run, cluster or kafka, topic_name, target, *arguments, **options)

    return made


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[FileStorage]:
    with closing(FileStorage(LocalStore(tmp_path, "blocks"))) as storage:
        storage.check()
        yield storage

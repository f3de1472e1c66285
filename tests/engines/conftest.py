"""Fixtures of the engine's tests: a pipeline's topics and its runs, all ended with the test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

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
def failpoint(tmp_path: Path) -> Callable[..., dict[str, str]]:
    """`failpoint("worker-frozen")` is the environment that arms it; the file in tmp_path/fired shows that it fired."""
    fired = tmp_path / "fired"
    fired.mkdir(exist_ok=True)

    def arm(name: str, action: str = "kill", nth: int = 1) -> dict[str, str]:
        return {"EXACTLYONCE_FAILPOINTS": f"{name}={action}@{nth}", "EXACTLYONCE_FAILPOINTS_FIRED": str(fired)}

    return arm

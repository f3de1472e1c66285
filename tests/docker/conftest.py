"""Fixtures of the container tests: servers in containers, of images that are made here, or pulled."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent / "rig"), str(ROOT / "tests" / "sinks" / "rig")]


@pytest.fixture(scope="session")
def image() -> Callable[[str], str]:
    """`image("postgres")`: the image of that server, freshly made from this tree."""

    def made(server: str) -> str:
        tag = f"exactlyonce-{server}:tests"
        command = [sys.executable, str(ROOT / "docker" / "build.py"), server, "--tag", tag]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return tag

    return made

"""What holds for all tests: which may be skipped, what the repository holds, and the image of the container tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pathspec import GitIgnoreSpec

ROOT = Path(__file__).parents[1]
Rows = list[dict[str, str]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where no Docker engine runs its tests are skipped, but never in CI: there .ci/run starts one."""
    marked = [item for item in items if item.get_closest_marker("docker")]
    if marked and os.environ.get("CI") != "true" and not _docker_answers():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no Docker engine runs"))


@pytest.fixture(scope="session")
def repository() -> list[Path]:
    """Every file of the repository, relative to its root: all that .gitignore does not name."""
    ignored = GitIgnoreSpec.from_lines([".git", *(ROOT / ".gitignore").read_text().splitlines()])

    def walk(folder: Path) -> Iterator[Path]:
        for path in sorted(folder.iterdir()):
            is_folder = path.is_dir() and not path.is_symlink()
            place = path.relative_to(ROOT)
            if not ignored.match_file(f"{place}/" if is_folder else place):
                yield from walk(path) if is_folder else [place]

    return list(walk(ROOT))


@pytest.fixture(scope="session")
def table() -> Callable[..., Rows]:
    """`table("docs/settings.md", "setting", "values")`: the rows of all tables with this header, by column."""

    def rows(page: str, *header: str) -> Rows:
        found: Rows = []
        inside = False
        for line in (ROOT / page).read_text().splitlines():
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if inside and cells and not set(line) <= set("|- "):
                found.append(dict(zip(header, cells, strict=True)))
            inside = cells == list(header) or (inside and bool(cells))
        assert found, f"{page} has no table {header}"
        return found

    return rows


@pytest.fixture(scope="session")
def kafka_image() -> str:
    """The image of docker/kafka, freshly made from this tree."""
    tag = "exactlyonce-kafka:tests"
    made = subprocess.run(
        [sys.executable, ROOT / "docker" / "kafka" / "build.py", "--tag", tag], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return tag


def _docker_answers() -> bool:
    from docker.client import DockerClient
    from docker.errors import DockerException

    try:
        DockerClient.from_env().ping()
    except DockerException:
        return False
    return True

"""Tests of the distance from a test to what changed."""

from __future__ import annotations

from pathlib import Path

import pytest
from affected import affected_tests, base_of_the_change, distances, git

TEXTS = {
    "src/exactlyonce/__init__.py": "from exactlyonce.pipeline.stream import Stream",
    "pipeline/__init__.py": "",
    "pipeline/stream.py": "import os",
    "pipeline/json.py": "",
    "cli/__init__.py": "",
    "cli/main.py": "def main():\n    from exactlyonce.pipeline import stream",
    "tests/rig.py": "COMMAND = 'exactlyonce.cli.main'",
    "tests/conftest.py": "import pytest",
    "tests/cli/conftest.py": "",
    "tests/cli/test_main.py": "from rig import COMMAND",
    "tests/test_stream.py": "import exactlyonce.pipeline.stream",
    "tests/test_whole.py": "import exactlyonce",
    "tests/test_rest.py": "import json",
}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("pipeline/stream.py", {"test_stream": 1, "test_whole": 2, "test_main": 3}),
        ("cli/main.py", {"test_main": 2}),
        ("tests/test_rest.py", {"test_rest": 0}),
        ("tests/cli/conftest.py", {"test_main": 1}),
        ("tests/conftest.py", {"test_main": 1, "test_stream": 1, "test_whole": 1, "test_rest": 1}),
        ("pipeline/json.py", {}),
        ("README.md", {}),
    ],
)
def test_a_file_is_as_far_as_its_imports(changed: str, expected: dict[str, int]) -> None:
    found = distances({Path(path): text for path, text in TEXTS.items()}, [Path(changed)])
    assert {path.stem: distance for path, distance in found.items() if path.name.startswith("test_")} == expected


def test_the_base_is_the_last_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a merge it is what is four hours older than the last commit; CI may name another."""
    monkeypatch.delenv("CI_BASE", raising=False)

    def commit(name: str, hour: int) -> str:
        (tmp_path / name).write_text("import nothing\n")
        git("add", "-A", root=tmp_path)
        monkeypatch.setenv("GIT_COMMITTER_DATE", f"2026-01-02T{hour:02}:00:00Z")
        git("-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", name, root=tmp_path)
        return git("rev-parse", "HEAD", root=tmp_path)

    git("init", "-q", "-b", "main", root=tmp_path)
    first = commit("test_first.py", 1)
    assert base_of_the_change(tmp_path) == first
    commit("test_second.py", 4)
    assert base_of_the_change(tmp_path) == first
    last = commit("test_last.py", 10)
    git("switch", "-qc", "work", root=tmp_path)
    commit("test_work.py", 11)
    git("switch", "-q", "main", root=tmp_path)
    git("-c", "user.name=x", "-c", "user.email=x@x", "merge", "-q", "--no-ff", "-m", "x", "work", root=tmp_path)
    base = base_of_the_change(tmp_path)
    assert git("rev-parse", base, root=tmp_path) == last
    assert affected_tests(base, tmp_path) == {"test_work.py": 0}
    monkeypatch.setenv("CI_BASE", first)
    files = affected_tests(base_of_the_change(tmp_path), tmp_path)
    assert files.keys() == {"test_second.py", "test_last.py", "test_work.py"}

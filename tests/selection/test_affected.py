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
    "pyproject.toml": '[project.entry-points.pytest11]\nexactlyonce = "exactlyonce.testing.plugin"\n',
    "testing/__init__.py": "",
    "testing/plugin.py": "",
    "tests/spark/rig/job.py": "",
    "tests/spark/rig/totals.py": "",
    "tests/spark/test_spark.py": "STARTED, READ = [HERE / 'rig' / 'job.py', 'totals:make'], 'docs/spark.md'",
}
ALL = ("test_main", "test_stream", "test_whole", "test_rest", "test_spark")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("pipeline/stream.py", {"test_stream": 1, "test_whole": 2, "test_main": 3}),
        ("cli/main.py", {"test_main": 2}),
        ("tests/test_rest.py", {"test_rest": 0}),
        ("tests/cli/conftest.py", {"test_main": 1}),
        ("tests/conftest.py", dict.fromkeys(ALL, 1)),
        ("pyproject.toml", dict.fromkeys(ALL, 1)),
        ("testing/plugin.py", dict.fromkeys(ALL, 2)),
        ("tests/spark/rig/job.py", {"test_spark": 1}),
        ("tests/spark/rig/totals.py", {"test_spark": 1}),
        ("docs/spark.md", {"test_spark": 1}),
        ("docs/other.md", {}),
        ("pipeline/json.py", {}),
    ],
)
def test_a_file_is_as_far_as_its_imports(changed: str, expected: dict[str, int]) -> None:
    found = distances({Path(path): text for path, text in TEXTS.items()}, [Path(changed)])
    assert {path.stem: distance for path, distance in found.items() if path.name.startswith("test_")} == expected


def test_the_base_is_the_last_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first merge it is the first commit; CI may name another."""
    monkeypatch.delenv("CI_BASE", raising=False)
    as_somebody = ("-c", "user.name=x", "-c", "user.email=x@x")

    def commit(name: str) -> str:
        (tmp_path / name).write_text("import nothing\n")
        git("add", "-A", root=tmp_path)
        git(*as_somebody, "commit", "-qm", name, root=tmp_path)
        return git("rev-parse", "HEAD", root=tmp_path)

    def base() -> str:
        return git("rev-parse", base_of_the_change(tmp_path), root=tmp_path)

    git("init", "-q", "-b", "main", root=tmp_path)
    first = commit("test_first.py")
    last = commit("test_last.py")
    assert base() == first
    git("switch", "-qc", "work", root=tmp_path)
    commit("test_work.py")
    git("switch", "-q", "main", root=tmp_path)
    git(*as_somebody, "merge", "-q", "--no-ff", "-m", "x", "work", root=tmp_path)
    assert base() == last
    assert affected_tests(last, tmp_path) == {"test_work.py": 0}
    merge = git("rev-parse", "HEAD", root=tmp_path)
    commit("test_more.py")
    commit("test_most.py")
    assert base() == merge
    monkeypatch.setenv("CI_BASE", first)
    assert base() == first
    assert affected_tests(first, tmp_path).keys() == {f"test_{each}.py" for each in ("last", "work", "more", "most")}

"""The test files that a change may break, nearest first.

The distance of a file is the number of imports on the shortest way from it to a changed file. A test also depends on
each `conftest.py` above it, and on the pytest plugin of `pyproject.toml`. Texts by which commands start, or pages are
read, count as imports: "exactlyonce.cli.main", "pipelines:totals", "job.py", "docs/settings.md".

    python tests/selection/affected.py            # distance and file, for what changed since the last merge to main
    python tests/selection/affected.py v1.0       # since a tag or a commit
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = Path("pyproject.toml")
IN_MANY_FOLDERS = {"__init__.py", "conftest.py", "README.md"}
"""File names that alone name no file."""


def git(*arguments: str, root: Path = ROOT) -> str:
    """The output of git; raises CalledProcessError outside of a repository, or for an unknown revision."""
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def base_of_the_change(root: Path = ROOT) -> str:
    """The commit before the change: CI_BASE, else the base of the merge at HEAD, the merge before it, or the first."""
    if os.environ.get("CI_BASE"):
        return os.environ["CI_BASE"]
    if len(git("rev-list", "--parents", "-1", "HEAD", root=root).split()) > 2:
        return "HEAD^1"
    merge = git("rev-list", "--first-parent", "--merges", "-1", "HEAD", root=root)
    return merge or git("rev-list", "--max-parents=0", "HEAD", root=root).splitlines()[-1]


def changed_files(base: str, root: Path = ROOT) -> set[Path]:
    """Every file that differs from *base*, committed or not, relative to the root."""
    names = git("diff", "--name-only", "--no-renames", base, root=root).splitlines()
    names += git("ls-files", "--others", "--exclude-standard", root=root).splitlines()
    return {Path(name) for name in names}


def distances(texts: Mapping[Path, str], changed: Iterable[Path]) -> dict[Path, int]:
    """The distance of each file to the nearest changed one. *texts* has each module's source by its path."""
    found = dict.fromkeys(changed, 0)
    importers: dict[Path, set[Path]] = defaultdict(set)
    for path, imported in _edges(texts, found):
        importers[imported].add(path)
    waiting = deque(found)
    while waiting:
        path = waiting.popleft()
        for importer in importers[path] - found.keys():
            found[importer] = found[path] + 1
            waiting.append(importer)
    return found


def affected_tests(base: str, root: Path = ROOT) -> dict[str, int]:
    """The distance of each test file to what changed since *base*, nearest first."""
    names = git("ls-files", "--cached", "--others", "--exclude-standard", "*.py", str(PROJECT), root=root).splitlines()
    texts = {Path(name): (root / name).read_text() for name in names if (root / name).is_file()}
    found = distances(texts, changed_files(base, root))
    tests = {path.as_posix(): distance for path, distance in found.items() if path.name.startswith("test_")}
    return dict(sorted(tests.items(), key=lambda each: (each[1], each[0])))


def _edges(texts: Mapping[Path, str], changed: Iterable[Path]) -> Iterator[tuple[Path, Path]]:
    """Each file with each file that it imports, or names, or that pytest reads for it."""
    modules = {_module(path): path for path in texts}
    by_stem: dict[str, set[Path]] = defaultdict(set)
    for path in texts:
        if Path(path.parts[0], "__init__.py") not in texts:  # outside of packages a module is imported by its own name
            by_stem[path.stem].add(path)
    by_name: dict[str, set[Path]] = defaultdict(set)
    for path in {*texts, *changed}:
        if path.name not in IN_MANY_FOLDERS:
            by_name[path.name].add(path)
    for path, text in texts.items():
        imported, words = _plugins(text) if path == PROJECT else _imported(text)
        targets = {file for word in words for file in by_name[Path(word).name] if file.match(word)}
        for name in imported:
            target = modules.get(name) or modules.get(name.rpartition(".")[0])
            targets |= {target} if target else by_stem[name.split(".")[0]]
        if path.parts[0] == "tests":
            targets |= {PROJECT, *(folder / "conftest.py" for folder in path.parents)}
        yield from ((path, target) for target in targets - {path})


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    if parts[:2] == ("src", "exactlyonce"):
        parts = parts[2:]
    return ".".join(("exactlyonce", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def _imported(text: str) -> tuple[set[str], set[str]]:
    """The names of modules, or of what is in them; and the words that may be a file's path, or its end."""
    names, words = set(re.findall(r"\bexactlyonce(?:\.\w+)+", text)), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if module := re.fullmatch(r"(\w+):\w*|(\w+_\w+)", node.value):
                names.add(module[1] or module[2])
            elif re.fullmatch(r"[\w./-]+\.\w+", node.value):
                words.add(node.value)
    return names, words


def _plugins(project: str) -> tuple[set[str], set[str]]:
    """The modules that pytest loads for every test."""
    return set(re.findall(r'^\[project\.entry-points\.pytest11\]\n\w+ = "([\w.]+)"', project, re.MULTILINE)), set()


if __name__ == "__main__":
    for file, distance in affected_tests(sys.argv[1] if len(sys.argv) > 1 else base_of_the_change()).items():
        print(distance, file)

"""A download of jars by jgo, which needs neither Maven nor Java: `python -m ... FOLDER < LIST`.

Each line of LIST is `group:artifact:version`. Its files are at last in FOLDER; the registry is jgo's own.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SIDE_BY_SIDE = 4


def fetch(folder: Path, places: list[str]) -> None:
    from jgo.maven import MavenContext

    context = MavenContext(repo_cache=folder.parent / "repository")
    folder.mkdir()

    def fetch_one(place: str) -> None:
        group, artifact, version = place.split(":")
        path = context.project(group, artifact).at_version(version).artifact().resolve()
        path.rename(folder / path.name)

    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        list(threads.map(fetch_one, places))


if __name__ == "__main__":
    fetch(Path(sys.argv[1]), sys.stdin.read().split())

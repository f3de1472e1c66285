"""Hundreds of thousands of histories, over as many runs as it takes: `make soak SEEDS=300000`.

    python tests/simulation/soak.py [--seeds 300000] [--jobs 2]

Every second hundred has only its seed's draws, the others every tilt in turn (`--luck any`). Each hundred is added to
docs/simulated-seeds.json and tests/README.md, by the commit that last changed what is simulated: an interrupted run
continues there, on another machine too.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from simulate import ANY, Outcome, lived

ROOT = Path(__file__).parents[2]
SIMULATED = ("checkpoint", "connectors", "engines", "pipeline", "sinks", "state", "testing", "tests/simulation")
BEGIN, END = "<!-- seeds: begin -->", "<!-- seeds: end -->"
PAGE, JSON = "tests/README.md", "docs/simulated-seeds.json"
FIRST = 1_000_000
"""The tests have the lower ones."""
CHUNK = 100
CHUNKS_OF_A_PROCESS = 50

Soak = dict[str, Any]
"""The progress on one commit: its name, how many chunks are done, and the seeds that broke, each with its luck."""


def seeds_of(chunk: int) -> tuple[range, str | None]:
    """Seeds and luck of a chunk: of two, both have the same seeds."""
    first = FIRST + chunk // 2 * CHUNK
    return range(first, first + CHUNK), ANY if chunk % 2 else None


def live(chunk: int) -> Outcome:
    seeds, luck = seeds_of(chunk)
    return lived(seeds, None, luck)


class Soaks:
    def __init__(self, root: Path, commit: str) -> None:
        self._root = root
        file = root / JSON
        self.all: list[Soak] = json.loads(file.read_text()) if file.exists() else []
        if not self.all or self.all[-1]["commit"] != commit:
            self.all.append({"commit": commit, "chunks": 0, "broke": []})
        self.current = self.all[-1]

    def add(self, outcome: Outcome) -> None:
        self.current["chunks"] += 1
        self.current["broke"] += [each.rsplit("\n", 1)[-1].strip() for each in outcome.failures]
        (self._root / JSON).write_text(json.dumps(self.all, indent=1) + "\n")
        page = self._root / PAGE
        before, _, rest = page.read_text().partition(BEGIN)
        page.write_text("\n".join([f"{before}{BEGIN}", *lines(self.all), f"{END}{rest.partition(END)[2]}"]))


def lines(soaks: list[Soak]) -> Iterator[str]:
    yield "| commit | seeds, as drawn | seeds, every tilt in turn | broke |"
    yield "| --- | --- | --- | --- |"
    for soak in soaks:
        chunks = soak["chunks"]
        drawn, tilted = (chunks + 1) // 2 * CHUNK, chunks // 2 * CHUNK
        yield f"| {soak['commit']} | {drawn:,} | {tilted:,} | {len(soak['broke'])} |"


def commit() -> str:
    """The last that changed what is simulated. Exits where files of that were changed since."""
    if _git("status", "--porcelain"):
        sys.exit("what a soak documents is of a commit: commit what was changed, and run it again")
    return _git("log", "-1", "--format=%h") or "unknown"


def _git(*arguments: str) -> str:
    told = subprocess.run(["git", *arguments, "--", *SIMULATED], cwd=ROOT, capture_output=True, text=True)
    return told.stdout.strip()


def main() -> int:
    """1 if a seed of this commit has broken an invariant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=300_000, help="how many in all (default: 300000)")
    parser.add_argument("--jobs", type=int, default=2, help="how many processes (default: 2)")
    options = parser.parse_args()
    soaks = Soaks(ROOT, commit())
    chunks = range(soaks.current["chunks"], -(-options.seeds // CHUNK))
    with multiprocessing.get_context("fork").Pool(options.jobs, maxtasksperchild=CHUNKS_OF_A_PROCESS) as pool:
        for outcome in pool.imap(live, chunks):
            soaks.add(outcome)
            print(*outcome.failures, f"{soaks.current['chunks'] * CHUNK:,} seeds", sep="\n", flush=True)
    return 1 if soaks.current["broke"] else 0


if __name__ == "__main__":
    sys.exit(main())

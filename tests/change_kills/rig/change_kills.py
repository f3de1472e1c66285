"""Kills of pipelines that read the changes of two tables of PostgreSQL; `make changes-kills`.

    python tests/change_kills/run.py [--kills 300] [--seed 1] [--only 3] [--mutant lose]

Rounds of two dozen kills each, until there are enough; see `kill_rounds`. A round is a line of
`.change-kills/SEED.jsonl`, and one that is there is not run again. Exit code 1: a round was not clean, and was the
last. Its evidence is in `.change-kills/SEED-ROUND`.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from change_judge import MUTANTS
from kill_rounds import KINDS, Halted, Round, World

ROOT = Path(__file__).parents[3]


def played(world: World, seed: int, number: int, mutant: str, folder: Path) -> dict[str, Any]:
    """One round's result; what is wrong with it is in "wrong"."""
    round = Round(world, seed, number, lambda text: print(text, flush=True))
    wrong: list[str] = []
    halted = ""
    try:
        wrong = round.play(mutant)
    except Halted as halt:
        halted = str(halt)
    except Exception as error:  # whatever it is, the evidence is kept
        wrong = [f"{type(error).__name__}: {error}"]
    finally:
        if wrong:
            round.keep(folder / f"{seed}-{number}", wrong)
        round.close()
    return {"seed": seed, **round.result(), "halted": halted, "wrong": wrong}


def shown(results: list[dict[str, Any]]) -> str:
    kills: Counter[str] = sum((Counter(result["kills"]) for result in results), Counter())
    lines = [f"{kills[kind]:5} {text}" for kind, text in KINDS.items()]
    messages, bad = sum(result["messages"] for result in results), [r["round"] for r in results if r["wrong"]]
    pages = sum(result["phases"].get("pages", 0) for result in results)
    halted = sum(bool(result["halted"]) for result in results)
    return "\n".join([
        *lines,
        f"{sum(kills.values()):5} kills in {len(results)} rounds, {pages} of them while pages were read;"
        f" {messages:,} messages judged; {halted} rounds ended by a failover that had lost what was read",
        f"rounds that were not clean: {bad or 'none'}",
    ])  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300, help="how many in all, at least (default: 300)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="a round to run again, whatever is known of it")
    parser.add_argument("--mutant", choices=MUTANTS, default="", help="plant a fault into what the judge reads")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers and the runs end with it
    folder = ROOT / ".change-kills"
    folder.mkdir(exist_ok=True)
    file = folder / f"{options.seed}.jsonl"
    is_new = options.only is not None or options.mutant
    results = [] if is_new or not file.exists() else [json.loads(line) for line in file.read_text().splitlines()]

    def left() -> int:
        return int(options.kills) - sum(sum(result["kills"].values()) for result in results)

    world: World | None = None
    with tempfile.TemporaryDirectory(prefix="change-kills-") as scratch:
        try:
            while left() > 0:
                world = world or World(Path(tempfile.mkdtemp(dir=scratch)))
                number = len(results) if options.only is None else options.only
                result = played(world, options.seed, number, options.mutant, folder)
                results.append(result)
                if not is_new:
                    with file.open("a") as lines:
                        lines.write(json.dumps(result) + "\n")
                print(json.dumps({**result, "schedule": len(result["schedule"])}), flush=True)
                if is_new or result["wrong"]:
                    break
        finally:
            if world is not None:
                world.remove()
    print(shown(results))
    return 1 if any(result["wrong"] for result in results) else 0

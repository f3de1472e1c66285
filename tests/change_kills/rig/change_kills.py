"""Kills of pipelines that read the changes of two tables of PostgreSQL; `make changes-kills`.

    python tests/campaign.py changes-kills [--kills 300] [--seed 1] [--only 3] [--mutant lose]

Rounds of two dozen kills each, until there are enough; see `kill_rounds`. A round is a line of
`.change-kills/SEED.jsonl`, and one that is there, of the same commit of the product, is not run again. Exit code 1:
a round was not clean, and was the last. Its evidence is in `.change-kills/SEED-ROUND`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from change_judge import MUTANTS
from kept_rounds import Result, parser_of_rounds, play_rounds
from kill_rounds import KINDS, Round, World

ROOT = Path(__file__).parents[3]


def shown(results: list[Result]) -> str:
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


@contextmanager
def open_servers(folder: Path) -> Iterator[World]:
    world = World(folder)
    try:
        yield world
    finally:
        world.remove()


def main() -> int:
    parser = parser_of_rounds(__doc__, MUTANTS)
    parser.add_argument("--kills", type=int, default=300, help="how many in all, at least (default: 300)")
    options = parser.parse_args()

    def begin_round(world: World, number: int, evidence: Path) -> Round:
        return Round(world, evidence, options.seed, number)

    return play_rounds(
        options, ROOT / ".change-kills", open_servers, begin_round, variant=options.mutant,
        is_enough=lambda results: sum(sum(result["kills"].values()) for result in results) >= options.kills,
        shown=shown,
    )  # fmt: skip

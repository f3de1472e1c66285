"""Histories in the form of Jepsen's Kafka workload, of a pipeline that is killed; `make histories`.

    python tests/campaign.py histories [--rounds 10] [--seed 1] [--only 3] [--mutant lose] [--weaker at_least_once]

A round is a line of `.histories/SEED.jsonl`, and one that is there, of the same commit of the product, is not played
again; see `history_rounds`. Its history and verdict are in `.histories/SEED-ROUND`. Exit code 1: a round was not valid,
and was the last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from history_mutants import MUTANTS
from history_rounds import KINDS, WEAKER, HistoryRound
from kept_rounds import Result, parser_of_rounds, play_rounds

from exactlyonce.connectors.embedded.broker import EmbeddedBroker

ROOT = Path(__file__).parents[3]


def shown(results: list[Result]) -> str:
    faults: Counter[str] = sum((Counter(result["faults"]) for result in results), Counter())
    outcomes: Counter[str] = sum((Counter(result["outcomes"]) for result in results), Counter())
    operations, records = (sum(result[name] for result in results) for name in ("operations", "records"))
    bad = [result["round"] for result in results if result["wrong"]]
    return "\n".join([
        *(f"{faults[kind]:5} {text}" for kind, text in KINDS.items()),
        f"{sum(faults.values()):5} faults in {len(results)} rounds; {operations:,} operations"
        f" ({', '.join(f'{count:,} {outcome}' for outcome, count in sorted(outcomes.items()))}), {records:,} records",
        f"rounds that were not valid: {bad or 'none'}",
    ])  # fmt: skip


@contextmanager
def open_servers(folder: Path) -> Iterator[EmbeddedBroker]:
    broker = EmbeddedBroker(folder / "broker", port=0, lifetime="process")
    broker.start()
    try:
        yield broker
    finally:
        broker.kill()


def main() -> int:
    parser = parser_of_rounds(__doc__, MUTANTS)
    parser.add_argument("--rounds", type=int, default=10, help="how many in all (default: 10)")
    parser.add_argument("--weaker", choices=WEAKER, default="", help="promise less: the checker has to see it")
    options = parser.parse_args()

    def begin_round(broker: EmbeddedBroker, number: int, evidence: Path) -> HistoryRound:
        return HistoryRound(broker, evidence, options.seed, number, weaker=options.weaker)

    return play_rounds(
        options, ROOT / ".histories", open_servers, begin_round, variant=options.mutant or options.weaker,
        is_enough=lambda results: len(results) >= options.rounds, shown=shown,
    )  # fmt: skip

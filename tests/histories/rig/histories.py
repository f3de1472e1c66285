"""Histories in the form of Jepsen's Kafka workload, of a pipeline that is killed; `make histories`.

    python tests/histories/run.py [--rounds 10] [--seed 1] [--only 3] [--mutant lose] [--weaker at_least_once]

A round is a line of `.histories/SEED.jsonl`, and one that is there is not played again; see `history_rounds`. Its
history and verdict are in `.histories/SEED-ROUND`. Exit code 1: a round was not valid, and was the last.
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

from history_mutants import MUTANTS
from history_rounds import KINDS, WEAKER, HistoryRound

from exactlyonce.connectors.embedded.broker import EmbeddedBroker

ROOT = Path(__file__).parents[3]


def played(broker: EmbeddedBroker, scratch: Path, options: argparse.Namespace, number: int) -> dict[str, Any]:
    """One round's result; what is wrong with it is in "wrong"."""
    kind = options.mutant or options.weaker
    folder = ROOT / ".histories" / "-".join(filter(None, (str(options.seed), str(number), kind)))
    round = HistoryRound(
        broker, scratch, options.seed, number, lambda text: print(text, flush=True), weaker=options.weaker
    )
    wrong: list[str] = []
    verdict: dict[str, Any] = {}
    try:
        verdict = round.play(folder, options.mutant)
        wrong = [f"{name}: {found['count']}" for name, found in verdict["anomalies"].items()]
    except Exception as error:  # whatever it is, the evidence is kept
        wrong = [f"{type(error).__name__}: {error}"]
    finally:
        if wrong:
            round.keep(folder, wrong)
        round.close()
    counts = {name: verdict.get(name, 0) for name in ("operations", "records")}
    return {"seed": options.seed, **round.result(), **counts, "outcomes": verdict.get("outcomes", {}), "wrong": wrong}


def shown(results: list[dict[str, Any]]) -> str:
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="how many in all (default: 10)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="a round to play again, whatever is known of it")
    parser.add_argument("--mutant", choices=MUTANTS, default="", help="plant a fault into what the checker reads")
    parser.add_argument("--weaker", choices=WEAKER, default="", help="promise less: the checker has to see it")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the broker and the runs end with it
    folder = ROOT / ".histories"
    folder.mkdir(exist_ok=True)
    file = folder / f"{options.seed}.jsonl"
    is_new = options.only is not None or options.mutant or options.weaker
    results = [] if is_new or not file.exists() else [json.loads(line) for line in file.read_text().splitlines()]
    with tempfile.TemporaryDirectory(prefix="histories-") as scratch:
        broker: EmbeddedBroker | None = None
        try:
            while len(results) < options.rounds:
                if broker is None:
                    broker = EmbeddedBroker(Path(scratch, "broker"), port=0, lifetime="process")
                    broker.start()
                number = len(results) if options.only is None else options.only
                results.append(played(broker, Path(scratch), options, number))
                if not is_new:
                    with file.open("a") as lines:
                        lines.write(json.dumps(results[-1]) + "\n")
                print(json.dumps({**results[-1], "schedule": len(results[-1]["schedule"])}), flush=True)
                if is_new or results[-1]["wrong"]:
                    break
        finally:
            if broker is not None:
                broker.kill()
    print(shown(results))
    return 1 if any(result["wrong"] for result in results) else 0

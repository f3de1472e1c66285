"""A campaign's rounds of kills, each kept as a line of a file: an interrupted campaign goes on there.

A round counts for the commit of the product that it has played, as the crash matrix has it: other code begins anew.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from ending import end_on_signals, no_process_left
from evidence import product_commit
from killed_runs import KilledRuns

ROOT = Path(__file__).parents[2]
Result = dict[str, Any]
"""A round's line; "wrong" lists what is, "commit" is that of the product, with "-dirty" and of no count later if it was
not committed."""
Servers = TypeVar("Servers")


def parser_of_rounds(description: str | None, mutants: Iterable[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="a round to play again, whatever is known of it")
    parser.add_argument("--mutant", choices=[*mutants], default="", help="plant a fault into what is judged")
    return parser


def play_rounds(
    options: argparse.Namespace,
    folder: Path,
    open_servers: Callable[[Path], AbstractContextManager[Servers]],
    begin_round: Callable[[Servers, int, Path], KilledRuns],
    *,
    variant: str,
    is_enough: Callable[[list[Result]], bool],
    shown: Callable[[list[Result]], str],
) -> int:
    """Play rounds until there are enough, one is wrong, or a signal comes; print what is *shown*; the exit code.

    *options* are those of `parser_of_rounds`. *folder* has the rounds in SEED.jsonl, and their evidence in SEED-ROUND.
    *open_servers* takes a folder for the data of the servers, which all rounds share; *begin_round* takes them, the
    round's number and the folder of its evidence. With a *variant*, or `--only`, one round is played, and not kept.
    """
    end_on_signals()
    folder.mkdir(exist_ok=True)
    file = folder / f"{options.seed}.jsonl"
    is_kept = options.only is None and not variant
    commit = product_commit(ROOT)
    lines = file.read_text().splitlines() if is_kept and file.exists() and not commit.endswith("-dirty") else []
    results = [result for result in map(json.loads, lines) if result.get("commit") == commit]

    def play_on() -> None:
        with (
            tempfile.TemporaryDirectory(prefix=f"{folder.name.lstrip('.')}-") as scratch,
            no_process_left(),
            open_servers(Path(scratch)) as servers,
        ):
            while not is_enough(results):
                number = len(results) if options.only is None else options.only
                evidence = folder / "-".join(filter(None, (str(options.seed), str(number), variant)))
                results.append({"commit": commit, **begin_round(servers, number, evidence).played(options.mutant)})
                if is_kept:
                    with file.open("a") as kept:
                        kept.write(json.dumps(results[-1]) + "\n")
                print(json.dumps({**results[-1], "schedule": len(results[-1]["schedule"])}), flush=True)
                if not is_kept or results[-1]["wrong"]:
                    break

    was_interrupted = False
    try:
        if not is_enough(results):
            play_on()
    except KeyboardInterrupt:
        was_interrupted = True
        print("interrupted: the round is not kept, and the same command goes on with it", flush=True)
    print(shown(results))
    return 1 if was_interrupted or any(result["wrong"] for result in results) else 0

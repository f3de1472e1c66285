"""The simulator's command line: `make simulate SEEDS=1000`.

    python tests/simulation/simulate.py --seed 123              # replay, with its trace
    python tests/simulation/simulate.py --seeds 10000 --jobs 2  # soak
    python tests/simulation/simulate.py --seeds 10000 --jobs 2 --luck any  # of everything in turn: stores, loops, ...

It prints the pace, the number of events of each kind, and a failure's trace with the command that replays it.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from luck import LUCK
from topologies import (
    ANY_LOAD,
    ANY_STORE,
    JOIN_SHAPES,
    LOOP_SHAPES,
    NAMED_SHAPES,
    PAIR_SHAPES,
    SHAPES,
    TIMED_LOAD_SHAPES,
    WINDOW_SHAPES,
)
from watched import Broken
from world import replay_command, simulate

OBJECTS_BETWEEN_COLLECTIONS = 200_000
"""A world is full of cycles, and goes as a whole: to look for them more often only takes time."""
COLUMNS = 3
"""The columns of the table of events."""
SHOWN_MAX = 5
"""Failures that are shown whole."""
ANY = "any"
"""Instead of a luck: the seed says which, and with which topology."""


def shapes_of(luck: str) -> list[str | None]:
    """The topologies with which it means something; None: as drawn."""
    if "cycles" in luck:
        return [*LOOP_SHAPES]
    if "window" in luck:
        return [*WINDOW_SHAPES, *PAIR_SHAPES]
    if "joins" in luck:
        return [*JOIN_SHAPES]
    if LUCK[luck].load:
        return [ANY_LOAD, *TIMED_LOAD_SHAPES]
    return [ANY_STORE] if LUCK[luck].stores else [None]


KINDS: list[tuple[str | None, str | None]] = [
    (None, None), (ANY_STORE, None), ("stateless", "at least once"),
    *((shape, luck) for luck in LUCK for shape in shapes_of(luck)),
]  # fmt: skip
"""Topology and luck: what a seed alone draws is aligned, exactly once, without stores, loops or savepoints."""


def kind(seed: int, shape: str | None, luck: str | None) -> tuple[str | None, str | None]:
    return KINDS[seed % len(KINDS)] if luck == ANY else (shape, luck)


class Outcome(NamedTuple):
    seen: Counter[str]
    failures: list[str]
    cpu_s: float


def lived(seeds: Iterable[int], shape: str | None, luck: str | None) -> Outcome:
    seen: Counter[str] = Counter()
    failures: list[str] = []
    began_s = time.process_time()
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    for seed in seeds:
        kind_of = kind(seed, shape, luck)
        try:
            seen.update(simulate(seed, *kind_of).seen)
        except Broken as broken:
            failures.append("\n".join((*broken.trace, f"seed {seed}: {broken}")))
        except Exception:
            judged = f"seed {seed}: no invariant, but an error of the simulator, or of what it runs"
            failures.append(f"{traceback.format_exc()}{judged}\n  replay: {replay_command(seed, *kind_of)}")
    return Outcome(seen, failures, time.process_time() - began_s)


def main(arguments: list[str] | None = None) -> int:
    """1 if a seed breaks an invariant."""
    parser = argparse.ArgumentParser(description="Simulate a pipeline with everything that can go wrong.")
    parser.add_argument("--seed", type=int, help="replay one seed, with its trace")
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to run (default: 100)")
    parser.add_argument("--start", type=int, default=0, help="the first of them (default: 0)")
    parser.add_argument("--shape", choices=[*SHAPES, *NAMED_SHAPES, ANY_STORE, ANY_LOAD], help="one topology only")
    parser.add_argument(
        "--luck", choices=[*LUCK, ANY], help="one kind of fault above all; see luck.py; any: each in turn, by the seed"
    )
    parser.add_argument("--jobs", type=int, default=1, help="how many processes (default: 1)")
    parser.add_argument("--mutant", help="plant this defect first, where it shows; see mutants.py")
    options = parser.parse_args(arguments)
    if options.luck == ANY and (options.shape or options.mutant):
        parser.error("--luck any goes through all topologies, and plants nothing")
    if options.mutant is None:
        return _run(options)
    from mutants import MUTANTS, planted

    options.shape = options.shape or MUTANTS[options.mutant].shape
    options.luck = options.luck or MUTANTS[options.mutant].luck
    with planted(options.mutant):
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    if options.seed is not None:
        return _replay(options.seed, *kind(options.seed, options.shape, options.luck), _planted(options))
    seeds = range(options.start, options.start + options.seeds)
    began_s = time.monotonic()
    if options.jobs == 1:
        outcomes = [lived(seeds, options.shape, options.luck)]
    else:
        shares = [(seeds[i :: options.jobs], options.shape, options.luck) for i in range(options.jobs)]
        with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
            outcomes = pool.starmap(lived, shares)
    return _told(outcomes, len(seeds), time.monotonic() - began_s, _planted(options))


def _planted(options: argparse.Namespace) -> str:
    """The end of a command that replays a failure: the planted defect is no part of the history."""
    return f' MUTANT="{options.mutant}"' if options.mutant else ""


def _told(outcomes: list[Outcome], seeds: int, elapsed_s: float, planted: str) -> int:
    seen, failures = Counter[str](), [each for outcome in outcomes for each in outcome.failures]
    for outcome in outcomes:
        seen.update(outcome.seen)
    for failure in failures[:SHOWN_MAX]:
        print(failure + planted)
    cpu_s = sum(outcome.cpu_s for outcome in outcomes)
    incarnations = seen["incarnation"]
    print("met, and how often:", *_in_columns(seen), sep="\n")
    print(
        f"{incarnations} incarnations of {seeds} seeds in {elapsed_s:.0f} s: "
        f"{incarnations / max(elapsed_s, 1e-3) * 60:,.0f} a minute, "
        f"{incarnations / max(cpu_s, 1e-3) * 60:,.0f} a minute of one core"
    )
    if failures:
        print(f"{len(failures)} seeds of {seeds} broke; replay one: " + failures[0].rsplit("replay: ", 1)[-1] + planted)
        return 1
    print(f"{seeds} seeds, all invariants hold")
    return 0


def _in_columns(seen: Counter[str]) -> list[str]:
    cells = [f"{count:>11,}  {name:<25}" for name, count in sorted(seen.items())]
    rows = -(-len(cells) // COLUMNS)
    return ["".join(cells[row::rows]).rstrip() for row in range(rows)]


def _replay(seed: int, shape: str | None, luck: str | None, planted: str) -> int:
    try:
        world = simulate(seed, shape, luck)
    except Broken as broken:
        print("\n".join(broken.trace))
        traceback.print_exception(broken.__cause__, limit=-3)
        print(f"seed {seed}: {broken}{planted}")
        return 1
    print("\n".join(world.trace))
    print(f"seed {seed}, topology {world.topology.name}, parallelism {world.plan.parallelism}: all invariants hold")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Figures of the RocksDB tier alone, without Kafka: `python benchmarks/tiered_micro.py [KEYS] [BUDGET_MB] [FOLDER]`.

The state is the profile of `large-state`. Prints, for each step, the CPU time of a key in this thread, and in the other
threads (RocksDB's flushes and compactions); wall time is marked as such. Blocks are in memory.
"""

from __future__ import annotations

import gc
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarked import Profile
from state_micro import batches, fetch, write

from exactlyonce.pipeline.keys import canonical_key
from exactlyonce.state.backend import CheckpointedState
from exactlyonce.state.rocksdb.backend import RocksDBBackend

GROUPS = 128
CHANGED = 25_000
"""Keys by checkpoint, as in one of two workers at 50,000 a second."""


def add(profile: Profile | None, amount: int) -> tuple[Profile, int]:
    """The user's function."""
    profile = profile or Profile(0, 0, f"c0000000, Street of the Long Names {amount % 997}, {amount:08d}")
    profile = Profile(profile.sum + amount, profile.orders + 1, profile.address)
    return profile, profile.sum


@contextmanager
def measured(title: str, count: int) -> Iterator[None]:
    """Print the time of the block, for each of *count* keys."""
    thread, process, wall = time.thread_time(), time.process_time(), time.monotonic()
    yield
    own = time.thread_time() - thread
    others = time.process_time() - process - own
    print(
        f"{title}: {own / count * 1e6:.2f} us a key, other threads {others / count * 1e6:.2f} us, wall "
        f"{time.monotonic() - wall:.1f} s; resident {_status('VmRSS'):.0f} MB, at most {_status('VmHWM'):.0f} MB",
        flush=True,
    )


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1000


def apply(table: Any, keys: Sequence[bytes]) -> None:
    """Apply all of *keys*, in batches."""
    for batch in batches(list(keys)):
        table.apply(add, batch, range(len(batch)))


def main() -> None:
    """Measure and print."""
    gc.disable()
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    budget = int(sys.argv[2]) << 20 if len(sys.argv) > 2 else 256 << 20
    with tempfile.TemporaryDirectory(dir=sys.argv[3] if len(sys.argv) > 3 else None) as folder:
        _steps(count, budget, Path(folder))


def _key(number: int) -> bytes:
    return canonical_key(f"c{number:07}")


def _profiles(**of: Any) -> CheckpointedState:
    return CheckpointedState(operator="profiles", type=Profile, groups=range(GROUPS), max_parallelism=GROUPS, **of)


def _steps(count: int, budget: int, folder: Path) -> None:
    dice = random.Random(1)
    backend = RocksDBBackend(folder / "a", budget)
    table: Any = _profiles().table(backend)
    checkpoint, index = 0, tuple[bytes, ...]()
    with measured(f"{count:,} new keys, a checkpoint each 100,000", count):
        for first in range(0, count, 100_000):
            apply(table, [_key(number) for number in range(first, min(count, first + 100_000))])
            checkpoint += 1
            index = write(table.freeze(checkpoint, checkpoint - 1))[3]
    some = count // 5
    for title, numbers in (
        ("zipf", [int(count ** dice.random()) * 2_654_435_761 % count for _ in range(some)]),
        ("uniform", dice.choices(range(count), k=some)),
    ):
        with measured(f"{some:,} {title} keys, apply", some):
            apply(table, [_key(number) for number in numbers])
        checkpoint += 1
        snapshot = table.freeze(checkpoint, checkpoint - 1)
        with measured(f"{some:,} {title} keys, snapshot", some):
            index = write(snapshot)[3]
    rounds = 20
    longest: list[float] = []
    for _ in range(rounds):
        checkpoint += 1
        apply(table, [_key(number) for number in dice.choices(range(count), k=CHANGED)])
        began = time.thread_time()
        index = write(table.freeze(checkpoint, checkpoint - 1))[3]
        longest.append(time.thread_time() - began)
    longest.sort()
    figures = f"median {longest[rounds // 2] * 1e3:.0f} ms of CPU, at most {longest[-1] * 1e3:.0f} ms"
    print(f"snapshots of {CHANGED:,} uniform keys, with images: {figures}")
    backend = RocksDBBackend(folder / "b", budget)
    again: Any = _profiles(checkpoint=checkpoint, indexes=index, fetch=fetch).table(backend)
    with measured(f"restore, {len(again._groups._stored.chain.blocks)} blocks", count):
        while again.fetch():
            pass


if __name__ == "__main__":
    main()

"""Figures of keyed state alone, without Kafka: `python benchmarks/state_micro.py [KEYS]`.

Prints the cost of a running total per record, beside a loop on one dict, and of snapshots and a restore of KEYS
(1,000,000) integer states. Times are of this thread's CPU, so that other processes do not count; the cyclic garbage
collector is off, since its pauses would hide those of the snapshots.
"""

from __future__ import annotations

import gc
import hashlib
import random
import sys
from collections.abc import Iterable, Iterator
from statistics import mean, median
from time import thread_time as clock

from exactlyonce.checkpoint.records.manifest import BlockRef
from exactlyonce.pipeline.keys import canonical_key
from exactlyonce.state.backend import CheckpointedState, Table, TableSnapshot
from exactlyonce.state.blocks import EncodedBlock
from exactlyonce.state.hash_map import HashMapBackend, KeyedTable
from exactlyonce.state.stored import StoredState

GROUPS = 128
BATCH = 1_000
AMOUNTS = random.Random(1).choices(range(1, 10_000), k=BATCH)
bodies: dict[BlockRef, bytes] = {}


def add(total: int | None, amount: int) -> tuple[int, int]:
    """The user's function."""
    total = (total or 0) + amount
    return total, total


def batches(keys: list[bytes]) -> Iterator[list[bytes]]:
    """Batches, as of a source."""
    return (keys[start : start + BATCH] for start in range(0, len(keys), BATCH))


def by_table(table: Table[int], keys: list[bytes]) -> tuple[float, float]:
    """Seconds in all, and in the longest batch."""
    longest, started = 0.0, clock()
    for batch in batches(keys):
        begun = clock()
        table.apply(add, batch, AMOUNTS[: len(batch)])
        longest = max(longest, clock() - begun)
    return clock() - started, longest


def by_hand(totals: dict[bytes, int], keys: list[bytes]) -> float:
    """Seconds of the same on one dict."""
    started = clock()
    for batch in batches(keys):
        outputs = []
        for key, amount in zip(batch, AMOUNTS[: len(batch)], strict=True):
            totals[key], output = add(totals.get(key), amount)
            outputs.append(output)
    return clock() - started


def write(snapshot: TableSnapshot) -> tuple[int, float, float, tuple[bytes, ...]]:
    """Bytes written, seconds in all, seconds in the longest slice, and the index."""
    refs: list[BlockRef] = []
    longest, started, steps, end = 0.0, clock(), snapshot.encode(), object()
    while True:
        begun = clock()
        block = next(steps, end)
        longest = max(longest, clock() - begun)
        if block is end:
            break
        if isinstance(block, EncodedBlock):
            key = f"block/1/{snapshot.checkpoint}/totals/{block.group}/{len(refs)}/1-{random.getrandbits(32):08x}"
            ref = BlockRef(1, len(bodies), key, len(block.body), hashlib.sha256(block.body).digest())
            refs.append(ref)
            bodies[ref] = block.body
    begun = clock()
    index = snapshot.seal(refs)
    longest = max(longest, clock() - begun)
    return sum(ref.size for ref in refs) + sum(map(len, index)), clock() - started, longest, index


def fetch(refs: Iterable[BlockRef]) -> Iterator[tuple[BlockRef, bytes]]:
    """Blocks that were written."""
    return ((ref, bodies[ref]) for ref in refs)


def main() -> None:
    """Measure and print."""
    gc.disable()
    random.seed(1)
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    keys = [canonical_key(f"customer-{number:07}") for number in range(count)]
    random.shuffle(keys)

    hot = random.choices(keys[:1_000], k=400_000)
    table: Table[int] = KeyedTable(
        StoredState(operator="totals", type=int, groups=range(GROUPS), max_parallelism=GROUPS)
    )
    ours, hand = min(by_table(table, hot)[0] for _ in range(3)), min(by_hand({}, hot) for _ in range(3))
    print(f"apply, 1,000 keys: {ours / len(hot) * 1e9:.0f} ns a record; on a dict {hand / len(hot) * 1e9:.0f} ns")

    table = KeyedTable(StoredState(operator="totals", type=int, groups=range(GROUPS), max_parallelism=GROUPS))
    seconds, longest = by_table(table, keys)
    print(f"apply, {count:,} new keys at once: {seconds / count * 1e9:.0f} ns; longest batch {longest * 1e3:.1f} ms")
    begun = clock()
    snapshot = table.freeze(1, 0)
    print(f"freeze, {count:,} keys changed: {(clock() - begun) * 1e3:.3f} ms")
    full, seconds, longest, _ = write(snapshot)
    print(f"full: {full:,} bytes, {count / seconds:,.0f} keys/s, longest slice {longest * 1e3:.1f} ms")

    sizes, durations, slices = [], [], []
    index: tuple[bytes, ...] = ()
    for checkpoint in range(2, 402):
        by_table(table, random.sample(keys, count // 100))
        snapshot = table.freeze(checkpoint, checkpoint - 1)
        size, seconds, longest, index = write(snapshot)
        sizes.append(size / full)
        durations.append(seconds)
        slices.append(longest)
    print(
        f"1 % changed, 400 checkpoints, merging included: {mean(sizes):.2%} of the full bytes on average,"
        f" {max(sizes):.2%} at most; {median(durations) * 1e3:.1f} ms, longest slice {max(slices) * 1e3:.1f} ms;"
        f" chain of {len(snapshot.chain.blocks)} blocks, {snapshot.chain.size / full:.1f} times the full bytes"
    )

    begun = clock()
    stored = CheckpointedState(
        operator="totals", type=int, groups=range(GROUPS), max_parallelism=GROUPS, checkpoint=401, indexes=index,
        fetch=fetch,
    )  # fmt: skip
    table = stored.table(HashMapBackend())
    print(f"restore from this chain: {clock() - begun:.2f} s")

    totals = dict(table.items())
    ours = hand = encoding = 0.0
    for checkpoint in range(402, 412):
        uniform = random.choices(keys, k=count // 10)
        hand += by_hand(totals, uniform)
        ours += by_table(table, uniform)[0]
        _, seconds, longest, _ = write(table.freeze(checkpoint, checkpoint - 1))
        encoding += seconds
    print(
        f"10 % changed, uniform: apply {ours / count * 1e9:.0f} ns a record, on a dict {hand / count * 1e9:.0f} ns;"
        f" snapshots {encoding / count * 1e9:.0f} ns a record"
    )


if __name__ == "__main__":
    main()

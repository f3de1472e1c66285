"""A process that applies committables to a stream until it is killed: python redis_applier.py URL, as a leader would.

It begins as every leader does: raises the incarnation, reads the ledger, goes on behind it.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from redis_rows import Total, chunks_of, entry, store_of

from exactlyonce.pipeline.errors import StoreUnavailable

CHECKPOINTS = 60
SUBTASKS = 2
ROWS = 40


def rows_of(checkpoint: int, subtask: int) -> list[Total]:
    return [Total(f"{subtask}", checkpoint * 1_000 + number) for number in range(ROWS)]


def run(url: str, incarnation: int) -> None:
    store = store_of(url, kind="stream", key=lambda total: f"totals-{total.customer}", part_rows=25)
    held = dict(store.fence("shop", "totals", incarnation, "t"))
    for checkpoint in range(1, CHECKPOINTS + 1):
        for subtask in range(SUBTASKS):
            if held.get(subtask, 0) < checkpoint:
                chunks = chunks_of(store, rows_of(checkpoint, subtask), 9)
                store.apply(chunks, entry(checkpoint, subtask=subtask, incarnation=incarnation))


if __name__ == "__main__":
    try:
        run(sys.argv[1], int(sys.argv[2]))
    except StoreUnavailable as error:
        sys.exit(f"unavailable: {error}")

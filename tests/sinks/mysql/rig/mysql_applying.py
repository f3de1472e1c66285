"""A process that applies all checkpoints of all subtasks, from where the ledger is; killed and started again by a test.

    python mysql_applying.py DSN INCARNATION

It ends with 0 when all is applied, and with `Fenced.exit_code` when a newer one has taken over.
"""

from __future__ import annotations

import sys
import time

import msgspec

from exactlyonce.pipeline.errors import Fenced, StoreUnavailable
from exactlyonce.sinks.mysql.sink import MySQLSink
from exactlyonce.sinks.write_ahead.store import LedgerEntry, Store

CHECKPOINTS = 80
SUBTASKS = 3
ROWS = 30
PAUSE_S = 0.02


class Applied(msgspec.Struct):
    subtask: int
    checkpoint: int
    row: int


def store_for(dsn: str) -> Store:
    return MySQLSink[Applied]("applied", dsn=dsn, create=True).store(Applied)


def chunks(store: Store, subtask: int, checkpoint: int) -> list[bytes]:
    """The rows of a checkpoint, in three chunks."""
    rows = store.encoder().encode([Applied(subtask, checkpoint, row) for row in range(ROWS)])
    third = ROWS // 3
    return [b"".join(rows[at : at + third]) for at in range(0, ROWS, third)]


def apply_all(store: Store, incarnation: int) -> None:
    """From the ledger on, in order of the checkpoints."""
    store.check()
    ledger = store.fence("p", "s", incarnation, "origin")
    for checkpoint in range(min(ledger.get(subtask, 0) for subtask in range(SUBTASKS)) + 1, CHECKPOINTS + 1):
        for subtask in range(SUBTASKS):
            entry = LedgerEntry(
                pipeline="p",
                sink="s",
                subtask=subtask,
                checkpoint=checkpoint,
                previous=checkpoint - 1,
                incarnation=incarnation,
                origin="origin",
            )
            store.apply(chunks(store, subtask, checkpoint), entry)


def main(dsn: str, incarnation: int) -> int:
    store = store_for(dsn)
    while True:
        try:
            apply_all(store, incarnation)
            return 0
        except StoreUnavailable:
            time.sleep(PAUSE_S)
        except Fenced as error:
            return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))

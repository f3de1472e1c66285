"""A process that applies all checkpoints of all subtasks, from where the ledger is; killed and started again by a test.

    APPLIED_AT=DSN python applying.py STORE INCARNATION CHECKPOINTS

It prints when it has fenced; its exit code is 0 once all is applied, `Fenced.exit_code` if a newer one took over.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import msgspec

from exactlyonce.pipeline.errors import Fenced, StoreUnavailable
from exactlyonce.sinks import MySQLSink, PostgresSink, RedisSink
from exactlyonce.sinks.ledger import LedgerEntry
from exactlyonce.sinks.write_ahead.store import Store

SUBTASKS = 3
ROWS = 20
PAUSE_S = 0.02


class Applied(msgspec.Struct):
    subtask: int
    checkpoint: int
    number: int


def store_of(store: str) -> Store:
    if store == "redis":
        key = "applied-{}".format
        redis = RedisSink[Applied]("env:APPLIED_AT", kind="stream", key=lambda row: key(row.subtask), part_rows=7)
        return redis.store(Applied)
    name, _, mode = store.partition("-")
    options: dict[str, Any] = {"mode": "upsert", "key": ("subtask", "checkpoint", "number")} if mode else {}
    if name == "mariadb":
        return MySQLSink[Applied]("applied", dsn="env:APPLIED_AT", create=True, **options).store(Applied)
    from exactlyonce.connectors.postgres.connection import Limits
    from exactlyonce.sinks.postgres.store import PostgresStore

    sink = PostgresSink[Applied]("applied", dsn="env:APPLIED_AT", create=True, **options)
    return PostgresStore(sink, Applied, Limits(connect=5, answer=10, lock=2, grace=0.3))


def apply_all(store: Store, incarnation: int, checkpoints: int) -> None:
    store.check()
    ledger = store.fence("p", "s", incarnation, "origin")
    print("fenced", flush=True)
    encoder = store.encoder()
    for checkpoint in range(min(ledger.get(subtask, 0) for subtask in range(SUBTASKS)) + 1, checkpoints + 1):
        for subtask in range(SUBTASKS):
            rows = encoder.encode([Applied(subtask, checkpoint, number) for number in range(ROWS)])
            entry = LedgerEntry(
                pipeline="p", sink="s", subtask=subtask, checkpoint=checkpoint, previous=checkpoint - 1,
                incarnation=incarnation, origin="origin",
            )  # fmt: skip
            store.apply([b"".join(rows[at : at + 8]) for at in range(0, ROWS, 8)], entry)


def main(name: str, incarnation: int, checkpoints: int) -> int:
    store = store_of(name)
    while True:
        try:
            apply_all(store, incarnation, checkpoints)
            return 0
        except StoreUnavailable:
            time.sleep(PAUSE_S)
        except Fenced as error:
            return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))

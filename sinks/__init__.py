"""Sinks, one folder or module per store: `kafka/`, `files/`, `mysql/`, `postgres/`, `redis/`, and one that prints.

`writer` and `committer` are the seams to engines; `refusals` has the words for what stores refuse. What stores with a
ledger share is in `write_ahead/` (rows that wait in the checkpoint topic), `prepared/` (rows that wait in the store)
and `sql/` (tables of any database).

May import `connectors`, `state`, `checkpoint` and `pipeline`; knows no engine. Each name is imported when it is asked
for: a process starts with the sinks of its pipeline alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exactlyonce.sinks.files.sink import FileSink
    from exactlyonce.sinks.kafka.sink import KafkaSink
    from exactlyonce.sinks.mysql.sink import MySQLSink
    from exactlyonce.sinks.postgres.sink import PostgresSink
    from exactlyonce.sinks.print_sink import PrintSink
    from exactlyonce.sinks.redis.sink import RedisSink
    from exactlyonce.sinks.write_ahead.sink import WriteAheadSink
    from exactlyonce.sinks.write_ahead.store import (
        ForeignLedger,
        LedgerBehind,
        LedgerEntry,
        RowEncoder,
        SinkLedger,
        Store,
    )

__all__ = [
    "FileSink",
    "ForeignLedger",
    "KafkaSink",
    "LedgerBehind",
    "LedgerEntry",
    "MySQLSink",
    "PostgresSink",
    "PrintSink",
    "RedisSink",
    "RowEncoder",
    "SinkLedger",
    "Store",
    "WriteAheadSink",
]

_MODULES = {
    "FileSink": "files.sink",
    "ForeignLedger": "write_ahead.store",
    "KafkaSink": "kafka.sink",
    "LedgerBehind": "write_ahead.store",
    "LedgerEntry": "write_ahead.store",
    "MySQLSink": "mysql.sink",
    "PostgresSink": "postgres.sink",
    "PrintSink": "print_sink",
    "RedisSink": "redis.sink",
    "RowEncoder": "write_ahead.store",
    "SinkLedger": "write_ahead.store",
    "Store": "write_ahead.store",
    "WriteAheadSink": "write_ahead.sink",
}

if not TYPE_CHECKING:  # a checker of types would take any name for one of these

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return found

"""Sinks, one folder or module per store: `kafka/`, `files/`, `mysql/`, `postgres/`, `redis/`, and one that prints.

`writer` and `committer` are the seams to engines. What stores with a ledger share is in `write_ahead/` (rows that wait
in the checkpoint topic), `prepared/` (rows that wait in the store) and `sql/` (fields and columns).

May import `connectors`, `state`, `checkpoint` and `pipeline`; knows no engine.
"""

from exactlyonce.sinks.files.sink import FileSink
from exactlyonce.sinks.kafka.sink import KafkaSink
from exactlyonce.sinks.mysql.sink import MySQLSink
from exactlyonce.sinks.postgres.sink import PostgresSink
from exactlyonce.sinks.print_sink import PrintSink
from exactlyonce.sinks.redis.sink import RedisSink
from exactlyonce.sinks.write_ahead.ledger import SinkLedger
from exactlyonce.sinks.write_ahead.sink import WriteAheadSink
from exactlyonce.sinks.write_ahead.store import ForeignLedger, LedgerBehind, LedgerEntry, RowEncoder, Store

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

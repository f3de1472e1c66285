"""Sinks, one folder or module per store: `kafka/`, `delta/`, `duckdb/`, `files/`, `http/`, `iceberg/`, `mysql/`,
`postgres/`, `redis/`, and one that prints.

`writer` and `committer` are the seams to engines; `ledger` has the rules of every store's ledger. Stores share
`write_ahead/` (rows wait in the checkpoint topic), `sql/` (tables of any database) and `lake/` (tables of files).

May import `connectors`, `state`, `checkpoint` and `pipeline`; knows no engine. Each name is imported on first use: a
process starts with the sinks of its pipeline alone.
"""

from typing import TYPE_CHECKING

from exactlyonce.pipeline.first_use import on_first_use
from exactlyonce.pipeline.sink import Sink

if TYPE_CHECKING:
    from exactlyonce.sinks.committer import CommitsBySubtask, Committer, CommitterContext
    from exactlyonce.sinks.delta.sink import DeltaSink
    from exactlyonce.sinks.duckdb.sink import DuckDBSink
    from exactlyonce.sinks.files.sink import FileSink
    from exactlyonce.sinks.http.sink import HttpSink
    from exactlyonce.sinks.iceberg.sink import IcebergSink
    from exactlyonce.sinks.kafka.sink import KafkaSink
    from exactlyonce.sinks.ledger import ForeignLedger, LedgerBehind, LedgerEntry, SinkLedger
    from exactlyonce.sinks.mysql.sink import MySQLSink
    from exactlyonce.sinks.postgres.sink import PostgresSink
    from exactlyonce.sinks.print_sink import PrintSink
    from exactlyonce.sinks.redis.sink import RedisSink
    from exactlyonce.sinks.write_ahead.sink import WriteAheadSink
    from exactlyonce.sinks.write_ahead.store import RowEncoder, Store
    from exactlyonce.sinks.writer import Opened, SinkWriter, WriterContext

__all__ = [
    "CommitsBySubtask",
    "Committer",
    "CommitterContext",
    "DeltaSink",
    "DuckDBSink",
    "FileSink",
    "ForeignLedger",
    "HttpSink",
    "IcebergSink",
    "KafkaSink",
    "LedgerBehind",
    "LedgerEntry",
    "MySQLSink",
    "Opened",
    "PostgresSink",
    "PrintSink",
    "RedisSink",
    "RowEncoder",
    "Sink",
    "SinkLedger",
    "SinkWriter",
    "Store",
    "WriteAheadSink",
    "WriterContext",
]

_MODULES = {
    "Committer": "committer",
    "CommitterContext": "committer",
    "CommitsBySubtask": "committer",
    "DeltaSink": "delta.sink",
    "DuckDBSink": "duckdb.sink",
    "FileSink": "files.sink",
    "ForeignLedger": "ledger",
    "HttpSink": "http.sink",
    "IcebergSink": "iceberg.sink",
    "KafkaSink": "kafka.sink",
    "LedgerBehind": "ledger",
    "LedgerEntry": "ledger",
    "MySQLSink": "mysql.sink",
    "Opened": "writer",
    "PostgresSink": "postgres.sink",
    "PrintSink": "print_sink",
    "RedisSink": "redis.sink",
    "RowEncoder": "write_ahead.store",
    "SinkLedger": "ledger",
    "SinkWriter": "writer",
    "Store": "write_ahead.store",
    "WriteAheadSink": "write_ahead.sink",
    "WriterContext": "writer",
}

STORES = {
    "postgres": "PostgresSink",
    "mysql": "MySQLSink",
    "mariadb": "MySQLSink",
    "redis": "RedisSink",
    "files": "FileSink",
    "delta": "DeltaSink",
    "duckdb": "DuckDBSink",
    "iceberg": "IcebergSink",
}
"""The stores beside Kafka, by the names that options give them; other packages announce theirs as entry points."""

if not TYPE_CHECKING:  # else mypy would accept any name
    __getattr__ = on_first_use(globals(), __name__, _MODULES)

"""Connections to the outside: sources, Kafka, and the storages of blocks.

`source` is the seam of a source, `splits` reads those that are no topics: `files/`, `tables`, `changes` of tables,
`generated`. `postgres/` and `mysql/` have the tables of a database, their changes, and its connection, also for sinks.
`kafka/` asks a cluster, `registry/` a schema registry, `embedded/` starts a broker. `filestore/` is a place with
files; `block_files` keeps blocks there. Of these folders `kafka/` imports `registry/`, and `files/` imports
`filestore/`. `refusals` has the error texts of stores. `confluent` makes all clients of confluent-kafka for brokers,
`trace` times the requests of a decision. May import `state`, `checkpoint` and `pipeline`. Each name is imported on
first use: a process starts with the sources of its pipeline alone.
"""

from typing import TYPE_CHECKING

from exactlyonce.pipeline.first_use import on_first_use

if TYPE_CHECKING:
    from exactlyonce.checkpoint.records.manifest import SourceOffset
    from exactlyonce.connectors.files.source import FileSource
    from exactlyonce.connectors.generated import GeneratorSource, IterableSource
    from exactlyonce.connectors.kafka.source import Cluster, KafkaSource
    from exactlyonce.connectors.mysql.changes import MySQLChanges
    from exactlyonce.connectors.mysql.table_source import MySQLTableSource
    from exactlyonce.connectors.postgres.changes import PostgresChanges, PostgresMessages, PostgresTransactions
    from exactlyonce.connectors.postgres.table_source import PostgresTableSource
    from exactlyonce.connectors.source import RangeContext, ReaderContext, RecordDecoder, SourceReader, SplitReader
    from exactlyonce.connectors.splits import OpenSplit, SplitDecoder, SplitSource, require_reached
    from exactlyonce.pipeline.source import Source

__all__ = [
    "Cluster",
    "FileSource",
    "GeneratorSource",
    "IterableSource",
    "KafkaSource",
    "MySQLChanges",
    "MySQLTableSource",
    "OpenSplit",
    "PostgresChanges",
    "PostgresMessages",
    "PostgresTableSource",
    "PostgresTransactions",
    "RangeContext",
    "ReaderContext",
    "RecordDecoder",
    "Source",
    "SourceOffset",
    "SourceReader",
    "SplitDecoder",
    "SplitReader",
    "SplitSource",
    "require_reached",
]

_MODULES = {
    "Cluster": "connectors.kafka.source",
    "FileSource": "connectors.files.source",
    "GeneratorSource": "connectors.generated",
    "IterableSource": "connectors.generated",
    "KafkaSource": "connectors.kafka.source",
    "MySQLChanges": "connectors.mysql.changes",
    "MySQLTableSource": "connectors.mysql.table_source",
    "OpenSplit": "connectors.splits",
    "PostgresChanges": "connectors.postgres.changes",
    "PostgresMessages": "connectors.postgres.changes",
    "PostgresTableSource": "connectors.postgres.table_source",
    "PostgresTransactions": "connectors.postgres.changes",
    "RangeContext": "connectors.source",
    "ReaderContext": "connectors.source",
    "RecordDecoder": "connectors.source",
    "Source": "pipeline.source",
    "SourceOffset": "checkpoint.records.manifest",
    "SourceReader": "connectors.source",
    "SplitDecoder": "connectors.splits",
    "SplitReader": "connectors.source",
    "SplitSource": "connectors.splits",
    "require_reached": "connectors.splits",
}

if not TYPE_CHECKING:  # else mypy would accept any name
    __getattr__ = on_first_use(globals(), "exactlyonce", _MODULES)

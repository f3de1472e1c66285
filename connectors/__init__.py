"""Connections to the outside: sources, Kafka, and the storages of blocks.

`source` is the seam of a source, `splits` reads those that are no topics: `files/` and `generated`. `kafka/` asks a
cluster, `registry/` a schema registry, `embedded/` starts a broker, `blocks/` keeps blocks as files. Of these folders
`kafka/` imports `registry/`, and `files/` imports `blocks/`. `confluent` makes all clients of confluent-kafka for
brokers. May import `state`, `checkpoint` and `pipeline`.
"""

from exactlyonce.connectors.files.source import FileSource
from exactlyonce.connectors.generated import GeneratorSource, IterableSource
from exactlyonce.connectors.kafka.source import KafkaSource

__all__ = ["FileSource", "GeneratorSource", "IterableSource", "KafkaSource"]

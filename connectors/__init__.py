"""Connections to the outside: sources, Kafka, and the storages of blocks.

`source` is the seam of a source, `kafka/` asks a cluster, `embedded/` starts a broker, `blocks/` keeps blocks as files;
the three folders do not import each other. `confluent` makes all clients of confluent-kafka. May import `state`,
`checkpoint` and `pipeline`.
"""

from exactlyonce.connectors.kafka.source import KafkaSource

__all__ = ["KafkaSource"]

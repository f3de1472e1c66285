"""Sources, and all that talks to Kafka: `kafka/` asks a cluster, `embedded/` starts a broker; `source` is the seam.

May import `state`, `checkpoint` and `pipeline`; the two folders do not know each other.
"""

from exactlyonce.connectors.kafka.source import KafkaSource

__all__ = ["KafkaSource"]

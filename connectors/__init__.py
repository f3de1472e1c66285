"""Where pipelines read from, and all that talks to Kafka."""

from exactlyonce.connectors.kafka.source import KafkaSource

__all__ = ["KafkaSource"]

"""Sinks, one folder or module per store: `kafka/`, `redis/`, and one that prints.

What stores with a ledger share is in `write_ahead/`.

May import `connectors`, `state`, `checkpoint` and `pipeline`; knows no engine.
"""

from exactlyonce.sinks.kafka.sink import KafkaSink
from exactlyonce.sinks.print_sink import PrintSink
from exactlyonce.sinks.redis.sink import RedisSink

__all__ = ["KafkaSink", "PrintSink", "RedisSink"]

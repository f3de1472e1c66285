"""Sinks, one folder or module per store: `kafka/`, one that prints; `write_ahead/` is what stores with a ledger share.

May import `connectors`, `state`, `checkpoint` and `pipeline`; knows no engine.
"""

from exactlyonce.sinks.kafka.sink import KafkaSink
from exactlyonce.sinks.print_sink import PrintSink

__all__ = ["KafkaSink", "PrintSink"]

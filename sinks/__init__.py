"""Sinks, one folder or module per store: `kafka/`, one that prints; `write_ahead/` is what stores with a ledger share.

What stores share is in `write_ahead/` (rows that wait in the checkpoint topic) and `sql/` (fields and columns).

May import `connectors`, `state`, `checkpoint` and `pipeline`; knows no engine.
"""

from exactlyonce.sinks.kafka.sink import KafkaSink
from exactlyonce.sinks.print_sink import PrintSink

__all__ = ["KafkaSink", "PrintSink"]

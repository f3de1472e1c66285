"""Sinks, one folder or module per store: `kafka/`, `files/`, one that prints.

What stores share is in `write_ahead/` (rows that wait in the checkpoint topic) and `sql/` (fields and columns).

May import `connectors`, `state`, `checkpoint` and `pipeline`; knows no engine.
"""

from exactlyonce.sinks.files.sink import FileSink
from exactlyonce.sinks.kafka.sink import KafkaSink
from exactlyonce.sinks.print_sink import PrintSink

__all__ = ["FileSink", "KafkaSink", "PrintSink"]

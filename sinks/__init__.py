"""Where pipelines write to."""

from exactlyonce.sinks.kafka.sink import KafkaSink
from exactlyonce.sinks.print_sink import PrintSink

__all__ = ["KafkaSink", "PrintSink"]

"""Where pipelines write to."""

from exactlyonce.sinks.kafka_sink import KafkaSink
from exactlyonce.sinks.print_sink import PrintSink

__all__ = ["KafkaSink", "PrintSink"]

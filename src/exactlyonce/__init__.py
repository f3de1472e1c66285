"""Exactly-once pipelines from Kafka to Kafka, in Python."""

from typing import TYPE_CHECKING, Any

import exactlyonce.engines.stop_signals  # noqa: F401 - first, for signals that come during the other imports
from exactlyonce.pipeline.aggregates import (
    Aggregate,
    Count,
    CountDistinct,
    First,
    Last,
    Max,
    Mean,
    Min,
    Percentiles,
    Sum,
    TopN,
)
from exactlyonce.pipeline.avro import AvroCodec
from exactlyonce.pipeline.codec import BytesCodec, Codec, JsonCodec, StrCodec
from exactlyonce.pipeline.context import Context, Operator
from exactlyonce.pipeline.enrich import Enriched
from exactlyonce.pipeline.errors import (
    BrokerUnavailable,
    ConfigError,
    ExactlyOnceError,
    Fenced,
    GraphError,
    Halt,
    InvariantViolation,
    RecordError,
    StoreError,
    StoreUnavailable,
    TopicError,
    Unavailable,
    Undetermined,
    UserError,
)
from exactlyonce.pipeline.joins import Joined, Pair
from exactlyonce.pipeline.json_schema import JsonSchemaCodec
from exactlyonce.pipeline.output import Emit, Output, SideEmit
from exactlyonce.pipeline.protobuf import ProtobufCodec
from exactlyonce.pipeline.records import Record
from exactlyonce.pipeline.stream import Feedback, KeyedStream, Pipeline, Stream, Table, WindowedStream
from exactlyonce.pipeline.timers import CoHandler, Handler, Timers
from exactlyonce.pipeline.windows import Hopping, Session, Tumbling, Windowed

if TYPE_CHECKING:
    from exactlyonce.sinks.kafka.dead_letters import DeadLetters

__all__ = [
    "Aggregate",
    "AvroCodec",
    "BrokerUnavailable",
    "BytesCodec",
    "CoHandler",
    "Codec",
    "ConfigError",
    "Context",
    "Count",
    "CountDistinct",
    "DeadLetters",
    "Emit",
    "Enriched",
    "ExactlyOnceError",
    "Feedback",
    "Fenced",
    "First",
    "GraphError",
    "Halt",
    "Handler",
    "Hopping",
    "InvariantViolation",
    "Joined",
    "JsonCodec",
    "JsonSchemaCodec",
    "KeyedStream",
    "Last",
    "Max",
    "Mean",
    "Min",
    "Operator",
    "Output",
    "Pair",
    "Percentiles",
    "Pipeline",
    "ProtobufCodec",
    "Record",
    "RecordError",
    "Session",
    "SideEmit",
    "StoreError",
    "StoreUnavailable",
    "StrCodec",
    "Stream",
    "Sum",
    "Table",
    "Timers",
    "TopN",
    "TopicError",
    "Tumbling",
    "Unavailable",
    "Undetermined",
    "UserError",
    "Windowed",
    "WindowedStream",
]

if not TYPE_CHECKING:  # else mypy would accept any name

    def __getattr__(name: str) -> object:
        if name != "DeadLetters":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from exactlyonce.sinks.kafka.dead_letters import DeadLetters  # with the client of Kafka, on first use

        globals()[name] = DeadLetters
        return DeadLetters


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext exactlyonce`` in a notebook: makes the magic ``%%pipeline`` known."""
    from exactlyonce.pipeline.notebook import load

    load(shell)

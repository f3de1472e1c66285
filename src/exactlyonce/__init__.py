"""Exactly-once pipelines from Kafka to Kafka, in Python."""

from typing import Any

from exactlyonce.pipeline.avro import AvroCodec
from exactlyonce.pipeline.codec import BytesCodec, Codec, JsonCodec, StrCodec
from exactlyonce.pipeline.context import Context, Operator
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
from exactlyonce.pipeline.json_schema import JsonSchemaCodec
from exactlyonce.pipeline.output import Emit, Output, SideEmit
from exactlyonce.pipeline.protobuf import ProtobufCodec
from exactlyonce.pipeline.records import Record
from exactlyonce.pipeline.stream import Feedback, KeyedStream, Pipeline, Stream

__all__ = [
    "AvroCodec",
    "BrokerUnavailable",
    "BytesCodec",
    "Codec",
    "ConfigError",
    "Context",
    "Emit",
    "ExactlyOnceError",
    "Feedback",
    "Fenced",
    "GraphError",
    "Halt",
    "InvariantViolation",
    "JsonCodec",
    "JsonSchemaCodec",
    "KeyedStream",
    "Operator",
    "Output",
    "Pipeline",
    "ProtobufCodec",
    "Record",
    "RecordError",
    "SideEmit",
    "StoreError",
    "StoreUnavailable",
    "StrCodec",
    "Stream",
    "TopicError",
    "Unavailable",
    "Undetermined",
    "UserError",
]


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext exactlyonce`` in a notebook: makes the magic ``%%pipeline`` known."""
    from exactlyonce.pipeline.notebook import load

    load(shell)

"""Exactly-once pipelines from Kafka to Kafka, in Python: pipelines, operators, codecs, and Kafka as source and sink.

Other sources are in `connectors`, other sinks in `sinks`, errors in `errors`. Each name is imported on first use.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import exactlyonce.engines.stop_signals  # noqa: F401 - first, for signals that come during the other imports
from exactlyonce.pipeline.first_use import on_first_use
from exactlyonce.pipeline.names import nearest

if TYPE_CHECKING:
    from exactlyonce.connectors.kafka.source import KafkaSource
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
    from exactlyonce.pipeline.changes import UNCHANGED, Change, Unchanged
    from exactlyonce.pipeline.codec import BytesCodec, Codec, JsonCodec, StrCodec
    from exactlyonce.pipeline.debezium import DebeziumCodec
    from exactlyonce.pipeline.durations import Duration
    from exactlyonce.pipeline.enrich import Enriched
    from exactlyonce.pipeline.functions import Context, Emit, Operator, Output, SideEmit
    from exactlyonce.pipeline.joins import Joined, Pair
    from exactlyonce.pipeline.json_schema import JsonSchemaCodec
    from exactlyonce.pipeline.protobuf import ProtobufCodec
    from exactlyonce.pipeline.records import Record
    from exactlyonce.pipeline.running import RunResult, RunSettings, run
    from exactlyonce.pipeline.sizes import Size
    from exactlyonce.pipeline.source import EventTime
    from exactlyonce.pipeline.stream import Feedback, KeyedStream, Pipeline, Stream, Table, WindowedStream
    from exactlyonce.pipeline.timers import CoHandler, Handler, Timers
    from exactlyonce.pipeline.windows import Hopping, Session, Tumbling, Windowed
    from exactlyonce.sinks.kafka.sink import DeadLetters, KafkaSink

__all__ = [
    "UNCHANGED",
    "Aggregate",
    "AvroCodec",
    "BytesCodec",
    "Change",
    "CoHandler",
    "Codec",
    "Context",
    "Count",
    "CountDistinct",
    "DeadLetters",
    "DebeziumCodec",
    "Duration",
    "Emit",
    "Enriched",
    "EventTime",
    "Feedback",
    "First",
    "Handler",
    "Hopping",
    "Joined",
    "JsonCodec",
    "JsonSchemaCodec",
    "KafkaSink",
    "KafkaSource",
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
    "RunResult",
    "RunSettings",
    "Session",
    "SideEmit",
    "Size",
    "StrCodec",
    "Stream",
    "Sum",
    "Table",
    "Timers",
    "TopN",
    "Tumbling",
    "Unchanged",
    "Windowed",
    "WindowedStream",
    "run",
]

_MODULES = {
    "UNCHANGED": "pipeline.changes",
    "Aggregate": "pipeline.aggregates",
    "AvroCodec": "pipeline.avro",
    "BytesCodec": "pipeline.codec",
    "Change": "pipeline.changes",
    "CoHandler": "pipeline.timers",
    "Codec": "pipeline.codec",
    "Context": "pipeline.functions",
    "Count": "pipeline.aggregates",
    "CountDistinct": "pipeline.aggregates",
    "DeadLetters": "sinks.kafka.sink",
    "DebeziumCodec": "pipeline.debezium",
    "Duration": "pipeline.durations",
    "Emit": "pipeline.functions",
    "Enriched": "pipeline.enrich",
    "EventTime": "pipeline.source",
    "Feedback": "pipeline.stream",
    "First": "pipeline.aggregates",
    "Handler": "pipeline.timers",
    "Hopping": "pipeline.windows",
    "Joined": "pipeline.joins",
    "JsonCodec": "pipeline.codec",
    "JsonSchemaCodec": "pipeline.json_schema",
    "KafkaSink": "sinks.kafka.sink",
    "KafkaSource": "connectors.kafka.source",
    "KeyedStream": "pipeline.stream",
    "Last": "pipeline.aggregates",
    "Max": "pipeline.aggregates",
    "Mean": "pipeline.aggregates",
    "Min": "pipeline.aggregates",
    "Operator": "pipeline.functions",
    "Output": "pipeline.functions",
    "Pair": "pipeline.joins",
    "Percentiles": "pipeline.aggregates",
    "Pipeline": "pipeline.stream",
    "ProtobufCodec": "pipeline.protobuf",
    "Record": "pipeline.records",
    "RunResult": "pipeline.running",
    "RunSettings": "pipeline.running",
    "Session": "pipeline.windows",
    "SideEmit": "pipeline.functions",
    "Size": "pipeline.sizes",
    "StrCodec": "pipeline.codec",
    "Stream": "pipeline.stream",
    "Sum": "pipeline.aggregates",
    "Table": "pipeline.stream",
    "Timers": "pipeline.timers",
    "TopN": "pipeline.aggregates",
    "Tumbling": "pipeline.windows",
    "Unchanged": "pipeline.changes",
    "Windowed": "pipeline.windows",
    "WindowedStream": "pipeline.stream",
    "run": "pipeline.running",
}

_ELSEWHERE = {
    "Average": "Mean", "Avg": "Mean", "HoppingWindow": "Hopping", "SessionWindow": "Session", "Sliding": "Hopping",
    "SlidingWindow": "Hopping", "TumblingWindow": "Tumbling",
}  # fmt: skip
"""What does it, by the name that a class has elsewhere."""

if not TYPE_CHECKING:  # else mypy would accept any name
    _on_first_use = on_first_use(globals(), __name__, _MODULES)

    def __getattr__(name: str) -> object:
        """The object of that name. Another one is refused, with what to write instead: the import from another module,
        or what other tools call so.

        An import statement gets an ImportError, since Python replaces the text of an AttributeError by its own.
        """
        if name in _MODULES:
            return _on_first_use(name)
        imported = sys._getframe(1).f_globals["__name__"] == "importlib._bootstrap"
        refused = ImportError if imported else AttributeError
        for module in ("errors", "connectors", "sinks"):
            if name in import_module(f"{__name__}.{module}").__all__:
                raise refused(f"{name} is in {__name__}.{module}: from {__name__}.{module} import {name}")
        if instead := _ELSEWHERE.get(name):
            raise refused(f"{name} is {instead} here: from {__name__} import {instead}")
        near = nearest(name, __all__)
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}{f'. Did you mean {near}?' if near else ''}"
        )


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext exactlyonce`` in a notebook: makes the magic ``%%pipeline`` known."""
    from exactlyonce.pipeline.loading import load_magic

    load_magic(shell)

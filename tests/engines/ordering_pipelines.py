"""Pipelines that sort or deduplicate, which the tests run as `exactlyonce run ordering_pipelines:...`."""

from __future__ import annotations

from window_pipelines import Click

from exactlyonce import Output, Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import KafkaSink


def ordered(name: str, what: str) -> Pipeline:
    """The clicks of NAME-in by user, sorted or the first of each 3 s, to NAME-out; the late ones to NAME-late."""
    pipeline, late = Pipeline(name, max_parallelism=8), Output("late", Click)
    source = KafkaSource(f"{name}-in", value=Click, time="at", disorder="2s", idle=None, ahead=None)
    keyed = pipeline.source("clicks", source).key_by(lambda click: click.user)
    given = keyed.in_order("s", late=late) if what == "sorted" else keyed.deduplicate("s", within="3s", late=late)
    given.sink("out", KafkaSink(f"{name}-out", key=lambda click: click.user))
    given.side(late).sink("late", KafkaSink(f"{name}-late", key=lambda click: click.user))
    return pipeline

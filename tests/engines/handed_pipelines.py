"""A pipeline of event time that tests hand from one engine to the other."""

from __future__ import annotations

from typing import Any

from join_pipelines import Event, by_user

from exactlyonce import Count, EventTime, Output, Pipeline, Tumbling
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import KafkaSink


def handed(name: str) -> Pipeline:
    """The events of NAME-in by user: counted in windows, joined with those of NAME-right, sorted, and the first of each
    3 s. Each result goes to the topic of its operator, NAME-counts for one; late events go to NAME-late-counts."""
    pipeline = Pipeline(name, max_parallelism=8)
    late = {id: Output(f"late-{id}", Event) for id in ("counts", "pairs", "rights", "sorted", "once")}
    lefts, rights = (
        pipeline.source(topic, KafkaSource(f"{name}-{topic}", value=Event, time=_at())).key_by(by_user)
        for topic in ("in", "right")
    )
    results: dict[str, Any] = {
        "counts": lefts.window(Tumbling("10s")).aggregate("counts", Count(), late=late["counts"]),
        "pairs": lefts.join(
            "pairs", rights, how="full", within=("-1s", "3s"), late=late["pairs"], late_right=late["rights"]
        ),
        "sorted": lefts.in_order("sorted", late=late["sorted"]),
        "once": lefts.deduplicate("once", within="3s", late=late["once"]),
    }
    for id, stream in results.items():
        key = (lambda event: event.user) if id in ("sorted", "once") else (lambda result: result.key)
        stream.sink(f"out-{id}", KafkaSink(f"{name}-{id}", key=key))
        stream.side(late[id]).sink(f"out-late-{id}", KafkaSink(f"{name}-late-{id}"))
    results["pairs"].side(late["rights"]).sink("out-late-rights", KafkaSink(f"{name}-late-rights"))
    return pipeline


def _at() -> EventTime[Any]:
    return EventTime("at", disorder="2s", idle=None, ahead=None)

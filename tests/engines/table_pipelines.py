"""Pipelines with tables joined by a foreign key, that the tests run as `exactlyonce run table_pipelines:...`."""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec

from exactlyonce import DeadLetters, EventTime, Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.sinks import KafkaSink


class Pet(msgspec.Struct):
    id: int
    owner: str | None


class Owner(msgspec.Struct):
    id: int


def owner_of(pet: Pet) -> str | None:
    if pet.owner == "nobody":
        raise ValueError("an owner is nobody")
    return pet.owner


def joined(
    name: str, how: Literal["inner", "left"] = "inner", pause_ms: int = 0, timed: str = "", dead: str = ""
) -> Pipeline:
    """The pets of NAME-in with their owners of NAME-right, to NAME-out; with *dead*, others to NAME-dead.

    With *timed* records have event times, those of their messages.
    """
    pipeline = Pipeline(name, max_parallelism=8)
    stamped: dict[str, Any] = {"time": EventTime(lambda record: record.timestamp_ms, disorder="2s")} if timed else {}
    pets = pipeline.table("pets", KafkaSource.records(f"{name}-in", key=str, value=Pet, **stamped))
    owners = pipeline.table("owners", KafkaSource.records(f"{name}-right", key=str, value=Owner, **stamped))
    on_error = DeadLetters(f"{name}-dead") if dead else None
    changes = pets.join_table("owned", owners, by=owner_of, how=how, on_error=on_error).changes()
    slow = changes.peek(lambda _: time.sleep(pause_ms / 1000), id="slow")
    slow.sink("out", KafkaSink(f"{name}-out"))
    return pipeline

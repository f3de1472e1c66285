"""A run in the process of its caller, who goes on after it."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable

import msgspec
import pytest
from running import visible
from waiting import until

from exactlyonce import Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.engines.local import worker
from exactlyonce.engines.processes import collecting_rarely
from exactlyonce.pipeline.errors import UserError
from exactlyonce.sinks import KafkaSink
from exactlyonce.testing.cluster import KafkaCluster

RUNS = 4


class Order(msgspec.Struct):
    total: int


@pytest.mark.slow
@pytest.mark.exhaustive
def test_nothing_is_left_behind(kafka: KafkaCluster, topic_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of a clean run nor of one that fails."""
    monkeypatch.setattr(worker, "collecting_rarely", collecting_rarely)  # other tests do without it
    for topic in ("in", "out"):
        kafka.create_topic(f"{topic_name}-{topic}")
    kafka.produce(f"{topic_name}-in", [("k", f'{{"total": {number}}}') for number in range(100)])
    thresholds = gc.get_threshold()

    def run(name: str, function: Callable[[Order], Order]) -> None:
        pipeline = Pipeline(f"{topic_name}-{name}")
        orders = pipeline.source("orders", KafkaSource(f"{topic_name}-in", value=Order))
        orders.map(function).sink("out", KafkaSink(f"{topic_name}-out"))
        pipeline.run(inline=True, until="latest", bootstrap_servers=kafka.bootstrap_servers)

    def divided(order: Order) -> Order:
        return Order(100 // order.total)

    def same(order: Order) -> Order:
        return order

    for number in range(RUNS):
        run(f"clean-{number}", same)
        with pytest.raises(UserError, match="ZeroDivisionError"):
            run(f"failing-{number}", divided)
        if number == 0:
            first = footprint()
    until(lambda: all(now <= then for now, then in zip(footprint(), first, strict=True)), told=footprint)
    assert (gc.get_threshold(), gc.get_freeze_count()) == (thresholds, 0)
    assert len(visible(kafka, f"{topic_name}-out", 100 * RUNS)) == 100 * RUNS


def footprint() -> tuple[int, int]:
    gc.collect()
    return threading.active_count(), len(os.listdir("/proc/self/fd"))

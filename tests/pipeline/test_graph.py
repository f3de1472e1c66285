"""The graph as engines and people see it: the fingerprint and the picture."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from exactlyonce import AvroCodec, Pipeline, Stream
from exactlyonce.connectors import KafkaSource
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.loading import load
from exactlyonce.sinks import FileSink, KafkaSink, PostgresSink

PROGRAM = """
import msgspec
from exactlyonce import Pipeline
from exactlyonce.connectors import KafkaSource
from exactlyonce.pipeline.loading import load
from exactlyonce.sinks import KafkaSink

class Order(msgspec.Struct):
    id: int
    tags: set[str]
    note: str | int | None = None

def count(n: int | None, order: Order) -> tuple[int, Order]:
    return (n or 0) + 1, order

pipeline = Pipeline("p")
orders = pipeline.source("orders", KafkaSource("orders", value=Order))
orders.key_by(lambda order: order.id).stateful_map("count", count).sink("out", KafkaSink("out"))
if __name__ == "__main__":
    print(pipeline.build().fingerprint())
"""


class Order(msgspec.Struct):
    id: int
    total: int


class Changed(msgspec.Struct):
    id: int
    total: float


Changed.__name__ = "Order"


def add(total: int | None, order: Any) -> tuple[int, int]:
    return (total or 0) + 1, 1


def subtract(total: int | None, order: Any) -> tuple[int, int]:
    return (total or 0) - 1, -1


def graph(
    name: str = "p",
    max_parallelism: int = 128,
    topic: str = "in",
    value: Any = Order,
    source: str = "orders",
    key: Any = lambda order: order.id,
    operator: str = "totals",
    fn: Any = add,
    state: Any = int,
    out: str = "out",
    output: Any = None,
    records: bool = False,
    partitioned: bool = False,
    start: Any = "earliest",
    filtered: bool = False,
) -> LogicalGraph:
    pipeline = Pipeline(name, max_parallelism)
    read: Any = KafkaSource.records if records else KafkaSource
    orders: Stream[Any] = pipeline.source(source, read(topic, value=value, start=start))
    orders = orders.filter(lambda order: True) if filtered else orders
    counted = orders.key_by(key, partitioned=partitioned).stateful_map(operator, fn, state=state)
    counted.sink("out", KafkaSink(out, value=output))
    return pipeline.build()


@pytest.mark.parametrize(
    "other",
    [
        {"name": "q"}, {"max_parallelism": 64}, {"topic": "other"}, {"value": Changed}, {"value": AvroCodec(Order)},
        {"source": "others"}, {"operator": "sums"}, {"state": float}, {"out": "other"},
        {"output": AvroCodec(int, {"type": "long"})}, {"records": True}, {"partitioned": True}, {"filtered": True},
    ],
)  # fmt: skip
def test_the_fingerprint_changes_with(other: dict[str, Any]) -> None:
    assert graph(**other).fingerprint() != graph().fingerprint()


@pytest.mark.parametrize("other", [{"fn": subtract}, {"key": lambda order: 5}, {"start": "latest"}])
def test_the_fingerprint_stays_with(other: dict[str, Any]) -> None:
    assert graph(**other).fingerprint() == graph().fingerprint()


def test_the_fingerprint_is_the_same_in_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fingerprinted.py").write_text(PROGRAM)
    run = subprocess.run([sys.executable, "fingerprinted.py"], cwd=tmp_path, env={"PYTHONHASHSEED": "1"}, stdout=-1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    assert run.stdout.decode().strip() == load("fingerprinted:pipeline").pipeline.build().fingerprint()


def test_the_picture() -> None:
    lines = [line.split() for line in graph(filtered=True).explain().splitlines()]
    assert lines == [
        ["p"],
        ["orders", "source", "KafkaSource", "in", ":", "Order"],
        ["filter-after-orders", "filter", "<-", "orders", ":", "Order"],
        ["key_by-after-orders", "key_by", "<-", "filter-after-orders", ":", "Order"],
        ["totals", "stateful_map", "<=", "key_by-after-orders", "state", "int", ":", "int"],
        ["out", "sink", "<-", "totals", "KafkaSink", "out"],
    ]
    assert "<=" not in graph(partitioned=True).explain()


def test_the_picture_of_a_store() -> None:
    """It says what is written to, and how rows find their places."""
    pipeline = Pipeline("p")
    orders = pipeline.source("orders", KafkaSource("in", value=Order))
    sinks: dict[str, Any] = {
        "postgres": PostgresSink("totals", schema="shop", mode="upsert", key=("id",), dsn="env:DSN"),
        "files": FileSink("/data/orders", format="jsonl", partition_by=("id",)),
    }
    for id, sink in sinks.items():
        orders.sink(id, sink)
    lines = [line.split("<- orders ")[1] for line in pipeline.build().explain().splitlines() if "<- " in line]
    assert lines == ["PostgresSink shop.totals upsert by id", "FileSink /data/orders jsonl by id"]

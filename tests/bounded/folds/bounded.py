"""What tests of bounded work share: input, the state of a checkpoint, and what output must hold, by plain folds."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from running import assert_copies, assert_totals, orders

from exactlyonce.checkpoint.manifest import Manifest
from exactlyonce.checkpoint.store_blocks import BlockReader
from exactlyonce.checkpoint.store_topic import find_topic
from exactlyonce.engines.blocks import restore_table
from exactlyonce.pipeline.loading import Loaded, load_reference
from exactlyonce.testing.cluster import KafkaCluster

HERE = Path(__file__).parent


def load_pipeline(module: str, attribute: str, name: str) -> Loaded:
    """The pipeline of a function of a module of the tests."""
    folder = HERE if module == "bounded_pipelines" else HERE.parents[1] / "engines"
    reference: dict[str, object] = {
        "module": module,
        "attribute": attribute,
        "params": {"name": name},
        "path": str(folder),
    }
    return Loaded(load_reference(reference), reference)


class Fed:
    """The input of a pipeline with the sources NAME-in and NAME-more, as it grows."""

    def __init__(self, kafka: KafkaCluster, name: str) -> None:
        self.kafka, self.name = kafka, name
        self.left: list[tuple[str, str]] = []
        self.right: list[tuple[str, str]] = []
        kafka.create_topic(f"{name}-in", 4)
        kafka.create_topic(f"{name}-more", 3)

    def feed(self, count: int) -> None:
        """*count* orders more to the left, half as many to the right, where partition 2 stays empty."""
        left = orders(count, first=len(self.left))
        right = orders(count // 2, first=1_000_000 + len(self.right))
        self.kafka.produce(f"{self.name}-in", left)
        for partition in (0, 1):
            self.kafka.produce(f"{self.name}-more", right[partition::2], partition)
        self.left += left
        self.right += right

    @property
    def all(self) -> list[tuple[str, str]]:
        """Both sides."""
        return self.left + self.right

    def assert_output(self) -> None:
        """Every output topic of `broad` holds exactly what a fold over the input gives."""
        assert_copies(self.kafka, f"{self.name}-copies", self.all)
        assert_totals(self.kafka, f"{self.name}-out", self.all)
        numbers: dict[int, int] = defaultdict(int)
        rounds = [json.loads(record.value or b"") for record in self.kafka.read_committed(f"{self.name}-rounds")]
        for each in rounds:
            numbers[each["bucket"]] += 1
            assert each["number"] == numbers[each["bucket"]]
        assert sorted(each["id"] for each in rounds) == sorted(json.loads(value)["id"] for _, value in self.all)

    def assert_state(self, loaded: Loaded, manifest: Manifest) -> None:
        """The checkpoint's state of `broad` is what a fold over the input gives."""
        sums: dict[str, int] = defaultdict(int)
        buckets: dict[int, int] = defaultdict(int)
        for _, value in self.all:
            order = json.loads(value)
            sums[order["customer"]] += order["total"]
            buckets[order["id"] % 7] += 1
        assert state(self.kafka, loaded, manifest, "totals") == dict(sums)
        assert state(self.kafka, loaded, manifest, "rounds") == dict(buckets)


def state(kafka: KafkaCluster, loaded: Loaded, manifest: Manifest, operator: str) -> dict[Any, Any]:
    """The state that *manifest* has of an operator, by key."""
    import msgspec

    config = {"bootstrap.servers": kafka.bootstrap_servers}
    graph = loaded.pipeline.build()
    snapshot = next((each for each in manifest.operators if each.operator == operator), None)
    groups = range(graph.max_parallelism)
    reader = BlockReader(config, find_topic(config, manifest.pipeline))
    table = restore_table(
        graph.node(operator), groups, graph.max_parallelism, manifest.checkpoint, snapshot, reader
    )
    return {msgspec.msgpack.decode(key): value for key, value in table.items()}

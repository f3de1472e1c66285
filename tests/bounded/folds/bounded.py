"""The common part of tests of bounded work: input, the state of a checkpoint, the right output, by plain folds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
from running import assert_copies, assert_totals, orders

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.checkpoint.store.log_reader import read_history
from exactlyonce.checkpoint.store.topic import find_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.blocks import block_storage, references, restore_table
from exactlyonce.engines.bounded.advance import Advanced
from exactlyonce.engines.bounded.catch_up import CatchingUp, Summary
from exactlyonce.engines.bounded.submit import in_process
from exactlyonce.engines.options import Restoration, RunOptions
from exactlyonce.pipeline.loading import Loaded, load_reference
from exactlyonce.state.hash_map import HashMapBackend
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

HERE = Path(__file__).parent


def load_pipeline(module: str, attribute: str, name: str, **params: str) -> Loaded:
    """The pipeline of a function of a module of the tests."""
    folder = HERE if module == "bounded_pipelines" else HERE.parents[1] / "engines"
    reference: dict[str, object] = {
        "module": module,
        "attribute": attribute,
        "params": {"name": name, **params},
        "path": str(folder),
    }
    return Loaded(load_reference(reference), reference)


class Fed:
    """The input of a pipeline that reads NAME-in, NAME-more and perhaps NAME-again, which is NAME-in, as it grows."""

    def __init__(self, kafka: KafkaCluster, name: str) -> None:
        self.kafka, self.name = kafka, name
        self.storage = ""
        """Where blocks are kept; the topic, unless a test says otherwise."""
        self.left: list[tuple[str, str]] = []
        self.right: list[tuple[str, str]] = []
        kafka.create_topic(f"{name}-in", 4)
        kafka.create_topic(f"{name}-again", 4)
        kafka.create_topic(f"{name}-more", 3)

    def feed(self, count: int) -> None:
        """*count* orders more to the left, half as many to the right, where partition 2 stays empty."""
        left = orders(count, first=len(self.left))
        right = orders(count // 2, first=1_000_000 + len(self.right))
        self.kafka.produce(f"{self.name}-in", left)
        self.kafka.produce(f"{self.name}-again", left)
        for partition in (0, 1):
            self.kafka.produce(f"{self.name}-more", right[partition::2], partition)
        self.left += left
        self.right += right

    @property
    def all(self) -> list[tuple[str, str]]:
        """Both sides."""
        return self.left + self.right

    @property
    def config(self) -> dict[str, str]:
        """How a client reaches the cluster."""
        return {"bootstrap.servers": self.kafka.bootstrap_servers}

    def history(self) -> History:
        """What is decided."""
        return read_history(self.config, self.name)

    def open_transactions(self) -> list[str]:
        """Those of the pipeline that are neither complete nor empty."""
        transactions = Transactions(ClientConfig(self.config))
        try:
            states = {each.transactional_id: each.state for each in transactions.list(f"eo:{self.name}:")}
        finally:
            transactions.close()
        return [name for name, state in states.items() if state in ("Ongoing", "PrepareCommit", "PrepareAbort")]

    def assert_nothing_left(self) -> None:
        """The newest checkpoint is finalized, no transaction is open, no block is there that no manifest stands on."""
        history = self.history()
        assert history.unfinalized is None
        assert not self.open_transactions()
        topic = find_topic(self.config, self.name)
        with closing(block_storage(ClientConfig(self.config), topic, history.storage)) as storage:
            needed = {ref.key for manifest in history.retained for ref in references(manifest, storage)}
            found = {ref.key for ref in storage.since([0] * topic.partitions).blocks}
        assert found == needed, f"orphans: {found - needed}, missing: {needed - found}"

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
    config = ClientConfig({"bootstrap.servers": kafka.bootstrap_servers})
    graph = loaded.pipeline.build()
    snapshot = next((each for each in manifest.operators if each.operator == operator), None)
    groups = range(graph.max_parallelism)
    node, topic = graph.node(operator), find_topic(config.confluent(), manifest.pipeline)
    with closing(block_storage(config, topic, manifest.storage)) as blocks:
        table = restore_table(
            node, groups, graph.max_parallelism, manifest.checkpoint, snapshot, blocks, backend=HashMapBackend()
        )
    return {msgspec.msgpack.decode(key): value for key, value in table.items()}


class Silent:
    """A `CatchUpProgress` that keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.checkpoints: list[Manifest] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def began(self, manifest: Manifest, offsets: int) -> None:
        pass

    def advanced(self, advanced: Advanced, offsets: int) -> None:
        self.checkpoints.append(advanced.manifest)


def catch_up(fed: Fed, loaded: Loaded, parallelism: int, staging: Path, **options: Any) -> Summary:
    """Advance to the latest offsets, or as *options* say, with units run here."""
    submit: Callable[[str, Sequence[bytes]], list[bytes]] = options.pop("submit", in_process)
    client = ClientConfig({"bootstrap.servers": fed.kafka.bootstrap_servers})
    restoration: Restoration | None = options.pop("restoration", None)
    settings = CheckpointSettings(storage=fed.storage)
    run = RunOptions(client, settings, parallelism=parallelism, restoration=restoration)
    return CatchingUp(loaded, run, submit, staging, options.pop("progress", Silent()), **options).run()


def exported_and_reset(fed: Fed, folder: Path) -> str:
    """Export the newest checkpoint below *folder*, forget the pipeline, and say where the savepoint is."""
    servers = ("--bootstrap-servers", fed.kafka.bootstrap_servers)
    for words in (("savepoint", fed.name, "--to", f"file://{folder}"), ("reset", fed.name, "--yes", "--force")):
        line = [sys.executable, "-m", "exactlyonce.cli.main", *words, *servers]
        done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr
    (savepoint,) = folder.glob(f"{fed.name}-*")
    return f"file://{savepoint}"


def run_local(
    fed: Fed, parallelism: int, target: str = "bounded_pipelines:broad", interval: str = "200ms", **params: str
) -> None:
    """`exactlyonce run --until latest`, as its users do."""
    command = [sys.executable, "-m", "exactlyonce.cli.main", "run", target]
    options = ["--bootstrap-servers", fed.kafka.bootstrap_servers, "--parallelism", str(parallelism)]
    for each in {"name": fed.name, **params}.items():
        options += ["--param", "=".join(each)]
    options += ["--checkpoint-storage", fed.storage or "topic"]
    path = os.pathsep.join([str(HERE.parents[1] / "engines"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, *options, "--until", "latest", "--checkpoint-interval", interval],
        cwd=HERE, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

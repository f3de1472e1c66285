"""The common part of tests of bounded work: input, the state of a checkpoint, the right output, by plain folds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
from running import Run, assert_copies, assert_totals, exactlyonce, orders, run_here
from settled import await_readable, ended_transactions

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.blocks import block_storage, references
from exactlyonce.engines.bounded.advance import Advanced
from exactlyonce.engines.bounded.catch_up import CatchUp, Summary
from exactlyonce.engines.bounded.stages import in_process, perform, settled
from exactlyonce.engines.options import Restoration, RunOptions
from exactlyonce.engines.plan import TaskSpec, plan
from exactlyonce.engines.runtime.assembler import Assembler
from exactlyonce.pipeline.failpoints import NAMES
from exactlyonce.pipeline.loading import Loaded, load_reference
from exactlyonce.state.backend import Table
from exactlyonce.state.hash_map import HashMapBackend
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

HERE = Path(__file__).parent
DRIVER_STEPS = [
    name
    for name in NAMES
    if name.startswith(("unit-", "publication-", "advance-", "coordinator-")) and name != "coordinator-triggered"
]
"""The failpoints of a driver and its units."""


def load_pipeline(module: str, attribute: str, name: str, **params: str) -> Loaded:
    folder = HERE if module == "bounded_pipelines" else HERE.parents[1] / "engines"
    params = {"name": name, **params}
    reference: dict[str, object] = {"module": module, "attribute": attribute, "params": params, "path": str(folder)}
    return Loaded(load_reference(reference), reference)


class Fed:
    """The input of a pipeline that reads NAME-in, NAME-more and perhaps NAME-again, which is NAME-in, as it grows."""

    def __init__(self, kafka: KafkaCluster, name: str) -> None:
        self.kafka, self.name = kafka, name
        self.storage = ""
        """The storage of blocks; the topic, unless a test says otherwise."""
        self.left: list[tuple[str, str]] = []
        self.right: list[tuple[str, str]] = []
        kafka.create_topic(f"{name}-in", 4)
        kafka.create_topic(f"{name}-again", 4)
        kafka.create_topic(f"{name}-more", 3)

    def feed(self, count: int, *, by_customer: bool = False) -> None:
        """*count* orders more to the left, half as many to the right, where partition 2 stays empty."""
        left = orders(count, first=len(self.left), by_customer=by_customer)
        right = orders(count // 2, first=1_000_000 + len(self.right))
        self.kafka.produce(f"{self.name}-in", left)
        self.kafka.produce(f"{self.name}-again", left)
        for partition in (0, 1):
            self.kafka.produce(f"{self.name}-more", right[partition::2], partition)
        self.left += left
        self.right += right

    @property
    def all(self) -> list[tuple[str, str]]:
        return self.left + self.right

    @property
    def config(self) -> ClientConfig:
        return ClientConfig({"bootstrap.servers": self.kafka.bootstrap_servers})

    def history(self) -> History:
        return read_history(self.config, self.name)

    def open_transactions(self) -> list[str]:
        states = ended_transactions(self.kafka, f"eo:{self.name}:")
        return [name for name, state in states.items() if state == "Ongoing"]

    def assert_nothing_left(self) -> None:
        """The newest checkpoint is finalized, no transaction is open, no block is there that no manifest stands on."""
        history = self.history()
        assert history.unfinalized is None
        assert not self.open_transactions()
        topic = find_topic(self.config, self.name)
        with closing(block_storage(self.config, topic, history.storage)) as storage:
            needed = {ref.key for manifest in history.retained for ref in references(manifest, storage)}
            found = {ref.key for ref in storage.since([0] * topic.partitions).blocks}
        assert found == needed, f"orphans: {found - needed}, missing: {needed - found}"

    def assert_output(self) -> None:
        await_readable(self.kafka, *(f"{self.name}-{topic}" for topic in ("copies", "out", "rounds")))
        assert_copies(self.kafka, f"{self.name}-copies", self.all)
        assert_totals(self.kafka, f"{self.name}-out", self.all)
        numbers: dict[int, int] = defaultdict(int)
        rounds = [json.loads(record.value or b"") for record in self.kafka.read_committed(f"{self.name}-rounds")]
        for each in rounds:
            numbers[each["bucket"]] += 1
            assert each["number"] == numbers[each["bucket"]]
        assert sorted(each["id"] for each in rounds) == sorted(json.loads(value)["id"] for _, value in self.all)

    def assert_state(self, loaded: Loaded, manifest: Manifest) -> None:
        sums: dict[str, int] = defaultdict(int)
        buckets: dict[int, int] = defaultdict(int)
        for _, value in self.all:
            order = json.loads(value)
            sums[order["customer"]] += order["total"]
            buckets[order["id"] % 7] += 1
        assert state(self.kafka, loaded, manifest, "totals") == dict(sums)
        assert state(self.kafka, loaded, manifest, "rounds") == dict(buckets)


class Files(Fed):
    """The input of `source_pipelines:files`."""

    def __init__(self, kafka: KafkaCluster, name: str, folder: Path) -> None:
        self.kafka, self.name, self.storage = kafka, name, ""
        self.left, self.right = [], []
        self.folder = folder
        folder.mkdir()

    @property
    def params(self) -> dict[str, str]:
        return {"folder": str(self.folder)}

    def add(self, name: str, count: int) -> None:
        """A file with the next orders, which appears whole."""
        more = orders(count, first=len(self.left))
        hidden, values = self.folder / f".{name}", [value for _, value in more]
        if name.endswith("parquet"):
            import pyarrow as pa
            import pyarrow.parquet

            table = pa.Table.from_pylist([json.loads(value) for value in values])
            pyarrow.parquet.write_table(table, hidden, row_group_size=200)
        elif name.endswith("csv"):
            rows = [",".join(map(str, json.loads(value).values())) for value in values]
            hidden.write_text("\n".join(["id,customer,total", *rows, ""]))
        elif name.endswith("avro"):
            import fastavro

            fields = [("id", "long"), ("customer", "string"), ("total", "long")]
            schema = {"type": "record", "name": "O", "fields": [{"name": n, "type": t} for n, t in fields]}
            with hidden.open("wb") as stream:
                fastavro.writer(stream, fastavro.parse_schema(schema), map(json.loads, values))
        else:
            hidden.write_text("".join(f"{value}\n" for value in values))
        hidden.rename(self.folder / name)
        self.left += more

    def assert_output(self) -> None:
        await_readable(self.kafka, f"{self.name}-copies", f"{self.name}-out")
        assert_copies(self.kafka, f"{self.name}-copies", self.left)
        assert_totals(self.kafka, f"{self.name}-out", self.left)


def table_of(kafka: KafkaCluster, loaded: Loaded, manifest: Manifest, operator: str) -> Table[Any]:
    """The state that *manifest* has of an operator, by encoded key."""
    config = ClientConfig({"bootstrap.servers": kafka.bootstrap_servers})
    graph = loaded.pipeline.build()
    topic = find_topic(config, manifest.pipeline)
    with closing(block_storage(config, topic, manifest.storage)) as blocks:
        spec = TaskSpec(reference={}, parallelism=1, incarnation=1, attempt=0, manifest=manifest, topic=topic)
        return Assembler(plan(graph, 1), spec, 0, blocks, HashMapBackend()).table(graph.node(operator))


def state(kafka: KafkaCluster, loaded: Loaded, manifest: Manifest, operator: str) -> dict[Any, Any]:
    table = table_of(kafka, loaded, manifest, operator)
    return {msgspec.msgpack.decode(key): value for key, value in table.items()}


class Silent:
    """A `CatchUpProgress` that keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.checkpoints: list[Manifest] = []
        self.advances: list[Advanced] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def began(self, manifest: Manifest, offsets: int) -> None:
        pass

    def passed(self, offsets: int) -> None:
        pass

    def advanced(self, advanced: Advanced, offsets: int) -> None:
        self.checkpoints.append(advanced.manifest)
        self.advances.append(advanced)


_numbers = count()


def twice(stage: str, work: Sequence[bytes]) -> list[bytes]:
    """Every piece of work is tried again, though its first attempt came to its end."""
    attempts = [[perform(each, f"twice-{next(_numbers)}-{attempt}") for attempt in (0, 1)] for each in work]
    return settled(answers[-1] for answers in attempts)


def catch_up(fed: Fed, loaded: Loaded, parallelism: int, staging: str | Path, **options: Any) -> Summary:
    """Advance to the latest offsets, or as *options* say, with units run here."""
    submit: Callable[[str, Sequence[bytes]], list[bytes]] = options.pop("submit", in_process)
    client = ClientConfig({"bootstrap.servers": fed.kafka.bootstrap_servers})
    restoration: Restoration | None = options.pop("restoration", None)
    settings = CheckpointSettings(storage=fed.storage)
    run = RunOptions(client, settings, parallelism=parallelism, restoration=restoration)
    return CatchUp(loaded, run, options.pop("progress", Silent()), **options).lead(submit, staging)


def exported_and_reset(fed: Fed, folder: Path) -> str:
    """Export the newest checkpoint below *folder*, forget the pipeline, and say where the savepoint is."""
    exactlyonce(fed.kafka, "savepoint", fed.name, "--to", f"file://{folder}")
    exactlyonce(fed.kafka, "reset", fed.name, "--yes", "--force")
    (savepoint,) = folder.glob(f"{fed.name}-*")
    return f"file://{savepoint}"


def parameters(fed: Fed, params: Mapping[str, str]) -> list[str]:
    return [f"--param={key}={value}" for key, value in {"name": fed.name, **params}.items()]


def start(fed: Fed, target: str, *arguments: str, env: Mapping[str, str] | None = None, **params: str) -> Run:
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    options = (*parameters(fed, params), *arguments)
    return Run(fed.kafka.bootstrap_servers, target, *options, env={"PYTHONPATH": path, **(env or {})})


def run_local(
    fed: Fed, parallelism: int, target: str = "bounded_pipelines:broad", *arguments: str,
    interval: str = "200ms", env: Mapping[str, str] | None = None, **params: str,
) -> None:  # fmt: skip
    """A run to the end of its input: within this process, where it needs no other and no environment."""
    options = ["--parallelism", str(parallelism), "--until", "latest", "--checkpoint-interval", interval]
    options += ["--checkpoint-storage", fed.storage or "topic", *arguments]
    if parallelism == 1 and env is None:
        ended = run_here(fed.kafka.bootstrap_servers, target, "--inline", *parameters(fed, params), *options)
        assert ended.code == 0, ended.said
        return
    run = start(fed, target, *options, env=env, **params)
    assert run.wait() == 0, run.said


_ONCE = ("coordinator-opened", "coordinator-swept")
"""Met once by a driver; the others are met in each of its checkpoints."""
_DRIVING = """
import json, sys
from pathlib import Path
from bounded import *
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.bounded import advance
advance.PUBLISHER_RECORDS = 1
options = RunOptions(ClientConfig({"bootstrap.servers": sys.argv[1]}), parallelism=2)
loaded = load_pipeline(*sys.argv[4].split(":"), sys.argv[2], **json.loads(sys.argv[5]))
CatchUp(loaded, options, Silent(), chunk_records=1500).lead(in_process, sys.argv[3])
"""


def drive(
    fed: Fed, staging: str | Path, failpoint: str, fired: Path, target: str = "bounded_pipelines:broad", **params: str
) -> int:
    """The exit code of a driver of its own, at parallelism 2, that dies in its second checkpoint, or as it begins."""
    fired.mkdir()
    nth = 1 if failpoint in _ONCE else 2
    armed = {"EXACTLYONCE_FAILPOINTS": f"{failpoint}=kill@{nth}", "EXACTLYONCE_FAILPOINTS_FIRED": str(fired)}
    path = os.pathsep.join([str(HERE), str(HERE.parents[1] / "engines")])
    line = [sys.executable, "-c", _DRIVING, fed.kafka.bootstrap_servers, fed.name, str(staging), target]
    line.append(json.dumps(params))
    environment = {**os.environ, "PYTHONPATH": path, **armed}
    return subprocess.run(line, env=environment, capture_output=True, timeout=LIMIT_S).returncode

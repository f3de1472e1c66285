"""A process of a run starts with what its pipeline needs."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

import exactlyonce
import exactlyonce.connectors
import exactlyonce.sinks
from exactlyonce.engines.local import messages as msg
from exactlyonce.engines.local import worker

DOWNLOADS = "exactlyonce.connectors.embedded.jars"
OTHERS = [f"exactlyonce.sinks.{store}" for store in ("duckdb", "files", "http", "mysql", "postgres", "redis")]
CLIENTS = {
    "confluent_kafka", "kafka", "pyspark", "psycopg", "pymysql", "redis", "pyarrow", "pyiceberg", "deltalake", "duckdb",
    "rocksdict", "botocore", "hdfs_native", "pytest",
}  # fmt: skip


def loaded(code: str) -> set[str]:
    command = [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_a_worker_imports_no_client_or_store_that_it_does_not_use() -> None:
    modules = loaded("import exactlyonce.engines.local.worker\nfrom exactlyonce.sinks import KafkaSink")
    assert "exactlyonce.sinks.kafka.sink" in modules
    assert modules & {"kafka", "importlib.metadata", DOWNLOADS, *OTHERS} == set()


def test_a_program_that_imports_the_package_loads_no_client_and_no_engine() -> None:
    modules = loaded("from exactlyonce import *")
    unused = {DOWNLOADS, "exactlyonce.checkpoint.records.encoding", "exactlyonce.connectors.block_files"}
    assert {"exactlyonce.connectors.kafka.source", "exactlyonce.sinks.kafka.sink"} <= modules
    assert modules & {*CLIENTS, *OTHERS, *unused, "exactlyonce.engines.local", "exactlyonce.engines.options"} == set()


@pytest.mark.parametrize(
    ("name", "module"),
    [("ConfigError", "errors"), ("Unavailable", "errors"), ("FileSource", "connectors"), ("PostgresSink", "sinks")],
)
def test_a_name_of_another_module_is_refused_with_its_import(name: str, module: str) -> None:
    with pytest.raises(ImportError, match=f"from exactlyonce.{module} import {name}$"):
        exec(f"from exactlyonce import {name}")
    with pytest.raises(AttributeError, match=f"from exactlyonce.{module} import {name}$"):
        getattr(exactlyonce, name)
    assert not hasattr(exactlyonce, name)
    with pytest.raises(ImportError, match="Sliding is Hopping here"):
        exec("from exactlyonce import Sliding")
    with pytest.raises(AttributeError, match=r"'exactlyonce' has no attribute 'Pipelin'\. Did you mean Pipeline\?"):
        _ = exactlyonce.Pipelin  # type: ignore[attr-defined]  # refused by mypy, too


@pytest.mark.parametrize("module", [exactlyonce.connectors, exactlyonce.sinks])
def test_every_connector_and_sink_is_there_for_who_asks(module: ModuleType) -> None:
    names: dict[str, object] = {}
    exec(f"from {module.__name__} import *", names)
    assert names.keys() - {"__builtins__"} == set(module.__all__)
    assert not hasattr(module, "NoSink")


def test_a_pipeline_loads_no_source_that_it_does_not_have() -> None:
    modules = loaded("from exactlyonce import Pipeline\nfrom exactlyonce.connectors import KafkaSource")
    others = {"asyncio", "exactlyonce.connectors.files.source", "exactlyonce.connectors.mysql.changes"}
    assert "exactlyonce.connectors.kafka.source" in modules
    assert modules & others == set()


def test_a_failure_that_nobody_has_foreseen_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The restart gives its reason as text; the traceback goes to the log."""
    load = msg.Load(3, {})
    sent: list[Any] = []
    connection: Any = SimpleNamespace(closed=False, receive=lambda timeout_s: iter([load]), send=sent.append)

    def loading(reference: object) -> None:
        raise KeyError("caf\udce9")

    monkeypatch.setattr(worker, "load_reference", loading)
    with pytest.raises(KeyError):
        worker.serve(connection)
    failures = [each for each in sent if isinstance(each, msg.WorkerFailed)]
    assert [(each.subtask, each.error) for each in failures] == [(3, "")]
    assert failures[0].message.startswith("KeyError: 'caf\\udce9' (")
    assert msgspec.msgpack.encode(failures[0])

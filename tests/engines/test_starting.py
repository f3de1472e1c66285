"""A process of a run starts with what its pipeline needs."""

from __future__ import annotations

import subprocess
import sys

import exactlyonce.sinks

DOWNLOADS = "exactlyonce.connectors.embedded.jars"
OTHERS = [f"exactlyonce.sinks.{store}" for store in ("files", "mysql", "postgres", "redis")]


def loaded(code: str) -> set[str]:
    """The modules that a new process has loaded once it has run *code*."""
    command = [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_a_worker_imports_no_client_or_store_that_it_does_not_use() -> None:
    """Neither kafka-python, which talks to coordinators' brokers alone, nor other sinks than those of its pipeline,
    nor what downloads a broker or looks for an engine."""
    modules = loaded("import exactlyonce.engines.local.worker\nfrom exactlyonce.sinks import KafkaSink")
    assert "exactlyonce.sinks.kafka.sink" in modules
    assert modules & {"kafka", "importlib.metadata", DOWNLOADS, *OTHERS} == set()


def test_every_sink_is_there_for_who_asks() -> None:
    """`from exactlyonce.sinks import *` imports all that the package names, and nothing else is found in it."""
    names: dict[str, object] = {}
    exec("from exactlyonce.sinks import *", names)
    assert names.keys() - {"__builtins__"} == set(exactlyonce.sinks.__all__)
    assert not hasattr(exactlyonce.sinks, "NoSink")

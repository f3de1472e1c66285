"""A process of a run starts with what its pipeline needs."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import exactlyonce.sinks
from exactlyonce.engines.local import messages as msg
from exactlyonce.engines.local import worker

DOWNLOADS = "exactlyonce.connectors.embedded.jars"
OTHERS = [f"exactlyonce.sinks.{store}" for store in ("files", "mysql", "postgres", "redis")]


def loaded(code: str) -> set[str]:
    command = [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_a_worker_imports_no_client_or_store_that_it_does_not_use() -> None:
    modules = loaded("import exactlyonce.engines.local.worker\nfrom exactlyonce.sinks import KafkaSink")
    assert "exactlyonce.sinks.kafka.sink" in modules
    assert modules & {"kafka", "importlib.metadata", DOWNLOADS, *OTHERS} == set()


def test_every_sink_is_there_for_who_asks() -> None:
    names: dict[str, object] = {}
    exec("from exactlyonce.sinks import *", names)
    assert names.keys() - {"__builtins__"} == set(exactlyonce.sinks.__all__)
    assert not hasattr(exactlyonce.sinks, "NoSink")


def test_a_failure_that_nobody_has_foreseen_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The restart gives its reason as text; the traceback goes to the log."""
    start = SimpleNamespace(subtask=3, reference={})
    sent: list[Any] = []
    connection: Any = SimpleNamespace(closed=False, receive=lambda timeout_s: iter([start]), send=sent.append)
    monkeypatch.setattr(msg, "Start", SimpleNamespace)

    def loading(reference: object) -> None:
        raise KeyError("caf\udce9")

    monkeypatch.setattr(worker, "load_reference", loading)
    with pytest.raises(KeyError):
        worker.serve(connection)
    failures = [each for each in sent if isinstance(each, msg.WorkerFailed)]
    assert [(each.subtask, each.error) for each in failures] == [(3, "")]
    assert failures[0].message.startswith("KeyError: 'caf\\udce9' (")
    assert msgspec.msgpack.encode(failures[0])

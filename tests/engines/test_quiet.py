"""Standard error of a run has our lines, and librdkafka's only for those who ask."""

from __future__ import annotations

import ast
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from running import Job, stop, workers_of

from exactlyonce.testing.cluster import OwnCluster

ROOT = Path(__file__).parents[2]
PRODUCT = ("pipeline", "checkpoint", "state", "connectors", "sinks", "engines", "cli")
CLIENTS = ("Producer", "Consumer", "AdminClient", "AvroProducer", "DeserializingConsumer", "SerializingProducer")
FACTORY = Path("connectors/confluent.py")
PLAIN = (Path("cli/commands/starter"), Path("cli/demo"))
"""What `exactlyonce init` leaves with a user is the user's; what feeds and counts in the demo shares no code."""


def test_clients_are_made_in_one_place(repository: list[Path]) -> None:
    """No other module of the product makes a client of confluent-kafka: it would write to stderr by itself."""
    wrong = [
        f"{path}:{node.lineno}"
        for path in repository
        if path.suffix == ".py" and path.parts[0] in PRODUCT and path != FACTORY and not {*PLAIN} & {*path.parents}
        if "confluent_kafka" in (text := (ROOT / path).read_text())
        for tree in [ast.parse(text)]
        for clients in [_clients(tree)]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in clients
    ]
    assert wrong == []


def _clients(tree: ast.Module) -> set[str]:
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    theirs = (node for node in imports if (node.module or "").startswith("confluent_kafka"))
    return {alias.name for node in theirs for alias in node.names} & {*CLIENTS}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_faults_leave_no_lines_of_librdkafka(stoppable: OwnCluster, job_of: Callable[..., Job]) -> None:
    job = job_of("linear", "--parallelism", "2", cluster=stoppable)
    job.feed(1000)
    run = job.start()
    run.await_checkpoint()
    stoppable.broker.kill()
    stoppable.broker.start()
    job.feed(1000)
    run.await_checkpoint()
    os.kill(workers_of(run)[0], signal.SIGKILL)
    run.await_step("deployed")
    job.feed(1000)
    run.await_checkpoint()
    stop(run)
    assert run.text == []
    job.finish()
    job.assert_totals()


def test_who_asks_gets_the_lines(job_of: Callable[..., Job]) -> None:
    job = job_of("linear")
    job.feed(10)
    run = job.finish("--kafka", "debug=eos,topic")
    for client in ("#producer-", "#consumer-"):
        assert any(line.startswith("%7|") and client in line for line in run.text), run.text[:5]

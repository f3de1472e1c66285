"""Standard error of a run has our lines, and librdkafka's only for those who ask."""

from __future__ import annotations

import ast
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from running import QUICK, assert_totals, orders

from exactlyonce.testing.cluster import KafkaCluster, OwnCluster

ROOT = Path(__file__).parents[2]
PRODUCT = ("pipeline", "checkpoint", "state", "connectors", "sinks", "engines", "cli")
CLIENTS = ("Producer", "Consumer", "AdminClient", "AvroProducer", "DeserializingConsumer", "SerializingProducer")
FACTORY = Path("checkpoint/store/confluent.py")
STARTER = Path("cli/commands/starter")
"""What `exactlyonce init` leaves with a user is the user's."""


def test_clients_are_made_in_one_place(repository: list[Path]) -> None:
    """No other module of the product makes a client of confluent-kafka: it would write to stderr by itself."""
    wrong = [
        f"{path}:{node.lineno}"
        for path in repository
        if path.suffix == ".py" and path.parts[0] in PRODUCT and path != FACTORY and STARTER not in path.parents
        for tree in [ast.parse((ROOT / path).read_text())]
        for clients in [_clients(tree)]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in clients
    ]
    assert wrong == []


def _clients(tree: ast.Module) -> set[str]:
    """Those of confluent-kafka that a module imports."""
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    theirs = (node for node in imports if (node.module or "").startswith("confluent_kafka"))
    return {alias.name for node in theirs for alias in node.names} & {*CLIENTS}


@pytest.mark.exhaustive
@pytest.mark.broker
@pytest.mark.slow
def test_faults_leave_no_lines_of_librdkafka(stoppable: OwnCluster, topic_name: str, run: Any) -> None:
    """A broker that is killed and comes back, and a worker that is killed, show as events, and as nothing else."""
    cluster = stoppable
    cluster.create_topic(f"{topic_name}-in", 3)
    fed = orders(1000)
    cluster.produce(f"{topic_name}-in", fed)
    arguments = ("pipelines:linear", "--param", f"name={topic_name}", "--parallelism", "2", *QUICK)
    job = run(*arguments, servers=cluster.bootstrap_servers)
    job.await_checkpoint()
    cluster.broker.kill()
    cluster.broker.start()
    more = orders(1000, first=1000)
    cluster.produce(f"{topic_name}-in", more)
    job.await_checkpoint()
    workers = next(event["workers"] for event in reversed(job.events) if event.get("step") == "deployed")
    os.kill(workers[0], signal.SIGKILL)
    job.await_step("deployed")
    last = orders(1000, first=2000)
    cluster.produce(f"{topic_name}-in", last)
    job.await_checkpoint()
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 0, job.said
    assert job.text == []
    assert run(*arguments, "--until", "latest", servers=cluster.bootstrap_servers).wait() == 0
    assert_totals(cluster, f"{topic_name}-out", fed + more + last)


@pytest.mark.broker
def test_who_asks_gets_the_lines(kafka: KafkaCluster, topic_name: str, run: Any) -> None:
    """With librdkafka's own setting `debug`, its lines stand on stderr, of the workers' clients too."""
    kafka.create_topic(f"{topic_name}-in")
    kafka.produce(f"{topic_name}-in", orders(10))
    arguments = ("--param", f"name={topic_name}", "--until", "latest", "--kafka", "debug=eos,topic", *QUICK)
    job = run("pipelines:linear", *arguments)
    assert job.wait() == 0
    for client in ("#producer-", "#consumer-"):
        assert any(line.startswith("%7|") and client in line for line in job.text), job.text[:5]

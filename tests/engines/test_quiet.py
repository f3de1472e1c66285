"""Standard error of a run has our lines, and librdkafka's only for those who ask."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

from running import Job

ROOT = Path(__file__).parents[2]
PRODUCT = ("pipeline", "checkpoint", "state", "connectors", "sinks", "engines", "cli")
CLIENTS = ("Producer", "Consumer", "AdminClient", "AvroProducer", "DeserializingConsumer", "SerializingProducer")
FACTORY = Path("connectors/confluent.py")
PLAIN = (Path("cli/commands/starters"), Path("cli/demo"))
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


def test_who_asks_gets_the_lines(job_of: Callable[..., Job]) -> None:
    job = job_of("linear")
    job.feed(10)
    run = job.finish("--inline", "--kafka", "debug=eos,topic")
    for client in ("#producer-", "#consumer-"):
        assert any(line.startswith("%7|") and client in line for line in run.text), run.text[:5]

"""The pieces of `batch_pipelines:pieces`, counted from the input alone, and an audit of them."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from auditing import audited
from batch_pipelines import PIECES_MAX
from bounded import load_pipeline
from running import visible

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.pipeline.loading import Loaded
from exactlyonce.testing.cluster import KafkaCluster

TARGET = "batch_pipelines:pieces"


def loaded_of(name: str) -> Loaded:
    return load_pipeline("batch_pipelines", "pieces", name)


def assert_pieces(kafka: KafkaCluster, name: str, fed: list[tuple[str, str]]) -> None:
    """Each order is out in its pieces once, and the sums are of them, as counted from the input alone."""
    orders = {order["id"]: order for order in (json.loads(value) for _, value in fed)}
    refused = {id for id in orders if id % 97 == 13}
    dead = [json.loads(record.value or b"")["id"] for record in visible(kafka, f"{name}-dead", len(refused))]
    assert sorted(dead) == sorted(refused)
    expected = Counter((id, number) for id in orders.keys() - refused for number in range(id % PIECES_MAX))
    out = [json.loads(record.value or b"") for record in visible(kafka, f"{name}-pieces", expected.total())]
    assert Counter((piece["id"], piece["number"]) for piece in out) == expected
    assert all(piece["cents"] == 25 * orders[piece["id"]]["total"] for piece in out)
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for piece in out:
        assert piece["customer"] == orders[piece["id"]]["customer"]
        totals[piece["customer"]][0] += 1
        totals[piece["customer"]][1] += piece["cents"]
    newest: dict[str, list[float]] = {}
    for record in visible(kafka, f"{name}-sums", expected.total()):
        sum = json.loads(record.value or b"")
        newest[sum["customer"]] = max(newest.get(sum["customer"], [0, 0.0]), [sum["pieces"], sum["cents"]])
    assert newest == totals


def assert_audited(kafka: KafkaCluster, name: str, staging: Path, checkpoints: int, **options: Any) -> None:
    """All retained intervals are as they are computed again, in batches that are cut otherwise."""
    config = ClientConfig({"bootstrap.servers": kafka.bootstrap_servers})
    report = audited(loaded_of(name), config, staging, **options)
    assert (report.findings, [reason for reason in report.unjudged if "expired" not in reason]) == ([], [])
    assert len(report.checkpoints) >= checkpoints

"""The common part of tests of audits: a run of the pipeline that does wrong, and a look at the input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bounded import Fed, Silent, run_local
from flawed_pipelines import FLAWED

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.bounded.audit import Audit, AuditReport
from exactlyonce.engines.bounded.stages import Executors, Submit, in_process
from exactlyonce.pipeline.loading import Loaded
from exactlyonce.testing.cluster import KafkaCluster

TARGET = "flawed_pipelines:flawed"


class Quiet(Silent):
    def passed(self, offsets: int) -> None:
        pass


def audited(
    loaded: Loaded,
    client: ClientConfig,
    staging: Path,
    first: int | None = None,
    last: int | None = None,
    *,
    submit: Submit = in_process,
    **options: Any,
) -> AuditReport:
    """The report of an audit whose units *submit* runs."""
    return Audit(loaded, client, first, last, **options).run(Executors(submit, staging, lambda: 1), Quiet())


def run_flawed(fed: Fed, *arguments: str, parallelism: int = 2, interval: str = "200ms") -> None:
    run_local(fed, parallelism, TARGET, *arguments, interval=interval, env={FLAWED: "1"})


def order_at(kafka: KafkaCluster, topic: str, partition: int, offset: int) -> int:
    records = kafka.read_committed(topic)
    (found,) = [each for each in records if (each.partition, each.offset) == (partition, offset)]
    return int(json.loads(found.value or b"")["id"])

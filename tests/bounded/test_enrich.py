"""`enrich` in runs that are killed, and in bounded work: each record has one answer for all readers and replays."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from asked_service import AskedService
from auditing import audited
from bounded import catch_up, load_pipeline
from running import Job, visible

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.pipeline.loading import Loaded
from exactlyonce.testing.cluster import KafkaCluster

pytestmark = pytest.mark.broker

REFUSED = range(13, 10_000, 97)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[AskedService]:
    with closing(AskedService(busy=7, refused=REFUSED)) as service:
        monkeypatch.setenv("SERVICE_PORT", str(service.port))
        yield service


def loaded_of(name: str) -> Loaded:
    return load_pipeline("enrich_pipelines", "linear", name)


def assert_answered_once(kafka: KafkaCluster, name: str, fed: list[tuple[str, str]], service: AskedService) -> None:
    """Each order is out once, with a number that the service gave for it, and the sums are of these numbers."""
    ids = {json.loads(value)["id"] for _, value in fed}
    dead = [json.loads(record.value or b"")["id"] for record in visible(kafka, f"{name}-dead", len({*REFUSED} & ids))]
    assert sorted(dead) == sorted({*REFUSED} & ids)
    out = [json.loads(record.value or b"") for record in visible(kafka, f"{name}-out", len(ids) - len(dead))]
    assert sorted(order["id"] for order in out) == sorted(ids - {*dead})
    assert all(order["number"] in service.given[order["id"]] for order in out)
    sums: dict[str, int] = defaultdict(int)
    for order in out:
        sums[order["customer"]] += order["number"]
    newest: dict[str, int] = {}
    for record in visible(kafka, f"{name}-sums", len(out)):
        order = json.loads(record.value or b"")
        newest[order["customer"]] = max(newest.get(order["customer"], 0), order["number"])
    assert newest == sums


def assert_audited(kafka: KafkaCluster, name: str, staging: Path, checkpoints: int, service: AskedService) -> None:
    """All retained intervals are as they are computed again, and nobody asks the service for that."""
    calls = len(service.calls)
    report = audited(loaded_of(name), ClientConfig({"bootstrap.servers": kafka.bootstrap_servers}), staging)
    assert (report.findings, [reason for reason in report.unjudged if "expired" not in reason]) == ([], [])
    assert len(report.checkpoints) >= checkpoints
    assert len(service.calls) == calls


@pytest.mark.exhaustive
@pytest.mark.parametrize("killed_at", ["enrich-answered", "unaligned-overtaken"])
def test_kills_and_other_parallelism_leave_each_record_one_answer(
    killed_at: str, run: Any, kafka: KafkaCluster, topic_name: str, failpoint: Any, tmp_path: Path,
    service: AskedService,
) -> None:  # fmt: skip
    mode = ("--unaligned",) if killed_at == "unaligned-overtaken" else ()
    job = Job(run, kafka, topic_name, "enrich_pipelines:linear", "--num-retained", "100", *mode)
    for parallelism, armed in ((2, failpoint(killed_at, nth=2)), (3, failpoint("coordinator-committed"))):
        job.feed(300)
        job.run_killed(armed, parallelism)
    job.feed(100)
    job.finish_here()
    assert_answered_once(kafka, topic_name, job.fed, service)
    assert service.waiting_most <= 3 * 40
    assert_audited(kafka, topic_name, tmp_path, 2, service)


def test_a_catch_up_asks_the_service_and_a_run_goes_on(
    run: Any, kafka: KafkaCluster, topic_name: str, tmp_path: Path, service: AskedService
) -> None:
    job = Job(run, kafka, topic_name, "enrich_pipelines:linear", "--num-retained", "100")
    fed: Any = SimpleNamespace(kafka=kafka, name=topic_name, storage="")
    job.feed(200)
    catch_up(fed, loaded_of(topic_name), 2, tmp_path)
    job.feed(100)
    job.finish_here()
    assert_answered_once(kafka, topic_name, job.fed, service)
    assert_audited(kafka, topic_name, tmp_path, 2, service)

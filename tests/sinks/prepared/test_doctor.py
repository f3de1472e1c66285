"""Transactions that a dead run has left prepared in a store: shown, rolled back if nobody decided, else committed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from prepared_job import PreparedJob
from preparing import on_mariadb, on_postgres

from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.cli.main import main
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.loading import load
from exactlyonce.views.doctor.examination import examine, resources_of
from exactlyonce.views.doctor.findings import Diagnosis

SILENT_MS = 60_000
"""After so long without a heartbeat, a pipeline counts as dead."""


def killed(job: PreparedJob, armed: Mapping[str, str]) -> None:
    """A run that dies at a failpoint, over its only checkpoint, which has all that was fed."""
    ended = job.start("--until", "latest", "--checkpoint-interval", "5m", env=armed)
    assert ended.wait() == -9, ended.said


def pipeline(job: PreparedJob) -> tuple[str, ...]:
    parameters = ("--param", f"name={job.name}", "--param", f"store={job.preparing.name}")
    return ("prepared_totals:totals", *parameters, "--bootstrap-servers", job.kafka.bootstrap_servers)


def problems(job: PreparedJob) -> list[Diagnosis]:
    """The doctor's findings about the stores, once the run has been silent for long."""
    graph = load("prepared_totals:totals", {"name": job.name, "store": job.preparing.name}).pipeline.build()
    now_ms = SystemClock().now_ms() + SILENT_MS
    _, found = examine(
        job.config, resources_of(job.config, job.name, graph), graph, CheckpointSettings(), now_ms=now_ms,
        older_than_ms=0, deep=False,
    )  # fmt: skip
    assert [each.what for each in found.unchecked] == ["the bytes of blocks, and orphans before the last checkpoint"]
    return [each for each in found.diagnoses if each.about in ("stores", "decisions")]


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@on_postgres
@pytest.mark.exhaustive
def test_what_nobody_decided(job: PreparedJob, failpoint: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Transactions of a dead run are a problem, for they hold locks; an abort rolls them back."""
    killed(job, failpoint("coordinator-checked"))
    prepared = job.preparing.listed()
    assert prepared
    listed = [each for each in said(capsys, "transactions", "list", *pipeline(job)) if each["kind"] == "prepared"]
    assert sorted((each["name"], each["decided_in"]) for each in listed) == [(name, None) for name in prepared]
    found = problems(job)
    assert sorted(prepared) == sorted(name for name in prepared for each in found if name in each.what)
    assert all("transactions abort" in command for each in found for command in each.run)
    ended = said(capsys, "transactions", "abort", *pipeline(job), "--take-over")
    assert sorted(each["name"] for each in ended["aborted"] if each["kind"] == "prepared") == prepared
    assert job.preparing.listed() == []
    job.finish()
    job.assert_exact()


@on_mariadb
@pytest.mark.exhaustive
def test_what_is_decided(job: PreparedJob, failpoint: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused to an abort, and to a commit that knows the pipeline by its name alone."""
    killed(job, failpoint("coordinator-decided"))
    prepared = job.preparing.listed()
    listed = [each for each in said(capsys, "transactions", "list", *pipeline(job)) if each["kind"] == "prepared"]
    assert [(each["name"], each["decided_in"], each["state"]) for each in listed] == [
        (name, 1, "waits") for name in prepared
    ]
    (decided,) = problems(job)
    assert "is not finalized" in decided.what
    module, *options = pipeline(job)
    assert main(["transactions", "abort", module, prepared[0], *options, "--take-over"]) == 2
    assert "has decided" in capsys.readouterr().err
    servers = ("--bootstrap-servers", job.kafka.bootstrap_servers)
    assert main(["transactions", "commit", job.name, *servers, "--take-over"]) == 2
    assert "known by the pipeline's module alone" in capsys.readouterr().err
    ended = said(capsys, "transactions", "abort", job.name, *servers, "--take-over")
    assert (ended["aborted"], list(ended["unasked"]), job.preparing.listed()) == ([], ["rows"], prepared)
    ended = said(capsys, "transactions", "commit", *pipeline(job), "--take-over")
    assert (ended["checkpoint"], set(ended["fates"].values())) == (1, {"committed"})
    assert (job.preparing.listed(), problems(job)) == ([], [])
    job.finish()
    job.assert_exact()

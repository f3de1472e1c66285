"""Bounded work and the local engine in turns, in process and on Spark: all stores agree, each row once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from auditing import audited
from bounded import Silent
from jobs import Job
from together import RAISED, table

from exactlyonce.engines.bounded.catch_up import CatchUp, Summary
from exactlyonce.engines.bounded.diff import Diff
from exactlyonce.engines.bounded.stages import Executors, Submit, in_process, perform
from exactlyonce.engines.options import RunOptions
from exactlyonce.pipeline.loading import Loaded, load_reference
from exactlyonce.testing.cluster import LIMIT_S

pytestmark = [pytest.mark.broker, pytest.mark.slow]

SINKS = [f"{store}-{how}" for store in ("duckdb", "mariadb", "postgres") for how in ("append", "upsert")]
SINKS += ["redis-stream", "redis-string", "files-jsonl", "files-parquet"]


def loaded(job: Job, attribute: str = "together") -> Loaded:
    path = str(Path(__file__).parent / "rig")
    params = {"name": job.name}
    reference: dict[str, object] = {"module": "together", "attribute": attribute, "params": params, "path": path}
    return Loaded(load_reference(reference), reference)


def catch_up(job: Job, parallelism: int, staging: Path, submit: Submit = in_process, chunk: int = 5_000_000) -> Summary:
    options = RunOptions(job.config, parallelism=parallelism)
    return CatchUp(loaded(job), options, Silent(), chunk_records=chunk).lead(submit, staging)


def twice(stage: str, work: Sequence[bytes]) -> list[bytes]:
    for each in work:
        perform(each, f"{stage}-0")
    return [perform(each, f"{stage}-1") for each in work]


@pytest.mark.exhaustive(matrix=True)
def test_in_process(job: Job, tmp_path: Path) -> None:
    job.feed(600)
    job.finish()
    job.feed(900)
    catch_up(job, 3, tmp_path, chunk=400)
    job.feed(600)
    job.finish("--parallelism", "2")
    job.feed(300)
    catch_up(job, 2, tmp_path, submit=twice)
    job.assert_agreement()
    report = audited(loaded(job), job.config, tmp_path)
    assert report.findings == []
    for sink in SINKS:
        assert any(f"records of sink '{sink}' are in a store" in each for each in report.unjudged), report.unjudged


def test_a_diff_compares_the_rows_for_every_store(job: Job, tmp_path: Path) -> None:
    """By the key of an upsert, else by input record, in three chunks; the stores have what the run has written."""
    job.feed(300)
    job.finish()
    more = job.feed(300)
    del job.fed[-len(more) :]
    totals = [order for order in (json.loads(value) for _, value in more) if order["customer"] == RAISED]
    base = job.history().checkpoint_latest
    work = Diff(loaded(job), loaded(job, "raised"), job.config, checkpoint=base, chunk_records=100)
    report = work.run(Executors(in_process, tmp_path, lambda: 1), Silent())
    assert report.records == len(more)
    assert not report.unjudged
    found = {sink.sink: sink for sink in report.sinks}
    assert found.keys() == {*SINKS, "kafka", "copies"}
    assert {name for name, sink in found.items() if not sink.differing} == {"kafka", "copies"}
    for name in SINKS:
        sink = found[name]
        keyed = name.endswith("-upsert") or name.startswith("redis")
        assert sink.by == ("key" if keyed else "input record")
        assert sink.old == sink.new == len(more)
        assert sink.differing == (1 if keyed else len(totals)), name
    (upserted,) = found["postgres-upsert"].differences
    assert (upserted.key, upserted.place) == (RAISED.encode(), 0)
    assert upserted.old is not None
    assert upserted.new is not None
    old, new = (json.loads(output.value or b"") for output in (upserted.old, upserted.new))
    assert new == {**old, "sum": old["sum"] + 1}
    assert found["mariadb-upsert"].differences == found["postgres-upsert"].differences
    assert {found.origin for found in found["files-parquet"].differences} == {
        found.origin for found in found["postgres-append"].differences
    }
    servers_have = job.servers.appended("postgres", table(job.name, "append"))
    assert len(servers_have) == len(job.fed)


class Command:
    def __init__(self, job: Job, folder: Path, name: str, *options: str, failpoints: str = "") -> None:
        fired = folder / f"fired-{name}"
        fired.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "exactlyonce.cli.main", name, "together:together", "--param"]
        command += [f"name={job.name}", "--bootstrap-servers", job.kafka.bootstrap_servers, "--json"]
        done = subprocess.run(
            [*command, "--staging", str(folder / "staging"), "--master", "local[2,3]", *options],
            cwd=Path(__file__).parent / "rig", capture_output=True, text=True, timeout=LIMIT_S,
            env={**os.environ, "EXACTLYONCE_FAILPOINTS": failpoints, "EXACTLYONCE_FAILPOINTS_FIRED": str(fired)},
        )  # fmt: skip
        self.code, self.said = done.returncode, done.stderr
        self.fired = {each.name for each in fired.iterdir()}
        self.summary = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}


@pytest.mark.spark
@pytest.mark.exhaustive(matrix=True)
def test_on_spark(job: Job, tmp_path: Path) -> None:
    job.feed(3000)
    armed = "unit-computed=kill,publication-flushed=raise"
    command = Command(job, tmp_path, "backfill", "--chunk-records", "2000", failpoints=armed)
    assert command.code == 0, command.said
    assert command.fired == {"unit-computed", "publication-flushed"}
    job.assert_agreement()
    job.feed(600)
    job.finish("--parallelism", "3")
    job.feed(600)
    command = Command(job, tmp_path, "catch-up", "--parallelism", "3")
    assert command.code == 0, command.said
    job.assert_agreement()
    job.feed(300)
    job.finish()
    job.assert_agreement()
    command = Command(job, tmp_path, "audit")
    assert command.code == 0, command.said
    assert all(f"sink '{sink}'" in json.dumps(command.summary) for sink in SINKS), command.summary

"""Files and made records in bounded work: each record once, as the local engine has it, whatever is killed."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from auditing import audited
from bounded import Fed, Files, Silent, catch_up, drive, load_pipeline, run_local, state, twice
from running import write_program

from exactlyonce.engines.bounded.catch_up import CatchUp
from exactlyonce.engines.bounded.diff import Diff
from exactlyonce.engines.bounded.stages import Executors, in_process
from exactlyonce.engines.options import RunOptions
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.loading import Loaded, load_reference
from exactlyonce.pipeline.positions import TO
from exactlyonce.testing.cluster import KafkaCluster


@pytest.fixture
def files(kafka: KafkaCluster, topic_name: str, tmp_path: Path) -> Files:
    return Files(kafka, topic_name, tmp_path / "in")


def test_files_are_read_by_either_engine(files: Files, tmp_path: Path) -> None:
    """A backfill, a run and a catch-up read each file once, though every unit is tried twice; an audit agrees."""
    loaded = load_pipeline("source_pipelines", "files", files.name, **files.params)
    for number in range(6):
        files.add(f"{number}.jsonl", 20 if number % 2 else 700)
    files.add("empty.jsonl", 0)
    summary = catch_up(files, loaded, 3, tmp_path / "s", from_nothing=True, chunk_records=4_000, submit=twice)
    assert (summary.records, summary.checkpoints > 1) == (2_160, True)
    assert all(position.ended for position in summary.manifest.offsets)
    assert summary.manifest.kind == "final"
    files.add("late.jsonl", 300)
    run_local(files, 1, "source_pipelines:files", folder=str(files.folder))
    files.add("0-later.jsonl", 300)
    assert catch_up(files, loaded, 2, tmp_path / "s", submit=twice).records == 300
    assert not catch_up(files, loaded, 2, tmp_path / "s").records
    files.assert_output()
    files.assert_nothing_left()
    report = audited(loaded, files.config, tmp_path)
    assert (report.findings, [why for why in report.unjudged if "expired" not in why]) == ([], [])


def test_positions_and_state_are_those_of_the_local_engine(
    files: Files, kafka: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    for number in range(3):
        files.add(f"{number}.jsonl", 500)
    local = f"{files.name}-local"
    run_local(_of(files, local), 1, "source_pipelines:files", folder=str(files.folder))
    by_local = _of(files, local).history().latest
    assert by_local is not None
    loaded = load_pipeline("source_pipelines", "files", files.name, **files.params)
    manifest = catch_up(files, loaded, 3, tmp_path / "s", from_nothing=True).manifest
    assert manifest.offsets == by_local.offsets
    there = load_pipeline("source_pipelines", "files", local, **files.params)
    assert state(kafka, loaded, manifest, "totals") == state(kafka, there, by_local, "totals")


def _of(files: Files, name: str) -> Fed:
    other = Files.__new__(Files)
    other.__dict__.update(files.__dict__, name=name)
    return other


def test_a_killed_driver_of_files(files: Files, tmp_path: Path) -> None:
    for number in range(4):
        files.add(f"{number}.jsonl", 900)
    target, failpoint = "source_pipelines:files", "advance-published"
    assert drive(files, tmp_path / "staging", failpoint, tmp_path / "fired", target, **files.params) == -9
    assert (tmp_path / "fired" / failpoint).exists(), "the planned kill happened"
    loaded = load_pipeline("source_pipelines", "files", files.name, **files.params)
    files.add("new.jsonl", 100)
    catch_up(files, loaded, 3, tmp_path / "staging", from_nothing=True)
    files.assert_output()
    files.assert_nothing_left()


def test_a_split_with_more_records_than_was_guessed(
    files: Files, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("exactlyonce.connectors.files.source.RECORD_BYTES", 1 << 20)
    monkeypatch.setattr("exactlyonce.connectors.files.source.FILE_RECORDS", 0)
    files.add("0.jsonl", 500)
    loaded = load_pipeline("source_pipelines", "files", files.name, **files.params)
    summary = catch_up(files, loaded, 2, tmp_path / "s", from_nothing=True)
    assert summary.records == 500
    assert 1 < summary.checkpoints < 12, "it doubles what it guesses"
    assert summary.manifest.kind == "final"
    files.assert_output()


@pytest.mark.exhaustive
def test_made_records(files: Files, tmp_path: Path) -> None:
    """They are made without waiting for their rate; a larger count goes further."""
    for count in (60, 100):
        loaded = load_pipeline("source_pipelines", "generated", files.name, count=str(count), splits="3", rate="10")
        summary = catch_up(files, loaded, 2, tmp_path / "s", from_nothing=True, chunk_records=30)
        made = [{"id": number, "customer": f"c{number * 7 % 17}", "total": number % 90 + 1} for number in range(count)]
        files.left = [("", json.dumps(order)) for order in made]
        files.assert_output()
    report = audited(loaded, files.config, tmp_path)
    assert (report.findings, summary.records) == ([], 40)


@pytest.mark.exhaustive
def test_a_diff_reads_files(files: Files, tmp_path: Path) -> None:
    """Both versions read the files that have come since, whole."""
    files.add("0.jsonl", 50)
    loaded = load_pipeline("source_pipelines", "files", files.name, **files.params)
    catch_up(files, loaded, 2, tmp_path / "s", from_nothing=True)
    files.add("1.jsonl", 2_000)
    executors = Executors(in_process, tmp_path / "s", lambda: 2)
    report = Diff(loaded, loaded, files.config).run(executors, Silent())
    assert (report.records, report.agrees, [sink.new for sink in report.sinks]) == (2_000, True, [2_000, 2_000])


def test_what_bounded_work_cannot_read(files: Files, tmp_path: Path) -> None:
    endless = load_pipeline("source_pipelines", "generated", files.name)
    with pytest.raises(ConfigError, match=r"Source 'orders' makes records without end.*set count="):
        CatchUp(endless, RunOptions(files.config), Silent(), from_nothing=True).judge()
    loaded = load_pipeline("source_pipelines", "files", files.name, **files.params)
    to = TO.read("2026-11-01T00:00:00Z")
    with pytest.raises(ConfigError, match="Source 'orders' reads no one topic, so it has no offsets or times to go to"):
        CatchUp(loaded, RunOptions(files.config), Silent(), to, from_nothing=True).judge()


def test_a_source_that_grows(files: Files, tmp_path: Path) -> None:
    """Bounded work reads the source of the documentation up to what is there; the next goes on from there."""
    module = f"journal_{tmp_path.name.replace('-', '_')}"
    write_program("writing-a-source.md", tmp_path / f"{module}.py")
    journal = tmp_path / "orders.db"
    params = {"name": files.name, "path": str(journal)}
    reference: dict[str, object] = {
        "module": module, "attribute": "pipeline", "params": params, "path": str(tmp_path)
    }  # fmt: skip
    loaded, topic = Loaded(load_reference(reference), reference), files.kafka.create_topic(f"{files.name}-orders", 1)
    for first in (0, 100):
        with closing(sqlite3.connect(journal)) as db, db:
            db.execute("CREATE TABLE IF NOT EXISTS journal (shop, number, body, PRIMARY KEY (shop, number))")
            for id in range(first, first + 100):
                order = json.dumps({"id": id, "customer": "ann", "total": 1})
                db.execute("INSERT INTO journal VALUES (?, ?, ?)", (f"shop {id % 2}", id // 2, order))
        assert catch_up(files, loaded, 1, tmp_path / "s", from_nothing=not first).records == 100
    assert not catch_up(files, loaded, 1, tmp_path / "s").records
    ids = [json.loads(record.value or b"")["id"] for record in files.kafka.read_committed(topic)]
    assert sorted(ids) == list(range(200))
    report = audited(loaded, files.config, tmp_path)
    assert report.findings == []

"""Sources that are no topics: each record once, whatever is killed; what cannot be read again stops the job."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from auditing import audited
from running import HERE, QUICK, Job, Run, orders, stop, write_program
from test_kill_matrix import run_to_the_end
from waiting import until

from exactlyonce.pipeline.loading import Loaded, load_reference
from exactlyonce.testing.cluster import KafkaCluster

REFUSED, BAD_RECORD, HALTED = 2, 3, 6
JobOf = Callable[..., Job]


def halted(run: Run, *texts: str) -> None:
    assert run.wait() == HALTED, run.said
    assert [text for text in texts if text not in run.said] == [], run.said


class Folder:
    """A folder of orders in JSON lines; `fed` has those of a job."""

    def __init__(self, path: Path, job: Job) -> None:
        self.path, self.job = path, job
        path.mkdir()

    def add(self, name: str, count: int) -> Path:
        """A file with the next orders, which appears whole."""
        more = orders(count, first=len(self.job.fed))
        hidden = self.path / f".{name}"
        hidden.write_text("".join(f"{value}\n" for _, value in more))
        self.job.fed += more
        return hidden.rename(self.path / name)


@pytest.fixture
def files_of(job_of: JobOf, tmp_path: Path) -> Callable[..., tuple[Job, Folder]]:
    def made(target: str, *arguments: str) -> tuple[Job, Folder]:
        folder = tmp_path / "in"
        job = job_of(f"source_pipelines:{target}", "--param", f"folder={folder}", *arguments)
        return job, Folder(folder, job)

    return made


def test_files_are_read_once(files_of: Any) -> None:
    """A run reads what is there, in parts where it is large, and ends; the next one reads what is new."""
    job, folder = files_of("files")
    folder.add("b.jsonl", 2_000)
    folder.add("a.jsonl", 10)
    job.finish_here()
    job.assert_copies()
    folder.add("0.jsonl", 20)
    job.finish_here()
    job.assert_output()


@pytest.mark.exhaustive
def test_files_and_a_process_that_is_killed(files_of: Any, failpoint: Any) -> None:
    job, folder = files_of("files", "--parallelism", "2")
    for number in range(3):
        folder.add(f"{number}.jsonl", 700)
    run_to_the_end(job, env=failpoint("worker-frozen"))
    job.assert_output()


def test_new_files_while_it_runs(files_of: Any) -> None:
    """A file is found while the pipeline runs, once; those that were read may be removed, and are forgotten then."""
    job, folder = files_of("files", "--param", "watch=100ms", "--param", "forget=yes", "--inline")
    first = folder.add("b.jsonl", 100)
    run = job.start()
    run.await_checkpoint()
    until(lambda: ended(job) == {0, 1})
    job.assert_copies()
    first.unlink()
    until(lambda: ended(job) == {2})  # a split without records keeps the highest number
    folder.add("a.jsonl", 100)
    job.assert_copies()
    run.kill()
    folder.add("c.jsonl", 100)
    stopped = job.start()
    job.assert_copies()
    stop(stopped)
    job.assert_totals()


def ended(job: Job) -> set[int]:
    """The splits that have ended, by the newest checkpoint."""
    newest = job.history().latest
    assert newest is not None
    return {position.partition for position in newest.offsets if position.ended}


def test_a_source_that_ends_and_one_that_goes_on(files_of: Any) -> None:
    """The run goes on with the topic; with --until latest it ends once both are read."""
    job, folder = files_of("joined", "--inline")
    folder.add("old.jsonl", 500)
    run = job.start()
    run.await_checkpoint()
    job.feed(500)
    job.assert_copies()
    run.kill()
    job.feed(500)
    job.finish_here()
    job.assert_output()


@pytest.mark.parametrize("target", ["generated", "listed"])
def test_a_source_that_ends_and_goes_further(target: str, job_of: JobOf) -> None:
    """A run ends with its sources, without --until. One with a larger count, or a longer list, makes the records that
    are new, one with the same makes none; a smaller one is a halt."""
    options = ("--param", "splits=2", "--param", "rate=1000") if target == "generated" else ()
    job = job_of(f"source_pipelines:{target}")
    for count in (30, 71, 71):
        job.fed = [("", json.dumps({"id": i, "customer": f"c{i * 7 % 17}", "total": i % 90 + 1})) for i in range(count)]
        job.finish_here("--param", f"count={count}", *options, until="running")
        job.assert_output()
    said = job.finish_here("--param", "count=40", *options, until="running", code=HALTED)
    assert "Source 'orders' must go on at" in said


def test_a_pattern_that_matches_nothing(files_of: Any) -> None:
    """The run ends, and says so; it is no error, since files may come."""
    job, folder = files_of("files")
    assert f"source orders: there is nothing to read at file:{folder.path}: no file matches" in job.finish_here()


@pytest.mark.exhaustive
def test_a_record_behind_a_shuffle_is_left_out(files_of: Any) -> None:
    """The option that the error names has the mark of the record's file."""
    job, folder = files_of("files_checked", "--parallelism", "2")
    folder.add("1.jsonl", 10)
    option = re.search(r"--skip (\S+:0:3@\w+)", job.finish(code=BAD_RECORD).said)
    assert option is not None
    job.finish("--skip", option.group(1))
    del job.fed[3]
    job.assert_copies()


def test_two_sources_of_one_folder(files_of: Any) -> None:
    """A record that is left out is one of the source that the error names."""
    job, folder = files_of("two_of_one")
    bad = folder.add("orders-1.jsonl", 10)
    folder.add("refunds-1.jsonl", 10)
    lines = bad.read_text().splitlines()
    bad.write_text("\n".join([*lines[:3], "{}", *lines[4:]]))
    del job.fed[3]
    job.finish_here("--skip", f"file:{folder.path}:0:3")
    job.assert_copies()


def test_a_record_of_a_new_file_is_left_out(files_of: Any) -> None:
    """Its file gets another number in the next run, if one with a smaller name has come; the option knows its mark."""
    job, folder = files_of("files")
    folder.add("1.jsonl", 10)
    job.finish_here()
    bad = folder.add("3.jsonl", 10)
    lines = bad.read_text().splitlines()
    bad.write_text("\n".join([*lines[:3], "{}", *lines[4:]]))
    del job.fed[13]
    option = re.search(r"--skip (\S+:1:3)@(\w+)", job.finish_here(code=BAD_RECORD))
    assert option is not None
    ids = [json.loads(value)["id"] for _, value in job.fed]
    more = orders(10, first=max(ids) + 1)
    (folder.path / "2.jsonl").write_text("".join(f"{value}\n" for _, value in more))
    job.fed += more
    place, mark = option.groups()
    assert f"--skip {place}: no checkpoint has split 1 of" in job.finish_here("--skip", place, code=REFUSED)
    said = job.finish_here("--skip", f"{place}@{mark}", "--skip", f"{place}@{'0' * 12}")
    assert f"--skip {place}@{'0' * 12}: file:{folder.path} has no such split" in said
    job.assert_output()
    history = job.history()
    assert [skip.partition for manifest in history.retained for skip in manifest.skips] == [2]


def test_a_file_that_changes(files_of: Any) -> None:
    """It stops the pipeline, while it runs and at the start, once the version that was read is not the file's."""
    job, folder = files_of("files", "--param", "watch=50ms", "--inline")
    file = folder.add("a.jsonl", 10)
    run = job.start()
    run.await_checkpoint()
    until(lambda: ended(job) == {0})
    with file.open("a") as appended:
        appended.write("{}\n")
    changed = "File 'a.jsonl' of file:", "was changed after source 'orders' had found it"
    halted(run, *changed)
    said = job.finish_here(until="running", code=HALTED)
    assert [text for text in changed if text not in said] == []
    job.assert_copies()


def test_a_file_that_goes(files_of: Any) -> None:
    """It stops the pipeline unless it was read to its end. A record that does not decode is named by its file."""
    job, folder = files_of("files")
    damaged = folder.path / "damaged.jsonl"
    damaged.write_text('{"id": 1}\n')
    said = job.finish_here(code=BAD_RECORD)
    assert f"[0] offset 0: in file:{damaged}, the line is not Order in json: Object missing" in said
    damaged.unlink()
    said = job.finish_here(code=HALTED)
    assert "File 'damaged.jsonl' of file:" in said
    assert "had read only 0 records of it" in said


@pytest.mark.exhaustive
def test_what_reads_the_past_again(files_of: Any, tmp_path: Path) -> None:
    """An audit computes the interval again from the files, also from parts; without them it says what is gone."""
    job, folder = files_of("files", "--parallelism", "2", "--checkpoint-interval", "50ms", "--num-retained", "100")
    files = [folder.add(f"{number}.jsonl", 2_000) for number in range(2)]
    job.finish()
    params = {"name": job.name, "folder": str(folder.path)}
    reference: dict[str, object] = {
        "module": "source_pipelines", "attribute": "files", "params": params, "path": str(HERE)
    }  # fmt: skip
    target = Loaded(load_reference(reference), reference)

    report = audited(target, job.config, tmp_path)
    assert (report.findings, report.unjudged, report.records_in) == ([], [], 4_000)
    files[1].unlink()
    assert [
        why
        for why in audited(target, job.config, tmp_path).unjudged
        if "File '1.jsonl' of file:" in why and "is gone" in why
    ]


def test_each_order_of_the_page_is_in_the_topic_once(
    kafka: KafkaCluster, topic_name: str, run: Callable[..., Any], tmp_path: Path,
    failpoint: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The source of the docs, killed after its first checkpoint is decided; the next run ends with what is there."""
    write_program("writing-a-source.md", tmp_path / "shop.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    journal = tmp_path / "orders.db"
    topic = kafka.create_topic(f"{topic_name}-orders", partitions=2)

    def append(first: int) -> None:
        with closing(sqlite3.connect(journal)) as db, db:
            db.execute("CREATE TABLE IF NOT EXISTS journal (shop, number, body, PRIMARY KEY (shop, number))")
            for id in range(first, first + 1_000):
                body = json.dumps({"id": id, "customer": "ann", "total": 1})
                db.execute("INSERT INTO journal VALUES (?, ?, ?)", (f"shop {id % 2}", id // 2, body))

    append(0)
    arguments = ("shop:pipeline", "--param", f"name={topic_name}", "--param", f"path={journal}", *QUICK)
    killed = run(*arguments, env=failpoint("coordinator-committed"))
    assert killed.wait() == -9, killed.said
    append(1_000)
    last = run(*arguments, "--inline", "--until", "latest")
    assert last.wait() == 0, last.said
    ids = [json.loads(record.value or b"")["id"] for record in kafka.read_committed(topic)]
    assert sorted(ids) == list(range(2_000))

"""Records that a backfill or a catch-up skips because they do not decode: told as a run tells them, and counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bounded import HERE, Fed, Silent, catch_up, load_pipeline
from running import assert_totals, run_here

from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.cli.main import main

BAD = b'{"id": 7, "customer": 12, "total": 1}'


def noted(manifest: Manifest) -> dict[int, tuple[int, tuple[int, ...]]]:
    """The number of skipped records by partition that has any, and the places of the last few."""
    return {each.partition: (each.skipped, each.skipped_at) for each in manifest.offsets if each.skipped}


def test_what_is_skipped_is_named_and_noted(fed: Fed, tmp_path: Path) -> None:
    """The first by topic, partition, offset and field, all by count; manifests sum over checkpoints."""
    topic, loaded = f"{fed.name}-in", load_pipeline("pipelines", "skipping", fed.name)
    fed.kafka.produce(topic, [BAD] * 7, partition=1)
    fed.kafka.produce(topic, [BAD], partition=2)
    fed.feed(40)
    progress = Silent()
    summary = catch_up(fed, loaded, 2, tmp_path, progress=progress)
    told = [each for each in progress.notes if each.startswith("skipped: ")]
    assert len(told) == 1
    assert f"skipped: 8 records of source 'orders' ({topic}[1] 7, {topic}[2] 1), the first: " in told[0]
    assert f"{topic}[1] offset 0" in told[0]
    assert "$.customer" in told[0]
    assert summary.skipped_count == 8
    assert noted(summary.manifest) == {1: (7, (2, 3, 4, 5, 6)), 2: (1, (0,))}
    here = ["--param", f"name={fed.name}", "--until", "latest"]
    fed.kafka.produce(topic, [BAD], partition=2)
    assert run_here(fed.kafka.bootstrap_servers, "pipelines:skipping", *here, "--inline").code == 0
    latest = fed.history().latest
    assert latest is not None
    (last,) = (each.offset - 1 for each in latest.offsets if each.partition == 2)
    assert noted(latest) == {1: (7, (2, 3, 4, 5, 6)), 2: (2, (0, last))}
    fed.kafka.produce(topic, [BAD], partition=1)
    assert noted(catch_up(fed, loaded, 1, tmp_path).manifest)[1][0] == 8
    assert_totals(fed.kafka, f"{fed.name}-out", fed.left)


def test_what_the_command_says_of_it(
    fed: Fed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(name: str, *words: str) -> tuple[str, str]:
        assert main([name, *words, "--bootstrap-servers", fed.kafka.bootstrap_servers]) == 0
        return capsys.readouterr()

    monkeypatch.chdir(HERE.parents[1] / "engines")
    pipeline, topic = ("pipelines:skipping", "--param", f"name={fed.name}"), f"{fed.name}-in"
    fed.kafka.produce(topic, [BAD, BAD], partition=3)
    fed.feed(10)
    _, err = command("backfill", *pipeline, "--on", "driver")
    notes = [json.loads(line).get("text", "") for line in err.splitlines() if line.startswith("{")]
    skipped = [note for note in notes if note.startswith("skipped: ")]
    assert [f"2 records of source 'orders' ({topic}[3] 2)" in note for note in skipped] == [True], notes
    assert f"2 skipped because they do not decode ({topic}[3] 2, the first at 0, 1)" in err.splitlines()[-1]
    fed.kafka.produce(topic, [BAD], partition=0)
    out, err = command("catch-up", *pipeline, "--on", "driver", "--json")
    figures = json.loads(out)
    (place,) = figures.pop("skipped_records")
    assert (figures["skipped"], place["source"], place["topic"], place["partition"]) == (1, "orders", topic, 0)
    assert (place["count"], place["offsets"]) == (1, [figures["offsets"]["orders"]["0"] - 1])
    assert [event["skipped"] for event in map(json.loads, err.splitlines()) if event["event"] == "checkpoint"] == [1]
    assert f"{topic}[3] 2 records, the last at 0, 1" in " ".join(command("checkpoints", fed.name)[0].split())

"""Times that a Kafka sink gives its records are those of the records, whoever writes them, and are audited."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from bounded import HERE, Fed, catch_up
from settled import await_readable
from timed_pipelines import FIRST_MS

from exactlyonce.pipeline.loading import Loaded, load_reference

TARGET = "timed_pipelines:timed"
COUNT = 40


def times(fed: Fed, topic: str) -> dict[int, int]:
    await_readable(fed.kafka, f"{fed.name}-{topic}")
    records = fed.kafka.read_committed(f"{fed.name}-{topic}")
    return {json.loads(each.value or b"")["id"]: each.timestamp_ms for each in records}


def test_times_of_records(fed: Fed, said: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    """A run writes them, and so do bounded work and a replay; an audit compares them, where the topic keeps them."""
    fed.feed(COUNT)
    code, text = said("run", "--until", "latest", "--inline", "--checkpoint-interval", "10m")
    assert (code, "LogAppendTime" in text) == (0, False)
    fed.feed(COUNT)
    reference: dict[str, object] = {
        "module": "timed_pipelines", "attribute": "timed", "params": {"name": fed.name}, "path": str(HERE)
    }  # fmt: skip
    catch_up(fed, Loaded(load_reference(reference), reference), 1, tmp_path)
    wanted = {number: FIRST_MS + number for number in range(2 * COUNT)}
    assert times(fed, "out") == times(fed, "loose") == wanted

    code, text = said("audit", "--on", "driver", "--json")
    report = json.loads(text)
    assert (code, report["findings"], report["unjudged"]) == (0, [], [])
    code, text = said("audit", "--on", "driver", "--json", "--limit", "1000", "--param", "later_ms=1")
    findings = json.loads(text)["findings"]
    assert (code, {each["kind"] for each in findings}) == (1, {"changed"})
    assert len(findings) == 4 * COUNT
    assert {each["expected"]["timestamp_ms"] - each["seen"]["timestamp_ms"] for each in findings} == {1}

    code, text = said(
        "replay", "--on", "driver", "--checkpoint", str(max(fed.history().manifests)),
        "--into", f"{fed.name}-again-out", "--sink", "out",
    )  # fmt: skip
    assert code == 0, text
    assert times(fed, "again-out") == {number: FIRST_MS + number for number in range(COUNT, 2 * COUNT)}

    for topic in ("out", "loose"):
        fed.kafka.configure_topic(f"{fed.name}-{topic}", message_timestamp_type="LogAppendTime")
    fed.feed(COUNT)
    code, text = said("run", "--until", "latest", "--inline", "--checkpoint-interval", "10m")
    assert code == 0, text
    assert f"sink out: topic {fed.name}-out has message.timestamp.type=LogAppendTime" in text
    report = json.loads(said("audit", "--on", "driver", "--json")[1])
    assert report["findings"] == []
    assert [each.split(":")[0] for each in report["unjudged"][-2:]] == [
        f"the times of the records of sink {sink}" for sink in ("out", "loose")
    ]
    assert f"Topic {fed.name}-out does not keep the times of its sink" in " ".join(said("doctor")[1].split())

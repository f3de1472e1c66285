"""The partitions and times that a Kafka sink gives its records are the same, whoever writes them, and are audited."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from bounded import HERE, Fed, catch_up
from settled import await_readable
from timed_pipelines import FIRST_MS

from exactlyonce.pipeline.loading import Loaded, load_reference

TARGET = "timed_pipelines:placed"
TO_THE_END = ("--until", "latest", "--inline", "--checkpoint-interval", "10m", "--restart", "none")
COUNT = 40


def places(fed: Fed, topic: str) -> list[tuple[int, int, int]]:
    """(order, partition, time) of all records."""
    await_readable(fed.kafka, f"{fed.name}-{topic}")
    records = fed.kafka.read_committed(f"{fed.name}-{topic}")
    return sorted((json.loads(each.value or b"")["id"], each.partition, each.timestamp_ms) for each in records)


def wanted(count: int, first: int = 0) -> list[tuple[int, int, int]]:
    return [(number, number % 3, FIRST_MS + number) for number in range(first, count)]


def test_partitions_and_times_of_records(fed: Fed, said: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    """A run, bounded work and a replay choose the same; an audit finds functions that choose others."""
    fed.feed(COUNT)
    code, text = said("run", *TO_THE_END)
    assert (code, "LogAppendTime" in text) == (0, False), text
    fed.feed(COUNT)
    reference: dict[str, object] = {
        "module": "timed_pipelines", "attribute": "placed", "params": {"name": fed.name}, "path": str(HERE)
    }  # fmt: skip
    catch_up(fed, Loaded(load_reference(reference), reference), 2, tmp_path)
    assert places(fed, "out") == places(fed, "loose") == wanted(2 * COUNT)

    newest = str(max(fed.history().manifests))
    code, text = said("audit", "--on", "driver", "--json")
    report = json.loads(text)
    assert (code, report["findings"], report["unjudged"]) == (0, [], [])
    code, text = said("audit", "--on", "driver", "--json", "--limit", "1000", "--param", "shift=1")
    report = json.loads(text)
    assert (code, report["unjudged"]) == (1, [])
    assert {(each["sink"], each["kind"]) for each in report["findings"]} >= {("out", "missing"), ("loose", "missing")}
    code, text = said("audit", "--on", "driver", "--json", "--limit", "1000", "--param", "later_ms=1")
    findings = json.loads(text)["findings"]
    assert (code, len(findings), {each["kind"] for each in findings}) == (1, 4 * COUNT, {"changed"})
    assert {each["expected"]["timestamp_ms"] - each["seen"]["timestamp_ms"] for each in findings} == {1}
    code, text = said("replay", "--on", "driver", "--json", "--checkpoint", newest, "--param", "shift=1")
    assert (code, json.loads(text)["agrees"]) == (1, False)
    code, text = said(
        "replay", "--on", "driver", "--checkpoint", newest, "--into", f"{fed.name}-again-out", "--sink", "out"
    )
    assert code == 0, text
    assert places(fed, "again-out") == wanted(2 * COUNT, COUNT)

    fed.kafka.add_partitions(f"{fed.name}-out", 4)
    for topic in ("out", "loose"):
        fed.kafka.configure_topic(f"{fed.name}-{topic}", message_timestamp_type="LogAppendTime")
    fed.feed(COUNT)
    code, text = said("run", *TO_THE_END)
    assert code == 0, text
    assert f"sink out: topic {fed.name}-out has message.timestamp.type=LogAppendTime" in text
    report = json.loads(said("audit", "--on", "driver", "--json")[1])
    assert report["findings"] == []
    assert [each.split(":")[0] for each in report["unjudged"][-2:]] == [
        f"the times of the records of sink {sink}" for sink in ("out", "loose")
    ]
    assert f"Topic {fed.name}-out does not keep the times of its sink" in " ".join(said("doctor")[1].split())


@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
def test_partitions_under_weaker_deliveries(delivery: str, fed: Fed, said: Callable[..., tuple[int, str]]) -> None:
    fed.feed(COUNT)
    code, text = said("run", *TO_THE_END, "--param", f"delivery={delivery}")
    assert code == 0, text
    assert places(fed, "out") == places(fed, "loose") == wanted(COUNT)


def test_a_partition_that_the_topic_has_not(fed: Fed, said: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    """The run ends and names operator and record; once the topic has the partition, the same record is written."""
    fed.feed(COUNT)
    code, text = said("run", *TO_THE_END, "--param", "wrong=7")
    assert code == 3, text
    where = rf"Sink '(out|loose)' cannot write the record at {fed.name}-in\[\d\] offset \d+: partition= has given 3"
    assert re.search(where, text)
    assert places(fed, "out") == []
    reference: dict[str, object] = {
        "module": "timed_pipelines", "attribute": "placed", "params": {"name": fed.name, "wrong": 7}, "path": str(HERE)
    }  # fmt: skip
    with pytest.raises(Exception, match="partition= has given 3, and topic"):
        catch_up(fed, Loaded(load_reference(reference), reference), 1, tmp_path)
    for topic in ("out", "loose"):
        fed.kafka.add_partitions(f"{fed.name}-{topic}", 4)
    code, text = said("run", *TO_THE_END, "--param", "wrong=7")
    assert code == 0, text
    shown = [(number, partition) for number, partition, _ in places(fed, "out")]
    assert shown == [(number, 3 if number == 7 else number % 3) for number in range(COUNT)]

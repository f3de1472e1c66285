"""A diff names the keys whose outputs differ between two versions of a pipeline, and no other; it writes nothing."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from diffed_pipelines import FILES, LEFT_OUT, RAISED
from running import exactlyonce, orders

from exactlyonce.testing.cluster import KafkaCluster

HERE = Path(__file__).parent / "folds"
OLD, NEW = "diffed_pipelines:before", "diffed_pipelines:after"
Updates = dict[str, list[dict[str, Any]]]


class Case:
    """A pipeline that has run over the first orders, with more of them in its topic, of one partition."""

    def __init__(self, kafka: KafkaCluster, name: str) -> None:
        self.kafka, self.name = kafka, name
        kafka.create_topic(f"{name}-in")
        self.first, self.more = orders(120, 9), orders(200, 9, first=120)
        kafka.produce(f"{name}-in", self.first)
        self._command("backfill", OLD, "--on", "driver", "--parallelism", "2")
        kafka.produce(f"{name}-in", self.more)

    def diff(self, *words: str, code: int = 0) -> str:
        return self._command("diff", *words, code=code)

    def _command(self, *words: str, code: int = 0) -> str:
        return exactlyonce(self.kafka, *words, "--param", f"name={self.name}", folder=HERE, code=code)

    def updates(self, *, changed: bool) -> Updates:
        """The updates of the further orders by customer, as a version gives them."""
        sums: dict[str, int] = defaultdict(int)
        updates: Updates = defaultdict(list)
        for _, value in [*self.first, *self.more]:
            order = json.loads(value)
            customer = order["customer"]
            sums[customer] += order["total"]
            if order["id"] >= len(self.first) and not (changed and customer == LEFT_OUT):
                more = order["id"] % 2 if changed and customer == RAISED else 0
                updates[customer].append({"id": order["id"], "customer": customer, "sum": sums[customer] + more})
        return updates

    def written(self) -> dict[str, int]:
        """The number of records that readers see, by topic."""
        topics = [topic for topic in self.kafka.admin().list_topics().topics if topic.startswith(self.name)]
        return {topic: len(self.kafka.read_committed(topic)) for topic in topics}


@pytest.fixture
def case(kafka: KafkaCluster, topic_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setenv(FILES, str(tmp_path / "rows"))
    return Case(kafka, topic_name)


def test_versions_are_compared_from_the_state_of_a_checkpoint(case: Case) -> None:
    written = case.written()
    report = json.loads(case.diff(OLD, OLD, "--from", "1", "--on", "driver", "--json"))
    assert report["agrees"]
    assert report["records_in"] == len(case.more)
    counts = {sink["sink"]: (sink["old"], sink["new"], sink["keys"]) for sink in report["sinks"]}
    assert counts == {"out": (200, 200, 9), "ids": (200, 200, 1), "rows": (200, 200, 200)}
    assert "sink 'shown'" in report["not_compared"][0]
    report = json.loads(case.diff(OLD, NEW, "--from", "1", "--on", "driver", "--json", code=1))
    old, new = case.updates(changed=False), case.updates(changed=True)
    out, rows = (sink for sink in report["sinks"] if sink["differing"])
    assert (out["sink"], out["compared_by"], out["differing"], out["old"]) == ("out", "key", 2, 200)
    assert out["new"] == 200 - len(old[LEFT_OUT])
    found = {each["key"]: each for each in out["differences"]}
    place = next(place for place, pair in enumerate(zip(old[RAISED], new[RAISED], strict=True)) if pair[0] != pair[1])
    assert found[RAISED]["place"] == place
    assert [json.loads(found[RAISED][side]["value"]) for side in ("old", "new")] == [
        old[RAISED][place], new[RAISED][place]
    ]  # fmt: skip
    assert found[RAISED]["old"]["origin"] == [f"{case.name}-in", 0, old[RAISED][place]["id"]]
    assert (found[LEFT_OUT]["place"], found[LEFT_OUT]["new"]) == (0, None)
    assert json.loads(found[LEFT_OUT]["old"]["value"]) == old[LEFT_OUT][0]
    changed = [total["id"] for total in old[LEFT_OUT]]
    changed += [total["id"] for total, now in zip(old[RAISED], new[RAISED], strict=True) if total != now]
    assert (rows["sink"], rows["compared_by"], rows["differing"]) == ("rows", "input record", len(changed))
    found = {each["old"]["origin"][2]: each for each in rows["differences"]}
    assert found.keys() <= set(changed), "at most --limit of them are shown"
    for id, each in found.items():
        (total,) = (total for total in [*old[LEFT_OUT], *old[RAISED]] if total["id"] == id)
        assert (each["key"], json.loads(each["old"]["value"])) == (None, total)
        assert (each["new"] is None) == (total["customer"] == LEFT_OUT)
    text = case.diff(OLD, NEW, "--on", "driver", "--limit", "1", code=1)
    assert "and 1 keys more" in text
    assert f"{case.name}-in[0] " in text
    verdict = f"out: 2 of 9 keys differ; rows: {len(changed)} of 200 input records differ."
    assert text.splitlines()[-1].endswith(verdict)
    assert case.written() == written


def test_sinks_that_cannot_be_compared_are_named(case: Case) -> None:
    """The others are compared."""
    said = case.diff(OLD, "diffed_pipelines:moved", "--from", "1", "--on", "driver")
    assert f"not compared: where the outputs of sink 'out' go: to {case.name}-out by the old version, to " in said
    assert "not compared: the output of sink 'rows', which appends rows in the old version, and finds rows by " in said
    assert said.splitlines()[-1].endswith("from checkpoint 1 on: the outputs are the same.")


def test_a_diff_of_nothing_is_no_agreement(case: Case) -> None:
    """Right after a bounded run there is no input from its checkpoint on: another exit code, and where to begin."""
    case.diff(OLD, NEW, "--on", "driver", code=1)
    exactlyonce(case.kafka, "catch-up", OLD, "--param", f"name={case.name}", "--on", "driver", folder=HERE)
    newest = ("--from", "2", "--on", "driver")
    report = json.loads(case.diff(OLD, NEW, *newest, "--json", code=10))
    assert (report["agrees"], report["records_in"], report["sinks"]) == (False, 0, [])
    said = case.diff(OLD, NEW, *newest, code=10)
    assert "nothing to compare: there is no input after it. Begin at an earlier checkpoint, as of 0, 1, or" in said
    case.diff(OLD, NEW, "--from", "1", "--on", "driver", code=1)


def test_what_is_refused(case: Case) -> None:
    assert "checkpoint 99" in case.diff(OLD, NEW, "--from", "99", "--on", "driver", code=2)
    said = case.diff(OLD, "diffed_pipelines:elsewhere", "--on", "driver", code=2)
    assert f"orders of {case.name}-in. One has orders of {case.name}-more" in said
    assert "to is 'noon'. Write one of: latest, " in case.diff(OLD, NEW, "--to", "noon", "--on", "driver", code=2)

"""A diff names the keys whose outputs differ between two versions of a pipeline, and no other; it writes nothing."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from bounded import Silent
from diffed_pipelines import FILES, LEFT_OUT, RAISED
from running import exactlyonce, orders

from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.engines.bounded import diff as diff_module
from exactlyonce.engines.bounded import workplace as workplace_module
from exactlyonce.engines.bounded.diff import Diff, DiffReport, SinkDiff
from exactlyonce.engines.bounded.stages import Executors, Submit, in_process, perform, settled
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.loading import Loaded, load_reference
from exactlyonce.testing.cluster import KafkaCluster

HERE = Path(__file__).parent / "folds"
FIRST_MS = 1_700_000_000_000
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


TIMED = "diffed_pipelines:timed"
USERS = [f"u{number}" for number in range(7)]


class Timed:
    """The events of `timed`, of which a run of the local engine has taken some."""

    def __init__(self, kafka: KafkaCluster, name: str, folder: Path) -> None:
        self.kafka, self.name, self.folder = kafka, name, folder
        self.ids = 0
        for topic in ("in", "right"):
            kafka.create_topic(f"{name}-{topic}", 2)
        for results in ("windows", "pairs"):
            kafka.create_topic(f"{name}-{results}", 2)
        self.feed(300)
        self.run()

    def run(self) -> None:
        """The local engine takes all that is there."""
        parameters = ("--param", f"name={self.name}", "--until", "latest", "--inline")
        exactlyonce(self.kafka, "run", TIMED, *parameters, folder=HERE)

    def feed(self, count: int, later_ms: int = 0) -> None:
        """So many events more in each topic, in the order of their times; *later_ms* than they would be."""
        chance = random.Random(self.ids)
        for topic in ("in", "right"):
            events: list[dict[str, Any]] = [
                {"id": id, "user": chance.choice(USERS), "at": FIRST_MS + 100 * id + later_ms, "amount": id % 9}
                for id in range(self.ids, self.ids + count)
            ]
            self.kafka.produce(f"{self.name}-{topic}", [(event["user"], json.dumps(event)) for event in events])
        self.ids += count

    def end(self) -> None:
        """An event of each partition an hour later, which ends all windows, however long a version waits."""
        event = {"id": self.ids, "user": "last", "at": FIRST_MS + 3_600_000}
        for topic in ("in", "right"):
            for partition in range(2):
                self.kafka.produce(f"{self.name}-{topic}", [("last", json.dumps(event))], partition)

    def version(self, **params: str) -> Loaded:
        params = {"name": self.name, **params}
        reference: dict[str, object] = {
            "module": "diffed_pipelines", "attribute": "timed", "params": params, "path": str(HERE)
        }  # fmt: skip
        return Loaded(load_reference(reference), reference)

    def diff(
        self, new: Loaded, chunk_records: int | None = None, cores: int = 2, submit: Submit = in_process
    ) -> DiffReport:
        config = ClientConfig({"bootstrap.servers": self.kafka.bootstrap_servers})
        work = Diff(self.version(), new, config, checkpoint=self.base, chunk_records=chunk_records, shown=1_000)
        report = work.run(Executors(submit, self.folder / "staging", lambda: cores), Silent())
        left = [path for path in (self.folder / "staging").iterdir() if path.name.startswith("exactlyonce-")]
        assert left == [], "a command removes its staged files"
        return report

    @cached_property
    def base(self) -> int:
        """The checkpoint that the run has ended with."""
        history = read_history(ClientConfig({"bootstrap.servers": self.kafka.bootstrap_servers}), self.name)
        return history.checkpoint_latest

    def visible(self) -> dict[str, int]:
        return {results: len(self.kafka.read_committed(f"{self.name}-{results}")) for results in ("windows", "pairs")}


@pytest.fixture
def timed(kafka: KafkaCluster, topic_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Timed:
    monkeypatch.setenv(FILES, str(tmp_path / "rows"))
    return Timed(kafka, topic_name, tmp_path)


def twice(stage: str, work: Sequence[bytes]) -> list[bytes]:
    """Every unit has two attempts, of which the second counts."""
    for each in work:
        perform(each, f"{stage}-0")
    return settled(perform(each, f"{stage}-1") for each in work)


@pytest.mark.exhaustive
def test_chunks_give_the_differences_of_one_chunk(timed: Timed) -> None:
    """Windows and joins go on with their state from chunk to chunk, at any number of units, also in second attempts;
    and what the old version gives is what a run of the local engine writes."""
    assert timed.base > 0
    timed.feed(400)
    timed.end()
    changed = timed.version(raised=USERS[3])
    whole = timed.diff(changed)
    assert whole.records == 804
    found = {sink.sink: sink for sink in whole.sinks}
    assert {name: sink.by for name, sink in found.items()} == {
        "windows-out": "key", "pairs-out": "key", "windows-rows": "input record", "pairs-rows": "input record"
    }  # fmt: skip
    assert [found[name].differing for name in ("windows-out", "pairs-out")] == [1, 1]
    assert {difference.key for name in ("windows-out", "pairs-out") for difference in found[name].differences} == {
        USERS[3].encode()
    }
    assert found["windows-rows"].differing > 1
    chunked, again = timed.diff(changed, 100), timed.diff(changed, 150, cores=3, submit=twice)
    for report in (chunked, again):
        others = {sink.sink: sink for sink in report.sinks}
        for name in ("windows-out", "pairs-out", "windows-rows"):
            assert figures(others[name]) == figures(found[name])
            assert contents(others[name]) == contents(found[name])
        pairs = others["pairs-rows"]  # a pair stems from the record that came last, which the cut of chunks may change
        assert (pairs.old, pairs.new) == (found["pairs-rows"].old, found["pairs-rows"].new)
        assert pairs.differing > 1
    assert timed.diff(timed.version(), chunk_records=90).agrees
    before = timed.visible()
    timed.run()
    assert {name: count - before[name] for name, count in timed.visible().items()} == {
        name: found[f"{name}-out"].old for name in before
    }


def ends(kafka: KafkaCluster, topic: str) -> dict[int, int]:
    with closing(Topics(ClientConfig({"bootstrap.servers": kafka.bootstrap_servers}))) as topics:
        return topics.end_offsets(topic, committed=False)


def contents(sink: SinkDiff) -> list[tuple[object, ...]]:
    """The differences, without the input records that they stem from."""
    return sorted(
        (
            difference.key or b"",
            difference.place,
            *(output and output.value for output in (difference.old, difference.new)),
        )
        for difference in sink.differences
    )


def figures(sink: SinkDiff) -> tuple[object, ...]:
    return sink.sink, sink.old, sink.new, sink.keys, sink.differing


@pytest.mark.exhaustive
def test_results_that_a_version_holds_back_longer_are_no_differences(timed: Timed) -> None:
    """In another chunk than those of the other version: all chunks are compared at once."""
    timed.feed(400)
    timed.end()
    slower = timed.version(disorder="15s")
    report = timed.diff(slower, chunk_records=100)
    assert [figures(sink) for sink in report.sinks if sink.differing] == []
    assert report.agrees
    assert all(sink.old == sink.new > 0 for sink in report.sinks)


@pytest.mark.exhaustive
def test_state_is_staged_and_nothing_of_the_pipeline_is_written(timed: Timed) -> None:
    """Superseded blocks go with their chunk; the checkpoint topic has the records that it had."""
    timed.feed(400)
    timed.end()
    topic = f"{timed.name}.checkpoints"
    written, blocks = ends(timed.kafka, topic), list[int]()

    def submit(stage: str, work: Sequence[bytes]) -> list[bytes]:
        blocks.append(sum(1 for path in (timed.folder / "staging").rglob("new-state-*")))
        return in_process(stage, work)

    assert timed.diff(timed.version(), chunk_records=50, submit=submit).agrees
    assert max(blocks) > 0
    assert ends(timed.kafka, topic) == written
    per_chunk = [count for count in blocks if count]
    assert max(per_chunk) < 3 * min(per_chunk) + 20, "state does not pile up"


def test_outputs_that_will_not_fit_are_refused_after_the_first_chunk(
    timed: Timed, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed.feed(400)
    stages: list[str] = []

    def submit(stage: str, work: Sequence[bytes]) -> list[bytes]:
        stages.append(stage)
        return in_process(stage, work)

    for module in (diff_module, workplace_module):
        monkeypatch.setattr(module, "free_bytes", lambda staging: 2_000)
    said = (
        rf"The staging folder {timed.folder}/staging has 2\.0 kB free, and the outputs of both versions for the other "
        r"\d+ offsets need some .* more there\. .*Give --staging a folder with more room, or a place in HDFS or S3; or "
        r"read less: begin at a later checkpoint"
    )
    with pytest.raises(ConfigError, match=said):
        timed.diff(timed.version(), chunk_records=100, submit=submit)
    first = timed.base + 1
    assert {stage.partition(",")[0] for stage in stages} == {f"{timed.name}: checkpoint {first}"}

"""An audit finds what was planted, with its coordinates, finds nothing else, and says what it cannot judge."""

from __future__ import annotations

import json
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from auditing import TARGET, Quiet, audited, order_at, run_flawed
from bounded import HERE, Fed, catch_up, load_pipeline
from confluent_kafka import Producer
from flawed_pipelines import CHANGED, DOUBLED, DROPPED, FLAWED, MOVED
from running import Run, abort_while_a_worker_sleeps, orders
from settled import await_readable, ended_transactions

from exactlyonce.checkpoint.records.manifest import Committable
from exactlyonce.cli.main import main
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_history
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.bounded.audit import AuditReport
from exactlyonce.engines.bounded.recompute import interval_of, recomputed
from exactlyonce.engines.bounded.replay_repair import ReplayRepair
from exactlyonce.engines.bounded.reproduce import agree, counts
from exactlyonce.engines.bounded.stages import in_process
from exactlyonce.engines.bounded.unit import lane_audit, visible_lanes
from exactlyonce.pipeline.errors import BrokerUnavailable
from exactlyonce.pipeline.names import checkpoint_topic
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

Audit = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def audit(fed: Fed, capsys: Any, monkeypatch: Any) -> Audit:
    """`audit("--from", "3", flawed=True)` is the exit code and the report of an audit here."""

    def run(*arguments: str, flawed: bool = False) -> tuple[int, dict[str, Any]]:
        monkeypatch.chdir(HERE)
        monkeypatch.setenv(FLAWED, "1" if flawed else "0")
        servers = ("--bootstrap-servers", fed.kafka.bootstrap_servers)
        capsys.readouterr()
        code = main(["audit", TARGET, "--param", f"name={fed.name}", *servers, "--on", "driver", "--json", *arguments])
        said = capsys.readouterr()
        assert said.out, said.err
        return code, json.loads(said.out)

    return run


def transactions_of(fed: Fed) -> dict[str, Any]:
    names = ended_transactions(fed.kafka, f"eo:{fed.name}:")
    with closing(Transactions(fed.config)) as transactions:
        return transactions.describe(names)


@pytest.mark.exhaustive
def test_planted_defects_are_found_and_nothing_else(fed: Fed, audit: Audit) -> None:
    fed.feed(3000)
    run_flawed(fed, "--num-retained", "100", interval="10m")  # the pipeline's flaw does not outlive a checkpoint
    before = transactions_of(fed)
    code, report = audit(flawed=True)
    assert (code, report["findings"], report["unjudged"]) == (0, [], [])
    assert report["records_in"] == len(fed.all)
    code, report = audit()
    assert code == 1
    assert report["unjudged"] == []
    stems = {each["kind"]: order_at(fed.kafka, **each["input"]) for each in report["findings"]}
    given = {json.loads(value)["id"]: json.loads(value)["customer"] for _, value in fed.all}
    assert given[stems.pop("reordered")] == given[MOVED], "it may be told of any order of that customer"
    assert stems == {"missing": DROPPED, "doubled": DOUBLED, "changed": CHANGED}
    assert len(report["findings"]) == 4
    changed = next(each for each in report["findings"] if each["kind"] == "changed")
    assert json.loads(changed["seen"]["value"])["sum"] == -1
    shown = {(each.partition, each.offset): each for each in fed.kafka.read_committed(f"{fed.name}-out")}
    assert shown[changed["partition"], changed["offset"]].value == changed["seen"]["value"].encode()
    fed.kafka.produce(f"{fed.name}-out", [("c1", "foreign")])
    code, report = audit(flawed=True)
    assert (code, [each["kind"] for each in report["findings"]]) == (1, ["foreign"])
    assert audit("--ignore-foreign", flawed=True)[0] == 0
    assert transactions_of(fed) == before


@pytest.mark.exhaustive
def test_what_cannot_be_judged_is_said(fed: Fed, audit: Audit, capsys: Any) -> None:
    fed.feed(600)
    run_flawed(fed, "--num-retained", "2", parallelism=1, interval="10m")
    fed.feed(600)
    run_flawed(fed, "--num-retained", "2", parallelism=3, interval="10m")
    history = fed.history()
    older, newest = sorted(history.manifests)[-2:]
    code, report = audit("--from", "1", flawed=True)
    assert code == 0
    assert report["checkpoints"] == [newest]
    assert any(f"began at checkpoint {older - 1}, which is expired" in each for each in report["unjudged"])
    code, report = audit("--to", str(newest + 5), flawed=True)
    assert any(f"the newest is {newest}" in each for each in report["unjudged"])

    out = f"{fed.name}-out"
    writes = [each for c in history.manifests[newest].committables if c.sink == "out" for each in c.written]
    written = min((each for each in writes if each.partition == 0), key=lambda each: each.first_offset)
    fed.kafka.delete_records(out, {written.partition: written.first_offset + 1})
    code, report = audit(flawed=True)
    assert code == 0
    (unjudged,) = [each for each in report["unjudged"] if "has removed the others" in each]
    assert f"{out}[{written.partition}] holds {written.count - 1} of {written.count} records" in unjudged

    fed.kafka.delete_records(f"{fed.name}-in", {0: -1})
    code, report = audit(flawed=True)
    assert (code, report["checkpoints"]) == (10, [])
    assert any("cannot be computed again: Input is missing" in each for each in report["unjudged"])


def test_records_where_no_checkpoint_has_written_are_said(fed: Fed, tmp_path: Path) -> None:
    out = f"{fed.name}-out"
    fed.kafka.create_topic(out, 60)
    fed.feed(100)
    pipeline = load_pipeline("flawed_pipelines", "flawed", fed.name)
    catch_up(fed, pipeline, 2, tmp_path)
    assert audited(pipeline, fed.config, tmp_path).unjudged == []
    free = min(set(range(60)) - {record.partition for record in fed.kafka.read_committed(out)})
    fed.kafka.produce(out, [("c1", "doubled")], partition=free)
    report = audited(pipeline, fed.config, tmp_path)
    assert report.findings == []
    assert report.unjudged == [
        f"{out}[{free}] has records, and no judged checkpoint has written there: they were not read"
    ]


def test_output_that_goes_during_an_audit(fed: Fed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the scan of a partition and its reading, or before a lane is read again, or as a whole topic."""
    out, copies = f"{fed.name}-out", f"{fed.name}-copies"
    fed.kafka.create_topic(out, 2)
    fed.kafka.create_topic(copies, 1)
    fed.feed(500)
    pipeline = load_pipeline("flawed_pipelines", "flawed", fed.name)
    monkeypatch.setenv(FLAWED, "1")
    catch_up(fed, pipeline, 2, tmp_path)
    monkeypatch.setenv(FLAWED, "0")
    planted = ["changed", "doubled", "missing", "reordered"]

    def audited_while_losing(module: ModuleType, lossy: str) -> AuditReport:
        """The report, and the log of *lossy* loses the first record of each partition before *module* reads it."""
        read, lost = module.visible_runs, set[int]()

        def runs(config: ClientConfig, topic: str, partition: int, start: int, *rest: Any) -> Any:
            if topic == lossy and partition not in lost:
                lost.add(partition)
                fed.kafka.delete_records(topic, {partition: start + 1})
            return read(config, topic, partition, start, *rest)

        with monkeypatch.context() as patched:
            patched.setattr(module, "visible_runs", runs)
            report = audited(pipeline, fed.config, tmp_path)
        assert lost
        return report

    report = audited_while_losing(visible_lanes, copies)
    assert sorted(each.finding.kind for each in report.findings) == planted
    assert report.unjudged == [
        f"{copies}[0] holds {len(fed.all) - 1} of {len(fed.all)} records of checkpoint 1, sink copies: retention or "
        f"compaction has removed the others"
    ]
    admin = fed.kafka.admin()
    admin.delete_topics([copies])[copies].result(LIMIT_S)
    report = audited(pipeline, fed.config, tmp_path)
    assert sorted(each.finding.kind for each in report.findings) == planted
    (unjudged,) = report.unjudged
    assert unjudged.startswith(f"the output in topic {copies}: ")
    differing = {each.finding.partition for each in report.findings}
    report = audited_while_losing(lane_audit, out)
    assert (report.findings, report.checkpoints) == ([], [1])
    assert report.unjudged[1:] == [
        f"{out}[{partition}]: records of checkpoint 1, sink out were not compared: retention or compaction has removed "
        f"some during the audit"
        for partition in sorted(differing, key=str)
    ]


@pytest.mark.exhaustive
def test_output_behind_an_open_transaction_is_not_missing(fed: Fed, tmp_path: Path) -> None:
    out = f"{fed.name}-out"
    fed.kafka.create_topic(out, 1)
    pipeline = load_pipeline("flawed_pipelines", "flawed", fed.name)
    other = Producer({"bootstrap.servers": fed.kafka.bootstrap_servers, "transactional.id": f"{fed.name}-other"})
    other.init_transactions(LIMIT_S)
    other.begin_transaction()
    other.produce(out, b"theirs")
    other.flush(LIMIT_S)
    fed.feed(100)
    with pytest.raises(BrokerUnavailable, match=rf"an open transaction holds readers of {out}-0"):
        catch_up(fed, pipeline, 2, tmp_path)
    report = audited(pipeline, fed.config, tmp_path, ignore_foreign=True)
    assert report.findings == []
    assert any(
        line.startswith(f"{out}[0]: ") and "are behind an open transaction, which no reader passes" in line
        for line in report.unjudged
    )
    other.commit_transaction(LIMIT_S)
    await_readable(fed.kafka, out)
    report = audited(pipeline, fed.config, tmp_path, ignore_foreign=True)
    assert (report.findings, report.unjudged) == ([], [])


@pytest.mark.exhaustive
def test_a_checkpoint_that_carries_aborted_ones_is_computed_again(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    kafka.create_topic(f"{topic_name}-in", 4)
    kafka.produce(f"{topic_name}-in", orders(3000))
    job = Run(
        kafka.bootstrap_servers, "pipelines:stopping", f"--param=name={topic_name}", f"--param=folder={tmp_path}",
        *("--parallelism", "2", "--checkpoint-interval", "100ms", "--checkpoint-timeout", "700ms"),
        *("--tolerable-failed", "50", "--num-retained", "500"),
    )  # fmt: skip
    try:
        job.await_checkpoint()
        fed, deadline = 3000, time.monotonic() + LIMIT_S
        carrying: list[int] = []
        while not carrying:  # the one that was aborted may have been triggered before the records were taken
            assert time.monotonic() < deadline, job.said
            fed += len(abort_while_a_worker_sleeps(job, kafka, f"{topic_name}-in", tmp_path, fed))
            job.await_checkpoint()
            client = ClientConfig({"bootstrap.servers": kafka.bootstrap_servers})
            manifests = read_history(client, topic_name).manifests.values()
            carrying = [m.checkpoint for m in manifests if any(c.checkpoint < m.checkpoint for c in m.committables)]
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 0, job.said
    finally:
        job.process.kill()
    servers = {"bootstrap.servers": kafka.bootstrap_servers}
    loaded = load_pipeline("pipelines", "stopping", topic_name, folder=str(tmp_path))
    report = audited(loaded, ClientConfig(servers), tmp_path, min(carrying), max(carrying))
    assert set(report.checkpoints) >= set(carrying)
    assert (report.findings, report.unjudged) == ([], [])
    assert report.records_out > 0


def test_intervals_are_computed_together(fed: Fed, tmp_path: Path) -> None:
    """Units of a stage are one work, also at several parallelisms; one that cannot be computed leaves the others."""
    loaded, stages = load_pipeline("bounded_pipelines", "broad", fed.name), list[str]()

    def noting(stage: str, work: Sequence[bytes]) -> list[bytes]:
        stages.append(stage)
        return in_process(stage, work)

    for parallelism in (2, 1, 3):
        fed.feed(60)
        catch_up(fed, loaded, parallelism, tmp_path)
    report = audited(loaded, fed.config, tmp_path, submit=noting)
    assert (report.checkpoints, report.findings) == ([2, 3], [])
    assert (report.records_in, report.records_out) == (180, 3 * 180)
    assert [stage.partition(", ")[0].removeprefix(f"{fed.name}: ") for stage in stages] == [
        "audit", *["checkpoints 2 to 3"] * (len(stages) - 1)
    ]  # fmt: skip
    second = fed.history().manifests[2]
    fed.kafka.delete_records(
        f"{fed.name}-in", {end.partition: end.offset for end in second.offsets if end.topic == f"{fed.name}-in"}
    )
    again = audited(loaded, fed.config, tmp_path)
    assert (again.checkpoints, again.findings, again.records_in) == ([3], [], 90)
    (reason,) = set(again.unjudged) - set(report.unjudged)
    assert reason.startswith("checkpoint 2 cannot be computed again: Input is missing")


@pytest.mark.exhaustive
def test_a_replay_counts_and_shows_one_checkpoint(fed: Fed, capsys: Any, monkeypatch: Any) -> None:
    fed.feed(800)
    run_flawed(fed, "--num-retained", "500", interval="10m")
    history = fed.history()
    number = max(n for n, each in history.manifests.items() if each.committables)
    monkeypatch.chdir(HERE)
    monkeypatch.setenv(FLAWED, "1")

    def replay(*arguments: str) -> tuple[int, str]:
        capsys.readouterr()
        words = ["replay", TARGET, "--param", f"name={fed.name}", "--checkpoint", str(number), "--on", "driver"]
        code = main([*words, "--bootstrap-servers", fed.kafka.bootstrap_servers, *arguments])
        said = capsys.readouterr()
        return code, said.out or said.err

    code, out = replay("--json", "--into", f"{fed.name}-replayed", "--sink", "out")
    report = json.loads(out)
    assert (code, report["agrees"]) == (0, True)
    decided = Counter[int]()
    for each in (each for each in history.manifests[number].committables if each.sink == "out"):
        decided.update({written.partition: written.count for written in each.written})
    assert {each["partition"]: each["replayed"] for each in report["counts"] if each["sink"] == "out"} == decided
    await_readable(fed.kafka, f"{fed.name}-replayed", f"{fed.name}-out")
    again = fed.kafka.read_committed(f"{fed.name}-replayed")
    original = {(each.partition, each.key, each.value) for each in fed.kafka.read_committed(f"{fed.name}-out")}
    assert len(again) == report["records_produced"] == decided.total()
    assert {(each.partition, each.key, each.value) for each in again} <= original
    for arguments, said in (
        (("--into", f"{fed.name}-out", "--sink", "out"), "is a topic of the pipeline itself"),
        (("--into", checkpoint_topic(fed.name), "--sink", "out"), "is a topic of the pipeline itself"),
        (("--into", f"{fed.name}-replayed"), "--sink"),
        (("--checkpoint", "999"),
         rf"{fed.name} has no checkpoint 999: .* Name one of those that are retained: .*\b{number}\b"),
        (("--checkpoint", "0"), "checkpoint 0"),
    ):  # fmt: skip
        code, out = replay(*arguments)
        assert code == 2
        assert re.search(said, out)
    code, out = replay()
    assert code == 0
    assert "the counts are the decided ones" in out


@pytest.mark.exhaustive
def test_output_topics_that_get_partitions(fed: Fed, tmp_path: Path, monkeypatch: Any) -> None:
    """While a checkpoint is published: it goes to those that were known when its outputs were distributed."""
    monkeypatch.setenv(FLAWED, "1")
    loaded = load_pipeline("flawed_pipelines", "flawed", fed.name)

    def growing(stage: str, work: Sequence[bytes]) -> list[bytes]:
        if stage.endswith(", publish"):
            fed.kafka.add_partitions(f"{fed.name}-out", 5)
        return in_process(stage, work)

    for submit in (in_process, growing):
        fed.feed(300)
        catch_up(fed, loaded, 2, tmp_path, submit=submit)

    def audit() -> AuditReport:
        return audited(loaded, fed.config, tmp_path, 2)

    report = audit()
    assert (report.checkpoints, report.findings, report.unjudged) == ([2], [], [])
    client, history = fed.config, fed.history()
    manifest = history.manifests[2]
    with recomputed(loaded, client, interval_of(history, 2), in_process, tmp_path) as again:
        assert agree(counts(client, history, manifest, again))
    repair = ReplayRepair(loaded, client, 60_000, fed.history, Quiet().note, lambda stack: in_process, tmp_path)
    transactions = Transactions(client)
    for each in manifest.committables:
        stand_in = repair(manifest, each, f"{fed.name}-{each.sink}-{each.subtask}")
        assert isinstance(stand_in, Committable), stand_in
        assert stand_in.counts == each.counts
        transactions.end_until_answered(stand_in.transactional_id, stand_in.producer_id, stand_in.epoch, commit=False)
    transactions.close()
    repair.close()
    monkeypatch.setenv(FLAWED, "0")
    assert sorted(each.finding.kind for each in audit().findings) == ["changed", "reordered"]

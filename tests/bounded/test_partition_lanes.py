"""Outputs that units have distributed: whole partitions are published, audited, copied and computed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from auditing import audited
from bounded import Fed, Silent, catch_up, drive, load_pipeline, run_local
from bounded_pipelines import broad
from losing import Together, expire
from manifests import manifest as blank_manifest
from running import assert_copies, assert_totals
from settled import await_readable

from exactlyonce.checkpoint.events import Ack
from exactlyonce.checkpoint.records.manifest import Committable, TopicInfo
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines.bounded import advance
from exactlyonce.engines.bounded.advance import PUBLISHER_RECORDS
from exactlyonce.engines.bounded.recompute import interval_of, recomputed
from exactlyonce.engines.bounded.reproduce import agree, counts
from exactlyonce.engines.bounded.stages import in_process
from exactlyonce.engines.bounded.unit import outgoing
from exactlyonce.engines.bounded.unit.messages import Receipt, Stage
from exactlyonce.engines.bounded.unit.staging import OutputBatch, OutputFile, StagedFile, StagedFiles, read_outputs
from exactlyonce.engines.plan import TaskSpec, plan
from exactlyonce.pipeline.errors import ConfigError

pytestmark = pytest.mark.broker


def test_a_transaction_has_whole_partitions(fed: Fed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are as many transactions as subtasks, or as partitions if these are fewer. A run has its own, as ever."""
    monkeypatch.setattr(advance, "PUBLISHER_RECORDS", 1)
    fed.feed(300)
    loaded = load_pipeline("bounded_pipelines", "broad", fed.name)
    manifest = catch_up(fed, loaded, 5, tmp_path).manifest
    assert manifest.outputs_by_partition == tuple((sink, 4) for sink in ("copies", "out", "rounds-out"))
    for sink in ("copies", "out", "rounds-out"):
        own = [each for each in manifest.committables if each.sink == sink]
        assert [each.subtask for each in own] == list(range(4))
        partitions = [written.partition for each in own for written in each.written]
        assert sorted(partitions) == sorted(set(partitions)), "no partition is in two transactions"
    fed.feed(300)
    run_local(fed, 1, interval="10m")
    fed.feed(300)
    catch_up(fed, loaded, 3, tmp_path)
    fed.assert_output()
    history = fed.history()
    report = audited(loaded, fed.config, tmp_path)
    assert report.findings == []
    judged = [bool(history.manifests[number].outputs_by_partition) for number in report.checkpoints]
    assert judged[0] is False, "a run's checkpoint"
    assert judged[-1] is True
    for number in report.checkpoints:
        with recomputed(loaded, fed.config, interval_of(history, number), in_process, tmp_path) as again:
            counted = counts(fed.config, history, history.manifests[number], again)
        assert agree(counted)
        if history.manifests[number].outputs_by_partition:
            assert all(count.replayed == count.decided for count in counted), "no record is anywhere by chance"


@pytest.mark.parametrize(
    ("partitions", "parallelism", "records", "wanted"),
    [
        ((0, 1, 2, 3), 2, PUBLISHER_RECORDS, [(0, 2), (1, 3)]),
        ((1, 5), 9, PUBLISHER_RECORDS, [(1,), (5,)]),
        ((0, 1, 2, 3), 9, PUBLISHER_RECORDS // 2, [(0, 2), (1, 3)]),
        ((0, 1, 2), 9, 1, [(0, 1, 2)]),
        ((), 3, 1, []),
    ],
)
def test_partitions_are_shared_out(
    partitions: tuple[int, ...], parallelism: int, records: int, wanted: list[tuple[int, ...]], tmp_path: Path
) -> None:
    """Each partition has so many *records*; little output is not worth many transactions."""
    spec = TaskSpec(
        reference={}, parallelism=parallelism, incarnation=1, attempt=0, manifest=blank_manifest(),
        topic=TopicInfo("p.checkpoints", "id", 1, 1),
    )  # fmt: skip
    stage = Stage(
        spec=spec, fingerprint="", checkpoint=1, write_state=True, origins=False, files=f"{tmp_path}/",
        by_partition=True,
    )  # fmt: skip
    receipts = [_receipt(number, {partition: records}) for number, partition in enumerate(partitions)]
    found = list(advance._publications(stage, {}, plan(broad("p").build(), parallelism), 1, receipts))
    assert [each.partitions for each in found] == wanted
    assert [each.publisher for each in found] == list(range(len(wanted)))


class Tampering:
    """A publication that swaps two records of one partition of each sink, and writes one twice instead of another."""

    def __init__(self) -> None:
        self.done: set[str] = set()

    def __call__(self, files: StagedFiles, lanes: list[tuple[OutputFile, int]]) -> Iterator[Iterator[OutputBatch]]:
        for (output, partition), batches in zip(lanes, read_outputs(files, lanes), strict=True):
            yield self._tampered(output.sink, partition, batches)

    def _tampered(self, sink: str, partition: int, batches: Iterator[OutputBatch]) -> Iterator[OutputBatch]:
        for batch in batches:
            if partition == 1 and sink not in self.done and len(batch.values) > 12:
                self.done.add(sink)
                numbers = list(range(len(batch.values)))
                numbers[3], numbers[4], numbers[11] = 4, 3, 10
                batch = batch._taken(partial(_in_order, numbers))
            yield batch


def _in_order(numbers: list[int], column: list[Any]) -> list[Any]:
    return [column[number] for number in numbers]


def test_an_audit_finds_what_is_wrong_in_a_partition(fed: Fed, tmp_path: Path, monkeypatch: Any) -> None:
    """Also of records without a key, whose places the units decide: nothing is compared in any order."""
    fed.feed(800)
    loaded, tampering = load_pipeline("bounded_pipelines", "broad", fed.name), Tampering()
    with monkeypatch.context() as patched:
        patched.setattr(outgoing, "read_outputs", tampering)
        catch_up(fed, loaded, 3, tmp_path)
    report = audited(loaded, fed.config, tmp_path)
    assert tampering.done == {"copies", "out", "rounds-out"}
    found = Counter((each.sink, each.finding.kind, each.finding.partition) for each in report.findings)
    kinds = ("doubled", "missing", "reordered")
    assert found == Counter({(sink, kind, 1): 1 for sink in tampering.done for kind in kinds})
    assert report.unjudged == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["copied", "computed"])
def test_a_lost_publication(way: str, fed: Fed, tmp_path: Path) -> None:
    """The broker has aborted one of a decided checkpoint's transactions, and perhaps lost its records."""
    fed.feed(3_000)
    assert drive(fed, tmp_path / "staging", "coordinator-decided", tmp_path / "fired") == -9
    manifest = fed.history().unfinalized
    assert manifest is not None
    assert manifest.previous > 0, "the interval begins with state"
    lost = next(each for each in manifest.committables if (each.sink, each.subtask) == ("copies", 1))
    _end_all(fed, manifest.committables, lost)
    copies = f"{fed.name}-copies"
    seen_before = {copies: expire(fed.kafka, copies)} if way == "computed" else {}
    loaded, progress = load_pipeline("bounded_pipelines", "broad", fed.name), Silent()
    catch_up(fed, loaded, 3, tmp_path / "staging", progress=progress)
    assert any(f"{lost.transactional_id} repaired" in note for note in progress.notes)
    assert any("computed again" in note or "replaying" in note for note in progress.notes) == (way == "computed")
    await_readable(fed.kafka, copies)
    assert_copies(Together(fed.kafka, seen_before), copies, fed.all)
    assert_totals(fed.kafka, f"{fed.name}-out", fed.all)
    report = audited(loaded, fed.config, tmp_path)
    assert report.findings == []
    assert any("has removed the others" in reason for reason in report.unjudged) == (way == "computed")
    fed.assert_nothing_left()


def _end_all(fed: Fed, committables: tuple[Committable, ...], lost: Committable) -> None:
    with closing(Transactions(fed.config)) as transactions:
        for each in committables:
            transactions.end_until_answered(
                each.transactional_id, each.producer_id, each.epoch, commit=each is not lost
            )


@pytest.mark.exhaustive
def test_a_staged_file_that_vanishes(fed: Fed, tmp_path: Path) -> None:
    """The checkpoint never happens, no transaction stays open, and the next command does it all."""
    fed.feed(300)
    loaded = load_pipeline("bounded_pipelines", "broad", fed.name)

    def losing(stage: str, work: Sequence[bytes]) -> list[bytes]:
        if stage.endswith(", publish"):
            min(tmp_path.glob("*/output-out-*")).unlink()
        return in_process(stage, work)

    with pytest.raises(ConfigError, match=r"cannot be read whole: No such file.*the folder of --staging"):
        catch_up(fed, loaded, 2, tmp_path, submit=losing)
    assert not fed.open_transactions(), "those of sinks whose files were all there are aborted"
    assert fed.history().checkpoint_latest == 0
    catch_up(fed, loaded, 2, tmp_path)
    fed.assert_output()
    fed.assert_nothing_left()


def _receipt(subtask: int, counts: dict[int, int]) -> Receipt:
    outputs = (OutputFile("out", subtask, StagedFile("", b""), counts),)
    return Receipt(
        ack=Ack("t", subtask, 1), sent=(), outputs=outputs, records=0, skipped=(), began_ms=0, ended_ms=0, label="a-0"
    )

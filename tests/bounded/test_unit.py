"""Units, run in this process without publishing: what they compute, and along which order."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
from bounded_pipelines import Opened
from manifests import manifest

from exactlyonce.checkpoint.records.manifest import RecordPlace, SourceOffset
from exactlyonce.connectors.kafka.checkpoint_topic.blocks import BlockReader
from exactlyonce.connectors.kafka.checkpoint_topic.topic import prepare_topic
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.engines.bounded.advance import readings
from exactlyonce.engines.bounded.stages import compute, in_process
from exactlyonce.engines.bounded.unit.messages import Reading, Receipt, Stage
from exactlyonce.engines.bounded.unit.staging import read_lane
from exactlyonce.engines.plan import TaskSpec, plan
from exactlyonce.pipeline.errors import ExactlyOnceError, Halt
from exactlyonce.pipeline.loading import Loaded


class Computing:
    def __init__(self, fed: Any, loaded: Loaded, parallelism: int, folder: Path) -> None:
        self.config = ClientConfig({"bootstrap.servers": fed.kafka.bootstrap_servers})
        self.graph = loaded.pipeline.build()
        self.plan = plan(self.graph, parallelism)
        self.topic = prepare_topic(self.config, self.graph.pipeline_id, 3)
        topics = Topics(self.config)
        names = {node.id: str(node.source.topic) for node in self.graph.sources if node.source}
        described = topics.describe(names.values())
        self.ranges: tuple[Reading, ...] = readings(
            {
                source: {
                    partition: SourceOffset(source, name, described[name].topic_id, partition, offset)
                    for partition, offset in topics.start_offsets(name).items()
                }
                for source, name in names.items()
            },
            {source: topics.end_offsets(name, committed=True) for source, name in names.items()},
        )
        topics.close()
        base = manifest(
            pipeline=self.graph.pipeline_id, checkpoint=0, incarnation=1, kind="initial", base=0, previous=0,
            fingerprint=self.graph.fingerprint(), max_parallelism=self.graph.max_parallelism, parallelism=parallelism,
            block_partitions=self.topic.partitions,
        )  # fmt: skip
        spec = TaskSpec(
            reference=loaded.reference, parallelism=parallelism, incarnation=1, attempt=0, manifest=base,
            topic=self.topic,
        )  # fmt: skip
        self.stage = Stage(
            spec=spec, fingerprint=self.graph.fingerprint(), checkpoint=1, write_state=True, origins=False,
            files=f"{folder}/", by_partition=False,
        )  # fmt: skip
        self._runs = count()

    def run(self, **changes: Any) -> list[Receipt]:
        logs, skips = changes.pop("logs", None), changes.pop("skips", ())
        folder = Path(self.stage.files, f"run-{next(self._runs)}")
        folder.mkdir()
        spec = msgspec.structs.replace(self.stage.spec, skips=skips)
        stage = msgspec.structs.replace(self.stage, spec=spec, files=f"{folder}/", **changes)
        return compute(self.plan, stage, dict(self.config.settings), self.ranges, in_process, logs)

    def logs(self, receipts: list[Receipt]) -> dict[tuple[str, int], tuple[bytes, ...]]:
        reader = BlockReader(self.config.confluent(), self.topic)
        wanted = {each.ack.order_log for each in receipts if each.ack.order_log is not None}
        return {(log.task, log.subtask): tuple(b.body for _, b in reader.fetch(log.blocks)) for log in wanted}


def outputs(receipts: list[Receipt]) -> dict[tuple[str, int], list[Any]]:
    found: dict[tuple[str, int], list[Any]] = defaultdict(list)
    for file in (file for receipt in receipts for file in receipt.outputs):
        for batch in read_lane([file], 0):
            found[file.sink, file.subtask] += [json.loads(value or b"") for value in batch.values]
    return found


def values(receipts: list[Receipt], sink: str) -> list[Any]:
    """All values of a sink, those of each subtask in order."""
    return [value for (name, _), some in outputs(receipts).items() if name == sink for value in some]


def assert_running_totals(updates: list[Any], given: dict[int, Any]) -> None:
    assert sorted(update["id"] for update in updates) == sorted(given)
    sums: dict[str, int] = defaultdict(int)
    for update in updates:
        sums[update["customer"]] += given[update["id"]]["total"]
        assert update["sum"] == sums[update["customer"]]


def test_units_give_what_a_fold_gives(fed: Any, loaded: Any, tmp_path: Path) -> None:
    fed.feed(2_000)
    receipts = Computing(fed, loaded("broad"), 3, tmp_path).run()
    assert sum(each.records for each in receipts) == 3_000
    given = {order["id"]: order for order in (json.loads(value) for _, value in fed.all)}
    assert_running_totals(values(receipts, "out"), given)
    assert sorted(each["id"] for each in values(receipts, "copies")) == sorted(given)


def test_units_leave_out_what_is_to_be_skipped(fed: Any, loaded: Any, tmp_path: Path) -> None:
    fed.feed(50)
    computing = Computing(fed, loaded("broad"), 1, tmp_path)
    topic = next(each.topic for each in computing.ranges if each.length > 1)
    receipts = computing.run(skips=(RecordPlace(topic, 0, 1), RecordPlace("other", 0, 0)))
    assert sum(each.skipped_count for each in receipts) == 1
    assert len(values(receipts, "copies")) == sum(each.records for each in receipts) - 1


def test_what_cannot_be_assembled(fed: Any, loaded: Any, tmp_path: Path) -> None:
    with pytest.raises(ExactlyOnceError, match="no database today"):
        Computing(fed, loaded("half_opened"), 1, tmp_path).run()
    assert Opened.count == 0


def test_a_branch_that_changes_its_records_in_place(fed: Any, loaded: Any, tmp_path: Path) -> None:
    fed.feed(300)
    given = {order["id"]: order for order in (json.loads(value) for _, value in fed.left)}
    receipts = Computing(fed, loaded("changing"), 2, tmp_path).run()
    assert_running_totals(values(receipts, "out"), given)
    copies = {each["id"]: each["total"] for each in values(receipts, "copies")}
    assert copies == {number: 2 * order["total"] for number, order in given.items()}


def test_edges_whose_names_are_alike(fed: Any, loaded: Any, tmp_path: Path) -> None:
    fed.feed(300)
    receipts = Computing(fed, loaded("alike"), 2, tmp_path).run()
    for sink in ("out", "copies"):
        assert sorted(each["id"] for each in values(receipts, sink)) == list(range(300))


def test_a_log_that_does_not_fit_is_a_halt(fed: Any, loaded: Any, tmp_path: Path) -> None:
    fed.feed(300)
    computing = Computing(fed, loaded("broad"), 2, tmp_path)
    logs = computing.logs(computing.run())
    fed.feed(100)
    whole, computing.ranges = computing.ranges, Computing(fed, loaded("broad"), 2, tmp_path).ranges
    with pytest.raises(Halt, match="there are records behind"):
        computing.run(logs=logs)
    computing.ranges = tuple(msgspec.structs.replace(each, end=each.end - (each.end > 0)) for each in whole)
    with pytest.raises(Halt, match="more than there are to read"):
        computing.run(logs=logs)


def test_the_order_log_of_a_single_partition(fed: Any, loaded: Any, tmp_path: Path) -> None:
    """Missing input is noticed; a checkpoint from before such subtasks wrote order logs is computed again."""
    fed.feed(400)
    computing = Computing(fed, loaded("changing"), 4, tmp_path)
    first = computing.run()
    logs = computing.logs(first)
    assert {(each.ack.task, each.ack.subtask) for each in first if each.records} <= set(logs)
    sources = {each.ack.task for each in first if each.records}
    older = {place: log for place, log in logs.items() if place[0] not in sources}
    assert outputs(computing.run(logs=older, write_state=False)) == outputs(first)
    computing.ranges = tuple(
        msgspec.structs.replace(each, start=each.start + (each.end > 0)) for each in computing.ranges
    )
    with pytest.raises(Halt, match="more than there are to read"):
        computing.run(logs=logs, write_state=False)


def test_an_empty_partition_has_no_order_log(fed: Any, loaded: Any, tmp_path: Path) -> None:
    computing = Computing(fed, loaded("changing"), 4, tmp_path)
    assert "left" not in {task for task, _ in computing.logs(computing.run())}

"""The deliveries of sinks in bounded work: units write at once, what cannot be done right is refused, audits say so."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from auditing import audited
from bounded import Silent, load_pipeline, twice
from running import orders
from settled import await_readable

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.engines.bounded.audit import AuditReport
from exactlyonce.engines.bounded.catch_up import CatchUp
from exactlyonce.engines.bounded.stages import Submit, in_process
from exactlyonce.engines.options import RunOptions
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.loading import Loaded
from exactlyonce.testing.cluster import KafkaCluster

COUNT = 200


class Changing:
    def __init__(self, kafka: KafkaCluster, name: str, folder: Path) -> None:
        self.kafka, self.name, self.folder = kafka, name, folder
        self.client = ClientConfig({"bootstrap.servers": kafka.bootstrap_servers})
        self.fed = 0
        kafka.create_topic(f"{name}-in", 2)

    def loaded(self, delivery: str) -> Loaded:
        database = str(self.folder / "rows.db")
        return load_pipeline("stored", "changing", self.name, database=database, delivery=delivery)

    def catch_up(self, delivery: str, submit: Submit = in_process) -> None:
        self.kafka.produce(f"{self.name}-in", orders(COUNT, first=self.fed))
        self.fed += COUNT
        options = RunOptions(self.client, parallelism=1)
        CatchUp(self.loaded(delivery), options, Silent()).lead(submit, self.folder)

    def audit(self, delivery: str) -> AuditReport:
        return audited(self.loaded(delivery), self.client, self.folder)

    def times(self) -> list[Counter[int]]:
        """How often a reader finds how many orders, in the topic and in the database."""
        await_readable(self.kafka, f"{self.name}-out")
        values = [record.value or b"" for record in self.kafka.read_committed(f"{self.name}-out")]
        with closing(sqlite3.connect(self.folder / "rows.db")) as reader:
            rows = [row.encode() for (row,) in reader.execute("select row from rows")]
        return [Counter(Counter(json.loads(each)["id"] for each in found).values()) for found in (values, rows)]


@pytest.fixture
def changing(kafka: KafkaCluster, topic_name: str, tmp_path: Path) -> Changing:
    return Changing(kafka, topic_name, tmp_path)


@pytest.mark.parametrize(("delivery", "times"), [("exactly_once", 1), ("at_least_once", 2)])
def test_a_unit_that_is_tried_again(changing: Changing, delivery: str, times: int) -> None:
    changing.catch_up(delivery, twice)
    assert changing.times() == [{times: COUNT}, {times: COUNT}]


def test_at_most_once_is_refused(changing: Changing) -> None:
    with pytest.raises(ConfigError, match=r"Sink 'out' delivers at most once, which bounded work cannot do.*run`"):
        changing.catch_up("at_most_once")


def test_another_delivery_goes_on_where_the_last_one_ended(changing: Changing) -> None:
    for delivery in ("exactly_once", "at_least_once", "exactly_once"):
        changing.catch_up(delivery)
    assert changing.times() == [{1: 3 * COUNT}, {1: 3 * COUNT}]


def test_an_audit_does_not_judge_a_weaker_sink(changing: Changing) -> None:
    changing.catch_up("at_least_once")
    report = changing.audit("at_least_once")
    assert (report.findings, report.checkpoints) == ([], [])
    unjudged = [each.split(":")[0] for each in report.unjudged]
    assert unjudged == [f"sink {sink} delivers at least once" for sink in ("out", "rows")]

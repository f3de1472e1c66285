"""The rows that every store has of one pipeline, against a plain fold of its input. Shares no code with the engine."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from servers import FORMATS, STORES, Row, Servers
from together import table

from exactlyonce.testing.cluster import KafkaCluster

Fed = Sequence[tuple[str, str]]


class Count(NamedTuple):
    rows: int
    missing: int
    doubled: int
    foreign: int


def count(ids: Iterable[int], wanted: Mapping[int, object]) -> Count:
    seen = Counter(ids)
    return Count(
        rows=seen.total(),
        missing=sum(each not in seen for each in wanted),
        doubled=sum(number - 1 for number in seen.values()),
        foreign=sum(each not in wanted for each in seen),
    )


def exact(rows: int) -> Count:
    return Count(rows, 0, 0, 0)


class Totals:
    def __init__(self, fed: Fed) -> None:
        orders = [json.loads(value) for _, value in fed]
        self.given: dict[int, tuple[str, int]] = {each["id"]: (each["customer"], each["total"]) for each in orders}
        self.last: dict[str, int] = defaultdict(int)
        for customer, total in self.given.values():
            self.last[customer] += total

    def assert_appended(self, where: str, rows: Sequence[Row]) -> Count:
        found = count((row.id for row in rows), self.given)
        assert found == exact(len(self.given)), f"{where}: {found}"
        sums: dict[str, int] = defaultdict(int)
        for row in rows:
            customer, total = self.given[row.id]
            sums[customer] += total
            assert (row.customer, row.sum) == (customer, sums[customer]), f"{where}: the total at order {row.id}"
        return found

    def assert_upserted(self, where: str, rows: Sequence[Row], newest: Mapping[str, Row]) -> None:
        assert {row.customer: row.sum for row in rows} == self.last, where
        assert len(rows) == len(self.last), where
        assert {row.customer: row for row in rows} == newest, where


def of_topic(kafka: KafkaCluster, topic: str) -> list[Row]:
    values = (json.loads(record.value or b"") for record in kafka.read_committed(topic))
    return [Row(each["id"], each["customer"], each["sum"]) for each in values]


def assert_agreement(servers: Servers, kafka: KafkaCluster, name: str, fed: Fed) -> dict[str, Count]:
    """Every store has each row once, in order where there is one, and all have the same; -> what was counted."""
    totals = Totals(fed)
    copies = (json.loads(record.value or b"")["id"] for record in kafka.read_committed(f"{name}-copies"))
    counts = {"kafka copies": count(copies, totals.given)}
    assert counts["kafka copies"] == exact(len(fed))
    appended = {"kafka": of_topic(kafka, f"{name}-out")}
    for store in STORES:
        appended[store] = servers.appended(store, f"{name}:totals" if store == "redis" else table(name, "append"))
    sums = {row.id: row.sum for row in appended["kafka"]}
    for format in FORMATS:
        rows = servers.filed(name, format)
        counts[format] = count((row.id for row in rows), totals.given)
        assert counts[format] == exact(len(fed)), f"{format}: {counts[format]}"
        assert {row.id: row.sum for row in rows} == sums, f"{format} files and Kafka have the same totals"
    newest = {row.customer: row for row in appended["kafka"]}
    for where, rows in appended.items():
        counts[where] = totals.assert_appended(where, rows)
        assert {row.id: row.sum for row in rows} == sums, f"{where} and Kafka have the same totals"
    for store in STORES:
        totals.assert_upserted(f"{store}, by key", servers.upserted(store, name), newest)
    return counts

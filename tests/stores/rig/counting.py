"""The rows that every store has of one pipeline, against a plain fold of its input. Shares no code with the engine."""

from __future__ import annotations

import json

from running import Fed, assert_copies, assert_once, assert_updates, visible
from servers import FORMATS, STORES, Row, Servers
from together import table

from exactlyonce.testing.cluster import KafkaCluster


def assert_agreement(servers: Servers, kafka: KafkaCluster, name: str, fed: Fed) -> None:
    """Every store has each row once, in order where there is one, and all have the same."""
    assert_copies(kafka, f"{name}-copies", fed)
    updates = [json.loads(record.value or b"") for record in visible(kafka, f"{name}-out", len(fed))]
    totals = [Row(each["id"], each["customer"], each["sum"]) for each in updates]
    appended = {"kafka": totals}
    for store in STORES:
        appended[store] = servers.appended(store, f"{name}:totals" if store == "redis" else table(name, "append"))
    for where, rows in appended.items():
        assert_updates([row._asdict() for row in rows], fed, where)
        assert sorted(rows) == sorted(totals), f"{where} and Kafka have the same totals"
    for format in FORMATS:
        rows = servers.filed(name, format)
        assert_once([row.id for row in rows], fed, format)
        assert sorted(rows) == sorted(totals), f"{format} files and Kafka have the same totals"
    newest = {row.customer: row for row in totals}
    for store in STORES:
        assert sorted(servers.upserted(store, name)) == sorted(newest.values()), f"{store}, by key"

"""A pipeline that prepares transactions in a store, what was fed to it, and what has come of it."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from preparing import Preparing
from running import QUICK, assert_copies, assert_totals, orders

from exactlyonce.testing.cluster import KafkaCluster


class PreparedJob:
    """It is made with an empty table, which numbers the rows as they come."""

    def __init__(self, kafka: KafkaCluster, name: str, preparing: Preparing, run: Any) -> None:
        self.kafka, self.name, self.preparing, self._run = kafka, name, preparing, run
        self.fed: list[tuple[str, str]] = []
        kafka.create_topic(f"{name}-in", 3)
        preparing.sql(
            f"CREATE TABLE totals (place {preparing.numbered} PRIMARY KEY, id bigint NOT NULL, "
            "customer varchar(20) NOT NULL, sum bigint NOT NULL)"
        )
        self.arguments = ("--param", f"name={name}", "--param", f"store={preparing.name}", *QUICK)

    def feed(self, count: int = 2000) -> None:
        more = orders(count, first=len(self.fed))
        self.kafka.produce(f"{self.name}-in", more)
        self.fed += more

    def run(self, *arguments: str, **more: Any) -> Any:
        return self._run("prepared_totals:totals", *self.arguments, *arguments, **more)

    def finish(self, *arguments: str) -> Any:
        job = self.run("--until", "latest", *arguments)
        assert job.wait() == 0, job.said
        return job

    def assert_exact(self) -> None:
        """Table and topics have each order once, sums are those of the rows' order, and nothing is left behind."""
        given = {order["id"]: order for order in (json.loads(value) for _, value in self.fed)}
        rows = self.preparing.sql("SELECT id, customer, sum FROM totals ORDER BY place")
        seen = [number for number, _, _ in rows]
        assert (sorted(given.keys() - set(seen)), len(seen) - len(set(seen))) == ([], 0), "every order gives one row"
        sums: dict[str, int] = defaultdict(int)
        for number, customer, total in rows:
            sums[customer] += given[number]["total"]
            assert total == sums[customer], f"the total of {customer} at order {number}"
        assert_totals(self.kafka, f"{self.name}-out", self.fed)
        assert_copies(self.kafka, f"{self.name}-copies", self.fed)
        assert (self.preparing.listed(), self.preparing.left()) == ([], [])

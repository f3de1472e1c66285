"""A pipeline that prepares transactions in a store, what was fed to it, and what has come of it."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from preparing import Preparing
from running import Job

from exactlyonce.testing.cluster import KafkaCluster


class PreparedJob(Job):
    """It is made with an empty table, which numbers the rows as they come."""

    def __init__(self, kafka: KafkaCluster, name: str, preparing: Preparing, run: Any) -> None:
        super().__init__(run, kafka, name, "prepared_totals:totals", "--param", f"store={preparing.name}")
        self.preparing = preparing
        preparing.sql(
            f"CREATE TABLE totals (place {preparing.numbered} PRIMARY KEY, id bigint NOT NULL, "
            "customer varchar(20) NOT NULL, sum bigint NOT NULL)"
        )

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
        self.assert_output()
        assert (self.preparing.listed(), self.preparing.left()) == ([], [])

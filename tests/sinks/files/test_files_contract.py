"""A folder keeps the contract of a sink whose output the leader commits; see `exactlyonce.testing.sink_contract`."""

from __future__ import annotations

import json
from typing import Any

from orders_contract import InFolder, Order

from exactlyonce.sinks import FileSink


class TestFileSink(InFolder):
    """The sink of JSON lines, which any reader reads; what the formats differ in is no matter of commits."""

    test_a_store_that_is_away: Any = None  # whatever the system says of a disk: test_disk.py
    test_what_the_store_cleans_up: Any = None  # nothing by itself

    def sink(self) -> FileSink[Order]:
        return FileSink(self.folder, format="jsonl")

    def read(self) -> list[Order]:
        lines = [line for path in self.folder.glob("*.jsonl") for line in path.read_text().splitlines()]
        return [Order(**json.loads(line)) for line in lines]

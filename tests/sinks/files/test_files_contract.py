"""A folder keeps the contract of a sink whose output the leader commits; see `exactlyonce.testing.sink_contract`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from exactlyonce.sinks import FileSink
from exactlyonce.testing.sink_contract import SinkContract


class Order(msgspec.Struct):
    number: int
    version: int


class TestFileSink(SinkContract):
    """The sink of JSON lines, which any reader reads; what the formats differ in is no matter of commits."""

    type = Order
    test_a_store_that_is_away: Any = None  # whatever the system says of a disk: test_disk.py
    test_what_the_store_cleans_up: Any = None  # nothing by itself
    test_secrets_show_nowhere: Any = None  # there are none

    @pytest.fixture(autouse=True)
    def _target(self, tmp_path: Path) -> None:
        self.target = tmp_path / "orders"

    def sink(self) -> FileSink[Order]:
        return FileSink(self.target, format="jsonl")

    def record(self, number: int, version: int = 0) -> Order:
        return Order(number, version)

    def read(self) -> list[Order]:
        lines = [line for path in self.target.glob("*.jsonl") for line in path.read_text().splitlines()]
        return [Order(**json.loads(line)) for line in lines]

    def backup(self) -> Callable[[], None]:
        copy = self.target.with_name("backup")
        shutil.copytree(self.target, copy)

        def restore() -> None:
            shutil.rmtree(self.target)
            shutil.copytree(copy, self.target)

        return restore

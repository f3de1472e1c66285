"""The contract of a sink of orders whose output the leader commits, for one that needs no more than a place."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from exactlyonce.testing.sink_contract import SinkContract


class Order(msgspec.Struct):
    number: int
    version: int


class OrdersContract(SinkContract):
    type = Order

    def record(self, number: int, version: int = 0) -> Order:
        return Order(number, version)


class InFolder(OrdersContract):
    """All that there is lies in `folder`, whose parent is there."""

    test_secrets_show_nowhere: Any = None  # there are none

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "orders"

    def backup(self) -> Callable[[], None]:
        copy = self.folder.with_name("backup")
        shutil.copytree(self.folder, copy)

        def restore() -> None:
            shutil.rmtree(self.folder)
            shutil.copytree(copy, self.folder)

        return restore

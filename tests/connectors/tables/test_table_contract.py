"""A table keeps the contract of a source, on either database; the ranges of its keys are its splits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from exactlyonce.connectors.tables import TableSplit
from exactlyonce.testing.source_contract import SPLITS, SourceContract

WIDTH = 1_000
"""The keys of one split."""


class Text(msgspec.Struct):
    text: str
    number: int | None = None


class TestTable(SourceContract):
    grows, repeats, finds_splits = False, False, False

    @pytest.fixture(autouse=True)
    def _table(self, shop: Any) -> None:
        self.shop = shop
        shop.sql("CREATE TABLE texts (id int PRIMARY KEY, text varchar(20), number int)")
        self.table = "texts"
        if shop.kind == "postgres":
            ((oid,),) = shop.sql("SELECT 'texts'::regclass::oid::text")
            self.table = oid
        self.counts = [0] * SPLITS

    def source(self) -> Any:
        return self.shop.source("texts", value=Text)

    def text_of(self, record: Any) -> str:
        text: str = record.text
        return text

    def append(self, split: int, records: Sequence[str | None]) -> None:
        for text in records:
            self.shop.sql("INSERT INTO texts VALUES (%s, %s, 7)", split * WIDTH + self.counts[split], text)
            self.counts[split] += 1

    def append_damaged(self, split: int) -> None:
        self.append(split, [None])

    def add_split(self) -> int:
        self.counts.append(0)
        return len(self.counts) - 1

    def identity(self, split: int) -> str:
        through = str((split + 1) * WIDTH - 1)
        return str(TableSplit(self.table, "", (str(split * WIDTH - 1),), (through,)))

"""Rows that replace others by key, as Arrow tables. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

_ROW = "row"


def last_of_each(rows: Any, key: Sequence[str]) -> Any:
    """The last of *rows* with each key, in their order.

    >>> last_of_each(pa.table({"k": [1, 2, 1], "v": [5, 6, 7]}), ["k"]).to_pylist()
    [{'k': 2, 'v': 6}, {'k': 1, 'v': 7}]
    """
    numbered, names = _numbered(rows, key)
    newest = numbered.group_by(names).aggregate([(_ROW, "max")])
    return rows.take(newest[f"{_ROW}_max"].combine_chunks().sort())


def without(rows: Any, changed: Any, key: Sequence[str]) -> Any:
    """Those of *rows* whose key none of *changed* has, in their order.

    >>> without(pa.table({"k": [1, 2], "v": [5, 6]}), pa.table({"k": [2]}), ["k"]).to_pylist()
    [{'k': 1, 'v': 5}]
    """
    numbered, names = _numbered(rows, key)
    keys = changed.select(list(key)).rename_columns(names).cast(numbered.drop_columns([_ROW]).schema)
    kept = numbered.join(keys, names, join_type="left anti")
    return rows.take(kept[_ROW].combine_chunks().sort())


def _numbered(rows: Any, key: Sequence[str]) -> tuple[Any, list[str]]:
    """The key columns of *rows* under other names, and the number of each row."""
    names = [f"key {number}" for number in range(len(key))]
    keys = rows.select(list(key)).rename_columns(names)
    return keys.append_column(_ROW, pa.array(range(rows.num_rows), pa.int64())), names

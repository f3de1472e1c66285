"""The key that a table's sink has, which an append has none of."""

from __future__ import annotations


def key_of(mode: str, *columns: str) -> tuple[str, ...]:
    return () if mode == "append" else columns or ("customer",)

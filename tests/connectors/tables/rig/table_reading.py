"""Reads a table through its source, as a worker does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from exactlyonce.connectors.source import ReaderContext


class Named(msgspec.Struct):
    name: str


def read_on(source: Any, positions: Sequence[Any], batch: int) -> tuple[list[Any], Sequence[Any]]:
    """The next *batch* of rows, by a reader of its own, and the positions after them."""
    clients: Any = None
    reader = source.open_reader(ReaderContext(source="s", positions=positions, targets=None, clients=clients))
    reader.open()
    decoder = source.decoder()
    records = list(map(decoder.decode, decoder.parts(reader.poll(batch, 0))))
    positions = reader.positions()
    reader.close()
    return records, positions


def read(source: Any, batch: int = 3) -> list[Any]:
    """All rows of *source*, by a reader for each *batch* of rows, which goes on where the last one was."""
    finder = source.finder("s")
    records, positions = list[Any](), finder.find(())
    while not all(position.ended for position in positions):
        more, positions = read_on(source, positions, batch)
        records += more
    finder.close()
    return records

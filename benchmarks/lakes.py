"""Tables of Delta and Iceberg: records to a table against the bare library, and the time of a checkpoint's commit.

Both have the records in memory, and convert them to columns. The library appends them in one go: it has no ledger, so a
retry doubles them.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import pyarrow.compute as pc
from bench import Bench
from benchmarked import iceberg_properties
from figures import Figure
from orders import Order, uniform
from parquet_files import BATCH, ROUNDS, as_table, committed
from store_sinks import Place, commits
from store_targets import Rows, Target

from exactlyonce.sinks import DeltaSink, IcebergSink


class DeltaTarget(Target):
    """A table of Delta in a folder."""

    title = "Delta"
    plain = "deltalake alone"

    def empty(self, place: str) -> None:
        shutil.rmtree(place, ignore_errors=True)
        Path(place).mkdir()

    def rows(self, place: str) -> Rows:
        from deltalake import DeltaTable

        return _rows(DeltaTable(f"{place}/orders").to_pyarrow_table())

    def sink(self, place: str) -> Any:
        """Appends to the table."""
        return DeltaSink(f"{place}/orders", create=True)

    def append(self, place: str, records: Sequence[Order]) -> None:
        """Append by the library alone."""
        from deltalake import write_deltalake

        write_deltalake(f"{place}/orders", as_table(records), mode="append")


class IcebergTarget(DeltaTarget):
    """A table of Iceberg, whose catalog is a file of SQLite beside it."""

    title = "Iceberg"
    plain = "pyiceberg alone"

    def rows(self, place: str) -> Rows:
        from pyiceberg.catalog import load_catalog

        with load_catalog("default", **iceberg_properties(place)) as catalog:
            return _rows(catalog.load_table("shop.orders").scan().to_arrow())

    def sink(self, place: str) -> Any:
        return IcebergSink("shop.orders", catalog=iceberg_properties(place), create=True)

    def append(self, place: str, records: Sequence[Order]) -> None:
        from pyiceberg.catalog import load_catalog

        table = as_table(records)
        with load_catalog("default", **iceberg_properties(place)) as catalog:
            catalog.create_namespace_if_not_exists("shop")
            catalog.create_table("shop.orders", table.schema).append(table)


def _rows(table: Any) -> Rows:
    return Rows(table.num_rows, pc.sum(table.column("total")).as_py() or 0)


LAKES = {"delta": DeltaTarget(), "iceberg": IcebergTarget()}


def scenario(bench: Bench) -> Iterator[Figure]:
    """Both formats."""
    decode = msgspec.json.Decoder(Order).decode
    records = [decode(value) for _, value in uniform(bench.size(1_000_000, 20_000), 1_000)]
    for name, target in LAKES.items():
        with tempfile.TemporaryDirectory(prefix="exactlyonce-bench-") as folder:
            place = f"{folder}/lake"
            yield _compared(bench, target, place, records)
            yield from commits(bench, Place(name, target, place))


def _compared(bench: Bench, target: DeltaTarget, place: str, records: Sequence[Order]) -> Figure:
    """Rows per second, in turns."""
    ways: dict[str, Callable[[Sequence[Order]], None]] = {
        "ours": lambda some: committed(target.sink(place), some),
        "theirs": lambda some: target.append(place, some),
    }
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(-1, bench.rounds or ROUNDS):  # the first does not count: it imports
        for way, write in ways.items():
            some = records if number >= 0 else records[:BATCH]
            target.empty(place)
            began_s = time.monotonic()
            write(some)
            took_s = time.monotonic() - began_s
            assert target.rows(place).number == len(some), f"{target.rows(place)} of {len(some)} rows are in the table"
            if number >= 0:
                rates[way].append(len(some) / took_s)
    ratios = [ours / theirs for ours, theirs in zip(*rates.values(), strict=True)]
    detail = f"{median(rates['ours']):,.0f} rows/s against {median(rates['theirs']):,.0f}, {len(ratios)} rounds"
    bench.say(f"{target.title}: {', '.join(f'{ratio:.2f}' for ratio in ratios)}")
    return Figure(f"records to {target.title}, against {target.plain}", median(ratios), "", detail)

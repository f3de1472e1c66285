"""Work that several systems do: a pipeline of `benchmarked`, its input, and the output that all of them must write."""

from __future__ import annotations

import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import msgspec
from bench import Bench
from benchmarked import Counted, event_ms
from cluster import Digest
from orders import Order, Total, encoded, uniform

CUSTOMERS = 1_000
SIZE_MS = 10_000
"""Of a window."""
LATER = 2 * SIZE_MS
"""So much greater is the number of an order that ends all windows, and its event time in ms."""


class Work(NamedTuple):
    """A pipeline of `benchmarked`, its input, and what all must write."""

    pipeline: str
    source: str
    records: int
    """Of the input."""
    expected: Digest


def totals(bench: Bench, records: int) -> Work:
    """A running total of each order."""
    sums: Counter[str] = Counter()
    checksum = 0

    def add(order: Order) -> None:
        nonlocal checksum
        sums[order.customer] += order.total
        checksum += zlib.crc32(msgspec.json.encode(Total(order.customer, sums[order.customer], order.ts)))

    source = _fed(bench, uniform(records, CUSTOMERS), add)
    return Work("totals", source, records, Digest(records, checksum))


def counts(bench: Bench, records: int) -> Work:
    """Windows of *records* orders; a later order of each customer ends them, in windows that stay open."""
    windows: Counter[tuple[str, int]] = Counter()

    def count(order: Order) -> None:
        windows[order.customer, event_ms(order) // SIZE_MS * SIZE_MS] += 1

    source = _fed(bench, uniform(records, CUSTOMERS), count)
    later = range(records + LATER, records + LATER + CUSTOMERS)
    bench.cluster.feed(source, encoded(later, list(range(CUSTOMERS))))
    values = [msgspec.json.encode(Counted(*window, number)) for window, number in windows.items()]
    return Work("counts", source, records + CUSTOMERS, Digest(len(values), sum(map(zlib.crc32, values))))


def _fed(bench: Bench, orders: Iterable[tuple[bytes, bytes]], take: Callable[[Order], None]) -> str:
    """A new topic with *orders*, each of which *take* is called with."""
    source = f"orders-{uuid.uuid4().hex[:8]}"
    bench.cluster.create(source)
    decoder = msgspec.json.Decoder(Order)

    def taken() -> Iterator[tuple[bytes, bytes]]:
        for key, value in orders:
            take(decoder.decode(value))
            yield key, value

    bench.cluster.feed(source, taken())
    return source

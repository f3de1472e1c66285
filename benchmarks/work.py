"""Work that several systems do: a pipeline of `benchmarked`, its input, and the output that all of them must write."""

from __future__ import annotations

import uuid
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import msgspec
from bench import Bench
from benchmarked import Counted, Paid, event_ms
from cluster import Digest
from orders import Order, Payment, Total, encoded, uniform

CUSTOMERS = 1_000
SIZE_MS = 10_000
"""Of a window."""
LATER = 2 * SIZE_MS
"""So much greater is the number of an order that ends all windows, and its event time in ms."""

PAID_AFTER = 3_001
"""So many orders later the payment of an order comes; so much greater is its number, and its event time in ms."""
AGAIN_AFTER = 400
"""So many orders later an order comes again."""


class Work(NamedTuple):
    """A pipeline of `benchmarked`, its input, and what all must write."""

    pipeline: str
    source: str
    """The topic, or two of them with a comma in between."""
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


def payments(bench: Bench, records: int) -> Work:
    """Orders with their payments, from a topic each: half of the records are orders."""
    count, checksum = records // 2, 0
    orders, payments = (f"{kind}-{uuid.uuid4().hex[:8]}" for kind in ("orders", "payments"))
    bench.cluster.create(orders, payments)
    decoder = msgspec.json.Decoder(Order)

    def taken() -> Iterator[tuple[str, bytes, bytes]]:
        nonlocal checksum
        unpaid = deque[Order]()
        for _, value in uniform(count, CUSTOMERS):
            unpaid.append(order := decoder.decode(value))
            checksum += zlib.crc32(msgspec.json.encode(Paid(order.id, order.customer, order.total, _amount(order))))
            yield orders, b"%d" % order.id, value
            if len(unpaid) > PAID_AFTER:
                yield payments, *_payment(unpaid.popleft())
        for order in unpaid:
            yield payments, *_payment(order)

    bench.cluster.feed_topics(taken())
    return Work("payments", f"{orders},{payments}", 2 * count, Digest(count, checksum))


def _payment(order: Order) -> tuple[bytes, bytes]:
    payment = Payment(order.id + PAID_AFTER, order.id, _amount(order), order.ts)
    return b"%d" % order.id, msgspec.json.encode(payment)


def _amount(order: Order) -> int:
    return order.total * 100


def once(bench: Bench, records: int) -> Work:
    """Orders, each of which comes twice."""
    checksum, latest = 0, -1

    def add(order: Order) -> None:
        nonlocal checksum, latest
        if order.id > latest:
            latest = order.id
            checksum += zlib.crc32(msgspec.json.encode(order))

    source = _fed(bench, _twice(uniform(records // 2, CUSTOMERS)), add)
    return Work("once", source, records // 2 * 2, Digest(records // 2, checksum))


def _twice(orders: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """Each order, and again some orders later."""
    unrepeated = deque[tuple[bytes, bytes]]()
    for order in orders:
        unrepeated.append(order)
        yield order
        if len(unrepeated) > AGAIN_AFTER:
            yield unrepeated.popleft()
    yield from unrepeated


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

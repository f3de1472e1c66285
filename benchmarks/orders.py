"""The records of the benchmarks: orders of 70 bytes of JSON, keyed by customer, and running totals of them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import msgspec

CHUNK_RECORDS = 10_000
SPREAD = 2_654_435_761
"""A prime: multiplied by it, ranks are other distinct numbers, unless the number of customers is a multiple of it."""
CHEAP = 10
"""Orders below this are filtered out, where a scenario filters: nine in a hundred."""


class Order(msgspec.Struct):
    """One record of the input."""

    id: int
    customer: str
    total: int
    ts: int
    """Microseconds since 1970: when it was produced."""


class Payment(msgspec.Struct):
    """A payment of an order."""

    id: int
    """Its own number."""
    order: int
    amount: int
    ts: int


class Total(msgspec.Struct):
    """One record of the output: the running total of a customer, after the order of time `ts`."""

    customer: str
    sum: int
    ts: int


class Priced(msgspec.Struct):
    """One record of the output, where orders are mapped."""

    id: int
    customer: str
    cents: int


def uniform(count: int, customers: int) -> Iterator[tuple[bytes, bytes]]:
    """*count* orders, as (key, value), each of a random one of *customers*; the same in every run."""
    dice = random.Random(customers)
    for first in range(0, count, CHUNK_RECORDS):
        numbers = range(first, min(first + CHUNK_RECORDS, count))
        yield from encoded(numbers, dice.choices(range(customers), k=len(numbers)))


def zipf(count: int, customers: int) -> Iterator[tuple[bytes, bytes]]:
    """*count* orders, as (key, value): the customer of rank *n* has 1/n as many as the first; numbers are mixed."""
    dice = random.Random(customers)
    for first in range(0, count, CHUNK_RECORDS):
        numbers = range(first, min(first + CHUNK_RECORDS, count))
        ranks = (int(customers ** dice.random()) for _ in numbers)
        yield from encoded(numbers, [rank * SPREAD % customers for rank in ranks])


def once_each(first: int, count: int, customers: int) -> Iterator[tuple[bytes, bytes]]:
    """*count* orders of as many different customers, from number *first* on, round and round."""
    return encoded(range(first, first + count), [number % customers for number in range(first, first + count)])


def unfinished(count: int, customers: int) -> list[tuple[bytes, bytes]]:
    """`uniform` without the end of the values, which is their time and a brace."""
    return [(key, value[: value.rindex(b":") + 1]) for key, value in uniform(count, customers)]


def encoded(numbers: range, customers: list[int]) -> Iterator[tuple[bytes, bytes]]:
    """(key, value) of orders that are produced now."""
    ts = time.time_ns() // 1000
    for number, customer in zip(numbers, customers, strict=True):
        key = b"c%07d" % customer
        yield key, b'{"id":%d,"customer":"%b","total":%d,"ts":%d}' % (number, key, number % 97 + 1, ts)

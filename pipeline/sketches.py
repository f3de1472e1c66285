"""Sketches: approximate results in bounded memory, as pure functions of the values, whatever their order and parts.

Invariants: a state is a plain value that msgpack keeps; adding changes it in place, merging does not. Sketches whose
results depend on chance (KLL) or on the order (t-digest, HyperLogLog's HIP estimator) are left out for that reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate
from math import ceil, exp, isfinite, log, log2, sqrt
from sys import float_info

Registers = dict[int, int] | bytearray
"""Of a HyperLogLog: those that are not 0 by number, or all."""
Buckets = dict[int, int]
"""Of a DDSketch: the count by bucket. The numbers of buckets ascend with their values."""

_ALPHA = 1 / (2 * log(2))


@dataclass(frozen=True)
class HyperLogLog:
    """The number of different values, with a relative standard error of *error* at most.

    By Flajolet and others (2007), with the estimator of Ertl ("New cardinality estimation algorithms for HyperLogLog
    sketches", 2017), which needs no corrections.

    >>> sketch = HyperLogLog(0.01)
    >>> sketch.size
    16384
    >>> state = None
    >>> for number in range(1000):
    ...     state = sketch.add(state, b"%d" % number)
    >>> round(sketch.result(state))
    996
    """

    error: float

    @cached_property
    def bits(self) -> int:
        """The bits of a register's number."""
        return max(4, ceil(log2((1.04 / self.error) ** 2)))

    @property
    def size(self) -> int:
        """The number of registers, each a byte."""
        return 1 << self.bits

    def add(self, state: Registers | None, value: bytes) -> Registers:
        """*state* with *value*."""
        hashed = int.from_bytes(blake2b(value, digest_size=8).digest(), "big")
        rest = 64 - self.bits
        register, rank = hashed >> rest, rest - (hashed & ((1 << rest) - 1)).bit_length() + 1
        if isinstance(state, bytearray):
            if rank > state[register]:
                state[register] = rank
            return state
        state = {} if state is None else state
        if rank > state.get(register, 0):
            state[register] = rank
        return state if len(state) <= self.size // 16 else self._dense(state)

    def merge(self, one: Registers, other: Registers) -> Registers:
        """The state of the values of both."""
        if isinstance(one, dict) and isinstance(other, dict):
            merged = {number: max(one.get(number, 0), other.get(number, 0)) for number in one | other}
            return merged if len(merged) <= self.size // 16 else self._dense(merged)
        return bytearray(map(max, self._dense(one), self._dense(other)))

    def result(self, state: Registers) -> float:
        """The estimate."""
        size, last = self.size, 64 - self.bits + 1
        counts = Counter(self._dense(state))
        estimate = size * _tau(1 - counts[last] / size)
        for rank in range(last - 1, 0, -1):
            estimate = 0.5 * (estimate + counts[rank])
        return _ALPHA * size * size / (estimate + size * _sigma(counts[0] / size))

    def _dense(self, state: Registers) -> bytearray:
        if isinstance(state, bytearray):
            return state
        registers = bytearray(self.size)
        for number, rank in state.items():
            registers[number] = rank
        return registers


def _sigma(x: float) -> float:
    if x == 1:
        return float("inf")
    y, z, before = 1.0, x, -1.0
    while z != before:
        x *= x
        before, z = z, z + x * y
        y += y
    return z


def _tau(x: float) -> float:
    if x in (0.0, 1.0):
        return 0.0
    y, z, before = 1.0, 1 - x, -1.0
    while z != before:
        x = sqrt(x)
        y *= 0.5
        before, z = z, z - (1 - x) ** 2 * y
    return z / 3


_ZERO = 1 << 23
"""More than any bucket of a positive float lies from the bucket of 1."""


@dataclass(frozen=True)
class DDSketch:
    """Quantiles, each with a relative error of *error* at most, by Masson and others (2019).

    >>> sketch = DDSketch(0.01)
    >>> state = None
    >>> for number in range(1, 1001):
    ...     state = sketch.add(state, number)
    >>> [round(quantile) for quantile in sketch.result(state, [0.5, 0.99])]
    [498, 983]
    """

    error: float

    @cached_property
    def _width(self) -> float:
        """The logarithm of the ratio of two buckets."""
        return log((1 + self.error) / (1 - self.error))

    def add(self, state: Buckets | None, value: float) -> Buckets:
        """*state* with *value*. Raises ValueError if that is not finite."""
        value = float(value)
        if not isfinite(value):
            raise ValueError(f"Percentiles of {value}: filter such records")
        place = 0 if value == 0 else _ZERO + ceil(log(abs(value)) / self._width)
        bucket = place if value > 0 else -place
        state = {} if state is None else state
        state[bucket] = state.get(bucket, 0) + 1
        return state

    def merge(self, one: Buckets, other: Buckets) -> Buckets:
        """The state of the values of both."""
        return {bucket: one.get(bucket, 0) + other.get(bucket, 0) for bucket in one | other}

    def result(self, state: Mapping[int, int], quantiles: list[float]) -> list[float]:
        """The value of each of *quantiles*, from 0, the least value, to 1, the greatest."""
        buckets = sorted(state)
        ends = list(accumulate(state[bucket] for bucket in buckets))
        ranks = [quantile * (ends[-1] - 1) for quantile in quantiles]
        return [self._value(next(b for b, end in zip(buckets, ends, strict=True) if end > rank)) for rank in ranks]

    def _value(self, bucket: int) -> float:
        """The value in the middle of *bucket*."""
        if bucket == 0:
            return 0.0
        value = exp(min((abs(bucket) - _ZERO) * self._width + log(1 - self.error), log(float_info.max)))
        return value if bucket > 0 else -value

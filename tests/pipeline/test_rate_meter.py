"""The rate meter: what it counts, and how little it keeps."""

from __future__ import annotations

from exactlyonce.pipeline.rate_meter import RateMeter


def test_a_meter_keeps_only_what_still_counts() -> None:
    """Nobody may ask for long: a sink asks one of its meters only while a broker throttles it."""
    meter = RateMeter(1.0)
    for number in range(100_000):
        meter.left(1, since_s=number / 100, until_s=(number + 1) / 100)
    assert len(meter._left) <= 101
    assert meter.lately(1000.0) == 100

"""The pipeline on a broker in memory, with a crash at every step: `pytest`, of `pip install pytest`."""

from datetime import datetime, timezone

from exactlyonce.testing import assert_exactly_once
from pipeline import Visit, Visits, pipeline


def at(minute: int, second: int = 0) -> datetime:
    return datetime(2026, 11, 20, 12, minute, second, tzinfo=timezone.utc)


def test_a_minute_is_counted_once() -> None:
    """The visit at 12:00:55 comes after one of 12:01:03, in time; that at 12:00:20 comes when its minute is over."""
    times = [at(0, 1), at(1, 3), at(0, 55), at(1, 15), at(0, 20)]
    assert_exactly_once(
        pipeline,
        inputs={"visits": [Visit("home", time) for time in times]},
        expected={"out": [Visits("home", at(0), 2), Visits("home", at(1), 2)], "late": [Visit("home", at(0, 20))]},
        crashes_max=20,
    )

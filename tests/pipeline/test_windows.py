"""The arithmetic of windows, against their definitions; each mistake, with its remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from typing import Annotated, Any, NamedTuple
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactlyonce import Count, EventTime, Max, Mean, Output, Pipeline, Stream, Sum, TopN
from exactlyonce.connectors import KafkaSource
from exactlyonce.errors import GraphError
from exactlyonce.pipeline.aggregates import Place, Placed
from exactlyonce.pipeline.durations import Duration
from exactlyonce.pipeline.event_time import EARLIEST_MS, LATEST_MS
from exactlyonce.pipeline.graph import LogicalGraph
from exactlyonce.pipeline.windows import Hopping, Revised, Session, Tumbling, Window, Windowed, moment, window_of
from exactlyonce.sinks import KafkaSink, PrintSink

TIMES = st.integers(-(10**13), 10**13)
HOUR = timedelta(hours=1)


@given(TIMES, st.integers(1, 10**6), st.data())
def test_a_tumbling_window_is_the_one_that_begins_at_a_multiple_of_its_size(time: int, size: int, data) -> None:
    offset = data.draw(st.integers(0, size - 1))
    window = Tumbling(f"{size}ms", offset=f"{offset}ms")
    (last,) = window.lasts([time])
    assert not window.problems
    assert window.start(last) <= time <= last
    assert last + 1 - window.start(last) == size
    assert (window.start(last) - offset) % size == 0


@given(TIMES, st.integers(1, 12), st.integers(1, 12), st.sampled_from([50, 1_000]), st.data())
def test_a_pane_lies_in_just_the_hopping_windows_that_have_its_times(
    time: int, size: int, every: int, unit: int, data
) -> None:
    size, every = max(size, every) * unit, min(size, every) * unit
    offset = data.draw(st.integers(0, every - 1))
    window = Hopping(f"{size}ms", every=f"{every}ms", offset=f"{offset}ms")
    (pane,) = window.lasts([time])
    starts = [start for start in range(time - size + 1, time + 1) if (start - offset) % every == 0]
    assert not window.problems
    assert pane - window.pane_ms < time <= pane
    assert [window.start(last) for last in window.windows(pane)] == starts
    assert (window.first_window(pane), window.last_window(pane)) == (starts[0] + size - 1, starts[-1] + size - 1)
    assert len(starts) <= window.overlap


@pytest.mark.parametrize(
    ("zone", "around"),
    [
        ("Europe/Paris", "2026-03-29"),
        ("Europe/Paris", "2026-10-25"),
        ("Asia/Kolkata", "2026-01-01"),
        ("Australia/Lord_Howe", "2026-04-05"),  # half an hour
        ("America/Sao_Paulo", "2018-11-04"),  # no midnight
        ("America/Havana", "2026-11-01"),  # midnight twice
        ("Asia/Gaza", "2011-08-01"),  # 0:00 goes back to 23:00
        ("Pacific/Apia", "2011-12-30"),  # no such day
        ("UTC", "1969-12-31"),
    ],
)
def test_days_of_a_zone_follow_each_other_and_have_the_times_with_their_date(zone: str, around: str) -> None:
    window, local = Tumbling("1d", zone=zone), ZoneInfo(zone)
    middle = datetime.fromisoformat(around).replace(tzinfo=timezone.utc)
    moments = [middle + timedelta(minutes=minutes) for minutes in range(-3 * 1440, 3 * 1440, 15)]
    lasts = window.lasts([round(moment.timestamp() * 1000) for moment in moments])
    windows = sorted({(window.start(last), last) for last in lasts})
    assert all(before[1] + 1 == after[0] for before, after in pairwise(windows))
    for time, last in zip(moments, lasts, strict=True):
        start, end = moment(window.start(last)), moment(last)
        assert start <= time <= end
        if zone != "Asia/Gaza":  # where a date comes back for an hour
            assert start.astimezone(local).date() == time.astimezone(local).date() == end.astimezone(local).date()


def test_a_day_where_the_clocks_change_has_23_or_25_hours() -> None:
    window = Tumbling("1d", zone="Europe/Paris", offset="6h")
    noons = [datetime(2026, month, day, 12, tzinfo=timezone.utc) for month, day in ((3, 28), (10, 24), (7, 1))]
    lasts = window.lasts([round(noon.timestamp() * 1000) for noon in noons])
    assert [moment(last + 1) - moment(window.start(last)) for last in lasts] == [23 * HOUR, 25 * HOUR, 24 * HOUR]
    assert moment(window.start(lasts[2])) == datetime(2026, 7, 1, 4, tzinfo=timezone.utc)


def test_months_are_those_of_the_calendar_also_before_1970() -> None:
    (last,) = (window := Tumbling("3mo", zone="UTC")).lasts([-1])
    assert (moment(window.start(last)), moment(last + 1)) == (
        datetime(1969, 10, 1, tzinfo=timezone.utc),
        datetime(1970, 1, 1, tzinfo=timezone.utc),
    )


@pytest.mark.parametrize(
    ("window", "start", "end"),
    [
        (Tumbling("1w", zone="Europe/Paris"), "2026-11-22T23:00", "2026-11-29T23:00"),
        (Tumbling("1w", zone="UTC", offset="6d"), "2026-11-22T00:00", "2026-11-29T00:00"),
        (Tumbling("2w", zone="UTC"), "2026-11-23T00:00", "2026-12-07T00:00"),
        (Tumbling("7d", zone="UTC"), "2026-11-19T00:00", "2026-11-26T00:00"),
        (Tumbling("7d", zone="UTC", offset="4d"), "2026-11-23T00:00", "2026-11-30T00:00"),
        (Tumbling("1w"), "2026-11-19T00:00", "2026-11-26T00:00"),
        (Tumbling("1mo", zone="UTC", offset="14d"), "2026-11-15T00:00", "2026-12-15T00:00"),
        (Tumbling("1mo", zone="America/New_York", offset="27d"), "2026-10-28T04:00", "2026-11-28T05:00"),
        (Tumbling("3mo", zone="UTC", offset="59d"), "2026-11-29T00:00", "2027-03-01T00:00"),
    ],
    ids=str,
)
def test_weeks_begin_on_monday_and_the_offset_moves_windows_of_a_zone_by_up_to_their_size(
    window: Tumbling, start: str, end: str
) -> None:
    """Windows of seven days begin on Thursday, as 1 January 1970 did."""
    assert not window.problems
    noon = datetime(2026, 11, 25 if start < "2026-11-26" else 29, 12, tzinfo=timezone.utc)
    (last,) = window.lasts([round(noon.timestamp() * 1000)])
    assert [f"{moment(at):%Y-%m-%dT%H:%M}" for at in (window.start(last), last + 1)] == [start, end]


@pytest.mark.parametrize("zone", ["UTC", "Europe/Paris", "America/New_York", "Pacific/Kiritimati", "Pacific/Pago_Pago"])
@pytest.mark.parametrize("size", ["1d", "1w", "1mo", "5w", "18mo"])
def test_the_calendar_has_a_first_and_a_last_window_in_every_zone(size: str, zone: str) -> None:
    """Times at either end are in one window each, and those after or before it follow without a gap."""
    for offset in ("0s", "27d" if size.endswith("mo") else "23h"):
        window = Tumbling(size, offset, zone)
        ends = EARLIEST_MS, LATEST_MS
        near = [end + sign * hours * 3_600_000 for end, sign in zip(ends, (1, -1), strict=True) for hours in range(60)]
        for time, last in zip(near, window.lasts(near), strict=True):
            assert window.start(last) <= time <= last
            assert window.lasts([last]) == [last]
            assert moment(window.start(last)) <= moment(time) <= moment(last)
        assert window.lasts([LATEST_MS]) == [LATEST_MS]
        assert window.start(window.lasts([EARLIEST_MS])[0]) < EARLIEST_MS or zone == "UTC"


@pytest.mark.parametrize(
    ("window", "problem"),
    [
        (Tumbling("ten"), "size is 'ten': write a number with a unit"),
        (Tumbling("0s"), "tumbling 0s: the size must be above 0"),
        (Tumbling("10s", offset="10s"), "tumbling 10s, offset 10s: the size must be above 0, and the offset below"),
        (Tumbling("1mo"), "size='1mo' is no fixed time: give the calendar of the months"),
        (Tumbling("1h", zone="Asia/Kolkata"), "size='1h': with zone=, write whole days, weeks or months"),
        (Tumbling("1d", zone="Europe/Pari"), "zone='Europe/Pari' is unknown here"),
        (Tumbling("1d", offset="1d", zone="UTC"), "offset='1d': it must be below the least size of the windows, 1d"),
        (Tumbling("2mo", offset="56d", zone="UTC"), "it must be below the least size of the windows, 56d"),
        (Hopping("10s", every="x"), "every is 'x'"),
        (Hopping("10s", every="0s"), "every= must be above 0, and at most the size"),
        (Hopping("10s", every="11s"), "every= must be above 0, and at most the size"),
        (Hopping("10s", every="5s", offset="5s"), "offset='5s' must be below every='5s'"),
        (Hopping("1h", every="3599999ms"), "consist of 3,600,000 panes of 1 ms, the greatest common divisor"),
        (Hopping("10ms", every="1ms"), "each of more milliseconds than windows overlap"),
        (Session("0s"), "session 0s: the gap must be above 0"),
        (Session("soon"), "gap is 'soon'"),
        (Session("1s", wait="gap"), "wait is 'gap'"),
        (Revised(Session("1s"), early="1s"), "session 1s takes no early= and no lateness=: a later record may move"),
        (Revised(Session("1s"), lateness="1s"), 'let the session wait for late records, as Session("1s", wait="1s")'),
        (Revised(Tumbling("0s"), early="1s"), "tumbling 0s: the size must be above 0"),
        (Revised(Tumbling("1m"), early="1m"), "early='1m' must be below the size of the window, '1m'"),
        (Revised(Tumbling("1m"), early="soon"), "early is 'soon'"),
        (Revised(Tumbling("1m"), lateness="0s"), "lateness= must be above 0, or be left out"),
    ],
    ids=str,
)
def test_a_window_that_makes_no_sense_is_a_problem_with_a_remedy(window: Window | Revised, problem: str) -> None:
    assert problem in " ".join(window.problems)


class Paid(NamedTuple):
    customer: str
    at: int


async def ask(some: list[Paid]) -> list[int]:
    return [paid.at for paid in some]


def test_a_timedelta_makes_the_same_pipeline_as_its_text() -> None:
    def built(duration: Callable[[str], Duration]) -> LogicalGraph:
        second, minute, day = duration("1s"), duration("1m"), duration("1d")
        pipeline = Pipeline("durations")
        time = EventTime("at", disorder=second, idle=minute, ahead=day)
        loop = pipeline.feedback("loop", Paid, pause=second)
        orders = pipeline.source("orders", KafkaSource("orders", value=Paid, time=time))
        asked = orders.union(loop).enrich("asked", ask, timeout=second)
        asked.filter(lambda asked: asked.answer > 1).map(lambda asked: asked.record, output=Paid).feed(loop)
        keyed = orders.key_by(lambda order: order.customer)
        windows: tuple[Window, ...] = (
            Tumbling(minute, offset=second), Tumbling(day, zone="Europe/Paris"), Hopping(minute, every=second),
            Session(minute, wait=second),
        )  # fmt: skip
        for number, window in enumerate(windows):
            keyed.window(window).aggregate(f"window-{number}", Count()).sink(f"sink-{number}", PrintSink())
        counts = keyed.window(Tumbling(minute)).aggregate("revised", Count(), early=second, lateness=minute)
        counts.sink("revised-out", PrintSink())
        keyed.deduplicate("first", within=minute).sink("first-out", PrintSink())
        keyed.batches("lists", 3, timeout=second).sink("lists-out", PrintSink())
        keyed.reduce("newest", lambda old, new: new, ttl=day).sink("newest-out", PrintSink())
        orders.with_time("at", disorder=day).sink("moved-out", PrintSink())
        keyed.join("both", keyed, within=(duration("-1m"), second)).sink("both-out", PrintSink())
        keyed.as_of("version", keyed, keep=day).sink("version-out", PrintSink())
        return pipeline.build()

    units = {"s": timedelta(seconds=1), "m": timedelta(minutes=1), "d": timedelta(days=1)}
    text, timed = built(lambda text: text), built(lambda text: int(text[:-1]) * units[text[-1]])
    assert timed.fingerprint() == text.fingerprint()
    assert timed.explain() == text.explain()
    assert Tumbling(timedelta(minutes=1)) == Tumbling("1m")
    problem = "size is datetime.timedelta(microseconds=500): the smallest unit is 1ms"
    assert Tumbling(timedelta(microseconds=500)).problems == [problem]
    assert Tumbling(timedelta(seconds=-1)).problems == ["size is '-1s': it must not be negative"]
    assert Session(5).problems == [  # type: ignore[arg-type]  # the mistake that is tested
        'gap is 5, without a unit: write "5s", or timedelta(seconds=5) in Python'
    ]


def test_windows_are_described_by_what_decides_the_results() -> None:
    windows = (
        Tumbling("60s", offset="1s"), Tumbling("1m", offset="1000ms"), Tumbling("1d", zone="UTC"),
        Hopping("1m", every="20s"), Session("30m"), Session("30m", wait="5m"),
        Revised(Tumbling("1m"), early="1s", lateness="1h"),
    )  # fmt: skip
    assert [window.describe() for window in windows] == [
        {"tumbling": 60_000, "offset": 1_000},
        {"tumbling": 60_000, "offset": 1_000},
        {"tumbling": "1d", "zone": "UTC"},
        {"hopping": 60_000, "every": 20_000},
        {"session": 1_800_000},
        {"session": 1_800_000, "wait": 300_000},
        {"tumbling": 60_000, "early": 1_000, "lateness": 3_600_000},
    ]
    for window in windows:
        read = window_of(" ".join(f"{name}={of}" for name, of in window.describe().items()))
        assert read is not None
        assert read.describe() == window.describe()


class Click(msgspec.Struct):
    at: int


CLICKS = KafkaSource("clicks", value=Click, time="at")
LATE = Output("late", Click)
OUT: KafkaSink[Any] = KafkaSink("out")


def revised_counts(pipeline: Pipeline, **options: Any) -> Stream[Windowed[int, int]]:
    windows = pipeline.source("clicks", CLICKS).key_by(_minute).window(Tumbling("1m"))
    return windows.aggregate("counts", Count(), late=LATE, lateness="1h", **options)


def _minute(click: Click) -> int:
    return click.at // 60_000


def _key(window: Windowed[int, int]) -> int:
    return window.key


def _one(click: Click, other: Click) -> Click:
    return click


def test_revisions_go_to_sinks_through_operators_without_state_and_late_records_anywhere() -> None:
    pipeline = Pipeline("p")
    counts = revised_counts(pipeline, early="10s")
    counts.filter(lambda window: window.revision > 0).union(counts).map(_key).sink("out", OUT)
    counts.side(LATE).key_by(_minute).reduce("one", _one).sink("late", KafkaSink("late"))
    assert "tumbling 1m, early 10s, lateness 1h  state" in pipeline.build().explain()


@pytest.mark.parametrize(
    "use",
    [
        lambda pipeline, counts: counts.filter(bool).key_by(_key).reduce("again", max).sink("out", OUT),
        lambda pipeline, counts: counts.map(_key).key_by(lambda key: key).window(Tumbling("1h"))
        .aggregate("again", Count()).sink("out", OUT),
        lambda pipeline, counts: pipeline.source("other", KafkaSource("other", value=Click, time="at"))
        .key_by(_minute).join("again", counts.key_by(_key), within=("0s", "1s")).sink("out", OUT),
        lambda pipeline, counts: counts.map(_key).feed(pipeline.feedback("again", int)),
    ],
    ids=["reduce", "window", "join", "loop"],
)  # fmt: skip
def test_revisions_are_refused_before_state_that_would_count_them_again(use: Any) -> None:
    pipeline = Pipeline("p")
    counts = revised_counts(pipeline)
    use(pipeline, counts)
    with pytest.raises(GraphError, match="window 'counts' with early= or lateness= gives results again, and 'again' "):
        pipeline.build()


def moved(clicks: Stream[Any], at: Any = "at", **options: Any) -> None:
    keyed = clicks.with_time(at, id="moved", **options).key_by(_minute)
    keyed.reduce("newest", _one, ttl="1h").sink("out", OUT)


@pytest.mark.parametrize(
    ("mistake", "problem"),
    [
        (lambda clicks, loop: moved(clicks, "when"), "with_time: 'when' is no field of Click, which has at"),
        (lambda clicks, loop: moved(clicks, 5), r"expected a function of \(record\), got 5"),
        (lambda clicks, loop: moved(clicks, disorder="soon"), "disorder is 'soon': write a number with a unit"),
        (
            lambda clicks, loop: moved(clicks, disorder="2h"),
            "ttl='1h' is shorter than disorder='2h' of with_time 'moved': .* Raise ttl=, or lower disorder=",
        ),
        (
            lambda clicks, loop: moved(clicks.union(loop, id="both")),
            "with_time cannot take records that come round a loop: .* Put it before the loop",
        ),
        (
            lambda clicks, loop: moved(loop),
            "with_time goes by event time, and the records of 'timeless' have none: give",
        ),
    ],
)
def test_a_mistake_of_with_time_is_named_with_its_remedy(mistake: Any, problem: str) -> None:
    pipeline = Pipeline("p")
    loop = pipeline.feedback("loop", Click)
    pipeline.source("timeless", KafkaSource("timeless", value=Click)).union(loop, id="all").feed(loop)
    mistake(pipeline.source("clicks", CLICKS), loop)
    with pytest.raises(GraphError, match=problem):
        pipeline.build()


def test_with_time_is_explained_and_processes_agree_on_its_disorder() -> None:
    graphs = []
    for disorder in ("1h", "60m", "59m"):
        pipeline = Pipeline("p")
        moved(pipeline.source("clicks", CLICKS), disorder=disorder)
        graphs.append(pipeline.build())
    assert "with_time         <- clicks  disorder 1h  : Click" in graphs[0].explain()
    assert [graph.fingerprint() == graphs[0].fingerprint() for graph in graphs] == [True, True, False]


def test_a_fold_with_revisions_needs_merge() -> None:
    pipeline = Pipeline("p")
    windows = pipeline.source("clicks", CLICKS).key_by(_minute).window(Tumbling("1m"))
    windows.fold("counts", int, lambda count, click: count + 1, early="1s").sink("out", OUT)
    with pytest.raises(GraphError, match="Windows with early= or lateness= are merged of parts, and fold"):
        pipeline.build()


def test_records_of_a_window_need_a_known_type_to_be_kept() -> None:
    pipeline = Pipeline("p")
    unknown = pipeline.source("clicks", CLICKS).map(lambda click: click).key_by(lambda click: 0)
    unknown.window(Tumbling("1m")).apply("all", lambda window: window.value).sink("out", OUT)
    with pytest.raises(GraphError, match="the records of a window are kept, and their type is unknown"):
        pipeline.build()


class Told(NamedTuple):
    clicks: int
    best: list[Click]


class Struct(msgspec.Struct, kw_only=True):
    note: str = ""
    best: list[Click]
    clicks: Annotated[int, msgspec.Meta(ge=0)] | None


@dataclass
class Means:
    clicks: float
    mean: float = 0.0


@dataclass
class Late:
    late: int


BOTH: dict[str, Any] = {"clicks": Count(), "best": TopN(2, "at")}


def windowed(*given: Any, **fields: Any) -> Any:
    """The graph of a window with an aggregate of these."""
    pipeline = Pipeline("p")
    windows = pipeline.source("clicks", CLICKS).key_by(_minute).window(Tumbling("1m"))
    windows.aggregate("told", *given, **fields).sink("out", OUT)
    return pipeline.build()


@pytest.mark.parametrize("class_", [Told, Struct])
def test_a_class_has_the_state_of_the_form_without_one(class_: Any) -> None:
    typed, plain = windowed(class_, **BOTH).node("told"), windowed(BOTH).node("told")
    assert typed.type == Windowed[int, class_]
    assert (typed.meaning, typed.kept.layout) == (plain.meaning, plain.kept.layout)
    state = typed.accumulator.add(None, Placed(Place(0, "t", 0, 0), Click(7)))
    assert typed.accumulator.result(state) == class_(clicks=1, best=[Click(7)])


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ((Told, {"clicks": Count()}), "Told needs best: give an aggregate for each field, as best=Count"),
        ((Told, BOTH | {"mean": Mean("at")}), "Told has no field 'mean': its fields are clicks, best"),
        ((Told, {"clicks": Mean("at"), "best": TopN(2, "at")}), "Told.clicks is int, and its aggregate gives float"),
        ((Told, BOTH | {"best": len}), "aggregate 'best': .* must be a field's name with an aggregate"),
        ((Told, BOTH | {"best": Max(lambda click: "a", type=str)}), r"Told.best is list\[Click\], .* gives str"),
        ((Late, {}), r"Late.late has the name of an option of aggregate\(\): rename the field"),
        ((int, {"clicks": Count()}), "or a class with a field for each, as a dataclass, got int"),
        (({}, {}), "expected an aggregate"),
        ((Count, {}), r"Count is a class: give one, as Count\(...\)"),
        ((Count(), {"clicks": Count()}), r"clicks= is a field of a class: give the class"),
    ],
)
def test_a_class_that_does_not_fit_its_aggregates_is_refused(given: Any, problem: str) -> None:
    with pytest.raises(GraphError, match=problem):
        windowed(given[0], **given[1])


def test_a_field_of_floats_takes_integers_and_one_with_a_default_may_be_left_out() -> None:
    assert windowed(Means, clicks=Sum("at")).node("told").type == Windowed[int, Means]

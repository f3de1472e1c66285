"""Times of records at their source: what is late is a function of the log, and a watermark never falls."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any, cast

import msgspec
import pytest
from confluent_kafka import Message
from hypothesis import given
from hypothesis import strategies as st

from exactlyonce import Count, DeadLetters, Emit, EventTime, Pipeline, Session, Timers, Tumbling, Windowed
from exactlyonce.checkpoint.records.manifest import LATE_AT_FLOOR, LATE_BELOW_LATEST, SourceOffset
from exactlyonce.connectors import FileSource, GeneratorSource, IterableSource, KafkaSource
from exactlyonce.engines.runtime.batch import floors_of
from exactlyonce.engines.runtime.source_decoder import SourceDecoder, SourceTimes
from exactlyonce.engines.runtime.watermarks import Watermark
from exactlyonce.pipeline.dead_letters import OnError
from exactlyonce.pipeline.errors import GraphError, RecordError, Unavailable
from exactlyonce.pipeline.event_time import NO_FLOOR, NO_WATERMARK
from exactlyonce.sinks import KafkaSink
from exactlyonce.testing.crashing_world import MemoryRuns
from exactlyonce.testing.exactly_once import assert_exactly_once, scripts_of

NOW = 1_700_000_000_000


def source(*, time: Any = "ts", on_error: OnError = "fail", **rest: Any) -> KafkaSource[Any]:
    """A source whose event time has the settings among *rest*."""
    settings = {name: rest.pop(name) for name in ("disorder", "idle", "ahead") if name in rest}
    event_time = EventTime(time, on_error=on_error, **settings)
    make: Any = KafkaSource.records if rest.pop("records", False) else KafkaSource
    return cast(KafkaSource[Any], make("clicks", **{"value": dict, "time": event_time, **rest}))


def position(split: int, floor: int = NO_FLOOR, **rest: Any) -> SourceOffset:
    return SourceOffset("clicks", "clicks", "id", split, 0, floor=floor, **rest)


def of(*splits: int, **rest: Any) -> SourceTimes:
    """The times of a source with disorder 2 and idle after 10 s, whose splits begin without floors."""
    event_time = source(**{"disorder": "2ms", "idle": "10s", **rest}).event_time
    assert event_time is not None
    times = SourceTimes(event_time, map(position, splits))
    times.rest([*map(position, splits)], [], 0.0, behind=True)
    return times


# --- lateness --------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30)), max_size=400),
    st.lists(st.integers(1, 150), min_size=1),
    st.integers(0, 5),
)
def test_floors_are_those_of_a_plain_computation_whatever_the_batches(
    log: list[tuple[int, int]], sizes: list[int], disorder_ms: int
) -> None:
    event_time = source(disorder=f"{disorder_ms}ms").event_time
    assert event_time is not None
    times, greatest = SourceTimes(event_time), dict[int, int]()
    while log:
        batch, log = log[: sizes[0]], log[sizes[0] :]
        sizes = [*sizes[1:], sizes[0]]
        expected = []
        for split, time in batch:
            floor = greatest[split] - disorder_ms - 1 if split in greatest else NO_FLOOR
            expected.append(floor if time <= floor else NO_FLOOR)
            greatest[split] = max(greatest.get(split, time), time)
        floors = times.late([time for _, time in batch], [(split, 1) for split, _ in batch])
        assert (floors or [NO_FLOOR] * len(batch)) == expected
        assert (floors is None) == (not any(floor != NO_FLOOR for floor in expected))
    assert {split: times.floor_of(split) + disorder_ms + 1 for split in greatest} == greatest


# --- watermarks: the schedules of docs/event-time.md ------------------------------------------------------------------


def test_every_partition_counts_from_the_first_moment() -> None:
    times = of(0, 1)
    times.late([100], [(0, 1)])
    assert times.advanced(0.0) is None, "partition 1 has not spoken"
    times.late([90], [(1, 1)])
    assert times.advanced(0.0) == Watermark(87)


def test_a_restored_split_goes_on_at_its_floor_and_one_found_later_at_the_watermark() -> None:
    event_time = source(disorder="2ms").event_time
    assert event_time is not None
    times = SourceTimes(event_time, [position(0, 50), position(1, 40), position(2, 70)])
    mine = [position(0, 50), position(2, 70), position(3)]
    times.rest(mine, [], 0.0, behind=True)
    assert times.advanced(0.0) == Watermark(39), "partition 3 is in no checkpoint: it begins where all were"
    times.late([60, 80], [(3, 2)])
    assert times.advanced(0.0) == Watermark(49)
    times.found(5)
    assert times.late([49, 50], [(5, 2)]) == [49, NO_FLOOR]
    assert [times.noted(position(split)).floor for split in (0, 2, 3, 5)] == [50, 70, 78, 50]


def test_an_interval_of_an_earlier_version_is_computed_by_its_rule() -> None:
    """There a record as old as the latest one, less the disorder, was late; the number beside Sn is the same."""
    event_time = source(disorder="2ms").event_time
    assert event_time is not None
    for rules, floors in ((LATE_AT_FLOOR, [50, NO_FLOOR, 58]), (LATE_BELOW_LATEST, None)):
        times = SourceTimes(event_time, [position(0, 50)], rules)
        assert times.late([50, 60, 58], [(0, 3)]) == floors
        assert times.noted(position(0)).floor == 58
        times.rest([position(0)], [], 0.0, behind=True)
        assert times.advanced(0.0) == Watermark(58 - rules)


def test_records_of_one_millisecond_are_in_time_by_default() -> None:
    event_time = source().event_time
    assert event_time is not None
    assert SourceTimes(event_time).late([7, 7, 6, 7, 9, 9], [(0, 6)]) == [NO_FLOOR, NO_FLOOR, 6, *[NO_FLOOR] * 3]


def test_an_idle_split_holds_back_nothing_and_follows_the_watermark() -> None:
    times, splits = of(0, 1), [position(0), position(1)]
    times.late([100], [(0, 1)])
    times.late([10], [(1, 1)])
    assert times.advanced(0.0) == Watermark(7)
    times.rest(splits, [0, 1], 1.0, behind=False)
    times.late([105], [(0, 1)])
    times.rest(splits, [1], 10.0, behind=False)
    assert times.advanced(10.0) is None, "not yet"
    assert (times.slowest, times.silent_ms(1, 10.0), times.furthest) == (1, 9_000, 102)
    times.rest(splits, [1], 11.0, behind=False)
    assert times.advanced(11.0) == Watermark(102)
    assert times.noted(splits[1]).floor == 103
    assert times.late([102, 103], [(1, 2)]) == [102, NO_FLOOR]
    times.late([200], [(0, 1)])
    assert times.advanced(11.0) is None, "partition 1 is back"


@pytest.mark.parametrize("why", ["records wait", "nothing is read", "it is known to have more"])
def test_a_split_is_not_idle_while_its_end_is_not_known_to_be_reached(why: str) -> None:
    times, splits = of(0, 1), [position(0), position(1)]
    times.late([100], [(0, 1)])
    times.late([10], [(1, 1)])
    times.rest(splits, [0, 1], 1.0, behind=False)
    for now_s in range(2, 60):
        times.rest(splits, [0] if why == "it is known to have more" else [0, 1], float(now_s), behind=why[0] != "i")
        times.late([100 + now_s], [(0, 1)])
    assert times.advanced(60.0) == Watermark(7)


def test_servers_are_asked_before_a_split_becomes_idle_and_after_a_pause() -> None:
    """A client that was stopped, or whose server is away, knows of no new records."""
    times, splits = of(0, 1), [position(0), position(1)]
    asked = []
    for tenths in range(125):
        if unsure := times.unsure([1], tenths / 10):
            asked.append((tenths / 10, {*unsure}))
        times.rest(splits, [1], tenths / 10, behind=False)
    assert asked == [(10.0, {1})], "it is idle from then on"
    assert times.unsure([1], 13.5) == [1]
    times.rest(splits, [1], 13.5, behind=False, asked_s=0.9)
    assert not times.unsure([1], 15.3), "servers that took their time were no pause"
    times.rest(splits, [1], 15.3, behind=False, asked_s=60.0)
    assert times.unsure([1], 17.5) == [1]
    assert of(0, 1, idle=None).unsure([1], 13.5) == ()


def test_an_idle_split_that_is_known_to_have_more_counts_again() -> None:
    times, splits = of(0, 1), [position(0), position(1)]
    times.late([100], [(0, 1)])
    for now_s in (0.0, 10.0):
        times.rest(splits, [1], now_s, behind=False)
    assert times.advanced(10.0) == Watermark(97)
    times.rest(splits, [], 11.0, behind=True)
    times.late([300], [(0, 1)])
    assert times.advanced(11.0) is None
    assert times.late([97, 98], [(1, 2)]) == [97, NO_FLOOR]


def test_the_clock_moves_the_watermark_once_all_are_idle() -> None:
    times, splits = of(0, 1), [position(0), position(1)]
    times.late([1_000], [(0, 1)])
    times.rest(splits, [0, 1], 5.0, behind=False)
    assert times.advanced(14.0) is None
    times.rest(splits, [0, 1], 15.0, behind=False)
    assert times.advanced(15.0) == Watermark(997 + 10_000, idle=True)
    times.rest(splits, [0, 1], 15.5, behind=True)
    assert times.advanced(15.5) == Watermark(997 + 10_500, idle=True), "held a moment, it was idle before"
    times.late([11_000, 20_000], [(0, 2)])
    assert times.floors[0] == 20_000 - 3
    assert times.advanced(16.0) == Watermark(19_997), "partition 1 is idle still"


def test_a_subtask_without_splits_or_whose_splits_never_spoke_is_idle_without_a_number() -> None:
    assert of().advanced(0.0) == Watermark(NO_WATERMARK, idle=True)
    times = of(0)
    for now_s in (0.0, 10.0):
        times.rest([position(0)], [0], now_s, behind=False)
    assert times.advanced(10.0) == Watermark(NO_WATERMARK, idle=True)


def test_without_idle_a_silent_split_holds_back_the_others_and_an_ended_one_does_not() -> None:
    times, splits = of(0, 1, idle=None), [position(0), position(1)]
    times.late([100], [(0, 1)])
    for now_s in (0.0, 1e6):
        times.rest(splits, [0, 1], now_s, behind=False)
        assert times.advanced(now_s) is None
    times.rest([position(0), position(1, ended=True)], [0], 1e6, behind=False)
    assert times.advanced(1e6) == Watermark(97)
    times.rest([position(0, ended=True), position(1, ended=True)], [], 2e6, behind=False)
    assert times.advanced(2e6) == Watermark(97, idle=True)


# --- records without a usable time ------------------------------------------------------------------------------------

UNUSABLE: dict[str, tuple[Any, str]] = {
    "null": (None, "time= gave None, which is neither"),
    "NaN": (float("nan"), "time= gave nan, which is neither"),
    "seconds": (NOW / 1000, "nor a datetime: of seconds give round(1000 * seconds)"),
    "true": (True, "time= gave True, which is neither"),
    "negative": (-1, "time= gave -1, and ms since 1970 are not negative"),
    "nanoseconds": (NOW * 1_000_000, "as ms after the year 9999: divide microseconds by 1,000"),
    "microseconds": (NOW * 1_000, "as ms after the year 9999: divide microseconds by 1,000"),
    "before": (datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=2))), "is outside of the years 1 to 9999 in UTC"),
    "after": (datetime.max.replace(tzinfo=timezone(-timedelta(hours=5))), "is outside of the years 1 to 9999 in UTC"),
    "naive": (datetime(2026, 1, 1), "which has no time zone: give tzinfo"),
    "ahead": (NOW + 3_600_001, "its time 2023-11-14T23:13:20.001Z is 1h 00m after the timestamp of its message"),
    "missing": (..., "time= raised KeyError: 'ts'"),
}


def messages(*values: Any, partition: int = 0) -> list[Message]:
    return [
        Message(
            topic="clicks", partition=partition, offset=offset, timestamp=(1, NOW), value=msgspec.json.encode(value)
        )
        for offset, value in enumerate(values)
    ]


def decoder(values: list[Any], **rest: Any) -> SourceDecoder:
    """Its records have the times *values*, which need not be JSON; ... is none."""

    def time(record: dict[str, Any]) -> Any:
        return values[record["n"]] if values[record["n"]] is not ... else record["ts"]

    return SourceDecoder("clicks", source(time=time, **rest))


@pytest.mark.parametrize("name", UNUSABLE)
def test_an_unusable_time_stops_the_job_with_a_sentence_or_is_skipped(name: str) -> None:
    value, sentence = UNUSABLE[name]
    values, batch = [NOW, value, NOW + 5], messages(*({"n": n} for n in range(3)))
    with pytest.raises(RecordError) as raised:
        decoder(values).decode(batch)
    assert sentence in str(raised.value)
    assert "clicks[0] offset 1" in str(raised.value)
    assert 'time=EventTime(..., on_error="skip"); or leave the record out: --skip clicks:0:1' in str(raised.value)
    skipping = decoder(values, on_error="skip")
    got = skipping.decode(batch, [(0, 3)])
    assert ([record["n"] for record in got.records], got.times) == ([0, 2], [NOW, NOW + 5])
    assert [origin.offset() for origin in got.origins] == [0, 2]
    assert skipping.skipped_count == 1
    assert skipping.noted(position(0)).floor == NOW + 5, "it never moves the watermark"
    assert skipping.noted(position(0)).skipped_at == (1,)


def test_ms_datetimes_and_fields_are_times() -> None:
    class Click(msgspec.Struct):
        at: datetime
        n: int = 0

    at = datetime(2023, 11, 14, 22, 13, 20, 999_999, tzinfo=timezone.utc)
    body = {"at": at.isoformat()}
    for records in (False, True):
        timed = SourceDecoder("clicks", source(value=Click, time="at", records=records))
        assert timed.decode(messages(body, body)).times == [NOW + 999] * 2
    before_1970 = SourceDecoder("clicks", source(time=lambda record: datetime(1969, 12, 31, tzinfo=timezone.utc)))
    assert before_1970.decode(messages({})).times == [-86_400_000]
    untimed = SourceDecoder("clicks", KafkaSource("clicks", value=dict)).decode(messages({}))
    assert (untimed.times, untimed.floors) == (None, None)


def test_late_records_of_several_partitions_in_one_batch() -> None:
    timed = SourceDecoder("clicks", source(disorder="2ms", ahead=None))
    batch = [*messages({"ts": 10}, {"ts": 7}), *messages({"ts": 5}, {"ts": 4}, partition=1), *messages({"ts": 8})]
    for runs in ([(0, 2), (1, 2), (0, 1)], None):
        timed = SourceDecoder("clicks", source(disorder="2ms", ahead=None))
        got = timed.decode(batch, runs)
        assert floors_of(got) == [NO_FLOOR, 7, NO_FLOOR, NO_FLOOR, NO_FLOOR]


def test_an_outage_that_time_meets_is_no_bad_record() -> None:
    def time(record: Any) -> int:
        raise ConnectionError("no answer")

    with pytest.raises(Unavailable, match=r"time= raised ConnectionError: no answer"):
        SourceDecoder("clicks", source(time=time, on_error="skip")).decode(messages({}))


def test_what_is_no_fault_of_the_record_is_never_skipped() -> None:
    def time(record: Any) -> int:
        raise RuntimeError("a defect")

    with pytest.raises(RecordError, match="so on_error= does not leave it out") as caught:
        SourceDecoder("clicks", source(time=time, on_error="skip")).decode(messages({}))
    assert str(caught.value).count("test_source_times.py") == 1


class Click(msgspec.Struct):
    ts: int
    iso: str = ""
    maybe: str | None = None
    seconds: float = 0.0


WRONG: dict[str, dict[str, Any]] = {
    "time='at' is no field of Click, which has ts, iso, maybe, seconds": {"time": "at"},
    "time='iso' of Click is a str, which is no time: declare it as datetime": {"time": "iso"},
    "time='maybe' of Click is a str, which is no time: declare it": {"time": "maybe"},
    "time='seconds' of Click is a float, which is no time: give a function of the record": {"time": "seconds"},
    "time=7 must be the name of a field, a function of a record, or EventTime": {"time": 7},
    "disorder is 'much': write a number with a unit": {"time": EventTime("ts", disorder="much")},
    "idle is '5': write a number with a unit": {"time": EventTime("ts", idle="5")},
    "ahead is 'x': write a number": {"time": EventTime("ts", ahead="x")},
    "EventTime: on_error='drop' must be": {"time": EventTime("ts", on_error="drop")},  # type: ignore[call-overload]  # it is wrong on purpose
    "a source has one topic for both": {
        "time": EventTime("ts", on_error=DeadLetters("b")), "on_error": DeadLetters("a"),
    },
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_mistakes_in_the_description_are_found_at_the_build(message: str) -> None:
    pipeline = Pipeline("p")
    pipeline.source("clicks", KafkaSource("clicks", value=Click, **WRONG[message])).sink("out", KafkaSink("out"))
    with pytest.raises(GraphError, match=message.replace("(", r"\(")):
        pipeline.build()


@pytest.mark.parametrize("make", [KafkaSource, partial(IterableSource, []), GeneratorSource, FileSource])
def test_settings_of_event_time_beside_it_are_refused_with_the_new_spelling(make: Any) -> None:
    wanted = (
        r"test_source_times.py:\d+: \w+Source: disorder=, on_time_error= belong to time= now: "
        r"time=EventTime\('at', disorder='5s', on_error='skip'\)"
    )
    with pytest.raises(GraphError, match=wanted):
        make("clicks", value=Click, time="at", disorder="5s", on_time_error="skip")


def test_only_kafkas_records_have_a_timestamp_that_bounds_their_times() -> None:
    bounded = KafkaSource("t", value=Click, time="ts")
    unbounded: IterableSource[Click] = IterableSource([], value=Click, time="ts")
    assert bounded.event_time
    assert bounded.event_time.ahead == "1h"
    assert unbounded.event_time
    assert unbounded.event_time.ahead is None
    wrong: IterableSource[Click] = IterableSource([], value=Click, time=EventTime("ts", ahead="5m"))
    assert "ahead= is about the timestamps of messages of Kafka: leave it out" in [*wrong.problems()]


def test_the_fingerprint_knows_of_times_and_that_of_others_is_as_it_was() -> None:
    assert source().describe()["disorder"] == "0s"
    assert source(disorder=timedelta(minutes=2)).describe() == source(disorder="2m").describe()
    assert KafkaSource("clicks", value=dict).describe().keys() == {"source", "topic", "value", "metadata"}


# --- in a pipeline ----------------------------------------------------------------------------------------------------


class Visit(msgspec.Struct):
    user: str
    at: int


class Echo:
    def on_record(self, key: str, state: int | None, visit: Visit, timers: Timers, emit: Emit[str]) -> int | None:
        emit(visit.user)
        return None


def test_records_of_one_millisecond_are_all_in_time_by_default() -> None:
    """Whatever takes them: they are of four keys of one partition, in order, and nothing is said of disorder."""
    pipeline, users, ends = Pipeline("equal"), ("ann", "bob", "cid", "dee"), 1_700_000_000_000
    source = KafkaSource("clicks", value=Visit, time=EventTime("at", ahead=None))
    keyed = pipeline.source("clicks", source).key_by(lambda visit: visit.user)

    def user(visit: Visit) -> str:
        return visit.user

    keyed.process("process", Echo).sink("process-out", KafkaSink("a"))
    keyed.in_order("in_order").map(user).sink("in_order-out", KafkaSink("b"))
    keyed.deduplicate("once", within="1h").map(user).sink("once-out", KafkaSink("c"))
    pairs = keyed.join("pairs", keyed, within=("0s", "0s"))
    pairs.map(lambda pair: pair.left.user, output=str).sink("pairs-out", KafkaSink("d"))
    for window in (Session("1s"), Tumbling("1s")):
        name = type(window).__name__.lower()
        counts = keyed.window(window).aggregate(name, Count())
        counts.map(lambda counted: counted.key, output=str).sink(f"{name}-out", KafkaSink(name))
    runs = MemoryRuns(pipeline, 1)
    clicks = [*(Visit(user, ends) for user in users), Visit("end", ends + 60_000)]
    runs.scripts = scripts_of(runs.graph, {"clicks": clicks})
    outputs = runs.run(None).outputs
    assert len(outputs) == 6
    for sink, rows in outputs.items():
        assert sorted(value or b"" for _, value in rows if value != b"end") == [user.encode() for user in users], sink


def test_a_session_that_waits_takes_late_records_and_its_results_are_in_time_whatever_is_killed() -> None:
    """The last two visits of ann are late at their source. Windows of the results begin after the watermark."""

    def user(visit: Visit) -> str:
        return visit.user

    def key(session: Windowed[str, int]) -> str:
        return session.key

    def shown(window: Windowed[str, list[Windowed[str, int]]]) -> Iterator[str]:
        for one in window.value:
            yield f"{one.key} {one.start:%S} to {one.end:%S}: {one.value}, told at {window.start:%S}"

    pipeline, begin = Pipeline("waiting"), 1_700_000_040_000
    source = KafkaSource("visits", value=Visit, time=EventTime("at", disorder="1s", ahead=None))
    sessions = pipeline.source("visits", source).key_by(user).window(Session("5s", wait="5s"))
    counts = sessions.aggregate("sessions", Count())
    counts.key_by(key).window(Tumbling("5s")).apply("told", shown).sink("out", KafkaSink("out"))
    visits = [
        Visit(name, begin + 1_000 * second)
        for name, second in (("ann", 0), ("ann", 8), ("bob", 9), ("ann", 4), ("bob", 30), ("ann", 26), ("bob", 50))
    ]
    expected = [
        "ann 00 to 13: 3, told at 15", "bob 09 to 14: 1, told at 15", "ann 26 to 31: 1, told at 35",
        "bob 30 to 35: 1, told at 35", "bob 50 to 55: 1, told at 55",
    ]  # fmt: skip
    assert_exactly_once(pipeline, {"visits": visits}, {"out": expected}, crashes_max=8)

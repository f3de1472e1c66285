"""Cases from the tests of other systems, as data: our windows and joins give the results that these expect.

Records are `KEY TIME...`, and `NAME...@TIME` in joins, in ms. A row with *differs* expects our result, and names the
other system's rule.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
from test_joins import Join
from test_joins import play as joined
from test_windows import Arrived, Seen, as_batch, as_ms, operator_of
from timed_rig import advance

from exactlyonce.pipeline.event_time import END_OF_TIME, NO_FLOOR
from exactlyonce.pipeline.joins import AsOf, IntervalJoin
from exactlyonce.pipeline.windows import Hopping, Revised, Session, Tumbling, Window


class Windows(NamedTuple):
    """Steps: records, the watermark after them (the floor of the next records), and the results that it gives."""

    source: str
    window: Window | Revised
    steps: list[tuple[str, int, str]]
    """A result is `KEY START-END the times of its records`, with `rN` for revision N."""
    late: str = ""
    differs: str = ""


TEN, TWO_S, THREE_S, GAP = Tumbling("10ms"), Tumbling("2s"), Tumbling("3s"), Session("3s")
UNORDERED = "b 3999 3000; a 20 0 999; b 1998 1999 1000"
LATE_SESSION = [
    ("b 1000", 1999, ""), ("b 2000", 4998, ""), ("b 4500 8500", 7400, "b 1000-5000 1000 2000"),
    ("b 7000", 11501, "b 8500-11500 8500"), ("b 11600", 14600, "b 11600-14600 11600"),
    ("b 10000 14500", 20000, ""),
]  # fmt: skip
OF_WINDOWS = [
    Windows("Beam fixed_default", TEN, [("a 1 2 3 10 11", 25, "a 0-10 1 2 3, a 10-20 10 11")]),
    Windows(
        "Beam fixed_default_late_data, final", TEN,
        [("a 1 2 3 10 11 25", 100, "a 0-10 1 2 3, a 10-20 10 11, a 20-30 25"), ("a 7", 200, "")], "a 7",
        "Beam gives 1 2 3 7, as windows with lateness= do",
    ),
    Windows(
        "Beam fixed_default_late_data, accumulating", Revised(TEN, lateness="200ms"),
        [("a 1 2 3 10 11 25", 100, "a 0-10 1 2 3, a 10-20 10 11, a 20-30 25"), ("a 7", 101, "a 0-10 1 2 3 7 r1")],
    ),
    Windows("Beam known_late_data_watermark", TEN, [("", 5, ""), ("a 2 3 7 8", 11, "a 0-10 2 3 7 8")]),
    Windows("Beam known_late_data, no hold", TEN, [("", 8, ""), ("a 2 3 7", 11, "a 0-10 2 3 7")]),
    Windows(
        "Beam early_late_sessions, on time", Session("10ms"),
        [("a 1 2 3", -1, ""), ("a 4 5", -1, ""), ("a 6", 100, "a 1-16 1 2 3 4 5 6"), ("a 1 3 4", 200, "")],
        "a 1 3 4", "Beam adds late records to a session that was given",
    ),
    Windows(
        "Flink sliding", Hopping("3s", every="1s"),
        [(UNORDERED, 999, "a -2000-1000 0 20 999"), ("", 1999, "a -1000-2000 0 20 999, b -1000-2000 1000 1998 1999"),
         ("", 2999, "a 0-3000 0 20 999, b 0-3000 1000 1998 1999"), ("", 3999, "b 1000-4000 1000 1998 1999 3000 3999"),
         ("", 4999, "b 2000-5000 3000 3999"), ("", 5999, "b 3000-6000 3000 3999"), ("", 6999, ""), ("", 7999, "")],
    ),
    Windows(
        "Flink tumbling", THREE_S,
        [(UNORDERED, 999, ""), ("", 1999, ""), ("", 2999, "a 0-3000 0 20 999, b 0-3000 1000 1998 1999"), ("", 3999, ""),
         ("", 4999, ""), ("", 5999, "b 3000-6000 3000 3999"), ("", 6999, "")],
    ),
    Windows(
        "Flink sessions", GAP,
        [("b 0 1000 2500; a 10 1000 2500; b 5501 6000 6000 6050", 12000,
          "a 10-5500 10 1000 2500, b 0-5500 0 1000 2500, b 5501-9050 5501 6000 6000 6050"),
         ("b 15000 15000", 17999, "b 15000-18000 15000 15000")],
    ),
    Windows(
        "Flink dropped, tumbling", TWO_S,
        [("b 1000", 1985, ""), ("b 1980", 1999, "b 0-2000 1000 1980"), ("b 1998 2001", 2999, ""),
         ("", 3999, "b 2000-4000 2001")], "b 1998",
    ),
    Windows(
        "Flink dropped, sliding", Hopping("3s", every="1s"),
        [("b 1000", 1999, "b -1000-2000 1000"), ("b 2000", 3000, "b 0-3000 1000 2000"),
         ("a 3001; b 2400 2400; a 3001; b 3900", 6000,
          "b 1000-4000 1000 2000 2400 2400 3900, a 1000-4000 3001 3001, b 2000-5000 2000 2400 2400 3900, "
          "a 2000-5000 3001 3001, b 3000-6000 3900, a 3000-6000 3001 3001"), ("a 3001", 25000, "")], "a 3001",
    ),
    Windows(
        "Flink dropped, sessions", GAP, [*LATE_SESSION, ("", 100000, "")], "b 4500 7000 10000 14500",
        "Flink takes a late record into a session that is open, so that arrival decides: 4500, 7000, and 14500 alone",
    ),
    Windows(
        "Flink dropped, sessions that wait", Session("3s", wait="3s"),
        [*((given, watermark, "") for given, watermark, _ in LATE_SESSION[:4]),
         ("b 11600", 14600, "b 1000-11500 1000 2000 4500 7000 8500"), ("b 10000 14500", 20498, ""),
         ("", 20499, "b 11600-17500 11600 14500")], "b 10000",
    ),
    Windows(
        "Beam early_late_sessions, waiting", Session("10ms", wait="100ms"),
        [("a 1 2 3 4 5 6", 100, ""), ("a 1 3 4", 200, "a 1-16 1 1 2 3 3 4 4 5 6")],
    ),
    Windows(
        "Kafka Streams session, end and grace of 5 ms", Session("10ms", wait="15ms"),
        [("a 0 5; b 20", 19, ""), ("a 5 4", 28, ""), ("", 29, "a 0-15 0 5 5"), ("", 44, "b 20-30 20")], "a 4",
        differs="Kafka Streams ends it at 5, the time of its last record",
    ),
    Windows(
        "Beam discarding panes", Revised(TEN, lateness="200ms"),
        [("a 1 2", 20, "a 0-10 1 2"), ("a 3", 21, "a 0-10 1 2 3 r1")], differs="Beam gives 3 alone in the later pane",
    ),
    Windows(
        "Flink lateness", Revised(TWO_S, lateness="500ms"),
        [("b 500", 1500, ""), ("b 1300", 2300, "b 0-2000 500 1300"), ("b 1997", 6000, "b 0-2000 500 1300 1997 r1"),
         ("b 1998", 7000, "")], "b 1998", "Flink's purging trigger gives 1997 alone",
    ),
    Windows(
        "Flink touching sessions", GAP, [("a 0 3000", 9000, "a 0-3000 0, a 3000-6000 3000")],
        differs="Flink merges windows that touch",
    ),
    Windows("Bytewax session, within", Session("10s"), [("a 0 5000 -5000", 90000, "a -5000-15000 -5000 0 5000")]),
    Windows(
        "Bytewax session, exact gap", Session("10s"), [("a 0 10000", 90000, "a 0-10000 0, a 10000-20000 10000")],
        differs="Bytewax has the gap in the session",
    ),
    Windows("Bytewax session, merged", Session("10s"), [("a 0 10000 5000", 90000, "a 0-20000 0 5000 10000")]),
    Windows(
        "Bytewax session, some merged", Session("10s"),
        [("a 0 20000 25000 40000", 90000, "a 0-10000 0, a 20000-35000 20000 25000, a 40000-50000 40000")],
    ),
    Windows(
        "Quix expiry by partition", TEN,
        [("k 100 105; l 102 108; k 110", 108, ""), ("l 109", 108, ""),
         ("k 112", 110, "k 100-110 100 105, l 100-110 102 108 109"), ("", 200, "k 110-120 110 112")],
    ),
    Windows(
        "Quix expiry by key", TEN,
        [("k 100; l 102 105; k 106 107; l 108; m 115", 115, "k 100-110 100 106 107, l 100-110 102 105 108"),
         ("k 116", 119, "k 110-120 116, m 110-120 115")], differs="Quix keeps l open until its next record",
    ),
]  # fmt: skip


def parsed(given: str) -> list[tuple[str, int]]:
    return [(part.split()[0], int(time)) for part in given.split(";") if part for time in part.split()[1:]]


@pytest.mark.parametrize("case", OF_WINDOWS, ids=lambda case: case.source)
def test_windows(case: Windows) -> None:
    seen, records, floor = Seen(), list[Arrived](), NO_FLOOR
    operator = operator_of(case.window, seen.take, seen.take_late)
    for given, watermark, expected in [*case.steps, ("", END_OF_TIME, "")]:
        batch = [Arrived(len(records) + n, key, time, floor) for n, (key, time) in enumerate(parsed(given))]
        records += batch
        if batch:
            operator(as_batch(batch))
        advance(operator, watermark, 1)
        results = [
            f"{one.key} {as_ms(one.start)}-{as_ms(one.end)} "
            + " ".join(str(time) for time in sorted(records[id].time for id in one.value))
            + (f" r{one.revision}" if one.revision else "")
            for one in seen.results
        ]
        assert sorted(results) == sorted(expected.split(", ") if expected else [])
        seen.results.clear()
        floor = watermark
    assert [(one.key, one.time) for one in seen.late] == parsed(case.late)
    assert list(operator.table.items()) == []


@pytest.mark.parametrize(
    ("every_s", "starts"),
    [
        (5, {13: [5, 10], -3: [-10, -5], 3: [-5, 0], 7: [0, 5], 15: [10, 15], -5: [-10, -5], 0: [-5, 0], 10: [5, 10]}),
        (3, {11: [3, 6, 9], 11.5: [3, 6, 9], -1: [-9, -6, -3], -1.5: [-9, -6, -3], 5: [-3, 0, 3]}),
        (7, {14: [7, 14], -7: [-14, -7], 0: [-7, 0], 17: [14], -4: [-7], 10: [7]}),
        (10, {15: [10], -5: [-10], 5: [0], 20: [20], -10: [-10], 0: [0], 10: [10]}),
    ],
)  # fmt: skip
def test_bytewax_sliding_windows_of_10_s(every_s: int, starts: dict[float, list[int]]) -> None:
    seen = Seen()
    operator = operator_of(
        Hopping("10s", every=f"{every_s}s") if every_s < 10 else Tumbling("10s"), seen.take, seen.take
    )
    times = list(starts)
    operator(as_batch([Arrived(n, "a", round(time * 1000), NO_FLOOR) for n, time in enumerate(times)]))
    advance(operator, END_OF_TIME, 100)
    found = {
        time: sorted(as_ms(one.start) // 1000 for one in seen.results if n in one.value) for n, time in enumerate(times)
    }
    assert found == starts


class Joins(NamedTuple):
    """A name is of the left side if it begins with an upper-case letter; `-` deletes. The rest of it is the key."""

    source: str
    join: Join
    disorder: int
    """A side is one partition. A grace period of 10 ms is a disorder of 11: there the last millisecond is in time."""
    records: str
    results: str
    """Of a record alone, at the time at which no match can come any more."""
    differs: str = ""
    late: str = ""
    """The names of late records."""


BOTH, LEFT = IntervalJoin("-100ms", "100ms", "full"), IntervalJoin("-100ms", "100ms", "left")
RATES, ORDERS = "ae@1 au@2 ay@3 ar@4 be@86460 bu -r@86520", "Ae@60 Cr@180 De@86640 Bu Er@86580"
RATED = "Ae+ae@60 Cr+ar@180 De+be@86640 Bu+bu@86580"
DAYS = 2 * 86400
TOO_EARLY = "Kafka Streams' first joins give null before the match (KAFKA-10847)"
OF_JOINS = [
    Joins(
        "Kafka Streams left", LEFT, 1, "A0 A1 a0 a1 B0 B1 B2 b0 b1 b2 b3 C0 C1 C2 C3@0",
        "A0+a0 A1+a1 B0+a0 B1+a1 A0+b0 B0+b0 A1+b1 B1+b1 B2+b2 C0+a0 C0+b0 C1+a1 C1+b1 C2+b2 C3+b3@0", TOO_EARLY,
    ),
    Joins(
        "Kafka Streams left, bounds", LEFT, 1000,
        "A0 A1 a0 a1 a2 a3@0 b0@1000 b1@1001 b2@1002 b3@1003 B0 B1 B2 B3@1100 C0 C1 C2 C3@1101 D0 D1 D2 D3@1102 "
        "E0 E1 E2 E3@1103 F0 F1 F2 F3@1104 G0 G1 G2 G3@899 H0 H1 H2 H3@900 I0 I1 I2 I3@901",
        "A0+a0 A1+a1@0 B0+b0 B1+b1 B2+b2 B3+b3@1100 C0+null@1201 C1+b1 C2+b2 C3+b3@1101 D0+null D1+null@1202 "
        "D2+b2 D3+b3@1102 E0+null E1+null E2+null@1203 E3+b3@1103 F0+null F1+null F2+null F3+null@1204 "
        "G0+null G1+null G2+null G3+null@999 H0+b0 H1+null H2+null H3+null@1000 I0+b0@1000 I1+b1 I2+null I3+null@1001",
    ),
    Joins("Kafka Streams outer", BOTH, 1, "A0 Z0 a0 b1@0", "A0+a0 Z0+a0@0 null+b1@100", TOO_EARLY),
    Joins(
        "Kafka Streams outer, duplicates", BOTH, 11, "A0 Z0 a1 b1@0 c1@111 d3@211 A2 Z2@200 a2 b2@201 e3@1500",
        "null+a1 null+b1 A0+null Z0+null@100 A2+a2 Z2+a2 A2+b2 Z2+b2@201 null+c1@211 null+d3@311 null+e3@1600",
    ),
    Joins(
        "Kafka Streams outer, left expired by left", BOTH, 1, "A0@1 A1@2 Z0 a1@3 D2 d2@401",
        "A1+a1@3 A0+null@101 Z0+null@103 D2+d2@401",
    ),
    Joins(
        "Kafka Streams outer, left expired by right", BOTH, 1, "A0@1 A1@2 Z0 a1@3 d2@401 D2@402",
        "A1+a1@3 A0+null@101 Z0+null@103 D2+d2@402",
    ),
    Joins(
        "Kafka Streams outer, right expired by left", BOTH, 1, "a0@1 a1@2 b0 A1@3 D2@401 d2@402",
        "A1+a1@3 null+a0@101 null+b0@103 D2+d2@402",
    ),
    Joins("Kafka Streams outer, ordering", BOTH, 1, "A0@0 A1@100 a1@110", "A0+null@100 A1+a1@110"),
    Joins(
        "Kafka Streams outer, grace", BOTH, 11, "A0 a1@0 A1 a0@101 b0@112",
        "A0+null null+a1@100 A1+null null+a0@201 null+b0@212",
    ),
    Joins(
        "Kafka Streams grace of 10 ms, as a disorder", BOTH, 10, "A0@0 z9@105 a0@0", "A0+null@100 null+z9@205",
        "Kafka Streams counts it from the window's end: a0 is 5 ms before that", "a0",
    ),
    Joins(
        "Kafka Streams grace of 10 ms, from the window's end", BOTH, 110, "A0@0 z9@105 a0@0", "A0+a0@0 null+z9@205",
    ),
    Joins(
        "Kafka Streams outer, asymmetric", IntervalJoin("-5ms", "20ms", "full"), 1,
        "A0@29 A1@30 a2@31 a3@36 a4@37 a5@50",
        "A0+null@49 A1+null@50 null+a2@36 null+a3@41 null+a4@42 null+a5@55",
    ),
    Joins("Flink temporal, inner", AsOf(how="inner"), DAYS, f"{RATES} {ORDERS}", RATED),
    Joins("Flink temporal, left", AsOf(), DAYS, f"{RATES} {ORDERS}", f"{RATED} Er+null@86580"),
    Joins("Flink temporal, orders first", AsOf(), DAYS, f"{ORDERS} {RATES}", f"{RATED} Er+null@86580"),
    Joins(
        "Flink temporal, deleted at its own time", AsOf(), DAYS, f"{RATES.replace(' -r', '')} -r@4 {ORDERS}",
        "Ae+ae@60 Cr+null@180 De+be@86640 Bu+bu Er+null@86580",
    ),
]  # fmt: skip


def timed(given: str) -> list[tuple[str, int]]:
    """The names of `NAME... NAME@TIME`, each with its time."""
    groups = [group.split() for group in given.replace("@", " @ ").split(" @ ")]
    times = [int(group[0]) for group in groups[1:]]
    names = [groups[0], *(group[1:] for group in groups[1:])]
    return [(name, time) for of_time, time in zip(names, times, strict=False) for name in of_time]


@pytest.mark.parametrize("case", OF_JOINS, ids=lambda case: case.source)
def test_joins(case: Joins) -> None:
    records = timed(case.records)
    names = {number: name for number, (name, _) in enumerate(records)}
    sided = [("l" if name[0].isupper() else "r", name[1:], time, name[0] == "-") for name, time in records]
    for cuts in (set(names), set[int]()):
        seen = joined(case.join, sided, case.disorder, cuts, 1)
        pairs = [
            (f"{names.get(left, 'null')}+{names.get(right, 'null')}", time) for _, left, right, time in seen.results
        ]
        assert sorted(pairs) == sorted(timed(case.results))
        assert [names[number] for number in seen.late] == case.late.split()

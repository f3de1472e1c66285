"""The words of an audit, to people and to machines."""

from __future__ import annotations

from exactlyonce.cli.commands.audit import as_json, as_text, exit_code
from exactlyonce.engines.bounded.audit import AuditFinding, AuditReport
from exactlyonce.engines.bounded.unit.lane_audit import CHANGED, FOREIGN, MISSING, Finding, PlainRecord

WANTED, SEEN = PlainRecord(b"ann", b"3"), PlainRecord(b"ann", b"\xff" * 300, (("h", None),))
REPORT = AuditReport(
    "totals",
    [4, 5, 6],
    1200,
    1199,
    [
        AuditFinding("t", "out", 5, Finding(CHANGED, 1, 42, ("in", 0, 7), WANTED, SEEN)),
        AuditFinding("t", "out", 6, Finding(MISSING, None, None, ("in", 2, 9), WANTED, None)),
        AuditFinding("t", "out", None, Finding(FOREIGN, 0, 50, None, None, WANTED)),
    ],
    ["checkpoint 3 is expired"],
)


def test_people_get_a_line_for_each_finding_and_a_verdict() -> None:
    lines = list(as_text(REPORT))
    assert lines[0] == "changed: t[1] offset 42 (sink out, checkpoint 5, from in[0] offset 7)"
    assert lines[1] == "    expected key b'ann' value b'3'"
    assert lines[2].startswith("    seen     key b'ann' value b'\\xff")
    assert lines[2].endswith("... headers [('h', None)]")
    assert lines[3] == "missing: t[?] at the beginning (sink out, checkpoint 6, from in[2] offset 9)"
    assert lines[5] == "foreign: t[0] offset 50 (sink out, from no record of the input)"
    assert lines[-3:] == [
        "not judged: checkpoint 3 is expired",
        "Has the code of totals changed since checkpoint 5, or what it depends on? Then these are the differences "
        "between its versions, and no faults: audit with the code of then.",
        "totals: checkpoints 4 to 6, 1,200 records in, 1,199 out: 3 findings.",
    ]


def test_findings_beyond_the_limit_are_counted() -> None:
    """Of foreign records alone nobody asks whether the code has changed."""
    report = AuditReport("totals", [4], 2, 2)
    for number in range(5):
        report.add(AuditFinding("t", "out", None, Finding(FOREIGN, 0, number, None, None, WANTED)), shown=2)
    lines = list(as_text(report))
    assert lines[-2:] == [
        "and 3 more foreign: --limit shows them",
        "totals: checkpoints 4, 2 records in, 2 out: 5 findings.",
    ]
    assert [line[:26] for line in lines if not line.startswith(" ")][:2] == [
        "foreign: t[0] offset 0 (si",
        "foreign: t[0] offset 1 (si",
    ]
    assert (as_json(report)["more_findings"], as_json(report)["hint"]) == ({"foreign": 3}, "")


def test_a_clean_audit_says_so_and_an_empty_one_does_not() -> None:
    """Nothing found is a verdict only if something was judged."""
    assert list(as_text(AuditReport("totals", [4], 2, 2))) == [
        "totals: checkpoints 4, 2 records in, 2 out: exactly once: nothing is wrong."
    ]
    assert list(as_text(AuditReport("totals"))) == ["totals: no checkpoint could be judged."]
    assert [exit_code(each) for each in (AuditReport("totals", [4], 2, 2), REPORT, AuditReport("totals"))] == [0, 1, 10]


def test_what_only_stores_have_is_not_judged() -> None:
    why = ["9 records of sink table are in a store, which is not read"]
    nothing, part = AuditReport("totals", [4], 9, 0, [], why), AuditReport("totals", [4], 9, 9, [], why)
    assert list(as_text(nothing))[-1].endswith("none of their output could be judged; nothing was compared.")
    assert list(as_text(part))[-1].endswith("9 out: exactly once: nothing is wrong in the judged output.")
    assert [exit_code(nothing), exit_code(part)] == [10, 0]


def test_checkpoints_of_a_pipeline_that_reads_nothing() -> None:
    """An idle pipeline keeps only these, and the oldest never has one before it: that is no output that was missed."""
    idle = AuditReport("totals", [5, 6], 0, 0, [], ["checkpoint 4 began at checkpoint 3, which is expired"])
    assert list(as_text(idle))[-1] == "totals: checkpoints 5 to 6: they read no records; nothing was compared."
    assert exit_code(idle) == 10


def test_machines_get_all_of_it() -> None:
    report = as_json(REPORT)
    assert report["checkpoints"] == [4, 5, 6]
    changed, missing, foreign = report["findings"]
    assert changed["input"] == {"topic": "in", "partition": 0, "offset": 7}
    assert changed["expected"] == {"key": "ann", "value": "3", "headers": []}
    assert changed["seen"]["headers"] == [["h", None]]
    assert (missing["partition"], missing["offset"], missing["seen"]) == (None, None, None)
    assert (foreign["input"], foreign["checkpoint"]) == (None, None)

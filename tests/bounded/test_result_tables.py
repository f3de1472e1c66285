"""Results as a notebook shows them: complete, small, and with all text escaped."""

from __future__ import annotations

from html.parser import HTMLParser

from manifests import manifest

from exactlyonce.checkpoint.records.manifest import SourceOffset
from exactlyonce.engines.bounded.audit import AuditFinding, AuditReport
from exactlyonce.engines.bounded.catch_up import Summary
from exactlyonce.engines.bounded.reproduce import Replayed, ReplayedCount
from exactlyonce.engines.bounded.result_tables import ROWS_MAX, html_table
from exactlyonce.engines.bounded.unit.lane_audit import MISSING, Finding, PlainRecord
from exactlyonce.engines.runtime.source_decoder import Skipped


class Cells(HTMLParser):
    """The texts of a document, by element; every element is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._open.append(tag)
        self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts[self._open[-1]][-1] += data


def test_a_catch_up() -> None:
    """Counts, skipped records and the offsets at which the next work begins are there; `repr` has no manifest."""
    offsets = tuple(SourceOffset("orders", "o", "id", partition, 1_000 * (partition + 1)) for partition in range(2))
    summary = Summary(manifest(checkpoint=12, offsets=offsets), 2, 1_234, records_out=1_233, parallelism=3, work_ms=61)
    summary.skipped["orders", 1] = Skipped("orders", "o", 1, 1, [(5, "o[1] offset 5 is not <Order>.")])
    texts = Cells(summary._repr_html_()).texts
    assert texts["p"] == ["p: up to checkpoint 12"]
    assert texts["td"][:7] == ["12", "2", "1,234", "1", "1,233", "3", "61 ms"]
    assert texts["td"][7:12] == ["orders", "o", "1", "1", "o[1] offset 5 is not <Order>."]
    assert texts["td"][12:] == ["orders", "o", "0", "1,000", "orders", "o", "1", "2,000"]
    assert "order" not in texts, "no text of a record is markup"
    assert (summary.checkpoint, summary.offsets) == (12, {"orders": {0: 1_000, 1: 2_000}})
    assert repr(summary).startswith("Summary(checkpoints=2, records=1234, skipped={('orders', 1): ")


def test_an_audit() -> None:
    seen = PlainRecord(b"<b>ann</b>", b"3")
    finding = Finding(MISSING, 1, 41, ("in", 0, 7), seen, None)
    report = AuditReport("totals", [4, 5], 3, 2, [AuditFinding("t", "out", 5, finding)], ["<3> is expired"])
    texts = Cells(report._repr_html_()).texts
    (summary,) = texts["p"]
    assert summary.startswith(
        "totals: checkpoints 4 to 5, 3 records in, 2 out: 1 finding. Has the code of totals changed"
    )
    place = ["missing", "out", "t[1] after offset 41", "5", "in[0] offset 7"]
    assert texts["td"] == [*place, "key b'<b>ann</b>' value b'3'", "", "<3> is expired"]
    assert "b" not in texts


def test_a_replay() -> None:
    counts = [ReplayedCount("out", "t", 0, 4, 5), ReplayedCount("out", "t", None, 1, None)]
    texts = Cells(Replayed(7, 6, 5, 0, counts, 0)._repr_html_()).texts
    assert texts["p"] == ["checkpoint 7, 5 records in: the counts are the decided ones."]
    assert texts["td"] == ["out", "t", "0", "4", "5", "out", "t", "any", "1", ""]


def test_a_long_table_is_cut() -> None:
    rows = [(number,) for number in range(ROWS_MAX + 1_200)]
    assert Cells(html_table(["offset"], rows)).texts["td"][-2:] == [str(ROWS_MAX - 1), "and 1,200 more"]

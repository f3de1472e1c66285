"""Output that waits, as `exactlyonce transactions list` and `describe` show it to people."""

from __future__ import annotations

from pathlib import Path

from exactlyonce.cli.commands.transactions import as_table, in_full
from exactlyonce.engines.pending_output import TRANSACTION, InPartition, WaitingOutput

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
NOW_MS = 10_000_000
OPEN = WaitingOutput(
    name="eo:order-totals:out:0:1.0:0", kind=TRANSACTION, state="Ongoing", sink="out", subtask=0, incarnation=1,
    attempt="0", checkpoint=1, decided_in=1, records=700, started_at_ms=NOW_MS - 2_100, timeout_ms=900_000,
    producer_id=3, epoch=0, places=(InPartition("order-totals", 1, 40, 700),), next="the next run commits it",
)  # fmt: skip
PREPARED = WaitingOutput(
    name="eo-1-0-7", kind="rows", state="waits", sink="rows", subtask=2, checkpoint=7,
    started_at_ms=NOW_MS - 61_000, where="set aside in the store",
)  # fmt: skip
ROWS = WaitingOutput(
    name="rows:2:7", kind="rows", state="unknown", sink="rows", subtask=2, checkpoint=7, decided_in=8, records=1,
    started_at_ms=NOW_MS - 5_000, where="3 blocks of the checkpoint topic",
)  # fmt: skip


def test_the_table_is_that_of_the_page() -> None:
    shown = "\n".join(as_table([OPEN], NOW_MS, 100))
    assert f"```text\n{shown}\n```" in PAGE.read_text()


def test_what_waits_for_a_store() -> None:
    header, *lines = as_table([OPEN, PREPARED, ROWS], NOW_MS, 100)
    assert header.split() == ["transaction", "state", "open", "for", "left", "decided"]
    assert [line.split() for line in lines[2::2]] == [
        ["eo-1-0-7", "waits", "1m", "01s", "no"], ["rows:2:7", "unknown", "5.0", "s", "in", "checkpoint", "8"],
    ]  # fmt: skip
    assert [line.strip() for line in lines[3::2]] == [
        "sink rows, subtask 2; set aside in the store; cut at checkpoint 7",
        "sink rows, subtask 2; 3 blocks of the checkpoint topic; cut at checkpoint 7; 1 record",
    ]


def test_all_of_one() -> None:
    shown = {line[:16].strip(): line[16:] for line in [*in_full(OPEN, NOW_MS, 100)][1:]}
    assert {name: content for name, content in shown.items() if name != "since"} == {
        "kind": "transaction", "state": "Ongoing", "decided": "in checkpoint 1", "sink": "out, subtask 0",
        "written by": "incarnation 1, attempt 0", "cut at": "the barrier of checkpoint 1", "records": "700",
        "producer": "id 3, epoch 0", "left": "14m 57s, then the broker aborts it",
        "partitions": "order-totals[1] offset 40 and on, 700 records", "next": "the next run commits it",
    }  # fmt: skip
    assert shown["since"].endswith(", for 2.1 s")


def test_time_that_is_left_for_nothing() -> None:
    assert OPEN.left_ms(NOW_MS) == 897_900
    assert PREPARED.left_ms(NOW_MS) is None
    assert OPEN.left_ms(NOW_MS + 10_000_000) == 0

"""`exactlyonce checkpoints`: as data, as text, and of a pipeline that runs."""

from __future__ import annotations

import json
import os
import re

import msgspec
import pytest
from blank_manifest import blank_committable

from exactlyonce.checkpoint.records.encoding import encode
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import (
    AbortedCheckpoint,
    CheckpointStats,
    Committable,
    Finalized,
    Incarnation,
    Manifest,
    OperatorSnapshot,
    SourceOffset,
    SubtaskStats,
    Written,
)
from exactlyonce.cli.commands.checkpoints import as_json, as_text, opened_as_text
from exactlyonce.engines.spark.sink.position import Position, Tally
from exactlyonce.views.checkpoints import CheckpointsView, CheckpointView, lags, recorded
from tests.cli.conftest import Orders
from tests.cli.conftest import manifest as manifest_of

INCARNATION = Incarnation(incarnation=3, host="box", process=4212, started_at_ms=0, heartbeat_ms=1_000_000)


def committable(subtask: int, *counts: int) -> Committable:
    written = tuple(Written("totals", partition, 100, count) for partition, count in enumerate(counts))
    return blank_committable(
        transactional_id=f"eo:p:out:{subtask}:3.0:1", subtask=subtask, checkpoint=41, written=written
    )


def manifest(checkpoint: int, *committables: Committable, kind: str = "checkpoint") -> Manifest:
    offsets = [SourceOffset("in", "orders", "id", partition, 10 * checkpoint) for partition in range(2)]
    return manifest_of(
        checkpoint=checkpoint, incarnation=3, kind=kind, base=checkpoint - 1, previous=checkpoint - 1,
        triggered_at_ms=1_000_000, completed_at_ms=1_000_113, written_bytes=2_000, committables=committables,
        offsets=(*offsets, SourceOffset("rates", "exchange-rates", "id", 0, 5)),
        operators=(OperatorSnapshot("totals", 1, 1_500_000, ()),),
    )  # fmt: skip


@pytest.fixture
def history() -> History:
    found = History("p")
    found.admit(INCARNATION)
    found.admit(manifest(41, committable(0, 10, 20), committable(1, 5)))
    fates = (("eo:p:out:0:3.0:1", "committed"), ("eo:p:out:1:3.0:1", "repaired"))
    found.admit(Finalized(41, 3, 1_000_200, fates))
    found.admit(manifest(42, committable(0, 1_000), kind="final"))
    return found


def test_text(history: History) -> None:
    head, incarnation, blank, header, *lines = as_text(CheckpointsView(history, 60), "h:9092", 80)
    assert head == "p at h:9092: 2 checkpoints"
    assert incarnation.startswith("incarnation 3: process 4212 on box, last seen 1970-01-01")
    assert blank == ""
    assert header == "id  kind        state      completed              took  written  state size"
    assert [line.split()[:3] for line in lines] == [
        ["41", "checkpoint", "finalized"],
        ["committables", "1", "committed,"],
        ["Sn", "of", "in"],
        ["Sn", "of", "rates"],
        ["42", "final", "decided"],
        ["committables", "1", "decided;"],
        ["Sn", "of", "in"],
        ["Sn", "of", "rates"],
    ]
    assert lines[0].endswith("  113 ms   2.0 kB      1.4 MB")
    assert lines[1] == "    committables  1 committed, 1 repaired; 35 records"
    assert lines[2] == "    Sn of in      orders[0]=410 orders[1]=410"
    assert lines[5] == "    committables  1 decided; 1,000 records"
    assert max(map(len, [header, *lines])) <= 80


def test_a_sink_of_spark_is_called_one() -> None:
    """It has no Sn: how far its query has come is said, and which write was the last that had an id."""
    position = Position(query="a-query", batch_next=8, parts=(Tally(40),), writes=("monday", "tuesday"))
    found = History("large-orders")
    taken = manifest(8, kind="spark")
    found.admit(INCARNATION)
    found.admit(msgspec.structs.replace(taken, pipeline="large-orders", offsets=position.offsets()))
    head, _, _, _, line, *details = as_text(CheckpointsView(found, 60), "h:9092", 80)
    assert head == "large-orders, a Spark sink, at h:9092: 1 checkpoint"
    assert line.split()[:3] == ["8", "spark", "decided"]
    assert [" ".join(each.split()) for each in details] == [
        "committables none", "query a-query, up to batch 7", "writeIds 2 writes, the last tuesday"
    ]  # fmt: skip


def test_damage_is_shown(history: History) -> None:
    history.damaged["manifest/40"] = "it is finalized, but its manifest is gone"
    lines = list(as_text(CheckpointsView(history, 60), "h:9092", 80))
    assert "damaged: manifest/40: it is finalized, but its manifest is gone" in lines
    assert as_json(CheckpointsView(history, 60))["damaged"] == history.damaged


def test_older_ones_are_counted(history: History) -> None:
    head, hint, _, _, _, line, *_ = as_text(CheckpointsView(history, 1), "h:9092", 80)
    assert (head, hint) == (
        "p at h:9092: 2 checkpoints", "the last 1 are shown, and looked at for damage: --last 2 shows all",
    )  # fmt: skip
    assert line.split()[0] == "42"
    found = as_json(CheckpointsView(history, 1))
    assert (found["older"], [each["checkpoint"] for each in found["checkpoints"]]) == (1, [42])


def test_a_damaged_checkpoint_is_shown(history: History) -> None:
    lines = list(as_text(CheckpointsView(history, 60, damaged={41: "Block b is gone."}), "h:9092", 200))
    assert any(line.split()[:3] == ["41", "checkpoint", "damaged"] for line in lines)
    assert any(line.split() == ["damage", "Block", "b", "is", "gone."] for line in lines)
    first, second = as_json(CheckpointsView(history, 60, damaged={41: "Block b is gone."}))["checkpoints"]
    assert (first["state"], first["damage"]) == ("damaged", "Block b is gone.")
    assert (second["state"], second["damage"]) == ("decided", None)


@pytest.mark.parametrize(
    ("floors", "shown"),
    [
        ((None, None), ""),
        ((None, 5_000), "in none yet: orders[0] has had no record"),
        ((65_432, 5_000), "in 1970-01-01T00:00:05.000Z, held back by orders[1]"),
    ],
)
def test_the_watermark_and_the_split_that_holds_it_back(floors: tuple[int | None, ...], shown: str) -> None:
    found, first = History("p"), manifest(41)
    offsets = [
        offset if floor is None else msgspec.structs.replace(offset, floor=floor)
        for offset, floor in zip(first.offsets, (*floors, None), strict=True)
    ]
    found.admit(msgspec.structs.replace(first, offsets=tuple(offsets)))
    lines = as_text(CheckpointsView(found, 60), "h:9092", 200)
    assert [" ".join(line.split()[1:]) for line in lines if line.split()[:1] == ["watermark"]] == [shown] * bool(shown)


def test_json(history: History) -> None:
    found = json.loads(msgspec.json.encode(as_json(CheckpointsView(history, 60))))
    assert (found["pipeline"], found["newest_incarnation"]["process"]) == ("p", 4212)
    first, second = found["checkpoints"]
    assert (first["checkpoint"], first["state"], first["finalized_at_ms"]) == (41, "finalized", 1_000_200)
    assert (second["checkpoint"], second["state"], second["finalized_at_ms"]) == (42, "decided", None)
    assert (first["duration_ms"], first["written_bytes"], first["state_bytes"]) == (113, 2_000, 1_500_000)
    offset = {"source": "in", "topic": "orders", "topic_id": "id", "partition": 1, "offset": 410, "leader_epoch": -1}
    assert first["offsets"][1] == offset | {"skipped": 0, "skipped_at": [], "ended": False, "cursor": "", "floor": None}
    assert [(each["fate"], each["records"]) for each in first["committables"]] == [("committed", 30), ("repaired", 5)]
    written = {"topic": "totals", "partition": 1, "first_offset": 100, "count": 20}
    assert first["committables"][0]["written"][1] == written


def test_none_yet() -> None:
    found = History("p")
    found.admit(INCARNATION)
    head, incarnation = as_text(CheckpointsView(found, 60), "h:9092", 80)
    assert (head, incarnation[:13]) == ("p at h:9092: 0 checkpoints", "incarnation 3")


def test_a_duration_is_never_negative() -> None:
    odd = msgspec.structs.replace(manifest(43), completed_at_ms=5)
    assert CheckpointView(odd, None).duration_ms == 0


def test_of_a_pipeline(orders: Orders) -> None:
    orders.command.refused(f"there is no topic {orders.name}.checkpoints", "checkpoints", orders.name)
    orders.ran("--checkpoint-interval", "10m")
    listed = orders.command.done("checkpoints", orders.name, "--json").json["checkpoints"]
    assert [each["checkpoint"] for each in listed] == sorted(orders.history().manifests)
    last = listed[-1]
    assert (last["kind"], last["state"], sum(each["offset"] for each in last["offsets"])) == ("final", "finalized", 700)
    assert sum(each["records"] for each in last["committables"]) == 700
    text = orders.command.done("checkpoints", "orders:pipeline").out
    assert text.startswith(f"{orders.name} at {orders.kafka.bootstrap_servers}: {len(listed)} checkpoints\n")
    assert "committables  1 committed; 700 records\n" in text
    assert max(map(len, text.splitlines()[1:])) <= 80
    with orders.running() as run:
        incarnation = orders.command.done("checkpoints", orders.name, "--json").json["newest_incarnation"]
        assert run.stop() == 0
    assert (incarnation["incarnation"], incarnation["process"]) == (2, os.getpid())
    assert orders.history().incarnation_latest == 2


def test_a_plot_has_lag_starts_and_expired_checkpoints(orders: Orders) -> None:
    pytest.importorskip("matplotlib")
    refused = "is of no known format: let its name end with .png or .svg"
    orders.command.refused(refused, "checkpoints", orders.name, "--plot", "totals.pdf")
    for _ in range(2):
        orders.ran("--num-retained", "1")
    path = orders.command.folder / "totals.svg"
    orders.command.done("checkpoints", orders.name, "--plot", str(path))
    assert {"2 runs began", "0 restarts of workers", "lag in records"} <= set(
        re.findall(r">([^<]+)</text>", path.read_text())
    )
    history, manifests = recorded(orders.config, orders.name)
    assert len(manifests) > len(history.manifests)
    newest = manifests[-1]
    unread = tuple(msgspec.structs.replace(offset, offset=0) for offset in newest.offsets)
    moments = {1: newest.completed_at_ms, 2: 0}
    early = [
        msgspec.structs.replace(newest, checkpoint=n, offsets=unread, triggered_at_ms=at) for n, at in moments.items()
    ]
    assert lags(orders.config, [newest, *early]) == {newest.checkpoint: 0, 1: 700, 2: 0}


def test_why_one_took_so_long(history: History) -> None:
    """Its subtasks, the slowest first; "-" where a mark does not tell."""
    times = {"waiting_ms": 70_000, "aligning_ms": 2_000, "snapshot_ms": 30, "capture_ms": 0, "flush_ms": 4}
    slow = SubtaskStats(task="totals", subtask=1, **times, state_bytes=2_000, records_in_flight=5)
    aborted = AbortedCheckpoint(40, 60_500, 60_000, "it was late")
    stats = CheckpointStats(41, (SubtaskStats(task="totals", subtask=0), slow), (aborted,))
    mark = msgspec.structs.replace(history.finalized[41], decided_at_ms=1_000_150, stats=encode(stats))
    view = CheckpointView(history.manifests[41], mark)
    lines = [" ".join(line.split()) for line in opened_as_text(view, 120)]
    assert lines[-7:] == [
        "committed 200 ms after its trigger",
        "slowest: totals[1] took 1m 12s, 1m 10s of it waiting for its barrier", "",
        "subtask took waiting aligning snapshot capture flush state written in flight",
        "totals[1] 1m 12s 1m 10s 2.0 s 30 ms 0 ms 4 ms 2.0 kB 0 B 5", "totals[0] - - - - - - 0 B 0 B",
        "aborted before it: checkpoint 40: it was late, after 1m 00s",
    ]  # fmt: skip
    assert view.phases.subtasks[0]["acknowledged_ms"] == 72_034
    assert view.phases.aborted[0].triggered_at_ms == 1_000_000 - 60_500
    for older in (history.finalized[41], msgspec.structs.replace(mark, stats=b"damaged")):
        assert CheckpointView(history.manifests[41], older).phases.subtasks == []


def test_the_subtasks_of_a_run(orders: Orders) -> None:
    orders.ran()
    number = orders.command.done("checkpoints", orders.name, "--json").json["checkpoints"][-1]["checkpoint"]
    found = orders.command.done("checkpoints", orders.name, str(number), "--json").json
    assert found["triggered_at_ms"] <= found["decided_at_ms"] <= found["committed_at_ms"]
    assert [(each["task"], each["subtask"]) for each in found["subtasks"]] == [("orders", 0)]
    assert sum(each["state_bytes"] for each in found["subtasks"]) == found["state_bytes"]
    latest_ms = found["decided_at_ms"] - found["triggered_at_ms"]
    assert all(0 <= each["acknowledged_ms"] <= latest_ms for each in found["subtasks"])
    assert "subtask" in orders.command.done("checkpoints", orders.name, str(number)).out
    orders.command.refused("has no checkpoint 999, or keeps it no longer", "checkpoints", orders.name, "999")

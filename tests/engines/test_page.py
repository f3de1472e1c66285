"""The page of a run: what it gathers, and that a browser shows it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from run_figures import CHECKPOINT, LOG, PHASES, progress

from exactlyonce import Count, EventTime, Pipeline, Tumbling
from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.connectors import KafkaSource
from exactlyonce.engines.local.messages import WatermarkOf
from exactlyonce.engines.local.monitoring.page import CHECKPOINTS, Page
from exactlyonce.engines.local.monitoring.server import serving
from exactlyonce.engines.local.monitoring.serving import Asked, Health
from exactlyonce.engines.plan import plan
from exactlyonce.pipeline.event_time import NO_WATERMARK
from exactlyonce.sinks import KafkaSink
from exactlyonce.testing.cluster import LIMIT_S

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Clock:
    """Ten seconds later at each look."""

    def __init__(self) -> None:
        self._now_ms = 1_000_000

    def now_ms(self) -> int:
        self._now_ms += 10_000
        return self._now_ms

    monotonic_ms = now_ms

    def processing_s(self) -> float:
        return self.now_ms() / 1000


@pytest.fixture
def health() -> Health:
    return Health(CheckpointSettings(), lambda: 0.0)


@pytest.fixture
def page(health: Health) -> Page:
    pipeline = Pipeline("totals")
    words = pipeline.source("words", KafkaSource("words", value=str))
    words.key_by(len, id="by-length").reduce("longest", max).sink("out", KafkaSink("out"))
    page = Page(plan(pipeline.build(), 2), health, Clock())
    page.event({"event": "started", "incarnation": 3})
    page.event({"event": "step", "step": "deployed", "at_ms": 0})
    page.live({"records_per_s": 100, "lag": 7})
    return page


def trigger(page: Page, *numbers: int) -> None:
    for number in numbers:
        page.event({"event": "step", "step": "triggered", "checkpoint": number, "at_ms": 1_000 * number})


def complete(page: Page, number: int) -> None:
    page.event(CHECKPOINT | {"checkpoint": number, "kind": "checkpoint"})


def outcomes(page: Page) -> dict[int, str]:
    return {each.id: each.outcome for each in page.state().checkpoints}


def detail(page: Page, number: object) -> Any:
    answer = page.paths["/checkpoint.json"](Asked("/checkpoint.json", [("id", str(number))]))
    return json.loads(answer.body) if answer.status == 200 else answer.status


def test_checkpoints(page: Page) -> None:
    trigger(page, 1, 2)
    for worker, took_ms in enumerate((10, 20)):
        ack = {"task": "words", "worker": worker, "state_bytes": 7, **dict.fromkeys(PHASES, took_ms)}
        page.event({"event": "step", "step": "acknowledged", "checkpoint": 1, **ack})
    complete(page, 1)
    reason = "checkpoint 2 took longer than 60000 ms; aborted, its output is carried on"
    page.event({"event": "note", "at_ms": 2_500, "text": reason})
    trigger(page, 3)
    assert outcomes(page) == {1: "completed", 2: "aborted", 3: "running"}
    first = detail(page, 1)
    assert [(each["subtask"], each["acknowledged_ms"]) for each in first["subtasks"]] == [(1, 100), (0, 50)]
    assert (first["decided_at_ms"], first["missing"]) == (CHECKPOINT["decided_at_ms"], [])
    assert (detail(page, 2)["notes"], detail(page, 2)["duration_ms"]) == ([reason], 500)
    assert detail(page, 3)["missing"] == ["words[0]", "words[1]", "longest[0]", "longest[1]"]
    page.event({"event": "step", "step": "deployed", "at_ms": 9_000})
    assert outcomes(page)[3] == "aborted", "its workers are gone"
    trigger(page, *range(4, 4 + CHECKPOINTS))
    assert (len(outcomes(page)), min(outcomes(page))) == (CHECKPOINTS, 4)
    assert [detail(page, wrong) for wrong in (1, "", "x", -1)] == [404] * 4


def test_operators_say_which_records_they_bring_together(health: Health) -> None:
    pipeline = Pipeline("counts")
    words = pipeline.source("words", KafkaSource("words", value=str, time=lambda word: 0)).key_by(len, id="by-length")
    counts = words.window(Tumbling("10s")).aggregate("counts", Count(), lateness="5s")
    counts.sink("out", KafkaSink("out"))
    words.reduce("longest", max).sink("longest-out", KafkaSink("longest"))
    page = Page(plan(pipeline.build(), 2), health, Clock())
    told = {node["id"]: node["about"] for node in page.state().graph}
    assert told["words"] == "KafkaSource words"
    assert told["counts"] == "tumbling 10s, lateness 5s"
    assert told["longest"] == "state str"


def test_the_bottleneck_is_named(page: Page) -> None:
    page.turned("running")
    for records, busy_s in ((0, 0.0), (500, 9.0)):
        page.progress(progress(0, records, operators={"longest": (busy_s, records), "out": (0.1, records)}))
    state = page.state()
    assert state.cause == "operator 'longest' takes 90% of a worker's time: it bounds the throughput"
    nodes = {node["id"]: node for node in state.graph}
    assert (nodes["longest"]["rate"], nodes["longest"]["busy"]) == (50, pytest.approx(0.9))
    assert [read["shuffled"] for read in nodes["longest"]["reads"]] == [True]
    page.progress(progress(1, 0, waiting=["store 'shop' is away"]))
    assert page.state().cause == "worker 1: store 'shop' is away", "a wait explains more than a cost"


def test_a_store_that_does_not_answer_is_named_before_the_first_incarnation(health: Health) -> None:
    pipeline = Pipeline("totals")
    pipeline.source("words", KafkaSource("words", value=str)).sink("out", KafkaSink("out"))
    page = Page(plan(pipeline.build(), 1), health, Clock())
    page.turned("recovering")
    page.event({"event": "step", "step": "asks", "at_ms": 0, "whom": "the store of sink 'out'"})
    assert page.state().cause == "no answer yet from the store of sink 'out', after 20.0 s"
    page.event({"event": "started", "incarnation": 1, "at_ms": 0})
    assert page.state().cause == ""


def test_figures_have_an_age_while_a_source_waits(page: Page) -> None:
    """The fake clock goes on by 10 s at each look."""
    page.progress(progress(0, 1))
    first = page.state()
    assert first.as_of_ms is not None
    assert first.at_ms - first.as_of_ms <= 20_000
    page.progress(progress(0, 1, waiting=["a broker is away"]))
    second = page.state()
    assert second.as_of_ms is not None
    assert second.as_of_ms < second.at_ms - 20_000


def test_the_policy_names_the_one_script_of_the_page(page: Page) -> None:
    """No other script runs: the page has no handlers in attributes."""
    answer = page.paths["/"](Asked("/"))
    script = answer.body.split(b"<script>")[1].split(b"</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in answer.policy
    assert answer.body.count(b"<script") == 1
    assert re.search(rb"<[^>]*\son\w+=", answer.body.split(b"<script>")[0]) is None


def test_a_partition_without_records_that_others_wait_for_is_named(health: Health) -> None:
    """It is the lowest of those that are not idle, and silent for seconds, of an operator that has got records."""
    pipeline = Pipeline("counts")
    lines = pipeline.source("lines", KafkaSource("lines", value=dict[str, int], time=EventTime("at", idle=None)))
    lines.key_by(len).window(Tumbling("1s")).aggregate("counts", Count()).sink("out", KafkaSink("out"))
    page = Page(plan(pipeline.build(), 2), health, Clock())
    resting, silent = WatermarkOf(0, True), WatermarkOf(NO_WATERMARK, False, "lines[1]", 6_000)
    page.progress(progress(0, 1, watermarks={"lines": WatermarkOf(9_000, False, "lines[0]", 7_000, 9_000)}))
    page.progress(progress(1, 1, watermarks={"lines": silent}))
    page.progress(progress(2, 1, watermarks={"lines": resting}))
    assert page.state().cause == "", "nothing has come to the operator"
    page.progress(progress(2, 1, watermarks={"lines": resting}, operators={"counts": (0.0, 1)}))
    assert page.state().cause == (
        "operator 'counts' waits for source 'lines': lines[1] has had no record for 6.0 s, while another has come to "
        "1970-01-01T00:00:09.000Z. Results wait until one comes: idle=None. A shorter EventTime(..., idle=) of the "
        "source ends that sooner"
    )
    page.progress(progress(1, 1, watermarks={"lines": WatermarkOf(NO_WATERMARK, False, "lines[1]", 4_000)}))
    assert page.state().cause == ""


def test_who_holds_the_watermark_back(page: Page) -> None:
    """The lowest of the workers that expect records; late records are shown against all that came."""
    of_workers = [WatermarkOf(5, True), WatermarkOf(9, False), WatermarkOf(7, False, "words[1]")]
    for worker, watermark in enumerate(of_workers):
        page.progress(progress(worker, 1, watermarks={"words": watermark}))
    counts = WatermarkOf(6, False)
    for worker in range(2):
        operators = {"counts": (0.1, 5)}
        page.progress(progress(3 + worker, 1, watermarks={"counts": counts}, late={"counts": 2}, operators=operators))
    page.progress(progress(5, 1, watermarks={"by-length": WatermarkOf(NO_WATERMARK, False)}))
    state = page.state()
    assert msgspec.to_builtins(state.watermarks) == [
        {"id": "words", "at_ms": 7, "held_back_by": "words[1]", "late": 0, "came": 0},
        {"id": "counts", "at_ms": 6, "held_back_by": "", "late": 4, "came": 10},
        {"id": "by-length", "at_ms": None, "held_back_by": "", "late": 0, "came": 0},
    ]
    assert sum(each.lag or 0 for each in state.partitions) == 6 * 9


def test_a_log_has_a_lag_in_time(page: Page) -> None:
    page.turned("running")
    page.progress(progress(0, 1, lags={"words": []}, logs={"words": [LOG]}))
    page.live({"records_per_s": 1, "lag": None, "log_lag_bytes": 700, "log_lag_ms": 2_500})
    state = page.state()
    assert state.cause == "source 'words': the server may remove log"
    assert [(log.source, log.name, log.tables[0].page) for log in state.logs] == [("words", "exactlyonce_shop", 3)]
    node, worker = state.graph[0], state.workers[0]
    assert ("lag" in node, node["lag_ms"], worker["lag"], state.samples[-1][2]) == (False, 2_500, None, 700)


def test_what_is_wrong_comes_first(page: Page) -> None:
    page.turned("recovering")
    page.event(
        {
            "event": "note",
            "at_ms": 1_000_000,
            "text": "restarting from the last completed checkpoint: worker 1 was killed",
        }
    )
    state = page.state()
    assert (state.well, state.sentence.split(",")[0]) == (False, "recovering")
    assert state.cause.endswith("worker 1 was killed")


@pytest.mark.exhaustive
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_browser_shows_it(page: Page, health: Health, tmp_path: Path) -> None:
    trigger(page, 1, 2)
    complete(page, 1)
    page.event({"event": "note", "at_ms": 1, "text": "<b>not bold</b>"})
    health.turned("running")
    page.progress(progress(0, 500, operators={"longest": (1.0, 500)}))
    with serving("127.0.0.1", 0, page.paths) as port:
        command = [
            BROWSER or "", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}",
            "--virtual-time-budget=3000", "--dump-dom", f"http://127.0.0.1:{port}/#1",
        ]  # fmt: skip
        shown = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout
    assert "Well: running; no checkpoint of this run is complete yet." in shown
    assert "&lt;b&gt;not bold&lt;/b&gt;" in shown
    assert 'aria-label="checkpoint 1, completed"' in shown
    assert "took 300 ms" in shown
    assert "longest" in shown

"""The figures of a run for Prometheus, and its two probes."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack, suppress
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families
from run_figures import CHECKPOINT, LOG, progress

from exactlyonce.checkpoint.settings import CheckpointSettings
from exactlyonce.connectors.source import LogRead
from exactlyonce.engines.local.messages import WatermarkOf
from exactlyonce.engines.local.monitoring import server as module
from exactlyonce.engines.local.monitoring.server import CLIENTS_MAX, serving
from exactlyonce.engines.local.monitoring.serving import (
    METRICS,
    STANDBY,
    STUCK_S,
    WAITING,
    Answer,
    Asked,
    AtOnce,
    Health,
    Metrics,
    Paths,
)
from exactlyonce.engines.options import listening_at
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.event_time import END_OF_TIME
from exactlyonce.testing.cluster import LIMIT_S


def scraped(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Each sample by its name and labels, without the pipeline's, by a parser that is not ours."""
    answer = metrics.answer(Asked("/metrics"))
    assert answer.status == 200
    samples = [sample for family in text_string_to_metric_families(answer.body.decode()) for sample in family.samples]
    assert {sample.labels.pop("pipeline") for sample in samples} == {"totals"}
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}


def of(samples: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float:
    return samples[f"exactlyonce_{name}", frozenset(labels.items())]


def test_figures_of_workers_and_checkpoints() -> None:
    metrics = Metrics("totals")
    assert of(scraped(metrics), "checkpoints_completed_total") == 0, "an alert must see the first step from 0"
    metrics.event({"event": "started", "incarnation": 3})
    metrics.event({"event": "step", "step": "deployed"})
    metrics.event({"event": "step", "step": "triggered"})
    metrics.event(CHECKPOINT | {"dead_letters": 4})
    metrics.progress(progress(0, 100, operators={"add": (0.25, 100)}))
    metrics.progress(progress(1, 40, skipped=2))
    metrics.turned("running")
    samples = scraped(metrics)
    assert (of(samples, "incarnation"), of(samples, "restarts_total")) == (3, 0)
    assert of(samples, "job_state", state="running") == 1
    assert of(samples, "job_state", state="deploying") == 0
    assert of(samples, "checkpoints_triggered_total") == of(samples, "checkpoints_completed_total") == 1
    assert of(samples, "checkpoint_duration_seconds_sum", phase="end_to_end") == pytest.approx(0.3)
    assert of(samples, "checkpoint_duration_seconds_bucket", phase="async", le="0.05") == 1
    assert of(samples, "last_checkpoint_timestamp_seconds") == 1_700_000_000.5
    assert (of(samples, "records_committed_total"), of(samples, "dead_letters_total")) == (50, 4)
    assert of(samples, "records_in_total", subtask="1") == 40
    assert of(samples, "records_skipped_total", subtask="1") == 2
    assert of(samples, "operator_busy_seconds_total", operator="add", subtask="0") == 0.25
    assert of(samples, "pending_records", source="orders", topic="orders", partition="1", subtask="0") == 7
    metrics.progress(progress(0, 100, lags={"orders": [("orders", 0, 2)]}))
    shown = [dict(labels) for name, labels in scraped(metrics) if name == "exactlyonce_pending_records"]
    assert ("1", "0") not in [(each["partition"], each["subtask"]) for each in shown], "it is another worker's now"


def test_counters_go_on_over_restarts() -> None:
    metrics = Metrics("totals")
    for incarnation in (1, 2):
        metrics.event({"event": "started", "incarnation": incarnation})
        metrics.event({"event": "step", "step": "deployed"})
        for records in (10, 30):
            metrics.progress(progress(0, records, operators={"add": (records / 10, records)}))
        metrics.event(CHECKPOINT | {"dead_letters": 5})
    samples = scraped(metrics)
    assert of(samples, "records_in_total", subtask="0") == 60
    assert of(samples, "operator_records_in_total", operator="add", subtask="0") == 60
    assert of(samples, "operator_busy_seconds_total", operator="add", subtask="0") == 6
    assert (of(samples, "restarts_total"), of(samples, "dead_letters_total")) == (1, 10)


def test_every_metric_is_shown() -> None:
    metrics = Metrics("totals")
    metrics.event(CHECKPOINT)
    watermarks = {"count": WatermarkOf(1_700_000_000_000, False)}
    others = {"unwritten": {"out": 1}, "watermarks": watermarks, "late": {"count": 3}, "logs": {"in": [LOG]}}
    metrics.progress(progress(0, 1, operators={"add": (1.0, 1)}, **others))
    ended = {"watermarks": {"count": WatermarkOf(END_OF_TIME, True)}, "late": {"count": 5}, "logs": {"in": [LOG]}}
    metrics.progress(progress(0, 1, **ended))
    assert of(scraped(metrics), "late_records_total", operator="count", subtask="0") == 5
    shown = of(scraped(metrics), "watermark_timestamp_seconds", operator="count", subtask="0")
    assert shown == 1_700_000_000, "the end of time is none"
    samples = scraped(metrics)
    shop = {"source": "in", "log": "exactlyonce_shop"}
    assert of(samples, "source_log_lag_seconds", **shop) == 2.5
    assert of(samples, "source_log_status", status="unreserved", **shop) == 1
    metrics.progress(progress(0, 1, logs={"in": [LogRead(name="exactlyonce_shop", status="reserved")]}))
    after = scraped(metrics)
    assert {name for name, labels in after if ("source", "in") in labels} == {"exactlyonce_source_log_status"}
    assert of(after, "source_log_status", status="reserved", **shop) == 1
    names = {name for name, _ in samples}
    expected = {f"{metric.name}_sum" if metric.kind == "histogram" else metric.name for metric in METRICS}
    assert expected <= names
    assert all(metric.name.endswith("_total") == (metric.kind == "counter") for metric in METRICS)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_live_and_ready() -> None:
    clock = Clock()
    health = Health(CheckpointSettings(interval_ms=1_000, timeout_ms=4_000), clock)
    assert (health.liveness[0], health.readiness) == (True, (False, "recovering, for 0.0 s"))
    health.turned("running", 0.0)
    assert health.readiness == (True, "running; no checkpoint of this run is complete yet")
    clock.now_s += 5.5
    health.turned("running", 0.0)
    assert health.readiness == (
        False,
        "running, but no checkpoint of this run is complete yet; one should be complete every 5 s at the latest",
    )
    health.event(CHECKPOINT)
    clock.now_s += 2
    assert health.readiness == (True, "running; checkpoint 7 is 2.0 s old")
    assert health.wellness == health.readiness
    clock.now_s += 2.9
    assert (health.readiness.well, health.wellness.well) == (True, True)
    health.turned("recovering", 0.0)
    clock.now_s += 20
    assert (health.liveness[0], health.readiness) == (True, (False, "recovering, for 20.0 s")), (
        "a restore may take its time"
    )
    clock.now_s += STUCK_S - 19
    assert health.liveness == (False, "stuck: recovering, and it has not come round for 31 s")
    for state, rests_s in ((STANDBY, 0.0), (WAITING, 600.0)):
        health.turned(state, rests_s)
        clock.now_s += rests_s
        assert (health.liveness[0], health.readiness[0]) == (True, False)
    health.turned("running", 0.0)
    assert health.readiness[0], "it counts from when it runs again"


def test_a_checkpoint_is_late_before_it_has_timed_out() -> None:
    clock = Clock()
    health = Health(CheckpointSettings(), clock)
    health.turned("running", 0.0)
    health.event(CHECKPOINT)
    for later_s, is_well in ((9.0, True), (2.0, False)):
        clock.now_s += later_s
        health.turned("running", 0.0)
        assert (health.wellness.well, health.readiness.well) == (is_well, True)
    health.event(CHECKPOINT | {"duration_ms": 20_000})
    clock.now_s += 50
    health.turned("running", 0.0)
    assert health.wellness.well, "they take that long"


def test_answers_over_http() -> None:
    metrics, health = Metrics("totals"), Health(CheckpointSettings())
    paths = {"/metrics": metrics.answer, "/live": health.answer_live, "/ready": health.answer_ready}
    with serving("127.0.0.1", 0, paths) as port:
        base = f"http://127.0.0.1:{port}"
        with urlopen(f"{base}/metrics?from=somebody") as response:
            assert b"exactlyonce_restarts_total" in response.read()
        with urlopen(f"{base}/live") as response:
            assert response.read().startswith(b"recovering")
        stranger = Request(f"{base}/live", headers={"Host": f"evil.example.com:{port}"})
        for asked, status in ((f"{base}/ready", 503), (base, 404), (stranger, 403)):
            with pytest.raises(HTTPError) as refused:
                urlopen(asked)
            assert refused.value.code == status
            refused.value.close()
        taken = f"Nothing can listen on 127.0.0.1:{port}: Address already in use"
        with pytest.raises(ConfigError, match=taken), serving("127.0.0.1", port, paths):
            pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 1)


def test_slow_clients_have_no_threads_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that sends a byte now and then is cut off. One more than there may be takes the oldest one's place."""
    health, limit_s = Health(CheckpointSettings()), time.monotonic() + LIMIT_S
    monkeypatch.setattr(module, "REQUEST_S", 0.2)
    with serving("127.0.0.1", 0, {"/live": health.answer_live}) as port:
        with socket.create_connection(("127.0.0.1", port), LIMIT_S) as slow, suppress(ConnectionError):
            while time.monotonic() < limit_s:
                slow.sendall(b"G")
                slow.settimeout(0.02)
                with suppress(TimeoutError):
                    assert slow.recv(1) == b""
                    break
        assert time.monotonic() < limit_s
        monkeypatch.setattr(module, "REQUEST_S", LIMIT_S)
        before = threading.active_count()
        with ExitStack() as stack:
            for _ in range(CLIENTS_MAX + 20):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), LIMIT_S))
            with urlopen(f"http://127.0.0.1:{port}/live") as response:
                assert response.read().startswith(b"recovering")
            while threading.active_count() > before + CLIENTS_MAX:
                assert time.monotonic() < limit_s, "the threads of those that were cut off end"
                time.sleep(0.01)


def test_answers_are_neither_embedded_nor_guessed() -> None:
    health = Health(CheckpointSettings())
    with (
        serving("127.0.0.1", 0, {"/live": health.answer_live}) as port,
        urlopen(f"http://127.0.0.1:{port}/live") as response,
    ):
        headers = response.headers
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; frame-ancestors 'none'")
    assert (headers["X-Content-Type-Options"], headers["X-Frame-Options"]) == ("nosniff", "DENY")


@pytest.mark.parametrize(
    "text", ["9100", "host", "host:", ":9100", "host:port", "host:99999", "host:0", "http://host:9100"]
)
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="write HOST:PORT"):
        listening_at(text)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /live HTTP/1.1\r\nHost: [\r\n\r\n", 403), (b"GET http://[ HTTP/1.1\r\n\r\n", 400),
        (b"GET http://localhost/live HTTP/1.1\n\n", 200),
        (b"GET /live HTTP/1.1\r\nA: b", 400), (b"GET /live HTTP/1.1\r\n \r\nGET /ready HTTP/1.1\r\n\r\n", 400),
        (b"GET /live HTTP/1.1\r\nA: b\rContent-Length: 30\r\n\r\nGET /ready HTTP/1.1\r\n\r\n", 400),
        (b"GET /live\r\n\r\n", 400), (b"GET /live HTTP/3\r\n\r\n", 400), (b"POST /live HTTP/1.1\r\n\r\n", 501),
        (b"GET /live HTTP/1.1\r\nA: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (b"GET /live HTTP/1.1\r\n" + b"A: a\r\n" * 200 + b"\r\n", 431),
        (b"GET /live HTTP/1.1\r\nContent-Length: 30\r\n\r\nGET /ready HTTP/1.1\r\n\r\n", 200),
    ],
)  # fmt: skip
@pytest.mark.parametrize("often", [False, True])
def test_requests_that_are_not_served(sent: bytes, status: int, often: bool) -> None:
    """One answer, and the connection ends: what follows a body that nobody reads is no request."""
    answers = {"/live": lambda _: Answer(b"lives\n"), "/ready": lambda _: Answer(b"ready\n")}
    with (
        serving("127.0.0.1", 0, answers, keep_alive=often) as port,
        socket.create_connection(("127.0.0.1", port)) as client,
    ):
        client.settimeout(LIMIT_S)
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        got = b""
        with suppress(ConnectionResetError):  # of what was sent and not read
            while more := client.recv(1 << 16):
                got += more
    assert got.startswith(b"HTTP/1.")
    assert got.split()[1] == str(status).encode()
    assert b"ready" not in got


def test_answers_in_the_order_of_the_requests() -> None:
    """Also where one has to be waited for, and the next ones were sent with it."""
    answers: Paths = {
        "/waits": lambda _: Answer(b"waits\n"),
        "/quick/*": AtOnce(lambda asked: Answer(asked.path.encode()), lambda _: Answer(b"never\n")),
        "/both/*": AtOnce(lambda _: None, lambda asked: Answer(f"{dict(asked.query)}".encode())),
    }
    asked = ["/quick/1", "/waits", "/quick/2", "/both/?a=b%20c&d=", "/quick/3"]
    lines = [f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n" for path in asked]
    with (
        serving("127.0.0.1", 0, answers, keep_alive=True) as port,
        socket.create_connection(("127.0.0.1", port)) as client,
    ):
        client.settimeout(LIMIT_S)
        client.sendall("".join(lines).encode())
        client.shutdown(socket.SHUT_WR)
        got = b""
        while more := client.recv(1 << 16):
            got += more
    bodies = [part.split(b"\r\n\r\n")[1] for part in got.split(b"HTTP/1.1 200 OK")[1:]]
    assert bodies == [b"/quick/1", b"waits\n", b"/quick/2", b"{'a': 'b c', 'd': ''}", b"/quick/3"]


def test_a_client_that_does_not_read_is_not_read() -> None:
    """So that its answers do not fill the memory of the run; it gets all, once it reads."""
    asked, sent, refused_s = b"GET /quick/" + b"1" * 10_000 + b" HTTP/1.1\r\n\r\n", 0, None
    answers: Paths = {"/quick/*": AtOnce(lambda _: Answer(b"\0" + b"x" * 100_000), lambda _: Answer())}
    with (
        serving("127.0.0.1", 0, answers, keep_alive=True) as port,
        socket.create_connection(("127.0.0.1", port)) as client,
    ):
        client.setblocking(False)
        while refused_s is None or time.monotonic() < refused_s + 0.5:
            try:
                sent += client.send(asked[sent % len(asked) :] + asked * 10)
                refused_s = None
            except BlockingIOError:
                refused_s = refused_s or time.monotonic()
                time.sleep(0.01)
            assert sent < 100 << 20, "it is always read"
        client.settimeout(LIMIT_S)
        whole, got = sent // len(asked), 0
        while got < whole:
            more = client.recv(1 << 20)
            assert more, "it was cut off"
            got += more.count(b"\0")

"""`run --metrics --ui`: what Prometheus, probes and browsers see of a run, of its restart, and of a standby."""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from exactlyonce.connectors.embedded.broker import HOST, free_port
from exactlyonce.testing.cluster import LIMIT_S
from tests.cli.conftest import Orders, children_of, wait_until


def asked(address: str, path: str) -> tuple[int, str]:
    try:
        with urlopen(f"http://{address}/{path}", timeout=10) as response:
            return response.status, response.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def listens(address: str) -> bool:
    try:
        return bool(asked(address, "live"))
    except URLError:
        return False


def total(address: str, name: str) -> float:
    """The sum of a metric's samples."""
    families = text_string_to_metric_families(asked(address, "metrics")[1])
    return sum(sample.value for family in families for sample in family.samples if sample.name == f"exactlyonce_{name}")


def under_way(address: str) -> float:
    """The checkpoints that are not complete."""
    return total(address, "checkpoints_triggered_total") - total(address, "checkpoints_completed_total")


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Where a collector of OpenTelemetry listens, and the spans that it has got."""
    spans: list[Any] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got = ExportTraceServiceRequest.FromString(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
            spans.extend(span for of in got.resource_spans for scope in of.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer((HOST, 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://{HOST}:{server.server_address[1]}", spans
        server.shutdown()


def test_a_run_and_its_restart(orders: Orders, collector: tuple[str, list[Any]]) -> None:
    address = f"{HOST}:{free_port()}"
    process = orders.command.start(
        *("run", "orders:pipeline", "--metrics", address, "--ui", address, "--traces", collector[0]),
        *("--parallelism", "2", "--checkpoint-interval", "100ms"),
        *("--restart", "fixed_delay:attempts=5,delay=10ms"),
    )

    def await_total(name: str, least: float) -> None:
        wait_until(lambda: total(address, name) >= least, lambda: process.poll() is None)

    try:
        wait_until(lambda: listens(address), lambda: process.poll() is None)
        await_total("records_committed_total", 700)
        wait_until(lambda: asked(address, "ready")[0] == 200)
        assert asked(address, "live")[0] == 200
        assert total(address, "records_in_total") == total(address, "operator_records_in_total") / 3 == 700
        assert total(address, "operator_busy_seconds_total") > 0
        assert total(address, "pending_records") == 0
        worker, *_ = children_of(process.pid)
        os.kill(worker, signal.SIGSTOP)
        wait_until(
            lambda: total(address, "checkpoints_triggered_total") > total(address, "checkpoints_completed_total")
        )
        assert asked(address, "live")[0] == 200, "the run's own process comes round while a worker is stuck"
        os.kill(worker, signal.SIGKILL)
        await_total("restarts_total", 1)
        await_total("last_checkpoint_id", total(address, "last_checkpoint_id") + 1)
        wait_until(lambda: asked(address, "ready")[0] == 200)
        assert total(address, "records_committed_total") == 700, "output is counted once, whatever is read again"
        page = json.loads(asked(address, "state.json")[1])
        assert (page["well"], page["restarts"], len(page["workers"])) == (True, 1, 2)
        assert any("restarting" in text for _, text in page["notes"])
        complete = [each["id"] for each in page["checkpoints"] if each["outcome"] == "completed"]
        checkpoint = json.loads(asked(address, f"checkpoint.json?id={complete[-1]}")[1])
        tasks = {(each["task"], each["subtask"]) for each in checkpoint["subtasks"]}
        assert tasks == {(task, subtask) for task in ("orders", "totals") for subtask in (0, 1)}
        assert "<title>" in asked(address, "")[1]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0
        names = Counter(span.name for span in collector[1])
        assert (names["restart"], names["checkpoint"] >= len(complete)) == (1, True)
    finally:
        process.kill()
        process.communicate()


def test_a_standby_is_live_and_not_ready(orders: Orders) -> None:
    orders.ran()
    leader, address = orders.begun_elsewhere(), f"{HOST}:{free_port()}"
    with orders.running("--standby", "--metrics", address, until='"event": "standby"') as waiting:
        wait_until(lambda: asked(address, "live")[1].startswith("standby"))
        assert (asked(address, "live")[0], asked(address, "ready")[0]) == (200, 503)
        leader(ended=True)
        waiting.await_said('"event": "checkpoint"')
        wait_until(lambda: asked(address, "ready")[0] == 200)
        assert waiting.stop() == 0
    assert not listens(address)


def test_an_address_that_is_taken(orders: Orders) -> None:
    with socket.create_server((HOST, 0)) as taken:
        address = f"{HOST}:{taken.getsockname()[1]}"
        orders.run_refused("Address already in use. Choose an address of this machine", "--metrics", address)
    orders.run_refused("write HOST:PORT", "--metrics", "9100")

"""The examples for production are valid, and their pipeline runs as they start it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from exactlyonce.connectors.embedded.broker import free_port
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

ROOT = Path(__file__).parents[1]
FOLDER, MONITORING = ROOT / "docker" / "production", ROOT / "docker" / "monitoring"
UNIT = FOLDER / "order-totals.service"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
RUN = COMPOSE["services"]["pipeline"]
CONTAINER = next(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))["spec"]["template"]["spec"][
    "containers"
][0]
CUSTOMERS = ("ann", "bob", "cho")


def passes(*command: str | Path) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr


def installed(name: str) -> str:
    """A command of this environment."""
    return str(Path(sys.executable).parent / name)


def test_compose_keeps_its_schema() -> None:
    passes(installed("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", FOLDER / "compose.yaml")


def test_what_compose_mounts_and_builds_is_there() -> None:
    mounts = [mount for service in COMPOSE["services"].values() for mount in service.get("volumes", ())]
    files = [mount.split(":")[0] for mount in mounts if mount.startswith(".")]
    assert len(files) == 5
    assert [file for file in files if not (FOLDER / file).is_file()] == []
    assert (FOLDER / RUN["build"]["context"] / RUN["build"]["dockerfile"]).is_file()


def test_kubernetes_takes_the_manifests() -> None:
    passes(installed("kubernetes-validate"), "--strict", FOLDER / "kubernetes.yaml")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """With a command and a folder of this machine."""
    text = UNIT.read_text().replace("/opt/orders/.venv/bin/exactlyonce", installed("exactlyonce"))
    (tmp_path / UNIT.name).write_text(text.replace("/opt/orders", str(tmp_path)))
    passes("systemd-analyze", "verify", "--man=no", tmp_path / UNIT.name)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_takes_its_settings(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "prometheus.yml", tmp_path)
    shutil.copy(MONITORING / "alerts.yml", tmp_path)
    passes("promtool", "check", "config", tmp_path / "prometheus.yml")


def test_all_start_the_pipeline_alike() -> None:
    unit = next(line for line in UNIT.read_text().splitlines() if line.startswith("ExecStart="))
    commands = [unit.split()[1:], RUN["command"], CONTAINER["args"]]
    assert [command[:2] for command in commands] == [["run", "orders:pipeline"]] * 3


class Running:
    """The run of compose.yaml, with the address of this test for its own."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment, self.port = environment, free_port()

    def start(self) -> None:
        words = [*RUN["command"], "--checkpoint-interval", "200ms"]
        del words[words.index("--ui") : words.index("--ui") + 2]
        words[words.index("--metrics") + 1] = f"127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [installed("exactlyonce"), *words], cwd=FOLDER, stderr=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, **self.environment},
        )  # fmt: skip

    def await_answer(self, path: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
                    assert answer.status == 200
                    return
            except (urllib.error.URLError, ConnectionError):
                assert self.process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)

    def end(self, how: signal.Signals) -> int:
        self.process.send_signal(how)
        return self.process.wait(LIMIT_S)


@pytest.fixture
def running(
    own_broker: Callable[..., KafkaCluster], database_server: Callable[[str], Any]
) -> Iterator[tuple[Running, KafkaCluster, Any]]:
    kafka, server = own_broker(), database_server("postgres")
    for topic in ("orders", "order-totals", "order-totals-dead"):
        kafka.create_topic(topic, partitions=4)
    server.execute("CREATE DATABASE production")
    environment = {
        "EXACTLYONCE_BOOTSTRAP_SERVERS": kafka.bootstrap_servers, "ORDERS_DSN": server.dsn("production")
    }  # fmt: skip
    run = Running(environment)
    run.start()
    yield run, kafka, server
    if run.process.poll() is None:
        run.end(signal.SIGKILL)
    server.execute("DROP DATABASE production WITH (FORCE)")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_pipeline_survives_kills_and_answers_its_probes(running: tuple[Running, KafkaCluster, Any]) -> None:
    """Topic and table have each order once, after two SIGKILLs, a second run by mistake, and a clean end. An order that
    cannot be read is a dead letter, and stops none of them.

    The second run fences the first, which ends with code 5.
    """
    run, kafka, server = running
    probe = CONTAINER["livenessProbe"]["httpGet"]["path"]
    for round in range(3):
        kafka.produce("orders", [(each, json.dumps({"customer": each, "total": 1})) for each in CUSTOMERS * 100])
        kafka.produce("orders", ["no order"])
        run.await_answer(probe)
        run.await_answer("/ready")
        if round < 2:
            run.end(signal.SIGKILL)
            run.start()
    fenced = run.process
    run.port = free_port()
    run.start()
    assert fenced.wait(LIMIT_S) == 5
    kafka.produce("orders", [(each, json.dumps({"customer": each, "total": 1})) for each in CUSTOMERS * 100])
    run.await_answer("/ready")
    deadline = time.monotonic() + LIMIT_S
    while len(kafka.read_committed("order-totals")) < 1_200:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert run.end(signal.SIGTERM) == 0
    sums = [json.loads(record.value or b"") for record in kafka.read_committed("order-totals")]
    for customer in CUSTOMERS:
        assert [each["sum"] for each in sums if each["customer"] == customer] == [*range(1, 401)]
    assert len(kafka.read_committed("order-totals-dead")) == 3
    rows = server.execute("SELECT customer, sum FROM order_totals ORDER BY customer", database="production")
    assert [tuple(row) for row in rows] == [(customer, 400) for customer in CUSTOMERS]

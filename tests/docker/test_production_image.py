"""The image of docker/production, on a Python from an empty image: no root, nothing written, killed and counted."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml

from exactlyonce.connectors.embedded.broker import HOST, free_port
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

pytestmark = [pytest.mark.docker, pytest.mark.broker, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docker" / "production"
TAG = "exactlyonce-production:tests"
CUSTOMERS = ("ann", "bob", "cho")


@pytest.fixture
def production(image: Callable[[str], str], tmp_path: Path) -> str:
    """The image, built as its Dockerfile says, from the packages that pip finds."""
    from docker.client import DockerClient

    base, wheels = image("python"), tmp_path / "dist"
    programs = Path(sys.executable).parent
    for command in (
        [programs / "hatchling", "build", "-t", "wheel", "-d", wheels],
        [programs / "pip", "download", "-q", "--only-binary", ":all:", "-d", wheels, f"{ROOT}[metrics,postgres]"],
    ):
        subprocess.run([*map(str, command)], cwd=ROOT, check=True, capture_output=True)
    (tmp_path / "docker" / "production").mkdir(parents=True)
    for file in ("Dockerfile", "orders.py"):
        shutil.copy(FOLDER / file, tmp_path / "docker" / "production")
    DockerClient.from_env().images.build(
        path=str(tmp_path), dockerfile="docker/production/Dockerfile", tag=TAG, buildargs={"BASE": base}, rm=True,
        forcerm=True, network_mode="none",
    )  # fmt: skip
    return TAG


def test_the_image_survives_kills(
    production: str, own_broker: Callable[..., KafkaCluster], database_server: Callable[[str], Any]
) -> None:
    """Its container is killed twice, and stopped; topic and table have each order once."""
    from docker.client import DockerClient

    kafka, server, port = own_broker(), database_server("postgres"), free_port()
    for topic in ("orders", "order-totals"):
        kafka.create_topic(topic, partitions=4)
    server.execute("CREATE DATABASE contained")
    words = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]["pipeline"]["command"]
    del words[words.index("--ui") : words.index("--ui") + 2]
    words[words.index("--metrics") + 1] = f"{HOST}:{port}"
    container = DockerClient.from_env().containers.create(
        production, [*words, "--checkpoint-interval", "200ms"], network_mode="host", read_only=True,
        tmpfs={"/tmp": ""}, cap_drop=["ALL"], security_opt=["no-new-privileges"],
        environment={
            "EXACTLYONCE_BOOTSTRAP_SERVERS": kafka.bootstrap_servers, "ORDERS_DSN": server.dsn("contained"),
        },
    )  # fmt: skip

    def await_ready() -> None:
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                with urlopen(f"http://{HOST}:{port}/ready", timeout=10) as answer:
                    assert answer.status == 200
                    return
            except OSError:
                container.reload()
                assert container.status == "running", container.logs().decode()
                assert time.monotonic() < deadline, container.logs().decode()
                time.sleep(0.1)

    try:
        for round in range(3):
            container.start()
            kafka.produce("orders", [(each, json.dumps({"customer": each, "total": 1})) for each in CUSTOMERS * 100])
            await_ready()
            if round < 2:
                container.kill()
                container.wait()
        deadline = time.monotonic() + LIMIT_S
        while len(kafka.read_committed("order-totals")) < 900:
            assert time.monotonic() < deadline, container.logs().decode()
            time.sleep(0.2)
        owners = {row[0] for row in container.top(ps_args="-eo uid,pid")["Processes"]}
        assert owners == {"10001"}
        container.stop(timeout=LIMIT_S)
        assert container.wait()["StatusCode"] == 0, container.logs().decode()
        assert container.diff() in (None, []), "nothing is written but to /tmp"
    finally:
        container.remove(force=True)
    sums = [json.loads(record.value or b"") for record in kafka.read_committed("order-totals")]
    for customer in CUSTOMERS:
        assert [each["sum"] for each in sums if each["customer"] == customer] == [*range(1, 301)]
    rows = server.execute("SELECT customer, sum FROM order_totals ORDER BY customer", database="contained")
    assert [tuple(row) for row in rows] == [(customer, 300) for customer in CUSTOMERS]
    server.execute("DROP DATABASE contained WITH (FORCE)")

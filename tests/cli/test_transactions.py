"""`exactlyonce transactions`: what is listed, aborted, left and refused."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from exactlyonce.checkpoint.decision_log import DecisionLog
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.requests import drive
from exactlyonce.cli import open_transactions
from exactlyonce.cli.traces import find
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.log_requests import LogRequests
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.testing.cluster import LIMIT_S

if TYPE_CHECKING:
    from tests.cli.conftest import Orders

pytestmark = pytest.mark.broker


def killed_at(orders: Orders, failpoint: str) -> None:
    """A run that dies, workers and all, once its coordinator stands at *failpoint*."""
    fired = orders.command.folder / f"fired-{failpoint}"
    fired.mkdir()
    armed = {"EXACTLYONCE_FAILPOINTS": f"{failpoint}=stop", "EXACTLYONCE_FAILPOINTS_FIRED": str(fired)}
    command = type(orders.command)(orders.command.folder, {**orders.command.environment, **armed})
    process = command.start("run", "orders:pipeline", "--until", "latest")
    deadline = time.monotonic() + LIMIT_S
    while not (fired / failpoint).exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)  # a file of another process has no event to wait for
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=LIMIT_S)


def readers_are_held(orders: Orders) -> bool:
    """Whether the output has an open transaction."""
    topics = Topics(ClientConfig({"bootstrap.servers": orders.kafka.bootstrap_servers}))
    topic = f"{orders.name}-totals"
    held = topics.end_offsets(topic, committed=True) != topics.end_offsets(topic, committed=False)
    topics.close()
    return held


@pytest.mark.exhaustive
def test_undecided_ones_are_aborted_and_decided_ones_left(orders: Orders) -> None:
    """What a dead run had not decided is listed, aborted once --take-over allows it, and computed again by the next;
    what it had decided is left, and made visible by the next."""
    orders.kafka.create_topic(f"{orders.name}-totals", 2)
    killed_at(orders, "coordinator-checked")
    listed = json.loads(orders.command("transactions", "list", orders.name, "--json").out)
    assert [(each["state"], each["decided_in"]) for each in listed] == [("Ongoing", None)]
    assert {topic for each in listed for topic, _ in each["partitions"]} == {f"{orders.name}-totals"}
    assert readers_are_held(orders)
    refused = orders.command("transactions", "abort", orders.name)
    assert refused.code == 2
    assert "may be running" in refused.err
    done = orders.command("transactions", "abort", orders.name, "--take-over")
    assert (done.code, done.out.splitlines()[-1]) == (0, "1 transaction aborted.")
    assert listed[0]["transactional_id"] in done.out
    assert not readers_are_held(orders)
    assert "no open transactions" in orders.command("transactions", "list", orders.name).out
    killed_at(orders, "coordinator-decided")
    done = orders.command("transactions", "abort", orders.name, "--take-over", "--json")
    found = json.loads(done.out)
    assert (found["aborted"], [each["decided_in"] for each in found["left"]]) == ([], [1])
    assert readers_are_held(orders)
    assert orders.command("run", "orders:pipeline", "--until", "latest").code == 0
    assert len(orders.totals()) == 700
    assert not readers_are_held(orders)


def test_an_incarnation_that_begins_meanwhile(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its coordinator may have come after the fence: nothing is aborted then, neither of it nor of older ones."""
    orders.kafka.create_topic(f"{orders.name}-totals", 2)
    killed_at(orders, "coordinator-checked")
    config = ClientConfig({"bootstrap.servers": orders.kafka.bootstrap_servers})
    traces = find(config, orders.name)
    settled = open_transactions._settled

    def begun(log: DecisionLog, requests: LogRequests) -> History:
        other = DecisionLog(orders.name, log.topic, SystemClock())
        drive(other.open(), requests)
        drive(other.begin("other-host", 1), requests)
        return settled(log, requests)

    with monkeypatch.context() as patched:
        patched.setattr(open_transactions, "_settled", begun)
        with pytest.raises(ConfigError, match=r"A new instance of .* has begun"):
            open_transactions.abort_undecided(config, traces)
    assert readers_are_held(orders)
    aborted, left = open_transactions.abort_undecided(config, find(config, orders.name))
    assert (len(aborted), left) == (1, [])
    assert not readers_are_held(orders)


def test_a_pipeline_that_never_ran(orders: Orders) -> None:
    """It is an error that names it."""
    for action in ("list", "abort"):
        ended = orders.command("transactions", action, orders.name)
        assert ended.code == 2
        assert orders.name in ended.err

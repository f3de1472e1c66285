"""`exactlyonce transactions`: what is listed, aborted, left and refused."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer

from exactlyonce.checkpoint.decision_log import DecisionLog
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import Manifest
from exactlyonce.checkpoint.requests import drive
from exactlyonce.checkpoint.transactions.broker_answers import Outcome
from exactlyonce.cli import traces
from exactlyonce.cli.traces import find
from exactlyonce.cli.transactions import aborting, committing
from exactlyonce.connectors.kafka.client_config import ClientConfig
from exactlyonce.connectors.kafka.log_requests import LogRequests
from exactlyonce.connectors.kafka.topics import Topics
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import ConfigError, Fenced
from exactlyonce.testing.cluster import LIMIT_S

if TYPE_CHECKING:
    from tests.cli.conftest import Here, Orders


pytestmark = pytest.mark.broker


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
    orders.killed_at("coordinator-checked")
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
    orders.killed_at("coordinator-decided")
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
    orders.killed_at("coordinator-checked")
    config = ClientConfig({"bootstrap.servers": orders.kafka.bootstrap_servers})
    found = find(config, orders.name)
    settled = aborting._settled

    def begun(log: DecisionLog, requests: LogRequests) -> History:
        other = DecisionLog(orders.name, log.topic, SystemClock())
        drive(other.open(), requests)
        drive(other.begin("other-host", 1), requests)
        return settled(log, requests)

    with monkeypatch.context() as patched:
        patched.setattr(aborting, "_settled", begun)
        with pytest.raises(ConfigError, match=r"A new instance of .* has begun"):
            aborting.abort_undecided(config, found)
    assert readers_are_held(orders)
    ended = aborting.abort_undecided(config, find(config, orders.name))
    assert (len(ended.aborted), ended.left) == (1, [])
    assert not readers_are_held(orders)


def test_what_is_decided_is_shown_in_full_and_committed(orders: Orders, here: Here) -> None:
    """It is shown with its records by partition and the checkpoint that decided it; an abort of it is refused, and so
    is a commit of what nobody decided; a commit makes it visible once --take-over allows it, finalizes the checkpoint,
    and leaves nothing for the next one; the next run goes on behind it."""
    orders.kafka.create_topic(f"{orders.name}-totals", 2)
    orders.killed_at("coordinator-decided")
    (listed,) = json.loads(here("transactions", "list", orders.name, "--json").out)
    name = listed["name"]
    assert (listed["state"], listed["decided_in"], listed["checkpoint"], listed["records"]) == ("Ongoing", 1, 1, 700)
    assert 0 < listed["left_ms"] <= listed["timeout_ms"]
    shown = here("transactions", "describe", orders.name, name)
    assert f"producer      id {listed['producer_id']}, epoch {listed['epoch']}" in shown.out
    assert f"{orders.name}-totals[" in shown.out
    assert "decided       in checkpoint 1" in shown.out
    refused = here("transactions", "abort", orders.name, name, "--take-over")
    assert (refused.code, "has decided" in refused.err) == (2, True)
    refused = here("transactions", "commit", orders.name, f"{name}0", "--take-over")
    assert (refused.code, "none of what waits" in refused.err) == (2, True)
    refused = here("transactions", "commit", orders.name)
    assert (refused.code, "may be running" in refused.err) == (2, True)
    assert readers_are_held(orders)
    done = here("transactions", "commit", orders.name, name, "--take-over")
    assert (done.code, done.out.splitlines()[-1]) == (0, "Checkpoint 1 is finalized: 1 transaction committed.")
    assert (len(orders.totals()), readers_are_held(orders)) == (700, False)
    assert "nothing that is decided" in here("transactions", "commit", orders.name).out
    orders.write(7)
    assert orders.command("run", "orders:pipeline", "--until", "latest").code == 0
    assert len(orders.totals()) == 707


def test_a_run_that_begins_while_a_commit_is_under_way(
    orders: Orders, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left in peace: the commit is refused, and so is an abort; nothing is changed."""
    orders.kafka.create_topic(f"{orders.name}-totals", 2)
    orders.killed_at("coordinator-decided")
    unfinished, look = committing.unfinished, traces.find
    begun: list[Callable[[], Outcome]] = []

    def slow(*arguments: Any) -> Manifest | None:
        found = unfinished(*arguments)
        begun.append(orders.begun_elsewhere())
        return found

    def slow_look(*arguments: Any) -> traces.Traces:
        found = look(*arguments)
        begun.append(orders.begun_elsewhere())
        return found

    with monkeypatch.context() as patched:
        patched.setattr(committing, "unfinished", slow)
        refused = here("transactions", "commit", orders.name, "--take-over")
    assert (refused.code, "(process 1 on other-host) has begun since" in refused.err) == (2, True), refused
    assert begun[-1]() is Outcome.DONE, "it was not fenced"
    with monkeypatch.context() as patched:
        patched.setattr(traces, "find", slow_look)
        refused = here("transactions", "abort", orders.name, "--take-over")
    assert (refused.code, "has begun meanwhile" in refused.err) == (2, True), refused
    assert begun[-1]() is Outcome.DONE, "it was not fenced"
    assert (orders.totals(), readers_are_held(orders)) == ([], True)
    assert here("transactions", "commit", orders.name, "--take-over").code == 0
    assert len(orders.totals()) == 700


def test_a_run_that_finalizes_while_a_commit_is_under_way(
    orders: Orders, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is left to be done, which is said, and nobody is fenced for it."""
    orders.kafka.create_topic(f"{orders.name}-totals", 2)
    sleeper = orders.stopped_at("coordinator-decided")
    unfinished = committing.unfinished

    def slow(*arguments: Any) -> Manifest | None:
        found = unfinished(*arguments)
        os.kill(sleeper.pid, signal.SIGCONT)
        sleeper.communicate(timeout=LIMIT_S)
        return found

    monkeypatch.setattr(committing, "unfinished", slow)
    refused = here("transactions", "commit", orders.name, "--take-over")
    assert (refused.code, "was finalized meanwhile" in refused.err) == (2, True), refused
    assert (sleeper.returncode, len(orders.totals())) == (0, 700)


@pytest.mark.exhaustive
def test_one_of_those_that_nobody_decided(orders: Orders, here: Here) -> None:
    """It is shown with what the brokers have of it, is refused to a commit, and is aborted by its name, while another
    stays open."""
    orders.kafka.create_topic(f"{orders.name}-totals", 2)
    orders.killed_at("coordinator-checked")
    (listed,) = json.loads(here("transactions", "list", orders.name, "--json").out)
    (shown,) = json.loads(here("transactions", "describe", orders.name, listed["name"], "--json").out)
    assert (shown["decided_in"], shown["records"], shown["checkpoint"]) == (None, 700, None)
    assert sum(each["count"] for each in shown["written"]) == 700
    refused = here("transactions", "commit", orders.name, listed["name"], "--take-over")
    assert (refused.code, "No checkpoint has decided" in refused.err) == (2, True)
    other = open_transaction(orders, listed["name"].replace(":0:1.0:", ":1:1.0:"))
    more = open_transaction(orders, listed["name"].replace(":0:1.0:", ":2:1.0:"))
    done = json.loads(here("transactions", "abort", orders.name, listed["name"], "--take-over", "--json").out)
    assert [[each["name"] for each in done[key]] for key in ("aborted", "left")] == [[listed["name"]], [other, more]]
    told = here("transactions", "abort", orders.name, more, "--take-over").out.splitlines()
    assert told[-2:] == [f"1 transaction aborted: {more}", "1 transaction left that was not named."]
    assert [each["name"] for each in json.loads(here("transactions", "list", orders.name, "--json").out)] == [other]


def open_transaction(orders: Orders, name: str) -> str:
    """Leave one open under this id in the output; its producer is never closed, which would abort it."""
    producer = Producer({"bootstrap.servers": orders.kafka.bootstrap_servers, "transactional.id": name})
    producer.init_transactions(LIMIT_S)
    producer.begin_transaction()
    producer.produce(f"{orders.name}-totals", b"0")
    assert producer.flush(LIMIT_S) == 0
    return name


@pytest.mark.exhaustive
def test_a_coordinator_that_wakes_up_behind_a_commit(orders: Orders) -> None:
    """One that stood still when its decision was taken over is fenced, and ends; nothing of it comes twice."""
    orders.kafka.create_topic(f"{orders.name}-totals", 2)
    sleeper = orders.stopped_at("coordinator-decided", "--restart", "none")
    assert orders.command("transactions", "commit", orders.name, "--take-over").code == 0
    assert len(orders.totals()) == 700
    os.kill(sleeper.pid, signal.SIGCONT)
    said, _ = sleeper.communicate(timeout=LIMIT_S)
    assert sleeper.returncode == Fenced.exit_code, said
    orders.write(7)
    assert orders.command("run", "orders:pipeline", "--until", "latest").code == 0
    assert len(orders.totals()) == 707


@pytest.mark.exhaustive
def test_what_the_broker_has_aborted_meanwhile(orders: Orders) -> None:
    """A decided transaction whose time is over is shown as aborted; a commit copies its records, and finalizes."""
    orders.kafka.create_topic(f"{orders.name}-totals", 2)
    short = ("--checkpoint-timeout", "2s", "--restart-budget", "0s", "--transaction-timeout", "4s")
    orders.killed_at("coordinator-decided", *short)
    deadline = time.monotonic() + LIMIT_S
    while (listed := json.loads(orders.command("transactions", "list", orders.name, "--json").out))[0]["left_ms"]:
        assert time.monotonic() < deadline
    while listed[0]["state"] == "Ongoing":
        listed = json.loads(orders.command("transactions", "list", orders.name, "--json").out)
        assert time.monotonic() < deadline
    assert (listed[0]["decided_in"], orders.totals()) == (1, [])
    done = json.loads(orders.command("transactions", "commit", orders.name, "--take-over", "--json").out)
    assert (done["checkpoint"], list(done["fates"].values())) == (1, ["repaired"])
    assert len(orders.totals()) == 700
    assert orders.command("run", "orders:pipeline", "--until", "latest").code == 0
    assert len(orders.totals()) == 700


def test_a_pipeline_that_never_ran(orders: Orders, here: Here) -> None:
    """It is an error that names it."""
    for action in ("list", "abort", "commit"):
        ended = here("transactions", action, orders.name)
        assert ended.code == 2
        assert orders.name in ended.err

"""`exactlyonce transactions`: what is listed, aborted, left and refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from exactlyonce.checkpoint.decision_log import DecisionLog
from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.requests import Outcome
from exactlyonce.cli.commands.transactions import as_table, in_full
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.engines import pending_output as aborting
from exactlyonce.engines import pending_output as committing
from exactlyonce.engines import pipeline_resources
from exactlyonce.engines.connections import Connections
from exactlyonce.engines.pending_output import TRANSACTION, InPartition, WaitingOutput
from exactlyonce.engines.pipeline_resources import find
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.testing.cluster import LIMIT_S
from tests.cli.conftest import Orders, wait_until


@pytest.fixture
def orders(orders: Orders) -> Orders:
    orders.kafka.create_topic(f"{orders.name}-totals", 2)
    return orders


def shown(orders: Orders, action: str, *arguments: str) -> Any:
    return orders.command.done("transactions", action, orders.name, *arguments, "--json").json


@pytest.mark.exhaustive
def test_undecided_ones_are_aborted_and_decided_ones_left(orders: Orders) -> None:
    orders.killed_at("coordinator-checked")
    listed = shown(orders, "list")
    assert [(each["state"], each["decided_in"]) for each in listed] == [("Ongoing", None)]
    assert {topic for each in listed for topic, _ in each["partitions"]} == {f"{orders.name}-totals"}
    assert orders.holds_readers()
    done = orders.command.done("transactions", "abort", orders.name)
    assert done.out.splitlines()[-1] == "1 transaction aborted."
    assert listed[0]["transactional_id"] in done.out
    wait_until(lambda: not orders.holds_readers())
    assert "no open transactions" in orders.command("transactions", "list", orders.name).out
    orders.killed_at("coordinator-decided")
    found = shown(orders, "abort")
    assert (found["aborted"], [each["decided_in"] for each in found["left"]]) == ([], [1])
    assert orders.holds_readers()
    with orders.running():
        orders.command.refused("may be running", "transactions", "abort", orders.name)
    orders.ran()
    assert len(orders.totals()) == 700


def test_an_incarnation_that_begins_meanwhile(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its coordinator may have come after the fence: nothing is aborted then, of neither."""
    orders.killed_at("coordinator-checked")
    found = find(orders.config, orders.name)
    settled = aborting._settled

    def begun(connections: Connections) -> History:
        other = DecisionLog(orders.name, connections.log.topic, SystemClock())
        connections.drive(other.open())
        connections.drive(other.begin("other-host", 1))
        return settled(connections)

    with monkeypatch.context() as patched:
        patched.setattr(aborting, "_settled", begun)
        with pytest.raises(ConfigError, match=r"A new instance of .* has begun"):
            aborting.abort_undecided(orders.config, found)
    assert orders.holds_readers()
    aborted, left = aborting.abort_undecided(orders.config, find(orders.config, orders.name))
    assert (len(aborted), left) == (1, [])
    wait_until(lambda: not orders.holds_readers())


def test_what_is_decided_is_shown_in_full_and_committed(orders: Orders) -> None:
    command = orders.command
    for action in ("list", "abort", "commit"):
        command.refused(orders.name, "transactions", action, orders.name)  # it has not run yet
    orders.killed_at("coordinator-decided")
    (listed,) = shown(orders, "list")
    name = listed["name"]
    assert (listed["state"], listed["decided_in"], listed["checkpoint"], listed["records"]) == ("Ongoing", 1, 1, 700)
    assert 0 < listed["left_ms"] <= listed["timeout_ms"]
    described = command.done("transactions", "describe", orders.name, name).out
    assert f"producer      id {listed['producer_id']}, epoch {listed['epoch']}" in described
    assert f"{orders.name}-totals[" in described
    assert "decided       in checkpoint 1" in described
    command.refused("has decided", "transactions", "abort", orders.name, name)
    command.refused("does not wait", "transactions", "commit", orders.name, f"{name}0")
    assert orders.holds_readers()
    done = command.done("transactions", "commit", orders.name, name)
    assert done.out.splitlines()[-1] == "Checkpoint 1 is finalized: 1 transaction committed."
    assert len(orders.totals()) == 700
    assert "has no decided output waiting" in command.done("transactions", "commit", orders.name).out
    orders.write(7)
    orders.ran()
    assert len(orders.totals()) == 707


@pytest.mark.exhaustive
def test_a_run_that_begins_while_a_commit_is_under_way(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is left in peace: the commit is refused, and so is an abort; nothing is changed."""
    orders.killed_at("coordinator-decided")
    begun: list[Callable[[], Outcome]] = []

    def slow(asked: Callable[..., Any]) -> Callable[..., Any]:
        def asked_slowly(*arguments: Any) -> Any:
            found = asked(*arguments)
            begun.append(orders.begun_elsewhere())
            return found

        return asked_slowly

    for module, name, action, says in (
        (committing, "unfinished", "commit", "(process 1 on other-host) has begun since"),
        (pipeline_resources, "find", "abort", "has begun meanwhile"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, slow(getattr(module, name)))
            orders.command.refused(says, "transactions", action, orders.name, "--take-over")
        assert begun[-1]() is Outcome.DONE, "it was not fenced"
    assert (orders.totals_now(), orders.holds_readers()) == ([], True)
    orders.command.done("transactions", "commit", orders.name, "--take-over")
    assert len(orders.totals()) == 700


@pytest.mark.exhaustive
def test_one_of_those_that_nobody_decided(orders: Orders) -> None:
    orders.killed_at("coordinator-checked")
    (listed,) = shown(orders, "list")
    name = listed["name"]
    (described,) = shown(orders, "describe", name)
    assert (described["decided_in"], described["records"], described["checkpoint"]) == (None, 700, None)
    assert [sum(each[name] for each in described["written"]) for name in ("count", "hidden")] == [700, 700]
    orders.command.refused("No checkpoint has decided", "transactions", "commit", orders.name, name, "--take-over")
    other, more = (open_transaction(orders, name.replace(":0:1.0:", f":{subtask}:1.0:")) for subtask in (1, 2))
    done = shown(orders, "abort", name, "--take-over")
    assert [[each["name"] for each in done[key]] for key in ("aborted", "left")] == [[name], [other, more]]
    told = orders.command("transactions", "abort", orders.name, more, "--take-over").out.splitlines()
    assert told[-2:] == [f"1 transaction aborted: {more}", "1 transaction left, which the command did not name."]
    wait_until(lambda: [each["name"] for each in shown(orders, "list")] == [other])


def open_transaction(orders: Orders, name: str) -> str:
    """Leave one open under this id in the output; its producer is never closed, which would abort it."""
    config = {"transactional.id": name, "transaction.timeout.ms": LIMIT_S * 1000}
    producer = Producer(orders.config.confluent(config))
    producer.init_transactions(LIMIT_S)
    producer.begin_transaction()
    producer.produce(f"{orders.name}-totals", b"0")
    assert producer.flush(LIMIT_S) == 0
    return name


@pytest.mark.exhaustive
def test_what_the_broker_has_aborted_meanwhile(orders: Orders) -> None:
    orders.killed_at("coordinator-decided")
    (listed,) = shown(orders, "list")
    with closing(Transactions(orders.config)) as transactions:
        transactions.end_until_answered(listed["name"], listed["producer_id"], listed["epoch"], commit=False)
    wait_until(lambda: shown(orders, "list")[0]["state"] == "CompleteAbort")
    assert (shown(orders, "list")[0]["decided_in"], orders.totals()) == (1, [])
    done = shown(orders, "commit", "--take-over")
    assert (done["checkpoint"], list(done["fates"].values())) == (1, ["repaired"])
    assert len(orders.totals()) == 700
    orders.ran()
    assert len(orders.totals()) == 700


# --- output that waits, as people read it -----------------------------------------------------------------------------


PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
NOW_MS = 10_000_000
OPEN = WaitingOutput(
    name="eo:order-totals:out:0:1.0:0", kind=TRANSACTION, state="Ongoing", sink="out", subtask=0, incarnation=1,
    attempt="0", checkpoint=1, decided_in=1, records=700, started_at_ms=NOW_MS - 2_100, timeout_ms=900_000,
    producer_id=3, epoch=0, places=(InPartition("order-totals", 1, 40, 700),), next="the next run commits it",
)  # fmt: skip
PREPARED = WaitingOutput(
    name="eo-1-0-7", kind="rows", state="waits", sink="rows", subtask=2, checkpoint=7,
    started_at_ms=NOW_MS - 61_000, where="set aside in the store",
)  # fmt: skip
ROWS = WaitingOutput(
    name="rows:2:7", kind="rows", state="unknown", sink="rows", subtask=2, checkpoint=7, decided_in=8, records=1,
    started_at_ms=NOW_MS - 5_000, where="3 blocks of the checkpoint topic",
)  # fmt: skip


def test_the_table_is_that_of_the_page() -> None:
    shown = "\n".join(as_table([OPEN], NOW_MS, 100))
    assert f"```text\n{shown}\n```" in PAGE.read_text()


def test_what_waits_for_a_store() -> None:
    header, *lines = as_table([OPEN, PREPARED, ROWS], NOW_MS, 100)
    assert header.split() == ["transaction", "state", "open", "for", "left", "decided"]
    assert [line.split() for line in lines[2::2]] == [
        ["eo-1-0-7", "waits", "1m", "01s", "no"], ["rows:2:7", "unknown", "5.0", "s", "in", "checkpoint", "8"],
    ]  # fmt: skip
    assert [line.strip() for line in lines[3::2]] == [
        "sink rows, subtask 2; set aside in the store; cut at checkpoint 7",
        "sink rows, subtask 2; 3 blocks of the checkpoint topic; cut at checkpoint 7; 1 record",
    ]


def test_all_of_one() -> None:
    shown = {line[:16].strip(): line[16:] for line in [*in_full(OPEN, NOW_MS, 100)][1:]}
    assert {name: content for name, content in shown.items() if name != "since"} == {
        "kind": "transaction", "state": "Ongoing", "decided": "in checkpoint 1", "sink": "out, subtask 0",
        "written by": "incarnation 1, attempt 0", "cut at": "the barrier of checkpoint 1", "records": "700",
        "producer": "id 3, epoch 0", "left": "14m 57s, then the broker aborts it",
        "partitions": "order-totals[1] offset 40 and on, 700 records", "next": "the next run commits it",
    }  # fmt: skip
    assert shown["since"].endswith(", for 2.1 s")


def test_time_that_is_left_for_nothing() -> None:
    assert OPEN.left_ms(NOW_MS) == 897_900
    assert PREPARED.left_ms(NOW_MS) is None
    assert OPEN.left_ms(NOW_MS + 10_000_000) == 0

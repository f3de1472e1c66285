"""`exactlyonce cancel`: a run ends without another checkpoint, and the next one goes on from the newest."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from exactlyonce.checkpoint.records.history import History
from exactlyonce.checkpoint.records.manifest import TopicInfo
from exactlyonce.checkpoint.requests import Outcome, Procedure
from exactlyonce.checkpoint.succession import last_look
from exactlyonce.connectors.kafka.checkpoint_topic.log_reader import read_topic
from exactlyonce.connectors.kafka.checkpoint_topic.topic import find_topic
from exactlyonce.engines import pipeline_resources, run_requests
from exactlyonce.engines.connections import connected
from exactlyonce.testing.cluster import LIMIT_S
from tests.cli.conftest import Orders, armed, files, wait_until

DELETING = ("--retention", "delete_on_cancellation")


def test_checkpoints_are_kept(orders: Orders) -> None:
    with orders.running() as run:
        cancelled = orders.command.done("cancel", "orders:pipeline")
        assert run.wait() == 0
    assert orders.history().unfinalized is None
    assert orders.newest().kind == "checkpoint"
    assert f"{orders.newest().checkpoint})" in cancelled.out
    orders.write(70)
    orders.ran()
    assert len(orders.totals()) == 770
    assert max(map(int, filter(None, orders.totals()))) == 110


def test_checkpoints_are_deleted_where_the_run_says_so(orders: Orders) -> None:
    with orders.running(*DELETING) as run:
        first = find_topic(orders.config, orders.name).topic_id
        cancelled = orders.command.done("cancel", orders.name, "--json")
        assert run.wait() == 0
    assert cancelled.json == {"pipeline": orders.name, "checkpoints": [], "deleted": True}
    assert find_topic(orders.config, orders.name).topic_id != first
    left = orders.history()
    assert (left.retained, left.incarnation_latest, left.condemned) == ([], 2, False)
    visible = len(orders.totals())
    orders.ran()
    assert len(orders.totals()) == visible + 700


@pytest.mark.exhaustive
def test_two_who_cancel(orders: Orders, tmp_path: Path) -> None:
    """A second request counts as done too, and waits until the first has deleted what is to be deleted."""
    with orders.running(*DELETING) as run, ThreadPoolExecutor(1) as other:
        topic, seen, living = living_run(orders)  # as the other one has seen it, too
        cancelling = orders.command.start("cancel", orders.name, "--json", **armed(tmp_path, "erasing-topic", "stop"))
        assert run.wait() == 0
        wait_until((tmp_path / "fired" / "erasing-topic").exists)
        found = other.submit(run_requests.cancel, orders.config, topic, seen, living, LIMIT_S * 1000, print)
        with pytest.raises(TimeoutError):
            found.result(5)
        cancelling.send_signal(signal.SIGCONT)
        out, err = cancelling.communicate(timeout=LIMIT_S)
        assert (cancelling.returncode, '"deleted":true' in out.replace(" ", "")) == (0, True), err
        assert found.result(LIMIT_S).latest is None


def living_run(orders: Orders) -> tuple[TopicInfo, History, Any]:
    topic, seen = read_topic(orders.config, orders.name)
    living = run_requests.living_run(seen)
    assert living is not None
    return topic, seen, living


def condemned(orders: Orders) -> tuple[TopicInfo, History]:
    """A run was cancelled, and nobody has begun to delete its checkpoints."""
    with orders.running(*DELETING) as run:
        topic, seen, living = living_run(orders)
        found = run_requests.cancel(orders.config, topic, seen, living, LIMIT_S * 1000, print)
        assert run.wait() == 0
    assert found.condemned
    return topic, found


@pytest.mark.exhaustive
def test_a_run_that_begins_while_all_is_deleted(orders: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is left in peace by whoever has made the new topic, and sleeps before it is to begin there."""
    topic, found = condemned(orders)
    begun: list[Callable[[], Outcome]] = []

    def slow(*arguments: Any) -> Procedure[History]:
        begun.append(orders.begun_elsewhere())
        return last_look(*arguments)

    monkeypatch.setattr(pipeline_resources, "last_look", slow)
    pipeline_resources.erase_condemned(orders.config, topic, found, print)
    assert begun[0]() is Outcome.DONE, "it was not fenced"


@pytest.mark.exhaustive
def test_a_savepoint_keeps_all(orders: Orders) -> None:
    """Nothing is deleted while one is kept: it lies where the checkpoints do."""
    with orders.running(*DELETING) as run:
        number = orders.taken()
        cancelled = orders.command.done("cancel", orders.name)
        assert run.wait() == 0
    assert f"with savepoints {number}" in cancelled.said
    assert number in orders.history().manifests
    orders.ran()
    assert len(orders.totals()) == 700


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "finisher"), [("erasing-blocks", "run"), ("erasing-topic", "cancel"), ("erasing-topic", "reset")]
)
def test_a_kill_in_the_middle_of_the_deletion(orders: Orders, tmp_path: Path, place: str, finisher: str) -> None:
    """The next command or run finishes it. A transactional id tells of it where the topic is gone."""
    storage = ("--checkpoint-storage", (tmp_path / "blocks").as_uri())
    (tmp_path / "blocks").mkdir()
    with orders.running(*DELETING, *storage) as run:
        assert files(tmp_path / "blocks")
        killed = orders.command.process("cancel", orders.name, **armed(tmp_path, place))
        assert killed.code == -signal.SIGKILL, killed
        assert run.wait() == 0
    assert not files(tmp_path / "blocks")
    visible, gone = len(orders.totals()), place == "erasing-topic"
    if finisher == "cancel":
        again = orders.command("cancel", orders.name)
        assert (again.code, "has no checkpoints" in again.said) == ((2, True) if gone else (0, False))
    elif finisher == "reset":
        orders.command.done("reset", orders.name, "--yes")
    orders.ran(*storage)
    assert len(orders.totals()) == visible + 700
    assert orders.incarnation().incarnation > 1


def test_who_is_not_asked(orders: Orders) -> None:
    orders.command.refused("has no checkpoints", "cancel", orders.name)
    orders.ran()
    before = orders.history().incarnations
    orders.command.refused("does not run", "cancel", orders.name)
    assert orders.history().incarnations == before
    with connected(orders.config, orders.name, None, print) as connections:
        connections.drive(connections.log.open())
        connections.drive(connections.log.begin("other-host", 17, bounded=True))
        for command in ("cancel", "savepoint"):
            orders.command.refused("process 17 on other-host, a bounded command, which takes no", command, orders.name)


def test_what_the_next_run_halts_for(orders: Orders, tmp_path: Path) -> None:
    orders.change(
        ("tuple[int, int]", "tuple[int, Order]"),
        ("return total, total", "return total, order"),
        ("import KafkaSink", "import FileSink"),
        (f'KafkaSink("{orders.name}-totals")', f'FileSink("{tmp_path / "out"}", format="jsonl")'),
    )
    with orders.running(*DELETING) as run:
        cancelled = orders.command.done("cancel", orders.name)
        assert run.wait() == 0
    assert "the rows and the ledger of out stay: it halts until both are emptied" in cancelled.out
    orders.run_refused("ledger", code=6)
